"""How much a packed text holds at most, from the frames of zstandard, without unpacking it.

The format is that of RFC 8878. A header may name any size; a block cannot unpack to more than
`BLOCK`, so the number of blocks bounds what a reader gets.
"""

from __future__ import annotations

import struct

MAGIC = 0xFD2FB528
SKIPPABLE = 0x184D2A50
"""The first of 16 magic numbers of frames that hold nothing."""
BLOCK = 128 * 1024
"""The most bytes that a compressed block unpacks to."""
COMPRESSED = 2
REPEATED = 1
"""The type of a block of one byte that is repeated."""
RESERVED = 3


def most_unpacked_from(packed: bytes) -> int:
    """Return a bound on how many bytes these frames unpack to, at most `BLOCK` for each compressed
    block more than they do.

    Raises:
        ValueError: they are no whole frames.
    """
    most = 0
    place = 0
    try:
        while place < len(packed):
            (magic,) = struct.unpack_from("<I", packed, place)
            place += 4
            if SKIPPABLE <= magic < SKIPPABLE + 16:
                place += 4 + struct.unpack_from("<I", packed, place)[0]
            elif magic == MAGIC:
                size, place = _most_in_frame(packed, place)
                most += size
            else:
                raise ValueError(f"no frame of zstandard at byte {place - 4}")
    except struct.error as error:
        raise ValueError("a frame of zstandard is cut off") from error
    if place > len(packed):
        raise ValueError("a frame of zstandard is cut off")
    return most


def _most_in_frame(packed: bytes, place: int) -> tuple[int, int]:
    """Return the same of one frame, whose header begins at a place; and the place behind it."""
    (descriptor,) = struct.unpack_from("<B", packed, place)
    single = bool(descriptor & 0x20)
    content_size = (int(single), 2, 4, 8)[descriptor >> 6]
    dictionary = (0, 1, 2, 4)[descriptor & 3]
    place += 1 + (not single) + dictionary + content_size
    most = 0
    last = False
    while not last:
        low, high = struct.unpack_from("<HB", packed, place)
        header = low | high << 16
        last = bool(header & 1)
        kind = header >> 1 & 3
        size = header >> 3
        if kind == RESERVED:
            raise ValueError("a block of zstandard has a reserved type")
        most += BLOCK if kind == COMPRESSED else size
        place += 3 + (1 if kind == REPEATED else size)
    return most, place + (4 if descriptor & 4 else 0)
