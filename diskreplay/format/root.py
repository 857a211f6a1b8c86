"""The root of a store: what was chosen when it was created."""

import os
import shutil
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from diskreplay.errors import FormatError, StoreExists, StoreNotFound
from diskreplay.format import layout, metadata
from diskreplay.format.commit import StoreCounters
from diskreplay.format.durable import check_platform, make_lock, sync_folder, sync_tree
from diskreplay.format.schema import Schema


@dataclass(frozen=True)
class Root:
    """What every process needs to know of a store before it looks at a segment."""

    path: Path
    schema: Schema
    capacity: int | None
    capacity_bytes: int | None
    max_age_s: float | None
    chunk_bytes: int
    segment_steps: int | str | None
    created: str
    blueprint: metadata.Blueprint

    @property
    def counters_folder(self) -> Path:
        """The array of the store's counters; also where segments are built and taken apart."""
        return self.path / layout.COUNTERS

    @property
    def segments_folder(self) -> Path:
        """The group of all segments."""
        return self.path / layout.SEGMENTS

    @property
    def lock_path(self) -> str:
        """The store's lock."""
        return str(self.counters_folder / layout.LOCK)

    def segment_path(self, number: int) -> Path:
        """Return the folder of a segment."""
        return self.segments_folder / layout.segment_name(number)

    def array_document(self) -> metadata.Document:
        """Read the document of one of the store's arrays, after which those of other arrays are made."""
        path = self.counters_folder / layout.METADATA
        return metadata.parse_document(metadata.read_document(path), path)

    def counters(self, *, writable: bool = False) -> StoreCounters:
        """Map the store's counters.

        Raises
        ------
        FormatError
            They are not there.
        """
        path = self.counters_folder / "c.0"
        try:
            return StoreCounters(str(path), writable=writable)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise FormatError(f"{path} is missing; diskreplay repair makes it from the segments") from error

    @property
    def has_horizon(self) -> bool:
        """Whether what lies below the retention horizon is hidden: with a capacity, in steps or bytes."""
        return self.capacity is not None or self.capacity_bytes is not None

    @property
    def step_bytes(self) -> int:
        """Bytes of one step in all its fields, ``done`` included."""
        return 1 + sum(field.row_bytes for field in self.schema.leaves.values())


def create_root(
    path: Path,
    schema: Schema,
    *,
    capacity: int | None,
    chunk_bytes: int,
    segment_steps: int | str | None,
    capacity_bytes: int | None = None,
    max_age_s: float | None = None,
) -> None:
    """Make an empty store at ``path``, complete at the moment its folder appears there.

    Raises
    ------
    StoreExists
        Something is there already.
    """
    check_platform()
    documents = metadata.make_root_documents()
    attributes = {
        "format": layout.FORMAT,
        "format_version": layout.FORMAT_VERSION,
        "requires": [],
        "schema": schema.to_json(),
        "capacity": capacity,
        "capacity_bytes": capacity_bytes,
        "max_age_s": max_age_s,
        "chunk_bytes": chunk_bytes,
        "segment_steps": segment_steps,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "segment_metadata": metadata.make_templates(schema),
    }
    above = [folder for folder in path.parents if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    building = path.with_name(f".{path.name}.new-{os.getpid()}-{time.monotonic_ns()}")
    try:
        for name, document in sorted(documents.items()):
            folder = building / name
            folder.mkdir()
            data = metadata.seal_document(document, attributes) if not name else metadata.dump(document)
            (folder / layout.METADATA).write_bytes(data)
        (building / layout.COUNTERS / "c.0").write_bytes(StoreCounters.fresh())
        # The room for the first evictions by hand: see `hidden`.
        (building / layout.HIDDEN / "c.0.0").write_bytes(bytes(layout.HIDDEN_ROWS * 16))
        make_lock(building / layout.COUNTERS / layout.LOCK)
        sync_tree(building)
        # An empty folder may be there (mkdtemp); rename replaces that and nothing else.
        os.rename(building, path)
    except OSError as error:
        shutil.rmtree(building, ignore_errors=True)
        if path.exists():
            raise StoreExists(f"{path} exists already; open it, or create(..., exist_ok=True)") from error
        raise
    for folder in [path, *above]:
        sync_folder(folder.parent)


def read_root(path: Path) -> Root:
    """Read and check the root of the store at ``path``.

    Raises
    ------
    StoreNotFound
        There is nothing, or something else.
    FormatError
        It is damaged, hostile, or of a version that this release does not know.
    """
    check_platform()
    document_path = path / layout.METADATA
    try:
        data = metadata.read_document(document_path)
    except OSError as error:
        what = "is not a store: it has no readable zarr.json" if path.exists() else "does not exist"
        raise StoreNotFound(f"{path} {what}; diskreplay.create makes a store") from error
    document = metadata.parse_document(data, document_path)
    attributes = document.get("attributes")
    if not isinstance(attributes, dict) or attributes.get("format") != layout.FORMAT:
        raise StoreNotFound(f"{path} is a zarr group but not a diskreplay store; diskreplay.create makes a store")
    version = attributes.get("format_version")
    if version != layout.FORMAT_VERSION:
        raise FormatError(
            f"{path} has format version {version!r}, this release reads {layout.FORMAT_VERSION}; update diskreplay"
        )
    metadata.verify_document(data, document_path)
    metadata.check_requires(attributes, document_path)
    for name in (layout.COUNTERS, layout.HIDDEN, layout.LIMITERS, layout.SAMPLERS, layout.SEGMENTS):
        if (path / name).is_symlink():
            raise FormatError(f"{path / name} is a symbolic link; a store has none, restore the folder itself")
    return _parse_root(path, attributes)


def _parse_root(path: Path, attributes: dict[str, Any]) -> Root:
    schema = Schema.from_json(attributes.get("schema"))
    segment_steps = attributes.get("segment_steps")
    if segment_steps != "episode":
        segment_steps = _count(path, "segment_steps", segment_steps, 1, None)
    chunk_bytes = attributes.get("chunk_bytes")
    if chunk_bytes is None:
        raise FormatError(f"{path}: the root has no chunk_bytes; restore its zarr.json")
    return Root(
        path=path,
        schema=schema,
        capacity=_count(path, "capacity", attributes.get("capacity"), 1, None),
        capacity_bytes=_count(path, "capacity_bytes", attributes.get("capacity_bytes"), 1, None),
        max_age_s=_seconds(path, attributes.get("max_age_s")),
        chunk_bytes=_count(path, "chunk_bytes", chunk_bytes, layout.MIN_CHUNK_BYTES, layout.MAX_CHUNK_BYTES) or 0,
        segment_steps=segment_steps,
        created=str(attributes.get("created", "")),
        blueprint=metadata.read_blueprint(attributes.get("segment_metadata"), schema),
    )


def _count(path: Path, name: str, value: object, least: int, most: int | None) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
        raise FormatError(f"{path}: {name} is {value!r}; restore the root's zarr.json")
    return value


def _seconds(path: Path, value: object) -> float | None:
    if value is None:
        return None
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
        raise FormatError(f"{path}: max_age_s is {value!r}; restore the root's zarr.json")
    return float(value)
