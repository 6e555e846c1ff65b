"""Which differences a study reports, and how it puts them into words.

In a `Difference` here, `run` and `against` are in the words of the page.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from knobwise.experiments.compare.paired import differences
from knobwise.experiments.compare.runs import ComparedRun, place_of
from knobwise.experiments.report.words import COMPARED, LEARNED, ORACLE, SIGN_WORDS, STATIC, policy_name, ranked
from knobwise.experiments.results.problem import DEMONSTRATIONS, GRPO, problem_of
from knobwise.experiments.results.statistics import Difference, holm


@dataclass
class Profile:
    """What controllers are trained on."""

    name: str
    words: list[str]
    """On the command line."""
    description: str = ""


@dataclass
class Section:
    """How the page presents an experiment with a controller; `reference.yaml` explains the fields."""

    title: str
    against: str = ""
    policy: str = ""
    baselines: bool = False
    profiles: list[str] = field(default_factory=lambda: ["builtin", "calibrated"])
    note: str = ""


@dataclass
class SelectorSection:
    """How the page presents an experiment with a selector."""

    title: str
    against: str = ""
    pairs: list[list[str]] = field(default_factory=list)
    full: bool = False
    """Show the baselines too, and the votes without a learner."""


@dataclass
class Study:
    """A study's YAML file."""

    profiles: dict[str, Profile]
    controllers: dict[str, Section]
    selectors: dict[str, SelectorSection]


class StudyRun(NamedTuple):
    """A finished run."""

    experiment: str
    profile: str
    """A key of `Study.profiles`; "beams" for a selector."""
    variant: str
    default: bool
    results: Mapping[str, Any]
    decisions: pl.DataFrame | None
    """Of a controller."""

    @property
    def label(self) -> str:
        return f"`{self.variant or self.experiment}`"

    def compared(self, dataset: str | None = None) -> ComparedRun:
        """The run as `knobwise compare` sees it, or only its decisions on one data set."""
        decisions = self.decisions
        if decisions is not None and dataset is not None:
            decisions = decisions.filter(pl.col("dataset") == dataset)
        return ComparedRun(Path(), self.label, problem_of(self.results), dict(self.results), {}, decisions)


# -- controllers -------------------------------------------------------------------------------------------------------


def controller_differences(
    section: Section, runs: Sequence[StudyRun], finished: Sequence[StudyRun]
) -> list[Difference]:
    """Every variant of an experiment on one profile, compared as its section says.

    Args:
        section: of the experiment.
        runs: its finished runs on the profile.
        finished: all finished runs.
    """
    if not runs:
        return []
    if section.baselines:  # every other policy of the run, best first
        return [d for run in runs for d in _corrected(_against(run, [row["policy"] for row in ranked(run.results)]))]
    if section.policy:
        return _corrected([d for run in runs for d in _against(run, [section.policy])])
    bases: Sequence[StudyRun] = runs
    if section.against:
        bases = [run for run in finished if (run.experiment, run.profile) == (section.against, runs[0].profile)]
    base = next((run for run in bases if run.default), bases[0] if bases else None)
    if base is None:
        return []
    return _corrected([d for run in runs if run is not base for d in _difference(run, base)])


def differences_by_dataset(run: StudyRun) -> list[Difference]:
    """The learned policy against budget-aware static on each data set; [] with one data set."""
    datasets = [] if run.decisions is None else run.decisions["dataset"].drop_nulls().unique().sort().to_list()
    if len(datasets) < 2:
        return []
    return _corrected([replace(d, run=name) for name in datasets for d in _against(run, [STATIC], name)])


def _against(run: StudyRun, policies: Sequence[str], dataset: str | None = None) -> list[Difference]:
    """The learned policy against others of the same run."""
    others = [policy for policy in policies if policy not in (LEARNED, ORACLE)]
    return [difference for policy in others for difference in _difference(run, run, policy, dataset)]


def _difference(
    run: StudyRun, base: StudyRun, against: str = LEARNED, dataset: str | None = None
) -> Iterator[Difference]:
    """The learned policy of a run against a policy of another run, as in `knobwise compare`, as a mean over budgets.
    Nothing where they share too few samples or were judged under other budgets."""
    if run.decisions is None or base.decisions is None:
        return
    places = {place_of(budget) for budget in run.decisions["place"].unique()}
    if places != {place_of(budget) for budget in base.decisions["place"].unique()}:
        return
    every = differences(base.compared(dataset), run.compared(dataset), (against, LEARNED), sorted(places))[0]
    yield from (difference for difference in every if difference.place is None)


def _corrected(family: Sequence[Difference]) -> list[Difference]:
    """With p corrected for their number, and the policy of the same run, if it is one, as what it is held against."""
    return [
        d if d.against_policy == LEARNED else replace(d, against=policy_name(d.against_policy)) for d in holm(family)
    ]


# -- selectors ---------------------------------------------------------------------------------------------------------


def selector_differences(section: SelectorSection, results: Mapping[str, Any]) -> list[Difference]:
    """What an experiment compares, at the number of shots that it was trained with; `results.json` has it already."""
    rows = [row for row in results["differences"] if row["shots"] == results["trained_shots"]]
    at = {(row["policy"], row["against"]): row for row in rows}
    first, *others = results["variants"]
    if any(policy in GRPO for policy, _ in at):
        pairs = [*((form, "rce") for form in GRPO), ("rce", "sft"), *map(tuple, section.pairs)]
    else:
        pairs = [*((variant, first) for variant in others), (first, "rce")]
        pairs += [("rce", "sft")] if any(results.get("epochs", {}).get("rce", [])) else []
    return [
        replace(Difference.from_row(at[pair]), run=policy_name(pair[0], results), against=policy_name(pair[1], results))
        for pair in pairs
        if pair in at
    ]


def network_differences(results: Mapping[str, Any], base: Mapping[str, Any]) -> list[Difference]:
    """Another network against the default one trained alike: SFT, and GRPO on recorded groups.

    The answers of the two runs are not compared query by query, so a difference has the interval of independent
    estimates (Newcombe 1998, method 10). It is too wide, since the queries are the same.
    """
    shots = results["trained_shots"]
    pairs: list[Difference] = []
    for policy, base_policy in (("sft", "sft"), ("grpo_recorded", base["variants"][0])):
        row, other = DEMONSTRATIONS.row(results, policy, shots), DEMONSTRATIONS.row(base, base_policy, shots)
        if row and other:
            accuracy, (low, high) = row["accuracy"], row["accuracy_ci95"]
            other_accuracy, (other_low, other_high) = other["accuracy"], other["accuracy_ci95"]
            difference = accuracy - other_accuracy
            ci95 = (
                difference - math.hypot(accuracy - low, other_high - other_accuracy),
                difference + math.hypot(high - accuracy, other_accuracy - other_low),
            )
            names = (policy_name(policy, results), "the default network", policy, base_policy)
            pairs.append(Difference(*names, shots, 0, difference, ci95))
    return pairs


# -- sentences ---------------------------------------------------------------------------------------------------------


def points(d: Difference) -> str:
    """A difference in hundredths, with its interval."""
    return f"{100 * d.difference:+z.{_digits(d)}f} {_span(d, *d.ci95)}"


def _span(d: Difference, low: float, high: float) -> str:
    return f"[{100 * low:z.{_digits(d)}f}, {100 * high:z.{_digits(d)}f}]"


def _digits(d: Difference) -> int:
    """Differences of selectors, which have a number of shots, have one digit."""
    return 2 if d.place is None else 1


def sentences(compared: Sequence[Difference]) -> Iterator[str]:
    """Everything that was compared, a sentence for each policy that others are held against."""
    if len({d.run for d in compared}) == 1 and len({d.against for d in compared}) > 1:
        yield f"{compared[0].run} is {sorted_out([replace(d, run=d.against) for d in compared], 'than ')}."
        return
    for against in dict.fromkeys(d.against for d in compared):
        yield f"against {against}: {sorted_out([d for d in compared if d.against == against])}."


def sorted_out(compared: Sequence[Difference], than: str = "") -> str:
    """Which are better, which worse, which not shown to differ."""
    parts = []
    for sign, word in SIGN_WORDS.items():
        listed = ", ".join(f"{d.run} ({points(d)})" for d in compared if d.sign == sign and not d.nothing)
        if listed:
            parts.append(f"{word}{f' {than}' if than and sign else ': '}{listed}")
    if identical := [d.run for d in compared if d.nothing]:
        parts.append(f"the same on every sample: {', '.join(identical)}")
    return "; ".join(parts)


def answer(compared: Sequence[Difference]) -> str:
    """All of them in a line of the summary."""
    groups = {d.against: [other for other in compared if other.against == d.against] for d in compared}
    named = len(groups) > 1
    return "; ".join(f"{_short(group, named)} (against {against})" for against, group in groups.items())


def _short(group: Sequence[Difference], named: bool) -> str:
    clear = sorted((d for d in group if d.sign), key=lambda d: -d.difference)
    parts = [f"{d.run} {points(d)}" for d in clear]
    if unclear := [d for d in group if not d.sign]:
        names = f" for {', '.join(d.run for d in unclear)}" if parts or named else ""
        span = _span(unclear[0], min(d.ci95[0] for d in unclear), max(d.ci95[1] for d in unclear))
        which = "all intervals within" if len(unclear) > 1 else "the interval is"
        identical = all(d.nothing for d in unclear)
        parts.append(f"the same on every sample{names}" if identical else f"no difference shown{names}, {which} {span}")
    return "; ".join(parts)


def answer_on_baselines(compared: Sequence[Difference]) -> str:
    """The learned policy against budget-aware static and against the best baseline, in a line of the summary."""
    best = min(compared, key=lambda d: d.difference)
    static = next((d for d in compared if d.against == policy_name(STATIC)), best)
    parts = [f"{COMPARED[d.sign].removeprefix('is ')} {d.against} ({points(d)})" for d in dict.fromkeys((static, best))]
    return " and ".join(parts) + (", the best baseline here" if static is not best else "")
