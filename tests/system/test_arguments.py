"""Arguments are checked in one way: a wrong type is a TypeError, a value out of range a ValueError, both by name."""

import math

import numpy as np
import pytest

from safeckpt.system.arguments import checked_bool, checked_choice, checked_int, checked_number

REFUSED = [
    (checked_int, (True,), TypeError, "x must be an int, 0 or more; got True"),
    (checked_int, (1.0,), TypeError, "x must be an int, 0 or more; got 1.0"),
    (checked_int, (np.int64(1),), TypeError, "x must be an int, 0 or more; got np.int64(1)"),
    (checked_int, (None,), TypeError, "x must be an int, 0 or more; got None"),
    (checked_int, (-1,), ValueError, "x must be an int, 0 or more; got -1"),
    (checked_int, (0, 1), ValueError, "x must be an int, 1 or more; got 0"),
    (checked_number, ("1",), TypeError, "x must be a number, 0 or more; got '1'"),
    (checked_number, (False,), TypeError, "x must be a number, 0 or more; got False"),
    (checked_number, (-0.5,), ValueError, "x must be a number, 0 or more; got -0.5"),
    (checked_number, (math.nan,), ValueError, "x must be a number, 0 or more; got nan"),
    (checked_bool, (1,), TypeError, "x must be True or False; got 1"),
    (checked_bool, (None,), TypeError, "x must be True or False; got None"),
    (checked_choice, ("c", ("a", "b")), ValueError, "x must be one of 'a', 'b'; got 'c'"),
    (checked_choice, (1, (True, None)), ValueError, "x must be one of True, None; got 1"),
    (checked_choice, ([], ("a", "b")), ValueError, r"x must be one of 'a', 'b'; got \[\]"),
]


@pytest.mark.parametrize(("check", "arguments", "error", "text"), REFUSED, ids=[row[3] for row in REFUSED])
def test_nonsense_is_refused_by_name(check, arguments, error, text):
    """The text has the name, what is allowed, and the value."""
    with pytest.raises(error, match=f"^{text.replace('(', chr(92) + '(').replace(')', chr(92) + ')')}$"):
        check("x", *arguments)


def test_number_above_zero_can_be_asked_for():
    """A timeout of 0 may mean not to wait, and a positive one may not be 0."""
    assert checked_number("x", 0) == 0.0
    with pytest.raises(ValueError, match="x must be a number, more than 0; got 0"):
        checked_number("x", 0, positive=True)


def test_value_in_range_comes_back():
    """A check returns what it was given, numbers as floats."""
    assert checked_int("x", 5, 5) == 5
    assert checked_number("x", math.inf) == math.inf
    assert type(checked_number("x", 3)) is float
    assert checked_bool("x", False) is False
    assert checked_choice("x", "b", ("a", "b")) == "b"
