"""Files of D4RL: episodes as its own loops see them, final observations, infos and metadata, there and back."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskreplay as dr

h5py = pytest.importorskip("h5py")

from diskreplay.interop.d4rl import export_dataset, import_dataset  # noqa: E402
from tests.interop.round_trips import PLAIN, check_round_trip, content, make_store  # noqa: E402

STEPS = 60
Arrays = dict[str, Any]


def arrays_of(steps: int = STEPS, *, next_obs: bool = True, groups: bool = False) -> Arrays:
    """Arrays as D4RL has them: two terminals, two timeouts, an open end."""
    rng = np.random.default_rng(0)
    terminals, timeouts = np.zeros((2, steps), bool)
    terminals[[9, 30]], timeouts[[19, 50]] = True, True
    obs = rng.normal(size=(steps, 5)).astype("f4")
    following = np.concatenate([obs[1:], np.zeros_like(obs[:1])])
    following[terminals | timeouts] = rng.normal(size=(4, 5))
    arrays = {
        "actions": rng.normal(size=(steps, 2)).astype("f4"),
        "rewards": rng.normal(size=steps).astype("f4"),
        "terminals": terminals,
        "timeouts": timeouts,
        "infos/qpos": rng.normal(size=(steps, 3)),
        "infos/goal": rng.integers(9, size=steps),
        "metadata/algorithm": np.bytes_("SAC"),
        "metadata/policy/fc0/weight": rng.normal(size=(2, 3)).astype("f4"),
        "metadata/iteration": 7,
    }
    named = {"observations": obs} | ({"next_observations": following} if next_obs else {})
    for name, rows in named.items():
        parts = {f"{name}/state": rows[:, :3], f"{name}/goal/xy": rows[:, 3:]} if groups else {name: rows}
        arrays |= parts
    return arrays


def write(path: Path, arrays: Arrays, **options: Any) -> Path:
    with h5py.File(path, "w") as file:
        for name, values in arrays.items():
            file.create_dataset(name, data=values, **(options if np.ndim(values) else {}))
    return path


def read(path: Path) -> Arrays:
    found: Arrays = {}
    with h5py.File(path) as file:
        file.visititems(lambda name, item: found.update({name: item[()]} if isinstance(item, h5py.Dataset) else {}))
    return found


def assert_equal(found: Arrays, expected: Arrays) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert np.asarray(found[name]).dtype == np.asarray(values).dtype, name
        np.testing.assert_array_equal(found[name], values, name)


# --- there and back --------------------------------------------------------------------------------------------------


def test_plain_episodes_are_whole_in_the_file_alone(tmp_path: Path) -> None:
    schema = dr.Schema(
        {"a": dr.Field((3,), "f8"), "b": dr.Field((), "u1")}, dr.Field((), "i8"), extra={"x": dr.Field((), "f4")}
    )
    store = make_store(tmp_path / "store", "", PLAIN, schema=schema)
    exported = check_round_trip(store, tmp_path / "set.hdf5", export_dataset, import_dataset)
    assert exported.not_held == []


@pytest.mark.parametrize("options", [{}, {"compression": "gzip", "chunks": True}], ids=["plain", "gzip"])
@pytest.mark.parametrize("groups", [False, True], ids=["flat", "groups"])
@pytest.mark.parametrize("next_obs", [False, True], ids=["", "next"])
def test_a_file_comes_back_array_by_array(
    tmp_path: Path, next_obs: bool, groups: bool, options: dict[str, Any]
) -> None:
    arrays = arrays_of(next_obs=next_obs, groups=groups)
    import_dataset(write(tmp_path / "a.hdf5", arrays, **options), tmp_path / "store")
    exported = export_dataset(tmp_path / "store", tmp_path / "b.hdf5")
    assert exported.not_held == []
    assert_equal(read(tmp_path / "b.hdf5"), arrays)
    assert sorted(tmp_path.iterdir()) == [tmp_path / "a.hdf5", tmp_path / "b.hdf5", tmp_path / "store"]


def test_fields_are_named_as_the_arrays_are(tmp_path: Path) -> None:
    arrays = arrays_of(groups=True)
    imported = import_dataset(write(tmp_path / "a.hdf5", arrays), tmp_path / "store")
    assert (imported.episodes, imported.steps) == (5, STEPS)
    with dr.open(tmp_path / "store") as store:
        last = store.episodes[4]
        assert [episode.ended for episode in store.episodes] == ["terminated", "truncated"] * 2 + ["cut"]
        np.testing.assert_array_equal(last["infos"]["goal"], arrays["infos/goal"][51:])
        np.testing.assert_array_equal(last.obs["goal"]["xy"][:-1], arrays["observations/goal/xy"][51:])
        np.testing.assert_array_equal(last.obs["state"][-1], arrays["next_observations/state"][-1])
        assert store.read_note("import")["metadata"]["metadata/algorithm"] == "SAC"


# --- which steps are an episode --------------------------------------------------------------------------------------


def sequences(arrays: Arrays) -> Iterator[range]:
    """The rows of each trajectory that D4RL's `sequence_dataset` gives."""
    start = 0
    for row in range(len(arrays["rewards"])):
        if arrays["terminals"][row] or arrays["timeouts"][row]:
            yield range(start, row + 1)
            start = row + 1


def transitions(arrays: Arrays) -> list[tuple[int, int, bool]]:
    """The rows, the next ones, and the ends that D4RL's `qlearning_dataset` gives."""
    rows = range(len(arrays["rewards"]) - 1)
    return [(row, row + 1, bool(arrays["terminals"][row])) for row in rows if not arrays["timeouts"][row]]


def test_episodes_are_the_trajectories_and_transitions_that_d4rl_gives(tmp_path: Path) -> None:
    arrays = arrays_of(next_obs=False)
    import_dataset(write(tmp_path / "a.hdf5", arrays), tmp_path / "store")
    obs = arrays["observations"]
    expected = [obs[rows.start : rows.stop] for rows in sequences(arrays)]
    pairs = []
    with dr.open(tmp_path / "store") as store:
        for episode, rows in zip(store.episodes[:4], expected, strict=True):
            np.testing.assert_array_equal(episode.obs, rows)
        for episode in store.episodes:
            last = len(episode) - 1
            pairs += [(episode.obs[t], episode.obs[t + 1], False) for t in range(last)]
            if episode.terminated:
                pairs.append((episode.obs[last], None, True))
    wanted = transitions(arrays)
    assert len(pairs) == len(wanted)
    for (now, following, ended), (row, after, terminal) in zip(pairs, wanted, strict=True):
        np.testing.assert_array_equal(now, obs[row])
        assert ended == terminal
        if following is not None:
            np.testing.assert_array_equal(following, obs[after])


def test_an_old_file_without_timeouts_is_split_by_the_limit_of_its_environment(tmp_path: Path) -> None:
    arrays = arrays_of(next_obs=False)
    del arrays["timeouts"]
    path = write(tmp_path / "a.hdf5", arrays)
    import_dataset(path, tmp_path / "a")
    import_dataset(path, tmp_path / "b", max_episode_steps=15)
    with dr.open(tmp_path / "a") as a, dr.open(tmp_path / "b") as b:
        assert [(len(e), e.ended) for e in a.episodes] == [(10, "terminated"), (21, "terminated"), (29, "cut")]
        ends = [(10, "terminated"), (15, "truncated"), (6, "terminated"), (15, "truncated"), (14, "cut")]
        assert [(len(e), e.ended) for e in b.episodes] == ends
    with pytest.raises(ValueError, match="max_episode_steps is for files without 'timeouts', and .* has this array$"):
        import_dataset(write(tmp_path / "b.hdf5", arrays_of()), tmp_path / "c", max_episode_steps=15)
    with pytest.raises(ValueError, match="max_episode_steps must be 1 or more, not 0$"):
        import_dataset(path, tmp_path / "c", max_episode_steps=0)


def test_an_episode_is_cut_where_something_else_follows_than_the_file_says(tmp_path: Path) -> None:
    arrays = arrays_of()
    arrays["next_observations"][4] = 8.0
    arrays["observations"][16], arrays["next_observations"][15] = np.nan, np.nan
    import_dataset(write(tmp_path / "a.hdf5", arrays), tmp_path / "store")
    with dr.open(tmp_path / "store") as store:
        assert [(len(e), e.ended) for e in store.episodes[:3]] == [(5, "cut"), (5, "terminated"), (10, "truncated")]
        np.testing.assert_array_equal(store.episodes[0].obs[-1], np.full(5, 8.0))


@pytest.mark.parametrize("said", ["<f8", ">f4", "i4", "-0.0", "rounded"])
def test_next_observations_of_another_dtype_or_rounded_cut_nothing(tmp_path: Path, said: str) -> None:
    arrays, ends = arrays_of(), []
    obs = arrays["observations"] = np.arange(5 * STEPS, dtype="f4").reshape(STEPS, 5) % 7
    if said == "rounded":
        obs = arrays["observations"] = obs / np.float64(3)
    following = np.concatenate([obs[1:], obs[:1]])
    if said == "-0.0":
        following[following == 0] = -0.0
    else:
        following = following.astype("f4").astype("f8") if said == "rounded" else following.astype(said)
    arrays["next_observations"] = following
    imported = import_dataset(write(tmp_path / "a.hdf5", arrays), tmp_path / "store")
    assert (imported.episodes, imported.cut) == (5, 0)
    with dr.open(tmp_path / "store") as store:
        ends = np.cumsum([len(episode) for episode in store.episodes]) - 1
        assert store.schema.obs.dtype == obs.dtype
        for episode, end in zip(store.episodes, ends, strict=True):
            np.testing.assert_array_equal(episode.obs[-1], following[end].astype(obs.dtype))


def test_an_import_that_cuts_much_says_so_and_one_that_cuts_little_counts(tmp_path: Path) -> None:
    arrays = arrays_of()
    arrays["next_observations"][3] += 1
    assert import_dataset(write(tmp_path / "a.hdf5", arrays), tmp_path / "a").cut == 1
    arrays["next_observations"] = arrays["next_observations"].astype("i4")
    said = "b.hdf5: 55 of 60 steps lead to another observation than the next row has, and an episode was cut after each"
    with pytest.warns(UserWarning, match=said) as caught:
        assert import_dataset(write(tmp_path / "b.hdf5", arrays), tmp_path / "b").cut == 55
    assert caught[0].filename == __file__


def test_columns_of_one_number_and_flags_that_are_floats_are_read(tmp_path: Path) -> None:
    arrays = arrays_of()
    for name in ("rewards", "terminals", "timeouts"):
        arrays[name] = arrays[name].astype("f4").reshape(-1, 1)
    import_dataset(write(tmp_path / "a.hdf5", arrays), tmp_path / "a")
    import_dataset(write(tmp_path / "b.hdf5", arrays_of()), tmp_path / "b")
    assert content(tmp_path / "a") == content(tmp_path / "b")


# --- what is refused -------------------------------------------------------------------------------------------------


def without(name: str) -> Arrays:
    arrays = arrays_of()
    del arrays[name]
    return arrays


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        (without("rewards"), "has no 'rewards': a file of D4RL has observations, actions, rewards, terminals$"),
        (without("observations"), "has no 'observations': a file of D4RL has "),
        (
            {**arrays_of(), "actions": np.zeros((59, 2))},
            r": 'actions' has the shape \(59, 2\), and 'rewards' has 60 rows$",
        ),
        (
            {**arrays_of(), "infos/qpos": np.zeros(3)},
            r": 'infos/qpos' has the shape \(3,\), and 'rewards' has 60 rows$",
        ),
        (
            {**arrays_of(), "rewards": np.zeros((60, 2))},
            r": 'rewards' must be one number a step, not of shape \(60, 2\)$",
        ),
        (
            {**arrays_of(), "terminals": np.full(60, 0.5)},
            ": 'terminals' must be one flag a step, 0 or 1, not float64 of",
        ),
        (
            {**arrays_of(), "next_observations": np.zeros((60, 4), "f4")},
            r"'next_observations' has the shape \(60, 4\), and",
        ),
        (
            {**arrays_of(), "next_observations": np.zeros((60, 5), "c8")},
            "'next_observations' has values of c.*, which are not numbers",
        ),
        ({**arrays_of(), "infos/c": np.zeros(60, "c8")}, ": 'infos/c': a field's dtype is one of .*, not complex64$"),
        ({**arrays_of(), "time": np.zeros(60)}, ": extra: the name 'time' is taken; choose another$"),
        (
            {**arrays_of(), "metadata/c": np.zeros(2, "c8")},
            ": 'metadata/c' is of complex64, which a store's notes cannot",
        ),
    ],
)
def test_a_damaged_file_is_refused_in_one_line_and_nothing_is_made(tmp_path: Path, arrays: Arrays, said: str) -> None:
    path = write(tmp_path / "a.hdf5", arrays)
    with pytest.raises(dr.FormatError, match=said) as caught:
        import_dataset(path, tmp_path / "store")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "store").exists()


def test_what_is_no_file_of_hdf5_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.hdf5").write_bytes(b"PK")
    with pytest.raises(dr.FormatError, match="a.hdf5 is not an HDF5 file: "):
        import_dataset(tmp_path / "a.hdf5", tmp_path / "store")
    with pytest.raises(dr.StoreNotFound, match="^there is no file .*b.hdf5$"):
        import_dataset(tmp_path / "b.hdf5", tmp_path / "store")
    with pytest.raises(dr.StoreNotFound, match="is a folder; give the path of a file: a.hdf5$"):
        import_dataset(tmp_path, tmp_path / "store")


def test_extra_fields_that_are_named_like_arrays_of_d4rl_are_not_held(tmp_path: Path) -> None:
    extra = {"timeouts": dr.Field((), "f4"), "infos": dr.Field((), "i4")}
    schema = dr.Schema(dr.Field((2,), "f4"), dr.Field((1,), "f4"), extra=extra)
    store = make_store(tmp_path / "store", "", PLAIN, schema=schema)
    exported = check_round_trip(store, tmp_path / "set.hdf5", export_dataset, import_dataset)
    assert {name for name, _ in exported.not_held} == {"extra/timeouts", "schema"}


def test_a_file_of_no_row_is_imported(tmp_path: Path) -> None:
    write(tmp_path / "set.hdf5", {name: rows[:0] if np.ndim(rows) else rows for name, rows in arrays_of().items()})
    assert import_dataset(tmp_path / "set.hdf5", tmp_path / "store").episodes == 0


# --- files of somebody hostile ---------------------------------------------------------------------------------------


def put_external_storage(file: Any, secret: Path) -> None:
    external = [(str(secret), 0, STEPS * 4)]
    file.create_dataset("infos/secret", (STEPS,), "f4", external=external)


def put_external_link(file: Any, secret: Path) -> None:
    file["infos/secret"] = h5py.ExternalLink(str(secret), "/x")


def put_virtual(file: Any, secret: Path) -> None:
    layout = h5py.VirtualLayout((STEPS,), "f4")
    layout[:] = h5py.VirtualSource(str(secret), "x", (STEPS,))
    file.create_virtual_dataset("infos/secret", layout)


def put_filters(file: Any, secret: Path) -> None:
    plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plan.set_chunk((STEPS,))
    for _ in range(2):
        plan.set_deflate(9)
    space = h5py.h5s.create_simple((STEPS,))
    h5py.h5d.create(file["infos"].id, b"secret", h5py.h5t.NATIVE_FLOAT, space, plan)


def put_many_rows(file: Any, secret: Path) -> None:
    file.create_dataset("infos/secret", (1 << 40,), "f4", chunks=(1 << 10,))


def put_deep(file: Any, secret: Path) -> None:
    file["infos"].create_group("/".join(["secret"] * 100))


def put_texts(file: Any, secret: Path) -> None:
    del file["terminals"]
    file.create_dataset("terminals", data=["no"] * STEPS, dtype=h5py.string_dtype())


HOSTILE = [
    (put_external_storage, "infos/secret is kept in other files; copy its data into this file$"),
    (put_virtual, "infos/secret is kept in other files; copy its data into this file$"),
    (put_external_link, "infos/secret is a link to another file; copy its data into this file$"),
    (put_filters, "infos/secret is compressed by several filters"),
    (put_many_rows, "infos/secret claims 4398046511104 bytes, which cannot come from"),
    (put_deep, "is nested deeper than 64 groups"),
    (put_texts, "'terminals' must be one flag a step, 0 or 1, not object of shape"),
]


@pytest.mark.parametrize(("put", "message"), HOSTILE)
def test_a_file_has_its_arrays_inside_and_as_long_as_it_can_hold(tmp_path: Path, put: Any, message: str) -> None:
    path, secret = write(tmp_path / "a.hdf5", arrays_of()), tmp_path / "secret"
    write(secret, {"x": np.ones(STEPS, "f4")})
    with h5py.File(path, "a") as file:
        put(file, secret)
    with pytest.raises(dr.FormatError, match=message):
        import_dataset(path, tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_a_draft_that_leads_to_other_files_is_begun_anew(tmp_path: Path) -> None:
    store, victim = make_store(tmp_path / "store", "vectors", PLAIN), tmp_path / "victim"
    export_dataset(store, tmp_path / "first.hdf5")
    victim.write_bytes(bytes(1 << 16))
    with h5py.File(tmp_path / "first.hdf5") as first, h5py.File(tmp_path / ".set.hdf5.part", "w") as file:
        for name, array in first.items():
            if isinstance(array, h5py.Dataset):
                external = [(str(victim), 0, max(1, array.nbytes))]
                file.create_dataset(name, array.shape, array.dtype, external=external)
        file.attrs["diskreplay_done"] = 0, 0
    export_dataset(store, tmp_path / "set.hdf5")
    assert victim.read_bytes() == bytes(1 << 16)
    import_dataset(tmp_path / "set.hdf5", tmp_path / "back")
    assert content(tmp_path / "back") == content(store)


def test_a_file_of_d3rlpy_1_is_refused_with_the_array_that_it_lacks(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "set.h5", "w") as file:
        for name in ("observations", "actions", "rewards", "terminals", "episode_terminals"):
            file[name] = np.zeros((4, 2) if name in ("observations", "actions") else 4, np.float32)
    with pytest.raises(dr.FormatError, match="is of d3rlpy 1 and not of D4RL: 'episode_terminals' marks"):
        import_dataset(tmp_path / "set.h5", tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_damage_of_a_chunk_costs_its_episode(tmp_path: Path) -> None:
    rows = np.arange(200 * 5, dtype="f4").reshape(200, 5)
    ends = np.arange(200) % 10 == 9
    arrays = {"observations": rows, "actions": rows[:, :1], "rewards": rows[:, 0], "terminals": ends}
    write(tmp_path / "set.hdf5", arrays, chunks=True)
    with h5py.File(tmp_path / "set.hdf5", "a") as file:
        del file["observations"]
        there = file.create_dataset("observations", data=rows, chunks=(10, 5), compression="gzip")
        file.flush()
        offset = there.id.get_chunk_info(7).byte_offset
    with open(tmp_path / "set.hdf5", "r+b") as raw:
        raw.seek(offset)
        raw.write(b"damage")
    done = import_dataset(tmp_path / "set.hdf5", tmp_path / "store", on_error="skip")
    assert [what for what, _ in done.skipped] == ["episode 7"]
    with dr.open(tmp_path / "store") as store:
        assert [int(episode.obs[0, 0]) for episode in store.episodes] == [50 * k for k in range(20) if k != 7]


def test_a_chunk_that_takes_more_than_half_of_the_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One chunk has all rows, so that reading a short episode reads all of them."""
    file = write(tmp_path / "set.hdf5", arrays_of(4000), chunks=True, compression="gzip")
    with h5py.File(file, "a") as data:
        rows = data["observations"][:]
        del data["observations"]
        data.create_dataset("observations", data=rows, chunks=rows.shape, compression="gzip")
    memory = {"SC_PHYS_PAGES": rows.nbytes, "SC_PAGE_SIZE": 1}
    monkeypatch.setattr(os, "sysconf", memory.get)
    with pytest.raises(dr.FormatError, match=r": the episode of rows 0 to \d+ takes \d+ bytes at once, more"):
        import_dataset(file, tmp_path / "store")
