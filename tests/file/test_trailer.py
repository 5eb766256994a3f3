"""The trailer reads back, and nothing but a trailer is read as one."""

import zlib

import pytest

from safeckpt.errors import DamagedCheckpointError, FormatVersionError
from safeckpt.file.trailer import FORMAT_VERSION, TRAILER_BYTES, Trailer

TRAILER = Trailer(digest="0123456789abcdef" * 4, size_bytes=123_456_789)


def test_trailer_is_ascii_of_fixed_length_and_reads_back():
    """The 128 bytes are those of the documentation."""
    data = TRAILER.to_bytes()
    assert data == (
        b"SAFECKPT 0001 chunk=4194304 size=000000123456789 "
        b"root=0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef 32ddbd41\n"
    )
    assert len(data) == TRAILER_BYTES
    assert data.isascii()
    assert Trailer.parse(data, "x.pt") == TRAILER


def test_every_flipped_bit_is_damage_and_never_a_newer_version():
    """No single bit turns a trailer into another one, or into one of a newer format."""
    data = bytearray(TRAILER.to_bytes())
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedCheckpointError) as caught:
            Trailer.parse(bytes(data), "x.pt")
        assert caught.value.record == "trailer"
        data[bit // 8] ^= 1 << bit % 8


def test_whole_trailer_of_a_newer_version_is_named_as_such():
    """A trailer that another version wrote, with other fields, says which version it is."""
    text = b"SAFECKPT 0042 " + b"anything".ljust(104)
    with pytest.raises(FormatVersionError) as caught:
        Trailer.parse(b"%s %08x\n" % (text, zlib.crc32(text)), "x.pt")
    assert (caught.value.found, caught.value.supported) == (42, (FORMAT_VERSION,))


@pytest.mark.parametrize(
    "text",
    [
        b"SAFECKPT 0000 chunk=4194304 size=000000123456789 root=" + b"0" * 64,
        b"SAFECKPT 0001 chunk=4194305 size=000000123456789 root=" + b"0" * 64,
        b"SAFECKPT 0001 " + b"x" * 104,
    ],
)
def test_trailer_with_a_right_checksum_and_impossible_values_is_damage(text):
    """A version that never was, another chunk size, or no fields at all are refused."""
    with pytest.raises(DamagedCheckpointError):
        Trailer.parse(b"%s %08x\n" % (text, zlib.crc32(text)), "x.pt")
