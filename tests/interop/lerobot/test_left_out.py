"""What a data set of LeRobot lacks: refused by default, and left out by name with `on_error="skip"`."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskreplay as dr

pa = pytest.importorskip("pyarrow", reason="needs pyarrow")
import pyarrow.parquet as pq  # noqa: E402

from diskreplay.interop.lerobot import import_dataset  # noqa: E402
from tests.interop.lerobot.data_sets import LENGTHS, write_v21, write_v30  # noqa: E402

CAMERA = "observation.images.top"
COUNT = len(LENGTHS)


def refused_then_left_out(root: Path, tmp_path: Path, said: str, **options: Any) -> Any:
    with pytest.raises(dr.FormatError, match=said):
        import_dataset(root, tmp_path / "refused", **options)
    return import_dataset(root, tmp_path / "store", on_error="skip", **options)


def films(root: Path) -> list[Path]:
    return sorted(root.glob("videos/**/*.mp4"))


@pytest.mark.parametrize("damage", ["missing", "empty"])
def test_an_episode_without_its_film_is_left_out(tmp_path: Path, damage: str) -> None:
    pytest.importorskip("av", reason="needs av")
    root = write_v21(tmp_path / "set", video=True)
    film = films(root)[1]
    film.unlink() if damage == "missing" else film.write_bytes(b"")
    done = refused_then_left_out(root, tmp_path, film.name)
    assert done.episodes == COUNT - 1
    assert [what for what, _ in done.skipped] == ["episode 1"]
    assert film.name in done.skipped[0].why
    with dr.open(tmp_path / "store") as store:
        assert [len(episode) for episode in store.episodes] == [n for k, n in enumerate(LENGTHS) if k != 1]
        assert "images" in str(store.schema.obs)


def test_a_camera_that_no_episode_has_is_refused_with_the_option_that_helps(tmp_path: Path) -> None:
    pytest.importorskip("av", reason="needs av")
    root = write_v21(tmp_path / "set", video=True)
    for film in films(root):
        film.unlink()
    for on_error in ("raise", "skip"):
        with pytest.raises(dr.FormatError, match=f"no video of '{CAMERA}': .*skip=\\('{CAMERA}',\\)"):
            import_dataset(root, tmp_path / "store", on_error=on_error)
    done = import_dataset(root, tmp_path / "store", skip=(CAMERA,))
    assert (done.episodes, done.skipped, done.not_kept) == (COUNT, [], [CAMERA])


def test_an_episode_that_was_removed_is_named(tmp_path: Path) -> None:
    root = write_v21(tmp_path / "set")
    lines = (root / "meta/episodes.jsonl").read_text().splitlines()
    (root / "meta/episodes.jsonl").write_text("\n".join([lines[0], *lines[2:]]))
    sorted(root.glob("data/**/*.parquet"))[1].unlink()
    done = refused_then_left_out(
        root, tmp_path, "no episode 1; 1 of .* are missing, and on_error='skip' imports the others"
    )
    assert done.episodes == COUNT - 1
    assert done.skipped == [("episode 1", "not in the table of episodes")]


@pytest.mark.parametrize("claimed", [1 << 63, 10**30])
def test_a_claim_of_very_many_episodes_names_them_together(tmp_path: Path, claimed: int) -> None:
    root = write_v21(tmp_path / "set")
    info = json.loads((root / "meta/info.json").read_text())
    (root / "meta/info.json").write_text(json.dumps({**info, "total_episodes": claimed}))
    missing = f"no episodes {COUNT} to {claimed - 1}; {claimed - COUNT} of {claimed} are missing"
    done = refused_then_left_out(root, tmp_path, missing)
    assert done.episodes == COUNT
    assert done.skipped == [(f"episodes {COUNT} to {claimed - 1}", "not in the table of episodes")]


def test_a_file_of_steps_that_cannot_be_read_costs_its_episodes(tmp_path: Path) -> None:
    root = write_v30(tmp_path / "set", files=2)
    file = sorted(root.glob("data/**/*.parquet"))[1]
    file.write_bytes(b"PAR1")
    done = refused_then_left_out(root, tmp_path, file.name)
    assert done.episodes == 1
    assert [what for what, _ in done.skipped] == [f"episode {number}" for number in range(1, COUNT)]
    with dr.open(tmp_path / "store") as store:
        assert len(store) == LENGTHS[0]


def test_an_empty_file_of_tasks_costs_their_texts_alone(tmp_path: Path) -> None:
    root = write_v30(tmp_path / "set")
    (root / "meta/tasks.parquet").write_bytes(b"")
    done = refused_then_left_out(root, tmp_path, "tasks.parquet")
    assert done.episodes == COUNT
    assert [what for what, _ in done.skipped] == ["meta/tasks.parquet"]


def test_a_number_of_episodes_that_is_too_small_is_refused(tmp_path: Path) -> None:
    root = write_v30(tmp_path / "set")
    info = json.loads((root / "meta/info.json").read_text())
    (root / "meta/info.json").write_text(json.dumps({**info, "total_episodes": COUNT - 1}))
    with pytest.raises(dr.FormatError, match=f"says {COUNT - 1} episodes, and the table of episodes has {COUNT}"):
        import_dataset(root, tmp_path / "store")


def test_columns_that_no_feature_names_are_named(tmp_path: Path) -> None:
    root = write_v21(tmp_path / "set")
    for file in root.glob("data/**/*.parquet"):
        table = pq.read_table(file)
        pq.write_table(table.append_column("force", pa.array(np.zeros(len(table)))), file)
    assert import_dataset(root, tmp_path / "store").not_kept == ["force"]


def test_an_episode_is_named_by_its_number_behind_a_gap(tmp_path: Path) -> None:
    pytest.importorskip("av", reason="needs av")
    root = write_v21(tmp_path / "set", video=True)
    lines = (root / "meta/episodes.jsonl").read_text().splitlines()
    (root / "meta/episodes.jsonl").write_text("\n".join([lines[0], *lines[2:]]))
    films(root)[2].write_bytes(b"")
    numbers = list[int]()
    done = import_dataset(
        root, tmp_path / "store", on_error="skip", where=lambda episode: numbers.append(episode.number) is None
    )
    assert [what for what, _ in done.skipped] == ["episode 1", "episode 2"]
    assert numbers[-COUNT + 2 :] == [0, *range(3, COUNT)]


def test_damage_of_a_row_group_costs_its_episodes(tmp_path: Path) -> None:
    root = write_v30(tmp_path / "set")
    (file,) = root.glob("data/**/*.parquet")
    table, at = pq.read_table(file), np.cumsum([0, *LENGTHS])
    with pq.ParquetWriter(file, table.schema, compression="zstd") as writer:
        for start, stop in pairwise(at):
            writer.write_table(table.slice(start, stop - start))
    group = pq.read_metadata(file).row_group(1)
    columns = {group.column(k).path_in_schema.split(".")[0]: group.column(k) for k in range(group.num_columns)}
    damaged = columns["action"]
    with open(file, "r+b") as raw:
        raw.seek(damaged.dictionary_page_offset or damaged.data_page_offset)
        raw.write(b"\xff" * 30)
    done = refused_then_left_out(root, tmp_path, file.name)
    assert [what for what, _ in done.skipped] == ["episode 1"]
    assert done.episodes == COUNT - 1


def test_a_step_and_an_episode_may_have_a_feature_of_one_name(tmp_path: Path) -> None:
    root = write_v21(tmp_path / "set")
    info = json.loads((root / "meta/info.json").read_text())
    info["features"]["seed"] = {"dtype": "int64", "shape": [1], "names": None}
    (root / "meta/info.json").write_text(json.dumps(info))
    for file in root.glob("data/**/*.parquet"):
        table = pq.read_table(file)
        pq.write_table(table.append_column("seed", pa.array(np.arange(len(table)))), file)
    lines = [json.loads(line) for line in (root / "meta/episodes.jsonl").read_text().splitlines()]
    (root / "meta/episodes.jsonl").write_text("\n".join(json.dumps({**line, "seed": 7}) for line in lines))
    import_dataset(root, tmp_path / "store", rename={"seed": "count"})
    with dr.open(tmp_path / "store") as store:
        assert (store.episodes[0]["count"].tolist(), int(store.episodes[0]["seed"])) == ([*range(LENGTHS[0])], 7)


@pytest.mark.parametrize("lacking", [0, 1, COUNT - 1])
def test_a_line_of_the_table_costs_its_episode_where_a_file_has_many(tmp_path: Path, lacking: int) -> None:
    root = write_v30(tmp_path / "set")
    import_dataset(root, tmp_path / "whole")
    (file,) = root.glob("meta/episodes/*/*.parquet")
    table = pq.read_table(file)
    pq.write_table(pa.concat_tables([table.slice(0, lacking), table.slice(lacking + 1)]), file)
    done = refused_then_left_out(root, tmp_path, f"no episode {lacking}; 1 of")
    assert [what for what, _ in done.skipped] == [f"episode {lacking}"]
    with dr.open(tmp_path / "whole") as before, dr.open(tmp_path / "store") as after:
        wanted = [episode for number, episode in enumerate(before.episodes) if number != lacking]
        for episode, found in zip(wanted, after.episodes, strict=True):
            np.testing.assert_array_equal(found.action, episode.action, strict=True)
