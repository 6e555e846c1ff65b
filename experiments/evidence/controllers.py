"""Let controllers and baselines decide on the held-out samples, and gather what they decided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import polars as pl
import torch
from torch import Tensor

from knobwise.agents.calibration.deployed_controller import DeployedController
from knobwise.agents.calibration.prices import MeanBudgetPolicy
from knobwise.agents.evaluation.evaluation import judge_all
from knobwise.agents.evaluation.own_cost import own_costs
from knobwise.agents.evaluation.policy import Baseline
from knobwise.agents.training.checkpoint import Loaded
from knobwise.envs.bandit.outcomes import Outcomes
from knobwise.envs.bandit.reward import RewardTable
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.evidence.decisions import decision_rows
from knobwise.experiments.evidence.equal_latency import Reference
from knobwise.experiments.evidence.schema import Chosen, GrpoGain, RunResults
from knobwise.experiments.evidence.statistics import with_interval
from knobwise.experiments.evidence.summary import labels_of, summary_of
from knobwise.experiments.evidence.task import DEADLINE, MEAN_BUDGET


def judge_on_test(
    table: ProfileTable,
    fitted: Tensor,
    test: Tensor,
    budgets_ms: Tensor,
    controllers: Sequence[DeployedController],
    seeds: Sequence[int],
    baselines: Sequence[Any],
    charge: bool = True,
    rewards: RewardTable | None = None,
    before: Sequence[DeployedController | None] = (),
) -> tuple[RunResults, pl.DataFrame]:
    """Return the contents of `results.json` and of `decisions.parquet`: controllers, one for each
    of `seeds`, and other policies on the same samples under the same budgets.

    Controllers are charged their own cost: the time of their decisions and of the features that
    they read. All others decide for free, and have no decision time.

    Args:
        fitted: int64, the rows that static policies are chosen on under mean budgets.
        test: int64 [n], samples that nothing was fitted, chosen or calibrated on.
        budgets_ms: float [B].
        baselines: under deadlines `budget_aware_static` and `oracle` must be among them; under mean
            budgets the static ones and the oracle are added.
        charge: whether controllers pay for their decisions.
        rewards: under deadlines the reward of the column `reward`.
        before: the controllers as they were before GRPO, for what it added (`grpo_gain`).
    """
    costs = own_costs([each.decider for each in controllers], table, test, budgets_ms)
    spent = [cost.charged_ms * charge for cost in costs]
    further: list[dict[str, Any]] = [{"decision_us": cost.decision_us} for cost in costs]
    if controllers[0].sense == "mean":
        reference = Reference(table, fitted, test)
        policies = [controller.under_mean_budgets() for controller in controllers]
        outcomes = reference.judged(budgets_ms, policies, baselines, spent)
        decisions = decision_frame(table, test, budgets_ms, outcomes, seeds, further)
        results = summary_of(MEAN_BUDGET, decisions, table, test, seeds, reference)
        _add_prices(results, policies, baselines)
        return results | {"sense": "mean", "static_hull": reference.hull()}, decisions
    # only controllers pay for their decisions
    paid = {"controller": spent, "before": spent}
    deciders = _deciders(controllers, baselines, before)
    judged = judge_all(table, test, budgets_ms, rewards, deciders, paid)
    if_free = judged.pop("if_free")
    untrained = judged.pop("before", [])
    # what only controllers have: what they would have got for nothing, and the probabilities that
    # their teachers predict
    for i, outcome in enumerate(judged["controller"]):
        further[i]["score_free"] = if_free[i].utility
        about = controllers[i], table, test, outcome.chosen, budgets_ms - spent[i]
        further[i]["expected_in_time"] = expected_in_time(*about)
    decisions = decision_frame(table, test, budgets_ms, judged, seeds, further)
    results = summary_of(DEADLINE, decisions, table, test, seeds)
    if untrained:
        pairs = zip(untrained, judged["controller"], strict=True)
        gains = torch.stack([last.utility - first.utility for first, last in pairs])
        gained = with_interval("test", gains.mean(2).double().numpy())
        results["grpo_gain"] = cast("GrpoGain", gained)
    return results, decisions


def _deciders(
    controllers: Sequence[DeployedController],
    baselines: Sequence[Baseline],
    before: Sequence[DeployedController | None],
) -> dict[str, list[Any]]:
    """Return the policies that are judged under deadlines, by name."""
    policies: dict[str, list[Any]] = {
        "controller": [controller.decider for controller in controllers]
    }
    if all(controller.teacher is not None for controller in controllers):
        policies["teacher"] = [controller.guarded_teacher for controller in controllers]
    policies |= {baseline.name: [baseline] for baseline in baselines}
    policies["if_free"] = [controller.if_free for controller in controllers]
    started = [controller.decider for controller in before if controller is not None]
    if len(started) == len(controllers):
        policies["before"] = started
    return policies


def _add_prices(
    results: RunResults,
    controllers: Sequence[MeanBudgetPolicy],
    baselines: Sequence[MeanBudgetPolicy],
) -> None:
    """Add to rows under mean budgets `price` (λ), `worth_ms` (1/λ, None at price 0), and the
    accuracy, which is the utility."""
    # a price belongs to a budget, so a mean over the budgets has none
    prices = {baseline.name: 1 / baseline.worths for baseline in baselines}
    prices["controller"] = torch.stack([1 / policy.worths for policy in controllers]).mean(0)
    for row in (*results["rows"], *results.get("by_dataset", [])):
        row |= {"price": None, "worth_ms": None}
        row |= {"accuracy": row["utility"], "accuracy_ci95": row["utility_ci95"]}
        if row["policy"] in prices and row["budget_ms"] is not None:
            condition = results["budgets_ms"].index(row["budget_ms"])
            row["price"] = float(prices[row["policy"]][condition])
            row["worth_ms"] = 1 / row["price"] if row["price"] else None


@torch.no_grad()
def expected_in_time(
    controller: DeployedController,
    table: ProfileTable,
    rows: Tensor,
    chosen: Tensor,
    left_ms: Tensor,
) -> Tensor | None:
    """Return the probability that what a controller chose is on time, as its teacher expects it.

    Args:
        rows: int64 [n], samples.
        chosen: int64 [n, B], configurations.
        left_ms: [B], what its own cost leaves of the budgets.

    Returns:
        float [n, B]; None without a teacher.
    """
    if controller.teacher is None:
        return None
    x = controller.controller.normaliser.of_rows(table, rows)
    moments = controller.teacher.moments(x)
    columns = []
    for limit, choice in zip(left_ms.float(), chosen.T, strict=True):
        meets = moments.meets(limit.expand(len(rows)))
        columns.append(meets.gather(1, choice[:, None]))
    return torch.cat(columns, 1)


def held_out_choices(loaded: Sequence[Loaded]) -> RunResults:
    """Return the choices made on held-out samples in training; every list has an entry for each
    seed.

    Returns:
        `guard`: rows of `knobwise.agents.calibration.guard.calibrate`, or under mean budgets of
        `knobwise.agents.calibration.prices.compared`, [] without a guard. `chosen`: the weights of
        the teacher, the settings of its experts, the iteration of the controller, and validation
        utility where GRPO starts. `satisfaction_level`: the level that the guard keeps, if any.
    """
    choices: RunResults = {"guard": [], "chosen": []}
    for checkpoint in loaded:
        teacher = checkpoint.controller.teacher
        choice: Chosen = {"weights": {}, "settings": {}}
        if teacher is not None:
            choice = teacher.chosen()
        extra = checkpoint.extra
        choice |= {"iteration": extra["iteration"], "grpo": extra.get("grpo", {})}
        choices["chosen"].append(choice)
        if guard := checkpoint.controller.settled.guard:
            choices["guard"].append(guard)
            if "level" in guard[0]:
                choices["satisfaction_level"] = guard[0]["level"]
    return choices


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
    return cast("GrpoGain", with_interval("held_out", gains.numpy()))


def decision_frame(
    table: ProfileTable,
    test: Tensor,
    budgets_ms: Tensor,
    judged: Mapping[str, Sequence[Outcomes]],
    seeds: Sequence[int],
    further: Sequence[Mapping[str, Any]],
) -> pl.DataFrame:
    """Return the content of `decisions.parquet`.

    Args:
        test: int64 [n], the samples that were judged.
        budgets_ms: float [B].
        judged: outcomes by policy, for each seed where there are several.
        seeds: of the trained policies.
        further: more columns of the controller of each seed, float [n, B] or [B].
    """
    # a row for each judged sample
    names: dict[str, Any] = {"sample_id": table.sample_ids, "dataset": table.datasets or None}
    if table.clusters:
        names["cluster"] = table.clusters
    elif table.image_ids:
        # an image is known by its data set and id
        names["cluster"] = list(map("/".join, table.split_keys))
    samples = pl.DataFrame(names)[test.numpy()]
    labels = pl.Series([*labels_of(table), None], dtype=pl.String)  # the last one stands for −1
    frames = []
    for policy, outcomes in judged.items():
        of_seeds = seeds if policy in DEADLINE.trained else [None]
        for i, (seed, outcome) in enumerate(zip(of_seeds, outcomes, strict=True)):
            columns = dict(vars(outcome))
            columns["choice"] = labels[columns.pop("chosen").flatten().numpy()]
            columns["score"] = columns.pop("utility")
            if policy == "controller":
                columns |= further[i]
            frames.append(decision_rows(policy, seed, samples, budgets_ms.tolist(), columns))
    return pl.concat(frames)
