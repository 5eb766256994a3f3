"""Payload <-> bytes of one file: encode, write, checksum, read, verify."""

from typing import TYPE_CHECKING

from safeckpt.system.lazy import module_getattr

if TYPE_CHECKING:
    from safeckpt.file.file_report import FileReport
    from safeckpt.file.reading.checkpoint_file import CheckpointFile, open_file, verify
    from safeckpt.file.reading.mapping import Mapped, MappedFiles
    from safeckpt.file.reading.safetensors import DTYPE_NAMES, SafetensorsFile
    from safeckpt.file.reading.shard_metadata import METADATA, unpickle_metadata
    from safeckpt.file.reading.shard_parts import ShardParts
    from safeckpt.file.reading.sharded import (
        INDEX,
        CheckpointFolder,
        ShardFile,
        is_folder,
        open_checkpoint,
        shard_of_bytes,
    )
    from safeckpt.file.reading.source import Part, source_of
    from safeckpt.file.reading.tensor_source import TensorSource, load_lazily
    from safeckpt.file.reading.whole_tensors import (
        SHARD_KEY,
        Placeholder,
        ShardTensorReader,
        iter_placeholders,
        placeholder_of,
    )
    from safeckpt.file.trailer import FORMAT_VERSION
    from safeckpt.file.writing.encoding import encode
    from safeckpt.file.writing.prepare import prepare, write_file
    from safeckpt.file.writing.write import JoinedFile, PreparedFile, Write, WrittenFile, write_here
else:
    # Imported when first used: a file is verified, and its header read, without torch.
    __getattr__ = module_getattr(
        __name__,
        {
            "CheckpointFile": "safeckpt.file.reading.checkpoint_file",
            "CheckpointFolder": "safeckpt.file.reading.sharded",
            "DTYPE_NAMES": "safeckpt.file.reading.safetensors",
            "FORMAT_VERSION": "safeckpt.file.trailer",
            "FileReport": "safeckpt.file.file_report",
            "INDEX": "safeckpt.file.reading.sharded",
            "JoinedFile": "safeckpt.file.writing.write",
            "METADATA": "safeckpt.file.reading.shard_metadata",
            "Mapped": "safeckpt.file.reading.mapping",
            "MappedFiles": "safeckpt.file.reading.mapping",
            "Part": "safeckpt.file.reading.source",
            "Placeholder": "safeckpt.file.reading.whole_tensors",
            "PreparedFile": "safeckpt.file.writing.write",
            "SHARD_KEY": "safeckpt.file.reading.whole_tensors",
            "SafetensorsFile": "safeckpt.file.reading.safetensors",
            "ShardFile": "safeckpt.file.reading.sharded",
            "ShardParts": "safeckpt.file.reading.shard_parts",
            "ShardTensorReader": "safeckpt.file.reading.whole_tensors",
            "TensorSource": "safeckpt.file.reading.tensor_source",
            "Write": "safeckpt.file.writing.write",
            "WrittenFile": "safeckpt.file.writing.write",
            "encode": "safeckpt.file.writing.encoding",
            "is_folder": "safeckpt.file.reading.sharded",
            "iter_placeholders": "safeckpt.file.reading.whole_tensors",
            "load_lazily": "safeckpt.file.reading.tensor_source",
            "open_checkpoint": "safeckpt.file.reading.sharded",
            "open_file": "safeckpt.file.reading.checkpoint_file",
            "placeholder_of": "safeckpt.file.reading.whole_tensors",
            "prepare": "safeckpt.file.writing.prepare",
            "shard_of_bytes": "safeckpt.file.reading.sharded",
            "source_of": "safeckpt.file.reading.source",
            "unpickle_metadata": "safeckpt.file.reading.shard_metadata",
            "verify": "safeckpt.file.reading.checkpoint_file",
            "write_file": "safeckpt.file.writing.prepare",
            "write_here": "safeckpt.file.writing.write",
        },
    )

__all__ = [
    "DTYPE_NAMES",
    "FORMAT_VERSION",
    "INDEX",
    "METADATA",
    "SHARD_KEY",
    "CheckpointFile",
    "CheckpointFolder",
    "FileReport",
    "JoinedFile",
    "Mapped",
    "MappedFiles",
    "Part",
    "Placeholder",
    "PreparedFile",
    "SafetensorsFile",
    "ShardFile",
    "ShardParts",
    "ShardTensorReader",
    "TensorSource",
    "Write",
    "WrittenFile",
    "encode",
    "is_folder",
    "iter_placeholders",
    "load_lazily",
    "open_checkpoint",
    "open_file",
    "placeholder_of",
    "prepare",
    "shard_of_bytes",
    "source_of",
    "unpickle_metadata",
    "verify",
    "write_file",
    "write_here",
]
