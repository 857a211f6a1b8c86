"""Data sets of RLDS, written and read by TFDS."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dumps
import numpy as np

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import tensorflow_datasets as tfds

F = tfds.features
PACKED = ("bool", "int8", "uint8", "int16", "uint16", "int32", "int64", "float16", "float32", "float64")
# TFDS does not read packed uint32 and uint64, and it writes an unpacked float64 as the float32 closest to it.
DTYPES = {"none": (*PACKED, "uint32", "uint64"), "bytes": PACKED, "zlib": PACKED}
IMAGES = {
    "png": F.Image(shape=(16, 24, 3), encoding_format="png"),
    "jpeg": F.Image(shape=(32, 24, 3), encoding_format="jpeg"),
    "gray": F.Image(shape=(17, 9, 1), encoding_format="jpeg"),
    "opaque": F.Image(shape=(8, 8, 4)),
    "any": F.Image(shape=(None, None, 3)),
    "depth": F.Image(shape=(16, 8, 1), dtype=np.uint16),
    "range": F.Image(shape=(8, 16, 1), dtype=np.float32),
}


def step_features() -> Any:
    numbers = {
        encoding: {dtype: F.Tensor(shape=(3,), dtype=np.dtype(dtype), encoding=encoding) for dtype in dtypes}
        for encoding, dtypes in DTYPES.items()
    }
    return F.FeaturesDict(
        {
            "observation": {"images": IMAGES, "numbers": numbers, "text": F.Text(), "level": F.Scalar(np.int64)},
            "action": {"move": F.Tensor(shape=(2,), dtype=np.float32), "grip": F.Scalar(np.float32)},
            "reward": F.Scalar(np.float32),
            "discount": F.Scalar(np.float32),
            **{name: F.Scalar(np.bool_) for name in ("is_first", "is_last", "is_terminal")},
            "language_instruction": F.Text(),
            "label": F.ClassLabel(names=["reach", "grasp", "place"]),
        }
    )


def values(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    if dtype.startswith("float"):
        return rng.normal(size=shape).astype(dtype)
    if dtype == "bool":
        return rng.random(shape) < 0.5
    bounds = np.iinfo(dtype)
    return rng.integers(bounds.min, bounds.max, shape, dtype, endpoint=True)


def step(rng: np.random.Generator, at: int, rows: int, acts: bool, terminated: bool) -> dict[str, Any]:
    images = {name: dumps.smooth(rng, *(size or 8 for size in each.shape)) for name, each in IMAGES.items()}
    images["depth"] = values(rng, "uint16", (16, 8, 1))
    images["range"] = values(rng, "float32", (8, 16, 1))
    numbers = {encoding: {dtype: values(rng, dtype, (3,)) for dtype in dtypes} for encoding, dtypes in DTYPES.items()}
    numbers["none"]["uint64"] >>= np.uint64(1)  # TFDS refuses to write larger ones
    return {
        "observation": {"images": images, "numbers": numbers, "text": f"sees {at}, ä", "level": at},
        "action": {"move": (rng.normal(size=2) * acts).astype("f4"), "grip": np.float32(rng.random() * acts)},
        "reward": np.float32(rng.normal() * acts),
        "discount": np.float32(at < rows - 1),
        "is_first": at == 0,
        "is_last": at == rows - 1,
        "is_terminal": at == rows - 1 and terminated,
        "language_instruction": ["reach", "grasp it"][at % 2],
        "label": at % 3,
    }


class Made(tfds.core.GeneratorBasedBuilder):
    """Episodes that end with a final observation alone in one split, and with a step in the other."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> Any:
        metadata = {"seed": F.Scalar(np.int64), "goal": F.Tensor(shape=(2,), dtype=np.float32), "file_path": F.Text()}
        features = F.FeaturesDict({"steps": F.Dataset(step_features()), "episode_metadata": metadata})
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager: Any) -> Any:
        return {"train": self._generate_examples(False), "val": self._generate_examples(True)}

    def _generate_examples(self, last_is_step: bool) -> Iterator[tuple[str, Any]]:
        rng = np.random.default_rng(int(last_is_step))
        for number, (length, how) in enumerate(dumps.EPISODES):
            rows = length + (not last_is_step)
            steps = [step(rng, at, rows, last_is_step or at < length, how == "terminated") for at in range(rows)]
            metadata = {"seed": number, "goal": rng.normal(size=2).astype("f4"), "file_path": f"/data/{number}"}
            yield f"{number}", {"steps": steps, "episode_metadata": metadata}


def write(folder: Path) -> None:
    builder = Made(data_dir=folder / ".made")
    builder.download_and_prepare(file_format="tfrecord")
    Path(builder.data_dir).rename(folder / "rlds")


def flat(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items() if isinstance(tree, dict) else ():
        yield from flat(value, f"{path}/{key}" if path else key)
    if not isinstance(tree, dict):
        yield path, tree


def read(folder: Path) -> Iterator[dict[str, Any]]:
    builder = tfds.builder_from_directory(folder)
    config = tfds.ReadConfig(interleave_cycle_length=1)
    for split in builder.info.splits:
        for episode in tfds.as_numpy(builder.as_dataset(split=split, shuffle_files=False, read_config=config)):
            rows = [dict(flat(row)) for row in episode["steps"]]
            steps = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
            acts = [name for name in steps if name.partition("/")[0] in ("action", "reward")]
            count = len(rows) - (not any(steps[name][-1].any() for name in acts))
            found = {"terminated": steps["is_terminal"][-1], "truncated": not steps["is_terminal"][-1]}
            for name, each in steps.items():
                if each.dtype.kind in "OS":
                    each = np.array([text.decode() for text in each])
                if name.startswith("observation") and name != "observation/text":
                    found["obs" + name.removeprefix("observation")] = each
                elif name in acts:
                    found[name] = each[:count]
                elif name not in ("is_first", "is_last", "is_terminal"):
                    renamed = {"discount": "step_discount", "observation/text": "text"}.get(name, name)
                    found[f"extra/{renamed}"] = each[:count]
            for name, value in flat(episode.get("episode_metadata", {})):
                found[f"episode/{name}"] = value.decode() if isinstance(value, bytes) else value
            yield {**found, **({"episode/split": split} if len(builder.info.splits) > 1 else {})}


if __name__ == "__main__":
    dumps.main(write, read)
