"""The exceptions are those that are drawn at the top of their module, with the bases and attributes drawn there."""

import importlib
import inspect
import re

import pytest

from safeckpt import errors
from safeckpt.errors import listed

LINE = re.compile(r"^(?P<indent>[ |`-]*)(?P<name>\w+(Error|Warning))(?P<rest>.*)$")


def drawn():
    """Return {class name: (parent, second base, attributes)} as the drawing says."""
    found, path = {}, []
    for line in errors.__doc__.partition("::")[2].partition("Every error takes")[0].splitlines():
        match = LINE.match(line)
        if not match:
            continue
        indent, name, rest = match["indent"], match["name"], match["rest"]
        path = [(depth, other) for depth, other in path if depth < len(indent)]
        second = re.match(r"\s*\(\+ ([\w.]+)\)", rest)
        root = re.match(r"\((\w+)\)", rest)
        parent = root[1] if root else path[-1][1]
        found[name] = (parent, second and second[1], re.findall(r" \.(\w+)", rest))
        path.append((len(indent), name))
    return found


OWN = [value for value in vars(errors).values() if inspect.isclass(value) and value.__module__ == errors.__name__]
CLASSES = {kind.__name__: kind for kind in OWN}
RAISED = {name: kind for name, kind in CLASSES.items() if issubclass(kind, BaseException)}


def test_every_class_is_drawn_and_every_drawn_name_is_a_class():
    """The drawing and the module name the same classes, and all of them are exported."""
    assert drawn().keys() == RAISED.keys()
    assert CLASSES.keys() == set(errors.__all__)


@pytest.mark.parametrize("name", RAISED)
def test_class_has_the_bases_and_attributes_that_are_drawn(name):
    """First base, built-in second base and attributes are those in the drawing; each attribute is documented."""
    parent, second, attributes = drawn()[name]
    kind = RAISED[name]
    bases = [f"{base.__module__}.{base.__name__}" for base in kind.__bases__]
    bases = [re.sub(r"^(builtins\.|safeckpt\.errors\.|_(?=pickle))", "", base) for base in bases]
    assert bases == [parent, *([second] if second else [])]
    for attribute in attributes:
        assert re.search(rf"^ +{attribute}: ", kind.__doc__, re.MULTILINE), attribute


def test_names_of_the_package_are_those_of_the_errors_and_a_few_more():
    """The top of the package takes the errors' names from their one list."""
    assert set(errors.__all__) < set(importlib.import_module("safeckpt").__all__)


@pytest.mark.parametrize(
    ("count", "text"), [(0, ""), (1, "0"), (3, "0, 1, 2"), (4, "0, 1, 2, and 1 more"), (90, "0, 1, 2, and 87 more")]
)
def test_long_list_is_cut_and_says_how_much_is_missing(count, text):
    """A text carries the first entries and the number of the others."""
    assert listed(range(count), most=3) == text
