"""Tensors of devices come to the processor together; what does not need a device runs on a stand-in."""

from typing import Any

import numpy as np
import pytest
import torch

from diskreplay import device_tensors
from diskreplay.device_tensors import fetched
from tests.testing.device import Device

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[Device]:
    devices = [Device(0), Device(1)]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: devices[device.index].current(device))
    return devices


def test_all_copies_begin_before_one_wait(devices: list[Device]) -> None:
    device = devices[0]
    array = np.arange(3)
    given = {
        "obs": {"at": device.tensor([[2.0, 3.0]]), "plain": array},
        "pair": (device.tensor([4]), None),
        "flag": device.tensor([False]),
        "reward": 0.5,
    }
    (found,) = fetched(given)
    assert device.stream.waits == 1
    assert found["obs"]["plain"] is array
    assert found["pair"][1] is None
    assert found["reward"] == 0.5
    assert [found["obs"]["at"].tolist(), found["pair"][0].tolist(), found["flag"].tolist()] == [
        [[2.0, 3.0]],
        [4],
        [False],
    ]
    assert found.keys() == given.keys()
    assert devices[1].stream.waits == 0


def test_each_device_is_waited_for_once(devices: list[Device]) -> None:
    found = fetched(*(device.tensor([device.number + 5]) for device in (*devices, *devices)))
    assert [tensor.item() for tensor in found] == [5, 6, 5, 6]
    assert [device.stream.waits for device in devices] == [1, 1]


def test_copies_are_of_the_values_before_the_call_returned(devices: list[Device]) -> None:
    given = devices[0].tensor([2, 3])
    (copy,) = fetched(given)
    given.fill_(0)
    assert copy.tolist() == [2, 3]


def test_a_tensor_too_large_for_pinned_memory_is_copied_to_other_memory(
    devices: list[Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_tensors, "MOST_PINNED_BYTES", 16)
    stream = devices[0].stream
    small, large = fetched(devices[0].tensor([2.0] * 4), devices[0].tensor([3.0] * 5))
    assert (small.tolist(), large.tolist()) == ([2.0] * 4, [3.0] * 5)
    assert stream.waits == 2


@pytest.mark.parametrize("values", [np.zeros(3), torch.zeros(3), (1, None, {"a": [2.0]}), {}, None, "text"], ids=repr)
def test_values_that_are_on_no_device_are_returned_as_they_are(values: Any) -> None:
    assert fetched(values, 1)[0] is values


class TestOnADevice:
    pytestmark = gpu

    @pytest.mark.parametrize(
        "of",
        [
            lambda rows: rows,
            lambda rows: rows.T,
            lambda rows: rows[:, ::3],
            lambda rows: rows[0].expand(500, -1),
            lambda rows: rows.bfloat16(),
            lambda rows: rows.requires_grad_(),
            lambda rows: rows[0, 0],
            lambda rows: rows[:0],
        ],
        ids=["whole", "transposed", "sliced", "expanded", "bfloat16", "gradient", "scalar", "empty"],
    )
    def test_copies_have_the_values_behind_the_operations_so_far(self, of: Any) -> None:
        rows = torch.randn(500, 60)
        weights = torch.randn(4096, 4096, device="cuda")
        for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(20):
                    weights = torch.tanh(weights @ weights)  # the stream is behind
                base = rows.cuda() + 0 * weights[0, 0]
                given = of(base)
                copy, again = fetched(given, {"a": given})
                with torch.no_grad():
                    base.zero_()
            expected = of(rows.clone())
            assert not copy.is_cuda
            assert copy.dtype == expected.dtype
            assert torch.equal(copy, expected.detach())
            assert torch.equal(copy, again["a"])

    def test_copies_are_in_pinned_memory(self) -> None:
        (copy,) = fetched(torch.zeros(1000, device="cuda"))
        assert copy.is_pinned()
