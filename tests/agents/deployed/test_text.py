"""Texts as numbers: their parts, what is read of a chat, and what is unlike training."""

import itertools
import json
import math
from zlib import crc32

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from knobwise.agents.deployed import text
from knobwise.agents.deployed.text import BITS, LONGEST, TextEncoder, is_text, parts_of, text_of

TEXTS = st.one_of(st.text(max_size=60), st.text(st.characters(codec="utf-8"), max_size=60))
KNOWN = ["what is the capital of france", "十二の数"]
FACTORS = [int(x) for x in (text._FIRST, text._SECOND, text._THIRD)]
OF_WORDS, OF_PAIRS = int(text._OF_WORDS), int(text._OF_PAIRS)


def by_hand(read):
    """The hashes of a text that is in lower case with single spaces, one after the other."""

    def upper_bits(number):
        return (number % 2**64) >> (64 - BITS)

    points = list(map(ord, read.encode("utf-32-le", "replace").decode("utf-32-le")))
    runs = [sum(map(int.__mul__, points[i : i + 3], FACTORS)) for i in range(len(points) - 2)]
    data = read.encode("utf-8", "replace")
    plain = bytes(b if b > 127 or chr(b).isalnum() else ord(" ") for b in data)
    words = [crc32(word) * OF_WORDS % 2**64 for word in plain.split()]
    pairs = [a * OF_PAIRS + b for a, b in itertools.pairwise(words)]
    return [*map(upper_bits, [*runs, *words, *pairs])]


def encoder(known, least=0.5, most=1000, messages=0, width=2):
    """An encoder that knows the parts of these texts, all of one weight."""
    hashes = sorted({number for each in known for number in parts_of(each).hashes.tolist()})
    slots = np.zeros(1 << BITS, np.int16)
    slots[hashes] = np.arange(1, len(hashes) + 1)
    projection = np.random.default_rng(0).normal(size=(len(hashes) + 1, width))
    arrays = {
        "slots": slots,
        "weights": np.ones(len(hashes) + 1, np.float32),
        "projection": projection.astype(np.float32),
        "limits": np.array([least, least, most]),
        "messages": np.array(messages),
    }
    return TextEncoder(arrays)


def test_the_parts_of_a_short_text():
    parts = parts_of("  Ab\t12 ")
    # the runs "ab ", "b 1" and " 12", the words "ab" and "12", and their pair
    assert parts.hashes.tolist() == by_hand("ab 12")
    assert len(parts.hashes) == 3 + 2 + 1
    assert parts.surface == [math.log1p(8), math.log1p(2), 2 / 5]


@given(TEXTS)
@example("")
@example("日本語のテキスト")
@example("\ud800 broken \x00")
@example("naïve — “quotes”, ½")
def test_parts_are_those_computed_one_by_one(value):
    assert parts_of(value).hashes.tolist() == by_hand(text.read_of(value))


@given(st.lists(TEXTS, min_size=1, max_size=5))
def test_a_text_gets_the_same_numbers_whatever_was_encoded_before(values):
    known = encoder(KNOWN, 0.0, math.inf)
    together = np.stack([known(value) for value in values])
    for value, row in zip(values, together, strict=True):
        assert row.tobytes() == encoder(KNOWN, 0.0, math.inf)(value).tobytes()
        assert np.isfinite(row).all()


def test_forms_of_a_character_capitals_and_spaces_do_not_count():
    first = parts_of("Ünïcode  text").hashes
    assert first.tolist() == parts_of("u\u0308ni\u0308code\ntext").hashes.tolist()


def test_of_a_long_text_both_ends_are_read():
    begin = "a" * LONGEST
    end = "b" * LONGEST
    long = parts_of(begin + "middle" * 20_000 + end)
    other = parts_of(begin + "centre" * 20_000 + end)
    assert long.hashes.tolist() == other.hashes.tolist() == by_hand(f"{begin} {end}")
    assert long.characters == 2 * LONGEST + 120_000
    # the time to read it is bounded
    assert len(parts_of("€ " * 100_000).hashes) <= 3 * (2 * LONGEST + 1)


MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "First?"},
    {"role": "assistant", "content": "Yes.", "tool_calls": []},
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "Second"},
            {"type": "image_url", "image_url": {"url": "data:…"}},
            {"type": "text", "text": "third?"},
        ],
    },
    {"role": "assistant", "content": None},
]


@pytest.mark.parametrize(
    ("messages", "wanted"),
    [
        ("last", "Second\nthird?"),
        ("user", "First?\nSecond\nthird?"),
        ("all", "Be brief.\nFirst?\nYes.\nSecond\nthird?\n"),
    ],
)
def test_what_is_read_of_a_chat(messages, wanted):
    assert text_of(MESSAGES, messages) == wanted
    assert text_of(json.dumps(MESSAGES), messages) == wanted
    assert text_of(json.dumps(MESSAGES, indent=1), messages) == wanted


def test_what_is_no_chat_is_text_and_what_is_neither_is_refused():
    for value in ("[{ of set theory", '[{"a": 1}]', "[1, 2]", "{}"):
        assert text_of(value) == value
    assert text_of(None) == text_of(math.nan) == text_of([]) == ""
    for value in (3, {"role": "user"}, [{"role": "user"}], [1.0], b"bytes"):
        with pytest.raises(ValueError, match="must be text"):
            text_of(value)
    assert not is_text([0.5, 1.0])
    assert not is_text(np.zeros(3))
    assert is_text(MESSAGES)


def test_numbers_are_a_mean_of_directions_that_does_not_grow_with_the_text():
    known = encoder(["red green blue"], least=0.0)
    once = known("red")[3:]
    # the runs and words of both are known, and lie in the span of both directions
    assert np.linalg.norm(once) <= np.linalg.norm(known.arrays["projection"], 2) + 1e-6
    hashes = parts_of("red").hashes
    rows = known.arrays["projection"][known.arrays["slots"][hashes]]
    np.testing.assert_allclose(once, rows.sum(0) / math.sqrt(len(rows)), rtol=1e-5)


def test_a_text_of_unknown_parts_or_far_longer_is_unlike():
    known = encoder(["what is the capital of france"], least=0.5, most=100)
    assert np.isfinite(known("what is the capital of france")).all()
    assert np.isfinite(known("")).all()
    for value in ("Какая столица у Франции и сколько в ней людей", "what is the " * 10):
        assert np.isnan(known(value)).all()
