"""TFRecord files of tf.train.Example messages, read and written without TensorFlow."""

import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import crc32c
import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from diskreplay import FormatError
from diskreplay.interop.exchange.foreign import check_memory

# A feature is a list of bytes, or numbers, float32 or int64.
Values = list[bytes] | NDArray[Any]

_MASK_DELTA = 0xA282EAD8
_LENGTH, _SUM = struct.Struct("<Q"), struct.Struct("<I")


def records(file: Path) -> Iterator[bytes]:
    """Yield the records of a file.

    Raises
    ------
    FormatError
        It is damaged; the message has the place.
    """
    size = file.stat().st_size
    with open(file, "rb") as opened:
        while opened.tell() < size:
            start = opened.tell()
            header = opened.read(_LENGTH.size)
            _check(file, start, header, opened.read(_SUM.size), _LENGTH.size)
            length = _LENGTH.unpack(header)[0]
            if length > size - start:
                raise FormatError(f"{file} is damaged: the record at byte {start} goes beyond the end of the file")
            check_memory(length, f"{file}: the record at byte {start}")
            data = opened.read(length)
            _check(file, start, data, opened.read(_SUM.size), length)
            yield data


def _check(file: Path, start: int, data: bytes, checksum: bytes, length: int) -> None:
    if len(data) != length or checksum != _masked(data):
        raise FormatError(f"{file} is damaged: the record at byte {start} does not have its checksum")


def _masked(data: bytes) -> bytes:
    crc = crc32c.crc32c(data)
    return _SUM.pack((((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF)


def write_record(file: BinaryIO, data: bytes) -> None:
    """Append a record to a file."""
    header = _LENGTH.pack(len(data))
    file.write(b"".join((header, _masked(header), data, _masked(data))))


def parse_example(data: bytes, wanted: Collection[str] | None = None) -> dict[str, Values]:
    """Return the features of an example by their names, or only those that are wanted.

    Raises
    ------
    FormatError
        The bytes are no example.
    """
    example = _example_class()()
    try:
        example.ParseFromString(data)
    except DecodeError as error:
        raise FormatError(f"a record is not an example of TensorFlow: {error}") from None
    found: dict[str, Values] = {}
    for name, feature in example.features.feature.items():
        if wanted is not None and name not in wanted:
            continue
        if feature.WhichOneof("kind") == "float_list":
            found[name] = np.array(feature.float_list.value, np.float32)
        elif feature.WhichOneof("kind") == "int64_list":
            found[name] = np.array(feature.int64_list.value, np.int64)
        else:
            found[name] = list(feature.bytes_list.value)
    return found


def make_example(features: Mapping[str, Sequence[bytes] | NDArray[Any]]) -> bytes:
    """Return the bytes of an example: arrays of floats are kept as float32, of integers as int64."""
    example = _example_class()()
    for name, values in features.items():
        feature = example.features.feature[name]
        if not isinstance(values, np.ndarray):
            feature.bytes_list.value.extend(values)
        elif values.dtype.kind == "f":
            feature.float_list.value.extend(values.astype(np.float32).reshape(-1).tolist())
        else:
            feature.int64_list.value.extend(values.astype(np.int64).reshape(-1).tolist())
    encoded: bytes = example.SerializeToString(deterministic=True)
    return encoded


@cache
def _example_class() -> Any:
    """Return the message class, of a pool of its own: TensorFlow has it in the common one."""
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="records", syntax="proto3")
    field = descriptor_pb2.FieldDescriptorProto

    def message(name: str, *fields: tuple[str, int, str | None], repeated: bool = False) -> Any:
        made = file.message_type.add(name=name)
        for number, (field_name, kind, type_name) in enumerate(fields, 1):
            label = field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL
            added = made.field.add(name=field_name, number=number, type=kind, label=label)
            if type_name is not None:
                added.type_name = type_name
        return made

    for name, kind in (("Bytes", field.TYPE_BYTES), ("Float", field.TYPE_FLOAT), ("Int64", field.TYPE_INT64)):
        message(f"{name}List", ("value", kind, None), repeated=True)
    lists = [
        (f"{name.lower()}_list", field.TYPE_MESSAGE, f".records.{name}List") for name in ("Bytes", "Float", "Int64")
    ]
    feature = message("Feature", *lists)
    feature.oneof_decl.add(name="kind")
    for added in feature.field:
        added.oneof_index = 0
    features = message("Features", ("feature", field.TYPE_MESSAGE, ".records.Features.FeatureEntry"), repeated=True)
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
    value = entry.field.add(name="value", number=2, type=field.TYPE_MESSAGE, label=field.LABEL_OPTIONAL)
    value.type_name = ".records.Feature"
    message("Example", ("features", field.TYPE_MESSAGE, ".records.Features"))
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("records.Example"))
