"""What a study compares, and its page, docs/results.md; tables and sentences are in
`results.md.j2`.

In a `Difference` here, `run` and `against` are in the words of the page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
from jinja2 import Environment, PackageLoader, StrictUndefined

from knobwise.experiments.command_line.compose import question_of
from knobwise.experiments.compare.paired import differences
from knobwise.experiments.compare.runs import ComparedRun, place_of
from knobwise.experiments.report import words
from knobwise.experiments.report.words import (
    LEARNED,
    ORACLE,
    STATIC,
    of_last_round,
    policy_name,
    ranked,
)
from knobwise.experiments.results.problem import FEASIBLE, GAP, GRPO, LATENCY, problem_of
from knobwise.experiments.results.run_folder import UNFINISHED
from knobwise.experiments.results.statistics import CHANCE, Difference, holm


@dataclass
class Profile:
    """What controllers are trained on."""

    name: str
    words: list[str]
    """On the command line."""
    description: str = ""


@dataclass
class Section:
    """How the page presents an experiment with a controller; `reference.yaml` explains the
    fields."""

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
    pairs: list[list[str]] = field(default_factory=list)
    full: bool = False
    """Show the baselines too, and the votes without a learner."""


@dataclass
class Study:
    """A study's YAML file."""

    profiles: dict[str, Profile]
    controllers: dict[str, Section]
    selectors: dict[str, SelectorSection]
    title: str = "Reference results"
    words: str = ""
    """What the command that writes the page says behind `study.py`; nothing for the reference
    study, whose page also holds what was measured before."""


class StudyRun(NamedTuple):
    """One training with all seeds, planned or finished."""

    experiment: str
    profile: str
    """A key of `Study.profiles`; "beams" for a selector."""
    variant: str
    """What the sweep sets; empty without a sweep."""
    default: bool
    """Whether the experiment's file sets the same without a sweep."""
    folder: Path
    """In the folder of the first experiment that has these settings."""
    words: list[str]
    """The command line, except for the name and the folder of the run."""
    settings: dict[str, Any]
    """What decides how it trains, by dotted key."""
    baselines: bool = False
    results: Mapping[str, Any] = {}
    decisions: pl.DataFrame = pl.DataFrame()
    """Of a finished run."""

    @property
    def label(self) -> str:
        return f"`{self.variant or self.experiment}`"

    @property
    def finished(self) -> bool:
        return (self.folder / "results.json").exists() and not (self.folder / UNFINISHED).exists()

    def compared(self) -> ComparedRun:
        """The run as `knobwise compare` sees it."""
        return ComparedRun(
            Path(), self.label, problem_of(self.results), dict(self.results), {}, self.decisions
        )


def results_page(
    study: Study, finished: Sequence[StudyRun], seeds: Sequence[int], unfinished: int = 0
) -> str:
    """docs/results.md.

    Args:
        study: which experiments to show, and against what.
        finished: the finished runs.
        seeds: of the training.
        unfinished: how many runs of the study are not finished.
    """
    controllers = []
    selectors = []
    for name, section in study.controllers.items():
        if runs := [run for run in finished if run.experiment == name]:
            controllers.append(
                _heading(name, section) | _controllers(study, section, runs, finished)
            )
    demonstrations = {run.experiment: run for run in finished if run.profile == "beams"}
    for name, selector in study.selectors.items():
        if name in demonstrations:
            selectors.append(_heading(name, selector) | _selector(demonstrations[name], selector))
    families = [family for section in controllers for family in section["families"]]
    every = [difference for family in families for difference in family]
    measured = {
        run.profile: run.results["profile"] for run in finished if run.profile in study.profiles
    }
    return rendered(
        "results.md.j2",
        seeds=seeds,
        profiles=[(study.profiles[name], facts) for name, facts in measured.items()],
        unfinished=unfinished,
        chance=CHANCE,
        differences=every,
        outside=sum(words.sign_of(d.ci95) != 0 for d in every),
        families=families,
        controllers=controllers,
        selectors=selectors,
        study=study,
        beams=next((run.results for run in demonstrations.values()), None),
        words=words,
        of_last_round=of_last_round,
        FEASIBLE=FEASIBLE,
        LATENCY=LATENCY,
    )


def rendered(template: str, **values: Any) -> str:
    """A page of Markdown, from a template beside this file; it knows the words of reports too."""
    environment = Environment(  # Markdown, not HTML
        loader=PackageLoader("knobwise.experiments.studies", "."),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters["number"] = words.number
    environment.globals |= {
        "gap": GAP.name,
        "feasible": FEASIBLE.name,
        "STATIC": words.STATIC,
        "ORACLE": words.ORACLE,
    }
    return environment.get_template(template).render(**values)


def _heading(name: str, section: Section | SelectorSection) -> dict[str, Any]:
    anchor = "".join(c for c in section.title.lower().replace(" ", "-") if c.isalnum() or c in "-_")
    return {**vars(section), "anchor": anchor, "question": question_of(name), "name": name}


# -- controllers -----------------------------------------------------------------------------------


def _controllers(
    study: Study, section: Section, runs: Sequence[StudyRun], finished: Sequence[StudyRun]
) -> dict[str, Any]:
    """What the page says about the runs of an experiment."""
    compared = {}
    for profile in study.profiles:
        compared[profile] = _compared(
            section, [run for run in runs if run.profile == profile], finished
        )
    families = [family for family in compared.values() if family]
    return {
        "runs": runs,
        "compared": compared,
        "families": families,
        "problem": problem_of(runs[0].results),
    }


def _compared(
    section: Section, runs: Sequence[StudyRun], finished: Sequence[StudyRun]
) -> list[Difference]:
    """Every variant of an experiment on one profile, compared as its section says; `finished` are
    all finished runs."""
    if section.baselines:  # every other policy of the run, best first
        if any("split_seeds" in run.results for run in runs):
            return [_over_splits(run) for run in runs]
        return [
            d
            for run in runs
            for d in holm(_against(run, [row["policy"] for row in ranked(run.results)]))
        ]
    if section.policy:
        return holm([d for run in runs for d in _against(run, [section.policy])])
    bases = runs
    if section.against and runs:
        bases = [
            run
            for run in finished
            if (run.experiment, run.profile) == (section.against, runs[0].profile)
        ]
    base = next((run for run in bases if run.default), bases[0] if bases else None)
    if base is None:
        return []
    return holm([d for run in runs if run is not base for d in _difference(run, base)])


def _against(run: StudyRun, policies: Sequence[str]) -> list[Difference]:
    """The learned policy against others of the same run."""
    others = [policy for policy in policies if policy not in (LEARNED, ORACLE)]
    return [d for policy in others for d in _difference(run, run, policy)]


def _over_splits(run: StudyRun) -> Difference:
    """The learned policy against budget-aware static, as the run that has several splits has judged
    it."""
    row = words.means_of(run.results)[LEARNED]
    static = policy_name(STATIC)
    names, (low, high) = (run.label, static, LEARNED, STATIC), row["over_static_ci95"]
    return Difference(*names, None, run.results["test_samples"], row["over_static"], (low, high))


def _difference(run: StudyRun, base: StudyRun, policy: str = LEARNED) -> list[Difference]:
    """The learned policy of a run against a policy of another run, as in `knobwise compare`, as a
    mean over budgets. Nothing where they share too few samples or were judged under other
    budgets."""
    places, others = (
        {place_of(place) for place in each.decisions["place"].unique()} for each in (run, base)
    )
    if places != others:
        return []
    if policy == LEARNED:
        against = base.label
    else:
        against = policy_name(policy)
    every, _ = differences(base.compared(), run.compared(), (policy, LEARNED), sorted(places))
    return [replace(d, against=against) for d in every if d.place is None]


# -- selectors -------------------------------------------------------------------------------------


def _selector(run: StudyRun, section: SelectorSection) -> dict[str, Any]:
    """What the page says about an experiment with a selector."""
    results = run.results
    compared = _pairs(section, results)
    rows = [*results["rows"], *results["controls"]]
    if not section.full:
        rows = [row for row in rows if "accuracy_per_seed" in row and row["policy"] != "random"]
    at: dict[str, dict[int, words.Row]] = {}
    for row in rows:
        at.setdefault(policy_name(row["policy"], results), {})[row["shots"]] = row
    # the answer to the question leaves out what is compared in every experiment
    if set(GRPO) & set(results["variants"]):
        common: tuple[str, ...] = ("sft",)
    else:
        common = ("sft", "rce")
    trained = results["trained_shots"]
    return {
        "results": results,
        "compared": compared,
        "main": [d for d in compared if d.against_policy not in common],
        "votes": words.rows_at(results, trained, "votes") if section.full else {},
        "rows": dict(sorted(at.items(), key=lambda item: -item[1][trained]["accuracy"])),
    }


def _pairs(section: SelectorSection, results: Mapping[str, Any]) -> list[Difference]:
    """What an experiment compares, at the number of shots that it was trained with; `results.json`
    has it already."""
    at = words.differences_at(results, results["trained_shots"])
    first, *others = results["variants"]
    if any(policy in GRPO for policy, _ in at):
        pairs = [*((form, "rce") for form in GRPO), ("rce", "sft"), *map(tuple, section.pairs)]
    else:
        pairs = [*((variant, first) for variant in others), (first, "rce")]
        pairs += [("rce", "sft")] if any(results.get("epochs", {}).get("rce", [])) else []
    return [
        replace(
            Difference.from_row(at[pair]),
            run=policy_name(pair[0], results),
            against=policy_name(pair[1], results),
        )
        for pair in pairs
        if pair in at
    ]
