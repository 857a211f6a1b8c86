"""An export takes the options of an import, with the names of the store."""

import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskreplay as dr
from diskreplay.interop import npz
from tests.interop.round_trips import SCHEMES, Values, adapter, make_store

BOX = {"type": "Box", "low": -1.0, "high": 1.0}
SCHEMA = dr.Schema(
    obs={"arm": dr.Field((3,), "float64"), "eye": dr.Field((8, 8, 3), "uint8"), "touch": dr.Field((2,), "float32")},
    action=dr.Field((2,), "float32", BOX),
    extra={"score": dr.Field((), "int64"), "latent": dr.Field((4,), "float32")},
    episode={"level": dr.Field((), "int64"), "weight": dr.Field((), "float64")},
)
FOUND: Mapping[str, Mapping[str, str]] = {
    "minari": {"extra/points": "extra/infos/points"},
    "lerobot": {"obs/eye": "obs/images/eye"},
}
"""The place of a leaf after an import, if the format does not keep it."""


@pytest.fixture(params=SCHEMES)
def module(request: pytest.FixtureRequest) -> Any:
    """Each format; the test is skipped without its library."""
    return adapter(request.param)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose doubles are float32 numbers, and whose integers fit in 16 bits. No test changes it."""
    rng, path = np.random.default_rng(0), tmp_path_factory.mktemp("exported") / "store"
    with dr.create(path, SCHEMA) as made, made.writer() as writer:
        for count in (3, 9, 1, 6):
            obs = {"arm": rng.random((count + 1, 3), np.float32), "touch": rng.random((count + 1, 2), np.float32)}
            writer.append_episode(
                {**obs, "eye": rng.integers(256, size=(count + 1, 8, 8, 3), dtype=np.uint8)},
                rng.random((count, 2), np.float32),
                rng.random(count, np.float32),
                terminated=count % 2 == 0,
                truncated=count % 2 == 1,
                episode={"level": count, "weight": 0.5},
                score=rng.integers(-1000, 1000, count),
                latent=rng.random((count, 4), np.float32),
            )
    return path


def view(store: Path, paths: Mapping[str, str], dtypes: Mapping[str, str], lost: set[str]) -> list[dict[str, Any]]:
    """The chosen leaves of a store by their new paths, without lost ones."""
    found = []
    with dr.open(store) as opened:
        for episode in opened.episodes:
            data = Values.of(episode, opened.schema)
            arrays = {new: {**data.steps, **data.fields}[old] for old, new in paths.items()}
            arrays = {new: rows.astype(dtypes.get(new, rows.dtype)) for new, rows in arrays.items() if new not in lost}
            found.append({**arrays, "terminated": data.terminated, "truncated": data.truncated})
    return found


def test_an_import_finds_the_leaves_that_an_export_was_to_write(module: Any, store: Path, tmp_path: Path) -> None:
    target, back, steps = tmp_path / "set.bin", tmp_path / "back", []
    exported = module.export_dataset(
        store,
        target,
        rename={"obs/arm": "joints", "extra/score": "points"},
        skip=["obs/touch", "extra/latent", "episode/weight"],
        dtype={"obs/arm": "float32", "extra/score": "int16"},
        where=lambda episode: len(episode) > 1,
        progress=lambda *at: steps.append(at),
    )
    assert (exported.episodes, exported.steps, steps[-1]) == (3, 18, (18, 18))
    assert sorted(exported.not_kept) == ["episode/weight", "extra/latent", "obs/touch"]
    lost, lossy = {name for name, _ in exported.not_held}, exported.lossy
    assert not lost & {"obs/touch", "extra/latent", "episode/weight"}, "left out, not lost"
    assert lossy == []
    module.import_dataset(target, back)
    paths = {"obs/arm": "obs/joints", "obs/eye": "obs/eye", "action": "action", "reward": "reward"}
    paths |= {"extra/score": "extra/points", "episode/level": "episode/level"}
    expected = view(store, paths, {"obs/joints": "float32", "extra/points": "int16"}, lost)
    places = FOUND.get(module.NAME, {})
    with dr.open(back) as opened:
        assert opened.verify(deep=True) == []
        for episode, wanted in zip(opened.episodes, [expected[0], expected[1], expected[3]], strict=True):
            data = Values.of(episode, opened.schema)
            found = {**data.steps, **data.fields}
            for path, rows in wanted.items():
                if path in ("terminated", "truncated"):
                    assert getattr(data, path) == rows
                else:
                    values = found.pop(places.get(path, path))
                    assert values.dtype == rows.dtype
                    own = rows if module.NAME != "lerobot" or not path.startswith("obs/") else rows[: len(data)]
                    np.testing.assert_array_equal(values.reshape(own.shape), own)
            assert not [path for path in found if "touch" in path or "latent" in path or "weight" in path]


@pytest.mark.parametrize(
    ("options", "leaves"),
    [
        ({"obs": "extra/latent", "extra": []}, {"obs": "extra/latent", "action": "action", "reward": "reward"}),
        (
            {"obs": {"a": "obs/arm", "b": "extra/latent"}, "skip": ["obs/eye", "obs/touch", "extra/score"]},
            {"obs/a": "obs/arm", "obs/b": "extra/latent", "action": "action", "reward": "reward"},
        ),
        (
            {"skip": ("obs/eye", "reward", "extra"), "rename": {"obs/touch": "extra/touch"}},
            {"obs/arm": "obs/arm", "extra/touch": "obs/touch", "action": "action"},
        ),
        ({"skip": "extra", "rename": {"reward": "extra/old"}}, None),
    ],
)
def test_leaves_take_other_parts(store: Path, tmp_path: Path, options: Any, leaves: Mapping[str, str] | None) -> None:
    npz.export_dataset(store, tmp_path / "set", **options)
    npz.import_dataset(tmp_path / "set", tmp_path / "back")
    with dr.open(store) as old, dr.open(tmp_path / "back") as new:
        if leaves is None:
            leaves = {path: path for path in old.schema.step_leaves if not path.startswith(("extra", "reward"))}
            leaves["extra/old"] = "reward"
        assert set(new.schema.step_leaves) == {*leaves, "reward"}
        is_whole = all(source.startswith("obs") for path, source in leaves.items() if path.startswith("obs"))
        for one, other in zip(old.episodes, new.episodes, strict=True):
            assert other.has_final_obs is is_whole
            for path, source in leaves.items():
                rows = one.rows(source)
                own = rows if is_whole and path.startswith("obs") else rows[: len(one)]
                np.testing.assert_array_equal(other.rows(path), own)
            if "reward" not in leaves:
                assert not other.reward.any()


def test_a_value_that_a_dtype_cannot_hold_is_refused_and_nothing_is_left(store: Path, tmp_path: Path) -> None:
    with dr.open(store) as opened:
        first = int(opened.episodes[0].ids[0])
    with pytest.raises(
        dr.SchemaError, match=rf"^the episode {first} has .* in extra/latent, which uint8 cannot hold; choose"
    ):
        npz.export_dataset(store, tmp_path / "set", dtype={"extra/latent": "uint8"})
    assert list(tmp_path.iterdir()) == []
    done = npz.export_dataset(
        store, tmp_path / "set", dtype={"extra/latent": "uint8:unsafe"}, rename={"extra/latent": "z"}
    )
    assert [(name, how) for name, how in done.lossy] == [("extra/z", "values that uint8 cannot hold are rounded")]
    npz.import_dataset(tmp_path / "set", tmp_path / "back")
    with dr.open(tmp_path / "back") as opened:
        assert opened.schema.extra["z"].dtype == np.uint8


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"skip": "obs/nose"}, "'obs/nose' in skip is not a feature; its features are obs/arm float64"),
        ({"rename": {"obs/nose": "x"}}, "'obs/nose' in rename is not a feature"),
        ({"rename": {"obs/arm": "eye"}}, "'obs/arm' and 'obs/eye' would both be obs/eye; rename one"),
        ({"dtype": {"obs/nose": "uint8"}}, "dtype names 'obs/nose', and the exported leaves are obs/arm, obs/eye"),
        ({"dtype": {"obs/eye": "text"}, "rename": {"obs/eye": "top"}}, "obs/top: "),
        ({"rename": {"episode/level": "extra/level"}}, "an episode has one value of 'episode/level', so it cannot be"),
        ({"skip": "obs"}, "no feature is the observation"),
        (
            {"where": "length > 3"},
            "where must be a function of an episode, such as lambda episode: episode.total_reward > 20",
        ),
        ({"names": {"obs/arm": "x"}}, "the option names is called rename now, in all formats"),
    ],
)
def test_an_option_that_does_not_fit_is_refused_before_anything_is_written(
    store: Path, tmp_path: Path, options: Any, said: str
) -> None:
    with pytest.raises(dr.SchemaError, match=re.escape(said)):
        npz.export_dataset(store, tmp_path / "set", **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["on_error", "compression", "other"])
def test_an_unknown_option_is_a_type_error(module: Any, store: Path, tmp_path: Path, name: str) -> None:
    if name == "compression" and module.NAME == "parquet":
        pytest.skip("this format has the option")
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        module.export_dataset(store, tmp_path / "set", **{name: "skip"})


def test_leaves_that_are_left_out_are_not_read(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, rows = set[str](), dr.Episode.rows

    def noted(episode: dr.Episode, path: str, *bounds: Any) -> Any:
        read.add(path)
        return rows(episode, path, *bounds)

    monkeypatch.setattr(dr.Episode, "rows", noted)
    npz.export_dataset(store, tmp_path / "set", skip=["obs/eye", "extra"])
    assert read == {"obs/arm", "obs/touch", "action", "reward"}


def test_the_marks_of_hidden_steps_are_next_to_renamed_leaves(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store", "vectors", [(4, "terminated", True), (9, "truncated", True)])
    with dr.open(path, "a") as opened:
        opened.resize(capacity=10)
    dreamer = import_module("diskreplay.interop.dreamer")
    done = dreamer.export_dataset(path, tmp_path / "set", rename={"obs": "obs/state"}, one_hot=False)
    assert not {"hidden", "obs/state"} & {name for name, _ in done.not_held}
    dreamer.import_dataset(tmp_path / "set", tmp_path / "back")
    with dr.open(tmp_path / "back") as back:
        assert np.concatenate([each["hidden"] for each in back.episodes]).tolist() == [True] * 3 + [False] * 10
        assert back.schema.obs.keys() == {"state"}
