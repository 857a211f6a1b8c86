"""The manager of recorder terms, and the classes that a term derives from."""

import copy
import enum
from typing import Any

import torch

from isaaclab.utils import configclass


class DatasetExportMode(enum.IntEnum):
    """Whether the manager writes a file of its own."""

    EXPORT_NONE = 0
    EXPORT_ALL = 1


@configclass
class RecorderTermCfg:
    """The configuration of a term."""

    class_type: Any = None


@configclass
class RecorderManagerBaseCfg:
    """The configuration of the manager; attributes of other names are those of terms."""

    dataset_export_mode: DatasetExportMode = DatasetExportMode.EXPORT_ALL


class RecorderTerm:
    """The base of terms: it records nothing."""

    def __init__(self, cfg: Any, env: Any) -> None:
        self.cfg, self._env = cfg, env

    def record_pre_reset(self, env_ids: Any) -> tuple[Any, Any]:
        return None, None

    def record_post_reset(self, env_ids: Any) -> tuple[Any, Any]:
        return None, None

    def record_pre_step(self) -> tuple[Any, Any]:
        return None, None

    def record_post_step(self) -> tuple[Any, Any]:
        return None, None


class RecorderManager:
    """Calls the terms. It keeps none of their values, and a test that expects none fails if there are some."""

    def __init__(self, cfg: Any, env: Any) -> None:
        cfg = copy.deepcopy(cfg)
        assert cfg.dataset_export_mode is DatasetExportMode.EXPORT_NONE
        self._ids_as_lists = env.cfg.ids_as_lists
        self._terms = {
            name: each.class_type(each, env) for name, each in vars(cfg).items() if name != "dataset_export_mode"
        }
        assert all(isinstance(term, RecorderTerm) for term in self._terms.values())
        self.active_terms = list(self._terms)

    def record_pre_step(self) -> None:
        self._check([term.record_pre_step() for term in self._terms.values()])

    def record_post_step(self) -> None:
        self._check([term.record_post_step() for term in self._terms.values()])

    def record_pre_reset(self, env_ids: Any) -> None:
        if self._ids_as_lists and isinstance(env_ids, torch.Tensor):
            env_ids = env_ids.tolist()
        self._check([term.record_pre_reset(env_ids) for term in self._terms.values()])

    def record_post_reset(self, env_ids: Any) -> None:
        self._check([term.record_post_reset(env_ids) for term in self._terms.values()])

    @staticmethod
    def _check(values: list[Any]) -> None:
        assert all(value == (None, None) for value in values)
