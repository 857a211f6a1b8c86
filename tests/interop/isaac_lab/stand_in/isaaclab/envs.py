"""A manager-based environment whose step makes the calls of the real one, in their order, and notes what it gave."""

from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import torch

from isaaclab.managers import RecorderManager
from isaaclab.utils import configclass

STATE, ACTION, SIDE = 4, 2, 8


@configclass
class ManagerBasedRLEnvCfg:
    """The configuration of the environment.

    ``ids_as_lists``: whether terms get the numbers of environments as lists, as in releases before 3.
    """

    recorders: Any = None
    num_envs: int = 1
    device: str = "cpu"
    max_steps: int = 12
    with_success: bool = True
    ids_as_lists: bool = True


class ManagerBasedRLEnv(gym.Env[Any, Any]):
    """Environments of random walks, all of them in a few tensors.

    Observations have noise and a command, which changes between the end of a step and the next observation. They are
    written to the same memory each time.

    Attributes
    ----------
    log : list
        What happened: ("step", obs before it, action, reward, terminated, truncated, obs after it, success), or
        ("reset", numbers of environments, obs before it, success), all of them copies.
    """

    metadata: dict[str, Any] = {"render_modes": [None]}  # noqa: RUF012

    def __init__(self, cfg: ManagerBasedRLEnvCfg, **_: Any) -> None:
        self.cfg, self.num_envs, self.device = cfg, cfg.num_envs, torch.device(cfg.device)
        self.action_space = gym.spaces.Box(-1, 1, (self.num_envs, ACTION))
        self.observation_space = gym.spaces.Dict()
        self._rng = torch.Generator(self.device).manual_seed(7)
        self._state = torch.zeros(self.num_envs, STATE, device=self.device)
        self._command = torch.zeros(self.num_envs, 1, device=self.device)
        self._age = torch.zeros(self.num_envs, dtype=torch.long, device=self.device)
        self._success = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        self.reset_terminated = self.reset_time_outs = self._success
        self._count, self.log = 0, []
        # As in the real one, terms are made before there are observations and other managers.
        self.recorder_manager = RecorderManager(cfg.recorders, self)
        self.action_manager = SimpleNamespace(action=torch.zeros(self.num_envs, ACTION, device=self.device))
        self.termination_manager = SimpleNamespace(
            active_terms=["success", "fell"] if cfg.with_success else ["fell"], get_term=self._get_term
        )
        self.obs_buf: dict[str, Any] = {}

    def _get_term(self, name: str) -> torch.Tensor:
        return {"success": self._success, "fell": self.reset_terminated}[name]

    def _compute(self) -> None:
        """Compute observations in place, with new noise."""
        n = self.num_envs
        noise = torch.rand(n, STATE, generator=self._rng, device=self.device) / 100
        if not self.obs_buf:
            image = torch.zeros(n, SIDE, SIDE, 3, dtype=torch.uint8, device=self.device)
            policy = torch.zeros(n, STATE + 1, device=self.device)
            where = torch.zeros(n, 2, dtype=torch.int64, device=self.device)
            self.obs_buf = {"policy": policy, "critic": {"image": image, "where": where}}
        self.obs_buf["policy"][:, :STATE] = self._state + noise
        self.obs_buf["policy"][:, STATE:] = self._command
        self.obs_buf["critic"]["image"].copy_((self._state[:, :3] * 50).abs().to(torch.uint8)[:, None, None])
        self.obs_buf["critic"]["where"][:, 0] = torch.arange(n, device=self.device)
        self.obs_buf["critic"]["where"][:, 1] = self._count

    def _copy(self) -> dict[str, Any]:
        critic = {name: values.clone() for name, values in self.obs_buf["critic"].items()}
        return {"policy": self.obs_buf["policy"].clone(), "critic": critic}

    def _reset_idx(self, env_ids: Any) -> None:
        self._state[env_ids] = 0
        self._age[env_ids] = 0
        self.action_manager.action[env_ids] = 0

    def reset(self, env_ids: Any = None, **_: Any) -> tuple[Any, dict[str, Any]]:
        """Reset some environments, or all."""
        if env_ids is None:
            env_ids = list(range(self.num_envs)) if self.cfg.ids_as_lists else slice(None)
        if self.log:
            numbers = torch.arange(self.num_envs)[env_ids].tolist()
            self.log.append(("reset", numbers, self._copy(), self._success.clone()))
        self.recorder_manager.record_pre_reset(env_ids)
        self._reset_idx(env_ids)
        self.recorder_manager.record_post_reset(env_ids)
        self._compute()
        return self.obs_buf, {}

    def step(self, action: torch.Tensor) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step all environments, and reset the ones whose episodes end."""
        before = self._copy()
        self.action_manager.action[:] = action
        self.recorder_manager.record_pre_step()
        self._state[:, :ACTION] += action
        self._state += torch.rand(self.num_envs, STATE, generator=self._rng, device=self.device)
        self._count += 1
        self._age += 1
        chance = torch.rand(self.num_envs, generator=self._rng, device=self.device)
        self.reset_terminated = chance < 0.1
        self.reset_time_outs = self._age >= self.cfg.max_steps
        self._success = self.reset_terminated & (chance < 0.05)
        self.reward_buf = self._state.sum(1)
        self._compute()
        flags = self.reset_terminated.clone(), self.reset_time_outs.clone()
        self.log.append(("step", before, action.clone(), self.reward_buf.clone(), *flags, self._copy(), self._success))
        self.recorder_manager.record_post_step()
        env_ids = (self.reset_terminated | self.reset_time_outs).nonzero(as_tuple=False).squeeze(-1)
        if len(env_ids) > 0:
            self.recorder_manager.record_pre_reset(env_ids)
            self._reset_idx(env_ids)
            self.recorder_manager.record_post_reset(env_ids)
        self._command = torch.rand(self.num_envs, 1, generator=self._rng, device=self.device)
        self._compute()
        return self.obs_buf, self.reward_buf, *flags, {}

    def close(self) -> None:
        """Drop the manager, as the real one does."""
        del self.recorder_manager
