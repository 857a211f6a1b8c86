"""A store is on a local disk: an address is refused, and no folder is made that is called as its scheme."""

from collections.abc import Callable
from pathlib import Path

import pytest

import diskreplay as dr
from tests.testing.commands import main

SCHEMA = dr.Schema(obs=dr.Field((), "float32"), action=dr.Field((), "int64"))
ADDRESSES = ["s3://bucket/x", "gs://bucket/x", "file:///tmp/x", "hdfs://host:9000/x"]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with dr.create("here", SCHEMA) as store:
        yield store
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


@pytest.mark.parametrize("address", [*ADDRESSES, Path("s3://bucket/x"), Path("s3://bucket/x").absolute()], ids=str)
def test_an_address_is_refused_and_says_what_to_do(store: dr.Store, address: str) -> None:
    if isinstance(address, Path) and address.is_absolute():
        address = Path.cwd() / "s3:/bucket/x"
    calls: list[Callable[[], object]] = [
        lambda: dr.create(address, SCHEMA),
        lambda: dr.create(address, SCHEMA, exist_ok=True),
        lambda: dr.open(address),
        lambda: dr.open(address, "a"),
        lambda: store.backup(address),
        lambda: dr.Sampler(address, dr.Transitions()),
        lambda: dr.ReplayBuffer(8, path=address),
        lambda: dr.RolloutBuffer(1, 8, path=address),
        lambda: dr.DistillationBuffer(8, path=address),
    ]
    for call in calls:
        with pytest.raises(dr.FormatError, match=r"^\w+:// is an address, .* store\.backup.*diskreplay export"):
            call()


@pytest.mark.parametrize(
    "command", [["inspect"], ["export", "here"], ["backup", "here"], ["copy", "here"], ["merge", "here", "here"]]
)
def test_commands_refuse_an_address(store: dr.Store, command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, f"{'npz:' if command[0] == 'export' else ''}s3://bucket/x"]) == 2
    assert capsys.readouterr().err.startswith("diskreplay: s3:// is an address, and a store is a folder")


def test_a_name_with_a_colon_is_a_folder_like_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("a:b", "run:1", tmp_path / "below/run:/x"):
        dr.create(path, SCHEMA).close()
        dr.open(path).close()
