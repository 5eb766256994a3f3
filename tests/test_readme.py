"""Every Python block of the README runs, in order, and prints what stands under it."""

import contextlib
import doctest
import importlib
import io
import pkgutil
import re
import warnings
from pathlib import Path

import pytest

import safeckpt

README = Path(__file__).parent.parent / "README.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_every_python_block_prints_what_the_readme_says(tmp_path, monkeypatch):
    """The blocks share one namespace and one directory, as for a reader who types them in one after the other."""
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall(README.read_text())
    namespace = {"__name__": "__readme__"}
    ran = 0
    for index, (language, text) in enumerate(blocks):
        if language != "python":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), warnings.catch_warnings():
            exec(compile(text, f"README.md block {index}", "exec"), namespace)
        ran += 1
        following = blocks[index + 1] if index + 1 < len(blocks) else ("", "")
        if following[0] == "text":
            assert printed.getvalue() == following[1], f"output of block {index}"
    assert ran >= 3


def test_the_commands_of_the_readme_are_the_two_that_are_promised():
    """The README gives the demo command and the test command word for word."""
    text = README.read_text()
    assert "pip install . && safeckpt demo\n" in text
    assert 'pip install -c tests/constraints.txt -e ".[test]" && pytest\n' in text


def test_every_test_named_in_the_readme_exists():
    """A guarantee names the test that proves it, and that test is there."""
    tests = Path(__file__).parent
    sources = "\n".join(path.read_text() for path in tests.rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", README.read_text()))
    assert named
    assert not {name for name in named if f"def {name}(" not in sources and not list(tests.rglob(f"{name}.py"))}


@pytest.mark.parametrize(
    "name", ["safeckpt", *(info.name for info in pkgutil.walk_packages(safeckpt.__path__, "safeckpt."))]
)
def test_examples_in_docstrings_print_what_they_say(name, tmp_path, monkeypatch):
    """Every example in a docstring runs."""
    monkeypatch.chdir(tmp_path)
    if name == "safeckpt.__main__":
        return
    results = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert results.failed == 0
