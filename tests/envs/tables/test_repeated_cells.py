"""Cells that were measured repeatedly: medians, what is refused, the digest, the disk, joins and
features."""

import math
import statistics
from dataclasses import replace

import pytest
import torch
from helpers import identical, input_error, small_table, table_of
from hypothesis import given, settings
from hypothesis import strategies as st

from knobwise.envs import ProfileTable
from knobwise.envs.readers.joint import join_tables
from knobwise.envs.tables.profile_table import Knob, median_of

NAN = math.nan
CELLS = [[[3.0, 1.0, 2.0], [8.0, 4.0, NAN]], [[5.0, NAN, NAN], [NAN, NAN, NAN]]]
TABLE = table_of([[0.5, 1.0], [0.25, NAN]], CELLS)
REPEATS = TABLE.repeats_ms


@settings(max_examples=100)
@given(st.lists(st.floats(0, 2**20, width=32), max_size=7), st.integers(1, 3))
def test_the_median_is_that_of_python(values, missing):
    median = median_of(torch.tensor([values + [NAN] * missing])).item()
    wanted = statistics.median(values) if values else NAN
    assert median == pytest.approx(wanted, rel=1e-6, nan_ok=True)


def test_a_table_knows_all_measurements_and_their_medians():
    identical(TABLE.latency_ms, [[2.0, 6.0], [5.0, NAN]])
    assert TABLE.num_repeats == 3
    assert TABLE.measurements_ms is TABLE.repeats_ms
    assert "75.0% profiled, up to 3 times; " in repr(TABLE)


def test_a_table_measured_once_holds_nothing_more():
    table = small_table()
    assert (table.repeats_ms, table.num_repeats) == (None, 1)
    assert table.measurements_ms.shape == (60, 12, 1)
    assert table.measurements_ms.data_ptr() == table.latency_ms.data_ptr()
    # the digest that such a table had before there were repeats
    plain = table_of([[0.5, 1.0]], [[1.0, 2.0]])
    assert plain.digest == "sha256:1219ad662736af706c381415d001bb786d1d67a591a77f4d51d041323d28f70f"


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"repeats_ms": torch.ones(2, 2)}, "repeats_ms has shape"),
        ({"repeats_ms": torch.ones(2, 3, 1)}, "repeats_ms has shape"),
        ({"repeats_ms": REPEATS.flip(-1)}, "repeats_ms after NaN"),
        ({"repeats_ms": -REPEATS}, "negative"),
        ({"repeats_ms": REPEATS * torch.inf}, "infinite"),
        ({"repeats_ms": REPEATS.nan_to_num(1.0)}, "3 × latency_ms"),
        ({"latency_ms": 2 * TABLE.latency_ms}, "3 × latency_ms"),
    ],
)
def test_what_does_not_fit_is_refused(changes, what):
    with input_error(f"'by hand'.*{what}"):
        replace(TABLE, **changes)


def test_repeats_are_part_of_the_digest_and_of_the_file(tmp_path):
    once = replace(TABLE, repeats_ms=None)
    changed = REPEATS.clone()
    changed[0, 0, 0] = 4.0  # the median stays
    other = table_of(TABLE.accuracy, changed)
    assert len({table.digest for table in (TABLE, once, other)}) == 3
    for table in (TABLE, once):
        table.save(tmp_path / "t.safetensors")
        assert ProfileTable.load(tmp_path / "t.safetensors").digest == table.digest


def test_joined_tables_keep_every_measurement():
    one = replace(TABLE, name="one", knobs=(Knob("size", (0, 2)),))
    two = table_of([[1.0, 0.0]], [[7.0, 9.0]], name="two", knobs=(Knob("size", (1, 2)),))
    joint = join_tables([one, two])
    none = [NAN] * 3
    (first, second), (third, fourth) = CELLS
    cells = [[first, none, second], [third, none, fourth], [none, [7.0, NAN, NAN], [9.0, NAN, NAN]]]
    identical(joint.repeats_ms, cells)
    assert join_tables([replace(one, repeats_ms=None), two]).repeats_ms is None
