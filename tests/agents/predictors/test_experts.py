"""Against scikit-learn on the same folds, on tables where features tell, tell nothing, and are not there."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import small_table, table_of, two_kinds
from sklearn.linear_model import Ridge
from torch import Tensor

from knobwise.agents.predictors.experts import Expert, Fitted, Measured, fit_experts, inputs_of
from knobwise.agents.predictors.features import FeatureNormaliser
from knobwise.agents.predictors.folds import folds_of
from knobwise.agents.predictors.regressors import FAMILIES, Trees
from knobwise.envs.configurations.budgets import default_budgets
from knobwise.envs.tables.profile_table import ProfileTable

NAN = math.nan
FAST = ("ridge", "knn")


def fit(table: ProfileTable, names: tuple[str, ...], rows: Tensor | None = None) -> dict[str, Fitted]:
    rows = torch.arange(table.num_samples) if rows is None else rows
    measured = Measured.from_table(table, rows, default_budgets(table), 0)
    result = fit_experts(table, measured, FeatureNormaliser.fit(table, rows), names, 0)
    return {one.expert.name: one for one in result}


def inputs(table: ProfileTable, rows: Tensor) -> Tensor:
    normaliser = FeatureNormaliser.fit(table, rows)
    return inputs_of(normaliser, {name: block[rows] for name, block in table.features.items()}, len(rows))


@functools.cache
def every_family() -> tuple[ProfileTable, dict[str, Fitted]]:
    table = small_table(90, holes=0.3)
    return table, fit(table, tuple(FAMILIES), torch.arange(80))


# -- what is measured --------------------------------------------------------------------------------------------------


def test_utility_of_scores_by_hand() -> None:
    table = table_of([[1.0, 0.5], [0.0, 1.0]], [[9.0, 3.0], [9.0, 3.0]])
    measured = Measured.from_table(table, torch.arange(2), torch.tensor([5.0, 10.0]), 0)
    first, second = torch.tensor([[1.0, 0.0]]).expand(2, 2), torch.tensor([[0.0, 1.0]]).expand(2, 2)
    latency = torch.tensor([[9.0, 3.0]]).expand(2, 2)
    # the first always: late at 5, ½ at 10; the second always: ¾ at both
    assert measured.utility([first, first], latency) == pytest.approx((0 + 0.5) / 2)
    assert measured.utility([second, second], latency) == pytest.approx(0.75)
    assert measured.utility([second, first], latency) == pytest.approx((0.75 + 0.5) / 2)
    assert measured.utility([torch.zeros(2, 2)] * 2, latency) == pytest.approx(0.75)  # among equals the faster


def test_scores_where_nothing_was_profiled_are_never_taken() -> None:
    table = table_of([[1.0, NAN], [0.5, 0.25]], [[3.0, NAN], [3.0, 3.0]])
    measured = Measured.from_table(table, torch.arange(2), torch.tensor([5.0]), 0)
    best_second = torch.tensor([[0.0, 1.0]]).expand(2, 2)
    assert measured.utility([best_second], torch.ones(2, 2)) == pytest.approx((1 + 0.25) / 2)


def test_residual_spread_by_hand() -> None:
    latency = [[math.e, math.e**3, NAN], [math.e**3, math.e**2, NAN]]
    measured = Measured.from_table(
        table_of([[1.0, 1.0, NAN]] * 2 + [[1.0] * 3], [*latency, [1.0] * 3]), torch.arange(2), torch.ones(1), 0
    )
    # against ln ms = 1: squares 0 4, 4 1; their mean 9/4 stands for five more cells of each
    result = measured.residual_spread(torch.ones(2, 3))
    wanted = torch.tensor([(4 + 5 * 2.25) / 7, (5 + 5 * 2.25) / 7, 2.25]).sqrt()
    torch.testing.assert_close(result, wanted)


def test_without_features_there_is_one_column_of_zeros() -> None:
    assert inputs(small_table(5, features=False), torch.arange(5)).tolist() == [[0.0]] * 5


# -- fitted ------------------------------------------------------------------------------------------------------------


def test_out_of_fold_and_final_are_those_of_scikit_learn_on_the_same_folds() -> None:
    table, rows = small_table(60), torch.arange(5, 60)
    fitted = fit(table, ("ridge",), rows)["ridge"]
    x = inputs(table, rows).numpy()
    outcomes = {"accuracy": table.accuracy[rows], "latency": table.latency_ms[rows].log()}
    result = {"accuracy": fitted.out_of_fold.accuracy, "latency": fitted.out_of_fold.log_latency}
    final = fitted.expert(inputs(table, rows))
    finals = {"accuracy": final.accuracy, "latency": final.log_latency}
    chosen = dict(part.split(" ") for part in fitted.expert.settings.split(", "))
    for part, y in outcomes.items():
        errors = {}
        for share in FAMILIES["ridge"].settings:
            held_out = np.zeros(y.shape)
            for own, hold in folds_of(table, rows, 0):
                held_out[hold] = Ridge(alpha=share * len(own)).fit(x[own], y[own].numpy()).predict(x[hold])
            errors[str(share)] = ((held_out - y.numpy()) ** 2).sum()
            if str(share) == chosen[part]:
                np.testing.assert_allclose(result[part], held_out, atol=1e-4)
                whole = Ridge(alpha=share * len(x)).fit(x, y.numpy()).predict(x)
                np.testing.assert_allclose(finals[part], whole, atol=1e-4)
        assert min(errors, key=errors.__getitem__) == chosen[part]


def test_trees_are_the_mean_of_those_of_the_folds() -> None:
    _, fitted = every_family()
    for name, count in (("random_forest", 5 * 40), ("gradient_boosting", None)):
        for regressor in (fitted[name].expert.accuracy, fitted[name].expert.log_latency):
            assert isinstance(regressor, Trees)
            assert set(regressor.fit.tolist()) == set(range(5))
            assert count is None or len(regressor.roots) == count


def test_features_that_tell_are_used_out_of_fold_too() -> None:
    table = two_kinds(150, shown=True)
    for name, one in fit(table, tuple(FAMILIES)).items():
        assert (one.out_of_fold.accuracy - table.accuracy).abs().mean() < 0.15, name
        assert (one.out_of_fold.log_latency - table.latency_ms.log()).abs().mean() < 0.2, name


def test_features_that_tell_nothing_are_not() -> None:
    table = two_kinds(150, shown=False)
    for name, one in fit(table, FAST).items():
        assert one.expert(inputs(table, torch.arange(150))).accuracy.std(0).max() < 0.15, name
        assert (one.out_of_fold.accuracy - table.accuracy.mean(0)).abs().mean() < 0.1, name


def test_without_features_every_family_knows_the_means_alone() -> None:
    table = small_table(40, holes=0.2, features=False)
    for name, one in fit(table, tuple(FAMILIES)).items():
        assert one.expert.settings == "accuracy constant, latency constant", name
        predicted = one.expert(torch.zeros(3, 1))
        torch.testing.assert_close(predicted.accuracy[0], predicted.accuracy[2])
        torch.testing.assert_close(predicted.accuracy[0], table.accuracy.nanmean(0), atol=0.05, rtol=0)


def test_the_spread_is_trusted_as_far_as_it_pays() -> None:
    # the spread is that of the residuals out of fold times one of a few factors
    table, fitted = every_family()
    measured = Measured.from_table(table, torch.arange(80), default_budgets(table), 0)
    for one in fitted.values():
        factor = one.expert.spread / measured.residual_spread(one.out_of_fold.log_latency)
        torch.testing.assert_close(factor, factor[:1].expand(12))
        utilities = {}
        for f in (0.35, 0.5, 0.75, 1.0, 1.5, 2.2):
            predicted = one.out_of_fold._replace(spread=one.expert.spread / factor * f)
            scores = [predicted.expected_utility(b.expand(80)) for b in measured.budgets_ms]
            utilities[f] = measured.utility(scores, predicted.log_latency)
        nearest = min(utilities, key=lambda f: abs(f - float(factor[0])))
        assert utilities[nearest] >= max(utilities.values()) - 1e-6


def test_holes_and_few_samples() -> None:
    table = small_table(29, holes=0.6)
    for rows in (torch.arange(29), torch.arange(7), torch.arange(2), torch.arange(1)):
        for name, one in fit(table, tuple(FAMILIES), rows).items():
            predicted = one.expert(inputs(table, rows))
            for part in (*predicted, *one.out_of_fold):
                assert part.isfinite().all(), (name, len(rows))


def test_two_configurations_and_one() -> None:
    for count in (1, 2):
        generator = torch.Generator().manual_seed(0)
        accuracy = torch.rand(20, count, generator=generator)
        table = table_of(accuracy.tolist(), (1 + accuracy).tolist(), torch.randn(20, 2, generator=generator))
        for name, one in fit(table, tuple(FAMILIES)).items():
            assert one.expert(inputs(table, torch.arange(20))).accuracy.shape == (20, count), name


def test_samples_outside_the_rows_do_not_matter() -> None:
    one, two = small_table(60), small_table(60)
    two.accuracy[40:] = 1 - two.accuracy[40:]
    two.latency_ms[40:] = two.latency_ms[40:].flip(1)
    for block in two.features.values():
        block[40:] *= -7
    rows, budgets = torch.arange(40), torch.tensor([8.0, 12.0])
    predicted = []
    for table in (one, two):
        measured = Measured.from_table(table, rows, budgets, 0)
        normaliser = FeatureNormaliser.fit(table, rows)
        predicted.append([f.expert(inputs(one, rows)) for f in fit_experts(table, measured, normaliser, FAST, 0)])
    for a, b in zip(*predicted, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_plain_values_and_back(name: str, tmp_path: Path) -> None:
    table, fitted = every_family()
    expert = fitted[name].expert
    torch.save(expert.plain(), tmp_path / "e.pt")
    again = Expert.restored(torch.load(tmp_path / "e.pt", weights_only=True))
    x = inputs(table, torch.arange(90))
    assert all(torch.equal(a, b) for a, b in zip(again(x), expert(x), strict=True))
    assert (again.name, again.settings) == (name, expert.settings)
