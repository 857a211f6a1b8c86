"""Batches as TensorDicts, by TorchRL's keys."""

import importlib
import json

import numpy as np
import pytest
import torch

import diskreplay as dr
from tests.testing.support import append_numbered, serial_schema
from tests.testing.without import STORE, run_without

pytestmark = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")


@pytest.fixture
def store(tmp_store):
    with dr.create(tmp_store, serial_schema()) as store:
        with store.writer() as writer:
            for first in range(0, 60, 6):
                append_numbered(writer, range(first, first + 6), end="terminated" if first % 12 else "truncated")
        store.refresh()
        yield store


def test_transitions_have_what_they_lead_to_below_next(store):
    pytest.importorskip("tensordict")
    with dr.Sampler(store, dr.Transitions(n_step=3), dr.Prioritized(), batch_size=32, seed=0) as sampler:
        batch = sampler.sample()
        found = batch.to_tensordict()
    assert found.batch_size == (32,)
    for ours, key in {
        "obs": "observation",
        "next_obs": ("next", "observation"),
        "action": "action",
        "serial": "serial",
        "index": "index",
        "weight": "priority_weight",
    }.items():
        assert torch.equal(found[key], batch[ours])
    for ours, key in {"reward": ("next", "reward"), "n_steps": "steps_to_next_obs"}.items():
        assert torch.equal(found[key], batch[ours][:, None])
    done = batch.terminated | batch.truncated
    assert done.any()
    assert torch.equal(found["next", "done"], done[:, None])
    assert found["observation"].data_ptr() == batch.obs.data_ptr()


def test_sequences_have_two_batch_axes_over_which_what_an_item_has_once_is_spread(store):
    pytest.importorskip("tensordict")
    with dr.Sampler(store, dr.Sequences(8, 4), batch_size=16, seed=0) as sampler:
        batch = sampler.sample()
        found = batch.to_tensordict()
    assert found.batch_size == (16, 8)
    assert torch.equal(found["index"], batch.index[:, None].expand(16, 8))
    assert torch.equal(found["is_init"], batch.is_first[..., None])
    assert torch.equal(found["next", "observation"], batch.next_obs)
    assert torch.equal(found["mask"], batch.mask)


def test_a_dict_space_has_its_keys_at_the_root(tmp_path):
    pytest.importorskip("tensordict")
    schema = serial_schema(obs={"image": dr.Field((2,), "uint8"), "state": dr.Field((), "float32")})
    with dr.create(tmp_path / "store", schema) as store, store.writer() as writer:
        for t in range(3):
            obs = [{"image": np.full(2, i, np.uint8), "state": np.float32(i)} for i in (t, t + 1)]
            writer.append(obs[0], 0, 1.0, False, next_obs=obs[1], serial=t)
        with dr.Sampler(store, dr.Transitions()) as sampler:
            batch = sampler.sample()
            found = batch.to_tensordict()
    assert torch.equal(found["image"], batch.obs["image"])
    assert torch.equal(found["next", "state"], batch.next_obs["state"])


def test_nested_extra_fields_have_their_own_keys_also_in_next(tmp_path):
    pytest.importorskip("tensordict")
    field = dr.Field((), "int64")
    schema = dr.Schema(dr.Field(2, "float32"), field, extra={"collector": {"id": field}, "next": {"bonus": field}})
    with dr.create(tmp_path / "store", schema) as store, store.writer() as writer:
        writer.append(np.zeros(2), 0, 1.0, True, next_obs=np.ones(2), collector={"id": 3}, next={"bonus": 4})
        with dr.Sampler(store, dr.Transitions(), batch_size=5) as sampler:
            found = sampler.sample().to_tensordict()
    assert found["collector", "id"].tolist() == [3] * 5
    assert found["next", "bonus"].tolist() == [4] * 5
    assert found["next", "reward"].tolist() == [[1.0]] * 5


def test_torchrls_dqn_loss_is_that_of_a_plain_loop(store):
    modules = pytest.importorskip("tensordict.nn")
    objectives = pytest.importorskip("torchrl.objectives")
    actors = importlib.import_module("torchrl.modules")
    specs = importlib.import_module("torchrl.data")
    torch.manual_seed(0)
    view = dr.Transitions(n_step=3, gamma=0.9)
    with dr.Sampler(store, view, batch_size=32, seed=0) as sampler:
        batch = sampler.sample()
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(batch.obs[0].numel(), 64))
    module = modules.TensorDictModule(net, in_keys=["observation"], out_keys=["action_value"])
    actor = actors.QValueActor(module, spec=specs.Categorical(64), action_space="categorical")
    loss = objectives.DQNLoss(actor, action_space="categorical", loss_function="l2", delay_value=False)
    loss.make_value_estimator(gamma=0.9)
    data = batch.to_tensordict()
    data["action"] = data["action"] % 64
    found = loss(data)["loss"]
    with torch.no_grad():
        best = net(batch.next_obs).max(1).values
        target = batch.reward + batch.discount * best
    q = net(batch.obs).gather(1, (batch.action % 64)[:, None])[:, 0]
    torch.testing.assert_close(found, ((q - target) ** 2).mean())


@pytest.mark.slow(turns=4)
def test_what_is_missing_says_which_extra_brings_it(tmp_path):
    code = "\nprint(json.dumps(message(dr.Sampler(path, dr.Transitions()).sample().to_tensordict)))"
    assert json.loads(run_without(["tensordict"], STORE + code, tmp_path / "store")) == (
        "a TensorDict needs a library that cannot be imported (No module named 'tensordict'): "
        'pip install "diskreplay[torchrl]"'
    )
