"""A recorder term for Isaac Lab, which appends each step of all environments of a manager-based task to a store.

The recorders of Isaac Lab keep an episode in memory until it ends. This term appends a step of all environments in one
call, with each environment in a lane of its own. Other processes can sample the step at once, and it survives a kill of
the simulator. `StoreRecorderManagerCfg` is the configuration for `recorders` of any task with rewards:

    ./isaaclab.sh -p examples/isaac_lab.py --task Isaac-Cartpole-v0 --num_envs 4096 --steps 300 --path cartpole.replay
"""

import argparse
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import gymnasium as gym
import torch
from isaaclab.app import AppLauncher

import diskreplay as dr

if __name__ == "__main__":
    PARSER = argparse.ArgumentParser(description="Record random actions in a task of Isaac Lab.")
    PARSER.add_argument("--task", default="Isaac-Cartpole-v0", help="a manager-based task with rewards")
    PARSER.add_argument("--num_envs", type=int, default=4096)
    PARSER.add_argument("--steps", type=int, default=300, help="of each environment")
    PARSER.add_argument("--path", default="isaac_lab.replay", help="the folder of the store")
    AppLauncher.add_app_launcher_args(PARSER)
    ARGS = PARSER.parse_args()
    APP = AppLauncher(ARGS).app  # before it runs, other modules of Isaac Lab cannot be imported

from isaaclab.managers import DatasetExportMode, RecorderManagerBaseCfg, RecorderTerm, RecorderTermCfg
from isaaclab.utils import configclass

NOTHING = None, None  # for the episodes that Isaac Lab's manager keeps in memory


class StoreRecorder(RecorderTerm):
    """Appends each step of all environments to a store, which it makes at the first step.

    A step has all groups of observations, the action of the policy, the reward, and both flags. If the task has a
    termination term "success", episodes have a field of this name. A reset of running environments cuts their episodes.
    """

    def __init__(self, cfg: Any, env: Any) -> None:
        super().__init__(cfg, env)
        self._writer: dr.VectorWriter | None = None
        self._running = torch.zeros(env.num_envs, dtype=torch.bool, device=env.device)

    def record_pre_step(self) -> tuple[None, None]:
        """Keep the observations that the policy has seen, and its actions."""
        env = self._env
        # Copies: the environment may write the next ones to the same memory.
        self._obs, self._action = mapped(torch.clone, env.obs_buf), env.action_manager.action.clone()
        if self._writer is None:
            self._writer = self._open()
        return NOTHING

    def record_post_step(self) -> tuple[None, None]:
        """Append the step."""
        assert self._writer is not None
        env = self._env
        terminated, truncated = env.reset_terminated, env.reset_time_outs
        ended = terminated | truncated
        step = self._obs, self._action, env.reward_buf, terminated, truncated
        if not ended.any():
            self._writer.append(*step)
        else:
            # These are the final observations. An environment whose episode continues computes its next observation
            # again after this, with a new command and new noise: the next step brings it.
            self._writer.append(*step, next_obs=env.obs_buf, mask=ended, episode=self._values())
            self._writer.append(*step, mask=~ended)
        self._running = ~ended
        return NOTHING

    def record_pre_reset(self, env_ids: Sequence[int] | torch.Tensor | slice | None) -> tuple[None, None]:
        """Cut the episodes that a reset ends early."""
        cut = torch.zeros_like(self._running)
        cut[slice(None) if env_ids is None else env_ids] = True
        cut &= self._running
        if self._writer is not None and cut.any():
            self._writer.end_episode(self._env.obs_buf, cut, self._values())
            self._running &= ~cut
        return NOTHING

    def _open(self) -> dr.VectorWriter:
        """Open the store for steps like the present one; it is closed with the environment."""
        obs, action = mapped(lambda values: values[0].cpu(), (self._obs, self._action))
        values = {name: False for name in self._values()}
        schema = dr.Schema.from_example(obs, action, episode=values)
        opened = ExitStack()
        store = opened.enter_context(dr.create(self.cfg.path, schema, capacity=self.cfg.capacity, exist_ok=True))
        writer: dr.VectorWriter = opened.enter_context(store.writer(self._env.num_envs))
        weakref.finalize(self, opened.close)
        return writer

    def _values(self) -> dict[str, torch.Tensor]:
        """Return the values of the episodes that end now."""
        terminations = self._env.termination_manager
        return {"success": terminations.get_term("success")} if "success" in terminations.active_terms else {}


def mapped(function: Callable[[torch.Tensor], torch.Tensor], values: Any) -> Any:
    """Return the results of a function for tensors that are nested in dicts and tuples."""
    if isinstance(values, dict):
        return {name: mapped(function, value) for name, value in values.items()}
    if isinstance(values, tuple):
        return tuple(mapped(function, value) for value in values)
    return function(values)


@configclass
class StoreRecorderCfg(RecorderTermCfg):
    """The recorder term, the folder of its store, and the number of steps that the store keeps; None: all."""

    class_type: type = StoreRecorder
    path: str = "isaac_lab.replay"
    capacity: int | None = None


@configclass
class StoreRecorderManagerCfg(RecorderManagerBaseCfg):
    """The recorder term alone, without Isaac Lab's own file."""

    dataset_export_mode: DatasetExportMode = DatasetExportMode.EXPORT_NONE
    store: StoreRecorderCfg = StoreRecorderCfg()


def main(args: argparse.Namespace) -> None:
    """Record random actions."""
    import isaaclab_tasks  # noqa: F401  # registers the tasks
    from isaaclab_tasks.utils import parse_env_cfg

    cfg: Any = parse_env_cfg(args.task, device=args.device, num_envs=args.num_envs)
    cfg.recorders = StoreRecorderManagerCfg()
    cfg.recorders.store.path = args.path
    env = gym.make(args.task, cfg=cfg)
    env.reset()
    for _ in range(args.steps):
        env.step(2 * torch.rand(env.action_space.shape or (), device=args.device) - 1)
    env.close()
    with dr.open(args.path) as store:
        print(f"recorded {len(store)} steps of {store.num_episodes} episodes")


if __name__ == "__main__":
    main(ARGS)
    APP.close()
