"""What is installed for whom: a collector needs little, and what an extra installs is asked for by its name."""

import json
import re
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import diskreplay as dr
from tests.testing.without import STORE, run_without
from tools import environments
from tools.environments import CORE, TRIED, VERSIONS, WITH_EACH, closure
from tools.imports import MODULES, imports_of

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
USER_EXTRAS = EXTRAS.keys() - {"all", "bench", "docs", "fuzz", "test"}
# Libraries that take long to install: their tests skip by name.
LARGE = {"jax", "ray", "rllib", "tianshou", "torchrl", "wandb"}
TORCH, GYM = ("torch", "numba", "llvmlite"), ("gymnasium",)
# Libraries that are installed by another name.
DISTRIBUTIONS = {"PIL": "pillow", "google": "protobuf"}
# What the test environment has and an installation without extras lacks.
NOT_CORE = *TORCH, *GYM, "jinja2", "matplotlib", "PIL", "plotext"
NOT_CORE = (
    *NOT_CORE,
    "scipy",
    "pandas",
    "xarray",
    "stable_baselines3",
    "hypothesis",
    "sympy",
    "pyarrow",
    "minari",
    "h5py",
    "av",
    "google",
)

WORK = """
from diskreplay.__main__ import main

with dr.open(path, "a") as store:
    with store.writer(num_envs=2) as writer:
        for t in range(8):
            ends = np.full(2, t == 7)
            obs = np.zeros((2, 3))
            writer.append(obs, np.zeros(2, int), np.ones(2), ends, ends & False, next_obs=obs)
    with store.writer(durability="episode") as writer:
        writer.append_episode(np.zeros((9, 3)), np.zeros(8, int), np.ones(8), terminated=True)
    store.refresh()
    assert [episode.total_reward for episode in store.episodes] == [8.0] * 4
    assert [episode.obs.shape for episode in store.episodes] == [(9, 3)] * 4
    assert store.verify(deep=True) == [] and store.repair() == []
    assert store.evict(lambda episode: len(episode.ids) == 0) == 0
    dr.Transitions(n_step=3), dr.Sequences(length=4, overlap=2), dr.Uniform(), dr.Prioritized()
codes = [main([*command, path]) for command in (["inspect"], ["episodes"], ["verify", "--deep"], ["repair"])]
assert codes == [0, 0, 0, 0], codes
assert not set(NAMES) & set(sys.modules)
print("all done")
"""


@pytest.mark.slow
def test_a_collector_writes_reads_inspects_verifies_and_repairs_without_any_extra(tmp_path: Path) -> None:
    assert run_without(NOT_CORE, STORE + WORK, tmp_path / "store") == "all done"


@pytest.mark.slow
@pytest.mark.parametrize("library", ["torch", "numba"])
def test_sampling_says_which_extra_has_the_library(tmp_path: Path, library: str) -> None:
    code = """
def sample_buffer():
    buffer = dr.ReplayBuffer(8)
    buffer.add([0.0], 0, 1.0, [0.0], True)
    buffer.sample(1)

calls = [lambda: dr.Sampler(path, dr.Transitions()), lambda: dr.warmup(path, dr.Transitions()), sample_buffer]
print(json.dumps([message(call) for call in calls]))
"""
    for said in json.loads(run_without([library], STORE + code, tmp_path / "store")):
        assert re.fullmatch(
            rf"(sampling|a buffer) needs a library that cannot be imported \(No module named '{library}.*'\): "
            r"pip install \"diskreplay\[torch\]\"",
            said,
        )


def test_recording_says_which_extra_has_gymnasium(tmp_path: Path) -> None:
    code = """
class Env:
    observation_space = action_space = None

calls = [
    lambda: dr.RecordEpisodes,
    lambda: dr.RecordVectorEpisodes,
    lambda: dr.Schema.from_env(Env()),
    lambda: dr.Schema.from_spaces(None, None),
]
print(json.dumps([message(call) for call in calls]))
"""
    said = json.loads(run_without(GYM, STORE + code, tmp_path / "store"))
    why = "needs a library that cannot be imported (No module named 'gymnasium'): pip install \"diskreplay[gym]\""
    assert said == [f"recording an environment {why}"] * 2 + [f"a schema of gymnasium spaces {why}"] * 2


OTHER_EXTRAS = {"robomimic": "d4rl"}  # of adapters that share a library


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "library", "what"),
    [
        ("sb3", "stable_baselines3", "a buffer of Stable-Baselines3"),
        ("tianshou", "tianshou", "a replay buffer of Tianshou"),
        ("rllib", "ray", "a replay buffer of RLlib"),
        ("torch", "torch", "a data set for a DataLoader"),
        ("minari", "minari", "a data set of Minari"),
        ("rlds", "google", "a data set of RLDS"),  # the namespace of protobuf
        ("parquet", "pyarrow", "a data set of Parquet"),
        ("lerobot", "pyarrow", "a data set of LeRobot"),
        ("lerobot", "av", "a data set of LeRobot"),
        ("d4rl", "h5py", "a data set of D4RL"),
        ("jax", "jax", "a batch of JAX arrays"),
        ("robomimic", "h5py", "a file of demonstrations"),
        ("torchrl", "tensordict", "a storage of TorchRL"),  # of its two libraries, what is imported first
    ],
)
def test_an_adapter_says_which_extra_has_its_library(module: str, library: str, what: str) -> None:
    code = f"""
import diskreplay as dr
try:
    import diskreplay.interop.{module}
except dr.MissingExtra as error:
    print(error)
"""
    assert run_without([library], code) == (
        f"{what} needs a library that cannot be imported "
        f"(No module named '{library}'): pip install \"diskreplay[{OTHER_EXTRAS.get(module, module)}]\""
    )


@pytest.mark.slow
def test_a_store_over_many_machines_says_which_extra_has_its_library() -> None:
    code = """
import diskreplay as dr
try:
    from diskreplay.interop.ray import ShardedStore
except dr.MissingExtra as error:
    print(error)
"""
    assert run_without(["ray"], code) == (
        "a store over many machines needs a library that cannot be imported (No module named 'ray'): "
        'pip install "diskreplay[ray]"'
    )


@pytest.mark.slow
def test_each_public_name_is_there_or_says_which_extra_brings_it(tmp_path: Path) -> None:
    code = f"{STORE}\nprint(json.dumps({{name: message(lambda: getattr(dr, name)) for name in dir(dr)}}))"
    said = json.loads(run_without(NOT_CORE, code, tmp_path / "store"))
    missing: dict[str, set[str]] = {}
    for name, text in said.items():
        if text is not None:
            missing.setdefault(text.partition("pip install ")[2], set()).add(name)
    torch = {name for name, module in dr._MODULES.items() if module.split(".")[1] in ("sampling", "buffers")}
    assert torch >= {"Batch", "MixedSampler", "Sampler", "nstep_targets", "warmup", "ReplayBuffer", "RolloutBuffer"}
    assert missing == {
        '"diskreplay[torch]"': torch,
        '"diskreplay[gym]"': {"RecordEpisodes", "RecordVectorEpisodes"},
    }


@pytest.mark.slow
@pytest.mark.parametrize("library", ["torch", "numba", "gymnasium"])
def test_the_demo_says_in_one_line_which_extras_it_needs(library: str) -> None:
    code = "import contextlib\nfrom diskreplay.__main__ import main\n"
    code += "with contextlib.redirect_stderr(sys.stdout):\n    code = main(['demo'])\nassert code == 2, code"
    said = run_without([library], code)
    assert said.endswith(f"(No module named '{library}'): pip install \"diskreplay[torch,gym]\"")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "arguments", "what"),
    [
        ("plotext", ["plot", "total_reward"], "a plot in the terminal"),
        ("matplotlib", ["plot", "rewards", "--out", "x.png"], "a picture of a plot"),
        ("PIL", ["frames", "0", "--out", "x.png"], "a picture of frames"),
        ("av", ["frames", "0", "--out", "x.mp4"], "a film of frames"),
        ("jinja2", ["report", "--out", "x.html"], "a report"),
        ("matplotlib", ["report", "--out", "x.html"], "a picture of a plot"),
        ("PIL", ["report", "--out", "x.html"], "a picture of frames"),
    ],
)
def test_plots_and_frames_say_in_one_line_which_extra_they_need(
    tmp_path: Path, library: str, arguments: list[str], what: str
) -> None:
    code = f"""
import contextlib
from diskreplay.__main__ import main
schema = dr.Schema(obs=dr.Field((3, 3), "uint8"), action=dr.Field((), "int64"))
with dr.create(path + "images", schema) as store, store.writer() as writer:
    writer.append_episode(np.zeros((2, 3, 3), "u1"), [0], [1.0], terminated=True)
command, *rest = {arguments!r}
with contextlib.redirect_stderr(sys.stdout):
    code = main([command, path + "images", *rest])
assert code == 2, code
"""
    said = run_without([library], STORE + code, tmp_path / "store")
    assert said.startswith(f"diskreplay: {what} needs a library that cannot be imported (No module named '{library}")
    assert said.endswith(f'): pip install "diskreplay[{"video" if library == "av" else "plot"}]"')


def test_an_import_error_that_has_another_cause_is_shown() -> None:
    code = """
sys.modules["torch"] = None
import diskreplay as dr
try:
    dr.Sampler
except ImportError as error:
    print(type(error.__cause__).__name__, error)
"""
    assert run_without([], code) == (
        "ModuleNotFoundError sampling needs a library that cannot be imported "
        '(import of torch halted; None in sys.modules): pip install "diskreplay[torch]"'
    )


BROKEN = """
sys.path.insert(0, sys.argv[1])
import diskreplay as dr
try:
    import diskreplay.interop.d4rl
except dr.MissingExtra as error:
    print(type(error.__cause__).__name__, error)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "kind", "said"),
    [
        ("raise ValueError('numpy.dtype size changed')", "ValueError", "numpy.dtype size changed"),
        ("raise ImportError('numpy.core failed')", "ImportError", "numpy.core failed"),
        ("import h5py._gone", "ModuleNotFoundError", "No module named 'h5py._gone'"),
        ("from types import gone", "ImportError", "cannot import name 'gone' from 'types' \\(.*\\)"),
    ],
)
def test_a_library_that_is_there_and_cannot_be_imported_is_named_with_its_version(
    tmp_path: Path, source: str, kind: str, said: str
) -> None:
    (tmp_path / "h5py").mkdir()
    (tmp_path / "h5py/__init__.py").write_text(source)
    (tmp_path / "h5py-3.9.7.dist-info").mkdir()
    (tmp_path / "h5py-3.9.7.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: h5py\nVersion: 3.9.7\n")
    assert re.fullmatch(
        f"{kind} a data set of D4RL needs another version of h5py than 3.9.7, which is installed and cannot be "
        rf'imported \({kind}: {said}\): pip install --upgrade "diskreplay\[d4rl\]"',
        run_without([], BROKEN, tmp_path),
    )


def test_a_library_that_lacks_what_it_needs_itself_is_missing_that(tmp_path: Path) -> None:
    (tmp_path / "h5py.py").write_text("import a_library_that_is_not_there")
    assert run_without([], BROKEN, tmp_path) == (
        "ModuleNotFoundError a data set of D4RL needs a library that cannot be imported "
        "(No module named 'a_library_that_is_not_there'): pip install \"diskreplay[d4rl]\""
    )


def required(lines: Iterable[str]) -> set[str]:
    return {Requirement(line).name.replace("-", "_") for line in lines}


def test_the_package_depends_on_what_it_imports_and_on_nothing_else() -> None:
    declared = required(PROJECT["dependencies"]).union(*(required(EXTRAS[name]) for name in USER_EXTRAS))
    imported = {
        item.module.split(".")[0] for name in MODULES for item in imports_of(name) if not name.startswith("testing")
    }
    imported = imported - sys.stdlib_module_names - {"llvmlite"} | {"diskreplay"}
    assert {DISTRIBUTIONS.get(name, name) for name in imported} == declared


def test_the_tests_install_all_that_the_package_can_use() -> None:
    (own,) = [each for each in map(Requirement, EXTRAS["test"]) if each.name == "diskreplay"]
    assert own.extras == USER_EXTRAS - LARGE


def test_all_installs_every_extra_for_users_but_those_that_limit_other_libraries() -> None:
    (own,) = map(Requirement, EXTRAS["all"])
    assert own.name == "diskreplay"
    assert own.extras == USER_EXTRAS - {"rllib", "tianshou"}


def test_every_extra_for_another_library_is_tried_in_an_environment_of_its_own() -> None:
    assert TRIED.keys() - {CORE} <= {*USER_EXTRAS, "all"}
    assert {"torch", "gym", "sb3", "torchrl", "tianshou", "all"} <= TRIED.keys()
    assert all((ROOT / path).exists() for _, *tests in TRIED.values() for path in tests)
    nightly = (ROOT / ".github/workflows/nightly.yml").read_text()
    assert f"tools/extras {' '.join(TRIED)} --whole" in nightly


def test_an_extra_is_tried_with_the_lowest_version_that_it_allows_and_in_ci() -> None:
    assert VERSIONS.keys() == WITH_EACH.keys() <= TRIED.keys()
    (gymnasium,) = [Requirement(line) for line in EXTRAS["gym"]]
    lowest, *_, newest = map(Requirement, VERSIONS["gym"])
    assert str(gymnasium.specifier) == ">=" + str(lowest.specifier).removeprefix("==").removesuffix(".0")
    assert (gymnasium.name, newest.name, str(newest.specifier)) == ("gymnasium", "gymnasium", "")
    assert re.search(r'"\$tools/extras" .*\bgym\b', (ROOT / ".ci/run").read_text())


def test_what_is_linked_for_an_extra_is_what_it_requires(tmp_path: Path) -> None:
    wheel = tmp_path / "diskreplay-1-py3-none-any.whl"
    lines = ["Metadata-Version: 2.1", "Name: diskreplay", "Version: 1", "Requires-Dist: numpy", "Requires-Dist: zarr"]
    lines += ['Requires-Dist: gymnasium>=1; extra == "gym"', 'Requires-Dist: pandas<1; extra == "gym"']
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("diskreplay-1.dist-info/METADATA", "\n".join(lines))
    named = [{each.name for each in closure([f"diskreplay{extra}"], wheel)} for extra in ("", "[gym]")]
    assert {"numpy", "zarr", "numcodecs"} <= named[0]
    assert "gymnasium" in named[1] - named[0]
    assert not {"pandas", "torch", "pytest"} & named[1]  # the version of pandas here does not fit


def test_numba_has_no_upper_bound_and_the_newest_one_runs_each_night() -> None:
    # Kernels use public names of numba only, which tests/kernels/test_public_numba.py holds.
    (numba,) = [line for line in PROJECT["optional-dependencies"]["torch"] if line.startswith("numba")]
    assert {each.operator for each in Requirement(numba).specifier} == {">="}
    assert re.search(r'"\$tools/extras" .*--newest', (ROOT / "tools/nightly").read_text())


def test_what_a_collector_installs_takes_less_than_165_megabytes() -> None:
    waiting, seen, nbytes = set(required(PROJECT["dependencies"])), set(), 0
    while waiting:
        seen.add(name := waiting.pop())
        distribution = metadata.distribution(name)
        paths = (Path(str(distribution.locate_file(file))) for file in distribution.files or ())
        sizes = [(path.suffix, path.stat().st_size) for path in paths if path.exists() and path.suffix != ".pyc"]
        # The record of a package need not name what is compiled of it, which takes 1.3 times the size of the source.
        nbytes += sum(round(2.4 * size) if suffix == ".py" else size for suffix, size in sizes)
        needed = [Requirement(line) for line in distribution.requires or ()]
        waiting |= {r.name for r in needed if r.marker is None or r.marker.evaluate({"extra": ""})} - seen
    own = sum(path.stat().st_size for path in (ROOT / "diskreplay").rglob("*.py"))
    assert nbytes + 3 * own < 165_000_000  # with the package's own files, source and compiled


def test_one_extra_that_fails_fails_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def attempt(extra: str, *_: object) -> None:
        if extra == "sb3":
            sys.exit("its tests fail")

    monkeypatch.setattr(environments, "build", lambda scratch: (scratch, scratch))
    monkeypatch.setattr(environments, "attempt", attempt)
    for names, fails in [(["core", "torch"], False), (["core", "sb3", "torch"], True)]:
        monkeypatch.setattr(sys, "argv", ["tools/extras", *names])
        with pytest.raises(SystemExit, match="its tests fail") if fails else nullcontext():
            environments.main()


def test_the_version_that_tools_test_tries_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[tuple[object, ...]] = []
    installed = metadata.version("packaging")
    for version in (installed, "0.1"):

        def run(*command: object, version: str = version, **_: object) -> None:
            commands.append(command)
            if "--target" in command:
                folder = Path(str(command[command.index("--target") + 1])) / "packaging.dist-info"
                folder.mkdir()
                (folder / "METADATA").write_text(f"Name: packaging\nVersion: {version}\n")

        monkeypatch.setattr(environments, "run", run)
        environments.attempt_version("gym", "packaging", tmp_path)
    assert ["pytest" in command for command in commands] == [False, False, True]
    assert "the version of .venv, which tools/test tries" in capsys.readouterr().out
