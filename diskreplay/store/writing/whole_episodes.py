"""Episodes that are appended in one piece."""

from typing import Any

from diskreplay.errors import SchemaError
from diskreplay.store.writing.casting import as_flag, length


def append_block(
    writer: Any,
    lane: Any,
    obs: Any,
    action: Any,
    reward: Any,
    terminated: Any,
    truncated: Any,
    episode: dict[str, Any] | None,
    extra: dict[str, Any],
) -> None:
    """Check, cast and record a whole episode in a lane; shared by both writers' ``append_episode``."""
    terminated, truncated = as_flag(terminated, "terminated"), as_flag(truncated, "truncated")
    steps = length(reward, "reward")
    if steps < 1:
        raise SchemaError("an episode has at least one step; this one has none")
    first_leaf = writer._schema.flatten("obs", obs)[0]
    obs_rows = length(first_leaf[1], first_leaf[0])
    if obs_rows not in (steps, steps + 1):
        raise SchemaError(
            f"obs has {obs_rows} rows for {steps} rewards; give {steps + 1}, the final one included, or {steps}"
        )
    observations = writer._cast("obs", obs, (obs_rows,))
    rest = writer._cast("action", action, (steps,))
    rest.append(writer._schema.reward.cast(reward, "reward", (steps,)))
    rest += writer._cast("extra", extra, (steps,))
    final = [value[-1].tobytes() for value in observations] if obs_rows > steps else None
    values = [value[:steps] for value in observations] + rest
    finals = writer._cast_episode(episode)
    with writer._recording():
        writer._recorder.append_block(lane, values, final, terminated, truncated, finals)
