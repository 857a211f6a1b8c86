"""Hours by hand: mutate a small store, guided by the lines of ours that a mutation reaches.

    pip install -e ".[test,fuzz]"
    python -m tests.segments.fuzz --seconds 3600 --corpus some/folder

The mutations and the checks are those of `test_hostile`; libFuzzer, through atheris, makes the choices that hypothesis
draws there at random. Kernels run compiled, and are not looked into. The run ends at the first finding, with exit code
77: its traceback is printed, what it drew is kept in the corpus' folder as crash-..., and it belongs into the tests.
"""

import argparse
import pkgutil
import sys
import tempfile
from importlib import import_module
from pathlib import Path

import atheris
from hypothesis import HealthCheck, given, settings

import diskreplay as dr

MODULES = [module.name for module in pkgutil.walk_packages(dr.__path__, "diskreplay.")]
# numba compiles their bytecode, which may not be changed.
KERNELS = [name for name in MODULES if name.startswith("diskreplay.kernels")]
PACKAGES = (
    *("errors", "schema", "segments", "retention", "reading", "writing", "integrity", "store"),
    *("distributions", "views", "sampling"),
)

with atheris.instrument_imports(include=["diskreplay"], exclude=KERNELS):
    for name in MODULES:
        if name.split(".")[1] in PACKAGES:
            import_module(name)
    from diskreplay.integrity.verify import check_root, check_segment
    from diskreplay.segments.files import commit
    from tests.segments.hostile import changes
    from tests.segments.test_hostile import make_original, make_packed, said, use_mutated

MOST_S = 600  # for one mutated store, which takes a tenth of a second
MOST_MIB = 3 << 10


def fuzz(seconds: int, corpus: Path, packs: bool) -> None:
    """Try mutations for so long, of a store with or without packs; does not return."""
    check_root._PAUSE_S = check_segment._PAUSE_S = 0
    commit._RETRIES = 2
    folder = tempfile.mkdtemp(prefix="diskreplay-fuzz-")
    original = (make_packed if packs else make_original)(Path(folder) / "store")

    @settings(database=None, suppress_health_check=list(HealthCheck))
    @given(changes(original))
    def mutated(planned: list[tuple]) -> None:
        with tempfile.TemporaryDirectory(dir=folder) as copies:
            use_mutated(Path(copies), original, planned, said)

    corpus.mkdir(parents=True, exist_ok=True)
    limits = [f"-max_total_time={seconds}", f"-timeout={MOST_S}", f"-rss_limit_mb={MOST_MIB}", "-max_len=4096"]
    files = [f"-artifact_prefix={corpus}/", str(corpus)]
    atheris.Setup(
        [sys.argv[0], *limits, "-len_control=0", "-print_final_stats=1", *files], mutated.hypothesis.fuzz_one_input
    )
    atheris.Fuzz()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Mutate a store, guided by coverage.")
    parser.add_argument("--seconds", type=int, default=3600)
    parser.add_argument("--corpus", type=Path, required=True, help="where mutations that reached new lines are kept")
    parser.add_argument("--packs", action="store_true", help="of a store that was compacted")
    given_ = parser.parse_args()
    fuzz(given_.seconds, given_.corpus, given_.packs)
