"""The root of a store: its identity, its schema and the choices made when it was created."""

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
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

from diskreplay.errors import FormatError, ReplayError, StoreExists, StoreNotFound
from diskreplay.folders import BY_PATH, OpenFolder, hidden_sibling, is_taken, show_paths, shown_paths
from diskreplay.schema.schema import Schema
from diskreplay.segments.documents import layout, metadata
from diskreplay.segments.documents.metadata import (
    Attribute,
    is_number,
    is_uuid,
    is_whole,
    one_of,
    whole,
)
from diskreplay.segments.files.commit import StoreCounters
from diskreplay.segments.files.durable import (
    file_system_type,
    has_stable_inodes,
    storage_error,
    sync_folder,
    sync_tree,
    write_atomic,
)
from diskreplay.segments.files.locks import make_lock
from diskreplay.segments.files.machine import check_platform

Error = TypeVar("Error", bound=BaseException)

# A URL's scheme has at least two letters here: `s:/` may be a path in a folder named `s:`.
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")


def _is_level(value: object) -> bool:
    return isinstance(value, dict) and value.keys() == {"zstd"} and is_whole(value["zstd"], *layout.ZSTD_LEVELS)


_LIMITS = (
    Attribute("capacity", whole(1), None, may_be_null=True),
    Attribute("capacity_bytes", whole(1), None, may_be_null=True),
    Attribute(
        "max_age_s",
        lambda value: is_number(value) and 0 < value <= sys.float_info.max,
        None,
        make=float,
        may_be_null=True,
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
    Attribute("segment_steps", lambda value: value == "episode" or is_whole(value, 1), None, may_be_null=True),
    Attribute("validate", one_of(*layout.VALIDATIONS), None, may_be_null=True),
    Attribute(
        "compression",
        _is_level,
        None,
        make=itemgetter("zstd"),
        write=lambda level: {"zstd": level},
        may_be_null=True,
    ),
    Attribute("compaction", one_of(*layout.COMPACTIONS), layout.MANUAL),
    Attribute("created", str, ""),
    Attribute("segment_metadata", dict),
)
"""The attributes in the root's zarr.json; the module `segments.segment` defines the attributes of a segment."""


@dataclass
class Limits:
    """The limits of a store: the arguments of `create` that `Store.resize` can change."""

    capacity: int | None
    capacity_bytes: int | None
    max_age_s: float | None

    @property
    def are_set(self) -> bool:
        return (self.capacity, self.capacity_bytes, self.max_age_s) != (None, None, None)


@dataclass(frozen=True)
class Root:
    """The facts about a store that every process needs before it reads a segment.

    `path` is the path that the user gave, for messages. All files are opened below `folder`. As long as `home` is
    referenced, `folder` is the same folder, even if another store takes its place at `path`. All attributes are
    constant except `limits`, which `follow_limits` updates.
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
    compression: int | None  # the level of zstd for wide fields in packs
    compacts: bool  # whether writing processes merge segments in the background
    created: str
    blueprint: metadata.Blueprint

    @property
    def folder(self) -> Path:
        """The store's folder as a path through its open descriptor.

        Keep a reference to `home` as long as a path below this folder is used.
        """
        return self.home.path

    def follow_limits(self) -> None:
        """Read the limits from the disk again, because another process may have changed them.

        If the root's zarr.json is damaged now, the limits do not change.
        """
        path = self.folder / layout.METADATA
        if metadata.identify(path) == self.document:  # the file from which this root was read
            return
        with suppress(FormatError, OSError):
            attributes = metadata.read_verified(path)
            vars(self.limits).update(_read(self.path, _LIMITS, attributes))

    def write_limits(self, limits: Limits) -> None:
        """Change the limits durably. The caller holds the store lock, and adds one to the counter `CHANGES` afterwards.

        If StorageFull is raised, nothing is changed.
        """
        path = self.folder / layout.METADATA
        attributes = metadata.read_verified(path) | vars(limits)
        data = metadata.seal_document(metadata.read_object(path), attributes)
        write_atomic(path, data, synced=True)
        sync_folder(self.folder)
        # A process that dies before the next line leaves an outdated copy of the root's zarr.json. Verify reports such
        # a copy, and repair renews it.
        write_atomic(self.folder / layout.ROOT_COPY, data, synced=True)
        self.follow_limits()

    @property
    def counters_folder(self) -> Path:
        """The folder of the store's counters. Segments are built here, and are moved here before they are deleted."""
        return self.home.path / layout.COUNTERS

    @property
    def segments_folder(self) -> Path:
        return self.home.path / layout.SEGMENTS

    @property
    def lock_path(self) -> str:
        return str(self.counters_folder / layout.LOCK)

    def segment_path(self, number: int) -> Path:
        return self.home.path / layout.segment_folder(number)

    def check_still_there(self) -> None:
        """Raise StoreNotFound if the store was deleted or replaced since it was opened.

        A store whose folder was renamed on the same file system is still there.
        """
        gone = f"{self.path} (store {self.uuid}) was deleted, or moved to another file system, since it was opened"
        if self.home.is_deleted():
            raise StoreNotFound(f"{gone}; open the store where it is now")
        now = metadata.identify(self.folder / layout.METADATA)
        if now != self.document and (found := _uuid_at(self.folder)) != self.uuid:
            raise StoreNotFound(gone if found is None else f"{self.path} is now store {found}, not {self.uuid}")
        if self.home.is_at(self.path) is not False or (found := _uuid_at(self.path)) is None:
            return
        # If inode numbers may differ from call to call, only the uuid shows whether the store is the same.
        if found != self.uuid or has_stable_inodes(self.file_system):
            raise StoreNotFound(
                f"another store ({found}) is at {self.path} now; the one that was opened there ({self.uuid}) is "
                "elsewhere, open it at its new path"
            )

    def check_owns(self, path: Path, store: str) -> None:
        if store != self.uuid:
            owner = f"another store ({store!r:.80})"
            raise FormatError(f"{path} is a segment of {owner} and not of this one ({self.uuid}); move it away")

    @contextmanager
    def still_there(self) -> Iterator[None]:
        """Call `check_still_there` before a `with` block, and after an error in the block."""
        self.check_still_there()
        try:
            yield
        except Exception as error:
            self.explain(error)
            raise

    def explain(self, error: BaseException) -> None:
        """Replace paths through descriptors in an error by users' paths; raise StoreNotFound if the store is gone.

        Whether the store is gone is checked only after an OSError or an error of this package.
        """
        show_paths(error)
        if isinstance(error, OSError | ReplayError) and not isinstance(error, StoreNotFound):
            self.check_still_there()

    def reason(self, error: Error) -> Error | StoreNotFound:
        try:
            self.explain(error)
        except StoreNotFound as gone:
            gone.__cause__ = error
            return gone
        return error

    def array_document(self) -> metadata.Document:
        """Read the metadata of the counters' array, which writers copy to make the metadata of other arrays."""
        return metadata.read_object(self.counters_folder / layout.METADATA)

    def counters(self, *, writable: bool = False) -> StoreCounters:
        path = self.counters_folder / "c.0"
        try:
            return StoreCounters(str(path), writable=writable)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise FormatError(f"{path} is missing; diskreplay repair makes it from the segments") from error

    @property
    def has_horizon(self) -> bool:
        return self.limits.capacity is not None or self.limits.capacity_bytes is not None

    @property
    def step_bytes(self) -> int:
        return sum(array.row_bytes for array in self.blueprint.arrays.values() if not array.is_of_episodes)

    @property
    def value_bytes(self) -> int:
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
    """Make an empty store; the store is complete as soon as its folder appears at ``path``.

    Raises StoreExists if anything other than an empty folder is already there, StorageFull if the disk has no room.
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
    building = hidden_sibling(path, f".new-{os.getpid()}-{time.monotonic_ns()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for name, document in sorted(documents.items()):
            folder = building / name
            folder.mkdir()
            data = metadata.seal_document(document, attributes) if not name else metadata.dump(document)
            (folder / layout.METADATA).write_bytes(data)
            if not name:
                own = data
        (building / layout.COUNTERS / "c.0").write_bytes(StoreCounters.fresh())
        # The chunk for the first entries of evictions by hand; see `eviction_list`.
        (building / layout.EVICTIONS / "c.0.0").write_bytes(bytes(layout.EVICTION_ROWS * 16))
        make_lock(building / layout.COUNTERS / layout.LOCK)
        (building / layout.ROOT_COPY).write_bytes(own)
        sync_tree(building)
        # A rename replaces an empty folder at the path, such as a folder made by `mkdtemp`, but nothing else.
        os.rename(building, path)
    except OSError as error:
        shutil.rmtree(building, ignore_errors=True)
        if is_taken(path):
            raise StoreExists(f"{path} exists already; open it, or create(..., exist_ok=True)") from error
        raise storage_error(error, path, f"no space to create {path}; free some, and create it again") from None
    for folder in [path, *above]:
        sync_folder(folder.parent)


def check_local(path: os.PathLike[str] | str) -> None:
    """Raise FormatError if a path is a URL such as s3://bucket/x, which would be a folder `s3:` here."""
    # A `Path` made from a URL has only one slash after the scheme, and may begin with the working directory.
    text, here = os.fspath(path), ""
    with suppress(OSError):  # the working directory was deleted
        here = f"{os.getcwd()}/"
    found = _ADDRESS.match(text.removeprefix(here))
    if found is not None:
        raise FormatError(
            f"{found[1]}:// is an address, and a store is a folder on a local disk: make it there, and copy it with "
            "store.backup(path), or `diskreplay backup` and `diskreplay export`, for the upload"
        )


def open_home(place: OpenFolder | os.PathLike[str] | str) -> OpenFolder:
    """Return the open folder of a store; it is opened if ``place`` is a path or a closed folder.

    Raises StoreNotFound if the folder does not exist or cannot be opened, FormatError if the path is a URL.
    """
    if not isinstance(place, OpenFolder):
        check_local(place)
    try:
        return OpenFolder.of(place)
    except OSError as error:
        raise _not_found(place.name if isinstance(place, OpenFolder) else Path(place).absolute()) from error


def _not_found(path: Path) -> StoreNotFound:
    problem = "is not a store: it has no readable zarr.json" if path.exists() else "does not exist"
    return StoreNotFound(f"{path} {problem}; {_advice(path)}")


def _advice(path: Path) -> str:
    """Return advice for a path at which no store was found: a store there may have lost its zarr.json."""
    if (path / layout.ROOT_COPY).is_file():
        return f"it has a copy of a store's zarr.json: `diskreplay repair {path} --dry-run` tells what can be restored"
    return "diskreplay.create makes a store"


@shown_paths
def read_root(path: Path, home: OpenFolder | None = None) -> Root:
    """Read and check the root of the store at ``path``, or in the folder ``home`` that was opened there.

    Raises StoreNotFound if there is no store. Raises FormatError if the root is damaged, hostile, or of a version that
    this release does not know.
    """
    check_platform()
    home = open_home(path) if home is None else home
    try:
        document_path = home.path / layout.METADATA
        data, identity = metadata.read_identified(str(document_path), BY_PATH)
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
        if os.path.islink(f"{home.path}/{name}"):
            raise FormatError(f"{path / name} is a symbolic link; a store has none, restore the folder itself")
    return _parse_root(path, home, identity, attributes)


def _uuid_at(folder: Path) -> str | None:
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
