"""A parser of JSON that refuses documents with too many levels of nesting."""

import json
import re
from typing import Any

import numpy as np

MOST_DEPTH = 200
"""The maximum number of levels of nested objects and arrays. The parser is recursive, and the stack of any thread has
room for this number of levels."""

_TEXT = re.compile(r'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_STEPS = np.zeros(256, np.int8)
_STEPS[[*b"[{"]] = 1
_STEPS[[*b"]}"]] = -1


def parse_json(data: str | bytes) -> Any:
    """Return the value of a JSON document. Raises ValueError if the text is invalid or nested too deeply."""
    if not isinstance(data, str | bytes):
        raise TypeError(f"JSON must be text or bytes, not {type(data).__name__}")
    text = data if isinstance(data, str) else data.decode(json.detect_encoding(data), "surrogatepass")
    if text.count("[") + text.count("{") > MOST_DEPTH:
        marks = np.frombuffer(_TEXT.sub("", text).encode("utf-8", "surrogatepass"), np.uint8)
        if int(np.cumsum(_STEPS[marks], dtype=np.int64).max(initial=0)) > MOST_DEPTH:
            raise ValueError(f"more than {MOST_DEPTH} levels of nested objects and arrays")
    return json.loads(text)
