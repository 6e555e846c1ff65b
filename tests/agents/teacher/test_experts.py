"""Against scikit-learn on the same folds, on tables where features tell, tell nothing, and are not
there."""

import functools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import close, otherwise, small_table, table_of, two_kinds
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import Ridge

from knobwise.agents.controller.features import FeatureNormaliser
from knobwise.agents.teacher import experts
from knobwise.agents.teacher.experts import SPREAD_FACTORS, Expert, Experts, MeasuredRows
from knobwise.agents.teacher.outcomes import Prediction, pick
from knobwise.agents.teacher.regressors import FAMILIES, Trees
from knobwise.agents.teacher.targets import Targets
from knobwise.envs.bandit.budgets import default_budgets
from knobwise.envs.tables.splits import folds_of

NAN = math.nan
FAST = ("ridge", "knn")
BOTH = torch.arange(2)


HOLED = small_table(90, holes=0.3)
EIGHTY = torch.arange(80)
BUDGETS = default_budgets(HOLED)


def fit(table, rows, names=FAMILIES):
    """Return what is fitted of each family, and the inputs that it is fitted on."""
    experts = Experts.fit(table, rows, BUDGETS, tuple(names), seed=0)
    x = FeatureNormaliser.fit(table, rows).of_rows(table, rows)
    return {fitted.expert.name: fitted for fitted in experts.fitted}, x


every_family = functools.cache(lambda: fit(HOLED, EIGHTY))


# -- what is measured ------------------------------------------------------------------------------


def test_utility_of_scores_by_hand():
    latency = torch.tensor([[9.0, 3.0]]).expand(2, 2)
    measured = MeasuredRows.from_table(
        table_of([[1.0, 0.5], [0.0, 1.0]], latency), BOTH, torch.tensor([5.0, 10.0])
    )
    first, second = torch.eye(2)[:, None].expand(2, 2, 2)
    # the first always: late at 5, ½ at 10; the second always: ¾ at both; among equals the faster
    equal = 0 * first
    for scores, utility in (
        ((first, first), 0.25),
        ((second, first), 0.625),
        ((equal, equal), 0.75),
    ):
        assert measured.utility(scores, latency) == pytest.approx(utility)
    # scores where nothing was profiled are never taken
    table = table_of([[1.0, NAN], [0.5, 0.25]], [[3.0, NAN], [3.0, 3.0]])
    measured = MeasuredRows.from_table(table, BOTH, torch.tensor([5.0]))
    assert measured.utility([second], latency) == pytest.approx((1 + 0.25) / 2)


def test_residual_spread_by_hand():
    latency = [[math.e, math.e**3, NAN], [math.e**3, math.e**2, NAN], [1.0] * 3]
    table = table_of([[1.0, 1.0, NAN]] * 2 + [[1.0] * 3], latency)
    measured = MeasuredRows.from_table(table, BOTH, torch.ones(1))
    # against ln ms = 1: squares 0 4, 4 1; their mean 9/4 stands for five more cells of each
    result = measured.residual_spread(torch.ones(2, 3)).square()
    close(result, [(4 + 5 * 2.25) / 7, (5 + 5 * 2.25) / 7, 2.25])


# -- fitted ----------------------------------------------------------------------------------------


def test_out_of_fold_and_final_are_those_of_scikit_learn_on_the_same_folds():
    table, rows = small_table(60), torch.arange(5, 60)
    fitted, x = fit(table, rows, ["ridge"])
    expert, out_of_fold, _ = fitted["ridge"]
    outcomes = table.accuracy[rows].numpy(), table.latency_ms[rows].log().numpy()
    chosen = [float(part.split(" ")[1]) for part in expert.settings.split(", ")]
    parts = zip(chosen, outcomes, out_of_fold[:2], expert(x)[:2], strict=True)
    for best, y, result, final in parts:
        held_out = {}
        for share in FAMILIES["ridge"].settings:
            held_out[share] = predicted = np.zeros_like(y)
            for rest, hold in folds_of(table, rows, 0):
                predicted[hold] = (
                    Ridge(alpha=share * len(rest)).fit(x[rest], y[rest]).predict(x[hold])
                )
        errors = {share: ((y - each) ** 2).sum() for share, each in held_out.items()}
        assert min(errors, key=errors.get) == best
        np.testing.assert_allclose(result, held_out[best], atol=1e-4)
        whole = Ridge(alpha=best * len(x)).fit(x, y).predict(x)
        np.testing.assert_allclose(final, whole, atol=1e-4)


@torch.no_grad()
def test_an_expert_of_a_fold_predicted_what_was_held_out_of_it():
    fitted, x = every_family()
    folds = [hold for _, hold in folds_of(HOLED, EIGHTY, 0)]
    assert len(folds) == 5
    for name, (final, out_of_fold, of_folds) in fitted.items():
        for expert, hold in zip(of_folds, folds, strict=True):
            predicted = expert(x[hold])
            close(predicted.accuracy, out_of_fold.accuracy[hold])
            close(predicted.log_latency, out_of_fold.log_latency[hold])
            assert torch.equal(expert.spread, final.spread)
            assert (expert.name, expert.settings) == (name, final.settings)
        if isinstance(final.accuracy, Trees):
            close(final(x).accuracy, sum(expert(x).accuracy for expert in of_folds) / 5)


def test_an_expert_of_a_fold_does_not_know_its_fold():
    """Where a few outcomes are others, the settings are the same and only the experts that were
    fitted on them predict something else."""
    table, rows = small_table(90), torch.arange(90)
    few = folds_of(table, rows, 0)[2][1][:2]
    names = (*FAST, "random_forest")
    before, x = fit(table, rows, names)
    table.accuracy[few] = 1 - table.accuracy[few]
    after, _ = fit(table, rows, names)
    for name in names:
        assert before[name].expert.settings == after[name].expert.settings
        pairs = zip(before[name].of_folds, after[name].of_folds, strict=True)
        same = [torch.equal(each(x).accuracy, other(x).accuracy) for each, other in pairs]
        assert same == [False, False, True, False, False], name


@pytest.mark.parametrize("shown", [True, False])
def test_features_are_used_where_they_tell_out_of_fold_too(shown):
    table = two_kinds(150, shown)
    wanted = table.accuracy if shown else table.accuracy.mean(0)
    fitted, _ = fit(table, torch.arange(150), FAMILIES if shown else FAST)
    for name, (_, out_of_fold, _) in fitted.items():
        assert (out_of_fold.accuracy - wanted).abs().mean() < 0.15, name
        errors = out_of_fold.log_latency - table.latency_ms.log()
        assert not shown or errors.abs().mean() < 0.2, name


def test_without_features_every_family_knows_the_means_alone():
    table = small_table(40, holes=0.2, features=False)
    fitted, x = fit(table, torch.arange(40))
    for name, (expert, *_) in fitted.items():
        assert expert.settings == "accuracy constant, latency constant", name
        accuracy = expert(x).accuracy
        close(accuracy[0], accuracy[2])
        close(accuracy[0], table.accuracy.nanmean(0), within=0.05)


def test_the_spread_is_trusted_as_far_as_it_pays():
    # the spread is that of the residuals out of fold times one of a few factors
    measured = MeasuredRows.from_table(HOLED, EIGHTY, BUDGETS)
    factors = torch.tensor(SPREAD_FACTORS)
    for expert, out_of_fold, _ in every_family()[0].values():
        spread = measured.residual_spread(out_of_fold.log_latency)
        factor = expert.spread / spread
        close(factor, factor[:1].expand(12))
        utilities = []
        for f in factors:
            predicted = out_of_fold._replace(spread=spread * f)
            scores = [predicted.score(b.expand(80)) for b in BUDGETS]
            utilities.append(measured.utility(scores, predicted.log_latency))
        nearest = int((factors - factor[0]).abs().argmin())
        assert utilities[nearest] >= max(utilities) - 1e-6


@pytest.mark.parametrize(("samples", "count"), [(29, 12), (7, 12), (1, 12), (20, 1)])
def test_holes_few_samples_and_few_configurations(samples, count):
    table, rows = small_table(29, holes=0.6), torch.arange(samples)
    if count == 1:
        accuracy = torch.rand(20, 1)
        table = table_of(accuracy, 1 + accuracy, torch.randn(20, 2))
    fitted, x = fit(table, rows)
    for name, (expert, out_of_fold, of_folds) in fitted.items():
        for predicted in (out_of_fold, *(each(x) for each in (expert, *of_folds))):
            assert predicted.accuracy.shape == (samples, count)
            assert all(part.isfinite().all() for part in predicted[:3]), name


def test_samples_outside_the_rows_do_not_matter():
    table, rows = small_table(60), torch.arange(40)
    fitted, x = fit(table, rows, FAST)
    others, _ = fit(otherwise(table, torch.arange(40, 60)), rows, FAST)
    for name in FAST:
        assert all(map(torch.equal, fitted[name].expert(x)[:3], others[name].expert(x)[:3]))


# -- checkpoints -----------------------------------------------------------------------------------


def test_plain_values_and_back(tmp_path):
    fitted, x = every_family()
    for name, (expert, *_) in fitted.items():
        torch.save(expert.plain(), tmp_path / name)
        again = Expert.restored(torch.load(tmp_path / name, weights_only=True))
        assert all(map(torch.equal, again(x)[:3], expert(x)[:3])), name
        assert (again.name, again.settings) == (name, expert.settings)


# -- targets and folds -----------------------------------------------------------------------------


NOTHING = np.zeros((2, 1))
"""Features of two samples that say nothing."""


def outcomes_of(table, rows, x):
    """Return accuracy and log-latency, as the targets of these rows have them."""
    targets = Targets(table, rows, x)
    scale, offset = targets.units
    return (torch.from_numpy(targets.values).float() * scale + offset).chunk(2, 1)


def test_each_block_is_centred_per_configuration_and_scaled_as_a_whole():
    # accuracy: centres ½ and ½, deviations ∓½ and 0, root mean square ½/√2; latency: centres 0 and
    # 2, deviations 0 and ∓1
    table = table_of([[0.0, 0.5], [1.0, 0.5]], [[1.0, math.e], [1.0, math.e**3]])
    targets = Targets(table, BOTH, NOTHING)
    root = math.sqrt(2)
    wanted = [[-root, 0, 0, -root], [root, 0, 0, root]]
    np.testing.assert_allclose(targets.values, wanted, atol=1e-6)
    scale, offset = targets.units
    close(offset, [0.5, 0.5, 0.0, 2.0])
    close(scale * root, [0.5, 0.5, 1.0, 1.0])


def test_what_was_not_profiled_is_filled_by_configuration_and_by_sample():
    latency = [[math.e, math.e**2, NAN], [math.e**3, NAN, NAN], [1.0, 1.0, 1.0]]
    table = table_of([[0.2, 0.6, NAN], [0.6, NAN, NAN], [1.0, 1.0, 1.0]], latency)
    accuracy, log_latency = outcomes_of(table, BOTH, NOTHING)
    # the second sample is better by .4 and slower by 2 where both were profiled, so it is thought
    # better and slower than the average of 1.4/3 and 2 elsewhere; the last configuration was never
    # profiled in these rows: always wrong, and as slow as the slowest
    better, slower = float(accuracy[1, 1]), float(log_latency[1, 1])
    assert 1.4 / 3 < better < 1.0
    assert 2.0 < slower < 4.0
    close(accuracy, [[0.2, 0.6, 0.0], [0.6, better, 0.0]])
    close(log_latency, [[1.0, 2.0, 2.0], [3.0, slower, 2.0]])


def test_holes_are_filled_with_what_the_features_say():
    kind = (torch.arange(200) % 2).float()
    accuracy = torch.stack([kind, 1 - kind], 1)
    hole = torch.rand(200, 2) < 0.3
    hole[:, 0] &= ~hole[:, 1]
    seen = accuracy.masked_fill(hole, NAN)
    x = (2 * kind - 1).double().unsqueeze(1).numpy()
    filled, _ = outcomes_of(table_of(seen, seen + 1), torch.arange(200), x)
    # the mean of a configuration alone is off by .5
    assert (filled - accuracy)[hole].abs().mean() < 0.15
    close(filled[~hole], accuracy[~hole])


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 4), st.integers(2, 7), st.integers(0, 99))
def test_folds_hold_out_everything_once_and_keep_images_together(size, of, count, seed):
    table = replace(small_table(44), image_ids=tuple(str(i // of) for i in range(44)))
    rows = torch.randperm(44, generator=torch.Generator().manual_seed(seed))[:size]
    division = folds_of(table, rows, seed, count)
    images = rows // of
    assert len(division) == min(count, len(images.unique()))
    if len(division) > 1:
        every = list(range(size))
        assert sorted(np.concatenate([held_out for _, held_out in division])) == every
        for fitted, held_out in division:
            assert sorted([*fitted, *held_out]) == every
            assert not set(images[fitted].tolist()) & set(images[held_out].tolist())


def test_images_of_the_same_name_in_two_data_sets_are_two():
    table = replace(small_table(4), image_ids=tuple("aaaa"), datasets=tuple("1122"))
    folds = folds_of(table, torch.arange(4), seed=0)
    assert sorted(sorted(hold) for _, hold in folds) == [[0, 1], [2, 3]]


def test_folds_are_a_matter_of_the_seed_and_one_sample_is_its_own_fold():
    first, again, other = (folds_of(HOLED, EIGHTY, seed)[0][1].tolist() for seed in (0, 0, 1))
    assert first == again != other
    ((fitted, hold),) = folds_of(HOLED, torch.tensor([2]), seed=0)
    assert fitted.tolist() == hold.tolist() == [0]


# -- predictions -----------------------------------------------------------------------------------


def test_probability_of_meeting_a_budget_value_and_mean_latency_by_hand():
    # margins of +1 and −1 standard deviation and +2 of a smaller one under a budget of e²
    accuracy, log_latency = torch.tensor([[[0.5, 2.0, -1.0]], [[1.0, 3.0, 1.0]]])
    predicted = Prediction(accuracy, log_latency, torch.tensor([1.0, 1.0, 0.5]))
    budget, value = torch.tensor([[math.e**2], [10.0]])
    met = torch.tensor([[0.841345, 0.158655, 0.977250]])
    close(predicted.meets(budget), met)
    # a log-normal variable
    means = torch.tensor([[1.5, 3.5, 1.125]]).exp()
    close(predicted.latency_ms, means)
    # accuracy is kept within [.001, 1]
    kept = torch.tensor([[0.5, 1.0, 0.001]])
    close(predicted.score(budget), kept * met)
    close(predicted.score(value, "mean"), kept - means / 10)


def test_pick_takes_the_faster_among_equals_and_stays_in_the_mask():
    scores, latency = torch.tensor([1.0, 2.0, 2.0, 3.0]), torch.tensor([1.0, 9.0, 8.0, 1.0])
    mask = torch.ones(3, 4).tril().flip(0) > 0
    assert pick(scores, latency, mask).tolist() == [2, 1, 0]
    with pytest.raises(ValueError, match="configuration"):
        pick(scores, latency, mask & False)


# -- large tables ----------------------------------------------------------------------------------


@given(st.integers(1, 200), st.integers(1, 60), st.integers(1, 5), st.data())
def test_positions_in_a_sample_are_those_of_the_samples_that_are_in_it(count, most, c, data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "MAX_SAMPLES", most)
        patch.setattr(experts, "MAX_CELLS", 2 * most)
        kept = experts.sampled_positions(count, c)
    assert 1 <= len(kept) <= max(1, min(most, 2 * most // c, count))
    # evenly spread, from the first on
    assert len({*(kept[1:] - kept[:-1]).tolist()}) <= 1
    assert kept[0] == 0
    chosen = data.draw(st.sets(st.integers(0, count - 1)))
    positions = np.array(sorted(chosen), np.int64)
    found = kept[torch.from_numpy(experts.places(positions, kept))]
    assert found.tolist() == [position for position in kept.tolist() if position in chosen]


def test_of_many_samples_a_part_is_fitted_in_the_same_folds_and_it_says_so(monkeypatch, capsys):
    whole = Experts.fit(HOLED, EIGHTY, BUDGETS, FAST, seed=0)
    assert "sample" not in capsys.readouterr().err
    monkeypatch.setattr(experts, "MAX_SAMPLES", 40)
    part = Experts.fit(HOLED, EIGHTY, BUDGETS, FAST, seed=0)
    assert "40 of 80" in capsys.readouterr().err
    rows = part.measured.rows
    assert torch.equal(rows, EIGHTY[::2])
    close(part.measured.accuracy, HOLED.accuracy[rows])
    for of_part, of_whole in zip(part.measured.folds, whole.measured.folds, strict=True):
        for places, all_places in zip(of_part, of_whole, strict=True):
            held = {*EIGHTY[torch.from_numpy(all_places)].tolist()}
            assert {*rows[torch.from_numpy(places)].tolist()} == held & {*rows.tolist()}
    for fitted in part.fitted:
        assert fitted.out_of_fold.accuracy.shape == (40, HOLED.num_configurations)
