"""One version of the package, of what is built from it and of the CHANGELOG; and those of what it needs."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import safeckpt

ROOT = Path(__file__).parent.parent


def test_version_of_the_package_is_that_of_the_build() -> None:
    """The wheel that is built carries `safeckpt.__version__`."""
    command = [sys.executable, "-m", "hatchling", "metadata", "version"]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert built.stdout.strip() == safeckpt.__version__


def test_newest_section_of_the_changelog_is_this_version() -> None:
    """The CHANGELOG begins with what is unreleased, followed by the section of this version."""
    sections = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sections[:2] == ["Unreleased", safeckpt.__version__]


def test_sections_of_the_changelog_have_each_heading_once() -> None:
    """The headings are those that the file names, none twice in a section."""
    allowed = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security", "Format"}
    for section in re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]:
        headings = re.findall(r"^### (.+)$", section, re.MULTILINE)
        assert len(headings) == len(set(headings)), section[:20]
        assert set(headings) <= allowed


def test_oldest_packages_that_are_tested_are_the_oldest_that_are_allowed() -> None:
    """`.ci/run oldest` installs the floor of each dependency, and every dependency has one."""
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    lines = (ROOT / "tests" / "constraints-oldest.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert {name: version.removesuffix(".0").removesuffix(".*") for name, version in pinned.items()} == dict(
        need.split(">=") for need in needed
    )


def test_trainers_that_are_tested_are_allowed_by_the_extras() -> None:
    """`.ci/run trainers` pins a version of every trainer that an extra installs, within its bounds."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    lines = (ROOT / "tests" / "constraints-trainers.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))

    def numbers(version: str) -> list[int]:
        return [int(number) for number in version.split(".")]

    for extra in ("lightning", "transformers", "accelerate", "ignite"):
        for need in extras[extra]:
            name, bounds = re.fullmatch(r"([\w-]+)(.+)", need).groups()  # type: ignore[union-attr]
            for bound in bounds.split(","):
                if bound.startswith(">="):
                    assert numbers(pinned[name]) >= numbers(bound[2:]), need
                else:
                    assert numbers(pinned[name]) < numbers(bound.removeprefix("<")), need
