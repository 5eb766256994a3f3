"""The layout of the zip archive is torch's, also beyond 4 GiB."""

import torch

from safeckpt.file import archive

GIB = 1 << 30


def test_layout_beyond_4_gib_is_that_of_torch(tmp_path):
    """Headers, 64-bit fields, padding and table of contents equal torch's where sizes and offsets exceed 32 bits."""
    path = tmp_path / "archive.pt"
    sizes = [5 * GIB, 100, 0, (1 << 32) - 1, 100]
    state = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    with torch.serialization.skip_data():  # the file is a hole where data would be
        torch.save(state, path)
    with path.open("rb") as f:
        f.seek(64)
        head = f.read(1000)
    pickle_bytes = head.index(b"PK\x07\x08")
    fixed = [pickle_bytes, 1, 2, 6]
    names = archive.record_names(len(sizes), header=False)
    entries, end = archive.layout(list(zip(names, [*fixed, *sizes, 2, 40], strict=True)))
    with path.open("rb") as f:
        for entry in entries:
            f.seek(entry.header_offset)
            header = f.read(entry.data_offset - entry.header_offset)
            assert header == archive.local_header(entry)
            f.seek(entry.data_offset + entry.size)
            tail = f.read(archive.descriptor_bytes(entry))
            entry.crc = int.from_bytes(tail[4:8], "little")
            assert tail == archive.descriptor(entry)
        f.seek(end)
        directory = archive.central_directory(entries)
        assert f.read(len(directory)) == directory
        assert f.read() == archive.end_of_archive(len(entries), end, len(directory), 0)


def test_layout_of_more_than_65535_records_uses_the_64_bit_count():
    """The 16-bit fields of the last record are filled up, as torch does."""
    end = archive.end_of_archive(70_000, 10, 20, 0)
    assert end[-22 + 8 : -22 + 12] == b"\xff\xff\xff\xff"
    assert int.from_bytes(end[24:32], "little") == 70_000


def test_names_begin_with_the_header_and_keep_storages_together():
    """Nothing stands between storages, whose offsets torch computes one from the other."""
    names = archive.record_names(3, header=True)
    assert names[0] == archive.HEADER_RECORD
    first = names.index("data/0")
    assert names[first : first + 3] == ["data/0", "data/1", "data/2"]
    assert names[-2:] == ["version", ".data/serialization_id"]
