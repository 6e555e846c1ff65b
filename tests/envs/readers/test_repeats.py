"""Rows that measure a cell again: repeats in their order, and what is none."""

import numpy as np
import polars as pl
import pytest
import torch
from helpers import identical, input_error

from knobwise.envs.bandit.reward import expected_utility
from knobwise.envs.readers.long_table import table_from_frame

NUMBERS = "repetition_index, epoch, trial, attempt, sample_index, run, seed, rep, Trial ID"


def measured(samples=30, repeats=2, draw=0, right=(0.6, 0.6, 0.6), **columns):
    """Rows of samples × (small, large) × repeats; times vary, and accuracies by the repeat."""
    draws = np.random.default_rng(draw)
    rows = []
    for sample in range(samples):
        for model, cost in (("small", 0.001), ("large", 0.002)):
            for number in range(repeats):
                row = {"sample_id": f"q{sample}", "model": model, "usd": cost}
                row["accuracy"] = int(draws.random() < right[number])
                row["seconds"] = draws.uniform(1, 2)
                made = {name: make(sample, number) for name, make in columns.items()}
                rows.append(row | made)
    return pl.DataFrame(rows)


def read(frame, latency="seconds", unit="s", **options):
    return table_from_frame(frame, name="t", latency=latency, unit=unit, **options)


def by_usd(frame):
    return read(frame, "usd", "USD")


def notes_with(table, *words):
    return [note for note in table.notes if all(word in note for word in words)]


@pytest.mark.parametrize("column", ["seconds", "words"])
def test_rows_that_differ_in_any_column_are_repeats_whatever_the_cost(column):
    frame = measured(right=(1.0, 1.0)).with_columns(words=pl.format("{} s", "seconds"))
    frame = frame.select("sample_id", "model", "usd", "accuracy", column)
    table = by_usd(frame)
    assert (table.num_samples, table.num_configurations, table.num_repeats) == (30, 2, 2)
    identical(table.latency_ms[0], [0.002, 0.001])
    # the hint that they may be other samples stays
    assert notes_with(table, "60 cells occur up to 2 times", "every rank")
    if column == "seconds":
        assert read(frame).num_repeats == 2
    # without the column they are copies
    copied = by_usd(frame.drop(column))
    assert copied.num_repeats == 1
    assert notes_with(copied, "copies", "60")


def test_rows_that_nothing_tells_apart_are_refused():
    frame = measured()
    with input_error(r"every rank"):
        by_usd(pl.concat([frame, frame[:1]]))
    numbered = frame.with_columns(repeat=pl.int_range(pl.len()) % 2)
    again = numbered[:1].with_columns(seconds=3.0)
    with input_error("same repeat, .* every rank"):
        by_usd(pl.concat([numbered, again]))


@pytest.mark.parametrize("name", NUMBERS.split(", "))
@pytest.mark.parametrize("knobs", [None, ["model"]])
def test_a_column_with_the_name_of_a_repeat_orders_the_measurements(name, knobs):
    frame = measured(repeats=3, **{name: lambda _, number: 10 - number})
    frame = frame.sample(fraction=1, shuffle=True, seed=0)
    table = read(frame, knobs=knobs)
    assert [knob.name for knob in table.knobs] == ["model"]
    assert notes_with(table, name, "numbers the measurements")
    same = read(frame.rename({name: "repeat"}))
    identical(table.repeats_ms, same.repeats_ms)
    assert (table.repeats_ms.diff(dim=-1) < 0).any()


def test_numbers_that_occur_twice_in_a_cell_do_not_order_it():
    table = read(measured(repeats=3, run=lambda _, number: number // 2))
    assert table.num_repeats == 3
    assert (table.repeats_ms.diff(dim=-1) >= 0).all()


@pytest.mark.parametrize("right", [(0.4, 0.6, 0.8), (0.9, 0.5, 0.5), (0.0, 1.0, 1.0)])
def test_accuracy_that_differs_with_the_number_may_be_that_of_a_setting(right):
    frame = measured(200, 3, right=right, attempt=lambda _, number: number + 1)
    table = read(frame)
    assert table.num_repeats == 3
    (note,) = notes_with(table, "attempt", "differs", "profile.knobs=[model,attempt]")
    means = frame.group_by("attempt").agg(pl.mean("accuracy")).sort("attempt")["accuracy"]
    assert ", ".join(f"{mean:.2f} at {i + 1}" for i, mean in enumerate(means)) in note
    # as it says
    as_knob = read(frame, knobs=["model", "attempt"])
    assert (as_knob.num_configurations, as_knob.num_repeats) == (6, 1)
    assert not notes_with(as_knob, "differs")


@pytest.mark.parametrize("share", [0.05, 0.5, 0.97])
def test_accuracies_that_differ_by_chance_are_no_setting(share):
    for seed in range(40):
        size = (8, 30, 100)[seed % 3]
        frame = measured(size, 3, seed, right=(share,) * 3, attempt=lambda _, number: number)
        table = read(frame, knobs=["model"])
        assert not notes_with(table, "accuracy differs with it")


def test_samples_that_change_with_a_run_are_not_repeated():
    """Ids start anew in each run: the same id is another question."""
    questions = {"text": lambda sample, run: f"what is {sample} plus {7 * run}?"}
    table = read(measured(**questions, run=lambda _, run: run))
    assert notes_with(table, "run", "text", "`dataset`")
    same = {"text": lambda sample, run: f"what is {sample} plus 7?"}
    table = read(measured(**same, run=lambda _, run: run))
    assert not notes_with(table, "`dataset`")
    # what an answer was differs with the setting, too
    frame = measured(run=lambda _, run: run).with_columns(words=pl.format("{} s", "seconds"))
    assert not notes_with(read(frame), "`dataset`")


# -- late and wrong --------------------------------------------------------------------------------


def timed_out(together, samples=60):
    """Three repeats of each cell. One of `flaky` takes 900 ms for 300; it is the one that is wrong,
    or each of the three is in a third of the samples."""
    rows = []
    for n in range(samples):
        wrong = 2 if together else n % 3
        for k in range(3):
            rows.append((n, "flaky", k, float(k != wrong), 900.0 if k == 2 else 300.0 + k))
            rows.append((n, "steady", k, float(n % 2), 500.0 + k))
    names = ["sample_id", "model", "repeat", "accuracy", "latency_ms"]
    return pl.DataFrame(rows, names, orient="row")


def notes_of_single(table):
    return [note for note in table.notes if "as if late ones were right as often" in note]


def test_what_is_late_and_wrong_at_once_is_said_to_count_twice():
    frame = timed_out(together=True)
    table = table_from_frame(frame, name="t")
    (note,) = notes_of_single(table)
    # two of three are right, and the same two are in time: 2/3 for 2/3 × 2/3
    assert note.startswith("66.7% of the measurements of model=flaky are right and within ")
    assert "it counts as 44.4%" in note
    # what it names to do
    alone = frame.select(
        pl.format("{}#{}", "sample_id", "repeat").alias("sample_id"),
        pl.exclude("sample_id", "repeat"),
        doc="sample_id",
    )
    table = table_from_frame(alone, name="t", group="doc")
    assert len(set(table.clusters)) == 60
    assert notes_of_single(table) == []
    utility = expected_utility(table.accuracy, table.measurements_ms, torch.tensor(600.0))
    assert utility.mean(0).tolist() == pytest.approx([2 / 3, 1 / 2])
    # so is what has no row
    lost = frame.filter((pl.col("latency_ms") < 900) | (pl.col("sample_id") % 2 == 0))
    assert len(notes_of_single(table_from_frame(lost, name="t", missing="failed"))) == 1


def test_what_is_late_and_wrong_by_chance_raises_no_note():
    assert notes_of_single(table_from_frame(timed_out(together=False), name="t")) == []
    for seed in range(30):
        table = read(measured(samples=12 + seed, repeats=3, draw=seed))
        assert notes_of_single(table) == [], seed
