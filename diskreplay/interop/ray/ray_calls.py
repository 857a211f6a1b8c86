"""Calls of actors of Ray: waited for, and their failures told from what an actor raised."""

from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from diskreplay.interop.ray.shard import JoinNeeded
from diskreplay.interop.ray.shard_group import Lost


class RayCalls:
    """Carries calls by Ray; see `Calls`."""

    def wait(self, refs: Sequence[Any], timeout_s: float) -> list[Any]:
        """Return those that are answered."""
        ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s)
        return list(ready)

    def answer(self, ref: Any, timeout_s: float) -> Any:
        """Return what a call returned, or raise what it raised; Lost where there is no answer."""
        try:
            return ray.get(ref, timeout=timeout_s)
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, Exception) and not isinstance(cause, RayError | JoinNeeded):
                raise cause from None
            raise Lost(str(cause)) from None
        except GetTimeoutError:
            raise Lost(f"no answer in {timeout_s:g} s") from None
        except RayError as error:
            raise Lost(str(error).strip().split("\n")[0]) from None

    def node(self) -> str:
        """Return the id of this process' node."""
        return str(ray.get_runtime_context().get_node_id())
