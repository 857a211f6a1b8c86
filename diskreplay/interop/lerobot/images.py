"""Images as PNG files in a column, and back."""

import io
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from diskreplay import FormatError

Bytes = NDArray[np.uint8]

# The least that compresses: higher levels take twice the time for a few percent.
_LEVEL = 1
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF")  # others call programs, or are never of a data set


def as_rows_first(images: NDArray[Any], channels_first: bool) -> NDArray[Any]:
    """Return images ``(T, height, width, channels)`` of ones that may have their channels in front."""
    return np.moveaxis(images, 1, -1) if channels_first else images


def as_stored(images: NDArray[Any], channels_first: bool) -> NDArray[Any]:
    """Return images as a store has them of ones ``(T, height, width, channels)``."""
    return np.ascontiguousarray(np.moveaxis(images, -1, 1)) if channels_first else images


def to_png(images: Bytes) -> list[bytes]:
    """Return each image ``(T, height, width, channels)`` as the bytes of a PNG file."""
    return [_to_png(image) for image in images]


def _to_png(image: Bytes) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image).save(file, "png", compress_level=_LEVEL)
    return file.getvalue()


def from_files(files: Iterable[bytes | None], shape: Sequence[int], what: str) -> Bytes:
    """Return the images ``(T, height, width, channels)`` of files of the shape ``(height, width, channels)``.

    Raises
    ------
    FormatError
        A file is missing, is no image, or has another shape.
    """
    return np.stack([_from_file(file, tuple(shape), what) for file in files])


def _from_file(file: bytes | None, shape: tuple[int, ...], what: str) -> Bytes:
    if file is None:
        raise FormatError(f"{what} has a row without an image")
    try:
        with Image.open(io.BytesIO(file), formats=_FORMATS) as image:
            if (image.height, image.width) != shape[:2]:  # before it is unpacked
                found = (image.height, image.width, len(image.getbands()))
                raise FormatError(f"{what} has an image of the shape {found}, and info.json says {shape}")
            pixels = np.asarray(image.convert("RGB") if image.mode == "P" else image)
    except (UnidentifiedImageError, OSError, SyntaxError) as error:
        raise FormatError(f"{what} has a row that is no image: {error}") from None
    if pixels.dtype != np.uint8:
        raise FormatError(f"{what} has images of {pixels.dtype}, which are not read")
    pixels = pixels[:, :, None] if pixels.ndim == 2 else pixels
    if pixels.shape != shape:
        raise FormatError(f"{what} has an image of the shape {pixels.shape}, and info.json says {shape}")
    return pixels
