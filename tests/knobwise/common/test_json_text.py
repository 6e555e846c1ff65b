"""JSON is read as Python writes it, or refused in one line."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from knobwise.common.json_text import decode_json

CONTENT = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(CONTENT)
def test_what_python_writes_is_read_as_it_was(content):
    assert decode_json(json.dumps(content).encode()) == content
    assert decode_json(json.dumps(content, ensure_ascii=False)) == content


def test_nan_infinity_and_a_byte_order_mark():
    assert math.isnan(decode_json("NaN"))
    assert decode_json(b'\xef\xbb\xbf{"a": Infinity}') == {"a": math.inf}


@pytest.mark.parametrize(
    ("text", "fault"),
    {
        b'{"a": 1, "b": 2, "a": 1}': "'a'",
        b'[{"x": {"b": 1, "b" : 2}}]': "'b'",
        b"[" * 100_000: "deep",
        b'{"a":' * 100_000: "deep",
        b'{"a": ': "Expecting",
        b"\xff{}": "UTF-8",
        b"": "Expecting",
    }.items(),
)
def test_everything_else_is_refused_in_one_line(text, fault):
    with pytest.raises(ValueError, match=fault) as refused:
        decode_json(text)
    assert "\n" not in str(refused.value)
