"""The root of a store: what was chosen when it was created."""

import os
import re
import shutil
import sys
import time
import uuid as uuids
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from diskreplay.errors import FormatError, ReplayError, StoreExists, StoreNotFound
from diskreplay.folders import OpenFolder, hidden_beside, show_paths, shown_paths
from diskreplay.schema.schema import Schema
from diskreplay.segments.documents import layout, metadata
from diskreplay.segments.documents.metadata import (
    Attribute,
    is_number,
    is_uuid,
    is_whole,
    one_of,
    optional,
    whole,
)
from diskreplay.segments.files.commit import StoreCounters
from diskreplay.segments.files.durable import file_system_type, has_stable_inodes, sync_folder, sync_tree, write_atomic
from diskreplay.segments.files.locks import make_lock
from diskreplay.segments.files.machine import check_platform

Error = TypeVar("Error", bound=BaseException)

# A name of one letter is no scheme: it may be a folder's.
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")


def _is_level(value: object) -> bool:
    return isinstance(value, dict) and value.keys() == {"zstd"} and is_whole(value["zstd"], *layout.ZSTD_LEVELS)


_LIMITS = (
    Attribute("capacity", optional(whole(1)), None),
    Attribute("capacity_bytes", optional(whole(1)), None),
    Attribute(
        "max_age_s",
        optional(lambda value: is_number(value) and 0 < value <= sys.float_info.max),
        None,
        make=lambda value: None if value is None else float(value),
    ),
)
_ROOT = (
    Attribute("format", one_of(layout.FORMAT)),
    Attribute("format_version", one_of(layout.FORMAT_VERSION)),
    Attribute("requires", list),
    Attribute("uuid", is_uuid),
    Attribute("schema", dict, make=Schema.from_json, write=Schema.to_json),
    *_LIMITS,
    Attribute("chunk_bytes", whole(layout.MIN_CHUNK_BYTES, layout.MAX_CHUNK_BYTES)),
    Attribute("segment_steps", lambda value: value in (None, "episode") or is_whole(value, 1), None),
    Attribute("validate", one_of(None, *layout.VALIDATIONS), None),
    Attribute(
        "compression",
        optional(_is_level),
        None,
        make=lambda value: None if value is None else value["zstd"],
        write=lambda level: None if level is None else {"zstd": level},
    ),
    Attribute("compaction", one_of(*layout.COMPACTIONS), layout.MANUAL),
    Attribute("created", str, ""),
    Attribute("segment_metadata", dict),
)
"""What the root's document says. That of a segment has its tables in `segments.segment`."""


@dataclass
class Limits:
    """What a store keeps at most: of the arguments of `create`, those that `Store.resize` changes."""

    capacity: int | None
    capacity_bytes: int | None
    max_age_s: float | None

    @property
    def are_set(self) -> bool:
        """Whether there is any limit."""
        return (self.capacity, self.capacity_bytes, self.max_age_s) != (None, None, None)


@dataclass(frozen=True)
class Root:
    """What every process needs to know of a store before it reads a segment.

    `path` is what the user gave, for people. All files are opened below `folder`, which is the same folder as long as
    anything refers to `home`, whatever becomes of the path: a store that takes this one's place is never touched.

    All of it stays as it is but `limits`, which are those that `follow_limits` found last.
    """

    path: Path
    home: OpenFolder = field(repr=False, compare=False)
    uuid: str
    document: metadata.Identity = field(repr=False, compare=False)
    file_system: str
    schema: Schema
    limits: Limits = field(compare=False)
    chunk_bytes: int
    segment_steps: int | str | None
    validate: str | None
    compression: int | None  # the level of zstd, of wide fields in packs
    compacts: bool  # by itself, in processes that write
    created: str
    blueprint: metadata.Blueprint

    @property
    def folder(self) -> Path:
        """The store's folder by its descriptor; keep `home` as long as any path below it."""
        return self.home.path

    def follow_limits(self) -> None:
        """Read the limits again, which another process may have changed: it has counted a change.

        They stay as they are where the document is damaged since: who opens the store is told.
        """
        with suppress(FormatError, OSError):
            attributes = metadata.read_verified(self.folder / layout.METADATA)
            vars(self.limits).update(_read(self.path, _LIMITS, attributes))

    def write_limits(self, limits: Limits) -> None:
        """Change the limits, durably. The caller holds the store lock, and counts a change.

        Raises StorageFull where there is no room; nothing is changed.
        """
        path = self.folder / layout.METADATA
        attributes = metadata.read_verified(path) | vars(limits)
        data = metadata.seal_document(metadata.read_object(path), attributes)
        write_atomic(path, data, synced=True)
        sync_folder(self.folder)
        # A process that dies here leaves a copy that differs, which verify tells and repair makes anew.
        write_atomic(self.folder / layout.ROOT_COPY, data, synced=True)
        self.follow_limits()

    @property
    def counters_folder(self) -> Path:
        """The array of the store's counters; also where segments are built and taken apart."""
        return self.home.path / layout.COUNTERS

    @property
    def segments_folder(self) -> Path:
        """The group of all segments."""
        return self.home.path / layout.SEGMENTS

    @property
    def lock_path(self) -> str:
        """The store's lock."""
        return str(self.counters_folder / layout.LOCK)

    def segment_path(self, number: int) -> Path:
        """Return the folder of a segment."""
        return self.segments_folder / layout.segment_name(number)

    def check_still_there(self) -> None:
        """Check that the store was not deleted or replaced since it was opened; a few microseconds.

        A store whose folder was renamed, on the same file system, is still there. Raises StoreNotFound where it was
        deleted, moved to another file system, or another store is at its path.
        """
        gone = f"{self.path} (store {self.uuid}) was deleted, or moved to another file system, since it was opened"
        if self.home.is_deleted():
            raise StoreNotFound(f"{gone}; open the store where it is now")
        now = metadata.identify(self.folder / layout.METADATA)
        if now != self.document and (found := _uuid_at(self.folder)) != self.uuid:
            raise StoreNotFound(gone if found is None else f"{self.path} is now store {found}, not {self.uuid}")
        if self.home.is_at(self.path) is not False or (found := _uuid_at(self.path)) is None:
            return
        # Where inodes are made up for each call, only the identity decides.
        if found != self.uuid or has_stable_inodes(self.file_system):
            raise StoreNotFound(
                f"another store ({found}) is at {self.path} now; the one that was opened there ({self.uuid}) is "
                "elsewhere, open it at its new path"
            )

    def check_owns(self, path: Path, store: str) -> None:
        """Check that a segment of the store with this identity is one of this store. Raises FormatError."""
        if store != self.uuid:
            owner = f"another store ({store!r:.80})"
            raise FormatError(f"{path} is a segment of {owner} and not of this one ({self.uuid}); move it away")

    @contextmanager
    def still_there(self) -> Iterator[None]:
        """Check that the store is still there, before a block and where the block fails.

        Raises StoreNotFound as `check_still_there` does.
        """
        self.check_still_there()
        try:
            yield
        except Exception as error:
            self.explain(error)
            raise

    def explain(self, error: BaseException) -> None:
        """Make an error name the paths that people know; where the store is gone, raise that in its place.

        Raises StoreNotFound where the error is one of the system or of this package, and has this reason.
        """
        show_paths(error)
        if isinstance(error, OSError | ReplayError) and not isinstance(error, StoreNotFound):
            self.check_still_there()

    def reason(self, error: Error) -> Error | StoreNotFound:
        """Return what to raise for an error: where the store is gone, that this is so."""
        try:
            self.explain(error)
        except StoreNotFound as gone:
            gone.__cause__ = error
            return gone
        return error

    def array_document(self) -> metadata.Document:
        """Read the document of one of the store's arrays, after which those of other arrays are made."""
        return metadata.read_object(self.counters_folder / layout.METADATA)

    def counters(self, *, writable: bool = False) -> StoreCounters:
        """Map the store's counters.

        Raises FormatError where they are not there.
        """
        path = self.counters_folder / "c.0"
        try:
            return StoreCounters(str(path), writable=writable)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise FormatError(f"{path} is missing; diskreplay repair makes it from the segments") from error

    @property
    def has_horizon(self) -> bool:
        """Whether what lies below the retention horizon is hidden: with a capacity, in steps or bytes."""
        return self.limits.capacity is not None or self.limits.capacity_bytes is not None

    @property
    def step_bytes(self) -> int:
        """Bytes of one step in all its fields, ``done`` and ``time`` included."""
        return sum(array.row_bytes for array in self.blueprint.arrays.values() if not array.is_of_episodes)

    @property
    def value_bytes(self) -> int:
        """Bytes of the values of one episode."""
        return sum(self.blueprint.arrays[leaf].row_bytes for leaf in self.blueprint.values)


def create_root(
    path: Path,
    schema: Schema,
    *,
    limits: Limits,
    chunk_bytes: int,
    segment_steps: int | str | None,
    validate: str | None = None,
    compression: int | None = None,
    compaction: str = layout.MANUAL,
) -> None:
    """Make an empty store at ``path``, complete at the moment its folder appears there.

    Raises StoreExists where something is there already.
    """
    check_local(path)
    check_platform()
    documents = metadata.make_root_documents()
    values = {
        "format": layout.FORMAT,
        "format_version": layout.FORMAT_VERSION,
        "requires": [layout.EPISODE_TABLES],
        "uuid": str(uuids.uuid4()),
        "schema": schema,
        **vars(limits),
        "chunk_bytes": chunk_bytes,
        "segment_steps": segment_steps,
        "validate": validate,
        "compression": compression,
        "compaction": compaction,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "segment_metadata": metadata.make_templates(schema),
    }
    attributes = metadata.write_by(_ROOT, values.__getitem__)
    above = [folder for folder in path.parents if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    building = hidden_beside(path, f".new-{os.getpid()}-{time.monotonic_ns()}")
    try:
        for name, document in sorted(documents.items()):
            folder = building / name
            folder.mkdir()
            data = metadata.seal_document(document, attributes) if not name else metadata.dump(document)
            (folder / layout.METADATA).write_bytes(data)
            if not name:
                own = data
        (building / layout.COUNTERS / "c.0").write_bytes(StoreCounters.fresh())
        # The room for the first evictions by hand: see `eviction_list`.
        (building / layout.EVICTIONS / "c.0.0").write_bytes(bytes(layout.EVICTION_ROWS * 16))
        make_lock(building / layout.COUNTERS / layout.LOCK)
        (building / layout.ROOT_COPY).write_bytes(own)
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


def check_local(path: os.PathLike[str] | str) -> None:
    """Raise FormatError where a path is an address such as s3://bucket/x, which would be a folder `s3:` here."""
    # A Path has one slash where the address had two, and may have been made absolute.
    text, here = os.fspath(path), ""
    with suppress(OSError):  # it was deleted
        here = f"{os.getcwd()}/"
    found = _ADDRESS.match(text.removeprefix(here))
    if found is not None:
        raise FormatError(
            f"{found[1]}:// is an address, and a store is a folder on a local disk: make it there, and copy it with "
            "store.backup(path), or `diskreplay backup` and `diskreplay export`, for the upload"
        )


def open_home(place: OpenFolder | os.PathLike[str] | str) -> OpenFolder:
    """Open the folder of a store, unless it is open; StoreNotFound where there is none, as of `check_local`."""
    if not isinstance(place, OpenFolder):
        check_local(place)
    try:
        return OpenFolder.of(place)
    except OSError as error:
        raise _not_found(place.name if isinstance(place, OpenFolder) else Path(place).absolute()) from error


def _not_found(path: Path) -> StoreNotFound:
    what = "is not a store: it has no readable zarr.json" if path.exists() else "does not exist"
    return StoreNotFound(f"{path} {what}; {_advice(path)}")


def _advice(path: Path) -> str:
    """Say what helps where there is no store: one that has lost its document has a copy."""
    if (path / layout.ROOT_COPY).is_file():
        return f"it has a copy of a store's: `diskreplay repair {path} --dry-run` tells what can be restored"
    return "diskreplay.create makes a store"


@shown_paths()
def read_root(path: Path, home: OpenFolder | None = None) -> Root:
    """Read and check the root of the store at ``path``, or in the folder ``home`` that was opened there.

    Raises StoreNotFound where there is nothing, or something else; FormatError where it is damaged, hostile, or of a
    version that this release does not know.
    """
    check_platform()
    home = open_home(path) if home is None else home
    try:
        document_path = home.path / layout.METADATA
        identity = metadata.identify(document_path)  # before it is read: one that replaces it meanwhile is another
        data = metadata.read_document(document_path)
    except OSError as error:
        raise _not_found(path) from error
    document = metadata.parse_document(data, document_path)
    attributes = document.get("attributes")
    if not isinstance(attributes, dict) or attributes.get("format") != layout.FORMAT:
        raise StoreNotFound(f"{path} is a zarr group but not a diskreplay store; {_advice(path)}")
    version = attributes.get("format_version")
    if version != layout.FORMAT_VERSION:
        raise FormatError(
            f"{path} has format version {version!r}, this release reads {layout.FORMAT_VERSION}; update diskreplay"
        )
    metadata.verify_document(data, document_path)
    metadata.check_release(attributes, path)
    metadata.check_requires(attributes, document_path)
    for name in (layout.COUNTERS, layout.EVICTIONS, layout.LIMITERS, layout.SAMPLERS, layout.SEGMENTS):
        if (home.path / name).is_symlink():
            raise FormatError(f"{path / name} is a symbolic link; a store has none, restore the folder itself")
    return _parse_root(path, home, identity, attributes)


def _uuid_at(folder: Path) -> str | None:
    """Return the identity of the store in a folder, or None where there is none that can be read."""
    try:
        attributes = metadata.read_object(folder / layout.METADATA).get("attributes")
    except (OSError, FormatError):
        return None
    found = attributes.get("uuid") if isinstance(attributes, dict) else None
    return found if isinstance(found, str) else None


def _parse_root(path: Path, home: OpenFolder, document: metadata.Identity, attributes: dict[str, Any]) -> Root:
    found = _read(path, _ROOT, attributes)
    return Root(
        path=path,
        home=home,
        uuid=found["uuid"],
        document=document,
        file_system=file_system_type(home.path),
        schema=found["schema"],
        limits=Limits(**{name: found[name] for name in Limits.__dataclass_fields__}),
        chunk_bytes=found["chunk_bytes"],
        segment_steps=found["segment_steps"],
        validate=found["validate"],
        compression=found["compression"],
        compacts=found["compaction"] == layout.AUTO,
        created=found["created"],
        blueprint=metadata.read_blueprint(found["segment_metadata"], found["schema"]),
    )


def _read(path: Path, table: Iterable[Attribute], attributes: dict[str, Any]) -> dict[str, Any]:
    try:
        return metadata.read_by(table, attributes)
    except KeyError as error:
        raise FormatError(f"{path}: the root has no {error.args[0]}; restore its zarr.json") from None
    except ValueError as error:
        raise FormatError(f"{path}: {error}; restore the root's zarr.json") from None
