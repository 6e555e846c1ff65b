"""The bound on what frames of zstandard unpack to, of honest frames that polars wrote."""

import io
import random

import polars as pl
import pytest

from knobwise.common.zstd_frames import BLOCK, most_unpacked_from


def packed(text):
    lines = pl.DataFrame({"text": text.split("\n")})
    file = io.BytesIO()
    lines.write_csv(file, include_header=False, quote_style="never", compression="zstd")
    return file.getvalue()


def texts():
    draw = random.Random(0)
    words = [draw.randbytes(4).hex() for _ in range(500)]
    return {
        "short": "a line",
        "words": "\n".join(draw.choice(words) for _ in range(200_000)),
        "one letter": "\n".join(["x" * 3_000_000] * 2),
        "random": draw.randbytes(600_000).hex(),
    }


@pytest.mark.parametrize("name", texts())
def test_the_bound_is_at_most_a_block_above_the_size(name):
    text = texts()[name]
    frames = packed(text)
    size = len(text.encode()) + 1
    assert pl.read_lines(io.BytesIO(frames)).to_series().str.join("\n")[0] == text
    assert size <= most_unpacked_from(frames) <= size + 2 * BLOCK
    # several frames stand one after the other, those that hold nothing among them
    nothing = (0x184D2A53).to_bytes(4, "little") + (5).to_bytes(4, "little") + b"other"
    assert most_unpacked_from(frames + nothing + frames) == 2 * most_unpacked_from(frames)


@pytest.mark.parametrize("cut", [1, 4, 8, 20])
def test_what_is_cut_off_or_no_frame_is_damaged(cut):
    frames = packed(texts()["words"])
    with pytest.raises(ValueError, match="zstandard"):
        most_unpacked_from(frames[:-cut])
    with pytest.raises(ValueError, match="zstandard"):
        most_unpacked_from(b"no frame at all")
