"""Features of TFDS: their names, their descriptions in features.json, and their values in an example."""

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diskreplay import Field, FormatError, Schema, SchemaError
from diskreplay.interop.exchange.episode_data import EXTRA, OBS, is_obs
from diskreplay.interop.rlds.images import MODES, decode_image, encode_png
from diskreplay.interop.rlds.records import Values

NAME = "rlds"
STEPS, OBSERVATION, DISCOUNT, STEP_DISCOUNT = "steps/", "observation", "discount", "step_discount"
FIRST, LAST, TERMINAL = "is_first", "is_last", "is_terminal"
FLAGS = (FIRST, LAST, TERMINAL)
INFO, FEATURES = "dataset_info.json", "features.json"


def is_at(name: str, above: str) -> bool:
    return name == above or name.startswith(f"{above}/")


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
        if inside in FLAGS or (is_at(inside, OBSERVATION) and not is_obs(path)):
            raise SchemaError(f"the name of {path} is taken in a step of RLDS; give the field another name")
    return found


Json = Any
_PACKAGE = "tensorflow_datasets.core.features"
# The accepted dtypes are listed, since some libraries register further dtypes with NumPy, such as bfloat16.
_DTYPES = {
    "bool",
    "float16",
    "float32",
    "float64",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
}
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
                return np.stack([decode_image(data, self.shape, self.dtype) for data in _as_many(values, count)])
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
            return [encode_png(row) for row in rows]
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
    if field.dtype == np.uint8 and len(field.shape) == 3 and field.shape[-1] in MODES:
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
            if settings["dtype"] not in _DTYPES:
                raise SchemaError(f"{path} is of {settings['dtype']}, which cannot be stored")
            return {path: Feature(kind, shape, np.dtype(settings["dtype"]), settings.get(encoding, "none").lower())}
    raise SchemaError(f"{path} is a {node.get('pythonClassName', '?').rpartition('.')[2]}, which cannot be stored")
