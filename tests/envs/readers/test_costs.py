"""Columns of further costs: read, kept in files, joined, shown in every result."""

from dataclasses import replace

import polars as pl
import pytest
import torch
from commands import OPTIMISER, launch, read_json, refused, words_of
from helpers import identical, input_error, small_table

import knobwise
from knobwise.envs import ProfileTable
from knobwise.envs.readers.feature_files import write_features
from knobwise.envs.readers.joint import join_tables
from knobwise.envs.readers.long_table import table_from_frame, write_long_table
from knobwise.envs.tables.units import unit_in
from knobwise.experiments.evidence.decisions import read_decisions

ROWS = {
    "sample_id": ["a", "a", "a", "b", "b"],
    "size": [1, 2, 2, 1, 2],
    "repeat": [0, 0, 1, 0, 0],
    "accuracy": [0.0, 1.0, 1.0, 1.0, 1.0],
    "latency_ms": [1.0, 4.0, 6.0, 1.0, 5.0],
    "usd": [0.001, 0.002, 0.004, 0.001, None],
}


def priced_table(samples=60, **changes):
    """A small table whose prices are 0.001 USD for each step of a knob, and grow with a feature."""
    table = small_table(samples)
    step = 1 + table.configurations.sum(1).float()
    size = table.features["image_features"][:, :1].exp()
    return replace(table, costs={"usd": 0.001 * step * size}, **changes)


def test_a_cell_has_the_mean_of_the_known_costs_of_its_measurements():
    table = table_from_frame(pl.DataFrame(ROWS), name="t", costs=["usd"])
    assert [knob.name for knob in table.knobs] == ["size"]
    cost = table.costs["usd"]
    torch.testing.assert_close(cost, torch.tensor([[0.001, 0.003], [0.001, torch.nan]]),
                               equal_nan=True)  # fmt: skip
    assert any("usd: unknown in 1 rows" in note for note in table.notes)


def test_costs_are_part_of_the_content_and_stay_in_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table = priced_table()
    assert table.digest != small_table().digest
    table.save("t.safetensors")
    again = ProfileTable.load("t.safetensors")
    identical(again.costs["usd"], table.costs["usd"])
    assert again.digest == table.digest
    write_long_table(table, "t.parquet")
    write_features(table, "f.npz")
    read = knobwise.read("t.parquet", "f.npz", costs=["usd"])
    identical(read.costs["usd"], table.costs["usd"])
    assert read.digest == table.digest


def test_joined_tables_keep_costs_and_one_without_has_none_known():
    first = priced_table(20, name="first")
    second = replace(priced_table(10, name="second"), costs={})
    joined = join_tables([first, second])
    identical(joined.costs["usd"][:20], first.costs["usd"])
    assert joined.costs["usd"][20:].isnan().all()


@pytest.mark.parametrize(
    ("usd", "options", "named"),
    [
        (ROWS["usd"], {"costs": ["eur"]}, "eur"),
        (ROWS["usd"], {"costs": ["accuracy"]}, "accuracy"),
        (ROWS["usd"], {"costs": ["size"], "knobs": ["size"]}, "size"),
        (ROWS["usd"], {"costs": ["usd"], "wide": ["accuracy"], "wide_latency": [1]}, "wide"),
        ([-0.001, 0.0, 0.0, 0.0, 0.0], {"costs": ["usd"]}, "usd"),
        ([float("inf"), 0.0, 0.0, 0.0, 0.0], {"costs": ["usd"]}, "usd"),
        ([float("nan"), 0.0, 0.0, 0.0, 0.0], {"costs": ["usd"]}, "usd"),
        ([None] * 5, {"costs": ["usd"]}, "usd"),
    ],
)
def test_what_is_no_cost_is_refused(usd, options, named):
    with input_error(named):
        table_from_frame(pl.DataFrame(ROWS | {"usd": usd}), name="t", **options)


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("usd", "USD"),
        ("energy_j", "J"),
        ("price (USD)", "USD"),
        ("total_kWh", "kWh"),
        ("usd_mean", "USD"),
        ("x", ""),
    ],
)
def test_a_name_may_say_the_unit(name, unit):
    assert unit_in(name) == unit


def test_results_and_decisions_hold_the_costs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    table = priced_table()
    write_long_table(table, "t.parquet")
    write_features(table, "f.npz")
    profile = "profile=table profile.path=t.parquet profile.features=f.npz profile.costs=[usd]"
    words = "policy=utility baselines=false seeds=[0] name=x"
    launch("train", words, OPTIMISER, profile)
    assert "mean usd" in capsys.readouterr().out
    run = tmp_path / "runs/controller/x"
    results = read_json(run / "results.json")
    assert results["costs"] == {"usd": {"unit": "USD"}}
    decisions = read_decisions(run)
    prices = {}
    for row, sample in enumerate(table.sample_ids):
        for c in range(table.num_configurations):
            prices[sample, table.label(c)] = float(table.costs["usd"][row, c])
    expected = [prices[key] for key in decisions.select("sample", "choice").iter_rows()]
    assert decisions["cost_usd"].to_list() == pytest.approx(expected)
    of_static = decisions.filter(policy="budget_aware_static")["cost_usd"]
    (row,) = [
        row
        for row in results["rows"]
        if row["policy"] == "budget_aware_static" and row["budget_ms"] is None
    ]
    assert row["cost_usd_mean"] == pytest.approx(of_static.mean())
    assert "mean usd" in (run / "report.html").read_text()


def test_a_cost_of_the_command_line_that_is_no_column_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_long_table(priced_table(20), "t.parquet")
    words = words_of("inspect profile=table profile.path=t.parquet profile.costs=[eur]")
    assert "eur" in refused(words, capsys)
