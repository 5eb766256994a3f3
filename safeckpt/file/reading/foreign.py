"""Say what a file is that is no torch file, or not a whole one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from safeckpt.file.archive import END_BYTES
from safeckpt.file.trailer import MAGIC, TRAILER_BYTES

if TYPE_CHECKING:
    from safeckpt.file.reading.source import Source

__all__ = ["describe_foreign"]

_LONGEST_COMMENT: Final = 0xFFFF
_HEAD_BYTES: Final = 512
_LOAD_AND_SAVE: Final = "load it with torch.load and save it again"
_KINDS: Final = (
    # The legacy format: the magic number, pickled.
    (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", f"in the format of torch before 1.6; {_LOAD_AND_SAVE}"),
    (b"\x80", "a pickle, not a torch file"),
    (b"\x1f\x8b", "compressed with gzip; unpack it first"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x93NUMPY", "a NumPy file; load it with numpy.load"),
    (b"GGUF", "a GGUF file"),
    (b"version https://git-lfs", "a pointer of Git LFS in the place of the file; fetch the file with git lfs pull"),
)


def describe_foreign(source: Source) -> str:
    """Return why a file that does not end as a torch file does is none."""
    if not source.size_bytes:
        return "it is empty"
    head = source.read(0, min(source.size_bytes, _HEAD_BYTES))
    if not head.strip(b"\0"):
        return "it starts with zeros, its first block was never written"
    if head.startswith(b"PK\x03\x04"):
        return _describe_cut_zip(source)
    for start, kind in _KINDS:
        if head.startswith(start):
            return f"it is {kind}"
    if head[257:262] == b"ustar":
        return f"it is a tar archive, which torch wrote before version 0.1.10; {_LOAD_AND_SAVE}"
    if _is_safetensors(source, head):
        return "it is a safetensors file; load it with safetensors.torch.load_file"
    text = head.lstrip().lower()
    if text.startswith((b"<!doctype html", b"<html", b"<?xml")):
        return "it is a web page, perhaps the error page of a download; download the file again"
    return "it is no torch file"


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
