"""Each mistake is its own error, says what was wrong, and changes nothing."""

import json
import os
import re
import shutil
from functools import partial

import numpy as np
import pytest
import torch
import zarr

import diskreplay as dr
from tests.inner import forget_warnings
from tests.testing.support import append_numbered, digest, serial_schema

OBS = np.zeros(3, np.float32)
STEP = {"obs": OBS, "action": 0, "reward": 1.0, "terminated": False, "serial": 0}
LANES = {
    "obs": np.zeros((2, 3), np.float32),
    "action": [0, 1],
    "reward": [1.0, 1.0],
    "terminated": [False, False],
    "truncated": [False, False],
    "serial": [0, 1],
}
BLOCK = {
    "obs": np.zeros((4, 3), np.float32),
    "action": np.zeros(3, int),
    "reward": np.zeros(3),
    "terminated": True,
    "serial": np.arange(3),
}
GONE = object()


def changed(base, **changes):
    return {name: value for name, value in {**base, **changes}.items() if value is not GONE}


@pytest.fixture
def store(tmp_store):
    schema = serial_schema(episode={"seed": dr.Field((), "int64")})
    with dr.create(tmp_store, schema, chunk_bytes=256) as store:
        yield store


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A store of 20 steps in sealed segments of one or two episodes, to be copied."""
    path = tmp_path_factory.mktemp("original") / "store"
    with dr.create(path, serial_schema(), segment_steps=8, chunk_bytes=64) as store, store.writer() as writer:
        for first in range(0, 20, 5):
            append_numbered(writer, range(first, first + 5))
    return path


@pytest.fixture
def filled(original, tmp_store):
    """The path of a copy of `original`, to be damaged."""
    shutil.copytree(original, tmp_store)
    return tmp_store


def serials(store):
    store.refresh()
    return [episode["serial"].tolist() for episode in store.episodes]


def check_refused(store, call, error, match):
    """The call raises, and neither a file nor what a reader sees has changed."""
    before, seen = digest(store.path), serials(store)
    with pytest.raises(error, match=match) as caught:
        call()
    assert isinstance(caught.value, dr.ReplayError)
    assert digest(store.path) == before
    assert serials(store) == seen


# --- values ----------------------------------------------------------------------------------------------------------

BAD_STEPS = {
    "wrong shape": ({"obs": np.zeros(4)}, r"obs.*\(4,\).*\(3,\)"),
    "too many axes": ({"obs": np.zeros((1, 3))}, r"obs.*\(1, 3\)"),
    "float where an integer is stored": ({"action": 0.5}, "action.*float64.*int64"),
    "text": ({"action": "left"}, "action"),
    "an object": ({"action": object()}, "action"),
    "none": ({"action": None}, "action"),
    "complex": ({"reward": 1j}, "reward"),
    "a ragged list": ({"obs": [[1], [2, 3]]}, "obs"),
    "an integer too wide": ({"action": 2**63}, "action"),
    "a missing extra field": ({"serial": GONE}, "serial.*missing"),
    "an unknown extra field": ({"log_prop": 0.0}, "log_prop"),
    "next_obs of a wrong shape": ({"next_obs": np.zeros(2)}, r"obs.*\(2,\)"),
    "an unknown episode value": ({"terminated": True, "episode": {"sed": 1}}, "sed"),
    "an episode value of a wrong shape": ({"terminated": True, "episode": {"seed": [1, 2]}}, "seed"),
    "terminated that is no flag": ({"terminated": "yes"}, "terminated"),
    "terminated with an axis": ({"terminated": [False, True]}, "terminated"),
    "terminated that is no number": ({"terminated": np.nan}, "terminated"),
    "truncated of a bfloat16": ({"truncated": torch.tensor(1, dtype=torch.bfloat16)}, "truncated"),
    "a reward in place of truncated": ({"truncated": 2}, "reward=1.0 and truncated=2$"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("change", "match"), BAD_STEPS.values(), ids=BAD_STEPS)
@pytest.mark.parametrize("before", [0, 3], ids=["first step", "inside an episode"])
def test_a_bad_step_is_refused_and_the_writer_goes_on(store, change, match, before):
    with store.writer() as writer:
        if before:
            append_numbered(writer, range(before), end="open")
        good = changed(STEP, obs=np.full(3, before, np.float32), serial=before)
        check_refused(store, lambda: writer.append(**changed(good, **change)), dr.SchemaError, match)
        writer.append(**changed(good, terminated=True))

        assert serials(store) == [list(range(before + 1))]
        assert store.episodes[0].terminated


FLAGS = [True, np.True_, 1, np.uint8(1), np.array(True), np.array([1]), torch.tensor(True), torch.tensor([1])]


@pytest.mark.parametrize("flag", FLAGS, ids=repr)
def test_flags_are_bools_or_0_and_1_of_any_library(store, flag):
    with store.writer() as writer:
        writer.append(**changed(STEP, terminated=flag))
        writer.append(**changed(STEP, terminated=0, truncated=flag))
        writer.append_episode(**changed(BLOCK, terminated=flag))
    store.refresh()
    ends = [(episode.terminated, episode.truncated) for episode in store.episodes]
    assert ends == [(True, False), (False, True), (True, False)]


@pytest.mark.parametrize("flags", [[True, False], [1, 0], np.array([1, 0], "u1"), torch.tensor([1, 0])], ids=repr)
def test_flags_of_a_vector_are_bools_or_0_and_1_where_they_matter(store, flags):
    with store.writer(num_envs=2) as writer:
        writer.append(**changed(LANES, terminated=flags, truncated=flags, mask=flags))
        writer.append(**changed(LANES, terminated=np.array([1, 7]), truncated=np.array([0, -1]), mask=flags))
        writer.end_episode(mask=flags)
    store.refresh()
    assert [(episode.lane, episode.terminated, episode.truncated) for episode in store.episodes] == [
        (0, True, True),
        (0, True, False),
    ]


@pytest.mark.parametrize("flag", [-3.7, 0.5, 1.0, 2, -1, np.nan, np.float32(0), None, torch.tensor(1.0)], ids=repr)
def test_a_reward_in_place_of_a_flag_is_refused_and_both_are_shown(store, flag):
    with store.writer() as writer:
        wanted = r"^terminated is one truth value a step, a bool or 0 or 1; got reward=False and terminated="
        call = partial(writer.append, OBS, 0, False, flag, serial=0)
        check_refused(store, call, dr.SchemaError, wanted + re.escape(repr(flag)) + "$")
        writer.append(**STEP)
        assert serials(store) == [[0]]


BAD_LANES = {
    "too few lanes": ({"obs": np.zeros((1, 3))}, r"obs.*\(1, 3\).*\(2, 3\)"),
    "no lane axis": ({"action": 0}, "action"),
    "one lane's value does not fit": ({"action": [0, 2**63]}, "action"),
    "flags of one lane": ({"terminated": [False]}, "terminated"),
    "flags that are text": ({"truncated": ["yes", "no"]}, "truncated"),
    "flags that are floats": ({"terminated": [0.0, 1.0]}, "terminated"),
    "a flag that is not a number": ({"truncated": np.array([0, np.nan])}, "truncated"),
    "a flag of 2": ({"terminated": [0, 2]}, r"reward=\[1.0, 1.0\] and terminated=\[0, 2\]$"),
    "a mask of floats": ({"mask": np.ones(2)}, "mask"),
    "a flag of 2 in a lane that is not passed over": ({"terminated": [0, 2], "mask": [0, 1]}, "terminated"),
    "a mask of a wrong length": ({"mask": [True]}, "mask"),
    "a mask of lane numbers": ({"mask": [0, 1, 5]}, "mask"),
    "an extra field without lanes": ({"serial": 5}, "serial"),
    "next_obs of too few lanes": ({"next_obs": np.zeros((1, 3))}, "obs"),
    "episode values without lanes": ({"terminated": [True, True], "episode": {"seed": 5}}, "seed"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("change", "match"), BAD_LANES.values(), ids=BAD_LANES)
def test_a_bad_vector_step_changes_no_lane(store, change, match):
    with store.writer(num_envs=2) as writer:
        writer.append(**LANES)
        check_refused(store, lambda: writer.append(**changed(LANES, **change)), dr.SchemaError, match)
        writer.append(**changed(LANES, serial=[10, 11]))

        assert sorted(serials(store)) == [[0, 10], [1, 11]]


BAD_BLOCKS = {
    "no step": ({"obs": np.zeros((1, 3)), "action": [], "reward": [], "serial": []}, "step"),
    "obs of one row too few": ({"obs": np.zeros((2, 3))}, "obs"),
    "obs of one row too many": ({"obs": np.zeros((5, 3))}, "obs"),
    "an action too few": ({"action": np.zeros(2, int)}, "action|reward"),
    "an extra field too short": ({"serial": np.arange(2)}, "serial"),
    "a missing extra field": ({"serial": GONE}, "serial"),
    "an unknown extra field": ({"valve": np.zeros(3)}, "valve"),
    "an unknown episode value": ({"episode": {"sed": 1}}, "sed"),
    "terminated of every step": ({"terminated": [False, False, True]}, "terminated"),
    "terminated that is a reward": ({"terminated": -3.7}, r"reward=array\(\[0., 0., 0.\]\) and terminated=-3.7$"),
    "truncated that is a count": ({"truncated": 3}, "truncated"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("change", "match"), BAD_BLOCKS.values(), ids=BAD_BLOCKS)
def test_a_bad_episode_is_refused_and_the_open_one_stays_open(store, change, match):
    with store.writer() as writer:
        append_numbered(writer, range(2), end="open")
        check_refused(store, lambda: writer.append_episode(**changed(BLOCK, **change)), dr.SchemaError, match)
        append_numbered(writer, range(2, 4))

        assert serials(store) == [[0, 1, 2, 3]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kwargs", "match"),
    [({"final_obs": np.zeros(2)}, "obs"), ({"episode": {"sed": 1}}, "sed"), ({"episode": {"seed": 0.5}}, "seed")],
)
def test_a_bad_end_leaves_the_episode_open(store, kwargs, match):
    with store.writer() as writer:
        append_numbered(writer, range(2), end="open")
        check_refused(store, lambda: writer.end_episode(**kwargs), dr.SchemaError, match)
        append_numbered(writer, range(2, 4))

        assert serials(store) == [[0, 1, 2, 3]]


@pytest.mark.slow
@pytest.mark.parametrize("lane", [2, -1, 0.5])
def test_append_episode_to_a_lane_that_is_not_there(store, lane):
    with (
        store.writer(num_envs=2) as writer,
        pytest.raises((dr.SchemaError, IndexError, ValueError, TypeError), match="lane"),
    ):
        writer.append_episode(lane, **BLOCK)

    assert serials(store) == []


def test_missing_and_unknown_keys_of_a_nested_space_are_named(tmp_store):
    nested = {"image": dr.Field((2,), "uint8"), "state": dr.Field((), "float32")}
    with dr.create(tmp_store, serial_schema(obs=nested)) as store, store.writer() as writer:
        for bad, match in (
            ({"image": [0, 0]}, "'state' is missing"),
            ({"image": [0, 0], "state": 0, "depth": 1}, "unknown key 'depth'.*'image', 'state'"),
            (np.zeros(2), "needs the keys 'image', 'state'"),
        ):
            check_refused(store, lambda bad=bad: writer.append(**changed(STEP, obs=bad)), dr.SchemaError, match)


# --- writers, modes and arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda writer: writer.append(**STEP),
        lambda writer: writer.append_episode(**BLOCK),
        lambda writer: writer.end_episode(),
        lambda writer: writer.flush(),
    ],
    ids=["append", "append_episode", "end_episode", "flush"],
)
def test_a_closed_writer_is_refused(store, call):
    writer = store.writer()
    append_numbered(writer, range(3))
    writer.close()

    check_refused(store, lambda: call(writer), dr.WriterClosed, "closed")


def test_a_writer_of_a_closed_store_is_closed(tmp_store):
    store = dr.create(tmp_store, serial_schema())
    writer = store.writer()
    store.close()

    with pytest.raises(dr.WriterClosed, match="closed"):
        writer.append(**STEP)


def test_mode_r_never_writes(filled):
    with dr.open(filled) as store:
        check_refused(store, store.writer, dr.ReadOnlyError, 'mode "a"')
        check_refused(store, lambda: store.writer(num_envs=2), dr.ReadOnlyError, 'mode "a"')


@pytest.mark.parametrize("num_envs", [0, -1, 1.5, "two", 1 << 40])
def test_a_number_of_lanes_that_cannot_be(store, num_envs):
    with pytest.raises((ValueError, TypeError), match="num_envs"):
        store.writer(num_envs=num_envs)


@pytest.mark.parametrize("durability", ["always", -1, None, float("nan")])
def test_a_durability_that_cannot_be(store, durability):
    with pytest.raises((ValueError, TypeError), match="durability"):
        store.writer(durability=durability)


@pytest.mark.parametrize("mode", ["w", "", None, "rb"])
def test_a_mode_that_is_not_there(filled, mode):
    with pytest.raises((ValueError, TypeError), match="mode"):
        dr.open(filled, mode=mode)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"capacity": 0},
        {"capacity": -5},
        {"capacity": 1.5},
        {"capacity": True},
        {"chunk_bytes": 0},
        {"chunk_bytes": 1 << 50},
        {"chunk_bytes": "1M"},
        {"segment_steps": 0},
        {"segment_steps": "steps"},
        {"segment_steps": 2.0},
    ],
)
def test_create_refuses_arguments_and_leaves_nothing(tmp_store, kwargs):
    with pytest.raises((ValueError, TypeError), match=next(iter(kwargs))):
        dr.create(tmp_store, serial_schema(), **kwargs)

    assert list(tmp_store.parent.iterdir()) == []


def test_create_wants_a_schema(tmp_store):
    with pytest.raises((dr.SchemaError, TypeError), match=r"[Ss]chema"):
        dr.create(tmp_store, {"obs": dr.Field((), "float32")})

    assert not tmp_store.exists()


def test_create_refuses_a_path_where_a_store_is(filled):
    before = digest(filled)
    with pytest.raises(dr.StoreExists, match="exist_ok"):
        dr.create(filled, serial_schema())

    assert digest(filled) == before


def test_create_refuses_a_folder_with_something_else_in_it(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises((dr.StoreExists, FileExistsError)):
        dr.create(tmp_path, serial_schema())
    for path in (tmp_path, tmp_path / "thesis.tex"):
        with pytest.raises(dr.StoreExists, match="exists and is not a readable store: give a new path"):
            dr.create(path, serial_schema(), exist_ok=True)

    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


INT = dr.Field((), "int64")


@pytest.mark.parametrize(
    ("wanted", "difference"),
    [
        (
            dr.Schema(obs=(INT, dr.Field((4,), "float32")), action=INT),
            "in which obs/1 is Field(shape=(), dtype=dtype('int64'), space=None), not "
            "Field(shape=(4,), dtype=dtype('float32'), space=None)",
        ),
        (
            dr.Schema(obs=(INT, INT), action=INT, extra={"cost": INT}),
            "in which extra/cost is missing, not Field(shape=(), dtype=dtype('int64'), space=None)",
        ),
        (
            dr.Schema(obs={"0": INT, "1": INT}, action=INT),
            f"of the same fields nested otherwise, {dr.Schema((INT,) * 2, INT)}",
        ),
    ],
)
def test_exist_ok_names_the_first_field_that_differs(tmp_path, wanted, difference):
    dr.create(tmp_path / "x", dr.Schema(obs=(INT, INT), action=INT)).close()
    with pytest.raises(dr.StoreExists) as caught:
        dr.create(tmp_path / "x", wanted, exist_ok=True)
    assert str(caught.value) == f"the store at {tmp_path / 'x'} has another schema, {difference}: give a new path"


@pytest.mark.parametrize("limit", [{"capacity": 7}, {"capacity_bytes": 1 << 30}, {"max_age_s": 3.0}])
def test_exist_ok_refuses_another_limit_and_says_how_to_change_it(filled, limit):
    before = digest(filled)
    with pytest.raises(dr.StoreExists, match=rf"resize\({next(iter(limit))}="):
        dr.create(filled, serial_schema(), exist_ok=True, **limit)

    assert digest(filled) == before


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"compression": "zstd"}, "compression=('zstd', 5), not ('zstd', 1)"),
        ({"segment_steps": "episode"}, "segment_steps=100, not 'episode'"),
        ({"validate": "finite"}, "validate=None, not 'finite'"),
    ],
)
def test_exist_ok_refuses_what_the_store_was_not_made_with(tmp_path, argument, message):
    made = {"compression": ("zstd", 5), "segment_steps": 100}
    dr.create(tmp_path / "x", serial_schema(), **made).close()
    before = digest(tmp_path / "x")
    with pytest.raises(dr.StoreExists) as caught:
        dr.create(tmp_path / "x", serial_schema(), exist_ok=True, **(made | argument))
    text = f"the store at {tmp_path / 'x'} has {message}: omit this argument, or give a new path"
    assert str(caught.value) == text
    assert digest(tmp_path / "x") == before
    dr.create(tmp_path / "x", serial_schema(), exist_ok=True, **made).close()
    dr.create(tmp_path / "x", serial_schema(), exist_ok=True).close()


# --- paths and files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["r", "a"])
def test_a_path_that_is_not_a_store(tmp_path, mode):
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    zarr.create_group(tmp_path / "foreign")
    before = digest(tmp_path)
    for name, match in (("nothing", "does not exist"), ("file", ""), ("empty", "not a store"), ("foreign", "not a")):
        with pytest.raises(dr.StoreNotFound, match=f"{name}.*{match}"):
            dr.open(tmp_path / name, mode=mode)

    assert digest(tmp_path) == before
    assert list((tmp_path / "empty").iterdir()) == []


def edit_json(path, change):
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def set_attribute(name, value):
    return lambda document: document["attributes"].update({name: value})


def test_a_store_of_a_newer_format_is_refused_by_name(filled):
    edit_json(filled / "zarr.json", set_attribute("format_version", 2))
    with pytest.raises(dr.FormatError, match=r"version 2.*update diskreplay"):
        dr.open(filled)


@pytest.mark.parametrize("version", [0, -1, "1", 1.5, None, [1], 10**30])
def test_a_format_version_that_never_was_is_refused(filled, version):
    edit_json(filled / "zarr.json", set_attribute("format_version", version))
    with pytest.raises(dr.FormatError, match="version"):
        dr.open(filled)


def test_edited_attributes_do_not_match_their_checksum(filled):
    edit_json(filled / "zarr.json", set_attribute("capacity", 5))
    with pytest.raises(dr.FormatError, match=r"zarr\.json"):
        dr.open(filled)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"zarr_format": 3}', "\x00\xff", "[" * 100_000])
def test_metadata_that_is_no_json_or_another_document(filled, text):
    (filled / "zarr.json").write_bytes(text.encode("latin-1"))
    with pytest.raises((dr.FormatError, dr.StoreNotFound), match="zarr"):
        dr.open(filled)


def replace_by(make):
    """Return a damage that puts something else in the place of a file."""

    def damage(file):
        file.unlink()
        make(file)

    return damage


def set_flag(file):
    data = bytearray(file.read_bytes())
    file.write_bytes(bytes([data[0] | 128]) + data[1:])


DAMAGE = {
    "a chunk without bytes": ("obs/c.0.0.0", lambda file: os.truncate(file, 0), r"c\.0\.0\.0 (is|has) 0 bytes"),
    "a short chunk": ("extra/serial/c.0.0", lambda file: os.truncate(file, 63), r"c\.0\.0 (is|has) 63 bytes"),
    "no chunk": ("obs/c.0.0.0", os.unlink, r"c\.0\.0\.0 is missing"),
    "a pipe": ("reward/c.0.0", replace_by(os.mkfifo), r"c\.0\.0"),
    "an unknown flag": ("done/c.0.0", set_flag, "flag"),
    "no array": ("action", shutil.rmtree, "00000001.*action.*missing"),
    "no counters": ("committed", shutil.rmtree, "00000001.*committed.*missing"),
    "a negative counter": ("committed/c.0", lambda file: file.write_bytes(b"\xff" * 8), "00000001|segment 1"),
}


@pytest.mark.parametrize(("name", "damage", "said"), DAMAGE.values(), ids=DAMAGE)
def test_what_is_damaged_of_a_segment_is_named(filled, name, damage, said):
    damage(filled / "segments/00000001" / name)
    with pytest.raises(dr.DamagedSegmentWarning, match=said):  # a warning, which is an error in tests
        dr.open(filled)


@pytest.mark.parametrize("name", ["durable", "observed"])
def test_a_sealed_segment_is_read_by_its_counters_of_rows_alone(filled, name):
    shutil.rmtree(filled / "segments/00000001" / name)
    with dr.open(filled) as store:
        assert sum(len(episode.obs) for episode in store.episodes) > 20


def test_a_chunk_that_is_a_symbolic_link_is_refused(filled, tmp_path):
    chunk = filled / "segments/00000001/obs/c.0.0.0"
    shutil.move(chunk, tmp_path / "elsewhere")
    chunk.symlink_to(tmp_path / "elsewhere")
    with dr.open(filled) as store, pytest.raises(dr.FormatError, match="symbolic link"):
        _ = [episode.obs for episode in store.episodes]


@pytest.fixture(autouse=True)
def not_warned():
    forget_warnings()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["r", "a"])
@pytest.mark.parametrize("added", [(-1, 0), (1, 1)])
def test_store_counters_that_disagree_with_their_complements_are_refused(filled, mode, added):
    path = filled / "counters" / "c.0"
    data = np.fromfile(path, "<i8")
    data[:2] += added
    path.write_bytes(data.tobytes())

    with pytest.raises(dr.FormatError, match="counter"):
        dr.open(filled, mode)


def test_a_counter_whose_writer_died_before_it_stored_the_complement_counts(filled):
    path = filled / "counters" / "c.0"
    data = np.fromfile(path, "<i8")
    data[0] += 1
    path.write_bytes(data.tobytes())

    with dr.open(filled) as store:
        assert len(store) == 20
    with dr.open(filled, "a") as store:
        assert store.verify(deep=True) == []
