"""The simple ways of choosing a configuration, done as well as they can be: what a learned policy
must beat.

Some read no features (`fit_static`, `BestStatic`, `LookupTable`); others predict accuracy and
latency from them and take the best expected utility (`PredictThenChoose`); `Random` and `Oracle`
mark the ends of the scale. `StaticPerDataset` joins them where there are several data sets. All are
fitted on some rows of the table; only the oracle knows the outcomes that it chooses from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from knobwise.agents.controller.features import FeatureNormaliser
from knobwise.agents.deployed.arrays import Arrays, pick, pick_by_group
from knobwise.agents.deployed.calibrated import Static
from knobwise.agents.deployed.promise import Promise
from knobwise.agents.evaluation.policy import Array, Baseline
from knobwise.agents.problem import Problem
from knobwise.agents.teacher.experts import Expert, Experts
from knobwise.agents.teacher.outcomes import Prediction
from knobwise.agents.teacher.regressors import FAMILIES
from knobwise.envs.bandit.budgets import log_measured, subsample
from knobwise.envs.bandit.rules import DEADLINES, Rule
from knobwise.envs.readers.joint import rows_by_dataset
from knobwise.envs.tables.cells import Cells, averages, cells_of, unread

STEPS = 1024
"""The steps of static under a rule of the user's own: it is taken for constant between two of so
many budgets."""
BEYOND = 3.0
"""By how much ln of these budgets goes beyond that of all latencies, at both ends."""
MOST_ASKED = 1 << 29
"""Static asks such a rule about at most so many answers; of a larger table it is fitted on a
part."""
AT_ONCE = 1024
"""So many samples at a time, at all budgets, need little memory."""

# -- without features ------------------------------------------------------------------------------


class FittedStatic(Static):
    """Budget-aware static that can be fitted and kept in files."""

    @classmethod
    def fit(cls, accuracy: Array, latency_ms: Array, measurements_ms: Array) -> Self:
        """Fit on n samples.

        A cell that was measured several times counts once. A configuration that was never profiled
        counts as always wrong and as slow as the slowest of the others.

        Args:
            accuracy: [n, C], NaN where not profiled.
            latency_ms: medians [n, C], NaN where not profiled.
            measurements_ms: [n, C, R], NaN where there is no measurement.
        """
        samples, count, repeats = measurements_ms.shape
        # [n, C, R], and how many samples each configuration has
        valid: Array = np.logical_not(np.isnan(measurements_ms))
        count_of = valid.any(2).sum(0)
        mean_ms = np.nansum(latency_ms.astype(np.float64), 0) / np.maximum(count_of, 1)
        slowest_ms = mean_ms[count_of > 0].max(initial=0.0)
        sorted_ms = np.empty((count, samples * repeats))
        running = np.zeros((count, samples * repeats + 1))
        # one configuration after the other, since tables may be large
        for c in range(count):
            known = valid[:, c]
            of_cell = np.maximum(known.sum(1, keepdims=True), 1)
            weight = known / of_cell * np.nan_to_num(accuracy[:, c, None].astype(np.float64))
            measured = np.where(known, measurements_ms[:, c], np.inf).ravel()
            order = np.argsort(measured, kind="stable")
            sorted_ms[c] = measured[order]
            running[c, 1:] = np.cumsum(weight.ravel()[order]) / max(count_of[c], 1)
        latency_ms = np.where(count_of > 0, mean_ms, slowest_ms)
        return cls({"latency_ms": latency_ms, "sorted_ms": sorted_ms, "running": running})

    def arrays(self) -> dict[str, Array]:
        """Collect what `Static` is made from: `latency_ms` [C], `sorted_ms` [C, n] (float32 if that
        loses nothing) and `running` [C, n + 1]."""
        # in float32 where nothing is lost
        sorted_ms: Array = self.sorted_ms.astype(np.float32)
        if not (sorted_ms == self.sorted_ms).all():
            sorted_ms = self.sorted_ms
        arrays = {"latency_ms": self.latency_ms, "sorted_ms": sorted_ms, "running": self.running}
        if self.has_moments:
            arrays |= {"log_latency": self.log_latency, "spread": self.spread}
        return arrays

    def scaled(self, times: Array, accuracies: Array) -> Self:
        """Return static for other times and accuracies: factors [C] on each configuration's."""
        return type(self)(
            {
                "latency_ms": self.latency_ms * times,
                "sorted_ms": self.sorted_ms * times[:, None],
                "running": self.running * accuracies[:, None],
            }
        )


def fit_static(cells: Cells, rows: Tensor, rule: Rule = DEADLINES) -> FittedStatic:
    """Return budget-aware static fitted on `rows` (int64 [n]); first-stage time is not charged,
    since static needs no features.

    Args:
        rule: what decisions are worth.
    """
    cells = unread(cells)
    if rule.is_own:
        return FittedStatic(_arrays_under(rule, cells, rows))
    return FittedStatic.fit(
        accuracy=cells.accuracy[rows].numpy(),
        latency_ms=cells.latency_ms[rows].numpy(),
        measurements_ms=cells.measurements_ms[rows].numpy(),
    )


def _arrays_under(rule: Rule, cells: Cells, rows: Tensor) -> Arrays:
    """Return what `Static` is made from under a rule of the user's own: mean utilities at `STEPS`
    budgets, from a fraction of the shortest latency to a multiple of the longest."""
    count = cells.accuracy.shape[1] * cells.measurements_ms.shape[-1]
    rows = subsample(rows, max(MOST_ASKED // (count * STEPS), 1))
    accuracy, measurements_ms = cells.accuracy[rows], cells.measurements_ms[rows]
    _, latency_ms = averages(cells, rows)
    logs = log_measured(measurements_ms)
    known = logs[~logs.isnan()]
    low, high = float(known.min()) - BEYOND, float(known.max()) + BEYOND
    # a step lasts from one budget to the next, and has the utility of the one between them
    starts = torch.linspace(low, high, STEPS)
    half = (high - low) / (STEPS - 1) / 2
    seen = cells.mask[rows].any(0)
    columns = [torch.zeros(len(latency_ms), dtype=torch.float64)]
    for middle in (starts + half).exp():
        utility = rule.mean_utility(accuracy, measurements_ms, middle).double()
        utility = utility.where(cells.mask[rows], torch.nan).nanmean(0)
        columns.append(utility.where(seen, 0.0))
    running = torch.stack(columns, 1).cummax(1).values
    of_configuration = logs.movedim(1, 0).flatten(1).double()
    mean = of_configuration.nanmean(1)
    variance = (of_configuration - mean.unsqueeze(1)).square().nanmean(1)
    return {
        "latency_ms": latency_ms.numpy(),
        "sorted_ms": starts.exp().expand(len(latency_ms), -1).numpy(),
        "running": running.numpy(),
        # the steps are no measurements
        "log_latency": mean.nan_to_num().numpy(),
        "spread": variance.sqrt().nan_to_num().numpy(),
    }


@dataclass
class StaticUnderPromise:
    """Takes the most accurate single configuration that keeps a promise at each budget, see
    `knobwise.agents.calibration.promise`."""

    promise: Promise
    name = "static_under_promise"

    def choose(self, features: Arrays, budgets_ms: Array, mask: Array | None = None) -> Array:
        undecided = np.zeros(len(budgets_ms), np.int64)
        return self.promise.with_fallback(undecided, budgets_ms, mask)


class BestStatic:
    """Takes the configuration with the best mean utility over budgets [b] in ms, of those that
    budget-aware static takes."""

    name = "best_static"

    def __init__(self, static: Static, budgets_ms: Tensor) -> None:
        self._scores = static.mean_utility(budgets_ms.numpy()).mean(0)
        self._latency_ms = static.latency_ms

    def choose(self, features: Arrays, budgets_ms: Array, mask: Array | None = None) -> Array:
        group = np.zeros(len(budgets_ms), np.int64)
        return pick_by_group(self._scores[None], self._latency_ms, group, mask)


class LookupTable:
    """Takes the best average accuracy whose mean latency is at most budget·(1 + tolerance).

    Where no configuration fits, it takes the fastest.
    """

    name = "lookup_table"

    def __init__(self, cells: Cells, rows: Tensor, tolerance: float = 0.05) -> None:
        accuracy, latency_ms = averages(unread(cells), rows)
        self._accuracy = accuracy.numpy()
        self._latency_ms = latency_ms.numpy()
        self._tolerance = tolerance

    def choose(self, features: Arrays, budgets_ms: Array, mask: Array | None = None) -> Array:
        distinct, group = np.unique(np.asarray(budgets_ms), return_inverse=True)
        fits = self._latency_ms <= distinct[:, None] * (1 + self._tolerance)
        scores = np.where(fits, self._accuracy, -1.0)
        return pick_by_group(scores, self._latency_ms, group.reshape(-1), mask)


# -- from the features -----------------------------------------------------------------------------


@dataclass
class PredictThenChoose:
    """Predicts outcomes, then takes the best expected utility, Â·Φ((ln b − μ)/σ) under deadlines.

    With `accuracy` [C] this counts for every sample, in the place of a prediction.
    """

    name: str
    expert: Expert
    normaliser: FeatureNormaliser
    accuracy: Tensor | None = None
    rule: Rule = DEADLINES
    informed = True

    def predict(self, features: Arrays, n: int) -> Prediction:
        """Predict the outcomes of every configuration for n samples."""
        blocks = {name: torch.as_tensor(block) for name, block in features.items()}
        return self.counted(self.expert(self.normaliser(blocks, n)))

    def counted(self, prediction: Prediction) -> Prediction:
        """Replace the predicted accuracy by the fixed one, [C], if there is one."""
        if self.accuracy is None:
            return prediction
        return prediction._replace(accuracy=self.accuracy.expand_as(prediction.accuracy))

    def choose(self, features: Arrays, budgets_ms: Array, mask: Array | None = None) -> Array:
        prediction = self.predict(features, len(budgets_ms))
        return self._best(prediction, budgets_ms, mask)

    def choose_each(self, features: Arrays, limits: Array, mask: Array) -> Array:
        """Choose under each of B limits, see `knobwise.agents.evaluation.policy.choose_each`."""
        prediction = self.predict(features, len(mask))
        chosen = np.empty((len(mask), len(limits)), np.int64)
        for first in range(0, len(mask), AT_ONCE):
            rows = slice(first, first + AT_ONCE)
            part = prediction.of_rows(rows)
            allowed = mask[rows]
            for column, limit in enumerate(limits):
                chosen[rows, column] = self._best(part, np.full(len(allowed), limit), allowed)
        return chosen

    def _best(self, prediction: Prediction, budgets_ms: Array, mask: Array | None) -> Array:
        """Return the best configurations by a prediction for n requests, int64 [n]."""
        score = prediction.score(torch.tensor(budgets_ms, dtype=torch.float32), self.rule)
        return pick(score.numpy(), prediction.log_latency.numpy(), mask)


# -- the ends of the scale -------------------------------------------------------------------------


@dataclass
class Random:
    """Draws uniformly from the mask, which it needs; equal seeds and requests give equal
    choices."""

    seed: int = 0
    name = "random"

    def choose(self, features: Arrays, budgets_ms: Array, mask: Array | None = None) -> Array:
        generator = torch.Generator().manual_seed(self.seed)
        weights = torch.as_tensor(mask).float()
        return torch.multinomial(weights, 1, generator=generator).squeeze(1).numpy()

    def choose_each(self, features: Arrays, limits: Array, mask: Array) -> Array:
        """Choose the same under each limit, since what a budget is makes no difference."""
        return np.repeat(self.choose(features, limits, mask)[:, None], len(limits), 1)


class Oracle:
    """Picks, per row, the configuration with the highest measured utility; ties go to the faster.

    Of several measurements the mean utility counts. Where nothing fits, it takes the fastest. It
    knows the outcomes, so it can only choose for exactly the rows that it was given, in their
    order.
    """

    name = "oracle"
    hindsight = True

    def __init__(self, cells: Cells, rows: Tensor, rule: Rule = DEADLINES) -> None:
        self._cells = cells
        self._rows = rows
        self._rule = rule

    def choose(self, features: Arrays, budgets_ms: Array, mask: Array | None = None) -> Array:
        return self._chosen(np.asarray(budgets_ms)[:, None], mask)[:, 0]

    def choose_each(self, features: Arrays, limits: Array, mask: Array) -> Array:
        """Choose under each of B limits, see `knobwise.agents.evaluation.policy.choose_each`."""
        return self._chosen(np.broadcast_to(limits, (len(mask), len(limits))), mask)

    def _chosen(self, limits: Array, mask: Array | None) -> Array:
        """Choose under limits [n, B], inside the mask bool [n, C] or None: int64 [n, B]."""
        chosen = np.empty(limits.shape, np.int64)
        # a few samples at a time, of which no copy of the table is made
        for first in range(0, len(limits), AT_ONCE):
            part = slice(first, first + AT_ONCE)
            cells = unread(cells_of(self._cells, self._rows[part]))
            slow = cells.latency_ms.nan_to_num(torch.inf).numpy()
            allowed = None if mask is None else mask[part]
            for column, budgets_ms in enumerate(limits[part].T):
                # [n, C]: mean utilities of the actual measurements; what was not profiled is never
                # taken
                budgets = torch.tensor(budgets_ms, dtype=torch.float32).unsqueeze(1)
                measured_ms = cells.measurements_ms
                utility = self._rule.mean_utility(cells.accuracy, measured_ms, budgets)
                chosen[part, column] = pick(utility.nan_to_num(-1.0).numpy(), slow, allowed)
        return chosen


def make_baselines(
    problem: Problem, budgets_ms: Tensor, experts: Experts | None = None, seed: int = 0
) -> list[Baseline]:
    """Return the baselines for deadlines beside budget-aware static and the oracle, fitted on all
    but the test rows.

    The learned ones choose their settings out of fold, so they need no validation rows. Where there
    are several data sets, static of each is the first.

    A new baseline is listed here; one that predicts is listed in `FAMILIES` of
    `knobwise.agents.teacher.regressors` instead. CONTRIBUTING says what else either needs. Mean
    budgets have a list of their own: `make_priced_baselines` in
    `knobwise.agents.calibration.mean_policies`.

    Args:
        budgets_ms: float [b], the budgets that they will be judged on.
        experts: of all families, fitted on the same rows for the same budgets; None fits them.
        seed: of `Random`, and of the experts that are fitted here.
    """
    rows = problem.split.fitted
    cells = problem.cells
    rule = problem.rule
    if experts is None:
        experts = Experts.fit(problem.facts, rows, budgets_ms, tuple(FAMILIES), seed, rule=rule)
    _, normaliser, fitted = experts
    # the experts were fitted once, for the baselines and for teachers
    named = {family.expert.name: family.expert for family in fitted}
    mean_accuracy = averages(cells, rows)[0].float()
    several = len(rows_by_dataset(problem.facts, problem.split.test)) > 1
    by_dataset: list[Baseline] = [StaticPerDataset(problem)] if several else []
    return [
        *by_dataset,
        BestStatic(fit_static(cells, rows, rule), budgets_ms),
        LookupTable(cells, rows),
        PredictThenChoose("latency_only", named["ridge"], normaliser, mean_accuracy, rule),
        *(PredictThenChoose(name, expert, normaliser, rule=rule) for name, expert in named.items()),
        Random(seed),
    ]


class StaticPerDataset:
    """Budget-aware static, fitted on each data set for itself.

    It shows what it brings to recognise the data set without looking at the request. A data set
    without samples to fit on gets static fitted on all rows.

    Like the oracle it can only choose for exactly the test samples, in their order.
    """

    name = "static_per_dataset"

    def __init__(self, problem: Problem) -> None:
        table, fitted = problem.facts, problem.split.fitted
        # static of each data set, and the places of its test samples
        parts = rows_by_dataset(table, fitted)
        self._parts: list[tuple[Array, Static]] = []
        for name, positions in rows_by_dataset(table, problem.split.test).items():
            rows = fitted[parts.get(name, slice(None))]
            static = fit_static(problem.cells, rows, problem.rule)
            self._parts.append((positions.numpy(), static))

    def choose(self, features: Arrays, budgets_ms: Array, mask: Array | None = None) -> Array:
        chosen = np.empty(len(budgets_ms), np.int64)
        for positions, static in self._parts:
            allowed = None if mask is None else mask[positions]
            chosen[positions] = static.choose({}, budgets_ms[positions], allowed)
        return chosen
