"""What is made of measurements."""

import math

import polars as pl
import pytest

from knobwise.profiling.measuring.measuring import TIMES, TOKENS, Plan
from knobwise.profiling.measuring.outputs import log_spread
from knobwise.profiling.measuring.questions import VQAItem
from knobwise.profiling.measuring.settings import VLMProfileConfig


def test_the_spread_of_a_measurement_is_that_of_the_logarithms_of_a_cell():
    plan = Plan(
        (VQAItem("0", None, "?", ("yes",)),),
        ("?",),
        ("content",),
        ({"side": 1},),
        VLMProfileConfig(repeats=2),
    )
    row = {"sample_id": "0", "content": "content", "side": 1, "text": "yes"}
    rows = [
        row | dict.fromkeys(TIMES, ms) | dict.fromkeys(TOKENS, 1) | {"repeat": repeat}
        for repeat, ms in enumerate((1.0, math.e))
    ]
    # ln ms is 0 and 1
    assert log_spread(plan, pl.DataFrame(rows)) == pytest.approx(0.5**0.5, abs=1e-4)
