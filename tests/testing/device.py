"""A stand-in for a CUDA device, of which there need be none: its copies are made when somebody waits for them."""

from collections.abc import Callable
from typing import Any

import torch


class Stream:
    """Begins copies at once, and makes them when it is waited for."""

    def __init__(self) -> None:
        self.begun: list[Callable[[], Any]] = []
        self.waits = 0

    def synchronize(self) -> None:
        self.waits += 1
        for copy in self.begun:
            copy()
        self.begun.clear()


class DeviceTensor(torch.Tensor):
    """A tensor that says that it is on a device; a copy of it holds ones until the stream was waited for."""

    number: int
    stream: Stream

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", self.number)

    def detach(self) -> "DeviceTensor":
        return self

    def to(self, device: str, non_blocking: bool = False) -> torch.Tensor:  # type: ignore[override]
        assert device == "cpu"
        values = self.as_subclass(torch.Tensor)
        copy = torch.ones_like(values)
        self.stream.begun.append(lambda: copy.copy_(values))
        if not non_blocking:
            self.stream.synchronize()
        return copy

    def cpu(self) -> torch.Tensor:  # type: ignore[override]
        return self.to("cpu")

    def numpy(self) -> Any:  # type: ignore[override]
        raise TypeError("can't convert cuda:0 device type tensor to numpy")


class Device:
    """Makes tensors of one stream; a test puts `current` in the place of `torch.cuda.current_stream`."""

    def __init__(self, number: int = 0) -> None:
        self.number, self.stream = number, Stream()

    def current(self, device: torch.device) -> Stream:
        assert device.index == self.number
        return self.stream

    def tensor(self, values: Any) -> DeviceTensor:
        tensor = torch.as_tensor(values).clone().as_subclass(DeviceTensor)
        tensor.number, tensor.stream = self.number, self.stream
        return tensor
