"""Batches as arrays of JAX: they equal the tensors, keep the memory, and ids do not lose their upper bits.

Each test runs a program, since the threads of JAX would outlive it, and no later test could fork.
"""

import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.testing.support import REPOSITORY

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("jax") is None, reason="could not import 'jax'"),
]

PROGRAM = """
import sys, warnings
import jax, jax.numpy as jnp, numpy as np, torch
import diskreplay as dr
from diskreplay.interop.jax import to_jax

def number(*shape, dtype="float32"):
    return dr.Field(shape, dtype)

obs = {
    "image": number(16, 16, dtype="uint8"), "position": number(3), "flag": number(dtype="bool"),
    "pair": (number(dtype="int64"), number(2, dtype="float64")), "half": number(dtype="float16"),
}
schema = dr.Schema(obs=obs, action=number(dtype="int64"), extra={"log_prob": number()})
store = dr.create(sys.argv[1], schema)
with store.writer() as writer:
    for first in range(0, 2000, 200):
        k = np.arange(first, first + 201)
        image = np.broadcast_to((k % 251).astype("u1")[:, None, None], (201, 16, 16))
        position, pair = np.stack([k, k + 1, k + 2], axis=1).astype("f4"), (k, np.stack([k, k], axis=1) / 3)
        obs = {"image": image, "position": position, "flag": k % 2 == 0, "pair": pair, "half": np.zeros(201)}
        writer.append_episode(obs, k[:-1], k[:-1].astype("f4"), terminated=True, log_prob=np.zeros(200))

def leaves(tensors, arrays, path=""):
    if isinstance(arrays, dict):
        for name in arrays:
            yield from leaves(tensors[name], arrays[name], f"{path}/{name}")
    elif isinstance(arrays, tuple):
        for position, below in enumerate(arrays):
            yield from leaves(tensors[position], below, f"{path}/{position}")
    else:
        yield path, tensors, arrays
"""


def run(tmp_path, code):
    command = [sys.executable, "-c", PROGRAM + code, str(tmp_path / "store")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_arrays_equal_the_tensors_of_every_view_and_jit_takes_them(tmp_path):
    code = """
views = dr.Transitions(n_step=3), dr.Sequences(length=20, overlap=10), dr.Episodes(), dr.Rollouts(8)
for view in views[:3]:
    with dr.Sampler(store, view, batch_size=16, seed=0) as sampler:
        batch = sampler.sample()
        arrays = to_jax(batch)
        assert arrays.keys() == set(batch) - {"index"}
        assert type(arrays["obs"]["pair"]) is tuple
        for wide in (False, True):
            jax.config.update("jax_enable_x64", wide)
            for path, tensor, array in leaves(batch, to_jax(batch)):
                expected = tensor.numpy()
                if not wide and expected.dtype.itemsize == 8:
                    expected = expected.astype(f"{expected.dtype.kind}4")
                assert array.dtype == expected.dtype, (path, array.dtype)
                assert np.array_equal(np.asarray(array), expected), path
        jax.config.update("jax_enable_x64", False)
        doubled = jax.jit(lambda fields: jax.tree.map(lambda array: array * 2, fields))(arrays)
        assert np.array_equal(np.asarray(doubled["reward"]), batch.reward.numpy() * 2)
"""
    run(tmp_path, code)


def test_the_arrays_share_memory_with_a_batch(tmp_path):
    code = """
with dr.Sampler(store, dr.Transitions(), batch_size=16) as sampler:
    batch = sampler.sample()
    shared = {
        path for path, tensor, array in leaves(batch, to_jax(batch))
        if array.unsafe_buffer_pointer() == tensor.data_ptr()
    }
of_64_bits = {"/action", "/n_steps", "/obs/pair/0", "/obs/pair/1", "/next_obs/pair/0", "/next_obs/pair/1"}
assert shared == {path for path, _, _ in leaves(batch, to_jax(batch))} - of_64_bits, shared
assert {"/obs/image", "/obs/flag", "/obs/half", "/terminated", "/weight"} <= shared
"""
    run(tmp_path, code)


@pytest.mark.parametrize("view", ["dr.Transitions(n_step=3)", "dr.Sequences(length=20, overlap=10)"])
def test_memory_is_not_used_again_while_arrays_or_computations_need_it(tmp_path, view):
    code = (
        f"view = {view}\n"
        + """
@jax.jit
def compute(fields):
    position = fields["obs"]["position"].reshape(-1, 3)[:256]
    busy = jax.lax.fori_loop(0, 10, lambda _, m: jnp.tanh(m @ m), position @ position.T)
    images = fields["obs"]["image"].astype(jnp.float32).mean((-1, -2))
    return images + 0 * busy.sum(), fields["obs"]["position"][..., 0]

def check(image, position):
    assert np.array_equal(np.asarray(image), (position.astype(int) % 251).astype("f4"))

increment = jax.jit(lambda array: array + 1, donate_argnums=0)
pending, held, places = [], [], set()
# debug overwrites the memory of batches that are gone
with dr.Sampler(store, view, batch_size=256, prefetch=3, seed=0, debug=True) as sampler:
    for number in range(60):
        batch = sampler.sample()
        places.add(batch.obs["image"].data_ptr())
        arrays, expected = to_jax(batch), batch.obs["position"][..., 0].numpy().copy()
        pending.append((compute(arrays), expected))
        if number % 10 == 0:
            held.append((arrays["obs"]["image"], expected))
            given = batch.reward.numpy().copy()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it may say that the memory was not given
                donated = increment(arrays["reward"])
            assert np.array_equal(np.asarray(donated), given + 1)
            assert np.array_equal(batch.reward.numpy(), given)
        del batch, arrays
        while len(pending) > 4:
            (images, positions), before = pending.pop(0)
            assert np.array_equal(np.asarray(positions), before)
            check(images, before)
    for image, before in held:
        check(image[..., 0, 0], before)
    assert len(places) < 60  # or no memory was used again at all
"""
    )
    run(tmp_path, code)


def test_priorities_are_updated_by_errors_of_jax_and_ids_of_the_batch(tmp_path):
    code = """
with dr.Sampler(store, dr.Transitions(), dr.Prioritized(alpha=1.0, eps=1e-9), batch_size=64, seed=0) as sampler:
    batch = sampler.sample()
    assert sampler.update_priorities(batch.index, jnp.abs(to_jax(batch)["obs"]["position"][:, 0]) + 1) == 0
    found = sampler.gather(batch.index, ["obs", "probability", "priority_sum"])
    expected = batch.obs["position"][:, 0].double() + 1
    assert torch.allclose(found.probability * found.priority_sum, expected, rtol=1e-5)
with store.writer() as writer:
    zero = jnp.zeros((), jnp.float32)
    obs = {
        "image": jnp.ones((16, 16), jnp.uint8), "position": jnp.ones(3), "flag": zero > 0,
        "pair": (jnp.int32(5), jnp.ones(2)), "half": jnp.float16(1),
    }
    writer.append(obs, jnp.int32(7), zero, False, next_obs=obs, log_prob=zero)
store.refresh()
assert store.episodes[-1].action.tolist() == [7]
"""
    run(tmp_path, code)


def test_an_integer_that_does_not_fit_and_an_unknown_device_are_refused_by_name(tmp_path):
    code = """
def message(**fields):
    try:
        to_jax(dr.Batch({"index": torch.zeros(2, dtype=torch.int64), **fields}))
    except ValueError as error:
        return str(error)

large = torch.tensor([1, 2**40])
said = message(obs={"a": large})
assert said == (
    "field 'obs/a' has 1099511627776, which does not fit into int32: call "
    'jax.config.update("jax_enable_x64", True) at the start of the program, or leave the field out of `fields`'
), said
assert "has -2147483649, which does not fit" in message(a=torch.tensor([-(2**31) - 1]))
assert message(a=torch.tensor([-(2**31), 2**31 - 1])) is None
assert message(a=torch.zeros(0, dtype=torch.int64)) is None
jax.config.update("jax_enable_x64", True)
assert to_jax(dr.Batch({"index": large, "a": large}))["a"].tolist() == [1, 2**40]
said = message(a=torch.zeros(2, device="meta"))
assert said.startswith("JAX cannot take the field 'a', float32[2] on meta: "), said
"""
    run(tmp_path, code)
