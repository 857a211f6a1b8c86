"""Every kernel beside its plain twin. The twin is the oracle in tests, and the fallback where numba is missing."""

from collections.abc import Callable
from typing import Any

from diskreplay.kernels import jit
from diskreplay.kernels.extents import locate, locate_plain
from diskreplay.kernels.gae import gae, gae_plain
from diskreplay.kernels.gather import gather, gather_plain
from diskreplay.kernels.nstep import nstep, nstep_plain
from diskreplay.kernels.pick import pick, pick_plain
from diskreplay.kernels.powers import powers, powers_plain, weights, weights_plain
from diskreplay.kernels.prioritized import draw, draw_plain, show, show_plain, update, update_plain
from diskreplay.kernels.recency import count_newer, count_newer_plain, newest, newest_plain
from diskreplay.kernels.scan import scan, scan_plain
from diskreplay.kernels.spans import spans, spans_plain
from diskreplay.kernels.sumtree import (
    sumtree_find,
    sumtree_find_plain,
    sumtree_set,
    sumtree_set_plain,
)
from diskreplay.kernels.transitions import transitions, transitions_plain

Kernel = Callable[..., Any]

KERNELS: dict[str, tuple[Kernel, Kernel]] = {
    "count_newer": (count_newer, count_newer_plain),
    "draw": (draw, draw_plain),
    "gae": (gae, gae_plain),
    "gather": (gather, gather_plain),
    "locate": (locate, locate_plain),
    "newest": (newest, newest_plain),
    "nstep": (nstep, nstep_plain),
    "pick": (pick, pick_plain),
    "powers": (powers, powers_plain),
    "scan": (scan, scan_plain),
    "show": (show, show_plain),
    "spans": (spans, spans_plain),
    "sumtree_find": (sumtree_find, sumtree_find_plain),
    "sumtree_set": (sumtree_set, sumtree_set_plain),
    "transitions": (transitions, transitions_plain),
    "update": (update, update_plain),
    "weights": (weights, weights_plain),
}


def chosen(name: str) -> Kernel:
    """Return the compiled kernel, or its twin where nothing is compiled."""
    return KERNELS[name][0 if jit.COMPILED else 1]
