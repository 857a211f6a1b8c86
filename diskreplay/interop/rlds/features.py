"""Features of TFDS: their names, their descriptions in features.json, and their values in an example.

PNG and JPEG images are decoded to the same pixels as by TensorFlow.
"""

import io
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from diskreplay import Field, FormatError, MissingExtra, Schema, SchemaError
from diskreplay.interop.exchange.episode_data import EXTRA, OBS, is_obs, is_part
from diskreplay.interop.exchange.foreign import DTYPES, check_claim
from diskreplay.interop.rlds.records import Values

NAME = "rlds"
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # Pillow's modes for uint8 images, by the number of channels
STEPS, OBSERVATION, DISCOUNT, STEP_DISCOUNT = "steps/", "observation", "discount", "step_discount"
FIRST, LAST, TERMINAL = "is_first", "is_last", "is_terminal"
FLAGS = (FIRST, LAST, TERMINAL)
INFO, FEATURES = "dataset_info.json", "features.json"


def feature_names(schema: Schema) -> dict[str, str]:
    """Return each leaf's name in an example, by path; raise SchemaError for a name that RLDS uses itself."""
    found: dict[str, str] = {}
    for path in schema.step_leaves:
        part, _, inside = path.partition("/")
        if part == OBS:
            found[path] = f"{STEPS}{OBSERVATION}{path.removeprefix(OBS)}"
        elif part == EXTRA:
            found[path] = f"{STEPS}{DISCOUNT if inside == STEP_DISCOUNT else inside}"
        else:
            found[path] = f"{STEPS}{path}"
    for path, name in found.items():
        inside = name.removeprefix(STEPS)
        if inside in FLAGS or (is_part(inside, OBSERVATION) and not is_obs(path)):
            raise SchemaError(f"the name of {path} is taken in a step of RLDS; give the field another name")
    return found


Json = Any
_PACKAGE = "tensorflow_datasets.core.features"
_PLAIN_INTEGERS = 16  # longer arrays of integers are written as bytes, to take less space
_NEVER_PACKED = ("uint32", "uint64")  # TFDS cannot read values of these dtypes as bytes
_LEAST = 1 << 20


class Feature(NamedTuple):
    """The description of one value of a step or of an episode.

    Attributes
    ----------
    kind : str
        The kind of the value: "tensor", "image" or "text".
    shape : tuple of int
        The shape of a value, with -1 for a size that may differ from value to value.
    dtype : numpy.dtype
        The dtype of a value; object for texts.
    encoding : str
        How a value is packed: "none", "bytes" or "zlib" for tensors; "png" or "jpeg" for images.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    encoding: str

    def decode(self, values: Values, count: int, name: str) -> Any:
        try:
            if self.kind == "text":
                return [bytes(text).decode("utf-8", "replace") for text in _as_many(values, count)]
            if self.kind == "image":
                return np.stack([_decode_image(data, self.shape, self.dtype) for data in _as_many(values, count)])
            if self.encoding != "none":
                if self.encoding == "bytes" and isinstance(values, np.ndarray) and values.dtype.kind == "V":
                    return values.view(self.dtype).reshape(count, *self.shape)
                return np.stack([self._unpacked(data) for data in _as_many(values, count)])
            return np.asarray(values).astype(self.dtype).reshape(count, *self.shape)
        except (ValueError, TypeError, OSError, SyntaxError, zlib.error) as error:
            raise FormatError(f"the values of {name} are damaged: {error}") from None

    def _unpacked(self, data: Any) -> NDArray[Any]:
        raw = data
        if self.encoding == "zlib":
            is_any = -1 in self.shape
            most = (len(data) << 10) + _LEAST if is_any else math.prod(self.shape) * self.dtype.itemsize
            raw = zlib.decompressobj().decompress(data, most + 1)
        return np.frombuffer(raw, self.dtype).reshape(self.shape)

    def encode(self, rows: NDArray[Any]) -> Sequence[bytes] | NDArray[Any]:
        """Return rows in the form that `make_example` takes: bytes for each row, or the numbers themselves."""
        if self.kind == "image":
            return [_encode_png(row) for row in rows]
        return rows if self.encoding == "none" else [row.tobytes() for row in rows]

    def to_json(self) -> Json:
        shape = {"dimensions": [str(size) for size in self.shape]} if self.shape else {}
        if self.kind == "image":
            name, settings = "image_feature.Image", {"shape": shape, "dtype": self.dtype.name, "encodingFormat": "png"}
        else:
            name, settings = (
                "tensor_feature.Tensor",
                {"shape": shape, "dtype": self.dtype.name, "encoding": self.encoding},
            )
        return {"pythonClassName": f"{_PACKAGE}.{name}", self.kind: settings}


def _as_many(values: Values, count: int) -> list[bytes]:
    if len(values) != count:
        raise ValueError(f"{len(values)} of {count}")
    if isinstance(values, np.ndarray) and values.dtype.kind != "V":
        raise ValueError("they are numbers, and bytes are needed")
    return values if isinstance(values, list) else values.tolist()


def feature_of(field: Field) -> Feature:
    """Return a feature that keeps the values of a field exactly, although examples have only float32 and int64."""
    if field.dtype == np.uint8 and len(field.shape) == 3 and field.shape[-1] in _MODES:
        return Feature("image", field.shape, field.dtype, "png")
    is_long = field.dtype.kind != "f" and int(np.prod(field.shape)) > _PLAIN_INTEGERS
    packed = (is_long or field.dtype == np.float64) and field.dtype.name not in _NEVER_PACKED
    return Feature("tensor", field.shape, field.dtype, "bytes" if packed else "none")


def features_dict(inner: Mapping[str, Json]) -> Json:
    return {"pythonClassName": f"{_PACKAGE}.features_dict.FeaturesDict", "featuresDict": {"features": dict(inner)}}


def dataset_of(feature: Json) -> Json:
    return {
        "pythonClassName": f"{_PACKAGE}.dataset_feature.Dataset",
        "sequence": {"feature": feature, "length": "-1"},
    }


def read_features(node: Json, path: str = "") -> dict[str, Feature]:
    """Return the features in ``node``, a part of features.json, by the name of the feature in an example."""
    if "featuresDict" in node:
        found: dict[str, Feature] = {}
        for key, inner in node["featuresDict"].get("features", {}).items():
            found |= read_features(inner, f"{path}/{key}" if path else key)
        return found
    if "sequence" in node and path == "steps":
        return read_features(node["sequence"]["feature"], path)
    if "text" in node:
        return {path: Feature("text", (), np.dtype(object), "none")}
    if "classLabel" in node:
        return {path: Feature("tensor", (), np.dtype(np.int64), "none")}
    for kind, encoding in (("tensor", "encoding"), ("image", "encodingFormat")):
        if kind in node:
            settings = node[kind]
            if settings["dtype"] in ("string", "object"):
                return {path: Feature("text", (), np.dtype(object), "none")}
            shape = tuple(int(size) for size in settings.get("shape", {}).get("dimensions", []))
            if settings["dtype"] not in DTYPES:
                raise SchemaError(f"{path} is of {settings['dtype']}, which cannot be stored")
            return {path: Feature(kind, shape, np.dtype(settings["dtype"]), settings.get(encoding, "none").lower())}
    raise SchemaError(f"{path} is a {node.get('pythonClassName', '?').rpartition('.')[2]}, which cannot be stored")


# --- images ----------------------------------------------------------------------------------------------------------


def _decode_image(data: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
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
    mode = _MODES.get(channels, image.mode)
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


def _encode_png(row: NDArray[Any]) -> bytes:
    """Return the bytes of a PNG file of an image, ``(height, width, channels)`` uint8."""
    packed = io.BytesIO()
    Image.fromarray(row[..., 0] if row.shape[-1] == 1 else row, _MODES[row.shape[-1]]).save(packed, "png")
    return packed.getvalue()
