"""The one parser of JSON refuses what is nested too deeply, and takes no longer for it."""

import json
import re
from pathlib import Path

import pytest

import diskreplay as dr
from diskreplay.bounded_json import MOST_DEPTH, parse_json
from tests.test_deep_documents import DEEP, nested


def test_two_modules_parse_json() -> None:
    """The checker has its own bound, as it shares nothing with what it checks."""
    package = Path(dr.__file__).parent
    parses = re.compile(r"json\.loads?\(|JSONDecoder|^from json import.*\bloads?\b", re.MULTILINE)
    found = {path.relative_to(package).as_posix() for path in package.rglob("*.py") if parses.search(path.read_text())}
    assert found == {"bounded_json.py", "integrity/verify/documents.py"}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_the_depth_is_that_of_objects_and_arrays_outside_of_texts(encoding: str) -> None:
    text = json.dumps({"ü": [r'"[{\"' * MOST_DEPTH], "b": [[]] * MOST_DEPTH}, ensure_ascii=False)
    assert parse_json(text.encode(encoding)) == json.loads(text)
    assert parse_json(nested(MOST_DEPTH).encode(encoding)) == json.loads(nested(MOST_DEPTH))
    for deep in (DEEP, '{"a":' * (MOST_DEPTH + 1), nested(300_000)):
        with pytest.raises(ValueError, match=f"^more than {MOST_DEPTH} levels of nested objects and arrays$"):
            parse_json(deep.encode(encoding))


def test_texts_without_an_end_take_no_longer_than_others() -> None:
    for text in ('"' + '\\"' * (1 << 20), '"' + "x" * (1 << 20), '"\\'):
        with pytest.raises(ValueError, match="(?i)unterminated string|invalid"):
            parse_json("[0, {}" + ", []" * MOST_DEPTH + ", " + text)
