"""The layout is the architecture: layers, and the one place for each dangerous call, are held by these tests."""

import ast
import functools
import importlib
from pathlib import Path

import pytest

import safeckpt

PACKAGE = Path(safeckpt.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))

# The order of the layout, from top to bottom: a part imports itself and the parts below it, nothing above or beside.
LAYERS = [
    {"__init__", "__main__"},
    {"cli"},
    {"demo"},
    {"integrations"},
    {"proof"},
    {"manager", "warm_starting", "importing"},
    {"weights"},
    {"run"},
    {"functional", "exporting"},
    {"remote"},
    {"loader", "distributed"},
    {"file", "state", "store"},
    {"system", "errors"},
]
RANKS = {part: -depth for depth, parts in enumerate(LAYERS) for part in parts}
RENAMES_SYNCS_UNLINKS = {
    "rename", "renames", "replace", "fsync", "fdatasync", "unlink", "remove", "removedirs", "rmdir", "rmtree",
    "truncate", "ftruncate", "link", "symlink",
}  # fmt: skip


def part_of(path):
    """Return the first name below the package: a subpackage or a module."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def in_integrations(path):
    return part_of(path) == "integrations"


@functools.cache
def nodes_of(path):
    """Return every node of a module; parsed once for all tests."""
    return tuple(ast.walk(ast.parse(path.read_text())))


@pytest.fixture(scope="module", autouse=True)
def forget_nodes():
    """Leave no hundreds of thousands of nodes to the tests that follow."""
    yield
    nodes_of.cache_clear()


@functools.cache
def imports_of(path):
    """Return (top module, part of safeckpt or None) for every import that runs."""
    return tuple(_imports_of(path))


def _imports_of(path):
    for_types = [
        node for node in nodes_of(path) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    ]
    skipped = {id(node) for block in for_types for node in ast.walk(block)}
    for node in nodes_of(path):
        names = []
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [node.module]
            if node.module == "safeckpt":
                names = [f"safeckpt.{alias.name}" for alias in node.names]
        for name in names:
            top, _, rest = name.partition(".")
            yield top, (rest.partition(".")[0] or None) if top == "safeckpt" else None


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_module_imports_only_downward(path):
    """A module imports its own part and parts of lower rank, nothing beside or above it."""
    part = part_of(path)
    for _, other in imports_of(path):
        if other is None or (part == "integrations" and other in safeckpt.__all__):
            continue
        if other != part:
            assert RANKS[other] < RANKS[part], f"{path.name} ({part}) imports {other}"


@pytest.mark.parametrize("path", sorted((PACKAGE / "store").rglob("*.py")), ids=lambda path: path.name)
def test_store_imports_neither_torch_nor_numpy(path):
    """The store knows files, not tensors."""
    assert not {"torch", "numpy"} & {top for top, _ in imports_of(path)}


def attribute_calls(path, owners):
    """Yield the names called as attributes of one of the given modules."""
    for node in nodes_of(path):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id in owners:
                yield f"{owner.id}.{node.func.attr}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_store_renames_syncs_and_unlinks(path):
    """Calls that rename, sync or delete stand in store/disk.py alone."""
    calls = {call for call in attribute_calls(path, {"os", "shutil"}) if call.split(".")[1] in RENAMES_SYNCS_UNLINKS}
    assert not calls or path == PACKAGE / "store" / "disk.py", calls
    methods = [
        node.func.attr
        for node in nodes_of(path)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in {"unlink", "rmdir", "rename", "hardlink_to", "symlink_to", "write_bytes", "write_text"}
        and not (isinstance(node.func.value, ast.Name) and node.func.value.id in {"disk", "os"})
    ]
    assert not methods, methods


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_file_calls_torch_save_and_load(path):
    """torch's own reader is called in file/ alone, its writer nowhere (but in the demo, which shows its failures)."""
    calls = set(attribute_calls(path, {"torch"})) & {"torch.save", "torch.load"}
    part = part_of(path)
    assert not calls or part in {"file", "demo"}, calls


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_one_module_issues_warnings(path):
    """Every warning goes through `warn_caller`, which finds the caller's line from any depth."""
    assert "warnings.warn" not in set(attribute_calls(path, {"warnings"})) or path == PACKAGE / "system" / "warn.py"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_is_caught_wholesale(path):
    """There is no bare except and no except Exception."""
    for node in nodes_of(path):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"{path.name}:{node.lineno}: bare except"
            names = {name.id for name in ast.walk(node.type) if isinstance(name, ast.Name)}
            assert "Exception" not in names, f"{path.name}:{node.lineno}: except Exception"


@pytest.mark.parametrize(
    "path", sorted((PACKAGE / "integrations").rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_integrations_use_public_names_alone(path):
    """What an integration needs of safeckpt, one outside of this package can use as well."""
    used = {other for _, other in imports_of(path) if other is not None}
    for node in nodes_of(path):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "safeckpt":
            used.add(node.attr)
        if isinstance(node, ast.Import):
            aliases = {alias.asname for alias in node.names if alias.name == "safeckpt"}
            assert aliases <= {None}, "another name for safeckpt hides what is used of it"
    assert used <= {*safeckpt.__all__, "integrations"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_trainers_are_imported_by_their_own_integration_alone(path):
    """Each integration imports its trainer, and no other module does."""
    trainers = {name: {name} for name in ("lightning", "accelerate", "ignite")}
    trainers["transformers"] = {"transformers", "accelerate"}
    own = (
        trainers.get(path.relative_to(PACKAGE).parts[1].removesuffix(".py"), set()) if in_integrations(path) else set()
    )
    assert {top for top, _ in imports_of(path)} & set().union(*trainers.values()) <= own


# Private names of others than torch: of named tuples, of the interpreter, of `os`, of `random` and of NumPy.
OF_OTHERS = {"_replace", "_getframe", "_exit", "_inst", "_rand", "_bit_generator", "_legacy_seeding"}


@functools.cache
def own_private_names():
    """Return the private names that classes of the package define: methods, class attributes, attributes of `self`."""
    found = set()
    for path in MODULES:
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                for inner in node.body:
                    targets = getattr(inner, "targets", [getattr(inner, "target", None)])
                    found |= {getattr(inner, "name", None), *(getattr(target, "id", None) for target in targets)}
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr if ast.unparse(node.value) == "self" else None)
    return found


@functools.cache
def foreign_private_names(path):
    """Return the private names of others that a module imports, or asks of an object."""
    return set(_foreign_private_names(path))


def _foreign_private_names(path):
    def is_private(name):
        return name.startswith("_") and not name.startswith("__")

    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and not node.module.startswith("safeckpt"):
            yield from {node.module} if any(map(is_private, node.module.split("."))) else ()
            yield from (alias.name for alias in node.names if is_private(alias.name))
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            if ast.unparse(node.value) not in {"self", "cls", "super()"}:
                yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"getattr", "hasattr", "setattr"}:
            asked = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            if is_private(asked) and ast.unparse(node.args[0]) != "self":
                yield asked


def test_only_one_module_uses_private_names_of_torch():
    """A new version of torch has one file to be compared with."""
    allowed = own_private_names() | OF_OTHERS
    found = {
        (part_of(path), name)
        for path in MODULES
        if path != PACKAGE / "system" / "torch_private.py" and not in_integrations(path)
        for name in set(foreign_private_names(path)) - allowed
    }
    assert found == set()


@pytest.mark.parametrize(
    "integration", sorted((PACKAGE / "integrations").iterdir()), ids=lambda path: path.name.removesuffix(".py")
)
def test_private_names_of_a_trainer_are_looked_for_before_they_are_used(integration):
    """What an integration asks of a trainer's inside is in a list of hooks, whose absence is an error at the start."""
    paths = sorted(integration.rglob("*.py")) if integration.is_dir() else [integration]
    checked = {
        name
        for path in paths
        if path.suffix == ".py"
        for node in nodes_of(path)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for name in node.value.split(".")
    }
    used = {name for path in paths if path.suffix == ".py" for name in foreign_private_names(path)}
    assert used - own_private_names() - OF_OTHERS <= checked


def test_public_names_are_pinned():
    """The public names are those in the contract, sorted; adding or dropping one is a decision, not an accident."""
    assert safeckpt.__all__ == sorted(safeckpt.__all__)
    assert all(hasattr(safeckpt, name) for name in safeckpt.__all__)
    contract = {
        "Best", "Checkpoint", "CheckpointManager", "FileReport", "Guard", "Mirror", "NonFiniteTensor", "Ranks",
        "ResumableLoader", "TimesMedian", "LossSpikeError", "ImportReport", "ImportedStateWarning",
        "import_checkpoint", "WarmStartReport", "warm_start",
        "ReplayReport", "ResumeReport", "check_gradients", "export", "find_nonfinite", "latest", "load",
        "prove_resume", "register_wrapper", "save", "verify",
        "SafeckptError", "SaveError", "NonFiniteError", "UnsavableStateError", "StepExistsError", "DirectoryInUseError",
        "LoadError", "CheckpointNotFoundError", "DamagedCheckpointError", "FormatVersionError", "UntrustedTypeError",
        "NoGoodCheckpointError", "RestoreError", "ComponentMismatchError", "StateMismatchError", "RollbackError",
        "RollbackLoopError", "DirectoryLockedError", "DurabilityUnknownError", "ReplayMismatchError", "ProofError",
        "SafeckptWarning", "SkippedCheckpointWarning", "EnvironmentChangedWarning", "UncapturedStateWarning",
        "HyperparameterReplacedWarning", "ReplayMismatchWarning",
        "GroupError", "RankLostError", "RankFailedError", "DirectoryNotSharedError", "ReplicaDriftError",
        "RanksDisagreeError", "GroupDestroyedError",
        "ReplicaDriftWarning", "ComponentChangedWarning",
        "MirrorError", "MirrorUnreachableError", "MirrorTakenError", "MirrorUnsafeError", "MirrorBehindError",
        "WritingProcessError",
    }  # fmt: skip
    assert set(safeckpt.__all__) == contract


def test_every_error_is_public():
    """Whatever can be raised or warned can be caught by its name from the top of the package."""
    assert set(importlib.import_module("safeckpt.errors").__all__) <= set(safeckpt.__all__)


def test_run_time_needs_three_packages():
    """torch, numpy and filelock are all that is imported at run time, beside what an extra brings."""
    allowed = {"torch", "numpy", "filelock", "safeckpt"}
    trainers = {"lightning", "transformers", "accelerate", "ignite"}
    extras = {"cli": {"click", "rich", "matplotlib"}, "system": {"matplotlib"}, "integrations": trainers}
    extras["remote"] = {"obstore", "fsspec", "boto3", "botocore"}
    stdlib = set(importlib.import_module("sys").stdlib_module_names)
    for path in MODULES:
        tops = {top for top, _ in imports_of(path)} - stdlib - allowed - {"__future__"}
        assert tops <= extras.get(part_of(path), set()), f"{path}: {tops}"
