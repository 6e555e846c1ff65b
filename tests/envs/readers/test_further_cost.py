"""A column `cost.NAME`: what an answer costs besides time."""

from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
import torch
from helpers import small_table, table_of

from knobwise.common.errors import InputError
from knobwise.envs.readers.joint import join_tables
from knobwise.envs.readers.long_table import read_long_table, table_from_frame, write_long_table
from knobwise.envs.tables.profile_table import ProfileTable

ROWS = {
    "sample_id": ["a", "a", "b", "b"],
    "size": [1, 2, 1, 2],
    "accuracy": [0.0, 1.0, 1.0, 1.0],
    "latency_ms": [1.0, 2.0, 3.0, 4.0],
    "cost.price": [0.0, 5.0, 6.0, 8.0],
}


def frame(**changes: object) -> pl.DataFrame:
    return pl.DataFrame(
        ROWS | {name.replace("cost_", "cost."): column for name, column in changes.items()}
    )


def test_the_column_is_no_knob_and_comes_with_its_name() -> None:
    table = table_from_frame(frame(), name="t")
    assert [knob.name for knob in table.knobs] == ["size"]
    assert table.cost_name == "price"
    assert table.cost is not None
    assert table.cost.tolist() == [[0.0, 5.0], [6.0, 8.0]]


def test_it_is_known_where_profiled_and_the_mean_over_repeats() -> None:
    rows = frame(
        size=[1, 1, 1, 2], latency_ms=[1.0, 3.0, 3.0, 4.0]
    )  # sample a has one cell, measured twice
    cost = table_from_frame(rows, name="t").cost
    assert cost is not None
    assert cost[0].tolist() == pytest.approx([2.5, torch.nan], nan_ok=True)
    assert cost[1].tolist() == [6.0, 8.0]


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".jsonl"])
def test_written_and_read_again(tmp_path: Path, suffix: str) -> None:
    table = replace(small_table(8, holes=0.3), features={})
    table = replace(table, cost=table.latency_ms.square(), cost_name="energy_j")
    write_long_table(table, tmp_path / f"t{suffix}")
    again = read_long_table(tmp_path / f"t{suffix}")
    assert again.cost_name == "energy_j"
    torch.testing.assert_close(again.cost, table.cost, equal_nan=True)
    table.save(tmp_path / "t.safetensors")
    loaded = ProfileTable.load(tmp_path / "t.safetensors")
    assert (loaded.digest, loaded.cost_name) == (table.digest, "energy_j")


def test_it_is_part_of_the_digest_and_without_it_nothing_changes() -> None:
    table = table_of([[0.0, 1.0]], [[1.0, 2.0]])
    # as it was before there were further costs
    assert table.digest == "sha256:a5755caaf6ab7afcab938b64cd9b330755dccd76ef206f5fe7d51e150282a8c3"
    digests = {
        replace(table, cost=torch.tensor([[c, 2.0]]), cost_name=name).digest
        for c in (1, 2)
        for name in "ab"
    }
    assert len({*digests, table.digest}) == 5


@pytest.mark.parametrize("wrong", [None, -1.0, float("nan"), float("inf")])
def test_a_cost_that_is_no_number_from_0_up_is_refused(wrong: float | None) -> None:
    with pytest.raises(
        InputError,
        match=r"^t: 1 rows with cost\.price missing, negative, NaN or infinite, the first at",
    ):
        table_from_frame(frame(cost_price=[0.0, 5.0, wrong, 8.0]), name="t")
    if wrong is not None:
        with pytest.raises(
            InputError, match="profile 'by hand': 1 × further cost that is negative, infinite"
        ):
            replace(table_of([[1.0]], [[1.0]]), cost=torch.tensor([[wrong]]), cost_name="price")


def test_two_costs_and_joins_are_refused() -> None:
    with pytest.raises(
        InputError, match=r"^t: columns cost\.price, cost\.energy_j; a profile has one further cost"
    ):
        table_from_frame(frame(cost_energy_j=[1.0] * 4), name="t")
    table = table_from_frame(frame(), name="t")
    with pytest.raises(InputError, match="a first look or a further cost cannot be joined"):
        join_tables([table, replace(table, sample_ids=("c", "d"))])


def test_a_cell_that_was_not_profiled_has_none() -> None:
    table = table_of([[1.0, torch.nan], [1.0, 1.0]], [[1.0, torch.nan], [1.0, 1.0]])
    with pytest.raises(
        InputError,
        match="profile 'by hand': 1 × further cost that is negative, infinite, missing, or known",
    ):
        replace(table, cost=torch.ones(2, 2), cost_name="price")
