"""The expressions of `--where`: conditions on episodes, in a part of Python's syntax.

Python parses an expression, but never runs it. Calls and attributes are refused.
"""

import ast
import keyword
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from diskreplay.errors import SchemaError, SegmentGone
from diskreplay.reading.episodes import Episode
from diskreplay.schema.schema import Field, Schema

Predicate = Callable[[Episode], bool]
Value = float | str | None
Read = Callable[[Episode], Value]

_OPTION = typer.Option(
    "--where",
    metavar="EXPRESSION",
    help='Only episodes that meet this condition, such as "total_reward > 20 and length < 100".',
)
Where = Annotated[str | None, _OPTION]
Required = Annotated[str, _OPTION]
_ATTRIBUTES = "total_reward", "length", "hidden_steps", "continues", "continued", "terminated", "truncated", "cut"
PROPERTIES: Mapping[str, tuple[type, Read]] = {
    **{name: (float, operator.attrgetter(name)) for name in _ATTRIBUTES},
    "open": (float, lambda episode: episode.ended == "open"),
    "ended": (str, operator.attrgetter("ended")),
    "id": (float, lambda episode: int(episode.ids[0])),
    "segment": (float, operator.attrgetter("segment")),
    "lane": (float, operator.attrgetter("lane")),
    "start_time": (float, lambda episode: float(episode.times[0])),
    "end_time": (float, lambda episode: float(episode.times[-1])),
}
_OF_SOURCES = "total_reward", "length", "hidden_steps", "terminated", "truncated", "cut", "ended"
SOURCE_PROPERTIES: Mapping[str, tuple[type, Read]] = {
    **{name: PROPERTIES[name] for name in _OF_SOURCES},
    "number": (float, operator.attrgetter("number")),
}
RIGHT_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("return", "returns", "ret", "reward", "rewards", "score", "total_return"), "called total_reward"),
    **dict.fromkeys(("len", "lengths", "steps", "n_steps", "num_steps", "size"), "called length"),
}
"""Wrong names of properties that users may try: {name: end of the error message}."""

FIELDS = "episode"  # episode["length"] is the episode field called "length"; length is the property

_COMPARISONS: Mapping[type, Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_ARITHMETIC: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_KINDS = {float: "a number", str: "a text"}


def compile_where(
    expression: str, schema: Schema, properties: Mapping[str, tuple[type, Read]] = PROPERTIES
) -> Predicate:
    """Return the condition of an expression: a function that tells whether an episode meets the condition.

    A comparison with a missing value is false. A calculation with a missing value gives a missing value. ``properties``
    has the names that an expression may use in addition to episode fields. Raises SchemaError if the text is not an
    expression, or has an unknown name. The message has the column of the fault.
    """
    expression = expression.strip()
    try:
        tree = ast.parse(expression, mode="eval")
        condition = _Compiler(expression, schema, properties).condition(tree.body)
    except SyntaxError as error:
        column = error.offset or len(expression)
        message, word = error.msg, "".join(re.findall(r"^\w+", (error.text or "")[column - 1 :]))
        if word in schema.episode and keyword.iskeyword(word):
            message = f'the field {word!r} is written {FIELDS}["{word}"]'
        elif word in RIGHT_NAMES and word not in schema.episode:  # "return" is a keyword of Python
            message = f"{word!r} is {RIGHT_NAMES[word]}"
        raise SchemaError(f"--where: {message} (at column {column} of {expression!r})") from None
    except (RecursionError, MemoryError):
        raise SchemaError(f"--where: {expression[:20]!r}... is nested too deep") from None

    def predicate(episode: Episode) -> bool:
        return bool(condition(episode))

    return predicate


def matching(episodes: Iterable[Episode], where: Predicate) -> list[bool]:
    """Return whether each episode meets a condition; False if the episode's segment was evicted."""
    found = []
    for episode in episodes:
        try:
            found.append(where(episode))
        except SegmentGone:
            found.append(False)
    return found


class _Term(NamedTuple):
    kind: type  # str or float; truth values have the kind float
    read: Read


class _Compiler:
    def __init__(self, expression: str, schema: Schema, properties: Mapping[str, tuple[type, Read]]) -> None:
        self._expression, self._fields, self._properties = expression, schema.episode, properties

    def condition(self, node: ast.expr) -> Read:
        """Return a function that computes the number or truth value of an expression for an episode."""
        return self._of_kind(node, float)

    def _of_kind(self, node: ast.expr, kind: type) -> Read:
        term = self._term(node)
        if term.kind is not kind:
            raise self._error(node, f"{ast.unparse(node)} is {_KINDS[term.kind]}, but {_KINDS[kind]} is needed")
        return term.read

    def _term(self, node: ast.expr) -> _Term:
        match node:
            case ast.Constant(value=str() as text):
                return _Term(str, lambda _: text)
            case ast.Constant(value=(bool() | int() | float()) as number):
                return _Term(float, lambda _: number)
            case ast.Name() | ast.Subscript():
                return self._named(node)
            case ast.BoolOp(op=op, values=values):
                conditions, joined = [self.condition(value) for value in values], all if type(op) is ast.And else any
                return _Term(float, lambda episode: joined(condition(episode) for condition in conditions))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                condition = self.condition(operand)
                return _Term(float, lambda episode: not condition(episode))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return _Term(float, _joined(operator.sub, lambda _: 0, self.condition(operand), None))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                work = _ARITHMETIC[type(op)]
                return _Term(float, _joined(work, self.condition(left), self.condition(right), None))
            case ast.Compare(left=left, ops=ops, comparators=rest):
                pairs = zip(pairwise([left, *rest]), ops, strict=True)
                links = [self._comparison(one, op, other) for (one, other), op in pairs]
                return _Term(float, lambda episode: all(link(episode) for link in links))
        raise self._error(node, f"{ast.unparse(node)} is not supported in an expression")

    def _comparison(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> Read:
        term = self._term(left)
        if isinstance(op, (ast.Is, ast.IsNot)):
            if not isinstance(right, ast.Constant) or right.value is not None:
                raise self._error(right, "is compares only with None")
            lacks = isinstance(op, ast.Is)
            return lambda episode: (term.read(episode) is None) is lacks
        if isinstance(op, (ast.In, ast.NotIn)):
            if not isinstance(right, (ast.Tuple, ast.List, ast.Set)):
                raise self._error(right, f"{ast.unparse(right)} is not a list, such as (1, 2)")
            items, wanted = [self._of_kind(item, term.kind) for item in right.elts], isinstance(op, ast.In)
            return _joined(
                lambda value, others: (value in others) is wanted,
                term.read,
                lambda episode: [item(episode) for item in items],
                False,
            )
        return _joined(_COMPARISONS[type(op)], term.read, self._of_kind(right, term.kind), False)

    def _named(self, node: ast.expr) -> _Term:
        """Return the term for a property, or for one number of an episode field, such as ``goal[0]``."""
        keys, base = self._keys(node)
        if not keys and base in self._properties:
            return _Term(*self._properties[base])
        name, *keys = keys if base == FIELDS and keys else [base, *keys]
        if name not in self._fields:
            known = ", ".join([*self._properties, *self._fields])
            if name in RIGHT_NAMES:
                raise self._error(node, f"{name!r} is {RIGHT_NAMES[name]}")
            raise self._error(node, f"unknown name {name!r}; known are {known}")
        field: Any = self._fields[name]
        shape = field.shape if isinstance(field, Field) else None
        for key in keys:
            try:
                if shape is None:
                    field = field[int(key) if isinstance(field, tuple) else key]
                    shape = field.shape if isinstance(field, Field) else None
                else:
                    range(shape[0])[key]
                    shape = shape[1:]
            except (LookupError, TypeError, ValueError):
                raise self._error(node, f"{name} has no {key!r}") from None
        if shape != ():
            inside = "several values" if shape is None else f"values of shape {shape}"
            raise self._error(node, f"{ast.unparse(node)} has {inside}; name one, as in {name}[0]")
        return _Term(float, lambda episode: _number(episode[name], keys))

    def _keys(self, node: ast.expr) -> tuple[list[Any], str]:
        keys: list[Any] = []
        while isinstance(node, ast.Subscript):
            try:
                keys.insert(0, ast.literal_eval(node.slice))
            except ValueError:
                raise self._error(node.slice, f"{ast.unparse(node.slice)} is not a number or a text") from None
            node = node.value
        if not isinstance(node, ast.Name):
            raise self._error(node, f"{ast.unparse(node)} has no items")
        return keys, node.id

    def _error(self, node: ast.expr, message: str) -> SchemaError:
        line = self._expression.splitlines()[node.lineno - 1]
        column = len(line.encode()[: node.col_offset].decode()) + 1
        return SchemaError(f"--where: {message} (at column {column} of {self._expression!r})")


def _joined(work: Callable[[Any, Any], Value], left: Read, right: Callable[[Episode], Any], otherwise: Value) -> Read:
    """Return a function that computes ``work(left, right)`` for an episode.

    The function returns ``otherwise`` if a value is missing, or if the calculation fails, such as a division by zero.
    """

    def read(episode: Episode) -> Value:
        one, other = left(episode), right(episode)
        try:
            return otherwise if one is None or other is None else work(one, other)
        except ArithmeticError:
            return otherwise

    return read


def _number(value: Any, keys: list[Any]) -> Value:
    """Return the number ``value[keys[0]][keys[1]]...``; None if ``value`` is None.

    A float32 of 0.1 becomes 0.1: a float has the digits that numpy prints.
    """
    if value is None:
        return None
    for key in keys:
        value = value[key]
    value = np.asarray(value)[()]
    return float(str(value)) if value.dtype.kind == "f" else value.item()
