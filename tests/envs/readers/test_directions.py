"""Measures whose direction is the other way are not taken for scores or costs."""

import numpy as np
import polars as pl
import pytest
from helpers import input_error

from knobwise.envs.readers.long_table import table_from_frame
from knobwise.envs.readers.quantities import counts_errors, is_rate

ERRORS = [
    "wer",
    "cer",
    "loss",
    "error",
    "error_rate",
    "rmse",
    "mae",
    "regret",
    "cost",
    "mean_cost",
    "perplexity",
    "edit_distance",
    "val_loss",
    "test_WER_mean",
    "eval/loss",
    "errorRate",
    "mse",
    "top1_error",
    "num_errors",
    "word_perplexity",
]


def rows_of(accuracy, latency="latency_ms", better=-1.0):
    """60 samples × 3 modes; hard samples take longer and have more errors. Slower modes have fewer
    of what is measured, or with `better` 1 more."""
    draws = np.random.default_rng(0)
    hard = draws.random((60, 1))
    share = np.clip(0.5 + better * np.array([-0.2, 0.0, 0.2]) + 0.2 * (hard - 0.5), 0, 1)
    times = [12.0, 30.0, 60.0] * (1 + hard) * draws.uniform(0.98, 1.02, (60, 3))
    rows = {"sample_id": np.arange(60).repeat(3), "mode": np.tile(["fast", "mid", "full"], 60)}
    return pl.DataFrame(rows | {accuracy: share.ravel(), latency: times.ravel()})


@pytest.mark.parametrize(
    "name",
    ERRORS,
)
def test_measures_of_errors_are_refused_with_the_formula(name):
    with input_error(f"accuracy={name}.*1 - {name}"):
        table_from_frame(rows_of(name), name="t", accuracy=name)


@pytest.mark.parametrize("name", ["accuracy", "f1", "bleu", "neg_loss", "error_free", "power"])
def test_scores_are_taken_as_they_are(name):
    table = table_from_frame(rows_of(name), name="t", accuracy=name)
    assert not any(name in note for note in table.notes)


def test_what_slower_settings_have_more_of_may_be_a_score():
    table = table_from_frame(rows_of("regret", better=1.0), name="t", accuracy="regret")
    assert any("1 - regret" in note for note in table.notes)


@pytest.mark.parametrize("better", [-1.0, 1.0])
def test_a_measure_above_1_is_refused_for_its_direction_and_not_its_range(better):
    """1 / (1 + x) is from 0 to 1 for any loss; no accuracy above 1 may be a score as it is."""
    frame = rows_of("perplexity", better=better).with_columns(pl.col("perplexity") * 30 + 2)
    with input_error(r"accuracy=perplexity: .*1 / \(1 \+ perplexity\)"):
        table_from_frame(frame, name="t", accuracy="perplexity")
    formula = frame.with_columns(score=1 / (1 + pl.col("perplexity"))).drop("perplexity")
    made = table_from_frame(formula, name="t", accuracy="score")
    assert made.accuracy.max() < 0.34


def test_per_cent_of_errors_is_turned_in_per_cent():
    frame = rows_of("wer").with_columns(pl.col("wer") * 100)
    with input_error("accuracy=wer: .*100 - wer"):
        table_from_frame(frame, name="t", accuracy="wer", accuracy_unit="percent")


def test_a_score_out_of_range_is_still_refused_for_its_range():
    frame = rows_of("bleu").with_columns(pl.col("bleu") * 100)
    with input_error("bleu is outside"):
        table_from_frame(frame, name="t", accuracy="bleu")


def test_columns_of_a_wide_table_are_looked_at_too():
    frame = pl.DataFrame({"small_wer": [0.1, 0.3, 0.2], "large_wer": [0.1, 0.2, 0.0]})
    with input_error("small_wer, large_wer"):
        table_from_frame(frame, name="t", wide=["small_wer", "large_wer"], wide_latency=[1, 5])


def test_words_that_say_what_is_right_have_no_direction():
    frame = rows_of("accuracy").with_columns(error=pl.lit("none")).drop("accuracy")
    table = table_from_frame(frame, name="t", accuracy="error", right="none")
    assert (table.accuracy == 1).all()


@pytest.mark.parametrize(
    "name", ["fps", "throughput", "tokens_per_second", "speed", "tokens/s", "reqPerSec", "qps"]
)
def test_rates_are_no_costs(name):
    with input_error(f"1000 / {name}"):
        table_from_frame(rows_of("accuracy", name), name="t", latency=name)


def test_a_unit_may_be_a_rate_and_further_costs_are_noted():
    with input_error("unit=frames per second"):
        table_from_frame(rows_of("accuracy"), name="t", unit="frames per second")
    frame = rows_of("accuracy").with_columns(fps=1000 / pl.col("latency_ms"))
    table = table_from_frame(frame, name="t", costs=["fps"])
    assert any("1 / fps" in note for note in table.notes)


def test_names_that_only_look_alike_have_no_direction():
    for name in ("latency_ms", "seconds", "ms_per_token", "usd_per_hour", "energy_j", "tokens"):
        assert not is_rate(name), name
    for name in (
        "lossless_share",
        "answer",
        "layer",
        "power",
        "closeness",
        "diameter",
        "number",
        "score_per_cost",
    ):
        assert not counts_errors(name), name
