"""Saved states of samplers in `verify --deep`: every byte of the one that counts is looked at."""

import json
import re
import shutil

import numpy as np
import pytest

import diskreplay as dr
from tests.integrity.verify.test_verify import KINDS, before_opening
from tests.testing.commands import repair, verify
from tests.testing.on_disk import reseal
from tests.testing.support import append_numbered, serial_schema

RUN = "samplers/run"


@pytest.fixture
def path(tmp_store):
    """A store with a state under each of two names, one of them replaced once."""
    tree = {
        "weights": np.arange(12.0).reshape(3, 4),
        "nothing": np.zeros((0, 2), np.int64),
        "deeper": [{"flag": np.array(True)}, None, 1.5, "text"],
    }
    with dr.create(tmp_store, serial_schema()) as store:
        for name in ("run", "run", "other"):
            store.save_sampler_state(name, tree)
    assert sorted(item.name for item in (tmp_store / RUN).iterdir()) == ["2", "zarr.json"]
    return tmp_store


def files_of(path):
    return sorted(file for file in (path / RUN).rglob("*") if file.is_file())


def found(path):
    return {(problem.kind, problem.where) for problem in verify(path, deep=True)}


def test_whole_states_are_no_finding(path):
    assert verify(path, deep=True) == []
    with dr.open(path, "a") as store, store.writer() as writer:
        append_numbered(writer, range(20))
        store.refresh()
        sampler = dr.Sampler(store, dr.Transitions(), dr.Prioritized(), batch_size=4, prefetch=2)
        sampler.update_priorities(sampler.sample().index, np.ones(4))
        sampler.save("of-a-sampler")
        sampler.close()
        assert store.verify(deep=True) == []


@pytest.mark.slow
def test_a_flipped_bit_anywhere_in_a_state_is_found_by_deep_alone(path):
    missed = []
    with dr.open(path) as store:
        for file in files_of(path):
            data = file.read_bytes()
            for at in range(0, len(data), 7):
                file.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
                problems = store.verify(deep=True)
                if not problems or any(problem.kind not in KINDS for problem in problems):
                    missed.append((file, at))
                assert all(problem.where.startswith(RUN) for problem in problems)
            file.write_bytes(data)
        assert missed == []
        assert store.verify(deep=True) == []
        (path / RUN / "2/weights/c.0.0").write_bytes(b"")
        assert store.verify() == []


DAMAGE = {
    "no document": (lambda run: (run / "zarr.json").unlink(), "missing", "zarr.json"),
    "no state": (lambda run: shutil.rmtree(run / "2"), "missing", "2"),
    "no document of the state": (lambda run: (run / "2/zarr.json").unlink(), "missing", "2/zarr.json"),
    "no array": (lambda run: shutil.rmtree(run / "2/weights"), "missing", "2/weights"),
    "no chunk": (lambda run: (run / "2/weights/c.0.0").unlink(), "missing", "2/weights/c.0.0"),
    "a longer chunk": (lambda run: (run / "2/weights/c.0.0").write_bytes(bytes(101)), "size", "2/weights/c.0.0"),
    "a link": (lambda run: as_link(run / "2/weights"), "type", "2/weights"),
    "a chunk elsewhere": (lambda run: as_link(run / "2/weights/c.0.0"), "type", "2/weights/c.0.0"),
    "a stray file": (lambda run: (run / "notes.txt").touch(), "unexpected", "notes.txt"),
    "a stray file in a state": (lambda run: (run / "2/notes.txt").touch(), "unexpected", "2/notes.txt"),
    "a stray chunk": (lambda run: (run / "2/weights/c.0.1").touch(), "unexpected", "2/weights/c.0.1"),
    "no json": (lambda run: (run / "2/weights/zarr.json").write_text("{"), "checksum", "2/weights/zarr.json"),
}


def as_link(path):
    elsewhere = path.parents[3] / "elsewhere"
    shutil.move(path, elsewhere)
    path.symlink_to(elsewhere)


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_and_repair_moves_it_aside(path, name):
    damage, kind, where = DAMAGE[name]
    damage(path / RUN)
    assert (kind, f"{RUN}/{where}") in found(path)
    assert all(action.what == "quarantined" for action in repair(path).actions)
    assert verify(path, deep=True) == []
    with dr.open(path) as store:
        assert store.load_sampler_state("other")["deeper"][2:] == [1.5, "text"]
        if kind == "unexpected":
            assert store.load_sampler_state("run")["deeper"][2:] == [1.5, "text"]
        else:
            with pytest.raises(dr.StoreNotFound):
                store.load_sampler_state("run")


def test_damage_is_found_however_long_a_check_takes(path, monkeypatch):
    monkeypatch.setattr("diskreplay.integrity.verify.check_root._PATIENCE_S", -1.0)
    (path / RUN / "2/weights/c.0.0").write_bytes(b"")
    with dr.open(path) as store:
        assert [problem.kind for problem in store.verify(deep=True)] == ["size"]


def test_a_state_that_is_replaced_while_it_is_read_is_no_finding(path, monkeypatch):
    """Between two looks another state takes its place."""
    left = [3]
    with dr.open(path, "a") as store:

        def replace(_):
            if left[0]:
                left[0] -= 1
                store.save_sampler_state("run", {"weights": np.ones(left[0])})

        before_opening(monkeypatch, f"{RUN}/\\d+/zarr\\.json$", replace)
        assert store.verify(deep=True) == []
    assert left == [0]


def test_what_a_dead_process_left_is_no_finding(path):
    shutil.copytree(path / RUN / "2", path / RUN / "7")
    (path / RUN / "7/weights/c.0.0").unlink()
    assert verify(path, deep=True) == []


@pytest.mark.parametrize(
    ("tree", "detail"),
    [
        (json.loads("[" * 150 + "]" * 150), "nested too deeply"),
        ({"@array": "../x", "crc32c": 5}, r"names an array '\.\./x'"),
        ({"@array": "weights", "crc32c": "5"}, "with the checksum 5"),
    ],
    ids=["deep", "elsewhere", "text"],
)
def test_a_tree_that_no_sampler_saves_is_found(path, tree, detail):
    reseal(path / RUN / "2/zarr.json", lambda attributes: attributes.update(state=tree))
    (problem,) = verify(path, deep=True)
    assert (problem.kind, problem.where) == ("metadata", f"{RUN}/2/zarr.json")
    assert re.search(detail, problem.detail)
