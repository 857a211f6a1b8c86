"""What the processes of the stress tests run. Every row tells who wrote it, so a torn one gives itself away."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np

import diskreplay as dr

WIDTH = 16
SALT = 0x5BD1E995


def schema(wide: bool) -> dr.Schema:
    """Return a schema whose rows go through mappings, or (wide) whose observation is written by position."""
    obs = {"code": dr.Field((WIDTH,), "int64")}
    if wide:
        obs["wide"] = dr.Field((520,), "int64")
    return dr.Schema(
        obs=obs,
        action=dr.Field((2,), "int64"),
        reward=dr.Field((), "float32"),
        extra={"check": dr.Field((), "int64")},
        episode={"last": dr.Field((), "int64")},
    )


def code(writer: int, lane: int, counter: Any) -> Any:
    """Return the number that tells a step from every other."""
    return (np.int64(writer) << 48) | (np.int64(lane) << 40) | counter


def rows(codes: np.ndarray, wide: bool) -> dict[str, np.ndarray]:
    """Return observations that hold their code everywhere."""
    codes = np.asarray(codes)
    obs = {"code": np.repeat(codes[..., None], WIDTH, -1)}
    if wide:
        obs["wide"] = np.repeat(codes[..., None], 520, -1)
    return obs


def step(codes: Any, wide: bool) -> dict[str, Any]:
    """Return one step, or one of every lane."""
    codes = np.asarray(codes)
    return {
        "obs": rows(codes, wide),
        "action": np.stack([codes, codes], -1),
        "reward": (codes % 1000).astype(np.float32),
        "check": codes ^ SALT,
    }


def episode_length(counter: int) -> int:
    """Return the length of the episode that starts at a step: 1 to 60, the same for whoever asks."""
    return 1 + (counter * 2654435761 >> 7) % 60


def start_together(gate: Any) -> None:
    """Say that this process is ready, and wait until all are."""
    gate.send("ready")
    gate.recv()
    gate.close()


def write(path: str, number: int, seconds: float, wide: bool, gate: Any, result: str) -> None:
    """Append until the time is up; leave the number of steps of each lane in the file `result`."""
    store = dr.open(path, mode="a")
    kinds = (_write_steps, _write_steps, _write_lanes, _write_blocks, _write_without_next)
    start_together(gate)
    until = time.monotonic() + seconds
    with store:
        counts = kinds[number % len(kinds)](store, number, until, wide)
    Path(result).write_text(json.dumps(counts))


def _write_steps(store: Any, number: int, until: float, wide: bool, given: bool = True) -> list[int]:
    counter = 0
    with store.writer() as writer:
        while time.monotonic() < until:
            for left in reversed(range(episode_length(counter))):
                following = {"next_obs": rows(code(number, 0, counter + 1), wide)} if given else {}
                ends = {"terminated": left == 0 and counter % 3 > 0, "truncated": left == 0 and counter % 3 == 0}
                values = {"episode": {"last": counter}} if left == 0 else {}
                writer.append(**step(code(number, 0, counter), wide), **ends, **following, **values)
                counter += 1
    return [counter]


def _write_without_next(store: Any, number: int, until: float, wide: bool) -> list[int]:
    return _write_steps(store, number, until, wide, given=False)


def _write_lanes(store: Any, number: int, until: float, wide: bool, lanes: int = 4) -> list[int]:
    counters = np.zeros(lanes, np.int64)
    rng = np.random.default_rng(number)
    index = np.arange(lanes)
    with store.writer(num_envs=lanes) as writer:
        while time.monotonic() < until:
            mask = rng.random(lanes) < 0.8
            codes = code(number, 0, counters) + (index << 40)
            writer.append(
                **step(codes, wide),
                terminated=rng.random(lanes) < 0.05,
                truncated=rng.random(lanes) < 0.02,
                next_obs=rows(codes + 1, wide),
                mask=mask,
            )
            counters += mask
    return counters.tolist()


def _write_blocks(store: Any, number: int, until: float, wide: bool) -> list[int]:
    counter = 0
    with store.writer() as writer:
        while time.monotonic() < until:
            length = episode_length(counter)
            block = step(code(number, 0, np.arange(counter, counter + length)), wide)
            block["obs"] = rows(code(number, 0, np.arange(counter, counter + length + 1)), wide)
            writer.append_episode(**block, terminated=counter % 2 == 0)
            counter += length
    return [counter]


def sample(path: str, number: int, seconds: float, wide: bool, gate: Any, result: str) -> None:
    """Sample until the time is up and check every transition; leave what was seen in the file `result`."""
    n_step = 1 + 4 * number
    store = dr.open(path)
    sampler = dr.Sampler(store, dr.Transitions(n_step=n_step, gamma=1.0), batch_size=64, seed=number)
    start_together(gate)
    until = time.monotonic() + seconds
    batches, newest = 0, {}
    while time.monotonic() < until:
        try:
            batch = sampler.sample().numpy()
        except dr.NotEnoughData:
            continue
        check_batch(batch)
        batches += 1
        for value in batch["check"].tolist():
            key, counter = str((value ^ SALT) >> 40), (value ^ SALT) & ((1 << 40) - 1)
            newest[key] = max(newest.get(key, 0), counter)
    sampler.close()
    store.close()
    Path(result).write_text(json.dumps({"batches": batches, "newest": newest}))


def check_batch(batch: dict[str, Any]) -> None:
    """Check that every field of every transition is what its writer wrote."""
    codes = batch["check"] ^ SALT
    k = batch["n_steps"]
    assert (batch["action"] == codes[:, None]).all()
    for leaf, x in batch["obs"].items():
        assert (x == codes[:, None]).all(), leaf
        following = batch["next_obs"][leaf]
        # A terminated step without a final observation is followed by zeros.
        unknown = batch["terminated"] & (following == 0).all(1)
        assert ((following == (codes + k)[:, None]).all(1) | unknown).all(), leaf
    counters = codes & ((1 << 40) - 1)
    returns = [sum((c + i) % 1000 for i in range(n)) for c, n in zip(codes.tolist(), k.tolist(), strict=True)]
    assert batch["reward"].tolist() == returns
    assert (counters >= 0).all()
    assert ((k >= 1) & (batch["discount"] == ~batch["terminated"])).all()
