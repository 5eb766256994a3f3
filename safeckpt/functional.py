"""`save` and `load` where `torch.save` and `torch.load` stood, and `verify`."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from typing import IO, Any

import torch

from safeckpt import remote
from safeckpt.errors import NonFiniteError
from safeckpt.file import CheckpointFile, FileReport, encode, open_checkpoint, prepare
from safeckpt.state.guard import selected_tensors
from safeckpt.state.loss import Loss
from safeckpt.state.nonfinite import scan
from safeckpt.store import commit, expand_user
from safeckpt.system.threads import Progress

__all__ = ["load", "save", "verify"]

_READABLE_PROTOCOLS = (2, 3)  # torch's weights_only reader knows no later one

MapLocation = Callable[[torch.Tensor, str], torch.Tensor] | torch.device | str | dict[str, str] | None


def save(
    obj: object,
    f: str | os.PathLike[str] | IO[bytes],
    pickle_module: Any = pickle,
    pickle_protocol: int = 2,
    *,
    loss: Any = None,
    allow_nonfinite: Sequence[str] = (),
) -> None:
    """Save an object to a file that plain `torch.load` reads, whole and finite or not at all.

    Takes `torch.save`'s place: the arguments stand where torch has them. A path is written under a temporary name,
    synced and renamed, so that a crash at any moment leaves the old file or the new one. When the process dies
    half-way, the old file is untouched.

    Args:
        obj: Tensors and plain values in any nesting. NumPy scalars become Python numbers, NumPy arrays become
            tensors; what could not be loaded again is refused before anything is written.
        f: A path, whose directory has to exist, or an object with `write`.
        pickle_module: Accepted for compatibility; only the standard `pickle`.
        pickle_protocol: 2 or 3.
        loss: The loss of the state, checked as well: a number, tensor, NumPy scalar, or a dict or list of them.
        allow_nonfinite: Glob patterns over the dotted names of tensors that may hold NaN and Inf.

    Raises:
        NonFiniteError: The loss or a floating or complex tensor in `obj` holds NaN or Inf. Nothing was written.
        UnsavableStateError: A value could not be loaded again; `location` is its key path. Nothing was written, or what
            was written was removed again.
        ValueError: `pickle_module` or `pickle_protocol` would make a file that cannot be loaded safely.
        OSError: The system refused; errno is kept and the old file is untouched. A file object may hold a part.
        DurabilityUnknownError: The new file is in place, but a power loss may still take it back.

    Cost:
        One pass over the tensors for the guard, one for checksum and write, and one fsync each of file and directory.

    Example:
        >>> import tempfile, torch, safeckpt
        >>> path = f"{tempfile.mkdtemp()}/model.pt"
        >>> safeckpt.save({"weight": torch.ones(2)}, path, loss=0.5)
        >>> torch.load(path)
        {'weight': tensor([1., 1.])}
    """
    if pickle_module is not pickle:
        raise ValueError(
            f"pickle_module={pickle_module!r}: only the standard pickle module makes files that weights_only=True reads"
        )
    if pickle_protocol not in _READABLE_PROTOCOLS:
        raise ValueError(
            f"pickle_protocol={pickle_protocol!r}: weights_only=True reads protocols "
            f"{' and '.join(map(str, _READABLE_PROTOCOLS))} only"
        )
    f = expand_user(f)
    finite = _guard(obj, loss, allow_nonfinite, f)
    if not isinstance(f, str | os.PathLike) and not callable(getattr(f, "write", None)):
        raise TypeError(f"f must be a path or an object with write(); got {type(f).__name__}")
    prepared = prepare(encode(obj), pickle_protocol=pickle_protocol, finite=finite)
    if isinstance(f, str | os.PathLike):
        commit(f, prepared.write, check=prepared.check, size_bytes=prepared.size_bytes)
    else:
        prepared.write(f)


def _guard(obj: object, loss: Any, allow: Sequence[str], f: object) -> list[tuple[str, torch.Tensor]]:
    """Refuse what is not finite, and return the tensors that are and have to stay so."""
    read = Loss.read(loss)
    tensors = selected_tensors(obj, allow=allow)
    found = scan(tensors)
    if read.nonfinite is None and not found:
        return tensors
    path = f if isinstance(f, str | os.PathLike) else None
    kept = f"{path} still holds what it held before." if path is not None and os.path.lexists(path) else None
    raise NonFiniteError(
        loss=None if read.nonfinite is None else read.numbers,
        loss_text=read.nonfinite,
        tensors=found,
        good=kept,
        next_step="find where it came from; what may be infinite (a mask) can be named: allow_nonfinite=('name',).",
        path=path,
    )


def load(
    f: str | os.PathLike[str] | IO[bytes],
    map_location: MapLocation = None,
    pickle_module: Any = None,
    *,
    weights_only: bool = True,
    mmap: bool | None = None,
    verify: bool = True,
) -> Any:
    """Load what `save` or plain `torch.save` wrote, after checking every byte.

    Takes `torch.load`'s place: the arguments stand where torch has them. Nothing but tensors, plain values and
    registered types is ever built, and unless `verify=False` nothing is unpickled before the checksum matches.

    Args:
        f: A path, the URL of one in an object store, or a readable and seekable object. The directory of a sharded
            checkpoint comes back as the same state would from a file, with every tensor whole, in this one process.
        map_location: Where the tensors go, as in torch. None: the device they were saved from; host memory for what
            was sharded.
        pickle_module: Accepted for compatibility; only None.
        weights_only: Accepted for compatibility; only True.
        mmap: Map the file instead of reading it: faster and without a copy. The tensors then hold on to the file. Not
            for a directory.
        verify: Check every byte first. A file that plain torch wrote has no digest of its own; then the CRC-32 of
            every record is checked, which is all that can be done.

    Returns:
        The object. NumPy scalars and arrays come back as the numbers and tensors that `save` turned them into.

    Raises:
        DamagedCheckpointError: The bytes are not those that were written; `record` says where.
        FormatVersionError: A newer safeckpt wrote it.
        UntrustedTypeError: It asks for a class or function that is not allowed; `type_name` names it.
        ValueError: `weights_only=False`, a `pickle_module`, or what cannot be for a directory.
        OSError: The system refused, with errno; FileNotFoundError when there is no such file.
    """
    if pickle_module is not None:
        raise ValueError(f"pickle_module={pickle_module!r}: files are read by torch's weights_only reader alone")
    if weights_only is not True:
        raise ValueError(
            f"weights_only={weights_only!r}: a file loaded that way can run any code. Register the types you trust "
            "with torch.serialization.add_safe_globals and load with weights_only=True"
        )
    if remote.is_url(f := _text_of(f)):
        with remote.local_copy(str(f)) as path:  # checked on its way; what is mapped stays when the copy is deleted
            return load(path, map_location, mmap=mmap, verify=verify)
    with open_checkpoint(expand_user(f)) as opened:
        if isinstance(opened, CheckpointFile):
            if verify:
                opened.verify()
            return opened.load(map_location, mmap=bool(mmap))
        if mmap or isinstance(map_location, dict) or callable(map_location):
            raise ValueError(
                "the tensors of a sharded checkpoint are put together in memory: mmap is not possible, and "
                "map_location has to be a device"
            )
        if verify:
            opened.verify()
        return opened.load_whole(map_location)


def _text_of(f: Any) -> Any:
    """Return the path of something in a store as the URL that it is, anything else as it is."""
    return str(f) if isinstance(f, remote.RemotePath) else f


def verify(path: str | os.PathLike[str], *, progress: Progress | None = None) -> FileReport:
    """Check every byte of a file and return what it is.

    Args:
        path: A file that `save`, a `CheckpointManager` or plain `torch.save` wrote, the directory of a sharded
            checkpoint, or the URL of one in an object store. A file of plain torch can be checked by its record CRCs
            only; the report then says `self_proving=False`.
        progress: Called with bytes done and bytes in all as the check goes on.

    Returns:
        The report.

    Raises:
        DamagedCheckpointError: The bytes are not those that were written; `record` names the record or region.
        FormatVersionError: A newer safeckpt wrote it.
        OSError: The system refused, with errno.

    Cost:
        Reads the file once, at the speed of the disk or of CRC-32 on a few threads. Builds no tensor.
    """
    if remote.is_url(path := _text_of(path)):
        return remote.verify_url(str(path), progress)
    with open_checkpoint(expand_user(path)) as opened:
        return opened.verify(progress=progress)
