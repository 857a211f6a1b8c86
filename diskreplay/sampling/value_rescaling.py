"""The rescaling of values that keeps large returns within reach of a network, and its inverse."""

import torch

from diskreplay.distributions.number_arguments import number


def rescale_value(values: torch.Tensor, eps: float = 1e-3) -> torch.Tensor:
    """Compute h(x) = sign(x) (sqrt(|x| + 1) - 1) + eps x of each value (Kapturowski et al. 2019, section 2.3).

    R2D2's networks learn h of returns, and so need no clipped rewards; h is from the transformed Bellman operator of
    Pohlen et al. 2018. Computed in float64, and rounded once.

    Parameters
    ----------
    values : Tensor
        Any shape, float.
    eps : float
        At least 0; above 0, so that the inverse is Lipschitz continuous.

    Returns
    -------
    Tensor
        Of the shape and dtype of `values`.

    Raises
    ------
    ValueError
        `values` is no float tensor, or `eps` is invalid.
    """
    x, eps = _checked(values, eps)
    # sqrt(a) - 1 = (a - 1) / (sqrt(a) + 1), which loses no digits near 0.
    return (x / (torch.sqrt(x.abs() + 1.0) + 1.0) + eps * x).to(values.dtype)


def unscale_value(values: torch.Tensor, eps: float = 1e-3) -> torch.Tensor:
    """Compute the x of which each value is h(x), the inverse of `rescale_value` (Pohlen et al. 2018, appendix).

    Parameters, result and errors are as of `rescale_value`.
    """
    y, eps = _checked(values, eps)
    # With u = sqrt(|x| + 1) - 1, |y| = u + eps * u * (u + 2), which is solved in the form that loses no digits near 0.
    linear = 1.0 + 2.0 * eps
    u = 2.0 * y / (linear + torch.sqrt(linear * linear + 4.0 * eps * y.abs()))
    return (u * (u.abs() + 2.0)).to(values.dtype)


def _checked(values: torch.Tensor, eps: float) -> tuple[torch.Tensor, float]:
    if not isinstance(values, torch.Tensor) or not values.is_floating_point():
        kind = values.dtype if isinstance(values, torch.Tensor) else type(values).__name__
        raise ValueError(f"values must be a tensor of floats, not {kind}")
    return values.double(), number("eps", eps, least=0.0)
