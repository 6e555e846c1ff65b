"""Judge controllers beside every simple way on the held-out samples: the contents of `results.json`
and of `decisions.parquet`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar, cast

import polars as pl
import torch
from torch import Tensor

from knobwise.agents.calibration.deployed_controller import DeployedController
from knobwise.agents.calibration.guard import are_gains_known
from knobwise.agents.calibration.mean_policies import MixingPolicy
from knobwise.agents.evaluation.own_cost import OwnCost, own_costs
from knobwise.agents.evaluation.policy import Baseline
from knobwise.agents.problem import Problem
from knobwise.agents.training.checkpoint import Loaded
from knobwise.common.words import is_known
from knobwise.envs.bandit.reward import RewardTable
from knobwise.envs.tables.measured_decisions import are_known
from knobwise.experiments.evidence.decisions import BEFORE, IF_FREE, SAMPLE
from knobwise.experiments.evidence.evaluate import Deadlines, Policies, alone, evaluate
from knobwise.experiments.evidence.mean_budgets import MeanBudgets
from knobwise.experiments.evidence.profile_facts import configuration_rows, costs_of, profile_of
from knobwise.experiments.evidence.promises import promises_on_test
from knobwise.experiments.evidence.results import rows_at, value_of
from knobwise.experiments.evidence.schema import (
    Chosen,
    ConfigurationRow,
    DatasetRow,
    GrpoGain,
    PolicyRow,
    RunResults,
)
from knobwise.experiments.evidence.statistics import with_interval
from knobwise.experiments.evidence.summarise import (
    reliability,
    summarise,
    usage,
    with_score_of,
)
from knobwise.experiments.evidence.task import PROMISED, Metric, Task, task_of, with_costs

P = TypeVar("P")
LEARNED = "controller"
EVALUATORS: dict[str, type[Deadlines] | type[MeanBudgets]] = {
    kind.task.name: kind for kind in (Deadlines, MeanBudgets)
}
"""By the kind of the rule, which is the name of the task."""


def evaluator_of(
    problem: Problem, budgets_ms: Tensor, rewards: RewardTable | None = None
) -> Deadlines | MeanBudgets:
    """Return what judges policies on a problem, at budgets [B]; for `rewards` see `OnTable`."""
    return EVALUATORS[problem.rule.kind](problem, budgets_ms, rewards)


def evaluate_controllers(
    evaluator: Deadlines | MeanBudgets,
    controllers: Sequence[DeployedController],
    seeds: Sequence[int],
    baselines: Sequence[Baseline | MixingPolicy],
    charge: bool = True,
    before: Sequence[DeployedController | None] = (),
) -> tuple[RunResults, pl.DataFrame]:
    """Judge controllers, one for each of `seeds`, and other policies on the same samples.

    Controllers are charged their own cost: the time of their decisions and of the features that
    they read. All others decide for free, and have no decision time.

    Args:
        baselines: the reference policy and the upper bound of the task must be among them.
        charge: whether controllers pay for their decisions.
        before: the controllers as they were before GRPO, for what it added (`grpo_gain`).

    Returns:
        The contents of `results.json` and of `decisions.parquet`.
    """
    deciders = [controller.decider for controller in controllers]
    costs: dict[int | None, OwnCost] = {}
    timed = own_costs(deciders, evaluator.table, evaluator.rows, evaluator.budgets_ms)
    for seed, cost in zip(seeds, timed, strict=True):
        costs[seed] = cost._replace(charged_ms=cost.charged_ms * charge)
    learned = {LEARNED: _by_seed(seeds, map(evaluator.ways.deployed, controllers))}
    policies: Policies = {**learned, **alone(baselines)}
    charged = {LEARNED: costs}
    if evaluator.task.charged:
        if all(controller.teacher is not None for controller in controllers):
            teachers = _by_seed(seeds, (controller.guarded_teacher for controller in controllers))
            policies = {**learned, "teacher": teachers, **alone(baselines)}
        if evaluator.task is PROMISED:
            static = controllers[0].static_under_promise
            policies = {**policies, PROMISED.low: {None: static}}
        # the controllers as they would be otherwise
        free = _by_seed(seeds, (controller.if_free for controller in controllers))
        policies = {**policies, IF_FREE: free}
        started = [controller for controller in before if controller is not None]
        if len(started) == len(controllers):
            policies = {**policies, BEFORE: _by_seed(seeds, started)}
            charged[BEFORE] = costs
    decisions = evaluate(evaluator, policies, charged)
    results = controller_results(evaluator, decisions, seeds)
    evaluator.add_facts(results, policies)
    if evaluator.task is PROMISED:
        results["promises"] = promises_on_test(evaluator, controllers, seeds, costs)
    if BEFORE in policies:
        score = evaluator.judged_by
        gained = with_score_of(decisions, BEFORE, score, "before", seeds=True)
        gained = gained.filter(policy=LEARNED)
        metric = Metric("test", value=pl.col(score) - pl.col("before"))
        (row,) = summarise(gained, [metric], conditions=False)
        if row["test"] is not None:
            results["grpo_gain"] = {"test": row["test"], "test_ci95": row["test_ci95"]}
    return results, decisions


def _by_seed(seeds: Sequence[int], policies: Iterable[P]) -> dict[int | None, P]:
    return dict(zip(seeds, policies, strict=True))


# -- results.json ----------------------------------------------------------------------------------


def controller_results(
    evaluator: Deadlines | MeanBudgets, decisions: pl.DataFrame, seeds: Sequence[int]
) -> RunResults:
    """Return what `results.json` says of decisions, for all kinds of controllers."""
    problem = evaluator.problem
    table = problem.facts
    costs = costs_of(table, problem.rule.limits)
    task = with_costs(evaluator.task, costs)
    clusters = None
    if table.clusters:
        clusters = len({table.clusters[row] for row in evaluator.rows.tolist()})
    settings = {label: table.configuration(c) for c, label in enumerate(evaluator.labels)}
    knobs = {knob.name: knob.values for knob in table.knobs}
    results: RunResults = {
        "profile": profile_of(table),
        "split": "test",
        "test_samples": len(evaluator.rows),
        "test_clusters": clusters,
        "seeds": list(seeds),
        "unit": table.unit,
        "budgets_ms": evaluator.conditions,
        "rows": policy_rows(task, with_reference_scores(decisions, evaluator.compared)),
        "configurations": _known_configurations(evaluator),
        "knob_usage": usage(decisions, (LEARNED, task.low, task.high), settings, knobs),
    }
    if problem.rule.is_own:
        results["rule"] = {"name": problem.rule.name, "numbers": problem.rule.numbers}
    if costs:
        results["costs"] = costs
    if is_score_known(results) and (bins := reliability(decisions, LEARNED)):
        results["reliability"] = bins
    # the means once more, for each of several data sets
    names = decisions.select(SAMPLE).unique(maintain_order=True)["dataset"]
    if names.n_unique() > 1:
        results["by_dataset"] = []
        for dataset in sorted(names.unique()):
            part = evaluator.of_rows(evaluator.rows[(names == dataset).to_torch()])
            of_part = with_reference_scores(decisions.filter(dataset=dataset), part.compared)
            for row in _most_important(task, policy_rows(task, of_part, conditions=False)):
                del row["decision_us_p50"]  # no data set has times of its own
                head: DatasetRow = {"dataset": dataset, "samples": len(part.rows)}
                results["by_dataset"].append({**head, **row})
    return results


def is_score_known(results: RunResults, policy: str = LEARNED) -> bool:
    """Return whether enough of what a policy decides was measured to know its score, as a mean over
    the budgets; False without a row of it."""
    return is_known(rows_at(results, None).get(policy, {}).get(task_of(results).score))


def _known_configurations(evaluator: Deadlines | MeanBudgets) -> list[ConfigurationRow]:
    """Return the means of configurations on the test samples, without those that rest on
    predictions, see `knobwise.envs.tables.measured_decisions`."""
    problem = evaluator.problem
    rows = configuration_rows(
        problem.values, evaluator.rows, evaluator.utility_budgets, problem.cells, problem.rule
    )
    if problem.beliefs is None:
        return rows
    measured = problem.facts.mask[evaluator.rows].sum(0).tolist()
    counts = dict(zip(evaluator.labels, measured, strict=True))
    return [row for row in rows if are_known(counts[row["label"]], len(evaluator.rows))]


def with_reference_scores(
    decisions: pl.DataFrame, references: Callable[[pl.DataFrame], pl.DataFrame]
) -> pl.DataFrame:
    """Return the decisions of policies that have rows, with the scores that they are compared with.

    Args:
        references: adds the columns that the metrics of the task need, see `Deadlines.compared`.
    """
    free = with_score_of(decisions, IF_FREE, "utility", "utility_if_free", seeds=True)
    free = free.with_columns(
        pl.when(policy=LEARNED).then("utility_if_free").alias("utility_if_free")
    )
    return references(free.filter(~pl.col("policy").is_in([IF_FREE, BEFORE])))


def policy_rows(task: Task, compared: pl.DataFrame, conditions: bool = True) -> list[PolicyRow]:
    """Return the rows of all policies as `results.json` has them: the mean over the conditions,
    then a row for each."""
    rows = summarise(compared, (*task.metrics, *task.numbers), conditions)
    counts = dict.fromkeys(("measured_decisions", "decisions"))
    named = [
        {"policy": row.pop("policy"), task.condition: row.pop("condition"), **counts, **row}
        for row in rows
    ]
    return cast("list[PolicyRow]", named)


def _most_important(task: Task, means: list[PolicyRow]) -> list[PolicyRow]:
    """Return the rows of the policies of `task.by_dataset`, and before the last of them the best
    of all other rows."""
    rows = {row["policy"]: row for row in means}
    *first, last = task.by_dataset
    others = sorted(rows.keys() - {*first, last})
    best = sorted(others, key=lambda policy: -value_of(rows[policy], task.ranked_by))[:1]
    return [rows[policy] for policy in (*first, *best, last) if policy in rows]


# -- from training ---------------------------------------------------------------------------------


def held_out_choices(loaded: Sequence[Loaded]) -> RunResults:
    """Return the choices made on held-out samples in training; every list has an entry for each
    seed.

    Returns:
        `guard`: rows of `knobwise.agents.calibration.guard.calibrate`, or under mean budgets of
        `knobwise.agents.calibration.mean_policies.compare_with_mix`, [] without a guard. `chosen`:
        the weights of the teacher, the settings of its experts, the iteration of the controller,
        and validation utility where GRPO starts.
    """
    choices: RunResults = {"guard": [], "chosen": []}
    for checkpoint in loaded:
        teacher = checkpoint.controller.teacher
        choice: Chosen = {"weights": {}, "settings": {}}
        if teacher is not None:
            choice = teacher.chosen()
        extra = checkpoint.extra
        guard = checkpoint.controller.calibration.guard
        start = extra.get("grpo", {}) if are_gains_known(guard) else {}
        choice |= {"iteration": extra["iteration"], "grpo": start}
        choices["chosen"].append(choice)
        if guard:
            choices["guard"].append(guard)
    return choices


def validation_scores(loaded: Sequence[Loaded]) -> RunResults:
    """Return the best score of each seed on validation, under the name of what was judged:
    `validation_utility` or `validation_reward`; {} for a checkpoint that does not say it, or whose
    guard found that too few of its choices were measured to know it."""
    if "validation_utility" not in loaded[0].extra:
        return {}
    if not all(are_gains_known(each.controller.calibration.guard) for each in loaded):
        return {}
    scores = [float(checkpoint.extra["validation_utility"]) for checkpoint in loaded]
    return cast("RunResults", {f"validation_{loaded[0].extra['judged_by']}": scores})


def gain_on_held_out(loaded: Sequence[Loaded]) -> GrpoGain:
    """Return what GRPO added on the samples that were held out in training, as `grpo_gain` has it;
    {} where there was no GRPO, or no warm-up before it.

    It is the difference, sample by sample, between the weights that are kept and those that GRPO
    started with, of networks that were not fitted on the sample.
    """
    scores = [each.extra.get("grpo_held_out") or {} for each in loaded]
    if not all(scores):
        return {}
    gains = torch.stack([each["best"].double() - each["start"].double() for each in scores])
    # checkpoints of before 0.2 do not say them
    clusters = scores[0].get("clusters")
    known = None if clusters is None else clusters.numpy()
    return cast("GrpoGain", with_interval("held_out", gains.numpy(), known))
