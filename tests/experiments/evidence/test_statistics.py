"""The one bootstrap: against a naive one, at its limits; paired differences against scipy's tests,
and of runs."""

import numpy as np
import polars as pl
import pytest
from commands import read_json
from numpy.testing import assert_allclose
from run_folders import write_run, write_selector_run
from scipy.stats import norm, permutation_test, t, ttest_1samp

from knobwise.common.words import format_count
from knobwise.experiments.evidence import statistics
from knobwise.experiments.evidence.decisions import read_decisions, write_decisions
from knobwise.experiments.evidence.results import write_results
from knobwise.experiments.evidence.statistics import (
    Difference,
    corrected,
    ends_of,
    holm,
    mean_interval,
    mean_intervals,
    paired_differences,
    resampled_means,
)
from knobwise.experiments.report.paired import differences
from knobwise.experiments.report.runs import read_runs
from knobwise.experiments.report.sentences import Sentence
from knobwise.experiments.report.words import difference_cell, shown_by, span


def test_means_of_draws_by_hand(monkeypatch):
    monkeypatch.setattr(statistics, "DRAWS", 6)
    values = [np.random.default_rng(7).random((seeds, 5)) for seeds in (3, 1, 3)]
    expected = []
    for array in values:
        generator = np.random.default_rng(0)
        draws = zip(
            generator.multinomial(5, [0.2] * 5, 6),
            generator.multinomial(len(array), [1 / len(array)] * len(array), 6),
            strict=True,
        )
        expected.append([np.repeat(np.repeat(array, s, 0), n, 1).mean() for n, s in draws])
    for block in (statistics.BLOCK, 10):  # all draws at a time, and two
        monkeypatch.setattr(statistics, "BLOCK", block)
        assert_allclose(resampled_means(values), np.array(expected).T)


def test_splits_of_the_same_samples_are_no_more_samples():
    policy = np.random.default_rng(0).random((2, 50))
    splits = np.indices((3, 50)).reshape(2, -1)
    single = resampled_means([policy])
    assert_allclose(resampled_means([np.tile(policy, 3)], splits=splits), single, atol=1e-12)
    assert np.array_equal(resampled_means([policy], splits=splits[:, :50]), single)


def test_splits_are_drawn_too():
    """Where all samples of a split get the same, only the draws of splits matter; each has samples
    of its own."""
    means = np.array([0.1, 0.2, 0.9])
    each = np.repeat(range(3), 2000)
    drawn = resampled_means([means[each]], splits=np.stack([each, np.arange(6000)]))[:, 0]
    wanted = np.random.default_rng(1).choice(means, (20_000, 3)).mean(1)
    drawn, wanted = (np.quantile(each, [0.025, 0.5, 0.975]) for each in (drawn, wanted))
    assert_allclose(drawn, wanted, atol=0.03)
    few = np.array([[0, 1], [0, 1]])  # a draw may hold no sample of the splits that it holds
    drawn = resampled_means([[0.0, 1.0]], splits=few)
    assert np.isnan(drawn).any()
    assert ends_of(drawn) == [[0.0, 1.0]]


def test_several_intervals_come_from_the_same_draws():
    values = np.random.default_rng(0).random((3, 50))
    ends, shifted = np.array(mean_intervals([values, values + 1]))
    assert mean_interval(values) == pytest.approx(ends)
    assert shifted == pytest.approx(ends + 1)
    assert mean_intervals([]) == []


def test_intervals_by_the_textbook():
    # a mean of 200 values 0 or 1: .5 ± 1.96 · .5 / √200
    assert mean_interval(np.repeat([0.0, 1.0], 100)) == pytest.approx([0.43, 0.57], abs=0.01)
    # a mean lies among its values in spite of rounding
    assert [mean_interval(np.ones((3, n))) for n in range(1, 60)] == [[1, 1]] * 59


def test_a_few_seeds_widen_an_interval():
    # two seeds that differ by 1: the mean of a draw is 0, .5 or 1, with variance .125; they
    # estimate a variance of .25, of one degree of freedom
    apart = np.repeat([[0.0], [1.0]], 50, 1)
    half = 0.5 * np.sqrt(0.25 / 0.125) * 12.7062 / 1.95996
    assert mean_interval(apart) == pytest.approx([0.5 - half, 0.5 + half], rel=0.1)
    # one seed tells nothing of others, nor do seeds that are equal
    values = np.random.default_rng(0).random(50)
    assert mean_interval([values] * 2) == pytest.approx(mean_interval(values))


def test_samples_of_a_cluster_are_drawn_together():
    values = np.random.default_rng(0).random(50)
    copies = np.repeat(values, 3)
    clusters = np.repeat(np.arange(50), 3)
    assert mean_interval(copies, clusters) == pytest.approx(mean_interval(values))
    low, high = mean_interval(copies)
    assert high - low < 0.7 * np.ptp(mean_interval(values))


# -- paired differences ----------------------------------------------------------------------------


def test_the_probability_is_that_of_scipys_sign_flips():
    apart = np.random.default_rng(3).normal(0.15, 1, (1, 80, 3)).cumsum(2)
    found = [p for *_, p in paired_differences(apart, 0 * apart, True)]
    options = {"permutation_type": "samples", "vectorized": True, "n_resamples": 20_000}
    wanted = permutation_test(apart, np.mean, rng=0, axis=0, **options).pvalue
    assert found == pytest.approx(wanted, abs=0.015)


def test_a_difference_that_is_nan_has_no_small_p():
    scores = np.random.default_rng(0).normal(size=(1, 40, 2))
    scores[0, 3, 1] = np.nan
    (_, (gap, *_, p)) = paired_differences(scores, 0 * scores.copy(), True)
    assert np.isnan(gap)
    assert p == 1


def test_rounding_of_scores_breaks_no_tie():
    scores = np.float32([0.9, 0.8, 0.3, 0.6, 0.7, 0.4]).astype(float)
    about = scores[None, :, None], np.full((1, 6, 1), 0.5)
    ((gap, _, _, p),) = paired_differences(*about, same_seeds=True)
    assert gap == pytest.approx(0.7 / 6)
    # 22 of the 64 signs give a mean at least as large, 10 of them the same
    assert p == pytest.approx(22 / 64, abs=0.02)


def test_the_interval_of_a_normal_difference_is_the_one_of_the_textbook():
    draws = np.random.default_rng(0)
    apart = draws.normal(0.2, 1, (1, 400, 1))
    noise = draws.normal(0, 5, (1, 400, 1))  # the same for both: pairing takes it away
    ((gap, *ends, p),) = paired_differences(apart + noise, noise, True)
    assert gap == pytest.approx(apart.mean())
    assert ends == pytest.approx(norm.interval(0.95, apart.mean(), apart.std() / 20), abs=0.02)
    assert p < 0.01


def test_other_seeds_are_drawn_apart_and_samples_together():
    # the same numbers, said to be of other seeds: what samples share falls out, what seeds differ
    # in does not
    of_seeds = np.linspace(-1, 1, 6)[:, None, None]
    values = np.random.default_rng(0).normal(0, 5, (1, 200, 1)) + of_seeds
    ((gap, *ends, _),) = paired_differences(values, values, False)
    half = t.ppf(0.975, 10) * (2 * of_seeds.var(ddof=1) / 6) ** 0.5
    assert gap == pytest.approx(0)
    assert ends == pytest.approx([-half, half], rel=0.1)
    # common seeds are drawn together
    ((*together, _),) = paired_differences(values + 0.1, values, True)
    assert together == pytest.approx([0.1, 0.1, 0.1])


def test_five_seeds_that_are_all_the_difference_have_students_interval():
    of_seeds = np.array([0.1, 0.3, 0.2, 0.6, 0.4])
    nothing = np.zeros((5, 400, 1))
    ((gap, *ends, p),) = paired_differences(nothing + of_seeds[:, None, None], nothing, True)
    student = ttest_1samp(of_seeds, 0)
    assert gap == pytest.approx(0.32)
    assert ends == pytest.approx(student.confidence_interval(0.95), abs=0.03)
    assert p == pytest.approx(student.pvalue, rel=0.05)


@pytest.mark.parametrize(
    ("seeds", "same"), [((5, 5), True), ((5, 5), False), ((5, 3), False), ((3, 3), True)]
)
def test_few_seeds_that_differ_much_do_not_pass_for_a_difference(seeds, same, monkeypatch):
    """Two runs without a difference but chance: samples are as hard for both, seeds differ, each
    errs on its own. Without widening, one in seven would be told apart."""
    monkeypatch.setattr(statistics, "DRAWS", 500)
    monkeypatch.setattr(statistics, "FLIPS", 199)
    draws, wrong = np.random.default_rng(7), np.zeros(2)
    for _ in range(150):
        shared = draws.normal(0, 1, (1, 60, 1))
        sides = []
        for count in seeds:
            of_seeds = draws.normal(0, 0.3, (count, 1, 1))
            sides.append(shared + of_seeds + draws.normal(0, 0.3, (count, 60, 1)))
        ((_, low, high, p),) = paired_differences(*sides, same)
        wrong += (not low <= 0 <= high, p < 0.05)
    assert wrong.max() <= 17  # 5 % are 7.5, and 17 or more come once in a thousand


def test_draws_of_clusters_are_those_of_one_sample_each():
    values, other = np.random.default_rng(0).normal(size=(2, 1, 30, 3))
    # each sample three times: a draw of clusters has all copies or none
    clusters = np.tile(np.arange(30), 3)
    copies = [np.tile(each, (1, 3, 1)) for each in (values, other)]
    drawn = resampled_means([copies[0][..., 0]], splits=np.stack([0 * clusters, clusters]))
    assert_allclose(drawn, resampled_means([values[..., 0]]))
    alone = np.array(paired_differences(values, other, True))
    assert_allclose(np.array(paired_differences(*copies, True, clusters)), alone, rtol=1e-9)
    # as if all copies were samples, the interval is narrower by √3
    wide, narrow = (
        each[:, 2] - each[:, 1] for each in (alone, np.array(paired_differences(*copies, True)))
    )
    assert_allclose(wide / narrow, 3**0.5, rtol=0.1)


def difference(p, ci95=(0.05, 0.2)):
    return Difference("b", "a", "x", "x", None, 10, 0.1, ci95, p)


def test_holm_by_hand():
    assert corrected([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    found = holm([difference(p) for p in (0.01, 0.04, 0.03, 0.005)])
    assert [one.p_holm for one in found] == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []


def test_better_is_said_only_where_interval_and_probability_agree():
    for p, ends, sign in (
        (0.01, (0.05, 0.2), 1),
        (0.06, (0.05, 0.2), 0),
        (0.001, (-0.01, 0.2), 0),
        (0.001, (-0.2, -0.01), -1),
    ):
        assert holm([difference(p, ends)])[0].sign == sign


def test_words_agree_with_interval_and_probability_also_at_the_borders():
    for p, ends, word in (
        (0.01, (0.05, 0.2), "better"),
        (0.01, (-0.2, -0.05), "worse"),
        (0.06, (0.05, 0.2), "perhaps better"),
        (0.06, (-0.2, -0.05), "perhaps worse"),
        (0.05, (1e-5, 0.2), "perhaps better"),
        (0.049, (1e-5, 0.2), "better"),
        (0.001, (0.0, 0.2), "no difference shown"),
        (0.001, (-0.01, 0.2), "no difference shown"),
    ):
        assert shown_by(holm([difference(p, ends)])[0]) == word


def test_an_interval_that_excludes_0_is_written_without_0():
    assert span([0.0004, 0.021]) == " [0.04, 2.10]"
    assert span([-0.021, -0.00002]) == " [-2.100, -0.002]"
    assert span([0.0, 0.021]) == " [0.0, 2.1]"
    assert span([-0.0001, 0.021]) == " [0.0, 2.1]"
    assert span([0.03, 0.04], ".0%") == " [3%, 4%]"
    row = {"difference": 0.01, "ci95": [0.0004, 0.021]}
    assert difference_cell(row) == "+1.0\n[+0.04, +2.10]"
    assert difference_cell({"difference": 0.01, "ci95": [None, None]}) == "+1.0"


@pytest.mark.parametrize("count", [0, 1, 2, 1000])
def test_one_thing_is_singular(count):
    words = {0: "0 requests", 1: "1 request", 2: "2 requests", 1000: "1,000 requests"}
    assert format_count(count, "request") == words[count]


# -- differences of runs ---------------------------------------------------------------------------


def against(*runs, policies=("controller", "controller"), conditions=(10.0, 20.0)):
    return differences(*read_runs(runs), policies, conditions)


def test_the_mean_comes_first_then_each_budget(tmp_path):
    folders = [write_run(tmp_path / "a"), write_run(tmp_path / "b", gain=0.3)]
    found, note = against(*folders)
    assert note is None
    assert [(one.condition, one.samples) for one in found] == [(None, 60), (10.0, 60), (20.0, 60)]
    runs = read_runs(folders)
    for one in found:
        first, second = (run.row("controller", one.condition)["utility"] for run in runs)
        assert one.difference == pytest.approx(second - first)
        assert one.ci95[0] < one.difference < one.ci95[1]
    _, only = against(*folders, conditions=(20.0,))[0]
    assert (only.difference, only.ci95) == (found[2].difference, pytest.approx(found[2].ci95))
    # a name in two data sets is two samples: the second half bears the names of the first
    rank = pl.col("sample").str.slice(1).cast(pl.Int64)
    for folder in folders:
        names = {"dataset": rank < 30, "sample": rank % 30}
        write_decisions(folder, read_decisions(folder).with_columns(**names))
        write_results(folder, read_json(folder / "results.json"))
    for one, renamed in zip(found, against(*folders)[0], strict=True):
        assert renamed.samples == 60
        assert renamed.difference == pytest.approx(one.difference)


@pytest.mark.parametrize(
    ("settings", "name", "numbers"),
    [
        ({"digest": "sha256:other", "samples": range(1, 61)}, "other_measurements", {}),
        ({"samples": range(100, 160)}, "little_in_common", {"samples": 0}),
        ({"samples": range(58, 118)}, "little_in_common", {"samples": 2}),
        ({"budgets": (11.0, 21.0)}, "little_in_common", {"samples": 60, "count": 0}),
    ],
)
def test_what_cannot_be_paired_is_not_tested_and_it_is_said_why(tmp_path, settings, name, numbers):
    found, note = against(write_run(tmp_path / "a"), write_run(tmp_path / "b", **settings))
    assert found == []
    assert note.name == name
    assert numbers.items() <= note.fields.items()


def test_what_is_restricted_is_said(tmp_path):
    first = write_run(tmp_path / "a")
    other = write_run(tmp_path / "b", samples=range(20, 80), budgets=(10.0, 30.0), seeds=(0, 1, 2))
    found, note = against(first, other)
    assert [(one.condition, one.samples) for one in found] == [(None, 40), (10.0, 40)]
    counts = {"samples": "40", "reference": "a", "judged": "60", "run": "b", "judged_of_run": "60"}
    restrictions = (
        Sentence("shared_samples", **counts),
        Sentence("conditions_left_out", count=1, conditions="budgets"),
        Sentence("other_seeds"),
    )
    assert note.fields["parts"] == "; ".join(map(str, restrictions))
    # other features of the same measurements are no obstacle
    found, note = against(first, write_run(tmp_path / "c", digest="sha256:other", gain=0.2))
    assert (len(found), note) == (3, None)


def test_under_mean_budgets_latency_is_charged_what_it_brings_the_static_mix(tmp_path):
    # the hull rises by 0.8 in 40 ms
    first = write_run(tmp_path / "a", constraint="mean")
    for spent, change in ((0.0, 0.0), (5.0, -0.1)):
        other = write_run(tmp_path / f"{spent}", constraint="mean", spent=spent)
        assert [one.difference for one in against(first, other)[0]] == pytest.approx([change] * 3)


def test_under_mean_budgets_equal_choices_are_equal_whatever_decisions_took(tmp_path):
    folders = [write_run(tmp_path / name, constraint="mean") for name in "ab"]
    for folder, us in zip(folders, (80.0, 90.0), strict=True):
        decides = pl.col("policy") == "controller"
        charged = pl.col("latency_ms") + pl.when(decides).then(us / 1e3).otherwise(0.0)
        timed = pl.when(decides).then(us).alias("decision_us")
        write_decisions(folder, read_decisions(folder).with_columns(charged, timed))
        write_results(folder, read_json(folder / "results.json"))
    tested, _ = against(*folders)
    assert [each.difference for each in tested] == pytest.approx([0.0] * 3, abs=1e-6)
    assert {(each.sign, each.p_holm) for each in holm(tested)} == {(0, 1.0)}


def test_selectors_are_compared_at_each_number_of_shots_where_answers_are_known(tmp_path):
    first = write_selector_run(tmp_path / "a", wrong=0.6)
    second = write_selector_run(tmp_path / "b", wrong=0.3, form="grpo_live", unknown=7)
    policies = ("grpo_recorded", "grpo_live")
    found, note = against(first, second, policies=policies, conditions=(1.0, 2.0))
    assert note is None
    assert [(one.condition, one.samples) for one in found] == [(1.0, 60), (2.0, 53)]
    assert found[0].difference == pytest.approx(0.3, abs=0.08)
    assert (found[0].against_policy, found[0].policy) == policies
    other = write_selector_run(tmp_path / "c", digest="sha256:else")
    assert against(first, other, policies=("sft", "sft"))[1].name == "other_measurements"
