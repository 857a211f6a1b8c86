"""Hashes of single numbers, in kernels: `ids.mixed`, compiled."""

from diskreplay.ids import mixed
from diskreplay.kernels import jit

mix = jit.kernel("uint", "uint", inner=True, inlined=True)(mixed)
