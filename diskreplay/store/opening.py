"""Making stores and opening them."""

from pathlib import Path
from typing import Literal

from diskreplay.arguments import as_int, check_count, checked_limits, compression_level
from diskreplay.errors import SchemaError, StoreExists, StoreNotFound
from diskreplay.schema.schema import Schema
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.root import Limits, create_root, read_root
from diskreplay.store.store import PathLike, Store
from diskreplay.writing.casting import checks_of


def create(
    path: PathLike,
    schema: Schema,
    *,
    capacity: int | None = None,
    capacity_bytes: int | None = None,
    max_age_s: float | None = None,
    exist_ok: bool = False,
    chunk_bytes: int = 16 << 20,
    segment_steps: int | Literal["episode"] | None = None,
    compression: str | tuple[str, int] | None = None,
    compaction: Literal["auto", "manual"] = "auto",
    validate: Literal["finite", "space"] | None = None,
) -> Store:
    """Make an empty store and open it with mode "a".

    Parameters
    ----------
    path : path
        A folder that does not exist yet, or is empty.
    schema : Schema
        What one step and one episode hold.
    capacity : int, optional
        The most steps to keep; the oldest leave first. None: all of them.
    capacity_bytes : int, optional
        The most bytes that segments may take on disk whenever one is begun or sealed: whole sealed segments leave, the
        oldest first. Between two such moments a writer adds less than two segments. None: no limit.
    max_age_s : float, optional
        Segments leave so many seconds after they were sealed, whenever one is begun or sealed, or `Store.evict` is
        called; later, where only a wall clock that no time service keeps says so. None: never.
    exist_ok : bool
        Open the store that is there, if it has the same schema, and the same limits where some are given here.
    chunk_bytes : int
        Bytes of a chunk file, about. Larger ones make fewer mappings: a process keeps 30,000.
    segment_steps : int or "episode", optional
        Rows, of all lanes, after which a writer begins a new segment; "episode": one segment an episode. None: chosen
        by size, at most 4 GiB and a sixteenth of either capacity, or 1 MiB of a small `capacity`.
    compression : "zstd" or ("zstd", level), optional
        How fields of at least 256 bytes a step are compressed when segments are merged; level 1 to 22, 1 where none is
        given. Samplers decompress what they draw. Needs ``diskreplay[zstd]``, here and wherever the store is read.
    compaction : "auto" or "manual"
        Whether processes that write have small sealed segments merged by themselves, in a process of the lowest
        priority that they start; see `Store.compact`.
    validate : "finite" or "space", optional
        What writers refuse with a SchemaError that names the value: "finite", NaN and infinities; "space", also actions
        outside their space, for a schema made of spaces. An append then takes some microseconds more. None: neither.

    Raises
    ------
    StoreExists
        Something is at ``path``; with ``exist_ok``, what is no store, or one with another schema or another limit.
    SchemaError
        ``validate="space"``, and an action has no space.
    ValueError
        A number is out of its range, or ``compression``, ``compaction`` or ``validate`` is none of its values.
    FormatError
        ``path`` is an address, such as s3://bucket/x: a store is a folder on a local disk.
    MissingExtra
        ``compression`` needs zstandard, which is not installed.
    """
    if not isinstance(schema, Schema):
        raise SchemaError(f"schema is a diskreplay.Schema, not {type(schema).__name__}")
    limits = checked_limits(capacity, capacity_bytes, max_age_s)
    check_count("chunk_bytes", chunk_bytes, layout.MIN_CHUNK_BYTES, layout.MAX_CHUNK_BYTES)
    if segment_steps != "episode":
        check_count("segment_steps", segment_steps, 1, layout.POSITION_MASK >> 4)
    if validate is not None and validate not in layout.VALIDATIONS:
        raise ValueError(f'validate must be "finite", "space" or None, not {validate!r}')
    checks_of(schema, validate)
    level = compression_level(compression)
    if compaction not in layout.COMPACTIONS:
        raise ValueError(f'compaction is "auto" or "manual", not {compaction!r}')
    target = Path(path).absolute()
    try:
        if exist_ok and (target / layout.METADATA).exists():
            raise StoreExists(str(target))
        create_root(
            target,
            schema,
            limits=limits,
            chunk_bytes=int(chunk_bytes),
            segment_steps=segment_steps if segment_steps == "episode" else as_int(segment_steps),
            validate=validate,
            compression=level,
            compaction=compaction,
        )
    except StoreExists:
        if not exist_ok:
            raise
        return _existing(target, schema, limits)
    return Store(target, "a")


def _difference(found: Schema, wanted: Schema) -> str:
    """Name the first field in which two schemas differ."""
    for path in found.leaves | wanted.leaves:
        if (one := found.leaves.get(path)) != (other := wanted.leaves.get(path)):
            return f"in which {path} is {one or 'missing'}, not {other or 'missing'}"
    return f"of the same fields nested otherwise, {found}"


def _existing(target: Path, schema: Schema, limits: Limits) -> Store:
    """Open the store at a path, or raise StoreExists where its schema or one of these limits is another."""
    try:
        root = read_root(target)
    except StoreNotFound:
        raise StoreExists(f"{target} exists and is not a readable store: give a new path") from None
    if root.schema != schema:
        raise StoreExists(
            f"the store at {target} has another schema, {_difference(root.schema, schema)}: give a new path"
        ) from None
    for name, wanted in vars(limits).items():
        if wanted is not None and (found := vars(root.limits)[name]) != wanted:
            raise StoreExists(
                f"the store at {target} has {name}={found}, not {wanted}: leave it out, or change it with "
                f'diskreplay.open(path, "a").resize({name}={wanted})'
            ) from None
    return Store(target, "a")


def open(path: PathLike, mode: Literal["r", "a"] = "r") -> Store:
    """Open a store. With mode "r" nothing is ever written; with "a" it may be, and dead writers' segments are sealed.

    Raises
    ------
    StoreNotFound
        There is no store at ``path``.
    FormatError
        It is damaged, of a version that this release does not know, or an address such as s3://bucket/x.
    ReadOnlyError
        With mode "a", the system lets this process not write there.
    """
    return Store(path, mode)
