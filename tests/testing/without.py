"""Code that is run where libraries cannot be imported: what is missing says which extra brings it."""

import subprocess
import sys
from collections.abc import Iterable
from typing import Any

from tests.testing.support import REPOSITORY

HOOK = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
"""
STORE = """
import json
import numpy as np
import diskreplay as dr

path = sys.argv[1]
schema = dr.Schema(obs=dr.Field((3,), "float32"), action=dr.Field((), "int64"))
with dr.create(path, schema, exist_ok=True) as store, store.writer() as writer:
    for t in range(8):
        writer.append(np.full(3, t), t, 1.0, t == 7, next_obs=np.full(3, t + 1))

def message(work):
    try:
        work()
    except dr.MissingExtra as error:
        return str(error)
"""


def run_without(names: Iterable[str], code: str, *args: Any) -> str:
    """Run code where these libraries cannot be imported; return what it printed last."""
    hook = HOOK.format(names=tuple(names)) + f"NAMES = {tuple(names)!r}\n"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", hook + code, *map(str, args)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]
