"""Decode PNG and JPEG images of TFDS to the same pixels as TensorFlow."""

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from diskreplay import MissingExtra
from diskreplay.interop.exchange.foreign import check_claim

MODES = {1: "L", 3: "RGB", 4: "RGBA"}
"""Pillow's modes for uint8 images, by the number of channels."""


def decode_image(data: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return the pixels of a PNG or JPEG image; -1 in ``shape`` stands for any size.

    Raises
    ------
    ValueError, OSError, SyntaxError
        The image is damaged, or does not have this shape and dtype.
    """
    sides, channels = shape[:2], shape[-1]
    with Image.open(io.BytesIO(data), formats=("PNG", "JPEG")) as image:
        if -1 not in sides and (image.height, image.width) != sides:
            raise ValueError(f"an image has the sides {image.height, image.width}, not {sides}")
        check_claim(4 * image.height * image.width, len(data), "an image")
        if dtype == np.uint8:
            pixels = _decode_bytes(data, image, channels)
        elif dtype == np.float32 and image.mode == "RGBA":  # TFDS stores each float32 as an RGBA pixel
            pixels = np.asarray(image).view("<f4")
        elif dtype == np.uint16 and image.mode.startswith("I") and channels == 1:
            pixels = np.asarray(image).astype(dtype)
        else:
            raise ValueError(f"an image of Pillow's mode {image.mode} cannot be read as {dtype} of shape {shape}")
        return pixels.reshape(image.height, image.width, channels)


def _decode_bytes(data: Any, image: Image.Image, channels: int) -> NDArray[Any]:
    mode = MODES.get(channels, image.mode)
    if image.format == "JPEG" and image.mode in ("L", "RGB") and mode in ("L", "RGB"):
        return _decode_jpeg(data, image, "GRAY" if mode == "L" else mode)
    # TensorFlow and Pillow make all other conversions in the same way: both add or drop the opacity, and repeat gray in
    # each channel.
    if mode != image.mode and (mode == "L" or image.mode.startswith("I")):
        raise ValueError(f"an image of Pillow's mode {image.mode} cannot be read as bytes with {channels} channels")
    return np.asarray(image.convert(mode))


def _decode_jpeg(data: Any, image: Image.Image, colors: str) -> NDArray[Any]:
    with MissingExtra.raised_for("a JPEG image of RLDS", "rlds"):
        # Pillow does not have TensorFlow's fast cosine transform. Pillow's pixels would differ by up to 17 of 255.
        import simplejpeg
    try:
        return np.asarray(simplejpeg.decode_jpeg(data, colors, fastdct=True, fastupsample=False))
    except ValueError:
        image.load()  # raises for a truncated file, but not for stray bytes between the segments of a JPEG file
        return np.asarray(simplejpeg.decode_jpeg(data, colors, fastdct=True, fastupsample=False, strict=False))


def encode_png(row: NDArray[Any]) -> bytes:
    """Return the bytes of a PNG file of an image, ``(height, width, channels)`` uint8."""
    packed = io.BytesIO()
    Image.fromarray(row[..., 0] if row.shape[-1] == 1 else row, MODES[row.shape[-1]]).save(packed, "png")
    return packed.getvalue()
