"""knobwise compare: finished runs side by side, from their folders alone: on the terminal, as one page, as JSON.

The first run is what the others are held against. Runs that were judged on the same samples are compared pair by pair
(`knobwise.experiments.paired`); of others their own numbers stand beside each other, and it is said why.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from knobwise.agents.evaluation import mean_row
from knobwise.envs.errors import InputError
from knobwise.envs.files import written_whole
from knobwise.experiments.compared_runs import ComparedRun, differing, find_runs, place_of, read_runs
from knobwise.experiments.page import quantity
from knobwise.experiments.paired import CHANCE, Difference, differences, holm
from knobwise.experiments.selector_results import TRAINED, shown_at
from knobwise.experiments.selector_verdict import form_of, points, policy_words, rows_at, shots_words
from knobwise.experiments.verbs import CompareRun
from knobwise.experiments.verdict import LEARNED, ORACLE, STATIC, Row, interval, known, number, policy_name, unit_of

if TYPE_CHECKING:
    from rich.console import Console

MIX = "static_mix"
SPOKEN_OF = 6
"""So many runs have a sentence each; of more it is said how many are better."""
SIDE_BY_SIDE = 4
"""So many runs stand side by side, each with its settings in a column; more stand one below the other."""


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
    """What stands for each run: the learned controller, or the furthest trained selector."""
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
        """The places of the runs in `runs`, by score, the highest first."""
        scores = [float(row[self.score]) if known(row.get(self.score)) else -1e9 for row in self.means]
        return sorted(range(len(scores)), key=lambda i: -scores[i])

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
    print_comparison(comparison, Console())
    if config.json is not None:
        with written_whole(config.json) as temporary:
            temporary.write_text(json.dumps(numbers(comparison), indent=1), encoding="utf-8")
        print(f"numbers: {config.json}")
    if config.html is not None:
        from knobwise.experiments.compare_page import write_comparison

        print(f"page: {write_comparison(comparison, config.html)}")
    return comparison


def comparison_of(folders: Sequence[str], budgets_ms: Sequence[float] | None = None) -> Comparison:
    """Everything that is said of these runs.

    Args:
        folders: of runs, or with runs in them.
        budgets_ms: only these of the budgets that the first run was judged at; None for all.

    Raises:
        InputError: see `compare`.
    """
    finished, unfinished = find_runs(folders)
    if len(finished) < 2:
        there = f"{finished[0]} is the only finished run" if finished else "there is no finished run"
        stopped = f"; not finished: {', '.join(unfinished)}" if unfinished else ""
        raise InputError(f"compare: two runs are needed, {there} in {', '.join(folders)}{stopped}")
    runs = read_runs(finished)
    are = "are" if len(unfinished) > 1 else "is"
    notes = [f"{', '.join(unfinished)} {are} not finished, and left out."] if unfinished else []
    reference = runs[0]
    places = reference.places
    if budgets_ms is not None:
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


def policy_of(run: ComparedRun) -> str:
    """What stands for a run: the learned controller, or the furthest trained selector."""
    if run.kind != "selector":
        return LEARNED
    form = form_of(rows_at(run.results, shown_at(run.results)))
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
    """The row of a policy at `main`; where that is the mean over the budgets, over those of `places` alone. Intervals
    are known of the run's own mean only."""
    own = run.row(policy, main)
    if main is not None or not own or set(run.places) <= set(places):
        return own
    rows = [run.row(policy, place) for place in places if place in run.places]
    if not rows:
        return {"policy": policy}
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


# -- in words ----------------------------------------------------------------------------------------------------------


def verdict(comparison: Comparison) -> list[str]:
    """Which run has most, and what is shown of each."""
    runs, best = comparison.runs, comparison.best()
    top, row = runs[best[0]].label, comparison.means[best[0]]
    sentences = [
        f"The highest is {top}, with {_score_words(comparison, row)}." if known(row.get(comparison.score)) else ""
    ]
    reference = runs[0].label
    if len(runs) - 1 <= SPOKEN_OF:
        sentences += [_shown(one, comparison) for one in comparison.found]
    else:
        counts = {sign: sum(one.sign == sign for one in comparison.found) for sign in (1, -1, 0)}
        sentences.append(
            f"Tested against {reference}: {len(comparison.found)} runs, {counts[1]} better, {counts[-1]} worse, "
            f"{counts[0]} not shown to differ."
        )
        first = next((one for i in best for one in comparison.found if one.run == runs[i].label), None)
        if first is not None:
            sentences.append(_shown(first, comparison))
    if not comparison.found:
        sentences.append(f"Nothing could be tested against {reference}.")
    if not comparison.settings:
        sentences.append("The settings are the same: what differs is chance, the code or the machine.")
    return [sentence for sentence in sentences if sentence]


def method(comparison: Comparison) -> str:
    """What was compared, and how, in a sentence or two."""
    if not comparison.found:
        return ""
    kind, samples = comparison.kind, sorted({one.samples for one in comparison.found})
    count = f"{samples[0]:,}" if len(samples) == 1 else f"{samples[0]:,} to {samples[-1]:,}"
    what = {
        "deadline": f"mean utility over {len(comparison.places)} budgets",
        "mean": f"accuracy at equal mean latency over {len(comparison.places)} mean budgets (a ms more or less counts "
        "for what it brings the static mix)",
        "selector": f"answers right at {shots_words(int(comparison.main or 0))}",
    }[kind]
    of = "queries" if kind == "selector" else "samples"
    one_seed = any(len(run.results.get("seeds", [])) == 1 for run in comparison.runs)
    alone = " Of a run with one seed, what other seeds would give is not known, nor in the interval." * one_seed
    return (
        f"Compared with {comparison.runs[0].label}: {what}, on the same {count} test {of}. In brackets 95% intervals, "
        f"a paired bootstrap over {of} and seeds, wider where seeds are few; p: a sign-flip test over the {of} and, "
        f"where seeds differ, a t test with their spread, the larger of the two, corrected for {len(comparison.found)} "
        f"comparison{'s' * (len(comparison.found) > 1)} (Holm). Better or worse is said "
        f"where the interval excludes 0 and p is below {CHANCE:g}.{alone}"
    )


def _shown(one: Difference, comparison: Comparison) -> str:
    if one.difference == one.ci95[0] == one.ci95[1] == 0:
        return f"{one.run} got the same as {one.against} on every sample."
    says = {1: "is better than", -1: "is worse than", 0: "is not shown to differ from"}[one.sign]
    unit = {"selector": "points", "deadline": "of utility", "mean": "of accuracy"}[comparison.kind]
    gap, span = difference_words(one, comparison.kind)
    p = p_words(one.p_holm) if one.p_holm < 0.001 else f"= {p_words(one.p_holm)}"
    return f"{one.run} {says} {one.against}: {gap} {unit} {span}, p {p}."


def shown_words(one: Difference | None) -> str:
    """The last cell of a row of a table."""
    if one is None:
        return "not tested"
    return ("worse", "no difference shown", "better")[one.sign + 1]


def difference_words(one: Difference | None, kind: str) -> tuple[str, str]:
    """A difference and its interval; of answers in points."""
    if one is None:
        return "–", ""
    low, high = one.ci95
    if kind == "selector":
        return points(one.difference), f"[{points(low)}, {points(high)}]"
    return f"{one.difference:+z.3f}", f"[{low:+z.3f}, {high:+z.3f}]"


def p_words(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _score_words(comparison: Comparison, row: Row) -> str:
    value = row[comparison.score]
    if comparison.kind == "mean":
        return f"{value:+z.3f} of accuracy over the static mix of equal mean latency"
    if comparison.kind == "selector":
        return f"{value:.1%} of the answers right at {shots_words(int(comparison.main or 0))}"
    return f"a mean utility of {value:.3f}"


# -- tables ------------------------------------------------------------------------------------------------------------


def header(comparison: Comparison) -> list[str]:
    """Of the table of runs."""
    tested = ["difference", "p", "shown"]
    if comparison.kind == "selector":
        tested[0] += ", points"
        shots = [f"{shots_words(int(n))}{' (compared)' * (n == comparison.main)}" for n in comparison.places]
        return ["run", *tested, "policy", *shots]
    if comparison.kind == "mean":
        return ["run", "over static mix", *tested, "accuracy", "mean latency", "gap closed"]
    return ["run", "utility", *tested, "gap closed", "accuracy", "mean latency", "in time", "where possible"]


def cells(comparison: Comparison) -> list[list[str]]:
    """A line a run under `header`, in the order given; then, of controllers, what the first run was judged beside."""
    lines = []
    for i, run in enumerate(comparison.runs):
        one = comparison.difference(run.label)
        tested = ["\n".join(filter(None, difference_words(one, comparison.kind)))]
        tested += ["–" if one is None else p_words(one.p_holm), shown_words(one) if i else "reference"]
        if comparison.kind == "selector":
            policy = comparison.policies[i]
            at = [run.row(policy, place) for place in comparison.places]
            accuracies = [number(r.get("accuracy"), ".3f") + interval(r.get("accuracy_ci95"), ".3f") for r in at]
            lines.append([run.label, *tested, policy_words(policy, run.results), *accuracies])
        else:
            lines.append([run.label, *_cells(comparison, comparison.means[i], tested)])
    if comparison.kind != "selector":
        for policy in (STATIC if comparison.kind == "deadline" else MIX, ORACLE):
            if row := row_over(comparison.runs[0], policy, comparison.places, None):
                lines.append([policy_name(policy), *_cells(comparison, row, ["–", "–", ""])])
    return lines


def _cells(comparison: Comparison, row: Row, tested: Sequence[str]) -> list[str]:
    gap = number(row.get("gap_closed"), ".0%") + interval(row.get("gap_closed_ci95"), ".0%")
    accuracy, latency = number(row.get("accuracy"), ".3f"), quantity(row.get("latency_ms_mean"), comparison.unit)
    if comparison.kind == "mean":
        over = f"{row['over_static_mix']:+z.3f}" if known(row.get("over_static_mix")) else "–"
        return [over + interval(row.get("over_static_mix_ci95"), ".3f"), *tested, accuracy, latency, gap]
    utility = number(row.get("utility"), ".3f") + interval(row.get("utility_ci95"), ".3f")
    kept = [number(row.get(name), ".1%") for name in ("satisfaction", "satisfaction_feasible")]
    return [utility, *tested, gap, accuracy, latency, *kept]


def settings_cells(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """What differs in the settings: header and lines, a setting a line for a few runs, else a run a line. A value that
    is that of the first run is not said again."""
    labels = [run.label for run in comparison.runs]
    said = {
        key: [words[0], *("same" if one == words[0] else one for one in words[1:])]
        for key, words in comparison.settings.items()
    }
    if len(labels) <= SIDE_BY_SIDE:
        return ["setting", *labels], [[key, *words] for key, words in said.items()]
    return ["run", *said], [[label, *(words[i] for words in said.values())] for i, label in enumerate(labels)]


def print_comparison(comparison: Comparison, console: Console) -> None:
    """The tables and the sentences; without colours and frames when this is no terminal."""
    from knobwise.experiments.report import print_table

    if comparison.settings and len(comparison.runs) <= SIDE_BY_SIDE:
        print_table(console, *settings_cells(comparison), range(len(comparison.runs) + 1), "")
    elif comparison.settings:
        values = {key: ", ".join(dict.fromkeys(words)) for key, words in comparison.settings.items()}
        _say(console, [f"differs: {key} ({words})" for key, words in values.items()])
    rows, few = cells(comparison), (0, 1, 2, 4) if comparison.kind != "selector" else (0, 1, 3, 4)
    print_table(console, header(comparison), rows, few, comparison.runs[0].label)
    _say(console, [*verdict(comparison), method(comparison), *comparison.notes])


def _say(console: Console, lines: Sequence[str]) -> None:
    for words in filter(None, lines):
        console.print(words, markup=False, highlight=False, soft_wrap=not console.is_terminal)


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
