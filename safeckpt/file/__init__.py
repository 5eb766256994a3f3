"""Payload <-> bytes of one file: encode, write, checksum, read, verify."""

from safeckpt.file.file_report import FileReport
from safeckpt.file.reading.checkpoint_file import CheckpointFile, open_file, verify
from safeckpt.file.reading.sharded import INDEX, CheckpointFolder, ShardFile, is_folder, open_checkpoint, shard_of_bytes
from safeckpt.file.reading.source import Part, source_of
from safeckpt.file.trailer import FORMAT_VERSION
from safeckpt.file.writing.encoding import encode
from safeckpt.file.writing.write import PreparedFile, WrittenFile, prepare, write_file, write_joined

__all__ = [
    "FORMAT_VERSION",
    "INDEX",
    "CheckpointFile",
    "CheckpointFolder",
    "FileReport",
    "Part",
    "PreparedFile",
    "ShardFile",
    "WrittenFile",
    "encode",
    "is_folder",
    "open_checkpoint",
    "open_file",
    "prepare",
    "shard_of_bytes",
    "source_of",
    "verify",
    "write_file",
    "write_joined",
]
