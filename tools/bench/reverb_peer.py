"""The peer Reverb, in a process with its own environment: it needs another NumPy than diskreplay.

``DISKREPLAY_REVERB_PYTHON`` names an interpreter that has dm-reverb and tensorflow. It runs this module as a script,
which serves a prioritized table, and makes a round of batches for each line that it reads.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter_ns

VARIABLE = "DISKREPLAY_REVERB_PYTHON"
NAME = "Reverb, 1 server"


@contextmanager
def rounds(steps: int, batches: int, batch_size: int, ahead: int) -> Iterator[Callable[[], list[float]]]:
    """Start it; yield a function that makes a round of batches, some of them ahead, and returns their seconds."""
    command = [os.environ[VARIABLE], __file__, *map(str, (steps, batches, batch_size, ahead))]
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    settings = {**clean, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=settings) as process:

        def one_round() -> list[float]:
            assert process.stdin is not None
            assert process.stdout is not None
            print("round", file=process.stdin, flush=True)
            for line in process.stdout:
                if line.startswith("["):
                    found: list[float] = json.loads(line)
                    return found
            raise RuntimeError(f"Reverb ended with {process.wait()}")

        try:
            yield one_round
        finally:
            process.kill()


def serve(steps: int, batches: int, batch_size: int, ahead: int) -> None:
    """Fill a table with transitions; for each line that comes, draw from it and update it."""
    import numpy as np
    import reverb
    import tensorflow as tf

    fields = {
        "obs": ((4,), np.float32), "action": ((), np.int64), "reward": ((), np.float32),
        "next_obs": ((4,), np.float32), "done": ((), np.bool_),
    }  # fmt: skip
    table = reverb.Table(
        name="steps",
        sampler=reverb.selectors.Prioritized(0.6),
        remover=reverb.selectors.Fifo(),
        max_size=steps,
        rate_limiter=reverb.rate_limiters.MinSize(1),
        signature={name: tf.TensorSpec(shape, dtype) for name, (shape, dtype) in fields.items()},
    )
    server = reverb.Server([table], port=None)
    client = reverb.Client(f"localhost:{server.port}")
    rng = np.random.default_rng(0)
    with client.writer(max_sequence_length=1) as writer:
        for t in range(steps):
            row = {name: np.asarray(rng.random(shape) < 0.5, dtype) for name, (shape, dtype) in fields.items()}
            writer.append(row)
            writer.create_item("steps", 1, 1.0 + t % 7)
    dataset = reverb.TimestepDataset.from_table_signature(
        client.server_address, "steps", max_in_flight_samples_per_worker=ahead * batch_size
    )
    samples = dataset.batch(batch_size, drop_remainder=True).prefetch(ahead).as_numpy_iterator()
    errors = rng.random(batch_size)
    for _ in sys.stdin:
        taken = []
        for _ in range(batches):
            started = perf_counter_ns()
            sample = next(samples)
            for name in ("obs", "action", "reward", "next_obs", "done"):
                sample.data[name]
            # importance weights, like ours
            weight = (steps * sample.info.probability) ** -0.4
            weight /= weight.max()
            client.mutate_priorities("steps", dict(zip(sample.info.key.tolist(), errors.tolist(), strict=True)))
            taken.append((perf_counter_ns() - started) / 1e9)
        print(json.dumps(taken), flush=True)
    os._exit(0)  # does not wait for the threads of its server


if __name__ == "__main__":
    serve(*map(int, sys.argv[1:]))
