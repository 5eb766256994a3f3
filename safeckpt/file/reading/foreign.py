"""Say what a file is that is no torch file, or not a whole one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from safeckpt.errors import DamagedCheckpointError
from safeckpt.file.archive import END_BYTES
from safeckpt.file.trailer import MAGIC, TRAILER_BYTES

if TYPE_CHECKING:
    from safeckpt.file.reading.source import Source

__all__ = ["NAME_ANOTHER", "describe_foreign"]

_LONGEST_COMMENT: Final = 0xFFFF
_HEAD_BYTES: Final = 512
NAME_ANOTHER: Final = "name another file; if this one was a checkpoint, take an earlier one"
_CONVERT: Final = "load it with torch.load and save it again"
_TEXT: Final = frozenset(bytes(range(32, 127)) + b"\t\n\r\f")
_KINDS: Final = (
    # The legacy format: the magic number, pickled.
    (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", "it is in the format of torch before 1.6", _CONVERT),
    (b"\x80", "it is a pickle, not a torch file", "load what made it, and save its state_dict()"),
    (b"\x1f\x8b", "it is compressed with gzip", "unpack it first"),
    (b"\x89HDF", "it is an HDF5 file", "read it with h5py"),
    (b"\x93NUMPY", "it is a NumPy file", "load it with numpy.load"),
    (b"GGUF", "it is a GGUF file", "load the weights that it was made from"),
    (b"\x89PNG", "it is a picture (PNG)", NAME_ANOTHER),
    (b"\xff\xd8\xff", "it is a picture (JPEG)", NAME_ANOTHER),
    (b"%PDF", "it is a PDF document", NAME_ANOTHER),
    (b"version https://git-lfs", "it is a pointer of Git LFS, not the file itself", "fetch the file with git lfs pull"),
)


def describe_foreign(source: Source) -> DamagedCheckpointError:
    """Return the error for a file that does not end as a torch file does."""
    reason, next_step = _describe(source)
    return DamagedCheckpointError(path=source.path, reason=reason, next_step=next_step)


def _describe(source: Source) -> tuple[str, str | None]:
    """Return what the file is, and what to do if it is another kind of file."""
    if not source.size_bytes:
        return "it is empty", None
    head = source.read(0, min(source.size_bytes, _HEAD_BYTES))
    if not head.strip(b"\0"):
        return "it starts with zeros, its first block was never written", None
    if head.startswith(b"PK\x03\x04"):
        return _describe_cut_zip(source), None
    for start, reason, next_step in _KINDS:
        if head.startswith(start):
            return reason, next_step
    if head[257:262] == b"ustar":
        return "it is a tar archive, which torch wrote before version 0.1.10", _CONVERT
    if _is_safetensors(source, head):
        return "it is a safetensors file", "load it with safetensors.torch.load_file"
    text = head.lstrip().lower()
    if text.startswith((b"<!doctype html", b"<html", b"<?xml")):
        return "it is a web page, perhaps the error message of a download", "download the file again"
    what = "a text, no torch file" if head.isascii() and not set(head) - _TEXT else "no torch file"
    return f"it is {what}", NAME_ANOTHER


def _describe_cut_zip(source: Source) -> str:
    span = min(source.size_bytes, _LONGEST_COMMENT + END_BYTES + TRAILER_BYTES)
    tail = source.read(source.size_bytes - span, span)
    at = tail.rfind(b"PK\x05\x06")
    if at < 0:
        return "it is cut off: the table of contents at its end is missing"
    if tail.startswith(MAGIC, at + END_BYTES):
        extra = span - at - END_BYTES - TRAILER_BYTES
        return f"{extra} bytes were added after its end" if extra > 0 else f"it is cut off: {-extra} bytes are missing"
    return "something was added after its end, or its end is cut off"


def _is_safetensors(source: Source, head: bytes) -> bool:
    """Return whether it begins with the length of a JSON object, and the object."""
    length = int.from_bytes(head[:8], "little")
    if not head[8:].startswith(b"{") or not 2 <= length <= source.size_bytes - 8:
        return False
    try:
        return isinstance(json.loads(source.read(8, min(length, 100 << 20))), dict)
    except (ValueError, RecursionError):
        return False
