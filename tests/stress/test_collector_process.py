"""A process that only collects stays small."""

import json

import diskreplay as dr
from tests.testing.support import run_python, serial_schema

COLLECT = """
import json, sys, time
start = time.perf_counter()
import diskreplay as dr
import_s = time.perf_counter() - start
import numpy as np

def resident_kib():
    with open("/proc/self/status") as status:
        return int(dict(line.split(":", 1) for line in status)["VmRSS"].split()[0])

with dr.open(sys.argv[1], mode="a") as store:
    with store.writer() as writer:
        for t in range(3000):
            obs = np.full(3, t, np.float32)
            writer.append(obs, t, 1.0, t % 100 == 99, next_obs=obs + 1, serial=t)
    with store.writer(num_envs=8) as writer:
        lanes = np.arange(8)
        for t in range(300):
            obs = np.full((8, 3), t, np.float32)
            writer.append(obs, lanes, np.ones(8), lanes * 0 + t % 100 == 99, lanes < 0, next_obs=obs + 1, serial=lanes)
        writing_kib = resident_kib()
    store.refresh()
    steps = len(store)
heavy = [name for name in ("torch", "numba", "llvmlite", "matplotlib", "gymnasium", "filelock") if name in sys.modules]
kib = {"writing_kib": writing_kib, "sealed_kib": resident_kib()}
print(json.dumps({"steps": steps, "heavy": heavy, "import_s": import_s, **kib}))
"""


def test_a_collector_loads_neither_torch_nor_numba_and_stays_under_40_megabytes(tmp_store, record_property):
    dr.create(tmp_store, serial_schema()).close()
    answer = json.loads(run_python(COLLECT, tmp_store))
    # Reported and not asserted: a time says as much about a busy machine as about the code.
    record_property("import_s", answer["import_s"])

    assert answer["steps"] == 3000 + 8 * 300
    assert answer["heavy"] == []
    assert answer["writing_kib"] < 40 << 10
    assert answer["sealed_kib"] < 44 << 10  # and what was read to take the checksums of two segments
