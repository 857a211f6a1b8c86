"""Configurations of tasks by name."""

from isaaclab.envs import ManagerBasedRLEnvCfg


def parse_env_cfg(task_name: str, device: str, num_envs: int) -> ManagerBasedRLEnvCfg:
    """Return the configuration of a task."""
    assert task_name == "Isaac-Stand-In-v0"
    return ManagerBasedRLEnvCfg(device=device, num_envs=num_envs)
