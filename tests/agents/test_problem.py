"""What decisions get where limits on further costs, cells that nobody measured and a first look
meet, all by hand."""

from dataclasses import replace

import pytest
import torch
from helpers import close, identical, input_error, table_of

from knobwise.agents.calibration.guard import calibrate
from knobwise.agents.calibration.mean_policies import StaticMix, outcomes_of
from knobwise.agents.evaluation.problems import problem_of
from knobwise.agents.problem import Problem
from knobwise.envs.bandit.outcomes import Decisions
from knobwise.envs.bandit.rules import Deadline, MeanBudget
from knobwise.envs.tables.beliefs import Beliefs
from knobwise.envs.tables.splits import Split
from knobwise.experiments.evidence.profile_facts import configuration_rows

ROWS = torch.arange(3)
CHOSEN = torch.tensor([[0], [1], [1]])
BUDGET = torch.tensor([5.0])
LOOK = torch.ones(3, 2)
"""A first look took 1 ms of each latency."""
MASK = torch.tensor([[True, False], [True, False], [False, True]])
"""What was measured where there are holes: of the choices the first and the last."""


def cells(accuracy, latency_ms, usd):
    """Three samples under two configurations."""
    fields = torch.tensor(accuracy), torch.tensor([latency_ms] * 3)
    return table_of(*fields, costs={"usd": torch.tensor([usd] * 3)}, first_look_ms=LOOK)


WHOLE = cells([[1.0, 0.5], [0.5, 1.0], [0.25, 0.75]], [4.0, 6.0], [1.0, 3.0])
PREDICTED = cells([[0.5, 0.25], [0.5, 0.5], [0.25, 0.5]], [6.0, 4.0], [3.0, 1.0])


def measured_or(accuracy, latency_ms, usd):
    """What was measured, and in the holes these."""
    return {
        "accuracy": WHOLE.accuracy.where(MASK, accuracy),
        "latency_ms": WHOLE.latency_ms.where(MASK, latency_ms),
        "costs": {"usd": WHOLE.costs["usd"].where(MASK, usd)},
    }


def problem_under(rule, holes):
    """With holes a measured cell stands for two, so that the estimate is twice what was measured
    less what was predicted; and elsewhere it is what was predicted."""
    if not holes:
        return replace(Problem.from_table(WHOLE), rule=rule)
    nothing = measured_or(*[torch.tensor(torch.nan)] * 3)
    measured = replace(WHOLE, mask=MASK, first_look_ms=LOOK * MASK, **nothing)
    predicted = PREDICTED.accuracy, PREDICTED.latency_ms, PREDICTED.costs["usd"]
    filled = replace(WHOLE, **measured_or(*predicted))
    beliefs = Beliefs(measured, filled, PREDICTED, weight=2.0 * MASK)
    return replace(Problem.from_table(measured), rule=rule, beliefs=beliefs)


@pytest.mark.parametrize(
    ("limit", "holes", "reads", "latency_ms", "on_time", "utility", "feasible"),
    [
        # whole: 4, 6 and 6 ms with the first look, of which one meets 5 ms; without it all do
        (None, False, True, [4, 6, 6], [1, 0, 0], [1, 0, 0], [1, 1, 1]),
        (None, False, False, [3, 5, 5], [1, 1, 1], [1, 1, 0.75], [1, 1, 1]),
        # the second configuration costs 3 USD: it is late at any time
        (2.0, False, True, [4, 6, 6], [1, 0, 0], [1, 0, 0], [1, 1, 1]),
        (2.0, False, False, [3, 5, 5], [1, 0, 0], [1, 0, 0], [1, 1, 1]),
        # predicted are 6 ms and .5; 4 ms and .5; 4 ms and .5
        (None, True, True, [2, 4, 8], [2, 1, -1], [2, 0.5, -0.5], [1, 1, 1]),
        (None, True, False, [1, 3, 7], [1, 1, 1], [1.5, 0.5, 1], [1, 1, 1]),
        # by the predictions it is the first configuration that costs 3 USD; of the last sample both
        # do, the measured one and the predicted one
        (2.0, True, True, [2, 4, 8], [2, 1, -1], [2, 0.5, -0.5], [1, 1, 0]),
        (2.0, True, False, [1, 3, 7], [2, 1, -1], [2, 0.5, -0.5], [1, 1, 0]),
    ],
)
def test_outcomes_under_a_deadline_by_hand(
    limit, holes, reads, latency_ms, on_time, utility, feasible
):
    problem = problem_under(Deadline({"usd": limit} if limit else {}), holes)
    decisions = Decisions(ROWS, CHOSEN, BUDGET, reads=torch.tensor([reads]))
    outcomes = problem.outcomes(decisions)
    close(outcomes.latency_ms[:, 0], torch.tensor(latency_ms).float())
    close(outcomes.on_time[:, 0], torch.tensor(on_time).float())
    close(outcomes.utility[:, 0], torch.tensor(utility).float())
    identical(outcomes.feasible[:, 0], torch.tensor(feasible).bool())
    # how right an answer is does not depend on what it costs
    close(outcomes.accuracy[:, 0], torch.tensor([1.5, 0.5, 1.0] if holes else [1.0, 1.0, 0.75]))


@pytest.mark.parametrize(
    ("holes", "reads", "accuracy", "latency_ms", "reward"),
    [
        # a right answer may cost 10 ms
        (False, True, [1, 1, 0.75], [4, 6, 6], [0.6, 0.4, 0.15]),
        (False, False, [1, 1, 0.75], [3, 5, 5], [0.7, 0.5, 0.25]),
        (True, True, [1.5, 0.5, 1], [2, 4, 8], [1.3, 0.1, 0.2]),
        (True, False, [1.5, 0.5, 1], [1, 3, 7], [1.4, 0.2, 0.3]),
    ],
)
def test_outcomes_under_a_mean_budget_by_hand(holes, reads, accuracy, latency_ms, reward):
    problem = problem_under(MeanBudget(), holes)
    decisions = Decisions(ROWS, CHOSEN, torch.tensor([10.0]), reads=torch.tensor([reads]))
    outcomes = problem.outcomes(decisions)
    wanted = {"accuracy": accuracy, "utility": accuracy, "latency_ms": latency_ms, "reward": reward}
    for name, values in wanted.items():
        close(getattr(outcomes, name)[:, 0], torch.tensor(values).float())
    # policies are judged by the same, and chosen by predictions that count as they are
    if reads:
        both = outcomes_of(problem, ROWS, CHOSEN)
        close(torch.cat(both, 1).T, torch.tensor([accuracy, latency_ms]).double())
    if holes:
        both = outcomes_of(problem, ROWS, CHOSEN, checked=False)
        close(torch.cat(both, 1).T, torch.tensor([[1, 0.5, 0.75], [4, 4, 6]]).double())


def test_what_a_decision_costs_is_added_to_the_latency_in_rewards_too():
    """4 ms and 1 ms of its own, where a right answer may cost 10 ms: 1 − 5/10, not 1 − 4/9."""
    outcomes = problem_under(MeanBudget(), False).outcomes(
        Decisions(ROWS, CHOSEN, torch.tensor([10.0]), cost_ms=1.0)
    )
    close(outcomes.latency_ms[:, 0], torch.tensor([5.0, 7, 7]))
    close(outcomes.reward[:, 0], torch.tensor([0.5, 0.3, 0.05]))


@pytest.mark.parametrize(
    ("limit", "holes", "on_time"),
    [
        # the second configuration takes 6 ms, or 4 as predicted, of 7 ms
        (None, False, 1.0),
        (None, True, 1.0),
        # 3 USD are too much, and the first one would have done; as is everything above half a USD
        (2.0, False, 0.0),
        (0.5, False, 0.0),
        # predicted is 1 USD, on time; of the third sample, which stands for two, 3 USD were measured:
        # (1 + 1 + (1 + 2·(0 − 1))) / 3
        (2.0, True, 1 / 3),
    ],
)
def test_a_guard_counts_answers_above_a_limit_as_late_by_hand(limit, holes, on_time, monkeypatch):
    # of three samples
    monkeypatch.setattr("knobwise.envs.tables.measured_decisions.FEWEST_MEASURED", 1)
    problem = problem_under(Deadline({"usd": limit} if limit else {}), holes)
    second = torch.ones(3, 1, dtype=torch.int64)
    (row,) = calibrate(problem, ROWS, torch.tensor([7.0]), second, second)
    assert row["on_time"] == pytest.approx(on_time)


def test_a_mean_budget_is_kept_by_the_mean_of_what_a_cell_was_measured_at():
    """size=1 took 10, 10 and 40 ms each time: 20 on average, which a median of 10 would hide."""
    accuracy = torch.tensor([[0.0, 1.0]]).repeat(3, 1)
    repeats_ms = torch.tensor([[5.0, 5.0, 5.0], [10.0, 10.0, 40.0]]).repeat(3, 1, 1)
    table = table_of(accuracy, repeats_ms)
    problem = replace(Problem.from_table(table), rule=MeanBudget())
    worth_ms = torch.tensor([50.0])
    judged = problem.outcomes(Decisions(ROWS, CHOSEN, worth_ms))
    close(judged.latency_ms, [[5.0], [20.0], [20.0]])
    close(judged.reward, [[-5 / 50], [1 - 20 / 50], [1 - 20 / 50]])
    close(outcomes_of(problem, ROWS, CHOSEN)[1].float(), [[5.0], [20.0], [20.0]])
    # budgets lie between the two means, at 10 to 90 % of the way
    close(problem.budgets().float(), [6.5, 8.75, 12.5, 16.25, 18.5])
    worth = problem.rule.worth(table.accuracy, table.measurements_ms, worth_ms[:, None, None])
    close(worth[0, 0], [-5 / 50, 1 - 20 / 50])
    mix = StaticMix.fit(problem.cells, ROWS, torch.tensor([5.0, 12.5, 20.0]))
    close(mix.expected(problem, ROWS)[1][0].float(), [5.0, 12.5, 20.0])
    # a deadline is met or missed by single measurements, and the table still shows medians
    close(Problem.from_table(table).cells.latency_ms, table.latency_ms)


def drawn_unequally():
    """20 samples of which the first ten are easy. size=1 is right for these alone: it was measured
    for all of them, as a policy chose it there, and for one of the others, which stands for ten."""
    accuracy = torch.tensor([[1.0, 1.0]] * 10 + [[1.0, 0.0]] * 10)
    accuracy[11:, 1] = torch.nan
    weight = torch.ones(20, 2)
    weight[10, 1] = 10.0
    weight[11:, 1] = 0.0
    latency_ms = torch.tensor([20.0, 40.0]).expand(20, 2).where(~accuracy.isnan(), torch.nan)
    return table_of(accuracy, latency_ms, sampling_weight=weight)


def test_means_of_a_profile_weigh_what_was_measured_by_what_it_stands_for():
    table = drawn_unequally()
    _, one = configuration_rows(table, torch.arange(20))
    assert one["accuracy"] == pytest.approx(10 / 20)  # of 11 measured cells 10 are right
    assert one["latency_ms"] == 40
    _, one = configuration_rows(replace(table, sampling_weight=None), torch.arange(20))
    assert one["accuracy"] == pytest.approx(10 / 11)


def test_what_was_chosen_to_be_measured_needs_predictions():
    table = drawn_unequally()
    split = Split(torch.arange(4, 16), torch.arange(16, 20), torch.arange(4))
    with input_error("size=1.* 1 .* 10 .*unprofiled=predict"):
        problem_of(table, split, unprofiled="forbid")
    equally = replace(table, sampling_weight=2.0 * table.mask)
    assert problem_of(equally, split, unprofiled="forbid").beliefs is None
