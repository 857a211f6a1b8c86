"""Read and write TFRecord files of tf.train.Example messages without TensorFlow."""

import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import crc32c
import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from numpy.typing import NDArray

from diskreplay import FormatError
from diskreplay.interop.exchange.foreign import check_memory

# The values of a feature: an array of float32 or int64, or a list of byte strings. Byte strings of equal size are an
# array of kind "V".
Values = list[bytes] | NDArray[Any]

_MASK_DELTA = 0xA282EAD8
_LENGTH, _SUM = struct.Struct("<Q"), struct.Struct("<I")


def records(file: Path) -> Iterator[bytes]:
    """Yield the records of a file; raise FormatError at a damaged record."""
    for record in records_or_errors(file):
        if isinstance(record, FormatError):
            raise record
        yield record


def records_or_errors(file: Path) -> Iterator[bytes | FormatError]:
    """Yield the records of a file, with an error in place of each damaged record.

    FormatError is raised if the length of a record is damaged, since then the next record cannot be found.
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
            try:
                _check(file, start, data, opened.read(_SUM.size), length)
            except FormatError as error:
                yield error
            else:
                yield data


def _check(file: Path, start: int, data: bytes, checksum: bytes, length: int) -> None:
    if len(data) != length or checksum != _masked(data):
        raise FormatError(f"{file} is damaged: the record at byte {start} does not have its checksum")


def _masked(data: bytes) -> bytes:
    crc = crc32c.crc32c(data)
    return _SUM.pack((((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF)


def write_record(file: BinaryIO, data: bytes) -> None:
    header = _LENGTH.pack(len(data))
    file.write(b"".join((header, _masked(header), data, _masked(data))))


def parse_example(data: bytes, wanted: Collection[str] | None = None) -> dict[str, Values]:
    """Return the features of an example by name: those in ``wanted``, or all features if ``wanted`` is None."""
    found: dict[str, bytes | memoryview] = {}
    try:
        for features in _inside(memoryview(data), 1):
            for entry in _inside(features, 1):
                name = str(_joined(_inside(entry, 1), last=True), "utf-8")
                if wanted is None or name in wanted:
                    found[name] = _joined(_inside(entry, 2))
        return {name: _values(feature) for name, feature in found.items()}
    except (ValueError, IndexError) as error:
        raise FormatError(f"a record is not an example of TensorFlow: {error}") from None


_VARINT, _LONG, _SIZED, _SHORT = 0, 1, 2, 5
_BYTES, _FLOATS, _INTEGERS = 1, 2, 3
_MOST_DIGITS = 10  # the most bytes of a varint, protobuf's form of an integer
_TEXT_TAG = 1 << 3 | _SIZED


def _fields(message: memoryview) -> Iterator[tuple[int, int, memoryview]]:
    """Yield the number, the type and the bytes of each field in a protobuf message."""
    at, size = 0, len(message)
    while at < size:
        tag, at = _varint(message, at)
        start, kind = at, tag & 7
        if kind == _SIZED:
            length, start = _varint(message, at)
            at = start + length
        elif kind == _VARINT:
            _, at = _varint(message, at)
        elif kind in (_LONG, _SHORT):
            at += 8 if kind == _LONG else 4
        else:
            raise ValueError(f"a field has the type {kind}")
        if at > size or not tag >> 3:
            raise ValueError(f"a field of {at - start} bytes goes beyond its message, or has no number")
        yield tag >> 3, kind, message[start:at]


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """Return the value of the varint at a position of the message, and the position after the varint."""
    value = 0
    for digit in range(_MOST_DIGITS):
        byte = message[at + digit]
        value |= (byte & 0x7F) << 7 * digit
        if byte < 0x80:
            return value, at + digit + 1
    raise ValueError(f"a number has more than {_MOST_DIGITS} bytes")


def _inside(message: memoryview, number: int) -> Iterator[memoryview]:
    return (value for found, kind, value in _fields(message) if found == number and kind == _SIZED)


def _joined(parts: Iterator[memoryview], last: bool = False) -> bytes | memoryview:
    """Join the values of a protobuf field that occurs several times; if ``last``, return only the last value.

    This is protobuf's rule: it joins messages, but of texts only the last one counts.
    """
    found = [*parts]
    return b"".join(found) if len(found) > 1 and not last else found[-1] if found else b""


def _values(feature: bytes | memoryview) -> Values:
    kind, parts = _BYTES, list[memoryview]()
    for number, form, value in _fields(memoryview(feature)):
        if form == _SIZED and number in (_BYTES, _FLOATS, _INTEGERS):
            kind, parts = number, [*parts, value] if number == kind else [value]
    values = memoryview(_joined(iter(parts)))
    if kind == _BYTES:
        return _texts(values)
    # A message has all numbers packed into one field, or each number in a field of its own.
    single = _SHORT if kind == _FLOATS else _VARINT
    packed = [value for number, form, value in _fields(values) if number == 1 and form in (_SIZED, single)]
    digits = np.frombuffer(_joined(iter(packed)), np.uint8)
    return digits.view("<f4") if kind == _FLOATS else _integers(digits)


def _integers(digits: NDArray[np.uint8]) -> NDArray[np.int64]:
    is_last = digits < 0x80
    if is_last.all():
        return digits.astype(np.int64)
    stops = np.flatnonzero(is_last) + 1
    starts = np.concatenate([[0], stops[:-1]])
    lengths = stops - starts
    if not is_last[-1] or lengths.max() > _MOST_DIGITS:
        raise ValueError(f"a number is cut off, or has more than {_MOST_DIGITS} bytes")
    found = np.zeros(len(stops), np.uint64)
    for digit in range(lengths.max()):
        there = lengths > digit
        found[there] |= (digits[starts[there] + digit] & np.uint64(0x7F)) << np.uint64(7 * digit)
    return found.view(np.int64)


def _texts(values: memoryview) -> Values:
    """Return the byte strings of a feature as a list, or as an array of kind "V" if all have the same size."""
    if len(values) and values[0] == _TEXT_TAG:
        size, start = _varint(values, 1)
        if size and len(values) % (start + size) == 0:
            rows = np.frombuffer(values, np.uint8).reshape(-1, start + size)
            if (rows[:, :start] == rows[0, :start]).all():
                return np.ascontiguousarray(rows[:, start:]).view(f"V{size}")[:, 0]
    return [bytes(value) for value in _inside(values, 1)]


def make_example(features: Mapping[str, Sequence[bytes] | NDArray[Any]]) -> bytes:
    """Encode an example: arrays of floats become float32, and arrays of integers become int64."""
    example = example_class()()
    for name, values in features.items():
        feature = example.features.feature[name]
        if not isinstance(values, np.ndarray) or values.dtype.kind == "V":
            feature.bytes_list.value.extend(map(bytes, values))
        elif values.dtype.kind == "f":
            feature.float_list.value.extend(values.astype(np.float32).reshape(-1).tolist())
        else:
            feature.int64_list.value.extend(values.astype(np.int64).reshape(-1).tolist())
    encoded: bytes = example.SerializeToString(deterministic=True)
    return encoded


@cache
def example_class() -> Any:
    """Return the protobuf class of an example, in a pool of its own: TensorFlow's class is in the default pool."""
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
