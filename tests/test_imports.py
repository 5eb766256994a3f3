"""What is imported when: importing torch takes seconds, and looking at a directory of checkpoints needs none of it."""

from __future__ import annotations

import ast
import subprocess
import sys
import types
from pathlib import Path

import pytest

import safeckpt
import safeckpt.file
import safeckpt.remote
from tests.manager.helpers import save_steps

HEAVY = ("torch._dynamo", "matplotlib", "click", "rich", "pandas", "lightning", "sqlite3")


def run(code: str, *arguments: str) -> str:
    """Run code in a fresh process and return what it prints."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_of_the_package_imports_nothing_else() -> None:
    """`import safeckpt` alone loads the errors: neither torch nor any other part of the package."""
    loaded = run("import sys; before = set(sys.modules); import safeckpt; print(*set(sys.modules) - before)").split()
    ours = {name for name in loaded if name.startswith("safeckpt")}
    assert ours == {"safeckpt", "safeckpt.errors", "safeckpt.system", "safeckpt.system.lazy"}
    assert not {name.partition(".")[0] for name in loaded} & {"torch", "numpy", "filelock", *HEAVY}


def test_no_public_name_imports_what_training_does_not_need() -> None:
    """With every public name in use, torch's compiler, plotting and the command line's packages are not loaded."""
    loaded = run("import sys; from safeckpt import *; print(CheckpointManager, *sys.modules)").split()
    assert "torch" in loaded
    assert not set(HEAVY) & set(loaded)


# What only some runs ask for: a store, other ranks, a process that writes; what a refused value is called; a notebook.
LATER = (
    "safeckpt.remote.client", "safeckpt.remote.options", "safeckpt.run.mirroring", "safeckpt.run.writing_process",
    "safeckpt.distributed.links", "safeckpt.distributed.rank_group", "torch.distributed.checkpoint",
    "safeckpt.file.writing.hints", "numpy.ma", "html", "asyncio",
)  # fmt: skip


def test_manager_of_one_process_imports_nothing_for_others() -> None:
    """Beside torch, a manager that is made in one process has loaded only what every run uses."""
    code = "import sys, torch; before = set(sys.modules); from safeckpt import CheckpointManager\n"
    code += "CheckpointManager(sys.argv[1], {'model': torch.nn.Linear(1, 1)}); print(*set(sys.modules) - before)"
    loaded = run(code, "nowhere").split()
    assert "safeckpt.run.saving" in loaded
    assert not set(LATER) & set(loaded)


def test_public_names_are_listed_before_they_are_used() -> None:
    """`dir` knows every public name, and another name is an AttributeError."""
    names = run("import safeckpt; print(*dir(safeckpt))").split()
    assert set(safeckpt.__all__) <= set(names)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        safeckpt.nothing  # noqa: B018


LAZY = (safeckpt, safeckpt.file, safeckpt.remote)


@pytest.mark.parametrize("package", LAZY, ids=lambda package: package.__name__)
def test_type_checkers_see_the_names_that_are_there(package: types.ModuleType) -> None:
    """Each name that a type checker finds is found at run time, in the same module; there is no other."""
    (block,) = (
        node
        for node in ast.parse(Path(package.__file__ or "").read_text()).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.name: node.module for node in imports for alias in node.names}
    tables = [node for line in block.orelse for node in ast.walk(line) if isinstance(node, ast.Dict)]
    assert ast.literal_eval(tables[0]) == seen
    assert all(hasattr(package, name) for name in seen)


TRAINED = """
import sys, torch
from safeckpt import CheckpointManager
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
with CheckpointManager(sys.argv[1], {"model": model, "optimizer": optimizer}, save_every=1, keep_last=1) as manager:
    before = set(sys.modules)
    manager.restore()
    for step in (1, 2, 3):
        manager.end_step(step, loss=0.5)
    manager.rollback(changed=True)
    manager.save(4)
print(*set(sys.modules) - before)
"""


def test_nothing_is_imported_while_a_run_is_saved_and_rolled_back(tmp_path: Path) -> None:
    """An interrupt that comes during an import is lost in Python, `_get_module_lock` takes it."""
    loaded = run(TRAINED, str(tmp_path / "run")).split()
    assert not [name for name in loaded if name.partition(".")[0] in ("safeckpt", "filelock")]


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # an import of it is an ImportError
if sys.argv[1] != "plot":
    sys.modules["matplotlib"] = None
from safeckpt.cli import main
sys.exit(main(sys.argv[1:]))
"""


WORDS = [
    ("--help",),
    ("--version",),
    ("list", "{}"),
    ("list", "{}", "{}", "--sort", "accuracy:max", "--where", "loss<9"),
    ("log", "{}"),
    ("latest", "{}"),
    ("best", "{}", "accuracy:max"),
    ("verify", "{}"),
    ("verify", "{}/step-00000001.pt"),
    ("plot", "{}", "-o", "{}/a.png"),
    ("prune", "{}", "--keep-last", "1", "--keep-best", "loss", "--dry-run"),
]


@pytest.mark.parametrize(
    "arguments",
    [  # a process each
        pytest.param(words, id=words[0], marks=[pytest.mark.slow] * (words != ("verify", "{}"))) for words in WORDS
    ],
)
def test_commands_that_look_at_files_run_without_torch(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """Listing, drawing, verifying and pruning do not import torch, so that they take no seconds to start."""
    pytest.importorskip("click")
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    save_steps(tmp_path, 1, 2)
    assert run(WITHOUT_TORCH, *(one.format(tmp_path) for one in arguments))
