"""Demonstrations as robomimic's scripts write them with h5py, read by its data set."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dumps
import h5py
import numpy as np

try:
    import robomimic.utils.obs_utils as ObsUtils
    from robomimic.utils.dataset import SequenceDataset
except ImportError:  # then h5py alone reads the files
    SequenceDataset = None


def write(folder: Path) -> None:
    rng = np.random.default_rng(0)
    with h5py.File(folder / "robomimic.hdf5", "w") as file:
        data = file.create_group("data")
        for number, (length, how) in enumerate(dumps.EPISODES):
            demo = data.create_group(f"demo_{number}")
            obs = {
                "robot0_eef_pos": rng.random((length + 1, 3)),
                "agentview_image": dumps.smooth(rng, length + 1, 16, 24, 3),
                "object": rng.random((length + 1, 10)).astype("f4"),
            }
            for name, rows in obs.items():
                demo[f"obs/{name}"], demo[f"next_obs/{name}"] = rows[:-1], rows[1:]
            demo["actions"] = rng.random((length, 7))
            demo["rewards"] = rng.random(length)
            demo["dones"] = ((np.arange(length) == length - 1) & (how == "terminated")).astype(np.int64)
            demo["states"] = rng.random((length, 9))
            demo.attrs.update({"num_samples": length, "model_file": f"<mujoco {number}>"})
        data.attrs.update({"total": sum(length for length, _ in dumps.EPISODES), "env_args": json.dumps({"type": 1})})
        file["mask/train"] = np.array(["demo_0", "demo_2"], "S")
        file["mask/valid"] = np.array(["demo_1", "demo_3"], "S")


def opened(path: Path, obs: list[str], keys: list[str], mask: str | None = None) -> Any:
    ObsUtils.initialize_obs_utils_with_obs_specs({"obs": {"low_dim": obs, "rgb": []}})
    return SequenceDataset(
        hdf5_path=str(path), obs_keys=obs, dataset_keys=keys, load_next_obs=bool(obs), hdf5_cache_mode=None,
        hdf5_use_swmr=False, filter_by_attribute=mask,
    )  # fmt: skip


def read(path: Path) -> Iterator[dict[str, Any]]:
    with h5py.File(path) as file:
        demos = sorted(file["data"], key=lambda name: int(name.removeprefix("demo_")))
        first = file["data"][demos[0]]
        obs, keys = list(first.get("obs", ())), [name for name in first if name not in ("obs", "next_obs")]
        masks = list(file.get("mask", ()))
        fields = {
            demo: {
                name: value
                for name, value in file["data"][demo].attrs.items()
                if name != "num_samples" and not isinstance(value, str)
            }
            for demo in demos
        }
        # A script of robomimic counts the steps in files of robosuite before it reads these.
        is_read = SequenceDataset is not None and "num_samples" in first.attrs
        inner = [*keys, *(f"{part}/{name}" for name in obs for part in ("obs", "next_obs"))]
        plain = {} if is_read else {(demo, name): file["data"][demo][name][()] for demo in demos for name in inner}
        chosen = {mask: {name.decode() for name in file["mask"][mask]} for mask in masks}
    made = opened(path, obs, keys) if is_read else None
    if is_read:
        chosen = {mask: set(opened(path, obs, keys, mask).demos) for mask in masks}

    def values(demo: str, name: str) -> Any:
        return plain[demo, name] if made is None else made.get_dataset_for_ep(demo, name)[()]

    for demo in demos:
        rows = {name: values(demo, name) for name in keys}
        found = {"action": rows.pop("actions")}
        length = len(found["action"])
        found["reward"] = rows.pop("rewards", np.zeros(length, np.float32))
        terminated = bool(rows.pop("dones", np.zeros(length))[-1])
        found |= {"terminated": np.bool_(terminated), "truncated": np.bool_(not terminated)}
        for name in obs:
            before, after = (values(demo, f"{part}/{name}") for part in ("obs", "next_obs"))
            found["obs" if obs == ["obs"] else f"obs/{name}"] = np.concatenate([before, after[-1:]])
        if not obs:
            found["obs"] = rows.pop("states")
        found |= {f"extra/{name}": each for name, each in rows.items()}
        found |= {f"episode/mask_{mask}": np.bool_(demo in chosen[mask]) for mask in masks}
        found |= {f"episode/{name}": value for name, value in fields[demo].items()}
        yield found


if __name__ == "__main__":
    dumps.main(write, read)
