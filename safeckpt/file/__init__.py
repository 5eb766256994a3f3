"""Payload <-> bytes of one file: encode, write, checksum, read, verify."""

from safeckpt.file.encode import encode
from safeckpt.file.folder import INDEX, CheckpointFolder, ShardFile, is_folder, open_checkpoint, shard_of_bytes
from safeckpt.file.read import CheckpointFile, open_file, verify
from safeckpt.file.report import FileReport
from safeckpt.file.source import Part, source_of
from safeckpt.file.trailer import FORMAT_VERSION
from safeckpt.file.write import PreparedFile, WrittenFile, prepare, write_file, write_joined

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
