"""Whose turn a writer is: one thread at a time, and nobody's once it is closed.

Who uses a writer takes the attribute `free` from its turn before and puts it back afterwards. That an attribute is
deleted, or is not there, is one operation: no other thread and no signal's handler comes in between. A lock would take
several times as long, and be lost where a handler raises between its acquisition and the block that releases it.
"""

import math
import sys
import time
import weakref
from collections.abc import Callable
from functools import wraps
from types import CodeType
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_POLL_S = 0.001


class Turn:
    """The right to use a writer, which is there to be taken if `free` is."""

    __slots__ = ("free",)

    def __init__(self) -> None:
        self.free = True


class Guard:
    """Calls a method with the error that a block met: as a generator would, which takes a microsecond.

    Its object has the guard, and is referred to weakly: a cycle would put off its end to the garbage collector.
    """

    __slots__ = ("_method",)

    def __init__(self, method: weakref.WeakMethod[Callable[[BaseException], None]]) -> None:
        self._method = method

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Call it."""
        if error is not None and (method := self._method()) is not None:
            method(error)


# What runs while the writer in its variable `self` is in use.
_codes: set[CodeType] = set()


def takes_turns(method: Callable[..., Any]) -> None:
    """Note a method that takes the turn by itself."""
    _codes.add(method.__code__)


def in_turn(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Let one thread at a time call a method of a writer; see `_BaseWriter`."""

    @wraps(method)
    def call(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        turn = self._turn
        try:
            del turn.free
        except AttributeError:
            raise self._refusal() from None
        try:
            return method(self, *args, **kwargs)
        finally:
            if self._turn is turn:
                turn.free = True
            else:
                self._leave(turn)

    takes_turns(call)
    return call


def is_inside(writer: Any) -> bool:
    """Tell whether this thread is in the middle of a call of a writer: a signal's handler runs there, or a caster."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _codes and frame.f_locals.get("self") is writer:
            return True
        frame = frame.f_back
    return False


def wait_for(turn: Turn) -> None:
    """Take a turn for good, when the call in progress has ended. Nobody can take it after that one.

    It is always put back: between the deletion and the block that does so, no signal's handler can run.
    """
    while not take_within(turn, math.inf):
        pass


def take_within(turn: Turn, seconds: float) -> bool:
    """Take a turn for good, if it is free soon."""
    until = time.monotonic() + seconds
    while True:
        try:
            del turn.free
            return True
        except AttributeError:
            if time.monotonic() > until:
                return False
        time.sleep(_POLL_S)
