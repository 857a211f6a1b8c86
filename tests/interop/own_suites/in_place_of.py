"""A plugin for pytest that runs the suite of another library with the buffers of this package in place of its own.

    cd CHECKOUT
    PYTHONPATH=DISKREPLAY:DISKREPLAY/tests/interop/own_suites DISKREPLAY_SUITE=tianshou python -m pytest -p in_place_of

Modules of tests take ours as they import them; then the library has its own again, whose code names them itself.
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# suite -> tests that buffers in a store cannot pass, and the reasons
WITHOUT = {
    "stable-baselines3": {
        "test_buffer_dtypes": "samples a buffer without a step",
        "test_her": "keeps infos: copy_info_dict",
        "test_performance_her": "trains for minutes",
        "test_save_load": "keeps infos: copy_info_dict",
        "test_save_load_replay_buffer": "saves a buffer in a temporary folder",
        "test_truncate_last_trajectory": "saves a buffer in a temporary folder",
    },
    "tianshou": {
        "test_collector": "reads places without a step",
        "test_collector_with_atari_setting": "reads places without a step",
        "test_collector_with_dict_state": "moves steps to another buffer, with all that Tianshou holds of them",
        "test_collector_with_multi_agent": "has several rewards a step",
        "test_multibuf_hdf5": "adds steps without the next observation",
        "test_replaybuffermanager": "adds steps without the next observation",
        **dict.fromkeys(
            (
                "test_enough_episodes_and_correct_obs_indices_and_obs_next_iterative_collection_cycles_n_episode",
                "test_enough_episodes_and_correct_obs_indices_and_obs_next_iterative_collection_cycles_n_step",
                "test_enough_episodes_and_correct_obs_indices_and_obs_next_iterative_collection_cycles_first_n_episode_"
                "then_n_step",
            ),
            "reads observations of the ring of one environment, which has ids",
        ),
    },
}
SUITE = os.environ.get("DISKREPLAY_SUITE", "")


def of_stable_baselines3() -> dict[tuple[Any, str], Any]:
    import stable_baselines3
    from stable_baselines3.common import buffers

    from diskreplay.interop import sb3

    return {
        (buffers, "ReplayBuffer"): sb3.DiskReplayBuffer,
        (buffers, "DictReplayBuffer"): sb3.DiskDictReplayBuffer,
        (stable_baselines3, "HerReplayBuffer"): sb3.DiskHerReplayBuffer,
    }


def of_tianshou() -> dict[tuple[Any, str], Any]:
    from tianshou import data

    from diskreplay.interop import tianshou

    def in_a_store(kind: Callable[..., Any]) -> Callable[..., Any]:
        def made(total_size: int, buffer_num: int, **kwargs: Any) -> Any:
            return kind(Path(tempfile.mkdtemp()) / "store", total_size, buffer_num, **kwargs)

        return made

    return {
        (data, "VectorReplayBuffer"): in_a_store(tianshou.StoreReplayBuffer),
        (data, "PrioritizedVectorReplayBuffer"): in_a_store(tianshou.StorePrioritizedReplayBuffer),
    }


def replace(made: dict[tuple[Any, str], Any]) -> dict[tuple[Any, str], Any]:
    """Set names of modules; return the former values."""
    before = {(module, name): getattr(module, name) for module, name in made}
    for (module, name), value in made.items():
        setattr(module, name, value)
    return before


BEFORE: dict[tuple[Any, str], Any] = {}


def pytest_configure() -> None:
    BEFORE.update(replace({"stable-baselines3": of_stable_baselines3, "tianshou": of_tianshou}[SUITE]()))


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    replace(BEFORE)
    for item in items:
        if item.originalname in WITHOUT[SUITE]:
            item.add_marker(pytest.mark.skip(reason=WITHOUT[SUITE][item.originalname]))
