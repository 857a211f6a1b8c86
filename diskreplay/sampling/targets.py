"""Targets inside windows of steps: n-step and lambda-returns, and targets with off-policy corrections.

All functions have the arguments of `nstep_targets`, and end sums by the same rule. A sum ends at a terminated or
truncated step, at the last real step, or at the end of the window. If the step is terminated, nothing is added.
Otherwise the value of the next observation is added. `rescale_value` shrinks large returns, so that a network can learn
them; `unscale_value` is its inverse.
"""

from typing import Any, NamedTuple

import torch

from diskreplay.distributions.number_arguments import fraction, int_argument, number


def nstep_targets(
    reward: torch.Tensor,
    terminated: torch.Tensor,
    values: torch.Tensor | None,
    n: int,
    gamma: float | torch.Tensor,
    mask: torch.Tensor | None = None,
    truncated: torch.Tensor | None = None,
    next_values: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the n-step target of every step of a batch of windows (Kapturowski et al. 2019, section 2.3).

    The target of step t is ``sum(gamma**i * reward[t + i] for i in range(k)) + gamma**k * values[t + k]``, without the
    last term if one of the k steps terminated. k is n, or less if the sum reaches the end of the window, the last real
    step (see `mask`), or a terminated or truncated step. Targets near the end of a window have fewer than n steps, even
    if the episode goes on. A truncated episode bootstraps from its final observation.

    Nothing is detached: gradients of the targets flow to `values`. For fixed targets, call this under
    ``torch.no_grad()``, or with ``values.detach()``. With R2D2's rescaling of values, pass the values through
    `unscale_value` and the targets through `rescale_value`.

    Parameters
    ----------
    reward : Tensor
        (batch, length), any dtype.
    terminated : Tensor
        (batch, length), bool, or numbers (0 is False).
    values : Tensor or None
        (batch, length + 1) float: the value of each step's observation, and of the observation after the last step.
        If an episode ends in the window, the entry after its last step is the value of its final observation. For
        a batch of `Sequences`, these are the values of ``torch.cat([batch.obs, batch.next_obs[:, -1:]], 1)``. None if
        `next_values` is given.
    n : int
        The largest number of steps in a sum.
    gamma : float or Tensor
        Discount per step, 0 to 1. Or a tensor (batch, length) with the discount after each step, such as gamma times
        the environment's discounts. With a tensor, ``gamma**i`` is the product of the discounts of the i steps from t
        on.
    mask : Tensor or None
        (batch, length), True at real steps; None: all steps are real. Targets at padded steps are 0.
    truncated : Tensor or None
        (batch, length), True at the last step of an episode that was cut short. A batch of `Sequences` does not need
        `truncated`, since its `mask` ends with the episode.
    next_values : Tensor or None
        (batch, length) float: the value of the observation after each step, in place of ``values[:, 1:]``. Windows that
        cross episodes need `next_values` and `truncated`: the final observation of an episode is not the observation of
        the next step.

    Returns
    -------
    Tensor
        (batch, length), of the promoted dtype of reward and values. Sums are float64.

    Raises
    ------
    ValueError
        A shape does not fit, `values` is not floating point, or n or gamma is invalid.

    Examples
    --------
    >>> reward, values = torch.ones(1, 3), torch.zeros(1, 4)
    >>> dr.nstep_targets(reward, torch.zeros(1, 3, dtype=torch.bool), values, n=2, gamma=0.5)
    tensor([[1.5000, 1.5000, 1.0000]])
    """
    n = int_argument("n", n)
    steps = _Steps.of(reward, terminated, values, gamma, mask, truncated, next_values)
    targets = one_step = steps.reward + steps.discount * steps.following
    for _ in range(min(n, reward.shape[1]) - 1):
        targets = torch.where(steps.continues, steps.reward + steps.discount * _next(targets), one_step)
    return targets.to(steps.dtype)


def lambda_returns(
    reward: torch.Tensor,
    terminated: torch.Tensor,
    values: torch.Tensor | None,
    lambda_: float,
    gamma: float | torch.Tensor,
    mask: torch.Tensor | None = None,
    truncated: torch.Tensor | None = None,
    next_values: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the lambda-return of every step of a batch of windows (Sutton & Barto, 2nd ed., section 12.1).

    The target of TD(lambda) is the weighted mean of all n-step targets. The target of n steps has the weight
    ``(1 - lambda_) * lambda_**(n - 1)``, and the longest sum has the remaining weight. DreamerV3's form (Hafner et al.
    2023, "Critic learning") is ``R_t = r_t + gamma_t * ((1 - lambda_) * V_{t+1} + lambda_ * R_{t+1})``, where gamma_t
    is gamma times the predicted probability that the episode continues. `lambda_` is 0 to 1. The other arguments, the
    result and the errors are those of `nstep_targets`. Generalized advantage estimates are these targets minus
    ``values[:, :-1]``.

    Examples
    --------
    >>> reward, no = torch.ones(1, 3), torch.zeros(1, 3, dtype=torch.bool)
    >>> dr.lambda_returns(reward, no, torch.zeros(1, 4), lambda_=1.0, gamma=0.5)
    tensor([[1.7500, 1.5000, 1.0000]])
    """
    lambda_ = fraction("lambda_", lambda_)
    steps = _Steps.of(reward, terminated, values, gamma, mask, truncated, next_values)
    return steps.corrected(steps.following, torch.full_like(steps.reward, lambda_))


def q_lambda_targets(
    reward: torch.Tensor,
    terminated: torch.Tensor,
    values: torch.Tensor | None,
    greedy: torch.Tensor,
    lambda_: float,
    gamma: float | torch.Tensor,
    mask: torch.Tensor | None = None,
    truncated: torch.Tensor | None = None,
    next_values: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute Watkins's Q(lambda) target of every step of a batch of windows (Sutton & Barto, 2nd ed., section 12.10).

    The targets are `lambda_returns`, but a sum also ends before the next action that was not greedy. `values`, (batch,
    length + 1), is the largest Q of each observation. `greedy`, (batch, length), is True if the step's action has the
    largest Q. `lambda_` is 0 to 1. The other arguments, the result and the errors are those of `nstep_targets`.

    Examples
    --------
    >>> reward, no = torch.ones(1, 3), torch.zeros(1, 3, dtype=torch.bool)
    >>> greedy = torch.tensor([[True, False, True]])
    >>> dr.q_lambda_targets(reward, no, torch.zeros(1, 4), greedy, lambda_=1.0, gamma=0.5)
    tensor([[1.0000, 1.5000, 1.0000]])
    """
    lambda_ = fraction("lambda_", lambda_)
    steps = _Steps.of(reward, terminated, values, gamma, mask, truncated, next_values, greedy=greedy)
    return steps.corrected(steps.following, lambda_ * (greedy != 0).double())


def retrace_targets(
    reward: torch.Tensor,
    terminated: torch.Tensor,
    values: torch.Tensor | None,
    q: torch.Tensor,
    log_rho: torch.Tensor,
    lambda_: float,
    gamma: float | torch.Tensor,
    mask: torch.Tensor | None = None,
    truncated: torch.Tensor | None = None,
    next_values: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the Retrace(lambda) target of every step of a batch of windows (Munos et al. 2016, section 2).

    With the errors ``delta_s = r_s + gamma * values[s + 1] - q[s]`` and the traces
    ``c_s = lambda_ * min(1, exp(log_rho[s]))``, the target of step t is q[t] plus the sum over s >= t of
    ``gamma**(s - t) * c_{t+1} * ... * c_s * delta_s``.

    `values`, (batch, length + 1), is the mean of Q over the learned policy pi, ``(pi * q_values).sum(-1)``. `q`,
    (batch, length), is the Q of the step's action. `log_rho`, (batch, length), is log pi(a|s) - log mu(a|s) of the
    step's action, where mu is the policy that took the action. Store log mu(a|s) as an extra field. Actions need not be
    discrete. `lambda_` is 0 to 1. The other arguments, the result and the errors are those of `nstep_targets`.

    Examples
    --------
    >>> reward, terminated = torch.ones(1, 3), torch.zeros(1, 3, dtype=torch.bool)
    >>> on_policy = torch.zeros(1, 3)  # log of the ratio of the policies
    >>> dr.retrace_targets(reward, terminated, torch.zeros(1, 4), torch.zeros(1, 3), on_policy, lambda_=1.0, gamma=0.5)
    tensor([[1.7500, 1.5000, 1.0000]])
    """
    lambda_ = fraction("lambda_", lambda_)
    steps = _Steps.of(reward, terminated, values, gamma, mask, truncated, next_values, q=q, log_rho=log_rho)
    traces = lambda_ * torch.clamp(torch.exp(steps.known(log_rho)), max=1.0)
    return steps.corrected(_next(steps.known(q)), traces)


def vtrace_targets(
    reward: torch.Tensor,
    terminated: torch.Tensor,
    values: torch.Tensor,
    log_rho: torch.Tensor,
    gamma: float | torch.Tensor,
    mask: torch.Tensor | None = None,
    truncated: torch.Tensor | None = None,
    next_values: torch.Tensor | None = None,
    *,
    lambda_: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute V-trace targets and policy-gradient advantages of a batch of windows (Espeholt et al. 2018, section 4).

    With ``rho_t = min(rho_bar, exp(log_rho[t]))``, ``c_t = lambda_ * min(c_bar, exp(log_rho[t]))`` and the errors
    ``delta_t = rho_t * (r_t + gamma * V_{t+1} - V_t)``, the target of step s is V_s plus the sum over t >= s of
    ``gamma**(t - s) * c_s * ... * c_{t-1} * delta_t`` (section 4.1, eq. 1; for lambda_ see remark 2). The advantage is
    ``rho_s * (r_s + gamma * v_{s+1} - V_s)``, where v_{s+1} is the target of the next step, or the value of the next
    observation at the end of a sum (section 4.2).

    Parameters
    ----------
    reward, terminated, values, gamma, mask, truncated, next_values
        See `nstep_targets`. If `next_values` is given, `values` is (batch, length), the value of each step's own
        observation.
    log_rho : Tensor
        (batch, length): log pi(a|s) - log mu(a|s) of the step's action, where pi is the learned policy and mu the
        policy that took the action. Store log mu(a|s) as an extra field.
    lambda_ : float
        Factor of the traces, 0 to 1.
    rho_bar, c_bar : float
        Upper limits of the importance weights, at least 0; infinity: no limit. The paper assumes c_bar <= rho_bar.

    Returns
    -------
    targets, advantages : Tensor
        (batch, length) each, of the promoted dtype of reward and values. Sums are float64.

    Raises
    ------
    ValueError
        A shape does not fit, `values` is not floating point, or a number is invalid.

    Examples
    --------
    >>> reward, no = torch.ones(1, 3), torch.zeros(1, 3, dtype=torch.bool)
    >>> targets, advantages = dr.vtrace_targets(reward, no, torch.zeros(1, 4), torch.zeros(1, 3), gamma=0.5)
    >>> targets
    tensor([[1.7500, 1.5000, 1.0000]])
    """
    lambda_, rho_bar, c_bar = fraction("lambda_", lambda_), _limit("rho_bar", rho_bar), _limit("c_bar", c_bar)
    both, own = (values, {}) if next_values is None else (None, {"values": values})
    steps = _Steps.of(reward, terminated, both, gamma, mask, truncated, next_values, log_rho=log_rho, **own)
    weights, value = torch.exp(steps.known(log_rho)), steps.known(values[:, : reward.shape[1]])
    rho, traces = torch.clamp(weights, max=rho_bar), lambda_ * torch.clamp(weights, max=c_bar)
    delta = rho * (steps.reward + steps.discount * steps.following - value)
    targets = value + _backward(delta, torch.where(steps.continues, steps.discount * traces, 0.0))
    behind = torch.where(steps.continues, _next(targets), steps.following)
    advantages = rho * (steps.reward + steps.discount * behind - value)
    return targets.to(steps.dtype), advantages.to(steps.dtype)


class _Steps(NamedTuple):
    """A batch of windows in float64, (batch, length), with 0 at padded steps.

    `discount` is the discount after a step, and `following` is the value of the next observation. Both are 0 after a
    terminated step. `continues` is True if a sum goes on after the step. `real` is False at padded steps. `dtype` is
    the dtype of the targets.
    """

    reward: torch.Tensor
    discount: torch.Tensor
    following: torch.Tensor
    continues: torch.Tensor
    real: torch.Tensor
    dtype: torch.dtype

    @classmethod
    def of(
        cls,
        reward: torch.Tensor,
        terminated: torch.Tensor,
        values: torch.Tensor | None,
        gamma: float | torch.Tensor,
        mask: torch.Tensor | None,
        truncated: torch.Tensor | None,
        next_values: torch.Tensor | None,
        /,
        **others: torch.Tensor,
    ) -> "_Steps":
        """Return the checked arguments as a `_Steps`, with 0 in place of values that no target uses.

        `torch.where` is used because NaN times 0 is NaN.
        """
        discounts = gamma if isinstance(gamma, torch.Tensor) else None
        shaped = {"terminated": terminated, "mask": mask, "truncated": truncated, "gamma": discounts, **others}
        following = _checked(reward, values, next_values, shaped)
        if not isinstance(gamma, torch.Tensor):
            gamma = torch.full_like(reward, fraction("gamma", gamma), dtype=torch.float64)
        ended = terminated != 0
        real = torch.ones_like(ended) if mask is None else mask != 0
        continues = real & ~ended & _next(real)
        if truncated is not None:
            continues &= truncated == 0
        continues[:, -1:] = False
        bootstraps = real & ~ended
        return cls(
            torch.where(real, reward.double(), 0.0),
            torch.where(bootstraps, gamma.double(), 0.0),
            torch.where(bootstraps, following.double(), 0.0),
            continues,
            real,
            torch.result_type(reward, following),
        )

    def known(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return `numbers`, which has one number per step, in float64 and with 0 at padded steps."""
        return torch.where(self.real, numbers.double(), 0.0)

    def corrected(self, estimates: torch.Tensor, traces: torch.Tensor) -> torch.Tensor:
        """Return G_t = r_t + gamma_t * (V_{t+1} + c_{t+1} * (G_{t+1} - Q_{t+1})).

        For step t, `estimates` has Q_{t+1} and `traces` has c_t; c_{t+1} counts as 0 if the sum ends at t.
        """
        c = torch.where(self.continues, _next(traces), 0.0)
        expected = self.following - c * estimates
        return _backward(self.reward + self.discount * expected, self.discount * c).to(self.dtype)


def _backward(terms: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Return x_t = terms_t + factors_t * x_{t+1} of all steps, computed from the last step to the first."""
    x, found = torch.zeros_like(terms[:, 0]) if terms.shape[1] else terms, []
    for term, factor in zip(reversed(terms.unbind(1)), reversed(factors.unbind(1)), strict=True):
        x = term + factor * x
        found.append(x)
    return torch.stack(found[::-1], 1) if found else terms


def _next(steps: torch.Tensor) -> torch.Tensor:
    """Return, for each step, the value at the next step; callers must ignore the result for the last step."""
    return steps.roll(-1, 1)


def _limit(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0.0:
        raise ValueError(f"{name} must be a number of at least 0, or math.inf for no limit, not {value!r}")
    return float(value)


def _checked(reward: Any, values: Any, next_values: Any, others: dict[str, Any]) -> torch.Tensor:
    """Check the arguments, and return the value of the observation after each step, (batch, length)."""
    if values is not None and next_values is not None:
        raise ValueError("values must be None if next_values is given, which replaces it")
    name, following = ("values", values) if next_values is None else ("next_values", next_values)
    for of, tensor in {"reward": reward, name: following, **others}.items():
        if not isinstance(tensor, torch.Tensor) and not (tensor is None and of in ("mask", "truncated", "gamma")):
            raise ValueError(f"{of} must be a tensor, not {type(tensor).__name__}")
    if reward.ndim != 2:
        raise ValueError(f"reward must be (batch, length), not {tuple(reward.shape)}")
    if not following.is_floating_point():
        raise ValueError(f"{name} must be floats, not {following.dtype}")
    batch, length = reward.shape
    if next_values is None and tuple(values.shape) != (batch, length + 1):
        raise ValueError(
            f"values must be {(batch, length + 1)}, one more than the steps of reward, not {tuple(values.shape)}"
        )
    found: torch.Tensor = values[:, 1:] if next_values is None else next_values
    for of, tensor in {**others, name: found}.items():
        if tensor is not None and tensor.shape != reward.shape:
            raise ValueError(f"{of} must have the shape of reward, {(batch, length)}, not {tuple(tensor.shape)}")
    return found


def rescale_value(values: torch.Tensor, eps: float = 1e-3) -> torch.Tensor:
    """Compute h(x) = sign(x) (sqrt(|x| + 1) - 1) + eps x of each value (Kapturowski et al. 2019, section 2.3).

    R2D2's networks learn h of returns, so that rewards need not be clipped. h comes from the transformed Bellman
    operator of Pohlen et al. 2018. The result is computed in float64 and rounded once.

    Parameters
    ----------
    values : Tensor
        Floating point, any shape.
    eps : float
        The factor eps in h, at least 0. If `eps` is above 0, the inverse is Lipschitz continuous.

    Returns
    -------
    Tensor
        h(x), of the shape and dtype of `values`.

    Raises
    ------
    ValueError
        `values` is not a floating point tensor, or `eps` is invalid.

    Examples
    --------
    >>> dr.rescale_value(torch.tensor([0.0, 3.0]))
    tensor([0.0000, 1.0030])
    """
    x, eps = _checked_floats(values, eps)
    # sqrt(a) - 1 = (a - 1) / (sqrt(a) + 1), which loses no digits near 0.
    return (x / (torch.sqrt(x.abs() + 1.0) + 1.0) + eps * x).to(values.dtype)


def unscale_value(values: torch.Tensor, eps: float = 1e-3) -> torch.Tensor:
    """Compute the inverse of `rescale_value` for each value (Pohlen et al. 2018, appendix).

    The parameters, the result and the errors are those of `rescale_value`.

    Examples
    --------
    >>> dr.unscale_value(dr.rescale_value(torch.tensor([100.0])))
    tensor([100.])
    """
    y, eps = _checked_floats(values, eps)
    # With u = sqrt(|x| + 1) - 1, |y| = u + eps * u * (u + 2). The next lines solve this equation for u, without a loss
    # of digits near 0.
    linear = 1.0 + 2.0 * eps
    u = 2.0 * y / (linear + torch.sqrt(linear * linear + 4.0 * eps * y.abs()))
    return (u * (u.abs() + 2.0)).to(values.dtype)


def _checked_floats(values: torch.Tensor, eps: float) -> tuple[torch.Tensor, float]:
    if not isinstance(values, torch.Tensor) or not values.is_floating_point():
        kind = values.dtype if isinstance(values, torch.Tensor) else type(values).__name__
        raise ValueError(f"values must be a tensor of floats, not {kind}")
    return values.double(), number("eps", eps, least=0.0)
