"""The page of one finished run or of several: the answer, one table, sentences, and `SECTIONS`, of
which each returns what applies to these runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from markupsafe import Markup

from knobwise.common.words import format_number, join_words, quantity, setting
from knobwise.envs.tables.units import TIMES
from knobwise.experiments.evidence.results import unit_of
from knobwise.experiments.evidence.schema import LiveFacts, PolicyRow, RunResults
from knobwise.experiments.evidence.task import Row
from knobwise.experiments.report.between_runs import between_runs, condition_name
from knobwise.experiments.report.choices import explanation
from knobwise.experiments.report.comparison import Comparison
from knobwise.experiments.report.content import (
    by_dataset,
    judged_on,
    main_table,
    table_at,
    tiles_of,
    when_made,
)
from knobwise.experiments.report.sentences import Sentence, texts, write_sentences
from knobwise.experiments.report.tables import Block, Content, Folded, Table, records, reword_costs
from knobwise.experiments.report.verdict import promise_at, verdict
from knobwise.experiments.report.words import (
    LEARNED,
    POLICIES,
    hidden_words,
    policy_name,
    shown_by,
)


def page_content(comparison: Comparison) -> Content:
    """Return a page about one run or several, but for its figures."""
    results = comparison.reference.results
    kind = "knobwise comparison"
    name = f"{len(comparison.runs)} runs"
    facts = [judged_on(comparison)]
    sentences = [
        *write_sentences(between_runs(comparison), comparison.unit),
        *write_sentences(comparison.notes),
    ]
    if comparison.single:
        kind = "knobwise run report"
        name = comparison.reference.label
        facts.insert(0, when_made(results.get("run")))
        sentences = [*verdict(results), *results.get("warnings", [])]
    if served := live_of(comparison):
        kind = "knobwise live run"
        facts = [machine_words(results)]
        sentences += write_sentences(on_serving(served))
    lead, *others = sentences
    return Content(
        kind=kind,
        name=name,
        lead=lead,
        table=main_table(comparison),
        sentences=others,
        facts=facts,
        tiles=reword_costs(tiles_of(comparison), comparison.unit),
        details=details(comparison),
    )


def details(comparison: Comparison) -> list[Folded]:
    """Return the parts of a page below its table, of which most are folded."""
    parts = [part for section in SECTIONS for part in section(comparison)]
    # commands and files are shown as they are
    return [*reword_costs(parts, comparison.unit), *reproduce(comparison)]


# -- what stands open ------------------------------------------------------------------------------


def options(comparison: Comparison) -> list[Folded]:
    """List the options in which several runs differ."""
    if not comparison.settings:
        return []
    labels = [run.label for run in comparison.runs]
    rows = [[key, *values] for key, values in comparison.settings.items()]
    return [Folded("Options that differ", [Table(["option", *labels], rows)], open=True)]


def datasets(comparison: Comparison) -> list[Folded]:
    """Tabulate the results of a single run in each data set, if there are several."""
    results = comparison.reference.results
    if not (comparison.single and results.get("by_dataset")):
        return []
    text = texts()["about"]["datasets"][comparison.task.name]
    return [Folded("Every data set", [text, by_dataset(results)], open=True)]


# -- tables ----------------------------------------------------------------------------------------


def conditions(comparison: Comparison) -> list[Folded]:
    """Tabulate the metrics at each budget or number of shots."""
    every = [
        Folded(condition_name(comparison, condition), [table_at(comparison, condition)])
        for condition in comparison.conditions
    ]
    return [Folded(f"Every {comparison.task.condition_words[0]}", every)] if every else []


def tables(comparison: Comparison) -> list[Folded]:
    """Tabulate the records that need no more than a format, see `RECORDS`."""
    results = comparison.reference.results
    filled = {
        "main": condition_name(comparison, comparison.main),
        "hidden": hidden_words(results),
    }
    parts = []
    for name, rows_of in RECORDS.items():
        title, text = texts()["about"][name]
        table = records(rows_of(comparison), name, comparison.unit, results)
        if table.rows:
            parts.append(Folded(title, [text.format(**filled), table], open=name in OPEN))
    return parts


OPEN = ("spent", "promises")
"""The tables that are seen at once."""
Records = Callable[[Comparison], Sequence[Row]]


def _of_run(key: str) -> Callable[[Comparison], list[Any]]:
    """Make a function that reads the records under `key` of a single run; it gives [] for several
    runs."""

    def rows(comparison: Comparison) -> list[Any]:
        results: Row = comparison.reference.results
        return list(results.get(key) or ()) if comparison.single else []

    return rows


def _calls(comparison: Comparison) -> list[Row]:
    """Return how often each policy called the answering model, as a mean over the seeds."""
    rows = _of_run("true_calls")(comparison)
    return [{**row, "calls": sum(row["calls"]) / len(row["calls"])} for row in rows]


def _by_seed(comparison: Comparison, rows: Sequence[Sequence[Row]]) -> list[Row]:
    """Flatten the records of each seed into one list, with the seed in each."""
    seeds = comparison.reference.results.get("seeds", range(len(rows)))
    pairs = zip(seeds, rows, strict=False)
    return [{**row, "seed": seed} for seed, of_seed in pairs for row in of_seed]


def _guarantees(comparison: Comparison) -> list[Row]:
    """List the rows of the guard: one for each seed and budget."""
    return _by_seed(comparison, _of_run("guard")(comparison))


def _promises(comparison: Comparison) -> list[Row]:
    """List what was promised at each budget, and what came of it on test samples."""
    rows = []
    for row in _of_run("promises")(comparison):
        promised = f"{100 * row['promise']:g}%"
        where = promise_at(row)
        if where == "not_promised":
            promised = "nothing"
        elif where == "promise_goes_on":
            promised += f", as at {quantity(row['rule_ms'], unit_of(comparison.reference.results))}"
            # of a rule that does not decide
            row = {**row, "held_out": None, "held_out_bound": None}
        rows.append({**row, "promised": promised + ", broken" * row["broken"]})
    return sorted(rows, key=lambda row: row["budget_ms"])


def _chosen(comparison: Comparison) -> list[Row]:
    """Return the iteration that was kept in each seed, and the weight and the settings of each
    member of its teacher."""
    rows = []
    for chosen in _of_run("chosen")(comparison):
        members = []
        for name, weight in (chosen.get("weights") or {"network": None}).items():
            value = chosen.get("settings", {}).get(name)
            about = texts()["members"].get(name, "")
            member = {"member": name, "weight": weight, "value": value, "settings": about}
            members.append(member | {"iteration": f"{chosen.get('iteration', 0):,}"})
        rows.append(members)
    return _by_seed(comparison, rows)


def _spent(comparison: Comparison) -> list[PolicyRow]:
    """List what the controller of a single run got and spent under each mean budget."""
    if not (comparison.single and comparison.task.equal_latency):
        return []
    results = comparison.reference.results
    rows = [comparison.task.row(results, LEARNED, each) for each in comparison.conditions]
    return [row for row in rows if row]


def _stages(comparison: Comparison) -> list[Row]:
    """List the tested differences between policies that both runs trained, with what is shown by
    each."""
    return [asdict(each) | {"shown": shown_by(each)} for each in comparison.by_policy]


RECORDS: dict[str, Records] = {
    "spent": _spent,
    "stages": _stages,
    "differences": _of_run("differences"),
    "votes": _of_run("votes"),
    "controls": _of_run("controls"),
    "calls": _calls,
    "promises": _promises,
    "guarantees": _guarantees,
    "chosen": _chosen,
}
"""Name in `texts.yaml` → the records of a folded table."""


def choices(comparison: Comparison) -> list[Folded]:
    """Explain the choices of a single run's controller."""
    results = comparison.reference.results
    if not (comparison.single and results.get("explanation")):
        return []
    return [Folded("Why these configurations", explanation(results))]


# -- a live run ------------------------------------------------------------------------------------


def live_of(comparison: Comparison) -> LiveFacts | None:
    """Return the facts about serving of a single live run; None of other runs."""
    return comparison.reference.results.get("live") if comparison.single else None


COMPARED = {
    "accuracy": "accuracy",
    "latency_ms_mean": "mean ms",
    "satisfaction": "share on time",
    "utility": "utility",
}
"""What a live run compares with its replay, in words."""


def machine_words(results: RunResults) -> str:
    """Say what the requests were served on, and by which profile."""
    machine = results["live"]["machine"]
    return (
        f"{machine['cpu']}, torch {machine['torch']}, one thread, load {machine['load']:.1f}, "
        f"jitter {format_number(machine['jitter'], '.1%')} · profile {results['profile']['name']}"
    )


def on_serving(live: LiveFacts) -> list[Sentence]:
    """Say what the controller added to the model's time, and whether a replay on the profile fares
    as the live run did, if there is one."""
    added = live["overhead"]["share"]
    share = "less than 0.1%" if 0 <= added < 0.0005 else format_number(added, ".1%")
    lines = [Sentence("added", share=share)]
    if kept := [row for row in live.get("promises", []) if row["policy"] == LEARNED]:
        broken = [str(row["window"]) for row in kept if row["broken"]]
        promise = f"{100 * kept[0]['promise']:g}%"
        if broken:
            where = join_words(broken)
            lines.append(Sentence("promise_broken_live", promise=promise, where=where))
        else:
            lines.append(Sentence("promise_kept_live", promise=promise))
    rows = live["agreement"]
    differing = [
        f"{COMPARED[row['what']]} of {policy_name(row['policy'])}"
        for row in rows
        if not row["agrees"]
    ]
    if differing:
        lines.append(
            Sentence(
                "replay_differs",
                count=len(rows) - len(differing),
                total=len(rows),
                numbers=", ".join(differing),
            )
        )
    elif rows:
        lines.append(Sentence("replay_agrees"))
    return lines


def serving(comparison: Comparison) -> list[Folded]:
    """Tabulate how a live run was served, what the tracker believed, and the replay of the same
    decisions."""
    live = live_of(comparison)
    if not live:
        return []
    results = comparison.reference.results
    about = texts()["about"]
    served = {
        "requests": f"{live['requests']:,}",
        "budgets": ", ".join(f"{budget:.2f}" for budget in results["budgets_ms"]),
        "clock": {"wall": "wall time", "cpu": "CPU time of the thread"}[live["clock"]],
    }
    same = live["decisions"].get("as_replayed_at_the_same_limit")
    speed = records([{**live["overhead"], **live["speed"], "same": same}], "serving")
    # what the tracker believed when the run ended
    tracker = [{"part": part, "factor": factor} for part, factor in live["tracker"].items()]
    ignored = about["tracker"].format(ignored=live["ignored"])
    fixed = {policy_name(name): setting(knobs) for name, knobs in live["configurations"].items()}
    details = [
        Folded("How it was served", [about["serving"].format(**served), speed], open=True),
        Folded("The tracker", [ignored, records(tracker, "tracker")]),
        Folded("The fixed configurations", [fixed]),
    ]
    if kept := live.get("promises"):
        text = about["kept"].format(slowdown=format_number(live["slowdown"], "g"))
        details.insert(0, Folded("The promise", [text, records(kept, "kept")], open=True))
    if live["agreement"]:
        replay = records(live["agreement"], "replay")
        details.insert(1, Folded("Live and replay", [about["replay"], replay]))
    return details


# -- the end of the page ---------------------------------------------------------------------------


def glossary(comparison: Comparison) -> list[Folded]:
    """Explain what is new here, and describe every policy in the tables."""
    task = comparison.task
    results = comparison.reference.results
    terms = dict(texts()["glossary"]["live" if "live" in results else task.name])
    if comparison.unit not in TIMES:
        terms |= texts()["glossary"]["not_charged"]
    if rule := results.get("rule"):
        terms["utility"] = texts()["glossary"]["own_rule"].format(rule=rule["name"])
    # only policies of the project have a description
    policies = [row["policy"] for row in task.rows(results)]
    for policy in dict.fromkeys([*policies, *(run.policy for run in comparison.runs)]):
        if about := POLICIES.get(policy):
            description = about["description"].format(hidden=hidden_words(results))
            terms[policy_name(policy, results)] = description
    return [Folded("What the words mean", [terms])]


def reproduce(comparison: Comparison) -> list[Folded]:
    """Return the commands, what repeats and what does not, and the settings of a single run;
    nothing of results without files."""
    from knobwise import __version__

    if comparison.reference.folder is None:
        return []
    commands: dict[str, str] = {}
    for run in comparison.runs:
        if run.folder is not None:
            repeated = f"knobwise train experiment={run.folder.parent.name}"
            commands[str(run.folder)] = run.results.get("command") or repeated
    run = comparison.reference
    digest = (run.results.get("profile") or {}).get("digest", "unknown")
    about = texts()["about"]["reproduce"].format(version=__version__, digest=digest)
    blocks: list[Block] = [commands, about]
    config = run.folder / "config.yaml" if run.folder else None
    if comparison.single and config is not None and config.exists():
        settings = Markup("<pre>{}</pre>").format(config.read_text(encoding="utf-8"))
        blocks.append(Folded("The resolved configuration (config.yaml)", [settings]))
    return [Folded("How to reproduce", blocks)]


SECTIONS: list[Callable[[Comparison], list[Folded]]] = [
    options,
    datasets,
    serving,
    conditions,
    tables,
    choices,
    glossary,
]
"""What stands below the table of a page, and after its figures where it is folded."""
