"""Convert images to PNG files or to frames of a video, and back."""

import io
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Final, Self

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from diskreplay import FormatError
from diskreplay.interop.exchange.foreign import check_memory

Bytes = NDArray[np.uint8]

_LEVEL = 1  # the level of PNG compression: higher levels take twice the time, and make files a few percent smaller
_IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF")  # Pillow would run programs for some other formats


def as_rows_first(images: NDArray[Any], channels_first: bool) -> NDArray[Any]:
    """Return images as ``(T, height, width, channels)``; if ``channels_first``, ``images`` has channels in axis 1."""
    return np.moveaxis(images, 1, -1) if channels_first else images


def as_stored(images: NDArray[Any], channels_first: bool) -> NDArray[Any]:
    """Return images ``(T, height, width, channels)`` as in the store: channels become axis 1 if ``channels_first``."""
    return np.ascontiguousarray(np.moveaxis(images, -1, 1)) if channels_first else images


def to_png(images: Bytes) -> list[bytes]:
    return [_to_png(image) for image in images]


def _to_png(image: Bytes) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image).save(file, "png", compress_level=_LEVEL)
    return file.getvalue()


def from_files(files: Iterable[bytes | None], shape: Sequence[int], what: str) -> Bytes:
    """Decode the bytes of image files to an array ``(T, *shape)``; ``shape`` is (height, width, channels)."""
    return np.stack([_from_file(file, tuple(shape), what) for file in files])


def _from_file(file: bytes | None, shape: tuple[int, ...], what: str) -> Bytes:
    if file is None:
        raise FormatError(f"{what} has a row without an image")
    try:
        with Image.open(io.BytesIO(file), formats=_IMAGE_FORMATS) as image:
            if (image.height, image.width) != shape[:2]:  # Pillow reads these sizes before it unpacks the image
                found = (image.height, image.width, len(image.getbands()))
                raise FormatError(f"{what} has an image of the shape {found}, but info.json says {shape}")
            pixels = np.asarray(image.convert("RGB") if image.mode == "P" else image)
    except (UnidentifiedImageError, OSError, SyntaxError) as error:
        raise FormatError(f"{what} has a row that is not an image: {error}") from None
    if pixels.dtype != np.uint8:
        raise FormatError(f"{what} has images of {pixels.dtype}, which are not supported")
    pixels = pixels[:, :, None] if pixels.ndim == 2 else pixels
    if pixels.shape != shape:
        raise FormatError(f"{what} has an image of the shape {pixels.shape}, but info.json says {shape}")
    return pixels


Size = tuple[int, ...]

CODEC: Final = "libx264"
_VIDEO_FORMATS = {".mkv": "matroska", ".webm": "matroska", ".avi": "avi"}
# The settings of LeRobot's own encoder. Every second frame is a key frame, so that a single frame is decoded quickly.
_ENCODING = {"g": "2", "crf": "18"}


class VideoReader:
    """A video file with access to frames by their times.

    FormatError is raised if the file is not a video, or its frames do not have the ``size`` (height, width).
    """

    def __init__(self, path: Path, size: Size) -> None:
        self._path = path
        try:
            # The suffix determines the format. If FFmpeg guessed the format, a file could be a playlist of other files.
            self._container = av.open(
                str(path), format=_VIDEO_FORMATS.get(path.suffix, "mp4"), options={"protocol_whitelist": "file"}
            )
        except (OSError, av.FFmpegError) as error:
            raise FormatError(f"{path} cannot be read as a video: {error}") from None
        if not self._container.streams.video:
            self._container.close()
            raise FormatError(f"{path} has no video")
        self._stream = self._container.streams.video[0]
        if (found := (self._stream.height, self._stream.width)) != tuple(size):
            self._container.close()
            raise FormatError(f"{path} has frames of {found}, but info.json says {tuple(size)}")
        self._stream.thread_type = "AUTO"
        self._frames = self._decode()
        self._before: av.VideoFrame | None = None
        self._after: av.VideoFrame | None = next(self._frames, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._container.close()

    def frames(self, times: Sequence[float], tolerance_s: float) -> Bytes:
        """Return the frame nearest to each of the ascending ``times``, in seconds, as ``(T, height, width, 3)``.

        FormatError is raised if a time has no frame within ``tolerance_s`` seconds.
        """
        nbytes = len(times) * self._stream.height * self._stream.width * 3
        check_memory(nbytes, f"{self._path}: an episode of {len(times)} frames")
        if self._before is not None and _time(self._before) > times[0]:
            self._seek(times[0])
        return np.stack([self._nearest(time, tolerance_s).to_ndarray(format="rgb24") for time in times])

    def _seek(self, time: float) -> None:
        self._container.seek(int(time / (self._stream.time_base or 1)), stream=self._stream)
        self._frames = self._decode()
        self._before, self._after = None, next(self._frames, None)

    def _nearest(self, time: float, tolerance_s: float) -> av.VideoFrame:
        while self._after is not None and _time(self._after) < time:
            self._before, self._after = self._after, next(self._frames, None)
        near = [frame for frame in (self._before, self._after) if frame is not None]
        best = min(near, key=lambda frame: abs(_time(frame) - time), default=None)
        if best is None or abs(_time(best) - time) > tolerance_s:
            raise FormatError(f"{self._path} has no frame at {time:.4f} s")
        return best

    def _decode(self) -> Iterator[av.VideoFrame]:
        try:
            yield from self._container.decode(self._stream)
        except av.FFmpegError as error:
            raise FormatError(f"{self._path} is damaged: {error}") from None


def _time(frame: av.VideoFrame) -> float:
    return -1.0 if frame.time is None else frame.time


class VideoWriter:
    """Writes an H.264 video, frame by frame; ``size`` is (height, width)."""

    def __init__(self, path: Path, fps: float, size: Size) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._container, self.count, self.nbytes = av.open(str(path), "w"), 0, 0
        self._rate = Fraction(fps).limit_denominator(1001)
        self._stream = self._container.add_stream(CODEC, rate=self._rate, options=dict(_ENCODING))
        self._stream.height, self._stream.width = size
        self._stream.pix_fmt = pixel_format(size)

    def add(self, images: Bytes) -> None:
        """Append frames, ``(T, height, width, 3)``."""
        for image in images:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")
            frame.pts, frame.time_base = self.count, 1 / self._rate
            self.count += 1
            self._mux(frame)

    def finish(self) -> None:
        """Write the frames that are still in the encoder's buffer."""
        self._mux(None)

    def close(self) -> None:
        self._container.close()

    def _mux(self, frame: av.VideoFrame | None) -> None:
        for packet in self._stream.encode(frame):
            self.nbytes += packet.size
            self._container.mux(packet)


def pixel_format(size: Size) -> str:
    """Return the pixel format; yuv420p needs an even height and width."""
    return "yuv444p" if any(side % 2 for side in size) else "yuv420p"


def video_info(size: Size, fps: float) -> dict[str, object]:
    height, width = size
    return {
        "video.height": height,
        "video.width": width,
        "video.codec": "h264",
        "video.pix_fmt": pixel_format(size),
        "video.is_depth_map": False,
        "video.fps": fps,
        "video.channels": 3,
        "has_audio": False,
    }
