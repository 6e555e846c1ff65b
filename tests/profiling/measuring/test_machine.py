"""The note of what a folder measures."""

import json

import pytest
from helpers import input_error

from knobwise.profiling.measuring.machine import claim


@pytest.mark.parametrize("content", ["[1]", '{"a": 1, "a": 2}', "[" * 100_000, "7"])
def test_a_damaged_note_is_refused_in_a_line(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with input_error(r"config\.json: is damaged .*; choose another out folder") as refused:
        claim(tmp_path / "config.json", {"a": 1})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("content", ["", '{\n "a', '{\n "a": 1\0\0\0', "\0\0"])
def test_a_note_that_a_power_cut_left_half_is_written_again(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    claim(tmp_path / "config.json", {"a": 1})
    assert json.loads((tmp_path / "config.json").read_text()) == {"a": 1}
