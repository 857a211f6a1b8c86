"""Functions that make and open stores."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from diskreplay.arguments import as_int, check_count, checked_limits, compression_argument, compression_level
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
        A folder that is empty or does not exist yet.
    schema : Schema
        The fields of each step and each episode.
    capacity : int, optional
        The maximum number of steps to keep; the oldest steps are removed first. None: no limit.
    capacity_bytes : int, optional
        The maximum number of bytes of all segments on disk. The limit is enforced when a segment is begun or sealed:
        whole sealed segments are deleted, the oldest first. Between two such moments, each writer adds less than two
        segments. None: no limit.
    max_age_s : float, optional
        Segments are deleted this many seconds after they were sealed. The limit is enforced when a segment is begun or
        sealed, or when `Store.evict` is called. Segments from before a reboot may be deleted later if no time service,
        such as NTP, sets the machine's clock. None: no limit.
    exist_ok : bool
        Open the store if it exists already. The store must have the same schema, limits, `segment_steps`, `compression`
        and `validate`; arguments that are None are not compared. The `chunk_bytes` and `compaction` of the store stay
        as they are.
    chunk_bytes : int
        The approximate size of a chunk file, in bytes. A process can map about 30,000 chunks, so a very large store
        needs larger chunks.
    segment_steps : int or "episode", optional
        The number of rows, summed over all lanes, after which a writer begins a new segment. "episode": one segment per
        episode. None: the rows that fit into 4 GiB, but at most a sixteenth of `capacity` and of `capacity_bytes`. If a
        sixteenth of `capacity` takes less than 1 MiB, a segment takes up to 1 MiB, but at most a quarter of `capacity`.
    compression : "zstd" or ("zstd", level), optional
        How fields of at least 256 bytes per step are compressed when segments are merged. The level is from 1 to 22;
        the default is 1. Samplers decompress the rows that they draw. Compression needs ``diskreplay[zstd]``, also
        wherever the store is read.
    compaction : "auto" or "manual"
        With "auto", processes that write merge small sealed segments in the background, in a child process; see
        `Store.compact`. With "manual", only `Store.compact` merges.
    validate : "finite" or "space", optional
        The values that writers refuse with a SchemaError. "finite": NaN and infinities. "space": also actions outside
        their space, for a schema made of spaces. These checks take some microseconds per append. None: no checks.

    Raises
    ------
    StoreExists
        Something exists at ``path``. With ``exist_ok``: ``path`` is not a store, or the store has another schema or
        other arguments (see ``exist_ok``).
    StorageFull
        The disk has no room for the store.
    SchemaError
        ``validate`` is "space", and an action has no space.
    ValueError
        A number is out of range, or ``compression``, ``compaction`` or ``validate`` has an unknown value.
    FormatError
        ``path`` is a URL, such as s3://bucket/x. A store is a folder on a local disk.
    MissingExtra
        ``compression`` needs zstandard, which is not installed.

    Examples
    --------
    >>> schema = dr.Schema(obs=dr.Field((4,), "float32"), action=dr.Field((), "int64"))
    >>> with dr.create("new.replay", schema, capacity=1_000_000) as store, store.writer() as writer:
    ...     for t in range(3):
    ...         writer.append(np.zeros(4), action=0, reward=1.0, terminated=t == 2)
    ...     store.refresh()
    3
    """
    if not isinstance(schema, Schema):
        raise SchemaError(f"schema must be a diskreplay.Schema, not {type(schema).__name__}")
    limits = checked_limits(capacity, capacity_bytes, max_age_s)
    check_count("chunk_bytes", chunk_bytes, layout.MIN_CHUNK_BYTES, layout.MAX_CHUNK_BYTES)
    if segment_steps != "episode":
        check_count("segment_steps", segment_steps, 1, layout.POSITION_MASK >> 4)
    if validate is not None and validate not in layout.VALIDATIONS:
        raise ValueError(f'validate must be "finite", "space" or None, not {validate!r}')
    checks_of(schema, validate)
    level = compression_level(compression)
    if compaction not in layout.COMPACTIONS:
        raise ValueError(f'compaction must be "auto" or "manual", not {compaction!r}')
    steps = segment_steps if segment_steps == "episode" else as_int(segment_steps)
    target = Path(path).absolute()
    try:
        if exist_ok and (target / layout.METADATA).exists():
            raise StoreExists(str(target))
        create_root(
            target,
            schema,
            limits=limits,
            chunk_bytes=int(chunk_bytes),
            segment_steps=steps,
            validate=validate,
            compression=level,
            compaction=compaction,
        )
    except StoreExists:
        if not exist_ok:
            raise
        constants = {"segment_steps": steps, "compression": compression_argument(level), "validate": validate}
        return _existing(target, schema, limits, constants)
    return Store(target, "a")


def _difference(found: Schema, wanted: Schema) -> str:
    for path in found.leaves | wanted.leaves:
        if (one := found.leaves.get(path)) != (other := wanted.leaves.get(path)):
            return f"in which {path} is {one or 'missing'}, not {other or 'missing'}"
    return f"of the same fields nested otherwise, {found}"


def _existing(target: Path, schema: Schema, limits: Limits, constants: Mapping[str, object]) -> Store:
    """Open the store at ``target``.

    Raises StoreExists if the store has another schema, or another value of an argument. Arguments in ``limits`` and
    ``constants`` that are None are not compared.
    """
    try:
        root = read_root(target)
    except StoreNotFound:
        raise StoreExists(f"{target} exists and is not a readable store: give a new path") from None
    if root.schema != schema:
        raise StoreExists(
            f"the store at {target} has another schema, {_difference(root.schema, schema)}: give a new path"
        ) from None
    has = {**vars(root.limits), **vars(root), "compression": compression_argument(root.compression)}
    for name, wanted in {**vars(limits), **constants}.items():
        if wanted is not None and (found := has[name]) != wanted:
            resized = f'change the limit with diskreplay.open(path, "a").resize({name}={wanted})'
            raise StoreExists(
                f"the store at {target} has {name}={found!r}, not {wanted!r}: omit this argument, or "
                f"{resized if name in vars(limits) else 'give a new path'}"
            ) from None
    return Store(target, "a")


def open(path: PathLike, mode: Literal["r", "a"] = "r") -> Store:
    """Open a store. Mode "r" never writes. Mode "a" allows writing, and seals the segments of dead writers.

    Raises
    ------
    StoreNotFound
        The path has no store.
    FormatError
        The store is damaged or of a version that this release does not know, or the path is a URL such as
        s3://bucket/x.
    ReadOnlyError
        The mode is "a", and the operating system does not let this process write to the store.
    StoreLocked
        The store was read 100 times, and each time other processes merged segments meanwhile.

    Examples
    --------
    >>> with dr.open("cartpole.replay") as store:
    ...     store.num_episodes
    20
    """
    return Store(path, mode)
