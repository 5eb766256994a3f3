"""Fresh processes for the runs of a proof, and how the user's functions get there.

A process gets one job on its standard input, writes its record into a file and ends; the run that is to be killed
kills itself with SIGKILL right after its save. Functions travel by name: the process imports their module anew.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import os
import pickle
import pickletools
import subprocess
import sys
import tempfile
import traceback
import types
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import IO, Any

from safeckpt.errors import ProofError
from safeckpt.proof.live import MAIN_AGAIN
from safeckpt.proof.runs import KILLED, Job, Record, run
from safeckpt.proof.training import kill, watch_training

__all__ = ["Functions", "Worker", "importing", "main"]

_MAIN = "__main__"
_PACKAGE_PARENT = str(Path(__file__).parents[2])
_START = "import sys; sys.path.insert(0, sys.argv[1]); from safeckpt.proof.workers import main; main()"
_LOG_BYTES = 3000

_state = types.SimpleNamespace(importing=None)


def importing() -> str | None:
    """Return the file that this process imports on behalf of a proof at this moment; None in any other process."""
    file: str | None = _state.importing
    return file


@dataclass(frozen=True)
class Functions:
    """Functions in a form that a new process can find.

    Attributes:
        pickled: A tuple of them, by name.
        modules: The modules they come from, name to file; `__main__` among them.
        path: Where this process looks for modules.
        argv: Its command line.
    """

    pickled: bytes
    modules: dict[str, str]
    path: list[str]
    argv: list[str]

    @classmethod
    def of(cls, functions: tuple[Any, ...]) -> Functions | str:
        """Return them, or a sentence that says why a new process could not find them."""
        if not sys.executable:
            return "there is no Python interpreter to start"
        try:
            # Protocol 2 has a module's name as an argument of its own, which is read below.
            pickled = pickle.dumps(functions, protocol=2, fix_imports=False)
        except (pickle.PicklingError, AttributeError, TypeError, ValueError) as error:
            return f"a new process cannot import the functions by name ({error})"
        names = {str(arg).split(" ")[0] for op, arg, _ in pickletools.genops(pickled) if op.name == "GLOBAL"}
        modules = {}
        for name in names:
            file = getattr(sys.modules.get(name), "__file__", None)
            if name == _MAIN and (reason := _why_not_again(file)) is not None:
                return reason
            if file is not None:
                modules[name] = str(Path(file).absolute())
        return cls(pickled, modules, [str(Path(p).absolute()) for p in sys.path], list(sys.argv))

    def load(self) -> tuple[Any, ...]:
        """Import the modules and return the functions; for the new process."""
        sys.path[:] = self.path
        sys.argv[:] = self.argv
        try:
            for name, file in self.modules.items():
                _state.importing = file
                if name == _MAIN:
                    sys.modules[_MAIN] = _execute(MAIN_AGAIN, file)
                else:
                    _import(name, file)
        finally:
            _state.importing = None
        functions: tuple[Any, ...] = pickle.loads(self.pickled, fix_imports=False)
        return functions


def _why_not_again(script: str | None) -> str | None:
    """Return why `__main__` cannot be imported a second time without doing its work again."""
    if script is None or not Path(script).is_file():
        return "the functions are defined in a notebook or an interactive session"
    statements = ast.parse(Path(script).read_bytes()).body
    if any(isinstance(one, ast.If) and "__name__" in ast.unparse(one.test) for one in statements):
        return None
    return f'{script} has no `if __name__ == "__main__":`, so a new process would do its work again'


def _import(name: str, file: str) -> None:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name + ".").startswith(error.name + "."):
            raise  # it was found, and something that it imports was not
        module = _execute(name, file)
    found = getattr(module, "__file__", None)
    if found is None or not Path(found).samefile(file):
        raise ImportError(f"module {name} is {found} in a new process and {file} in this one")


def _execute(name: str, file: str) -> types.ModuleType:
    loader = SourceFileLoader(name, file)
    spec = spec_from_loader(name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    loader.exec_module(module)
    return module


class Worker:
    """A process that has imported torch and waits for its job; it has not seen the user's code yet."""

    def __init__(self) -> None:
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the worker
        self._process = subprocess.Popen(  # noqa: S603 - this interpreter, with our own code
            [sys.executable, "-P", "-c", _START, _PACKAGE_PARENT],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def run(self, job: Job, functions: Functions, record_path: Path, *, may_fail: bool = False) -> Record:
        """Have a job done and return its record, when the process is gone.

        Args:
            job: What to do.
            functions: What to do it with.
            record_path: Where the process leaves its record.
            may_fail: What the user's code raises is no error of this call, and comes back in the record.

        Raises:
            ProofError: The process died before it was done.
            BaseException: What the user's code raised there, with the traceback as a note.
        """
        stdin = self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # it died while it started; its log will say why
            if stdin is not None:
                stdin.write(pickle.dumps((job, functions, str(record_path))))
                stdin.close()
        code = self._process.wait()
        record, error, trace = self._outcome(record_path)
        if may_fail and record is not None and trace:
            record.error = trace.strip().rpartition("\n")[2]
            return record
        if error is not None:
            error.add_note(f"In the proof's {job}, in a process of its own:\n{trace}")
            raise error
        killed = code < 0 if os.name == "posix" else code != 0
        if record is None or trace or (not killed if job.kind == KILLED else code != 0):
            raise ProofError(run=str(job), exit_code=code, output=trace or self._tail())
        return record

    def _outcome(self, path: Path) -> tuple[Record | None, BaseException | None, str]:
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None, None, ""
        record, pickled, trace = pickle.loads(data)
        if pickled is None:
            return record, None, trace
        try:
            error = pickle.loads(pickled)
        except (pickle.UnpicklingError, AttributeError, ImportError, TypeError, ValueError):
            error = None  # of a class that only the other process knows, or that takes other arguments
        return record, error, trace

    def _tail(self) -> str:
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _LOG_BYTES))
        return self._log.read().decode(errors="replace")

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        self._log.close()


def main() -> None:
    """Do the job that comes on standard input; without one, end."""
    data = sys.stdin.buffer.read()
    if not data:
        return
    job, functions, record_path = pickle.loads(data)
    record = Record()
    leave = functools.partial(_leave, record_path, (record, None, ""))
    manager = None
    try:
        build, train_step, restore = functions.load()
        if train_step is None:
            watch_training(job, build, record, leave)
        else:
            manager = run(job, build, train_step, restore, record)
    except BaseException as error:
        _leave(record_path, (record, _pickled(error), traceback.format_exc()))
        raise
    leave()
    if manager is not None:
        kill()


def _leave(path: str, outcome: tuple[Record, bytes | None, str]) -> None:
    with open(path, "xb") as file:  # noqa: PTH123 - as everywhere in the package
        pickle.dump(outcome, file)


def _pickled(error: BaseException) -> bytes | None:
    try:
        return pickle.dumps(error)
    except (pickle.PicklingError, AttributeError, TypeError):
        return None
