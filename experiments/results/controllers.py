"""Let controllers and baselines decide on the held-out samples, and gather what they decided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl
import torch
from torch import Tensor

from knobwise.agents.checkpoint import Loaded
from knobwise.agents.judging.evaluation import Outcomes, judge_all
from knobwise.agents.judging.policy import Baseline
from knobwise.agents.serving.own_cost import own_costs
from knobwise.agents.stack.deployed import DeployedController
from knobwise.agents.stack.prices import MeanBudgetPolicy
from knobwise.envs.configurations.reward import RewardTable
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.results.decisions import decision_rows
from knobwise.experiments.results.equal_latency import Reference
from knobwise.experiments.results.problem import DEADLINE, MEAN_BUDGET
from knobwise.experiments.results.statistics import with_interval
from knobwise.experiments.results.summary import Results, labels_of, summary_of


def judge_deadlines(
    table: ProfileTable,
    test: Tensor,
    budgets_ms: Tensor,
    rewards: RewardTable,
    controllers: Sequence[DeployedController],
    seeds: Sequence[int],
    baselines: Sequence[Baseline],
    charge: bool = True,
    before: Sequence[DeployedController | None] = (),
) -> tuple[Results, pl.DataFrame]:
    """Return the contents of `results.json` and of `decisions.parquet`: controllers, one for each
    of `seeds`, and their teachers and baselines on the same samples under the same deadlines.

    Controllers are charged their own cost: the time of their decisions and of the features that
    they read. `utility_free` is what they would have got for nothing. All others decide for free,
    and have neither that nor a decision time.

    Args:
        test: int64 [n], samples that nothing was fitted or chosen on.
        budgets_ms: float [B].
        rewards: the reward of the column `reward`.
        baselines: `budget_aware_static` and `oracle` must be among them.
        charge: whether controllers pay for their decisions.
        before: the controllers as they were before GRPO, for what it added (`grpo_gain`).
    """
    deciders = [controller.decider for controller in controllers]
    costs = own_costs(deciders, table, test, budgets_ms)
    spent = [cost.charged_ms * charge for cost in costs]
    policies: dict[str, list[Any]] = {"controller": deciders}
    if all(controller.teacher is not None for controller in controllers):
        policies["teacher"] = [controller.guarded_teacher for controller in controllers]
    policies |= {baseline.name: [baseline] for baseline in baselines}
    policies["if_free"] = [controller.if_free for controller in controllers]
    started = [controller.decider for controller in before if controller is not None]
    if len(started) == len(controllers):
        policies["before"] = started
    # only controllers pay for their decisions
    paid = {"controller": spent, "before": spent}
    judged = judge_all(table, test, budgets_ms, rewards, policies, paid)
    if_free = judged.pop("if_free")
    untrained = judged.pop("before", [])

    # what only controllers have, among it the probabilities that their teachers predict
    further = []
    for i, outcome in enumerate(judged["controller"]):
        left_ms = budgets_ms - spent[i]
        columns: dict[str, Any] = {"decision_us": costs[i].decision_us}
        columns["score_free"] = if_free[i].utility
        chances = expected_in_time(controllers[i], table, test, outcome.chosen, left_ms)
        further.append(columns | {"expected_in_time": chances})
    decisions = decision_frame(table, test, budgets_ms, judged, seeds, further)
    results = summary_of(DEADLINE, decisions, table, test, seeds)

    if untrained:
        pairs = zip(untrained, judged["controller"], strict=True)
        gains = torch.stack([last.utility - first.utility for first, last in pairs])
        results["grpo_gain"] = with_interval("test", gains.mean(2).double().numpy())
    return results, decisions


def over_splits(
    table: ProfileTable,
    tests: Sequence[Tensor],
    seeds: Sequence[int],
    decisions: Sequence[pl.DataFrame],
) -> tuple[Results, pl.DataFrame]:
    """Return the contents of `results.json` and of `decisions.parquet` of several splits together,
    from the decisions in each of them under the same deadlines.

    Every row also has `utility_per_split`. `test_samples` counts a sample once for each split that
    judges it.

    Args:
        tests: int64 [n], the test samples of each split.
        seeds: of the controllers.
        decisions: from `judge_deadlines`, of each split.
    """
    together = pl.concat(
        frame.with_columns(split=pl.lit(split, pl.Int64)) for split, frame in enumerate(decisions)
    )
    return summary_of(DEADLINE, together, table, torch.cat(list(tests)), seeds), together


def judge_mean_budgets(
    table: ProfileTable,
    fitted: Tensor,
    test: Tensor,
    budgets_ms: Tensor,
    controllers: Sequence[DeployedController],
    seeds: Sequence[int],
    baselines: Sequence[MeanBudgetPolicy],
    charge: bool = True,
) -> tuple[Results, pl.DataFrame]:
    """Return the contents of `results.json` and of `decisions.parquet` under mean budgets.

    Besides the keys under deadlines a row has `price` (λ) and `worth_ms` (1/λ, None at price 0),
    the differences in accuracy `over_static_mix` and `over_best_single` at equal mean latency and
    `over_static_mix_at_budget`, each with its `_ci95`, and `oracle_accuracy` at equal mean latency.
    `utility` is the accuracy; `gap_closed` is at equal mean latency.

    A budget limits the mean over all data sets, so a policy may spend more on one of them than on
    another. `by_dataset` compares it with the static mix of all data sets that spends as much on
    this one.

    Args:
        fitted: int64, the rows that static policies are chosen on.
        test: int64 [n], samples that nothing was fitted, chosen or calibrated on.
        budgets_ms: float [B].
        seeds: of the controllers.
        baselines: those that look at the request; the static ones and the oracle are added.
        charge: whether controllers pay for their decisions.
    """
    reference = Reference(table, fitted, test)
    costs = own_costs([each.decider for each in controllers], table, test, budgets_ms)
    policies = [controller.under_mean_budgets() for controller in controllers]
    spent = [cost.charged_ms * charge for cost in costs]
    judged = reference.judged(budgets_ms, policies, baselines, spent)
    further = [{"decision_us": cost.decision_us} for cost in costs]
    decisions = decision_frame(table, test, budgets_ms, judged, seeds, further)

    results = summary_of(MEAN_BUDGET, decisions, table, test, seeds, reference)
    # a price belongs to a budget, so a mean over the budgets has none
    prices = {baseline.name: 1 / baseline.worths for baseline in baselines}
    prices["controller"] = torch.stack([1 / policy.worths for policy in policies]).mean(0)
    price_at = {}
    for name, of_budgets in prices.items():
        for budget, price in zip(results["budgets_ms"], of_budgets.tolist(), strict=True):
            price_at[name, budget] = price
    for row in (*results["rows"], *results.get("by_dataset", [])):
        price = price_at.get((row["policy"], row["budget_ms"]))
        row |= {"price": price, "worth_ms": 1 / price if price else None}
        row |= {"accuracy": row["utility"], "accuracy_ci95": row["utility_ci95"]}
    return results | {"sense": "mean", "static_hull": reference.hull()}, decisions


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


def held_out_choices(loaded: Sequence[Loaded]) -> Results:
    """Return the choices made on held-out samples in training; every list has an entry for each
    seed.

    Returns:
        `guard`: rows of `knobwise.agents.stack.guard.calibrate`, or under mean budgets of
        `knobwise.agents.stack.prices.compared`, [] without a guard. `chosen`: the weights of the
        teacher, the settings of its experts, the iteration of the controller, and validation
        utility where GRPO starts. `satisfaction_level`: the level that the guard keeps, if any.
    """
    choices: Results = {"guard": [], "chosen": []}
    for checkpoint in loaded:
        teacher = checkpoint.controller.teacher
        choice = teacher.chosen() if teacher is not None else {"weights": {}, "settings": {}}
        extra = checkpoint.extra
        choice |= {"iteration": extra["iteration"], "grpo": extra.get("grpo", {})}
        choices["chosen"].append(choice)
        if guard := checkpoint.controller.settled.guard:
            choices["guard"].append(guard)
            if "level" in guard[0]:
                choices["satisfaction_level"] = guard[0]["level"]
    return choices


def gain_on_held_out(loaded: Sequence[Loaded]) -> dict[str, Any]:
    """Return what GRPO added on the samples that were held out in training, as `grpo_gain` has it;
    {} where there was no GRPO, or no warm-up before it.

    It is the difference, sample by sample, between the weights that are kept and those that GRPO
    started with, of networks that were not fitted on the sample.
    """
    scores = [each.extra.get("grpo_held_out") or {} for each in loaded]
    if not all(scores):
        return {}
    gains = torch.stack([each["best"].double() - each["start"].double() for each in scores])
    return with_interval("held_out", gains.numpy())


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
