"""CRC-32s of pieces join, and the digest of a file does not depend on how it was cut."""

import random
import threading
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safeckpt.file.checksum import CHUNK_BYTES, ChunkDigest, CrcPool, combine, digest_of


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_crc_of_two_pieces_joined_is_that_of_the_whole(first, second):
    """combine() agrees with zlib for any two pieces."""
    assert combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


@pytest.mark.parametrize("length", [0, 1, 255, 256, 65535, 65536, (1 << 24) - 1, 1 << 24, (1 << 24) + 257])
def test_crc_of_pieces_joins_at_every_width_of_the_length(length):
    """The factor for a length is right at each border of the tables it is made from."""
    second = bytes(length)
    assert combine(zlib.crc32(b"abc"), zlib.crc32(second), length) == zlib.crc32(b"abc" + second)


def test_crc_of_lengths_beyond_memory_joins_in_steps():
    """Appending 64 GiB of zeros at once equals appending them in halves."""
    length = 1 << 20
    zeros = zlib.crc32(bytes(length))
    while length < 64 << 30:
        twice = combine(zeros, zeros, length)
        start = zlib.crc32(b"x")
        assert combine(combine(start, zeros, length), zeros, length) == combine(start, twice, 2 * length)
        zeros, length = twice, 2 * length


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32), st.lists(st.integers(1, CHUNK_BYTES), max_size=4))
def test_digest_does_not_depend_on_how_the_bytes_were_given(seed, sizes):
    """Bytes given at once, in pieces, with their CRC-32s, or as CRC-32s within a chunk have one root."""
    data = random.Random(seed).randbytes(sum(sizes))
    at_once, piecewise, with_crc, by_crc = ChunkDigest(), ChunkDigest(), ChunkDigest(), ChunkDigest()
    at_once.add(data)
    start = 0
    for size in sizes:
        piece = data[start : start + size]
        piecewise.add(piece)
        with_crc.add(piece, zlib.crc32(piece))
        while piece:
            part = piece[: by_crc.room()]
            by_crc.add_crc(zlib.crc32(part), len(part))
            piece = piece[len(part) :]
        start += size
    chunks = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
    root = digest_of([zlib.crc32(chunk) for chunk in chunks], len(data))
    assert at_once.hexdigest() == piecewise.hexdigest() == with_crc.hexdigest() == by_crc.hexdigest() == root
    assert at_once.size_bytes == len(data)


def test_piece_across_a_chunk_border_is_refused():
    """A CRC-32 of bytes from two chunks cannot be split, so it is not taken."""
    digest = ChunkDigest()
    digest.add(b"x")
    with pytest.raises(ValueError, match="border"):
        digest.add_crc(0, CHUNK_BYTES)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_pool_gives_the_crc_of_each_piece(workers):
    """Whatever the number of threads, every task has the result of its own piece."""
    pieces = [random.Random(index).randbytes(100_000) for index in range(20)]
    with CrcPool(workers) as pool:
        tasks = [pool.submit(piece) for piece in pieces]
        assert [task.result() for task in tasks] == [zlib.crc32(piece) for piece in pieces]


def test_pool_that_is_left_by_an_error_ends_its_threads():
    """Tasks that nobody waits for are dropped, and every thread ends."""
    tasks = []

    def leave():
        with CrcPool(2) as pool:
            tasks.extend(pool.submit(bytes(1 << 20)) for _ in range(50))
            raise KeyError

    with pytest.raises(KeyError):
        leave()
    assert len(tasks) == 50
    assert not [thread for thread in threading.enumerate() if thread.name == "safeckpt-crc"]
