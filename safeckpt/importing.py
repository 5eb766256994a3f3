"""`import_checkpoint`: a half-finished run of another tool becomes the first checkpoint of a run of ours."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import math
import os
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch

from safeckpt.errors import (
    ComponentMismatchError,
    DamagedCheckpointError,
    DirectoryInUseError,
    ImportedStateWarning,
    NonFiniteError,
    NonFiniteTensor,
    UntrustedTypeError,
    listed,
)
from safeckpt.file import CheckpointFile, WrittenFile, encode, is_folder, load_lazily, open_checkpoint, prepare
from safeckpt.remote import is_url
from safeckpt.run.arguments import checked_step
from safeckpt.run.catalog import Checkpoint
from safeckpt.state import is_mask
from safeckpt.state.guard import guarded_tensors
from safeckpt.state.imported import imported_payload
from safeckpt.state.nonfinite import nonfinite
from safeckpt.state.source_state import described, steps_counted, why_not
from safeckpt.store import CheckpointDirectory, WriterLock, expand_user
from safeckpt.system.text import from_here
from safeckpt.system.warn import warn_caller
from safeckpt.weights import open_weights

__all__ = ["ImportReport", "import_checkpoint"]

_TORCH_SAVE = "torch.save"
_STEPS = ("global_step", "step")  # the names under which a file of torch.save may have it
# Of NumPy what arrays and numbers are pickled with. It runs no code of the file's.
_NUMPY = [
    np.ndarray, np.dtype, *{type(np.dtype(code)) for code in "?bhilqBHILQefdFD"},
    *(np.array(0).__reduce__()[:1]), *(np.float64(0).__reduce__()[:1]),
]  # fmt: skip


@dataclass(frozen=True)
class ImportReport:
    """What `import_checkpoint` has written; as text, a line for each component.

    Attributes:
        checkpoint: The checkpoint.
        source: What it was made of.
        kind: Which tool had saved that: `torch.save`, Lightning, Hugging Face Trainer or Accelerate.
        taken: Component to its key in the source.
        contents: Component to what was taken of it, in words: tensors and bytes, plain values, steps it has counted.
        unused: Keys and files of the source that were not taken.
        position: Where its data stood, in words; empty where it does not tell.
    """

    checkpoint: Checkpoint
    source: str
    kind: str
    taken: Mapping[str, str]
    contents: Mapping[str, str]
    unused: tuple[str, ...]
    position: str

    def __str__(self) -> str:
        step = self.checkpoint.step
        lines = [f"{from_here(self.checkpoint.path)}: step {step} of {Path(self.source).name}, saved by {self.kind}"]
        lines += [f"  {name} <- {key or 'all of it'}: {self.contents[name]}" for name, key in self.taken.items()]
        lines += ["not taken:", *(f"  {name}" for name in self.unused)] if self.unused else []
        lines += [f"its data stood at {self.position}"] if self.position else []
        return "\n".join(lines)


class _Files(contextlib.ExitStack):
    """The open files of a source.

    Attributes:
        checks: Raise where somebody has written into one of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.checks: list[Callable[[], None]] = []

    def check_unchanged(self) -> None:
        """Check that what was read is what was verified.

        Raises:
            DamagedCheckpointError: Somebody has written into a file.
        """
        for check in self.checks:
            check()


class _Source(NamedTuple):
    """What another tool has saved.

    Attributes:
        kind: The tool.
        parts: What there is, by key; dicts and lists in it have further keys.
        usual: Component to key, as they are usually called; empty where that is not known.
        step: The step it is of; None where it does not tell.
        position: Where its data stood, in words.
        others: Files beside, which are not read.
        entries: Values of components that need no more than a few entries, by `component.entry`.
    """

    kind: str
    parts: Any
    usual: dict[str, str]
    step: int | None = None
    position: str = ""
    others: tuple[str, ...] = ()
    entries: Mapping[str, Any] = {}


def import_checkpoint(
    source: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    mapping: Mapping[str, str] | None = None,
    step: int | None = None,
) -> ImportReport:
    """Make a half-finished run of another tool the first checkpoint of a run of ours.

    A manager with these components restores it and goes on. What has not been saved (random streams, the position of
    the data, components that are not in the source) then stays as the script has made it, and an
    `ImportedStateWarning` names it: from there the run is exact, but it is not bit for bit the one that was begun.

    States are matched with the live objects at that restore, where a difference in names, shapes or groups is an error
    that lists all of them, and nothing has changed.

    Args:
        source: A file of `torch.save`, a `.ckpt` of Lightning, a folder `checkpoint-N` of Hugging Face's Trainer, or
            one of Accelerate's `save_state`.
        directory: Of the run to be; it must hold no checkpoint yet.
        mapping: Name of a component to the key of its state in the source, with dots for keys within keys and numbers
            for entries of lists: `{"model": "state_dict", "optimizer": "optimizer_states.0"}`. An empty key is all of
            the file. None: as the tool calls them; for a file of `torch.save` it has to be given.
        step: Optimizer steps completed. None: what the source says.

    Returns:
        What was written.

    Raises:
        ComponentMismatchError: The source has no such key; `available` has those that there are.
        NonFiniteError: A state holds NaN, or Inf outside of a mask.
        LoadError: A file is damaged, or asks for a type that is not allowed: nothing in it is executed.
        UnsavableStateError: A state holds something that no checkpoint can; map a part of it.
        DirectoryInUseError: The directory holds checkpoints.
        DirectoryLockedError: Another process writes into it.
        ValueError: The source is no such file or folder, no mapping or step is known, a name is not one of a
            component, or what is mapped to a component cannot be its state: a number, or for the names model,
            optimizer, scheduler and scaler the state of another of them.
        OSError: The system refused. Whatever is raised, nothing was written.

    Warns:
        ImportedStateWarning: The step that was given, or that a file of `torch.save` has under `step` or `global_step`,
            is not the one that its optimizers have counted.

    Example:
        >>> import tempfile, torch, safeckpt
        >>> folder, model = tempfile.mkdtemp(), torch.nn.Linear(2, 1)
        >>> torch.save({"net": model.state_dict(), "global_step": 7}, f"{folder}/old.pt")
        >>> report = safeckpt.import_checkpoint(f"{folder}/old.pt", f"{folder}/run", mapping={"model": "net"})
        >>> report.checkpoint.step, report.unused
        (7, ('global_step',))
    """
    if is_url(source):
        raise ValueError(f"source must be a file or a folder here; got {source!r}")
    at = Path(expand_user(source))
    wanted = None if mapping is None else _checked_mapping(mapping)
    with _Files() as opened:
        found = _open(at, opened)
        keys = found.usual if wanted is None else wanted
        if not keys:
            raise ValueError(
                f"{at} does not say what is what: name the key of each component (--map model=key, in Python "
                f"mapping={{'model': 'key'}}). Its keys: {listed(_keys_of(found.parts), most=20)}"
            )
        values = {name: _pick(found.parts, key, at) for name, key in keys.items()}
        if wanted is None:
            values |= found.entries
        else:
            _refuse_impossible(wanted, values, at)
        number = _step_of_run(found, step, values, at)
        contents = {name: described(values[name]) for name in keys}
        payload = _payload_of(values, found, at, is_usual=wanted is None)
        checkpoint = _commit(payload, number, directory, at, opened)
    used = {_first_key(found.parts, key) if key else "" for key in keys.values()}
    used |= {"loops"} if wanted is None else set()
    unused = [] if "" in used else [key for key in _keys_of(found.parts) if key not in used]
    return ImportReport(checkpoint, str(at), found.kind, dict(keys), contents, (*unused, *found.others), found.position)


def _checked_mapping(mapping: Any) -> dict[str, str]:
    if not isinstance(mapping, Mapping) or not all(isinstance(one, str) for pair in mapping.items() for one in pair):
        raise TypeError(f"mapping must be of names to keys, such as {{'model': 'state_dict'}}; got {mapping!r}")
    if not mapping:
        raise ValueError("mapping is empty: name at least the model")
    for name in mapping:
        component, _, entry = name.partition(".")
        if not component or "." in entry or name.endswith(".") or component in ("safeckpt", "rng"):
            raise ValueError(f"mapping: {name!r} is no name of a component, or of an entry of one")
        if entry and component in mapping:
            raise ValueError(
                f"mapping: {component!r} is all of a component and {name!r} an entry of it; give it all, or entries "
                "alone, each as component.entry"
            )
    return dict(mapping)


def _refuse_impossible(wanted: Mapping[str, str], values: Mapping[str, Any], at: Path) -> None:
    """Refuse what no component can be made of, where the mapping was somebody's own.

    Raises:
        ValueError: There is such a thing; all of them are named.
    """
    found = (why_not(name, key, values[name]) for name, key in wanted.items() if "." not in name)
    if faults := [fault for fault in found if fault is not None]:
        raise ValueError(f"{at} cannot be taken like this:\n  " + "\n  ".join(faults))


def _step_of_run(found: _Source, step: int | None, values: Mapping[str, Any], at: Path) -> int:
    """Return the step that the source is of.

    Raises:
        ValueError: Nobody says it.

    Warns:
        ImportedStateWarning: Its optimizers have counted another number of steps than a person, or a name, says.
    """
    number = found.step if step is None else checked_step(step)
    counts = {name: count for name, value in values.items() if (count := steps_counted(value)) is not None}
    if number is None:
        most = max(counts.values(), default=None)
        shown = "N" if most is None else most
        raise ValueError(
            f"{at} does not tell its step: give the number of optimizer steps completed"
            + ("" if most is None else f", of which its optimizer has counted {most}")
            + f" (--step {shown}, in Python step={shown})"
        )
    is_certain = step is None and found.kind != _TORCH_SAVE
    if counts and number not in counts.values() and not is_certain:
        told = ", ".join(f"{name} has counted {count}" for name, count in counts.items())
        warn_caller(
            f"{at.name} is taken as step {number}, and {told}. A step is an optimizer step completed. An optimizer "
            "that was made anew, or left out steps, has counted fewer; else import it again, with that number and into "
            "a new directory.",
            ImportedStateWarning,
        )
    return number


def _payload_of(values: Mapping[str, Any], found: _Source, at: Path, *, is_usual: bool) -> dict[str, Any]:
    """Return the payload: `component.entry` goes into the dict of its component."""
    states: dict[str, Any] = {}
    entries: dict[str, list[str]] = {}
    for name, value in values.items():
        component, _, entry = name.partition(".")
        if not entry:
            states[component] = value
        else:
            states.setdefault(component, {})[entry] = value
            entries.setdefault(component, []).append(entry)
    optional = sorted(entries) if is_usual else ()  # a trainer, which a loop of one's own has not
    return imported_payload(states, entries, optional=optional, kind=found.kind, name=at.name, position=found.position)


def _commit(
    payload: dict[str, Any], step: int, directory: str | os.PathLike[str], at: Path, opened: _Files
) -> Checkpoint:
    """Write the payload as the first checkpoint of a directory."""

    def check(file: BinaryIO, written: WrittenFile) -> None:
        prepared.check(file, written)
        opened.check_unchanged()  # what was written was mapped from them

    encoded = encode(payload, root="payload")
    states = {name: state for name, state in payload.items() if name != "safeckpt"}
    masks = _refuse_nonfinite(states, at)
    files = CheckpointDirectory(directory)
    checkpoint = Checkpoint(
        step=step,
        path=files.path_of(step),
        loss=None,
        metrics={},
        created_at=dt.datetime.now(dt.UTC),
        size_bytes=0,
        run_id=secrets.token_hex(8),
    )
    guard = {"optimizer": True, "buffers": True, "allow_nonfinite": [], "infinite": masks}
    prepared = prepare(encoded, header=checkpoint.header(guard=guard))
    lock = WriterLock(directory, 0.0)
    _refuse_used(files)
    files.create()
    lock.acquire()
    try:
        _refuse_used(files)
        files.commit_step(step, prepared.write, check=check, size_bytes=prepared.size_bytes)
        files.events.append("imported", step=step, source=str(at))
    finally:
        lock.release()
    return Checkpoint.from_header(checkpoint.header(), checkpoint.path, prepared.size_bytes)


def _refuse_used(files: CheckpointDirectory) -> None:
    if steps := files.steps():
        raise DirectoryInUseError(directory=files.path, steps=steps)


def _refuse_nonfinite(states: Mapping[str, Any], at: Path) -> list[str]:
    """Return the names of masks, which are infinite by nature.

    Raises:
        NonFiniteError: There is anything else that is not finite.
    """
    bad: list[NonFiniteTensor] = []
    masks: list[NonFiniteTensor] = []
    for report, tensor in nonfinite(guarded_tensors(states)):
        (bad if report.nan_count or not is_mask(tensor) else masks).append(report)
    if bad:
        raise NonFiniteError(
            tensors=bad, good="nothing was written.", next_step="take an earlier file of that run.", path=at
        )
    return [one.name for one in masks]


# -- what is in the source --------------------------------------------------------------------------------------------


def _open(at: Path, opened: _Files) -> _Source:
    """Read what another tool has saved; tensors are mapped from the files.

    Raises:
        ValueError: It is none of what can be imported.
    """
    if not at.is_dir():
        return _open_one_file(at, opened)
    if is_folder(at) or CheckpointDirectory(at).steps():
        raise ValueError(f"{at} is of safeckpt: a manager of its directory goes on with restore()")
    names = sorted(one.name for one in at.iterdir())
    if "trainer_state.json" in names:
        return _open_hugging_face(at, names, opened)
    if any(name.startswith(("random_states_", "optimizer.bin", "pytorch_model", "model")) for name in names):
        return _open_accelerate(at, names, opened)
    raise ValueError(
        f"{at} is neither a folder of Hugging Face's Trainer (with trainer_state.json) nor one of Accelerate's "
        f"save_state; it has {listed(names) or 'nothing in it'}"
    )


def _load(path: Path, opened: _Files) -> Any:
    """Return what a file of torch.save holds, its bytes checked as far as they can be.

    Raises:
        LoadError: It is damaged, or asks for a type that is not allowed.
    """
    file = open_checkpoint(path)
    opened.callback(file.close)
    file.verify()
    if isinstance(file, CheckpointFile) and file.header() is not None:
        raise ValueError(f"{path} is a checkpoint of safeckpt: a manager of its directory goes on with restore()")
    with torch.serialization.safe_globals(_NUMPY):
        try:
            payload, source = load_lazily(file)
        except UntrustedTypeError as error:
            error.add_note(
                "To import it all the same, load it where you trust it, and save the states alone: "
                "torch.save({'model': old['model'], 'optimizer': old['optimizer']}, 'states.pt')."
            )
            raise
    opened.checks.append(source.check_unchanged)
    return payload


def _open_one_file(at: Path, opened: _Files) -> _Source:
    if at.name.endswith(".safetensors"):
        return _Source("safetensors", {"model": _weights_of(at, opened)}, {"model": "model"})
    payload = _load(at, opened)
    if not isinstance(payload, Mapping):
        raise ValueError(f"{at} holds a {type(payload).__name__}, not a dict of states")  # noqa: TRY004 - the value of a file
    if "pytorch-lightning_version" in payload:
        return _lightning(payload)
    steps = [payload[name] for name in _STEPS if type(payload.get(name)) is int]
    return _Source(_TORCH_SAVE, payload, {}, steps[0] if steps else None)


def _weights_of(at: Path, opened: _Files) -> dict[str, torch.Tensor]:
    weights = open_weights(at, None, opened)
    found = {name: held.read() for name, held in weights.tensors.items()}
    for check in weights.checks:
        check()
    return found


def _lightning(payload: Mapping[str, Any]) -> _Source:
    usual = {"model": "state_dict"}
    for name, key in (("optimizer", "optimizer_states"), ("scheduler", "lr_schedulers")):
        count = len(payload.get(key) or ())
        usual |= {name if count == 1 else f"{name}{number}": f"{key}.{number}" for number in range(count)}
    if payload.get("MixedPrecision"):
        usual["scaler"] = "MixedPrecision"
    position, entries = "", {}
    try:
        loops = payload["loops"]["fit_loop"]
        epoch = int(loops["epoch_progress"]["current"]["ready"]) - 1  # `processed` has counted an epoch at its end
        batch = int(loops["epoch_loop.batch_progress"]["current"]["processed"])
        is_last = bool(loops["epoch_loop.batch_progress"]["is_last_batch"])
    except (KeyError, TypeError, ValueError):
        pass
    else:
        position = _sought(epoch + 1, 0) if is_last else _sought(epoch, batch)
        entries = {"trainer.loops": loops}
    step = payload.get("global_step")
    return _Source("Lightning", payload, usual, step if type(step) is int else None, position, entries=entries)


def _sought(epoch: int, batch: int) -> str:
    return f"batch {batch} of epoch {epoch}: loader.seek({epoch}, {batch}) goes there"


def _open_hugging_face(at: Path, names: list[str], opened: _Files) -> _Source:
    try:
        state = json.loads((at / "trainer_state.json").read_bytes())
        step, epoch = state["global_step"], state.get("epoch")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = "it is no state of a trainer"
        raise DamagedCheckpointError(
            path=at / "trainer_state.json", reason=reason, next_step="copy it again"
        ) from error
    files = {"optimizer": "optimizer.pt", "scheduler": "scheduler.pt", "scaler": "scaler.pt"}
    parts = {name: _load(at / file, opened) for name, file in files.items() if file in names}
    parts = {"model": _weights_of(at, opened), **parts}
    position = ""
    if isinstance(epoch, int | float) and not isinstance(epoch, bool) and math.isfinite(epoch):
        whole = int(epoch)
        position = f"epoch {epoch:.6g}: loader.seek({whole}, round({epoch - whole:.6g} * len(loader))) goes there"
    read = {"trainer_state.json", "config.json", "generation_config.json", *files.values()}
    others = tuple(name for name in names if name not in read and not _is_weights(name))
    progress = {name: state.get(name) for name in _PROGRESS}
    entries = {"trainer.progress": json.dumps(progress), "trainer.last_logged": step}  # the loss since then is not kept
    usual = {name: name for name in parts}
    return _Source("Hugging Face Trainer", parts, usual, _step_of(step), position, others, entries)


# What the integration keeps of a trainer's progress.
_PROGRESS = (
    "epoch", "global_step", "num_input_tokens_seen", "total_flos", "log_history", "best_metric", "best_global_step",
    "best_model_checkpoint",
)  # fmt: skip


def _step_of(value: Any) -> int | None:
    return value if type(value) is int else None


def _is_weights(name: str) -> bool:
    return re.match(r"(model|pytorch_model)(_\d+)?(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?$", name) is not None


def _open_accelerate(at: Path, names: list[str], opened: _Files) -> _Source:
    parts: dict[str, Any] = {}
    if any(name.startswith(("model.", "pytorch_model.", "model-", "pytorch_model-")) for name in names):
        parts["model"] = _weights_of(at, opened)
    for name in names:
        more = re.match(
            r"(model|pytorch_model|optimizer|scheduler|scaler|custom_checkpoint)(_\d+)?\.(bin|pt|pkl|safetensors)$",
            name,
        )
        key = "" if more is None else more[1].replace("pytorch_", "") + (more[2] or "")
        if more is None or key == "model":
            continue
        is_model = key.startswith("model_")
        parts[key] = _weights_of(at / name, opened) if is_model else _load(at / name, opened)
    others = tuple(name for name in names if not _is_weights(name) and name.rpartition(".")[0] not in parts)
    return _Source("Accelerate", parts, {_called(key): key for key in parts}, others=others)


def _called(key: str) -> str:
    """Return the name that `safe(accelerator, ...)` gives to what Accelerate calls `optimizer_1`: `optimizer_2`."""
    name, _, number = key.rpartition("_")
    if not number.isdigit():
        return key
    if name == "custom_checkpoint":
        name, number = "registered", str(int(number))
        return name if number == "0" else f"{name}_{int(number) + 1}"
    return f"{name}_{int(number) + 1}"


# -- keys -------------------------------------------------------------------------------------------------------------


def _keys_of(parts: Any) -> list[str]:
    return [str(key) for key in parts] if isinstance(parts, Mapping) else []


def _pick(parts: Any, key: str, at: Path) -> Any:
    """Return what is under a key.

    Raises:
        ComponentMismatchError: Nothing is.
    """
    found, before = parts, ""
    rest = key
    while rest:
        name, is_list = _first_key(found, rest), isinstance(found, list | tuple)
        if name is None:
            there = [str(number) for number in range(len(found))] if is_list else _keys_of(found)
            raise ComponentMismatchError(
                missing=[key],
                available=[f"{before}{one}" for one in there],
                path=at,
                cure="give a key that is there: --map model=key, in Python mapping={'model': 'key'}.",
            )
        found = found[int(name)] if is_list else found[_own_key(found, name)]
        before += f"{name}."
        rest = rest[len(name) + 1 :]
    return found


def _first_key(found: Any, rest: str) -> str | None:
    """Return the longest key that a dotted name begins with: keys of dicts may have dots themselves."""
    if isinstance(found, list | tuple):
        name = rest.partition(".")[0]
        return name if name.isdigit() and int(name) < len(found) else None
    names = [one for one in _keys_of(found) if rest == one or rest.startswith(f"{one}.")]
    return max(names, key=len, default=None)


def _own_key(found: Mapping[Any, Any], name: str) -> Any:
    return next(key for key in found if str(key) == name)
