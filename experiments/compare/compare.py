"""knobwise compare: finished runs side by side, from their folders alone: on the terminal, as one page, as JSON.

The first run is what the others are held against. Runs that were judged on the same samples are compared pair by pair
(`knobwise.experiments.results.paired`); of others their own numbers stand beside each other, and it is said why.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from knobwise.agents.judging.evaluation import mean_row
from knobwise.common.errors import InputError
from knobwise.common.files import written_whole
from knobwise.experiments.compare.compare_words import print_comparison, shown_words
from knobwise.experiments.compare.compared_runs import ComparedRun, differing, find_runs, place_of, read_runs
from knobwise.experiments.report.selector_verdict import form_of
from knobwise.experiments.report.verdict import LEARNED, MIX, ORACLE, STATIC, Row, kept_before_grpo, known, unit_of
from knobwise.experiments.results.paired import Difference, differences, holm, other_measurements
from knobwise.experiments.results.selector_results import TRAINED, shown_at
from knobwise.experiments.settings.options import CompareRun


@dataclass(frozen=True)
class Comparison:
    """What several runs have in common, what they differ in, and by how much."""

    runs: list[ComparedRun]
    """The first is what the others are held against."""
    settings: dict[str, list[str]]
    """What differs, by key: the value in every run."""
    places: list[float]
    """The budgets in ms, or the numbers of shots, that are compared."""
    main: float | None
    """What the first numbers are of: None, the mean over the budgets, or a number of shots."""
    policies: list[str]
    """What stands for each run: the learned controller, or the selector that was best on validation."""
    means: list[Mapping[str, Any]]
    """The row of that policy at `main`, for each run."""
    found: list[Difference]
    """At `main`; corrected for their number."""
    in_detail: list[Difference]
    """At every place; corrected for their number."""
    of_policies: list[Difference]
    """At `main`, for every other policy that both runs trained (selectors); corrected for their number."""
    notes: list[str]
    """What was left out or restricted, in sentences."""

    @property
    def kind(self) -> str:
        return self.runs[0].kind

    @property
    def unit(self) -> str:
        return unit_of(self.runs[0].results)

    @property
    def score(self) -> str:
        """The column that policies are judged by."""
        return {"deadline": "utility", "mean": "over_static_mix", "selector": "accuracy"}[self.kind]

    def best(self) -> list[int]:
        """The places in `runs` of those that were judged on what the first one was, by score, the highest first."""
        scores = [float(row[self.score]) if known(row.get(self.score)) else -1e9 for row in self.means]
        return sorted(filter(self.same_data, range(len(scores))), key=lambda i: -scores[i])

    def same_data(self, place: int) -> bool:
        """Whether the score of the run at this place in `runs` is of what the first one was judged on."""
        run, wanted = self.runs[place], self.places if self.main is None else [self.main]
        return not other_measurements(self.runs[0], run) and set(wanted) <= set(run.places)

    def beside(self) -> list[Mapping[str, Any]]:
        """What the first run, of controllers, was judged beside."""
        names = [STATIC if self.kind == "deadline" else MIX, ORACLE] if self.kind != "selector" else []
        return [row for name in names if (row := row_over(self.runs[0], name, self.places, None))]

    def difference(self, label: str) -> Difference | None:
        """That of a run to the first, at `main`; None where it was not tested."""
        return next((one for one in self.found if one.run == label), None)


def compare(config: CompareRun) -> Comparison:
    """Read runs, print what differs, and write the page and the numbers.

    Raises:
        InputError: folders that hold no runs, fewer than two finished runs, runs of different systems; nothing has been
            written then.
    """
    from rich.console import Console

    comparison = comparison_of(config.runs, config.budgets_ms)
    written = []
    if config.html is not None:  # first: it reads what else lies in the folders
        from knobwise.experiments.compare.compare_page import write_comparison

        written.append(_written("page", config.html))
        write_comparison(comparison, config.html)
    if config.json is not None:
        written.append(_written("numbers", config.json))
        with written_whole(config.json) as temporary:
            temporary.write_text(json.dumps(numbers(comparison), indent=1), encoding="utf-8")
    print_comparison(comparison, Console())
    for line in written:
        print(line)
    return comparison


def _written(what: str, path: str) -> str:
    return f"{what}: {path}{' (the one before is replaced)' * Path(path).exists()}"


def comparison_of(folders: Sequence[str], budgets_ms: Sequence[float] | None = None) -> Comparison:
    """Everything that is said of these runs.

    Args:
        folders: of runs, or with runs in them.
        budgets_ms: only these of the budgets that the first run was judged at; None for all.

    Raises:
        InputError: see `compare`.
    """
    if not folders:
        raise InputError("compare: runs must be given, or a folder with runs in it, as in `knobwise compare runs/lean`")
    finished, unfinished = find_runs(folders)
    if len(finished) < 2:
        there = f"{finished[0]} is the only finished run" if finished else "there is no finished run"
        stopped = f"; not finished: {', '.join(unfinished)}" if unfinished else ""
        raise InputError(f"compare: two runs are needed, {there} in {', '.join(folders)}{stopped}")
    runs = read_runs(finished)
    are = "are" if len(unfinished) > 1 else "is"
    notes = [f"{', '.join(unfinished)} {are} not finished, and left out."] if unfinished else []
    if bare := [run.label for run in runs if not run.settings]:
        notes.append(f"{', '.join(bare)}: without config.yaml the settings are not known.")
    reference = runs[0]
    places = reference.places
    if budgets_ms is not None:
        if not budgets_ms:
            raise InputError("budgets_ms=[]: name one at least, or leave it out for all")
        wanted = {place_of(budget) for budget in budgets_ms}
        if reference.kind == "selector":
            raise InputError("budgets_ms: selectors are not judged at budgets; leave it out")
        if missing := sorted(wanted - set(places)):
            raise InputError(
                f"budgets_ms: {reference.folder} was not judged at {', '.join(f'{b:g}' for b in missing)}; it was at "
                f"{', '.join(f'{b:g}' for b in places)}"
            )
        places = sorted(wanted)
    main = float(shown_at(reference.results)) if reference.kind == "selector" else None
    policies = [policy_of(run) for run in runs]
    said: dict[str, list[str]] = {}
    found: list[Difference] = []
    in_detail: list[Difference] = []
    of_policies: list[Difference] = []
    for run, policy in zip(runs[1:], policies[1:], strict=True):
        every, note = differences(reference, run, (policies[0], policy), places)
        found += [one for one in every if one.place == main]
        in_detail += [one for one in every if one.place is not None]
        if note:
            said.setdefault(note.removeprefix(run.label), []).append(run.label)
        if main is not None and every:
            others = [name for name in _trained_by_both(reference, run) if (name, name) != (policies[0], policy)]
            of_policies += [d for name in others for d in differences(reference, run, (name, name), [main])[0]]
    for words, labels in said.items():  # the same of several runs is said once
        whose = "" if not words.startswith((" ", ":")) else ", ".join(labels)
        notes.append(f"{whose}{': each' * (len(labels) > 1 and words.startswith(' '))}{words}.")
    if main is None and (apart := [run.label for run in runs if not set(run.places) & set(places)]):
        notes.append(f"{', '.join(apart)}: means are over budgets that {reference.label} was not judged at.")
    notes += _kept_before_grpo(runs)
    return Comparison(
        runs=runs,
        settings=differing([run.settings for run in runs]),
        places=places,
        main=main,
        policies=policies,
        means=[row_over(run, policy, places, main) for run, policy in zip(runs, policies, strict=True)],
        found=holm(found),
        in_detail=holm(in_detail),
        of_policies=holm(of_policies),
        notes=notes,
    )


def _kept_before_grpo(runs: Sequence[ComparedRun]) -> list[str]:
    """Where GRPO had no part in what is compared, in a sentence."""
    said: dict[str, list[str]] = {}
    for run in runs:
        if early := kept_before_grpo(run.results):
            seeds = len(run.results["chosen"])
            said.setdefault("" if seeds == 1 else f" in {early} of {seeds} seeds", []).append(run.label)
    if not said:
        return []
    listed = "; ".join(f"{', '.join(labels)}{where}" for where, labels in said.items())
    return [f"What validation chose is from before GRPO, which added nothing there: {listed}."]


def policy_of(run: ComparedRun) -> str:
    """What stands for a run: the learned controller, or the selector that was best on validation."""
    if run.kind != "selector":
        return LEARNED
    form = form_of(run.results)
    if form is None:
        raise InputError(f"{run.folder}: no trained selector was judged in it; leave it out")
    return form


def _trained_by_both(reference: ComparedRun, run: ComparedRun) -> list[str]:
    """Every policy that both trained, in the order of the first's results."""
    trained = [{*TRAINED, *(one.results.get("variants") or ())} for one in (reference, run)]
    names = [
        dict.fromkeys(r["policy"] for r in _every_row(one) if r["policy"] in trained[0]) for one in (reference, run)
    ]
    return [name for name in names[0] if name in names[1] and name in trained[1]]


def _every_row(run: ComparedRun) -> list[Row]:
    return [*run.results["rows"], *run.results.get("controls", [])]


def row_over(run: ComparedRun, policy: str, places: Sequence[float], main: float | None) -> Mapping[str, Any]:
    """The row of a policy at `main`; where that is the mean over the budgets, over those of `places` alone, or where
    the run was judged at none of these, over its own. Intervals are known of the run's own mean only."""
    own = run.row(policy, main)
    if main is not None or not own or set(run.places) <= set(places):
        return own
    rows = [run.row(policy, place) for place in places if place in run.places]
    if not rows:
        return own
    summed = mean_row([{key: row[key] for key in row if _summed(row, key)} for row in rows])
    static, best = (mean_row([_utility(run.row(n, p)) for p in places if p in run.places]) for n in (STATIC, ORACLE))
    if known(static.get("utility")) and known(best.get("utility")) and run.kind == "deadline":
        between = best["utility"] - static["utility"]
        summed["gap_closed"] = (summed["utility"] - static["utility"]) / between if between > 0 else 0.0
    return {"policy": policy, "budget_ms": None, **summed}


def _summed(row: Row, key: str) -> bool:
    return key != "budget_ms" and (row[key] is None or isinstance(row[key], int | float))


def _utility(row: Row) -> dict[str, Any]:
    return {"utility": row.get("utility")}


def numbers(comparison: Comparison) -> dict[str, Any]:
    """What is written as JSON. Differences are `run` − `against`; `place` is a budget in ms or a number of shots, None
    the mean over budgets."""
    families = {"differences": "found", "differences_per_place": "in_detail", "differences_of_policies": "of_policies"}
    return {
        "kind": comparison.kind,
        "reference": comparison.runs[0].label,
        "places": comparison.places,
        "main_place": comparison.main,
        "runs": [
            {"label": run.label, "folder": str(run.folder), "experiment": run.experiment}
            | {"profile": run.results.get("profile"), "seeds": run.results.get("seeds"), "policy": policy}
            | {"row": dict(row)}
            for run, policy, row in zip(comparison.runs, comparison.policies, comparison.means, strict=True)
        ],
        "settings": comparison.settings,
        **{
            name: [asdict(one) | {"shown": shown_words(one)} for one in getattr(comparison, attribute)]
            for name, attribute in families.items()
        },
        "notes": comparison.notes,
    }
