"""Episodes as a notebook shows them: a few facts, and a strip of frames where there are images and pillow."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from diskreplay import markup
from diskreplay.errors import MissingExtra, ReplayError
from diskreplay.markup import Html
from diskreplay.pictures import as_images, is_image, png, smaller, spread, strip
from diskreplay.schema.schema import Schema

FRAMES, WIDEST = 8, 96  # of the strip, and pixels of a frame
MOST_FIELDS, MOST_TEXT = 20, 120
# What is not read for a glance: rewards of so many steps, fields and frames of so many bytes.
MOST_STEPS, MOST_BYTES = 1_000_000, 1 << 24


class ShownEpisode(Protocol):
    """What is shown of an `Episode`."""

    def __len__(self) -> int: ...
    def __getitem__(self, name: str) -> Any: ...
    def rows(self, path: str, first: int, stop: int) -> NDArray[Any]:
        """Return rows of one leaf of the steps."""

    @property
    def ids(self) -> NDArray[np.int64]:
        """The ids of its steps."""

    @property
    def ended(self) -> str:
        """How it ended, in a word."""

    @property
    def total_reward(self) -> float:
        """The undiscounted return."""


def episode_html(episode: ShownEpisode, schema: Schema) -> Html:
    """Return an episode as HTML."""
    title, values = markup.element("strong", markup.text("Episode")), [*schema.episode][:MOST_FIELDS]
    facts = {
        "id": markup.text(episode.ids[0]),
        "length": markup.text(f"{len(episode):,}"),
        "total_reward": _total_reward(episode),
        "ended": markup.text(episode.ended),
        **{name: _guarded(partial(_field, episode, name)) for name in values},
    }
    return markup.element("div", title, markup.facts(facts), _guarded(lambda: _strip(episode, schema)))


def episodes_html(total: int, shown: Sequence[tuple[int, ShownEpisode]]) -> Html:
    """Return a list of episodes as HTML, of which some are shown, with their places."""
    rows = [
        [markup.text(at), markup.text(f"{len(episode):,}"), _total_reward(episode), markup.text(episode.ended)]
        for at, episode in shown
    ]
    title = markup.element("strong", markup.text(f"EpisodeList of {total:,} episodes"))
    return markup.element("div", title, markup.table([">index", ">length", ">total_reward", "ended"], rows, total))


def _guarded(read: Callable[[], Html]) -> Html:
    """Return what is read, or why it cannot be: a store moves on, and a notebook has to show something."""
    try:
        return read()
    except MissingExtra:
        return markup.NOTHING
    except (ReplayError, OSError) as error:
        return markup.element("em", markup.text(error))


def _total_reward(episode: ShownEpisode) -> Html:
    if len(episode) > MOST_STEPS:
        return markup.text("not summed")
    return _guarded(lambda: markup.text(f"{episode.total_reward:.6g}"))


def _field(episode: ShownEpisode, name: str) -> Html:
    with np.printoptions(threshold=8, edgeitems=3, precision=4):
        said = str(episode[name])
    return markup.text(said if len(said) <= MOST_TEXT else f"{said[: MOST_TEXT - 3]}...")


def _strip(episode: ShownEpisode, schema: Schema) -> Html:
    leaves = {path: leaf for path, leaf in schema.step_leaves.items() if is_image(leaf)}
    path = next(iter(leaves), None)
    if path is None or leaves[path].row_bytes > MOST_BYTES // FRAMES:
        return markup.NOTHING
    at = spread(len(episode), FRAMES)
    frames = np.concatenate([episode.rows(path, t, t + 1) for t in at])
    return markup.image(png(strip(smaller(as_images(frames), WIDEST))), f"{path} of {len(at)} steps")
