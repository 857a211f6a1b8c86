"""Every public name has an example in its docstring, and it runs."""

import doctest
import inspect

import numpy as np
import pytest

import diskreplay
from tests import snippets

NAMES = [name for name in diskreplay.__all__ if name != "__version__"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with the store of the five-minute start."""
    pytest.importorskip("gymnasium")
    folder = tmp_path_factory.mktemp("examples")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        exec(snippets.snippets(snippets.START)[0].code, {})
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_the_example_of_a_public_name_runs(monkeypatch, folder, name):
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(folder)
    text = inspect.getdoc(getattr(diskreplay, name))
    names = {"np": np, "torch": torch, "dr": diskreplay}
    example = doctest.DocTestParser().get_doctest(text, names, name, None, 0)
    assert example.examples, f"{name} has no example"
    printed = []
    doctest.DocTestRunner(verbose=False).run(example, out=printed.append)
    assert printed == []
