"""Functions that find the fields with images, and convert frames to PNG, GIF or MP4."""

import io
from fractions import Fraction
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import MissingExtra, ReplayError
from diskreplay.schema.spaces import Field

ROW = 8  # A row of a strip has this number of frames.
_VIDEO_CODECS: Final = ("libx264", "libopenh264", "mpeg4")  # the first is the best


def is_image(leaf: Field) -> bool:
    """Return whether a field may hold images: two or three axes, and at least two axes that are longer than 1."""
    return len(leaf.shape) in (2, 3) and sorted(leaf.shape)[-2] > 1


def as_images(rows: NDArray[Any]) -> NDArray[np.uint8]:
    """Return n frames as pictures: (n, height, width) in grey, or (n, height, width, 3) in colour.

    Unless a frame has three channels, only the last channel is shown, such as the newest image of a stack. If the dtype
    is not uint8, the values are scaled so that the smallest value becomes 0 and the largest 255; NaN and infinity
    become 0.
    """
    if rows.ndim == 4:
        if rows.shape[1] < min(rows.shape[2:]):  # the channels are the first axis of a frame
            rows = np.moveaxis(rows, 1, -1)
        if rows.shape[-1] != 3:
            rows = rows[..., -1]
    if rows.dtype == np.uint8:
        return np.array(rows)
    numbers = rows.astype(np.float64)
    shown = np.isfinite(numbers)
    low, high = (numbers[shown].min(), numbers[shown].max()) if shown.any() else (0.0, 1.0)
    scaled = (np.where(shown, numbers, low) - low) / ((high - low) or 1.0)
    return np.round(255 * scaled).astype(np.uint8)


def spread(count: int, most: int) -> list[int]:
    """Return the indices of at most ``most`` of ``count`` frames, evenly spaced from the first to the last frame."""
    found: list[int] = np.unique(np.linspace(0, count - 1, min(most, count)).round().astype(int)).tolist()
    return found


def strip(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    count, height, width = images.shape[:3]
    columns = min(count, ROW)
    lines = -(-count // columns)
    sheet = np.full((lines * (height + 1) - 1, columns * (width + 1) - 1, *images.shape[3:]), 255, np.uint8)
    for at, image in enumerate(images):
        top, left = at // columns * (height + 1), at % columns * (width + 1)
        sheet[top : top + height, left : left + width] = image
    return sheet


def smaller(images: NDArray[np.uint8], most: int) -> NDArray[np.uint8]:
    """Return the pictures reduced to at most ``most`` pixels per side. Each pixel is the mean of a square block.

    Pictures whose height or width is less than the side of a block are returned unchanged.
    """
    count, height, width = images.shape[:3]
    block = -(-max(height, width) // most)
    if block == 1 or min(height, width) < block:
        return images
    height, width = height // block, width // block
    blocks = images[:, : height * block, : width * block].reshape(count, height, block, width, block, *images.shape[3:])
    means: NDArray[np.float64] = blocks.mean((2, 4))
    return means.round().astype(np.uint8)


def png(image: NDArray[np.uint8]) -> bytes:
    with MissingExtra.raised_for("a picture of frames", "plot"):
        from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def gif(images: NDArray[np.uint8], fps: float) -> bytes:
    with MissingExtra.raised_for("a picture of frames", "plot"):
        from PIL import Image

    first, *others = map(Image.fromarray, images)
    file = io.BytesIO()
    first.save(file, "GIF", save_all=True, append_images=others, duration=round(1000 / fps), loop=0)
    return file.getvalue()


def mp4(images: NDArray[np.uint8], fps: float) -> bytes:
    """Return the bytes of an MP4 with ``fps`` pictures a second: H.264, or MPEG-4 if PyAV cannot encode H.264.

    The codecs need even sizes, so an odd height or width gets its last row or column twice.
    """
    with MissingExtra.raised_for("a film of frames", "video"):
        import av

    count, height, width = images.shape[:3]
    if images.ndim == 3:
        images = np.broadcast_to(images[..., None], (count, height, width, 3))
    padded = np.pad(images, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    codec = next((name for name in _VIDEO_CODECS if name in av.codecs_available), None)
    if codec is None:
        raise ReplayError(
            f"this PyAV has no encoder of {', '.join(_VIDEO_CODECS)}: install PyAV from its wheels "
            '(pip install --force-reinstall "av"), or write a GIF instead'
        )
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        options = {"crf": "18"} if codec == "libx264" else {}  # visually lossless
        stream = container.add_stream(codec, rate=Fraction(fps).limit_denominator(1000), options=options)
        stream.height, stream.width, stream.pix_fmt = *padded.shape[1:3], "yuv420p"  # every player supports this format
        for image in padded:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()
