"""File names: built, parsed, and told from near misses."""

from __future__ import annotations

from pathlib import Path

import pytest

from safeckpt.store import names

STEPS = {
    "step-00000000.pt": 0,
    "step-00000007.pt": 7,
    "step-00001200.pt": 1200,
    "step-99999999.pt": 99_999_999,
    "step-100000000.pt": 100_000_000,
    "step-123456789012.pt": 123_456_789_012,
}
ASIDES = {
    "aside-00001200.1.pt": (1200, 1),
    "aside-00000000.12.pt": (0, 12),
    "aside-100000000.3.pt": (100_000_000, 3),
}
FOLDERS = {"step-00001200": 1200, "step-100000000": 100_000_000}
ASIDE_FOLDERS = {"aside-00001200.1": (1200, 1)}
HEX = "0123456789abcdef"
TEMPS = {
    f".step-00001200.pt.{HEX}.tmp": "step-00001200.pt",
    f".model.{HEX}.tmp": "model",
    f"..hidden.{HEX}.tmp": ".hidden",
    f".a b\nc.pt.{HEX}.tmp": "a b\nc.pt",
}
NEAR_MISSES = [
    "",
    "step-.pt",
    "step-1200.pt",
    "step-0001200.pt",
    "step-000001200.pt",
    "step-0100000000.pt",
    "step-00001200.PT",
    "Step-00001200.pt",
    "step-00001200.pt ",
    " step-00001200.pt",
    "step-00001200.pt\n",
    "step-00001200.pt.bak",
    "step-00001200.pth",
    "step-1200",
    "step-00001200.",
    "step-00001200.ptx",
    "step_00001200.pt",
    "step--0001200.pt",
    "step-+0001200.pt",
    "step-0000120a.pt",
    "step-0000_1200.pt",
    "step-٠٠٠٠١٢٠٠.pt",
    "step-0000120².pt",
    "xstep-00001200.pt",
    ".step-00001200.pt",
    "step-00001200 (1).pt",
    "copy of step-00001200.pt",
    "aside-00001200.pt",
    "aside-00001200.0.pt",
    "aside-00001200.01.pt",
    "aside-1200.1.pt",
    "aside-00001200.1.pt.bak",
    "step-00001200.1.pt",
    f"step-00001200.pt.{HEX}.tmp",
    f".step-00001200.pt.{HEX}.tmp2",
    f".step-00001200.pt.{HEX[:-1]}.tmp",
    f".step-00001200.pt.{HEX}0.tmp~",
    f".step-00001200.pt.{HEX.upper()}.tmp",
    f"..{HEX}.tmp",
    f".{HEX}.tmp",
    ".writer.lock",
    ".writer.json",
    "events.jsonl",
    "best.pt",
    ".nfs000000000123",
]


@pytest.mark.parametrize(("name", "step"), STEPS.items())
def test_good_step_name_is_parsed_and_built(name: str, step: int) -> None:
    """A step's name and its number are two forms of one thing."""
    assert names.parse_step(name) == step
    assert names.step_name(step) == name


@pytest.mark.parametrize(("name", "parsed"), ASIDES.items())
def test_good_aside_name_is_parsed_and_built(name: str, parsed: tuple[int, int]) -> None:
    """A set-aside name carries its step and a number, and is no step name."""
    assert names.parse_aside(name) == parsed
    assert names.aside_name(*parsed) == name
    assert names.parse_step(name) is None


@pytest.mark.parametrize(("name", "final"), TEMPS.items())
def test_good_temp_name_is_parsed(name: str, final: str) -> None:
    """A temporary name carries the name that the file will get."""
    assert names.temp_final(name) == final
    assert names.temps_of(final, [name]) == [name]
    assert names.parse_step(name) is None


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_miss_is_nobodys_name(name: str) -> None:
    """A name that differs in any way belongs to somebody else."""
    assert names.parse_step(name) is None
    assert names.parse_aside(name) is None
    assert names.temp_final(name) is None


@pytest.mark.parametrize("step", [-1, -(10**9)])
def test_negative_step_has_no_name(step: int) -> None:
    """A negative step is refused with the allowed values."""
    with pytest.raises(ValueError, match="0 or more"):
        names.step_name(step)


@pytest.mark.parametrize("step", [1.0, "1", None, True])
def test_step_of_another_type_has_no_name(step: object) -> None:
    """A step is an int and nothing that looks like one."""
    with pytest.raises(TypeError, match="must be an int"):
        names.step_name(step)  # type: ignore[arg-type]


def test_temp_names_of_one_file_differ() -> None:
    """Two writers of one file never share a temporary name."""
    assert len({names.temp_name("model.pt") for _ in range(1000)}) == 1000


@pytest.mark.parametrize("final", ["m" * 255, "é" * 127, "😀" * 63, "m" * 143, "x" * 122, "y" * 121, "a"])
def test_temp_name_of_long_name_fits_where_the_name_fits(final: str) -> None:
    """A temporary name is no longer in bytes than its final name or than every file system allows, and whole UTF-8."""
    temp = names.temp_name(final)
    assert len(temp.encode()) <= max(len(final.encode()), 143)
    assert names.temps_of(final, [temp, "other"]) == [temp]


def test_temp_of_another_file_is_not_taken_for_ours() -> None:
    """Temporary files of names that begin alike are told apart."""
    listing = [f".model.pt.{HEX}.tmp", f".model.pt.old.{HEX}.tmp", f".model.{HEX}.tmp", f".model.pt.{HEX}.{HEX}.tmp"]
    assert names.temps_of("model.pt", listing) == [f".model.pt.{HEX}.tmp"]


def test_directory_of_a_sharded_checkpoint_has_the_name_of_its_step() -> None:
    """A sharded checkpoint is called as the file of its step would be, without the ending."""
    for name, step in FOLDERS.items():
        assert names.folder_name(step) == name
        assert names.parse_step(name) == step
        assert names.is_folder(name)
    for name, (step, number) in ASIDE_FOLDERS.items():
        assert names.aside_name(step, number, folder=True) == name
        assert names.parse_aside(name) == (step, number)
        assert names.is_folder(name)
    for name in (*STEPS, *ASIDES, *NEAR_MISSES):
        assert not names.is_folder(name)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("~", "/people/someone"),
        ("~/runs/a", "/people/someone/runs/a"),
        (Path("~/runs"), Path("/people/someone/runs")),
        ("runs/~", "runs/~"),
        ("./~/runs", "./~/runs"),
        ("/~", "/~"),
        ("~nobody-of-this-name/runs", "~nobody-of-this-name/runs"),
        ("", ""),
        (7, 7),
    ],
)
def test_tilde_is_expanded_as_a_shell_does(monkeypatch: pytest.MonkeyPatch, path: object, expected: object) -> None:
    """Only at the start, for this user's and other users' homes; what has no home stays as it is."""
    monkeypatch.setenv("HOME", "/people/someone")
    assert names.expand_user(path) == expected
