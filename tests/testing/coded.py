"""Steps that tell in every value which step they are, so that a torn, lost or doubled one gives itself away."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import diskreplay as dr
from diskreplay import Field, Schema
from diskreplay.testing.checks import check_account
from diskreplay.testing.nested import flat

WIDTH = 16
WIDE = 520
_SALT = 0x5BD1E995
_COUNTER_BITS, _LANE_BITS = 36, 8


def coded_schema(wide: bool = False) -> Schema:
    """Return a schema whose rows go through mappings, or (wide) with an observation that is written by position."""
    obs = {"code": Field((WIDTH,), "int64")}
    if wide:
        obs["wide"] = Field((WIDE,), "int64")
    return Schema(
        obs=obs,
        action=Field((2,), "int64"),
        reward=Field((), "float32"),
        extra={"check": Field((), "int64")},
        episode={"last": Field((), "int64")},
    )


def make_codes(writer: int, lanes: Any, counters: Any) -> NDArray[np.int64]:
    """Return the numbers of steps: who wrote them (below 2^18), in which lane (below 256), and the how-manieth."""
    lanes, counters = np.asarray(lanes, np.int64), np.asarray(counters, np.int64)
    return (np.int64(writer) << (_COUNTER_BITS + _LANE_BITS)) | (lanes << _COUNTER_BITS) | counters


def split_codes(codes: Any) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return writer, lane and counter of each code."""
    codes = np.asarray(codes)
    keys = codes >> _COUNTER_BITS
    return keys >> _LANE_BITS, keys & ((1 << _LANE_BITS) - 1), codes & ((1 << _COUNTER_BITS) - 1)


def coded_obs(codes: Any, wide: bool = False) -> dict[str, NDArray[np.int64]]:
    """Return observations that hold their code everywhere: those that the steps begin with."""
    codes = np.asarray(codes, np.int64)
    obs = {"code": np.repeat(codes[..., None], WIDTH, -1)}
    if wide:
        obs["wide"] = np.repeat(codes[..., None], WIDE, -1)
    return obs


def coded_priorities(codes: Any) -> NDArray[np.float64]:
    """Return the initial priorities of steps."""
    return np.asarray(codes, np.int64) % 997 + 0.5


def _may_lack_priority(codes: Any) -> NDArray[np.bool_]:
    """Tell which steps need not have one: the first of each lane are among them."""
    return split_codes(codes)[2] % 8 < 3


def coded_step(codes: Any, wide: bool = False, *, block: bool = False) -> dict[str, Any]:
    """Return arguments of `append` for one step, or for one of every lane; with `block`, of `append_episode`.

    Writers with odd numbers give priorities, of a block all of them and of others most.
    """
    codes = np.asarray(codes, np.int64)
    priorities: dict[str, Any] = {}
    if (split_codes(codes)[0] % 2).any():
        given = np.where(_may_lack_priority(codes) & (not block), np.nan, coded_priorities(codes))
        priorities["priority"] = given if codes.ndim else None if np.isnan(given) else float(given)
    return priorities | {
        "obs": coded_obs(codes, wide),
        "action": np.stack([codes, codes], -1),
        "reward": (codes % 1000).astype(np.float32),
        "check": codes ^ _SALT,
    }


def codes_of(batch: dict[str, Any]) -> NDArray[np.int64]:
    """Return the codes of a batch's steps."""
    codes: NDArray[np.int64] = batch["check"] ^ _SALT
    return codes


def check_coded_batch(batch: dict[str, Any]) -> None:
    """Check that every field of every transition, drawn with gamma 1, is what its writer wrote."""
    codes, k = codes_of(batch), batch["n_steps"]
    _require((batch["action"] == codes[:, None]).all(), "action", codes)
    for leaf, x in batch["obs"].items():
        following = batch["next_obs"][leaf]
        _require((x == codes[:, None]).all(), leaf, codes)
        # A terminated step without a final observation is followed by zeros.
        unknown = batch["terminated"] & (following == 0).all(1)
        _require(((following == (codes + k)[:, None]).all(1) | unknown).all(), f"the next {leaf}", codes)
    returns = [sum((c + i) % 1000 for i in range(n)) for c, n in zip(codes.tolist(), k.tolist(), strict=True)]
    _require(batch["reward"].tolist() == returns, "reward", codes)
    _require(((k >= 1) & (batch["discount"] == ~batch["terminated"])).all(), "discount", codes)


class Span(NamedTuple):
    """Steps of one lane that are there: ``first``, ..., ``stop - 1``, without a gap."""

    first: int
    stop: int


def check_coded_store(store: Any) -> dict[tuple[int, int], Span]:
    """Check every value of every episode in a store's snapshot; return what is there of each (writer, lane).

    Raises
    ------
    AssertionError
        A step is torn, missing between others, there twice, or in the wrong place.
    """
    found = {}
    for key, spans in check_coded_parts(store).items():
        if len(spans) > 1:
            raise AssertionError(f"lane {key} has gaps: {spans}")
        found[key] = spans[0]
    return found


def check_coded_parts(store: Any) -> dict[tuple[int, int], list[Span]]:
    """Do the same, but steps of a lane may be missing between others.

    Check also that every step that was ever inserted is in one class.
    """
    parts: dict[tuple[int, int], list[tuple[int, Span]]] = defaultdict(list)
    visible = 0
    for episode in store.episodes:
        codes = np.asarray(episode.action)[:, 0]
        _require(len(codes) > 0 and (codes == codes[0] + np.arange(len(codes))).all(), "the order", codes)
        _check_episode(episode, codes)
        visible += len(codes) - episode.hidden_steps
        writer, lane, counter = (int(part[0]) for part in split_codes(codes))
        parts[writer, lane].append((int(episode.ids[0]), Span(counter, counter + len(codes))))
    found: dict[tuple[int, int], list[Span]] = {}
    for key, pieces in parts.items():
        spans: list[Span] = []
        for _, (first, stop) in sorted(pieces):
            if spans and first < spans[-1].stop:
                raise AssertionError(f"lane {key} has step {first} after {spans[-1].stop - 1}: {sorted(pieces)}")
            joined = spans.pop().first if spans and first == spans[-1].stop else first
            spans.append(Span(joined, stop))
        found[key] = spans
    if visible != len(store):
        raise AssertionError(f"the store says it has {len(store)} steps, {visible} of its episodes' are visible")
    with dr.open(store.path) as another:  # whose snapshot may change
        check_account(another)
    return found


def _check_episode(episode: Any, codes: NDArray[np.int64]) -> None:
    obs = flat(episode.obs, "obs")
    frames = len(obs["obs/code"])
    expected = codes[0] + np.arange(frames)
    _require(frames in (len(codes), len(codes) + 1), "the number of observations", codes)
    for leaf, x in obs.items():
        _require((x == expected[:, None]).all(), leaf, codes)
    _require((episode.action == codes[:, None]).all(), "action", codes)
    _require((episode["check"] ^ _SALT == codes).all(), "check", codes)
    _require((episode.reward == codes % 1000).all(), "reward", codes)
    _check_priorities(episode["priority"], codes)
    if episode["last"] is not None:
        _require(int(episode["last"]) == int(split_codes(codes[-1])[2]), "last", codes)


def _check_priorities(priorities: NDArray[np.float64], codes: NDArray[np.int64]) -> None:
    lacks = np.isnan(priorities)
    if (split_codes(codes)[0] % 2).any():
        _require((~lacks | _may_lack_priority(codes)).all(), "a missing priority", codes)
        _require((lacks | (priorities == coded_priorities(codes))).all(), "priority", codes)
    else:
        _require(lacks.all(), "a priority", codes)


def _require(holds: Any, what: str, codes: NDArray[np.int64]) -> None:
    if not holds:
        raise AssertionError(f"{what} of steps {[int(part[0]) for part in split_codes(codes)]}, ... is torn")
