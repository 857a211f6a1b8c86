"""The `Batch` that samplers deliver, and its conversion to minibatches, sequences and TensorDicts."""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils import _pytree as pytree

from diskreplay import markup
from diskreplay.distributions.number_arguments import int_argument, int_or_none
from diskreplay.errors import MissingExtra
from diskreplay.ids import Ints
from diskreplay.sampling.arguments import device_argument
from diskreplay.schema.schema import TupleRecord

if TYPE_CHECKING:
    from tensordict import TensorDict

Tree = Any  # a tensor, an array that becomes a tensor when it is read, or a dict or TupleRecord of trees
Kind = tuple[Any, ...]
Bools = NDArray[np.bool_]


class Batch(Mapping[str, Tree]):
    """A frozen record of tensors by name: `batch.obs` and `batch["obs"]` are the same tensor.

    The leading axis of each tensor has one entry for each item of the batch. A batch is a mapping of names to tensors,
    so `dict(batch)`, `batch.items()`, TensorDict and the collation of a DataLoader work. A batch is also a pytree of
    torch. `len(batch)` is the number of fields, and `batch.batch_size` is the number of items.

    Dict spaces give nested dicts. Tuple spaces give tuples that also have the keys "0", "1", ...: `batch.action[0]` and
    `batch.action["0"]` are the same. A path such as "obs/image" names a leaf, as in the argument `fields` of `Sampler`:
    `batch["obs/image"]`.

    The memory of a batch is not reused while the batch, any of its tensors, or any view of them is alive. A field
    cannot be replaced, but you may change its tensors in place.

    Parameters
    ----------
    fields : dict
        Tensors, or arrays on the CPU, by name. One of the names is "index".
    kind : tuple or None
        The kind of the ids in `index`; None if it is unknown.

    Examples
    --------
    >>> batch = dr.Sampler("cartpole.replay", dr.Transitions(), batch_size=8).sample()
    >>> batch["obs"] is batch.obs, batch.batch_size
    (True, 8)
    >>> sorted(batch.select([0, 1]).numpy())[:3]
    ['action', 'discount', 'index']
    """

    __slots__ = ("__weakref__", "_fields", "_kind")
    _fields: dict[str, Tree]
    _kind: Kind | None

    def __init__(self, fields: dict[str, Tree], kind: Kind | None = None) -> None:
        # Arrays become tensors when they are first read, because most training loops do not read all fields. A tensor
        # costs nearly a microsecond to make and to drop.
        _set_fields(self, fields)
        _set_kind(self, kind)

    @property
    def kind(self) -> Kind | None:
        """The kind of the ids in `index`, from the view: for example ("transitions",), or ("sequences", 80, 40, True).

        The tensor `index` carries its kind, so that `Sampler.update_priorities` skips ids of another kind than the
        view's. Results computed from `index` (`index[rows]`, `index.numpy()`, a copy from a device) carry no kind.
        """
        return self._kind

    def __getattr__(self, name: str) -> Tree:
        # `_fields` is missing only while a copy is being made.
        if name != "_fields" and name in self._fields:
            return self[name]
        raise AttributeError(f"a batch of {', '.join(self.keys()) if name != '_fields' else 'nothing'} has no {name!r}")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a batch is frozen: cannot set {name!r}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a batch is frozen: cannot delete {name!r}")

    def __getitem__(self, name: str) -> Tree:
        try:
            value = self._fields[name]
        except KeyError:
            return self._leaf(name)
        if type(value) is _array:
            value = self._fields[name] = _tensor(value)
        elif type(value) in _NODES and _has_arrays(value):
            value = self._fields[name] = map_tree(torch.as_tensor, value)
        if name == "index" and self._kind is not None:
            value.__dict__["kind"] = self._kind
        return value

    def _leaf(self, path: str) -> Tree:
        first, *below = path.split("/")
        if not below:
            raise KeyError(path)
        found = self[first]
        for key in below:
            if type(found) not in _NODES:
                raise KeyError(path)
            found = found[key]
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._fields or (isinstance(name, str) and "/" in name and super().__contains__(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    # A batch equals only itself, because a comparison of tensors gives a tensor and not a bool.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @property
    def batch_size(self) -> int:
        """The number of items: the length of the leading axis."""
        return len(self._fields["index"])

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._fields]

    def __reduce__(self) -> tuple[Any, ...]:
        return Batch, (map_tree(_to_pickle, self._tensors()), self._kind)

    def __repr__(self) -> str:
        return f"Batch({', '.join(f'{name}={_describe(value)}' for name, value in self._tensors().items())})"

    def _repr_html_(self) -> str:
        rows = [[*map(markup.text, row)] for name, value in self._tensors().items() for row in _rows_of(name, value)]
        title = markup.element("strong", markup.text(f"Batch of {self.batch_size:,}"))
        return markup.element("div", title, markup.table(["field", "shape", "dtype", "device"], rows))

    def _tensors(self) -> dict[str, Tree]:
        return {name: self[name] for name in self._fields}

    def select(self, indices: Any) -> "Batch":
        """Return a batch with copies of some of the items.

        Parameters
        ----------
        indices : array_like of int or bool, or Tensor
            The positions of the items, (n,), in the order of the result; or a mask of all items, (batch_size,).

        Raises
        ------
        IndexError
            An item does not exist, or `indices` does not have one axis.
        """
        chosen = torch.as_tensor(indices, device=self["index"].device)
        if chosen.ndim != 1:
            raise IndexError(f"indices must have one axis, not shape {tuple(chosen.shape)}")
        chosen = chosen if chosen.numel() else chosen.long()
        return Batch(map_tree(operator.itemgetter(chosen), self._tensors()), self._kind)

    def pin_memory(self) -> "Batch":
        """Return the batch in pinned memory, so that copies to a CUDA device are fastest.

        Raises
        ------
        ValueError
            torch cannot pin memory here, for example without a CUDA device.
        """
        try:
            return Batch(map_tree(torch.Tensor.pin_memory, self._tensors()), self._kind)
        except RuntimeError as error:
            (why, *_) = str(error).splitlines()
            raise ValueError(f"torch cannot pin memory here, leave pin_memory() out: {why}") from error

    def replaced(self, fields: Mapping[str, Tree]) -> "Batch":
        """Return the batch with these fields added. A given field replaces the batch's field of the same name."""
        return Batch({**self._fields, **fields}, self._kind)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        """Return the batch on a device. Tensors that are already on the device are not copied.

        Raises
        ------
        ValueError
            torch cannot use the device.
        """
        device = device_argument(device)
        moved = map_tree(lambda tensor: tensor.to(device, non_blocking=non_blocking), self._tensors())
        return Batch(moved, self._kind)

    def numpy(self) -> dict[str, Any]:
        """Return the fields as numpy arrays, nested like the batch; arrays of a CPU batch share the tensors' memory."""
        arrays: dict[str, Any] = map_tree(lambda tensor: tensor.detach().cpu().numpy(), self._tensors())
        return arrays

    def to_tensordict(self) -> "TensorDict":
        """Return the batch as a TensorDict with TorchRL's keys. The TensorDict shares memory with the batch.

        If `obs` is one tensor, its key is "observation". If `obs` is a dict or tuple, the TensorDict has the keys of
        `obs`. `next_obs` has the same keys below "next". `reward`, `terminated` and `truncated` keep their names below
        "next". The key ("next", "done") is true if the step is terminated or truncated. `n_steps` is
        "steps_to_next_obs", `is_first` is "is_init", and `weight` is "priority_weight". Other fields keep their names.
        Rewards, flags and `n_steps` have a trailing axis of length 1.

        The batch size is the shape of `reward`: (B,), or (B, L) for sequences. Fields with one value for each sequence
        are expanded over its L steps.

        Raises
        ------
        MissingExtra
            tensordict is not installed.
        """
        return to_tensordict(self)

    def minibatches(self, size: int, epochs: int = 1, seed: int | None = None) -> Iterator["Batch"]:
        """Return an iterator over the items in random order, `size` at a time.

        A rollout has num_steps times num_envs items. Minibatches are copies. The last minibatch of an epoch may be
        smaller.

        Parameters
        ----------
        size : int
            Number of items in a minibatch: the length of its leading axis.
        epochs : int
            The number of passes over all items. Each pass has another order.
        seed : int or None
            The seed of the random orders. Use a different seed for each rollout; with the same seed, all rollouts have
            the same orders. None: no fixed seed.

        Raises
        ------
        ValueError
            `size` or `epochs` is not an int of at least 1.
        """
        size, epochs = int_argument("size", size), int_argument("epochs", epochs)
        return self._shuffled(size, epochs, np.random.Generator(np.random.PCG64(seed)))

    def sequences(
        self,
        size: int,
        epochs: int = 1,
        seed: int | None = None,
        *,
        length: int | None = None,
        start_only: Sequence[str] = (),
    ) -> Iterator["Batch"]:
        """Return an iterator over a rollout's sequences in random order, `size` at a time, for recurrent networks.

        A sequence has the consecutive steps of one episode in one column. A sequence begins at the column's first step,
        or after a step that ended an episode. Each step is in exactly one sequence. Minibatches are copies. The last
        minibatch of an epoch may be smaller.

        Parameters
        ----------
        size : int
            Number of sequences in a minibatch: the length B of its leading axis.
        epochs, seed
            See `minibatches`.
        length : int or None
            Sequences are cut after `length` steps, and L is `length` (truncated backpropagation through time). None:
            sequences are not cut, and L is the length of the longest sequence in the minibatch.
        start_only : sequence of str
            Fields that a minibatch has for the first step of each sequence only, (B, ...). For example, the collector's
            recurrent state at this step is the initial state of the sequence.

        Returns
        -------
        iterator of Batch
            The fields of the rollout as (B, L, ...), with zeros and False after the end of a sequence. `mask`, (B, L)
            bool, is True at real steps. `index`, (B,), has the ids of the first steps.

        Raises
        ------
        ValueError
            The batch is not a rollout with `terminated` and `truncated`, or an argument is invalid.
        """
        if self["index"].ndim != 2 or not {"terminated", "truncated"} <= self.keys():
            raise ValueError(
                "only a batch of Rollouts, (num_steps, num_envs), with terminated and truncated has sequences"
            )
        ends = (self["terminated"] | self["truncated"]).cpu().numpy()
        return sequences_of(self, ends, size, epochs, seed, length, start_only)

    def _shuffled(self, size: int, epochs: int, rng: np.random.Generator) -> Iterator["Batch"]:
        axes = self["index"].ndim
        flat = Batch(map_tree(lambda tensor: tensor.flatten(0, axes - 1), self._tensors()), self._kind)
        for _ in range(epochs):
            order = torch.from_numpy(rng.permutation(flat.batch_size)).to(flat["index"].device)
            for start in range(0, len(order), size):
                yield flat.select(order[start : start + size])


# These functions are looked up only once, because a batch is made and read in a few microseconds.
_set_fields: Callable[[Batch, dict[str, Tree]], None] = Batch.__dict__["_fields"].__set__
_set_kind: Callable[[Batch, Kind | None], None] = Batch.__dict__["_kind"].__set__
_tensor, _array = torch.from_numpy, np.ndarray
_NODES = frozenset([dict, TupleRecord])
# torch can neither fill nor pickle tensors of these unsigned dtypes. To write zeros, such a tensor is viewed with the
# signed dtype. A signed zero has the same bytes.
_SAME_BYTES = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def _to_pickle(tensor: torch.Tensor) -> Tree:
    """Return an array in place of a tensor that torch cannot pickle."""
    return tensor.numpy() if tensor.dtype in _SAME_BYTES and tensor.device.type == "cpu" else tensor


def kind_of(index: Any) -> Kind | None:
    return index.__dict__.get("kind") if isinstance(index, torch.Tensor) else None


class Windows(NamedTuple):
    """`rows`, (B, L), has the row of each step in the flattened rollout; `mask`, (B, L), is True at real steps."""

    rows: Ints
    mask: Bools


def find_sequences(ends: Bools, length: int | None) -> tuple[Ints, Ints]:
    """Return the position of each sequence's first step, (n,), and each sequence's number of steps, (n,).

    `ends`, (steps, columns), is True at the last step of an episode, where a sequence ends, too. No sequence has more
    than `length` steps. The position of step r of column c is c * steps + r.
    """
    first = np.ones(ends.shape, np.bool_)
    first[1:] = ends[:-1]
    if length is not None:
        step = np.arange(len(ends))[:, None]
        begun = np.maximum.accumulate(np.where(first, step, 0))
        first |= (step - begun) % length == 0
    places = np.flatnonzero(first.T)
    return places, np.diff(places, append=first.size)


def shuffled_sequences(
    ends: Bools, size: int, epochs: int, rng: np.random.Generator, length: int | None
) -> Iterator[Windows]:
    """Yield minibatches of `size` sequences, padded to `length` steps. None: padded to the longest sequence."""
    steps, columns = ends.shape
    places, counts = find_sequences(ends, length)
    for _ in range(epochs):
        order = rng.permutation(len(places))
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            column, first = np.divmod(places[chosen, None], steps)
            offset = np.arange(counts[chosen].max() if length is None else length)
            mask = offset < counts[chosen, None]
            yield Windows((first + np.where(mask, offset, 0)) * columns + column, mask)


def sequences_of(
    batch: Batch,
    ends: Bools,
    size: int,
    epochs: int,
    seed: int | None,
    length: int | None,
    start_only: Sequence[str],
) -> Iterator[Batch]:
    """See `Batch.sequences`; `ends`, (steps, columns), is True at the last step of an episode."""
    size, epochs = int_argument("size", size), int_argument("epochs", epochs)
    length = int_or_none("length", length, "whole episodes")
    if isinstance(start_only, str) or not set(start_only) <= batch.keys():
        raise ValueError(f"start_only must be a sequence of names, of {', '.join(batch)}, not {start_only!r}")
    flat = {name: map_tree(lambda tensor: tensor.flatten(0, 1), batch[name]) for name in batch}
    found = shuffled_sequences(ends, size, epochs, np.random.Generator(np.random.PCG64(seed)), length)
    return (Batch(_windows_of(flat, windows, {*start_only, "index"}), batch.kind) for windows in found)


def _windows_of(flat: dict[str, Tree], windows: Windows, start_only: set[str]) -> dict[str, Tree]:
    device = flat["index"].device
    rows, mask = torch.from_numpy(windows.rows).to(device), torch.from_numpy(windows.mask).to(device)

    def padded(tensor: torch.Tensor) -> torch.Tensor:
        found = tensor[rows]
        found.view(_SAME_BYTES.get(found.dtype, found.dtype))[~mask] = 0
        return found

    first = operator.itemgetter(rows[:, 0])
    parts = {name: map_tree(first if name in start_only else padded, tree) for name, tree in flat.items()}
    return {**parts, "mask": mask}


def _has_arrays(tree: Tree) -> bool:
    return any(map(_has_arrays, tree.values())) if type(tree) in _NODES else not isinstance(tree, torch.Tensor)


def map_tree(function: Callable[..., Any], *trees: Tree) -> Tree:
    """Apply `function` to the leaves of all `trees` at each path, and return a tree of the results."""
    if isinstance(trees[0], dict):
        return {name: map_tree(function, *(tree[name] for tree in trees)) for name in trees[0]}
    if isinstance(trees[0], TupleRecord):
        return TupleRecord(map_tree(function, *below) for below in zip(*trees, strict=True))
    return function(*trees)


def map_paths(function: Callable[[str, Any], Any], tree: Tree, path: str) -> Tree:
    """Return a tree with `function(path, leaf)` in place of each leaf; `path` is the path of the tree's root."""
    if isinstance(tree, dict):
        return {name: map_paths(function, inner, f"{path}/{name}") for name, inner in tree.items()}
    if isinstance(tree, tuple):
        return TupleRecord(map_paths(function, inner, f"{path}/{at}") for at, inner in enumerate(tree))
    return function(path, tree)


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype for sums on a device: float64, or float32 on Apple's devices, which lack float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def torch_values(value_fn: Callable[[Tree], Any], device: torch.device) -> Callable[[Any], NDArray[Any]]:
    def evaluate(observations: Tree) -> NDArray[Any]:
        with torch.no_grad():
            values = value_fn(map_tree(lambda array: torch.from_numpy(array).to(device), observations))
        if isinstance(values, torch.Tensor):
            values = values.to("cpu", torch.float64).numpy()
        return np.asarray(values)

    return evaluate


def _describe(tree: Tree) -> str:
    if isinstance(tree, TupleRecord):
        return f"({', '.join(map(_describe, tree))})"
    if isinstance(tree, dict):
        return f"{{{', '.join(f'{name}: {_describe(below)}' for name, below in tree.items())}}}"
    return f"{str(tree.dtype).removeprefix('torch.')}{list(tree.shape)}"


def _rows_of(path: str, tree: Tree) -> Iterator[tuple[object, ...]]:
    if type(tree) in _NODES:
        for key, below in tree.items():
            yield from _rows_of(f"{path}/{key}", below)
    else:
        yield path, tuple(tree.shape), str(tree.dtype).removeprefix("torch."), tree.device


def _parts(batch: Batch) -> tuple[list[Tree], tuple[list[str], Kind | None]]:
    return [batch[name] for name in batch], (list(batch), batch.kind)


def _of_parts(values: Iterable[Tree], context: tuple[list[str], Kind | None]) -> Batch:
    names, kind = context
    return Batch(dict(zip(names, values, strict=True)), kind)


# TorchRL's keys for fields of a batch. Fields that are not listed keep their names.
KEYS: Mapping[str, str | tuple[str, str]] = {
    "reward": ("next", "reward"),
    "terminated": ("next", "terminated"),
    "truncated": ("next", "truncated"),
    "n_steps": "steps_to_next_obs",
    "is_first": "is_init",
    "weight": "priority_weight",
}
# Fields that have a trailing axis of length 1 in TorchRL.
COLUMNS = frozenset({"reward", "terminated", "truncated", "n_steps", "is_first"})


def to_tensordict(batch: Mapping[str, Any]) -> "TensorDict":
    with MissingExtra.raised_for("a TensorDict", "torchrl"):
        from tensordict import TensorDict

    shape = batch["reward"].shape if "reward" in batch else batch["index"].shape
    found: dict[Any, Any] = {}
    for name, value in batch.items():
        if name in ("obs", "next_obs"):
            below = {"observation": value} if isinstance(value, torch.Tensor) else value
            found |= _leaves(below, ("next",) if name == "next_obs" else (), shape)
        elif isinstance(value, torch.Tensor):
            spread = _over_steps(value, shape)
            found[KEYS.get(name, name)] = spread[..., None] if name in COLUMNS else spread
        else:
            found |= _leaves(value, (name,), shape)
    if {"terminated", "truncated"} <= batch.keys():
        found["next", "done"] = found["next", "terminated"] | found["next", "truncated"]
    return TensorDict(found, batch_size=shape)


def _over_steps(value: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return a value of steps, (B, L, ...), unchanged; expand a value of items, (B, ...), to (B, L, ...)."""
    if value.shape[: len(shape)] == shape:
        return value
    return value[:, None].expand(*shape, *value.shape[1:])


def _leaves(tree: Any, above: tuple[str, ...], shape: torch.Size) -> dict[tuple[str, ...], torch.Tensor]:
    """Return the tensors of a tree by their keys in the TensorDict, each tensor expanded over all steps.

    A key is a tuple of names, such as ("next", "reward"). So an extra field named "next" does not replace TorchRL's
    "next".
    """
    if isinstance(tree, torch.Tensor):
        return {above: _over_steps(tree, shape)}
    return {key: leaf for name, part in tree.items() for key, leaf in _leaves(part, (*above, name), shape).items()}


# torch has no public module for pytrees, but torch's own warnings recommend this function.
pytree.register_pytree_node(Batch, _parts, _of_parts)
pytree.register_pytree_node(TupleRecord, lambda node: (list(node), None), lambda items, _: TupleRecord(items))
