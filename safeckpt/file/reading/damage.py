"""Find out which record or region of a file is damaged, once it is known that one is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from safeckpt.errors import listed
from safeckpt.file import archive
from safeckpt.file.reading.record_names import tensors_in

if TYPE_CHECKING:
    from safeckpt.errors import DamagedCheckpointError
    from safeckpt.file.archive import Entry
    from safeckpt.file.reading.central_directory import Archive

__all__ = ["check_records", "find_damage"]


def check_records(file: Archive) -> None:
    """Compare the data of every record with its CRC-32 in the table of contents.

    Raises:
        DamagedCheckpointError: Naming the first record that differs, or saying that the file has no CRC-32s.
    """
    entries = [entry for entry in file.entries if entry.size]
    found = file.source.crcs([(entry.data_offset, entry.size) for entry in entries])
    if any(found) and not any(entry.crc for entry in entries):
        raise file.damaged(
            "nothing in it can be verified: it was written without checksums "
            "(torch.serialization.set_crc32_options(False))"
        )
    bad = [entry for entry, crc in zip(entries, found, strict=True) if crc != entry.crc]
    if bad:
        raise _damaged_record(file, bad)


def _damaged_record(file: Archive, bad: list[Entry]) -> DamagedCheckpointError:
    records = [file.short_name(entry) for entry in bad]
    tensors = tensors_in(file, records)
    what = listed(tensors or records)
    return file.damaged(f"the bytes of {what} are not those that were written", records[0], tensors=tensors)


def find_damage(file: Archive) -> DamagedCheckpointError:
    """Return the error for a file whose digest differs, though its table of contents is well formed.

    Everything around the records is laid out again and compared, then the records' own CRC-32s.
    """
    entries = file.entries
    found = file.source.crcs([(entry.data_offset, entry.size) for entry in entries])
    bad = []
    for entry, crc in zip(entries, found, strict=True):
        name = file.short_name(entry)
        header = file.source.read(entry.header_offset, entry.data_offset - entry.header_offset)
        if header != archive.local_header(entry):
            return _damaged_region(file, f"header of {name}")
        written = file.source.read(entry.data_offset + entry.size, archive.descriptor_bytes(entry))
        agrees = written == archive.descriptor(entry)
        if crc == entry.crc:
            if not agrees:
                return _damaged_region(file, f"descriptor of {name}")
            continue
        entry_crc, entry.crc = entry.crc, crc
        other = archive.descriptor(entry)
        entry.crc = entry_crc
        if written == other:
            return _damaged_region(file, "central directory")
        bad.append(entry)
    if bad:
        return _damaged_record(file, bad)
    return file.damaged("its bytes do not give the digest in its trailer")


def _damaged_region(file: Archive, region: str) -> DamagedCheckpointError:
    return file.damaged("bytes around the records are not those written", region)
