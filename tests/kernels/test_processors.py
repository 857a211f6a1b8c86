"""A search among random numbers has no conditional jump on what it compares, whatever processor it is compiled for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import llvmlite.binding
import pytest

from tests.testing.support import REPOSITORY

# Compiles kernels, with or without the pass of LLVM that turns choices into jumps; prints each one's number of these.
COUNT = """
import json, re, sys
import llvmlite.binding
llvmlite.binding.set_option("", f"-x86-cmov-converter={sys.argv[1]}")
from diskreplay.kernels import cache, table
counts = {}
for name in ("random_ids", "ids_at", "sumtree_find", "initial_priorities"):
    (code,) = cache.compile_kernel(table.MODULES[name], name).inspect_asm().values()
    counts[name] = len(re.findall(r"^\\tj(?!mp)", code, re.MULTILINE))
print(json.dumps(counts))
"""


def jumps(processor: str, *, converted: bool, folder: Path) -> dict[str, int]:
    """Return how many conditional jumps kernels have that are compiled for a processor."""
    chosen = {"NUMBA_CPU_NAME": processor, "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": str(folder / str(converted))}
    command = [sys.executable, "-c", COUNT, str(converted).lower()]
    done = subprocess.run(command, cwd=REPOSITORY, env=os.environ | chosen, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    return found


@pytest.mark.slow(turns=4)
@pytest.mark.skipif(llvmlite.binding.llvm_version_info < (17,), reason="this LLVM forgets what cannot be predicted")
@pytest.mark.parametrize("processor", ["x86-64-v3", "emeraldrapids"])
def test_no_choice_of_a_search_becomes_a_jump(processor: str, tmp_path: Path) -> None:
    expected = jumps(processor, converted=False, folder=tmp_path)
    assert jumps(processor, converted=True, folder=tmp_path) == expected
