"""The kinds of problem that a run can be about: everything that differs between them is a field of
`Problem`.

No torch is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GRPO = ("grpo_live", "grpo_rounds", "grpo_recorded")
"""The forms of post-training of a selector; the first that a run has stands for it."""
LEARNED = (*GRPO, "rce", "sft")
"""The trained selectors. GRPO starts from RCE if that is used, and RCE from SFT."""
UPPER = ("best_recorded", "oracle")
"""They know the answers: upper bounds from the recorded sequences, not policies."""
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
PAIRS = (
    *((form, other) for form in GRPO for other in ("rce", "sft")),
    ("grpo_live", "grpo_rounds"),
    ("rce", "sft"),
    *(("sft", way) for way in ("random", "similarity", "part_similarity")),
    *((control, other) for control in CONTROLS[:3] for other in ("sft", "rce")),
    ("hidden_rce", "hidden_sft"),
    ("hidden_live", "hidden_sft"),
)
"""Selectors that are compared, as (policy, against). The best form of GRPO is also compared with
every simple way."""


@dataclass(frozen=True)
class Metric:
    """A number in the rows of `results.json`."""

    key: str
    """Its interval, if it has one, is under `{key}_ci95`, its values by seed under
    `{key}_per_seed`."""
    name: str
    """As people read it."""
    unit: str = ""
    """`%` for a share, `ms`, `µs`, `cost`; empty for a score. Costs that are no times have the unit
    of `results["unit"]`; the name of a further cost says its unit."""


UTILITY = Metric("utility", "utility")
ACCURACY = Metric("accuracy", "accuracy")
FREE = Metric("utility_free", "if free")
GAP = Metric("gap_closed", "oracle gap closed", "%")
LATENCY = Metric("latency_ms_mean", "mean latency", "ms")
ON_TIME = Metric("satisfaction", "on time", "%")
FEASIBLE = Metric("satisfaction_feasible", "on time (feasible)", "%")
OVER_MIX = Metric("over_static_mix", "over static mix")
OVER_SINGLE = Metric("over_best_single", "over best single")
DECISION = Metric("decision_us_p50", "decision time", "µs")
REWARD = Metric("reward", "mean reward")
COST = Metric("cost_mean", "mean further cost", "cost")
HYPERVOLUME = Metric("hypervolume", "hypervolume")


@dataclass(frozen=True)
class Problem:
    """What is the same in all runs of a kind.

    A *place* is where policies are judged: a budget, or a number of demonstrations.
    """

    name: str
    agents: str
    """Whose runs these are, in words."""
    place: str
    """Key of the place in a row of `results.json`; also the column of tables and the axis in
    W&B."""
    place_words: tuple[str, str]
    """A place and several, in words."""
    samples: str
    """What policies are judged on, in words; `test_{samples}` is the key of their number in
    `results.json`."""
    score: str
    """Key of the score in a row; `{score}_ci95` is its interval."""
    ranked_by: str
    """Key of the number that policies are ranked by."""
    metrics: tuple[Metric, ...]
    """The columns of the table of policies."""
    low: str
    high: str
    """The reference policies that the oracle gap lies between; of demonstrations nothing but the
    ends of the scale."""
    trained: tuple[str, ...]
    """Policies that training made; the first that a run has stands for it."""
    validation: str = "Val/Utility"
    """The logged name of the score on validation."""
    equal_latency: bool = False
    """Whether policies are compared with mixtures and configurations of equal mean latency."""
    averaged: bool = True
    """Whether rows with place None hold the mean over the places."""
    controls: tuple[str, ...] = ()
    """Trained policies that are expected to gain nothing, under `controls` in `results.json`."""
    usage: tuple[str, ...] = ()
    """Policies in `knob_usage`."""
    by_dataset: tuple[str, ...] = ()
    """Policies in `by_dataset`; the best of all others stands before the last."""

    def rows(self, results: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """The rows of all policies, controls included."""
        return [*results["rows"], *results.get("controls", [])]

    def row(
        self, results: Mapping[str, Any], policy: str, place: float | None
    ) -> Mapping[str, Any]:
        """The row of a policy at a place, or its mean over the places (None); {} if there is
        none."""
        wanted = (policy, place)
        return next(
            (row for row in self.rows(results) if (row["policy"], row.get(self.place)) == wanted),
            {},
        )

    def judged_at(self, results: Mapping[str, Any]) -> list[float]:
        """The places that policies were judged at, sorted."""
        return sorted(
            {row[self.place] for row in self.rows(results) if row.get(self.place) is not None}
        )

    def main_place(self, results: Mapping[str, Any]) -> float | None:
        """The place that sentences and summaries are about: the mean over the places (None), or the
        number of shots used in training."""
        return None if self.averaged else shown_at(results)

    def main_policy(self, results: Mapping[str, Any]) -> str | None:
        """The policy that stands for the run; None if none was judged."""
        judged = {row["policy"] for row in results["rows"]}
        wanted = (results.get("best_policy"), *self.trained, *results.get("variants", ()))
        return next((name for name in wanted if name in judged), None)


DEADLINE = Problem(
    name="deadline",
    agents="controllers under deadlines",
    place="budget_ms",
    place_words=("budget", "budgets"),
    samples="samples",
    score="utility",
    ranked_by="utility",
    metrics=(UTILITY, FREE, GAP, ACCURACY, LATENCY, ON_TIME, FEASIBLE, DECISION),
    low="budget_aware_static",
    high="oracle",
    trained=("controller", "teacher"),
    usage=("controller", "budget_aware_static", "oracle"),
    by_dataset=("controller", "budget_aware_static", "static_per_dataset", "oracle"),
)
MEAN_BUDGET = Problem(
    name="mean",
    agents="controllers under mean budgets",
    place="budget_ms",
    place_words=("mean budget", "mean budgets"),
    samples="samples",
    score="accuracy",
    ranked_by="over_static_mix",
    validation="Val/Reward_Mean",
    equal_latency=True,
    metrics=(ACCURACY, LATENCY, OVER_MIX, OVER_SINGLE, GAP, DECISION),
    low="static_mix",
    high="oracle",
    trained=("controller",),
    usage=("controller", "static_mix", "oracle"),
    by_dataset=("controller", "static_mix", "best_single", "oracle"),
)
WEIGHTS = Problem(
    name="weights",
    agents="controllers under weights",
    place="weights",
    place_words=("pair of worths", "pairs of worths"),
    samples="samples",
    score="reward",
    ranked_by="reward",
    validation="Val/Reward_Mean",
    metrics=(REWARD, HYPERVOLUME, OVER_MIX, GAP, ACCURACY, LATENCY, COST),
    low="static_mix",
    high="oracle",
    trained=("controller",),
)
DEMONSTRATIONS = Problem(
    name="selector",
    agents="selectors",
    place="shots",
    place_words=("number of shots", "numbers of shots"),
    samples="queries",
    score="accuracy",
    ranked_by="accuracy",
    metrics=(ACCURACY, DECISION),
    low="random",
    high="oracle",
    trained=LEARNED,
    averaged=False,
    controls=CONTROLS,
)


def problem_of(results: Mapping[str, Any]) -> Problem:
    """The problem that the content of a `results.json` is about."""
    if results.get("system") == "selector":
        return DEMONSTRATIONS
    return {"mean": MEAN_BUDGET, "weights": WEIGHTS}.get(results.get("sense", ""), DEADLINE)


def shown_at(results: Mapping[str, Any]) -> int:
    """The number of shots that sentences about a selector are about: the one used in training, or
    the nearest judged one."""
    return min(results["shots"], key=lambda shots: abs(shots - results["trained_shots"]))
