"""Plain twins of the kernels of `kernels.discounted`."""

from diskreplay.ids import Floats, Ints


def discounted_plain(r: Floats, count: Ints, before: Floats, gamma: float, out: Floats) -> None:
    """Do what `discounted` does."""
    t = 0
    for steps, carry in zip(count.tolist(), before.tolist(), strict=True):
        for _ in range(steps):
            if t < len(r):
                carry = out[t] = float(r[t]) + gamma * carry
                t += 1
