"""The documentation is true: Python blocks print what stands under them, links lead somewhere, named tests exist."""

from __future__ import annotations

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
from safeckpt.cli.commands import group
from tests.campaign.outcome import CLASSES

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = sorted(
    path
    for pattern in ("*.md", ".readme/*.md", ".github/*.md", "benchmarks/*.md", "tests/**/*.md")
    for path in ROOT.glob(pattern)
)
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


# Pages whose blocks need a package that the tests do without.
NEEDS = {f".readme/{name}.md": name for name in ("accelerate", "ignite", "lightning", "transformers")}


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def without_blocks(page: Path) -> str:
    """Return the text around the code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [page for page in PAGES if "```python\n" in page.read_text()], ids=name_of)
def test_every_python_block_prints_what_the_page_says(page, tmp_path, monkeypatch):
    """The blocks of a page share one namespace and one directory, as for a reader who types them in one by one."""
    if name_of(page) in NEEDS:
        pytest.importorskip(NEEDS[name_of(page)], reason="needs an extra: see the page")
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall(page.read_text())
    namespace = {"__name__": "__page__"}
    for index, (language, text) in enumerate(blocks):
        if language != "python":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), warnings.catch_warnings():
            if name_of(page) in NEEDS:
                warnings.simplefilter("ignore")  # of trainers there are many
            warnings.simplefilter("ignore", safeckpt.ImportedStateWarning)  # what the page is about
            exec(compile(text, f"{name_of(page)} block {index}", "exec"), namespace)
        following = blocks[index + 1] if index + 1 < len(blocks) else ("", "")
        expected = following[1] if following[0] == "text" else ""
        assert printed.getvalue() == expected, f"output of block {index}"


def test_the_readme_is_short():
    """It is read in a few minutes, and the first example is no longer than a screen."""
    text = README.read_text()
    assert len(text.splitlines()) <= 220
    first = next(block for language, block in BLOCK.findall(text) if language == "python")
    assert len([line for line in first.splitlines() if line.strip()]) <= 15


def test_the_commands_of_the_readme_are_the_two_that_are_promised():
    """The README gives the demo command and the test command word for word."""
    text = README.read_text()
    assert "pip install . && safeckpt demo\n" in text
    assert 'pip install -c tests/constraints.txt -e ".[test]" && pytest\n' in text


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_to_a_file_and_a_heading(page):
    """A relative link names a file of the repository and, after `#`, one of its headings."""
    for link in LINK.findall(without_blocks(page)):
        if link.startswith("https://"):
            continue
        target, _, anchor = link.partition("#")
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), link
        if anchor:
            headings = {
                re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-")
                for heading in HEADING.findall(without_blocks(file))
            }
            assert anchor in headings, link


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_row_of_a_table_has_as_many_cells_as_its_head(page):
    """A row with a cell too many or too few would lose it where the page is rendered."""
    width = None
    for line in without_blocks(page).splitlines():
        if not line.startswith("|"):
            width = None
            continue
        cells = len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`]*`", "", line)))
        width = width or cells
        assert cells == width, line


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_page_is_reached_from_the_readme(page):
    """Every page is linked from the README, the CHANGELOG aside, which is where everyone looks for it."""
    links = {(README.parent / link.partition("#")[0]).resolve() for link in LINK.findall(README.read_text())}
    assert page in links | {README, ROOT / "CHANGELOG.md"}


def test_every_test_named_in_a_page_exists():
    """A guarantee names the test that proves it, and that test is there."""
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = {name for page in PAGES for name in re.findall(r"`(test_\w+)`", page.read_text())}
    assert named
    assert not {name for name in named if f"def {name}(" not in sources}


def test_every_command_is_in_the_readme_and_every_command_there_exists():
    """The table of commands is the command line."""
    named = set(re.findall(r"`safeckpt (\w+)[ `]", README.read_text()))
    assert named == {*group.commands, "demo"}


def test_every_release_of_the_changelog_has_each_heading_once():
    """A line is found under one heading, and a line stands under one heading only."""
    for release in (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1:]:
        headings = re.findall(r"^### .*$", release, re.MULTILINE)
        assert len(set(headings)) == len(headings)
        entries = re.findall(r"^- .*$", release, re.MULTILINE)
        assert len(set(entries)) == len(entries)


def test_campaign_page_has_a_row_for_every_class():
    """The table of the campaign lists the classes that there are, in their order."""
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "tests" / "campaign" / "README.md").read_text(), re.MULTILINE)
    assert tuple(rows) == CLASSES


def test_contributing_has_a_row_for_every_part_of_the_package():
    """Whoever wants to change a part finds out what to touch and what to run."""
    text = (ROOT / ".github" / "CONTRIBUTING.md").read_text()
    parts = {path.name + "/" * path.is_dir() for path in (ROOT / "safeckpt").iterdir() if path.suffix in ("", ".py")}
    parts -= {"__init__.py", "__main__.py", "__pycache__/"}
    assert not {part for part in parts if f"`safeckpt/{part}" not in text}
    modules = {path.name for path in (ROOT / "safeckpt" / "run").glob("*.py")} - {"__init__.py"}
    assert not {module for module in modules if f"`{module}`" not in text}


@pytest.mark.parametrize(
    "name", ["safeckpt", *(info.name for info in pkgutil.walk_packages(safeckpt.__path__, "safeckpt."))]
)
def test_examples_in_docstrings_print_what_they_say(name, tmp_path, monkeypatch):
    """Every example in a docstring runs."""
    monkeypatch.chdir(tmp_path)
    if name == "safeckpt.__main__":
        return
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        if not name.startswith("safeckpt.integrations."):
            raise
        pytest.skip(str(error))  # its trainer is not installed
    results = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert results.failed == 0
