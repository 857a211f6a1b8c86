"""The shards that a path and nodes name."""

import os

import pytest

pytest.importorskip("ray", reason="needs the extra ray")

from diskreplay.interop.ray.sharded_store import _places


def test_shards_are_named_by_path_and_address() -> None:
    assert _places(["a", "b"], ["x", "y"]) == [(os.path.abspath("a"), "x"), (os.path.abspath("b"), "y")]
    assert _places("a", ["x", "y"]) == [(os.path.abspath("a"), "x"), (os.path.abspath("a"), "y")]
    for path, nodes, message in (
        (["a", "b"], ["x"], "^2 paths need the same number of nodes, not 1$"),
        (["a", "a"], ["x", "x"], "^.*/a on node x is named twice$"),
        ([], [], "^there must be 1 to 65536 shards, not 0$"),
        (3, None, "^path must be a path or a sequence of paths, not 3$"),
    ):
        with pytest.raises(ValueError, match=message):
            _places(path, nodes)
