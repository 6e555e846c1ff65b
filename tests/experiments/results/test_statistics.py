"""The one bootstrap: against a naive one, at its limits; paired differences against scipy's test,
and of runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from run_folders import write_run, write_selector_run
from scipy.stats import norm, permutation_test, t, ttest_1samp

from knobwise.experiments.compare.paired import differences
from knobwise.experiments.compare.runs import read_runs
from knobwise.experiments.results import statistics
from knobwise.experiments.results.decisions import read_decisions, write_decisions
from knobwise.experiments.results.statistics import (
    Difference,
    ends_of,
    holm,
    mean_interval,
    mean_intervals,
    paired,
    resampled_means,
    score_intervals,
)


def gap(score: np.ndarray, low: np.ndarray, high: np.ndarray) -> list[float]:
    ends: list[float] = score_intervals([(score, low, high)])[0]["gap_closed_ci95"]
    return ends


def test_means_of_draws_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [np.random.default_rng(7).random((seeds, 5)) for seeds in (3, 1, 3)]
    generator = np.random.default_rng(4)
    samples = generator.multinomial(5, [0.2] * 5, 6)
    state = generator.bit_generator.state
    expected = []
    for array in values:
        generator.bit_generator.state = state
        seeds = generator.multinomial(len(array), [1 / len(array)] * len(array), 6)
        draws = zip(samples, seeds, strict=True)
        expected.append([np.repeat(np.repeat(array, s, 0), n, 1).mean() for n, s in draws])
    np.testing.assert_allclose(resampled_means(values, draws=6, seed=4), np.array(expected).T)
    monkeypatch.setattr(statistics, "BLOCK", 10)  # two draws at a time
    np.testing.assert_allclose(resampled_means(values, draws=6, seed=4), np.array(expected).T)


def test_intervals_hold_the_mean_and_shrink_with_the_samples() -> None:
    draws, widths = np.random.default_rng(0), []
    for n in (100, 1600):
        static = draws.random(n) * 0.5
        policy = np.tile(static + 0.1 + 0.05 * draws.standard_normal(n), (3, 1))
        (found,) = score_intervals([(policy, static, static + 0.4)])
        low, high = found["gap_closed_ci95"]
        assert low < 0.25 < high or abs(low - 0.25) < 0.03
        widths.append(found["score_ci95"][1] - found["score_ci95"][0])
    assert widths[0] / widths[1] == pytest.approx(4, rel=0.35)


def test_seeds_are_drawn_too() -> None:
    static, best = np.zeros(50), np.ones(50)
    low, high = gap(np.array([0.2, 0.5, 0.8])[:, None] * np.ones((3, 50)), static, best)
    assert low < 0.35
    assert high > 0.65
    assert gap(np.full((3, 50), 0.5), static, best) == pytest.approx([0.5, 0.5])


def test_splits_of_the_same_samples_are_no_more_samples() -> None:
    policy = np.random.default_rng(0).random((2, 50))
    thrice = np.stack([np.repeat(range(3), 50), np.tile(range(50), 3)])
    single, repeated = (
        resampled_means([policy]),
        resampled_means([np.tile(policy, 3)], splits=thrice),
    )
    np.testing.assert_allclose(repeated, single, atol=1e-12)
    assert np.array_equal(resampled_means([policy], splits=thrice[:, :50]), single)


def test_splits_are_drawn_too() -> None:
    """Where all samples of a split get the same, only the draws of splits matter; each has samples
    of its own."""
    means = np.array([0.1, 0.2, 0.9])
    splits = np.stack([np.repeat(range(3), 2000), np.arange(6000)])
    drawn = resampled_means([np.repeat(means, 2000)], splits=splits)[:, 0]
    wanted = np.random.default_rng(1).choice(means, (20_000, 3)).mean(1)
    assert drawn.mean() == pytest.approx(means.mean(), abs=0.02)
    np.testing.assert_allclose(
        np.quantile(drawn, [0.025, 0.5, 0.975]), np.quantile(wanted, [0.025, 0.5, 0.975]), atol=0.03
    )
    few = np.array([[0, 1], [0, 1]])  # a draw may hold no sample of the splits that it holds
    drawn = resampled_means([[0.0, 1.0]], splits=few)
    assert np.isnan(drawn).any()
    assert ends_of(drawn) == [[0.0, 1.0]]


def test_several_intervals_come_from_the_same_draws() -> None:
    values = torch.rand(2, 3, 50, generator=torch.Generator().manual_seed(0))
    both = mean_intervals([*values, values[0] + 0.25])
    for array, (low, high) in zip(values, both, strict=False):
        assert mean_interval(array) == pytest.approx([low, high])
        assert low < array.mean() < high
        (found,) = score_intervals([(array, np.zeros(50), np.zeros(50), array + 1)])
        assert found["score_ci95"] == pytest.approx([low, high])
        assert found["differences_ci95"][0] == pytest.approx([low + 1, high + 1])
    assert both[2] == pytest.approx([end + 0.25 for end in both[0]])
    assert mean_intervals([]) == []


def test_the_interval_of_a_difference_is_paired() -> None:
    other = np.arange(200.0)
    assert mean_interval(other + 0.25 - other) == pytest.approx([0.25, 0.25])
    # a mean of 200 values 0 or 1: .5 ± 1.96 · .5 / √200
    assert mean_interval(np.repeat([0.0, 1.0], 100)) == pytest.approx([0.43, 0.57], abs=0.01)


def test_a_mean_lies_among_its_values_in_spite_of_rounding() -> None:
    assert [mean_interval(np.ones((3, n))) for n in range(1, 60)] == [[1, 1]] * 59


def test_where_nothing_can_be_gained_nothing_was_closed() -> None:
    static = np.random.default_rng(0).random(20)
    assert gap(np.tile(static, (2, 1)), static, static) == [0, 0]
    best = static.copy()
    best[0] += 0.5  # in about a third of the draws the only sample with a gain is missing
    assert gap(best[None], static, best) == pytest.approx([1, 1])


def test_a_difference_is_read_from_a_row() -> None:
    row = {"policy": "rce", "against": "sft", "shots": 2, "difference": 0.1, "ci95": [0.05, 0.2]}
    one = Difference.from_row(row)
    assert (one.policy, one.against_policy, one.place, one.ci95, one.p) == (
        "rce",
        "sft",
        2,
        (0.05, 0.2),
        None,
    )
    assert one.sign == 1
    assert not one.nothing


# -- paired differences ----------------------------------------------------------------------------


LEARNED = ("controller", "controller")


def against(
    first: Path,
    second: Path,
    policies: tuple[str, str] = LEARNED,
    places: Sequence[float] = (10.0, 20.0),
):  # type: ignore[no-untyped-def]
    return differences(*read_runs([first, second]), policies, places)


def test_the_probability_is_that_of_scipys_sign_flips() -> None:
    draws = np.random.default_rng(3)
    apart = draws.normal(0.15, 1, (80, 3)).cumsum(1)
    ((*_, p0), (*_, p1), (*_, p2)) = paired(apart[None], np.zeros((1, 80, 3)), True)
    for column, p in zip(apart.T, (p0, p1, p2), strict=True):
        wanted = permutation_test(
            (column,),
            np.mean,
            permutation_type="samples",
            vectorized=True,
            n_resamples=20_000,
            rng=0,
        ).pvalue
        assert p == pytest.approx(wanted, abs=0.015)
    assert p0 != p1


def test_the_interval_of_a_normal_difference_is_the_one_of_the_textbook() -> None:
    draws = np.random.default_rng(0)
    apart = draws.normal(0.2, 1, (1, 400, 1))
    noise = draws.normal(
        0, 5, (1, 400, 1)
    )  # of the samples, the same for both: pairing takes it away
    ((gap, low, high, p),) = paired(apart + noise, noise, True)
    half = norm.ppf(0.975) * apart.std() / 20
    assert gap == pytest.approx(apart.mean())
    assert (low, high) == pytest.approx((apart.mean() - half, apart.mean() + half), abs=0.02)
    assert p < 0.01


def test_other_seeds_are_drawn_apart_and_samples_together() -> None:
    # the same numbers, said to be of other seeds: what samples share falls out, what seeds differ
    # in does not
    shared = np.random.default_rng(0).normal(0, 5, (1, 200, 1)) * np.ones((6, 1, 1))
    of_seeds = np.linspace(-1, 1, 6)[:, None, None]
    ((gap, low, high, _),) = paired(shared + of_seeds, shared + of_seeds, False)
    se = (2 * of_seeds.var(ddof=1) / 6) ** 0.5
    assert gap == pytest.approx(0)
    assert (low, high) == pytest.approx((-t.ppf(0.975, 10) * se, t.ppf(0.975, 10) * se), rel=0.1)


def test_seeds_that_differ_widen_the_interval_and_common_ones_are_drawn_together() -> None:
    of_seeds = np.array([0.0, 0.4, 0.8])[:, None, None] * np.ones((3, 50, 1))
    ((gap, low, high, _),) = paired(of_seeds + 0.1, of_seeds, True)
    assert (gap, low, high) == pytest.approx((0.1, 0.1, 0.1))
    ((gap, low, high, _),) = paired(of_seeds + 0.1, of_seeds, False)
    assert gap == pytest.approx(0.1)
    assert low < -0.3
    assert high > 0.5
    ((gap, *_),) = paired(of_seeds[:2], of_seeds, False)
    assert gap == pytest.approx(-0.2)


def test_nothing_differs_from_itself() -> None:
    values = np.random.default_rng(0).random((2, 30, 4))
    assert paired(values, values, True) == [(0, 0, 0, 1)] * 4


def difference(p: float, ci95: tuple[float, float] = (0.05, 0.2)) -> Difference:
    return Difference("b", "a", "x", "x", None, 10, 0.1, ci95, p)


def test_holm_by_hand() -> None:
    found = [one.p_holm for one in holm([difference(p) for p in (0.01, 0.04, 0.03, 0.005)])]
    assert found == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(1e-4, 1), min_size=1, max_size=20))
def test_holm_never_lowers_a_probability_and_keeps_their_order(values: list[float]) -> None:
    found = [one.p_holm for one in holm([difference(p) for p in values])]
    assert all(p <= q <= 1 for p, q in zip(values, found, strict=True))
    order = np.argsort(values, kind="stable")
    assert (np.diff(np.array(found)[order]) >= 0).all()


def test_better_is_said_only_where_interval_and_probability_agree() -> None:
    cases = {difference(0.01): 1, difference(0.06): 0}
    cases |= {difference(0.001, (-0.01, 0.2)): 0, difference(0.001, (-0.2, -0.01)): -1}
    assert [holm([case])[0].sign for case in cases] == list(cases.values())


def test_the_mean_comes_first_then_each_budget(tmp_path: Path) -> None:
    first, second = read_runs([write_run(tmp_path / "a"), write_run(tmp_path / "b", gain=0.3)])
    found, note = differences(first, second, LEARNED, [10.0, 20.0])
    assert note == ""
    assert [one.place for one in found] == [None, 10.0, 20.0]
    assert found[0].difference == pytest.approx((found[1].difference + found[2].difference) / 2)
    means = [run.row("controller", None)["utility"] for run in (first, second)]
    assert found[0].difference == pytest.approx(means[1] - means[0])
    assert all(one.samples == 60 and one.ci95[0] < one.difference < one.ci95[1] for one in found)
    assert found[0].p < 0.01
    back = differences(second, first, LEARNED, [10.0, 20.0])[0]
    assert [one.difference for one in back] == pytest.approx([-one.difference for one in found])
    (_, only) = differences(first, second, LEARNED, [20.0])[0]
    assert only.ci95 == pytest.approx(found[2].ci95)
    assert only == replace(found[2], ci95=only.ci95)


def test_runs_without_a_difference_are_told_apart_no_more_often_than_said() -> None:
    draws = np.random.default_rng(5)
    p = [paired(*draws.random((2, 1, 40, 1)), True)[0][3] for _ in range(200)]
    assert np.mean(np.array(p) < 0.05) <= 0.09
    assert np.mean(np.array(p) < 0.5) == pytest.approx(0.5, abs=0.12)


def null_runs(
    draws: np.random.Generator, seeds: tuple[int, int], spread: float
) -> list[np.ndarray]:
    """Two runs without a difference but chance: samples are as hard for both, seeds differ, each
    errs on its own."""
    shared = draws.normal(0, 1, (1, 60, 1))
    return [
        shared + draws.normal(0, spread, (s, 1, 1)) + draws.normal(0, 0.3, (s, 60, 1))
        for s in seeds
    ]


@pytest.mark.parametrize(
    ("seeds", "same"), [((5, 5), True), ((5, 5), False), ((5, 3), False), ((3, 3), True)]
)
def test_few_seeds_that_differ_much_do_not_pass_for_a_difference(
    seeds: tuple[int, int], same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("knobwise.experiments.results.statistics.DRAWS", 500)
    monkeypatch.setattr("knobwise.experiments.results.statistics.FLIPS", 199)
    # of what chance makes here, seeds make nearly all: without widening one in seven would be told
    # apart
    draws, missed, found = np.random.default_rng(7), 0, 0
    for number in range(150):
        ((_, low, high, p),) = paired(*null_runs(draws, seeds, 0.3), same, seed=number)
        missed += not low <= 0 <= high
        found += p < 0.05
    assert missed <= 17  # 5 % are 7.5, and 17 or more come once in a thousand
    assert found <= 17


def test_five_seeds_that_are_all_the_difference_have_students_interval() -> None:
    of_seeds = np.array([0.1, 0.3, 0.2, 0.6, 0.4])
    ((gap, low, high, p),) = paired(
        of_seeds[:, None, None] * np.ones((5, 400, 1)), np.zeros((5, 400, 1)), True
    )
    half = t.ppf(0.975, 4) * of_seeds.std(ddof=1) / 5**0.5
    assert gap == pytest.approx(0.32)
    assert (low, high) == pytest.approx((0.32 - half, 0.32 + half), abs=0.03)
    assert p == pytest.approx(ttest_1samp(of_seeds, 0).pvalue, rel=0.05)


def test_the_same_sample_id_in_two_data_sets_is_two_samples(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / "a"), write_run(tmp_path / "b", gain=0.3)]
    whole = against(*folders)[0]
    for folder in folders:  # the second half of the samples bears the names of the first
        rank = pl.col("sample_id").str.slice(1).cast(pl.Int64)
        frame = read_decisions(folder).with_columns(
            dataset=pl.when(rank < 30).then(pl.lit("one")).otherwise(pl.lit("two")),
            sample_id=(rank % 30).cast(pl.String),
        )
        (folder / "decisions.parquet").unlink()
        write_decisions(folder, frame)
    found = against(*folders)[0]
    assert [one.samples for one in found] == [60] * 3
    assert [one.difference for one in found] == pytest.approx([one.difference for one in whole])


def test_what_cannot_be_paired_is_not_tested_and_it_is_said_why(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a")

    def note(**given: object) -> str:
        place = tmp_path / f"b{len(list(tmp_path.iterdir()))}"
        found, words = against(first, write_run(place, **given))  # type: ignore[arg-type]
        assert found == []
        return words

    assert "has no decisions.parquet, so it is shown but not tested" in note(decisions=False)
    assert "was judged on other measurements than" in note(
        digest="sha256:other", samples=range(1, 61)
    )
    assert "no test sample in common" in note(samples=range(100, 160))
    assert "only 2 test samples in common" in note(samples=range(58, 118))
    assert "judged at none of the budgets" in note(budgets=(11.0, 21.0))
    # other features of the same measurements are no obstacle
    found, words = against(first, write_run(tmp_path / "other", digest="sha256:other", gain=0.2))
    assert (len(found), words) == (3, "")


def test_what_is_restricted_is_said(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a")
    other = write_run(tmp_path / "b", samples=range(20, 80), budgets=(10.0, 30.0), seeds=(0, 1, 2))
    found, note = against(first, other)
    assert [one.place for one in found] == [None, 10.0]
    assert {one.samples for one in found} == {40}
    assert "tested on the 40 samples that both were judged on (a: 60, b: 60)" in note
    assert "not judged at 1 of the budgets" in note
    assert "trained with other seeds" in note


def test_under_mean_budgets_latency_is_charged_what_it_brings_the_static_mix(
    tmp_path: Path,
) -> None:
    first = write_run(tmp_path / "a", sense="mean")
    free, dear = (
        write_run(tmp_path / "b", sense="mean"),
        write_run(tmp_path / "c", sense="mean", spent=5.0),
    )
    assert [one.difference for one in against(first, free)[0]] == [0, 0, 0]
    found = against(first, dear)[0]
    # the hull rises by 0.8 in 40 ms
    assert [one.difference for one in found] == pytest.approx([-0.1] * 3)


def test_selectors_are_compared_at_each_number_of_shots_where_answers_are_known(
    tmp_path: Path,
) -> None:
    first = write_selector_run(tmp_path / "a", wrong=0.6)
    second = write_selector_run(tmp_path / "b", wrong=0.3, form="grpo_live", unknown=7)
    found, note = against(first, second, ("grpo_recorded", "grpo_live"), [1.0, 2.0])
    assert note == ""
    assert [(one.place, one.samples) for one in found] == [(1.0, 60), (2.0, 53)]
    assert found[0].difference == pytest.approx(0.3, abs=0.08)
    assert (found[0].policy, found[0].against_policy) == ("grpo_live", "grpo_recorded")
    other = write_selector_run(tmp_path / "c", digest="sha256:else")
    assert "was judged on other measurements" in against(first, other, ("sft", "sft"), [2.0])[1]
