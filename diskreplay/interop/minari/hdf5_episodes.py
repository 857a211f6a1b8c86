"""Read episodes of Minari in HDF5: each episode is a group of arrays, nested like the spaces and the infos.

Minari's own functions are slower: they make several objects of h5py for each array.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from diskreplay import MissingExtra
from diskreplay.interop.minari.arrow_files import ENDS, INFOS, AnySpace, Raw, decode_images

with MissingExtra.raised_for("a data set of Minari in HDF5", "minari"):
    import h5py
    from gymnasium import spaces

    from diskreplay.interop.exchange.hdf5_files import member, read_array


def read_hdf5(
    folder: Path, observations: AnySpace, actions: AnySpace, is_jpeg: bool, numbers: Iterable[int]
) -> Iterator[Raw]:
    """Yield the episodes with these numbers, in Minari's form; an episode without infos has an empty dict of infos.

    `check_hdf5` must have checked the file.
    """
    with h5py.File(folder / "main_data.hdf5", "r") as file:
        for number in numbers:
            group = member(file.id, f"episode_{number}")
            yield {
                "observations": _decode(observations, member(group, "observations"), is_jpeg),
                "actions": _decode(actions, member(group, "actions"), is_jpeg),
                **{name: read_array(member(group, name)) for name in ("rewards", *ENDS)},
                INFOS: _decode_infos(member(group, INFOS)) if INFOS.encode() in group else {},
            }


def _decode(space: AnySpace, item: Any, is_jpeg: bool) -> Any:
    if isinstance(space, spaces.Tuple):
        return tuple(_decode(inner, member(item, f"_index_{at}"), is_jpeg) for at, inner in enumerate(space.spaces))
    if isinstance(space, spaces.Dict):
        names = [key.decode() for key in item]
        return {name: _decode(space.spaces[name], member(item, name), is_jpeg) for name in names}
    values = read_array(item)
    if isinstance(space, spaces.Text):
        return [text.decode() for text in values]
    # A JPEG image is stored as one row of bytes. An image that is stored as pixels has as many axes as the space.
    if is_jpeg and isinstance(space, spaces.Box) and values.ndim <= 2 <= len(space.shape):
        return decode_images(map(bytes, values))
    return values


def _decode_infos(group: h5py.h5g.GroupID) -> Raw:
    found: Raw = {}
    for key in group:
        item = h5py.h5o.open(group, key)
        is_group = isinstance(item, h5py.h5g.GroupID)
        # If a name is not valid UTF-8, Minari would return it as bytes, which a note cannot hold.
        found[key.decode(errors="backslashreplace")] = _decode_infos(item) if is_group else read_array(item)
    return found
