"""The kinds of task that a run can be about. Everything that differs between them is a field of
`Task`.

This module imports no torch, which is slow to load.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import polars as pl

from knobwise.experiments.evidence.schema import CostFacts, PolicyRow, RunResults

Row = Mapping[str, Any]
"""A row of numbers whose names are not fixed."""
GRPO = ("grpo_live", "grpo_rounds", "grpo_recorded")
"""The forms of post-training of a selector; a run is represented by the first one that it has."""
LEARNED = (*GRPO, "rce", "sft")
"""The trained selectors. GRPO starts from RCE if that is used, and RCE from SFT."""
UPPER = ("same_kind", "best_recorded", "oracle")
"""Upper bounds, which are no policies: `same_kind` knows the kinds of questions, the others choose
among the recorded sequences and know their answers."""
CONTROLS = (
    "shuffled_recorded",
    "shuffled_live",
    "shuffled_learned",
    "hidden_sft",
    "hidden_rce",
    "hidden_live",
)
"""Selectors trained on rewards that were shuffled inside each group, or without the features that
matter."""
TRAINED = (*LEARNED, *CONTROLS)
"""All selectors that were trained."""


@dataclass(frozen=True, eq=False)
class Metric:
    """A number in the rows of `results.json`, and how the decisions give it.

    Every decision has a `value`. The number is its mean over the samples, then over seeds and over
    conditions, and has an interval. With `per` it is the ratio of two such means. A number without
    an interval is an `aggregate` of the samples of a policy with one seed under one condition.
    """

    key: str
    """Its interval, if it has one, is under `{key}_ci95`, its values by seed under
    `{key}_per_seed`."""
    name: str = ""
    """The name in tables; "" for a number that has no column there."""
    how: str = ".3f"
    """The format of a score, a share or a difference; a quantity has a unit instead."""
    unit: str = ""
    """`ms` or `µs`. Costs that are no times have the unit of `results["unit"]`."""
    value: pl.Expr | None = None
    per: pl.Expr | None = None
    aggregate: pl.Expr | None = None
    in_parts: bool = False
    """Whether it is also given by seed and by split."""
    share: bool = False
    """Whether it is from 0 to 1. An estimate outside is cut off there, which brings it nearer to
    the truth."""
    minor: bool = False
    """Whether a terminal does without its column; files and pages have it."""


# the columns that a task adds to the decisions: scores of others for the same request
REFERENCE = pl.col("of_reference")
UPPER_BOUND = pl.col("of_upper_bound")


def over(score: str, other: str = "of_reference") -> pl.Expr:
    """Return how much higher the score is than that of another policy for the same request."""
    return pl.col(score) - pl.col(other)


UTILITY = Metric("utility", "utility", value=pl.col("utility"), in_parts=True, share=True)
ACCURACY = Metric("accuracy", "accuracy", aggregate=pl.mean("accuracy"), share=True)
SCORE = Metric("accuracy", "accuracy", value=pl.col("accuracy"), in_parts=True, share=True)
IF_FREE = pl.mean("utility_if_free")
FREE = Metric("utility_free", "if free", aggregate=IF_FREE, share=True, minor=True)
GAP_WIDTH = UPPER_BOUND - REFERENCE
GAP = Metric("gap_closed", "oracle gap closed", ".0%", value=over("utility"), per=GAP_WIDTH)
LATENCY = Metric(
    "latency_ms_mean", "mean latency", unit="ms", aggregate=pl.mean("latency_ms"), minor=True
)
SPENT = replace(LATENCY, value=pl.col("latency_ms"), aggregate=None, minor=False)
"""The same with an interval, where it is what a budget limits."""
ON_TIME = Metric("satisfaction", "on time", ".1%", aggregate=pl.mean("on_time"), share=True)
FEASIBLE = Metric(
    "satisfaction_feasible",
    "on time (feasible)",
    ".1%",
    aggregate=pl.col("on_time").filter("feasible").mean(),
    share=True,
    minor=True,
)
OVER_MIX = Metric("over_static_mix", "over static mix", "+.3f", value=over("accuracy"))
OVER_SINGLE = Metric(
    "over_best_single", "over best single", "+.3f", value=over("accuracy", "of_best_single")
)
ATTAINED = Metric("attained", "attained", ".0%")
"""Added where the whole run is known."""
PRICE = Metric("price", "price λ", ".3g")
"""Added where the policies are known."""
DECISION = Metric("decision_us_p50", "decision time", unit="µs", aggregate=pl.mean("decision_us"))
WEIGHT = pl.col("sampling_weight")
EFFECTIVE_CELLS = Metric(
    "effective_cells",
    # Kish (1965), see `knobwise.envs.tables.beliefs.effective_cells`
    aggregate=WEIGHT.sum() ** 2 / pl.when(WEIGHT.sum() > 0).then((WEIGHT**2).sum()),
)
P95 = Metric(
    "latency_ms_p95",
    unit="ms",
    # the latencies of a mixture are expectations
    aggregate=pl.when(pl.col("second_choice").is_null().all()).then(
        pl.quantile("latency_ms", 0.95, "linear")
    ),
)


@dataclass(frozen=True)
class Task:
    """The properties that all runs of a kind share.

    A *condition* is where policies are judged: a budget, or a number of demonstrations.
    """

    name: str
    agents: str
    """Plural of the agents that these runs train, in words."""
    condition_words: tuple[str, str]
    """Singular and plural of the condition, in words."""
    score: str
    """Key of the score in a row; `{score}_ci95` is its interval."""
    ranked_by: str
    """Key of the number that policies are ranked by."""
    metrics: tuple[Metric, ...]
    """The columns of the table of policies."""
    numbers: tuple[Metric, ...]
    """What else `results.json` has of each policy."""
    trained: tuple[str, ...]
    """Policies that training made; a run is represented by the first one that it has."""
    low: str
    high: str = "oracle"
    """The reference policies that the oracle gap lies between; of demonstrations nothing but the
    ends of the scale."""
    condition: str = "budget_ms"
    """Key of the condition in a row of `results.json`; also the column of tables and the axis in
    W&B."""
    samples: str = "samples"
    """Plural of the things that policies are judged on, in words; `test_{samples}` is the key of
    their number in `results.json`."""
    judged_by: str = "utility"
    """What validation judges, and so what training is to raise: `utility`, or the `reward`."""
    compared: tuple[str, ...] = ()
    """Keys of the differences to other policies."""
    charged: bool = False
    """Whether controllers pay for their decisions; they are then also judged as if these were free,
    beside their teachers."""
    equal_latency: bool = False
    """Whether policies are compared with mixtures and configurations of equal mean latency."""
    averaged: bool = True
    """Whether rows with condition None hold the mean over the conditions."""
    controls: tuple[str, ...] = ()
    """Trained policies that are expected to gain nothing, under `controls` in `results.json`."""
    by_dataset: tuple[str, ...] = ()
    """Policies in `by_dataset`; the best of all other policies comes before the last of them."""

    @property
    def validation(self) -> str:
        """The logged name of the score on validation."""
        return {"utility": "Val/Utility", "reward": "Val/Reward_Mean"}[self.judged_by]

    def rows(self, results: RunResults) -> list[PolicyRow]:
        """Return the rows of all policies, controls included."""
        return [*results["rows"], *results.get("controls", [])]

    def row(self, results: RunResults, policy: str, condition: float | None) -> PolicyRow:
        """Return the row of a policy at a condition, or its mean over the conditions (None); {} if
        there is none."""
        for row in self.rows(results):
            if (row["policy"], condition_of(row.get(self.condition))) == (policy, condition):
                return row
        return {}

    def conditions(self, results: RunResults) -> list[float]:
        """Return the conditions that policies were judged at, sorted; see `condition_of`."""
        conditions = {condition_of(row.get(self.condition)) for row in self.rows(results)}
        return sorted(conditions - {None})

    def main_condition(self, results: RunResults) -> float | None:
        """Return the condition that sentences and summaries are about: the mean over the conditions
        (None), or the number of shots used in training."""
        return None if self.averaged else shown_at(results)

    def main_policy(self, results: RunResults) -> str | None:
        """Return the policy that represents the run; None if none was judged."""
        judged = {row["policy"] for row in results["rows"]}
        wanted = (results.get("best_policy"), *self.trained, *results.get("variants", ()))
        return next((name for name in wanted if name in judged), None)


DEADLINE = Task(
    name="deadline",
    agents="controllers under deadlines",
    condition_words=("budget", "budgets"),
    score="utility",
    ranked_by="utility",
    charged=True,
    metrics=(UTILITY, FREE, GAP, ACCURACY, LATENCY, ON_TIME, FEASIBLE, DECISION),
    numbers=(
        Metric("over_static", value=over("utility")),
        P95,
        Metric("infeasible", aggregate=1 - pl.mean("feasible")),
        EFFECTIVE_CELLS,
        Metric("reward", aggregate=pl.mean("reward")),
    ),
    low="budget_aware_static",
    trained=("controller", "teacher"),
    compared=("over_static",),
    by_dataset=("controller", "budget_aware_static", "static_per_dataset", "oracle"),
)
PROMISED = replace(
    DEADLINE,
    score="accuracy",
    ranked_by="accuracy",
    low="static_under_promise",
    metrics=(SCORE, ON_TIME, UTILITY, LATENCY, DECISION),
    numbers=(Metric("over_static", value=over("accuracy")), *DEADLINE.numbers[1:], FEASIBLE),
    by_dataset=("controller", "static_under_promise", "static_per_dataset", "oracle"),
)
"""Under deadlines with a promise: what counts is the accuracy of rules that keep it."""
MEAN_BUDGET = Task(
    name="mean",
    agents="controllers under mean budgets",
    condition_words=("mean budget", "mean budgets"),
    score="accuracy",
    ranked_by="over_static_mix",
    judged_by="reward",
    compared=("over_static_mix", "over_static_mix_at_budget", "over_best_single"),
    equal_latency=True,
    metrics=(
        SCORE,
        SPENT,
        OVER_MIX,
        OVER_SINGLE,
        Metric("gap_closed", "oracle gap closed", ".0%", value=over("accuracy"), per=GAP_WIDTH),
        PRICE,
        DECISION,
    ),
    numbers=(
        Metric("utility", value=pl.col("accuracy"), in_parts=True, share=True),
        Metric("over_static_mix_at_budget", value=over("accuracy", "of_mix_at_budget")),
        Metric("oracle_accuracy", aggregate=UPPER_BOUND.mean()),
        P95,
        EFFECTIVE_CELLS,
    ),
    low="static_mix",
    trained=("controller",),
    by_dataset=("controller", "static_mix", "best_single", "oracle"),
)
DEMONSTRATIONS = Task(
    name="selector",
    agents="selectors",
    condition="shots",
    condition_words=("number of shots", "numbers of shots"),
    samples="queries",
    score="accuracy",
    ranked_by="accuracy",
    metrics=(SCORE, DECISION),
    numbers=(),
    low="random",
    trained=LEARNED,
    averaged=False,
    controls=CONTROLS,
)

BEST_BEAM = replace(DEMONSTRATIONS, metrics=(replace(SCORE, name="highest score first"), DECISION))
"""Of recorded sequences that have scores alone, see `SelectorData.judged_by`."""


def with_costs(task: Task, costs: Mapping[str, CostFacts]) -> Task:
    """Return a task whose tables also have the mean of each further cost, and with a limit the
    share above it."""
    added = []
    for name, facts in costs.items():
        unit = facts.get("unit", "")
        mean = Metric(
            f"cost_{name}_mean", f"mean {name}", ".3g", unit, aggregate=pl.mean(f"cost_{name}")
        )
        added.append(mean)
        if "limit" in facts:
            title = f"over {facts['limit']:g} {unit or name}"
            over = pl.mean(f"over_{name}")
            added.append(Metric(f"cost_{name}_over", title, ".1%", aggregate=over, share=True))
    if not added:
        return task
    # the time of a decision stays last
    return replace(task, metrics=(*task.metrics[:-1], *added, task.metrics[-1]))


TASKS = {task.name: task for task in (DEADLINE, MEAN_BUDGET, DEMONSTRATIONS)}


def condition_of(condition: Any) -> Any:
    """Round a condition to six figures, because files may hold the same budget with more or fewer;
    None stays None."""
    return condition and float(f"{condition:.6g}")


def task_of(results: RunResults) -> Task:
    """Return the task that the content of a `results.json` is about."""
    # runs under deadlines say neither
    task = TASKS.get(str(results.get("system") or results.get("sense")), DEADLINE)
    if "validation_reward" in results and task.judged_by != "reward":
        task = replace(task, judged_by="reward")
    if rule := results.get("rule"):
        # utility is what this rule says
        numbers = ", ".join(f"{name}={value}" for name, value in rule["numbers"].items())
        words = f"{rule['name']} ({numbers})" if numbers else rule["name"]
        task = replace(task, agents=f"controllers under the rule {words}")
    # [] where none of the budgets was calibrated
    if "promises" in results:
        task = PROMISED
    if results.get("judged_by") == "best_beam":
        task = BEST_BEAM
    return with_costs(task, results.get("costs", {}))


def shown_at(results: RunResults) -> int:
    """Return the number of shots that sentences about a selector are about: the one used in
    training, or the nearest one that was judged."""
    return min(results["shots"], key=lambda shots: abs(shots - results["trained_shots"]))
