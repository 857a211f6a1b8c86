"""Reading episodes of Minari from HDF5, Arrow and Parquet."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from diskreplay import FormatError
from diskreplay.interop.minari.arrow_files import INFOS, Raw, read_file

if TYPE_CHECKING:
    from minari.dataset.minari_storage import MinariStorage

__all__ = ["METADATA", "read_episodes"]

METADATA = "metadata"


def read_episodes(storage: "MinariStorage", metadata: Mapping[str, Any], first: int, stop: int) -> Iterator[Raw]:
    """Yield the episodes of a data set from number ``first`` to below ``stop``, each with its "metadata".

    ``metadata`` is the document of the data set, which a storage would read again.
    """
    numbers, data_format = range(first, stop), metadata["data_format"]
    if data_format == "hdf5":
        found: Iterator[Raw] = iter(storage.get_episodes(numbers))
        for raw, own in zip(found, storage.get_episode_metadata(numbers), strict=True):
            yield {**raw, INFOS: raw[INFOS] or {}, METADATA: own}
        return
    form = data_format, storage.observation_space, storage.action_space, bool(metadata.get("jpeg_encoding", True))
    for number, own in zip(numbers, storage.get_episode_metadata(numbers), strict=True):
        folder = storage.data_path / str(number)
        if not isinstance(steps := own.get("total_steps"), int) or steps < 0:
            raise FormatError(f"{folder / 'metadata.json'} has no number of steps, but total_steps {steps!r:.40}")
        yield {**read_file(folder, *form, steps), METADATA: own}
