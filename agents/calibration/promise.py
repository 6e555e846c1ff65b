"""A promise that holds: on time for at least a share of the requests, per budget.

The statement, for each calibrated budget: with `CONFIDENCE` over the calibration samples, the
deployed rule answers at least this share of requests like the profile's, timed as there, within the
budget, its own cost included. The calibration samples are held back from everything else: nothing
was fitted on them or chosen by them.

Candidates stand in a fixed order, from the safest to the boldest, by the fitted samples alone. They
are single configurations, and the policy restricted to what a model of latencies expects in time
with one of `PROBABILITIES`. The policy counts as safer than the safest single configuration only
where that is clear; and a candidate that is not expected to be more accurate than all safer ones is
left out. Then they are tested in this order,
each by the exact bound on the share of a binomial (Clopper and Pearson 1934, "The Use of Confidence
or Fiducial Limits", Biometrika) until the first one fails; the last one that passed is deployed.
Since the order is fixed, many candidates cost no confidence (fixed sequence testing, as in
Angelopoulos, Bates, Candès, Jordan and Lei 2025, "Learn then Test: Calibrating Predictive
Algorithms to Achieve Risk Control", Annals of Applied Statistics, section 3); and a higher promise
stops earlier, so it never deploys a bolder candidate.

Where the policy stands first, nothing would be tested once it fails, though a single configuration
may keep the promise. There the error is divided: one half for the whole order, one for the single
configurations alone in theirs, and where all of these pass they hand theirs on. The most accurate
rule that passed in either is deployed. (So does Wiens and Dmitrienko 2005, "The Fallback Procedure
for Evaluating a Single Family of Hypotheses", Journal of Biopharmaceutical Statistics 15; that a
share may be handed on is Bretz, Maurer, Brannath and Posch 2009, "A graphical approach to
sequentially rejective multiple test procedures", Statistics in Medicine 28.) Where half of the
error shows nothing, since there are too few requests, the single configurations get all of it.

Where no candidate of a budget passes, the rule of the next smaller budget that has a promise goes
on to decide: what it answers in time there is in time here, so if its promise holds there it does
here. If it does not, it is wrong here as well: what `CONFIDENCE` bounds is the test of each rule,
and at a budget at which promises of others may go on, the chances of theirs add up. A level divided
by the number of budgets would bound that, and make far fewer promises of a few hundred requests.
Below such a budget the safest candidate decides, and nothing is promised: where nothing is on time
the fastest, and between its budget and the next one the configuration that is most often on time in
what is left, if that is more often than the candidate's.

Each budget that was asked for brings smaller ones below it (`SMALLER`), with rules of their own, so
that what is left of it on a slower machine, or after a queue, finds the next rule a few per cent
below. They are no budgets to be judged at. Tests cost one another no confidence, as at any other
budgets; and what is said above of promises that go on holds for theirs.

The rules are tested as they will decide. In service nothing is unmeasured, so that only limits on
further costs forbid a choice. A choice that was not measured for a sample stays the choice, and
counts as late: what it would have taken is not known, and it may be missing because it was slow.

The bound needs independent requests that are late or not. So of several measurements of an answer
one is drawn, and of samples that belong together, such as the questions about an image, one: a
cluster is kept with a probability in the ratio of its size to the largest, so that each request is
drawn equally often.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import ndtri
from scipy.stats import beta
from torch import Tensor

from knobwise.agents.deployed.arrays import pick
from knobwise.agents.deployed.calibrated import Static
from knobwise.agents.deployed.promise import POLICY
from knobwise.agents.problem import Problem
from knobwise.common.errors import InputError
from knobwise.common.paired import standard_error
from knobwise.common.progress import say
from knobwise.envs.bandit.budgets import MIN_LATENCY_MS
from knobwise.envs.bandit.reward import share_on_time
from knobwise.envs.tables.splits import cluster_numbers
from knobwise.envs.tables.units import MS

CONFIDENCE = 0.95
"""One-sided, over the draw of the calibration samples."""
ERROR = 1 - CONFIDENCE
"""The chance that the rule which is tested at a budget is promised wrongly."""
HELD_BACK = 0.2
"""The share of the fitted samples that a promise is calibrated on."""
RESERVE = 0.02
"""The share of a budget in ms that rules are not tested with: it is left to what a decision costs
beyond what was expected of it. Of a budget in another unit, such as USD, decisions take nothing."""
PROBABILITIES = (0.0, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.925, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999)
"""With which what the policy chooses must be expected in time; 0 for anything."""
SMALLER = (0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5)
"""The smaller budgets that one brings, by it."""
LEAST_STEP = 0.03
"""By how much, as a share, a smaller budget is above the next one that was asked for."""

Decide = Callable[[float, float], Tensor]
"""A limit in ms, and how far below it choices must be expected, in standard deviations → the
configurations int64 [n] that the policy chooses."""


class PromiseRow(TypedDict):
    """What was promised at one budget."""

    budget_ms: float
    is_wanted: bool
    """False for one of the smaller budgets that another brings. Missing in earlier versions, which
    had none."""
    planned_ms: float
    """What is left of it for the answer, which was promised for."""
    promise: float
    kept: bool
    """False if no candidate passed: then the rule of another budget decides (`deciding`), or the
    safest candidate, which is that of this row, and nothing is promised."""
    configuration: int
    """That decides for all requests, or `POLICY`."""
    probability: float
    """With which what the policy chooses is expected in time; 0 for anything."""
    on_time: float
    """The share on time of the calibration requests."""
    bound: float
    """Its lower bound with `CONFIDENCE`, or with half of the `ERROR` where that was tested."""
    requests: int
    """How many calibration requests there were."""
    expected_accuracy: float
    """The accuracy on fitted samples, which candidates were ordered by."""
    candidates: int
    """How many there were, and how many passed; in both orders where there are two."""
    passed: int


def requests_needed(promise: float, error: float = ERROR) -> int:
    """Return how many requests a promise needs if all of them are on time."""
    return math.ceil(math.log(error) / math.log(promise) - 1e-9)


def largest_promise(requests: int) -> float:
    """Return the largest promise, in thousandths, that so many requests show if all of them are on
    time."""
    return math.floor(1000 * ERROR ** (1 / requests) + 1e-6) / 1000


def check_promise(problem: Problem) -> None:
    """Refuse a promise where times are not measured, or a request has no budget of its own; say how
    many cells have no time that could show anything.

    Raises:
        InputError: a mean budget, a rule of the user's own, or beliefs about cells.
    """
    rule = problem.rule
    if rule.kind != "deadline" or rule.is_own:
        raise InputError(
            f"policy.promise: is for deadlines, not for budget={rule.words}; leave it out"
        )
    if problem.beliefs is not None:
        raise InputError(
            f"policy.promise: profile {problem.facts.name!r} has cells that nobody measured, and "
            "what is predicted of them proves nothing; measure all of them, set "
            "unprofiled=forbid, which counts them as late, or leave the promise out"
        )
    mask = problem.facts.mask
    if not mask.all():
        say(
            f"{int((~mask).sum()):,} of {mask.numel():,} cells were not measured: where such an "
            "answer is chosen, policy.promise counts it as late"
        )


class PromiseCandidate(NamedTuple):
    """A rule that may be deployed, see `PromiseRow`."""

    configuration: int
    probability: float


class IndependentRequests(NamedTuple):
    """Independent requests: rows int64 [n], and which of the measurements of an answer counts, as a
    number in [0, 1), float64 [n]."""

    rows: Tensor
    drawn: Tensor


def requests_of(problem: Problem, rows: Tensor, seed: int = 0) -> IndependentRequests:
    """Draw independent requests from samples int64 [n], see the top."""
    draws = np.random.default_rng(seed)
    clusters = cluster_numbers(problem.facts, rows).numpy()
    sizes = np.bincount(clusters)
    kept = draws.random(len(sizes)) * sizes.max(initial=1) < sizes
    # the first of each cluster in a random order
    order = draws.permutation(len(rows))
    _, first = np.unique(clusters[order], return_index=True)
    chosen = rows[np.sort(order[first[kept]])]
    return IndependentRequests(chosen, torch.from_numpy(draws.random(len(chosen))))


def late(
    problem: Problem, requests: IndependentRequests, chosen: Tensor, limit_ms: float, reads: Tensor
) -> Tensor:
    """Tell which answers come too late, or cost more than a limit, bool [n, K].

    Args:
        chosen: configurations int64 [n, K]. One that was not measured counts as late.
        limit_ms: what is left for the answer.
        reads: bool [K], whose choice reads features, and waits for the first look at the request.
    """
    # measurements in order, NaN at the end
    cells = requests.rows.unsqueeze(1), chosen
    measured = _times(problem, cells, reads).sort(-1).values
    count = (~measured.isnan()).sum(-1)
    which = (requests.drawn.unsqueeze(1) * count).long()
    time = measured.gather(-1, which.unsqueeze(-1)).squeeze(-1)
    # measurements are in float32, so a limit is, too; NaN, where there is none, is within no limit
    too_late = ~(time <= float(np.float32(limit_ms)))
    over = problem.rule.over(problem.values)
    return too_late if over is None else too_late | over[cells]


def least_share(on_time: int, count: int, error: float = ERROR) -> float:
    """Return the lower bound of the share that `on_time` of `count` requests were drawn from, which
    is too high with the chance `error` at most; 0 for none."""
    if not on_time:
        return 0.0
    return float(beta.ppf(error, on_time, count - on_time + 1))


def in_order(
    on_time: NDArray[np.float64], accuracy: NDArray[np.float64], latency_ms: NDArray[np.float64]
) -> list[int]:
    """Return the candidates from the safest to the boldest, each more accurate than all before it:
    their indices, of shares on time, accuracies and mean latencies [K]. Of those that are never on
    time the fastest is the safest."""
    order: list[int] = []
    slow = np.where(on_time > 0, 0.0, latency_ms)
    for index in np.lexsort((-accuracy, slow, -on_time)).tolist():
        if not order or accuracy[index] > accuracy[order[-1]]:
            order.append(index)
    return order


def passing(shares: Sequence[float], promise: float) -> int:
    """Return how many candidates pass before the first that does not, by their bounds in order."""
    return next((i for i, bound in enumerate(shares) if bound < promise), len(shares))


class Trial(NamedTuple):
    """The candidates at one budget in their order, and how they did; what a promise comes to."""

    budget_ms: float
    planned_ms: float
    candidates: list[PromiseCandidate]
    accuracy: list[float]
    """On the fitted samples."""
    hits: list[int]
    """How many requests were on time."""
    requests: int
    alone: Trial | None = None
    """The same of single configurations alone, where the policy stands first; else None."""
    is_wanted: bool = True
    """See `PromiseRow`."""

    def row(self, promise: float) -> PromiseRow:
        """Return what is deployed for a promise."""
        if self.alone is None:
            return self.tested(promise, ERROR)
        enough = self.requests >= requests_needed(promise, ERROR / 2)
        single = self.alone.tested(promise, ERROR / 2 if enough else ERROR)
        handed_on = single["passed"] == single["candidates"]
        policy = self.tested(promise, ERROR if handed_on else ERROR / 2)
        kept = [row for row in (policy, single) if row["kept"]]
        # where nothing passed the policy is the safest
        row = max(kept, key=lambda each: each["expected_accuracy"], default=policy)
        row["candidates"] = policy["candidates"] + single["candidates"]
        row["passed"] = policy["passed"] + single["passed"]
        return row

    def tested(self, promise: float, error: float) -> PromiseRow:
        """Return what passes in this order alone, with a chance of error."""
        bounds = [least_share(hits, self.requests, error) for hits in self.hits]
        passed = passing(bounds, promise)
        last = max(passed - 1, 0)
        configuration, probability = self.candidates[last]
        return {
            "budget_ms": self.budget_ms,
            "is_wanted": self.is_wanted,
            "planned_ms": self.planned_ms,
            "promise": promise,
            "kept": passed > 0,
            "configuration": configuration,
            "probability": probability,
            "on_time": self.hits[last] / max(self.requests, 1),
            "bound": bounds[last],
            "requests": self.requests,
            "expected_accuracy": self.accuracy[last],
            "candidates": len(self.candidates),
            "passed": passed,
        }


def with_smaller(
    problem: Problem, rows: Tensor, budgets_ms: Tensor, cost_ms: float = 0.0
) -> dict[float, bool]:
    """Return all budgets that rules are sought for, in ascending order, and whether they were asked
    for: B budgets, and below each the smaller ones that it brings, down to the next one and as far
    as any answer is in time.

    Args:
        rows: int64 [n], the fitted samples.
        budgets_ms: float [B].
        cost_ms: the time of a decision.
    """
    everything = torch.arange(problem.values.num_configurations).expand(len(rows), -1)
    unread = torch.zeros(everything.shape[1], dtype=torch.bool)
    times = _times(problem, (rows.unsqueeze(1), everything), unread)
    least_ms = float(times[~times.isnan()].min())
    budgets = dict[float, bool]()
    below = 0.0
    for budget in sorted(budgets_ms.tolist()):
        for factor in reversed(SMALLER):
            smaller = factor * budget
            in_time = _planned(problem, smaller, cost_ms) >= least_ms
            if in_time and smaller > (1 + LEAST_STEP) * below:
                budgets[smaller] = False
        budgets[budget] = True
        below = budget
    return budgets


def _planned(problem: Problem, budget_ms: float, cost_ms: float) -> float:
    """Return what is left of a budget for the answer, ms."""
    reserve = RESERVE if problem.facts.unit == MS else 0.0
    return max((1 - reserve) * (budget_ms - cost_ms), MIN_LATENCY_MS)


def wanted_rows(rows: Sequence[PromiseRow]) -> list[PromiseRow]:
    """Return the rows of the budgets that were asked for."""
    return [row for row in rows if row.get("is_wanted", True)]


def trials_of(
    problem: Problem,
    rows: Tensor,
    requests: IndependentRequests,
    budgets_ms: Tensor,
    static: Static,
    held_out: Decide | None = None,
    deployed: Decide | None = None,
    *,
    allowed: Tensor | None = None,
    cost_ms: float = 0.0,
) -> list[Trial]:
    """Put the candidates at each of B budgets in order, and test them; in ascending order.

    Args:
        rows: int64 [n], the fitted samples, which candidates are put in order by.
        requests: drawn from the samples that were held back.
        budgets_ms: float [B].
        static: knows which configuration is most often on time, which decides for a request that
            limits forbid a candidate's configuration for.
        held_out: what the policy chooses for `rows`, each by a network that was not fitted on it;
            None for single configurations alone.
        deployed: what the deployed policy chooses for the requests.
        allowed: bool [N, C], what limits on further costs let samples have, whether or not it was
            measured; None for everything.
        cost_ms: the time of a decision.
    """
    candidates = [PromiseCandidate(c, 0.0) for c in range(problem.values.num_configurations)]
    if held_out is not None:
        candidates += [PromiseCandidate(POLICY, p) for p in PROBABILITIES]
    reads = torch.tensor([c.configuration == POLICY for c in candidates])
    count = len(requests.rows)
    clusters = cluster_numbers(problem.facts, rows)
    if allowed is None:
        allowed = torch.ones_like(problem.facts.mask)
    result = []
    for budget in sorted(budgets_ms.tolist()):
        left = _planned(problem, budget, cost_ms)
        chosen = _chosen(candidates, left, allowed[rows], static, held_out)
        on_time, accuracy = _expected(problem, rows, chosen, left, reads)
        mean_ms = static.latency_ms[chosen.numpy()].mean(0)
        order = in_order(_surely(on_time, reads, clusters), accuracy.mean(0).numpy(), mean_ms)
        accuracies = accuracy.mean(0)[order].tolist()
        kept = [candidates[i] for i in order]
        answers = _chosen(kept, left, allowed[requests.rows], static, deployed)
        hits = count - late(problem, requests, answers, left, reads[order]).sum(0)
        trial = Trial(budget, left, kept, accuracies, hits.tolist(), count)
        if kept[0].configuration == POLICY:
            (alone,) = trials_of(
                problem,
                rows,
                requests,
                torch.tensor([budget]).double(),
                static,
                allowed=allowed,
                cost_ms=cost_ms,
            )
            trial = trial._replace(alone=alone)
        result.append(trial)
    return result


def _chosen(
    candidates: Sequence[PromiseCandidate],
    left: float,
    allowed: Tensor,
    static: Static,
    decide: Decide | None,
) -> Tensor:
    """Return what candidates choose with so many ms left, of what limits allow, bool [n, C]: int64
    [n, K]."""
    share = np.broadcast_to(static.on_time(left), allowed.shape)
    safest = torch.from_numpy(pick(share, static.latency_ms, allowed.numpy()))
    columns = []
    for configuration, probability in candidates:
        if configuration == POLICY:
            assert decide is not None
            columns.append(decide(left, float(ndtri(probability))))
        else:
            columns.append(safest.masked_fill(allowed[:, configuration], configuration))
    return torch.stack(columns, 1)


def deciding(rows: Sequence[PromiseRow]) -> list[PromiseRow]:
    """Return the row whose rule decides at the budget of each row, in ascending order: its own, or
    where no candidate passed that of the next smaller budget with a promise, if there is one."""
    result: list[PromiseRow] = []
    for row in rows:
        # of what decided before, only a promise goes on
        goes_on = not row["kept"] and bool(result) and result[-1]["kept"]
        result.append(result[-1] if goes_on else row)
    return result


def arrays_of(rows: Sequence[PromiseRow]) -> dict[str, NDArray[Any]]:
    """Collect what `agents.deployed.promise.Promise` reads: all budgets that were asked for, and
    columns of those [B] whose own rule decides. A smaller one without a promise has none."""
    trained_ms = np.array([row["budget_ms"] for row in wanted_rows(rows)])
    pairs = zip(rows, deciding(rows), strict=True)
    rows = [row for row, decides in pairs if decides is row]
    rows = [row for row in rows if row["kept"] or row.get("is_wanted", True)]
    return {
        "trained_ms": trained_ms,
        "budgets_ms": np.array([row["budget_ms"] for row in rows]),
        "planned_ms": np.array([row["planned_ms"] for row in rows]),
        "fixed": np.array([row["configuration"] for row in rows]),
        "quantiles": ndtri(np.array([row["probability"] for row in rows])),
        "shares": np.array([row["promise"] * row["kept"] for row in rows]),
    }


def _times(problem: Problem, cells: tuple[Tensor, Tensor], reads: Tensor) -> Tensor:
    """Return the measurements of cells [n, K], float64 [n, K, R]; for `reads` see `late`."""
    table = problem.values
    times = table.measurements_ms[cells].double()
    if table.first_look_ms is None:
        return times
    first_look = table.first_look_ms[cells].masked_fill(reads, 0.0)
    return times - first_look.unsqueeze(-1)


def _surely(on_time: Tensor, reads: Tensor, clusters: Tensor) -> NDArray[np.float64]:
    """Return the shares on time that candidates are put in order by, of those of samples [n, K]:
    [K].

    The policy was chosen among many, by the samples that it is put in order by. So it stands before
    a single configuration only where it is clearly safer, not where both are as often on time: two
    standard errors of the difference from the safest of them are taken off, and a trifle.

    Args:
        reads: bool [K], which candidates are the policy.
        clusters: int64 [n], of the samples.
    """
    shares = on_time.mean(0)
    safest = on_time[:, ~reads][:, shares[~reads].argmax()]
    for index in reads.nonzero().flatten().tolist():
        shares[index] -= 2 * standard_error(on_time[:, index] - safest, clusters) + 1e-9
    return shares.numpy()


def _expected(
    problem: Problem, rows: Tensor, chosen: Tensor, left: float, reads: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the shares on time and the accuracies of choices int64 [n, K]: float64 [n, K] each.
    What was not measured is late and wrong."""
    cells = rows.unsqueeze(1), chosen
    on_time = share_on_time(_times(problem, cells, reads), torch.tensor(left))
    over = problem.rule.over(problem.values)
    if over is not None:
        on_time = on_time * ~over[cells]
    accuracy = problem.values.accuracy[cells].double().nan_to_num()
    return on_time, accuracy
