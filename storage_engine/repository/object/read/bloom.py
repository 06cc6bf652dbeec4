"""Bloom filters of Parquet columns, read: a value that one excludes is certainly not there.

Split blocks of 256 bits, hashed by XXH64, as the Parquet format has them and all known writers
write them. A filter of any other kind says nothing.
"""

from __future__ import annotations

import struct

_BLOCK = 32  # bytes
_SALTS = (
    0x47B6137B,
    0x44974D91,
    0x8824AD5B,
    0xA2B7289D,
    0x705495C7,
    0x2DF1424B,
    0x9EFC4947,
    0x5C6BFB31,
)
_INT32 = 0x15  # field 1 of a struct, in Thrift's compact protocol: its length in bytes
# Fields 2 to 4, a union of one empty struct each, at its first choice: split blocks, XXH64, plain.
_KNOWN = b"\x1c\x1c\x00\x00" * 3 + b"\x00"
_64 = (1 << 64) - 1
_P1, _P2, _P3, _P4, _P5 = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)


class BloomFilter:
    """The filter of one column in one row group."""

    def __init__(self, bits: bytes) -> None:
        self._bits = bits
        self._blocks = len(bits) // _BLOCK

    @classmethod
    def parse(cls, data: bytes) -> BloomFilter | None:
        """As it stands in a file, with its header; None where it is none that we can read."""
        if not data or data[0] != _INT32:
            return None
        size, shift, at = 0, 0, 1
        while at < len(data):
            byte = data[at]
            size |= (byte & 0x7F) << shift
            shift += 7
            at += 1
            if byte < 0x80:
                break
        size >>= 1  # zigzag; lengths are not negative
        bits = data[at + len(_KNOWN) : at + len(_KNOWN) + size]
        is_ours = data[at : at + len(_KNOWN)] == _KNOWN
        if not is_ours or not size or size % _BLOCK or len(bits) != size:
            return None
        return cls(bits)

    def may_hold(self, hashed: int) -> bool:
        """Whether a value with this hash (`xxh64`) can be in the column."""
        start = (((hashed >> 32) * self._blocks) >> 32) * _BLOCK
        words = struct.unpack_from("<8I", self._bits, start)
        low = hashed & 0xFFFFFFFF
        return all(
            word >> (((low * salt) & 0xFFFFFFFF) >> 27) & 1
            for word, salt in zip(words, _SALTS, strict=True)
        )


def xxh64(data: bytes) -> int:
    """XXH64 of a value, seed 0."""
    size, at = len(data), 0
    if size >= 32:
        lanes = [(_P1 + _P2) & _64, _P2, 0, -_P1 & _64]
        while at <= size - 32:
            for lane, word in enumerate(struct.unpack_from("<4Q", data, at)):
                lanes[lane] = _round(lanes[lane], word)
            at += 32
        turned = zip(lanes, (1, 7, 12, 18), strict=True)
        made = sum(_rotated(lane, bits) for lane, bits in turned) & _64
        for lane in lanes:
            made = ((made ^ _round(0, lane)) * _P1 + _P4) & _64
    else:
        made = _P5
    made = (made + size) & _64
    while at <= size - 8:
        (word,) = struct.unpack_from("<Q", data, at)
        made = (_rotated(made ^ _round(0, word), 27) * _P1 + _P4) & _64
        at += 8
    if at <= size - 4:
        (word,) = struct.unpack_from("<I", data, at)
        made = (_rotated(made ^ (word * _P1) & _64, 23) * _P2 + _P3) & _64
        at += 4
    for byte in data[at:]:
        made = (_rotated(made ^ (byte * _P5) & _64, 11) * _P1) & _64
    made = ((made ^ (made >> 33)) * _P2) & _64
    made = ((made ^ (made >> 29)) * _P3) & _64
    return made ^ (made >> 32)


def _round(lane: int, word: int) -> int:
    return (_rotated((lane + word * _P2) & _64, 31) * _P1) & _64


def _rotated(value: int, bits: int) -> int:
    return ((value << bits) | (value >> (64 - bits))) & _64
