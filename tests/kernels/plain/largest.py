"""Plain twins of the kernels of `kernels.largest`."""

from diskreplay.distributions.saved_state import bits
from diskreplay.ids import Floats, Ints
from diskreplay.kernels.pages import KNOWN, PAGE, WANTED


def largest_given_plain(pages: Ints, raw: Floats, bounds: Floats) -> float:
    """Do what `largest_given` does, without bounds."""
    return float(raw.reshape(-1, PAGE)[bits(pages[:, WANTED] & pages[:, KNOWN])].max(initial=0.0))
