"""What is missing in a view or a reader is named."""

from typing import Any

import numpy as np
import pytest

import diskreplay as dr
from diskreplay.views.base import Reader, Starts, View


class Unfinished(View):
    item_steps = 1
    starts = Starts()


def test_a_view_that_lacks_a_part_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="abstract class Unfinished .*kind.*reader"):
        Unfinished()  # type: ignore[abstract]


@pytest.mark.parametrize("part", ["fill", "pages", "check", "count_steps"])
def test_a_reader_that_lacks_a_part_says_which(part: str) -> None:
    class Half(Reader):
        pass

    arguments: list[Any] = [None, np.zeros(0, np.int64), None][: 3 if part == "fill" else 2]
    with pytest.raises(NotImplementedError, match=f"^Half must define {part}$"):
        getattr(Half(), part)(*arguments)


@pytest.mark.parametrize("view", [dr.Transitions(), dr.Sequences(), dr.Episodes(), dr.Rollouts(4)], ids=str)
def test_the_views_of_the_package_are_views(view: Any) -> None:
    assert isinstance(view, View)
