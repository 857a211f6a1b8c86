"""Reading episodes of Minari from HDF5, Arrow and Parquet."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from diskreplay import FormatError
from diskreplay.interop.minari.arrow_files import INFOS, Raw, read_file

if TYPE_CHECKING:
    from minari.dataset.minari_storage import MinariStorage

__all__ = ["METADATA", "read_episodes"]

METADATA = "metadata"


def read_episodes(storage: "MinariStorage", first: int, stop: int) -> Iterator[Raw]:
    """Yield the episodes of a data set from number ``first`` to below ``stop``, each with its "metadata"."""
    numbers = range(first, stop)
    if storage.FORMAT == "hdf5":
        found: Iterator[Raw] = iter(storage.get_episodes(numbers))
        for raw, metadata in zip(found, storage.get_episode_metadata(numbers), strict=True):
            yield {**raw, INFOS: raw[INFOS] or {}, METADATA: metadata}
        return
    form = storage.FORMAT, storage.observation_space, storage.action_space, storage.jpeg_encoding
    for number, metadata in zip(numbers, storage.get_episode_metadata(numbers), strict=True):
        folder = storage.data_path / str(number)
        if not isinstance(steps := metadata.get("total_steps"), int) or steps < 0:
            raise FormatError(f"{folder / 'metadata.json'} has no number of steps, but total_steps {steps!r:.40}")
        yield {**read_file(folder, *form, steps), METADATA: metadata}
