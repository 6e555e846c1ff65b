"""The part of docs/results.md on choosing demonstrations: from the `results.json` of each experiment of the selector,
whose differences are paired already, query by query and seed by seed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from knobwise.experiments.command_line.settings import question_of
from knobwise.experiments.report.selector_verdict import differences_at, of_last_round, points, policy_words, sign
from knobwise.experiments.report.verdict import Row
from knobwise.experiments.results.selector_results import GRPO

SELECTORS = {
    "selector": "What post-training gains",
    "selector_careful": "Where imitation gets nothing wrong",
    "selector_groups": "Which sequences form a group",
    "selector_rewards": "Reward modes",
    "selector_weights": "Hard and soft weights",
    "selector_advantages": "Rank against z-score",
    "selector_warm_up": "RCE before GRPO",
    "selector_curriculum": "Curriculum",
    "selector_conditional": "Conditional training",
    "selector_kl": "The KL to the SFT policy",
    "selector_v0": "Network v0",
    "selector_v1": "Network v1",
    "selector_convex": "A convex state update",
    "selector_linear": "Linear projections",
    "selector_seeds": "The original selector's settings",
}
"""Experiments by name, in the order of the page, and their headings."""
NETWORKS = ("selector_v0", "selector_v1", "selector_convex", "selector_linear")
"""They train another network as `selector_groups` trains its first variant, and that is what they are held against."""
BASE = "selector_groups"


class Shown(NamedTuple):
    """One experiment on the page."""

    title: str
    question: str
    answer: str
    lines: list[str]


class Difference(NamedTuple):
    """Of two policies, in words, and in accuracy."""

    policy: str
    against: str
    row: Row


def selector_sections(found: Mapping[str, Mapping[str, Any]]) -> Iterator[Shown]:
    """Every experiment that is finished."""
    for name, title in SELECTORS.items():
        if name not in found:
            continue
        results = found[name]
        compared = list(_compared(name, results))
        across = _across(results, found[BASE]) if name in NETWORKS and BASE in found else []
        question = question_of(name)
        lines = [f"*{question}* `knobwise train experiment={name}`", _table(results)]
        said = [_said(one) for one in compared]
        said += [f"{_said(one)} (not paired: separate runs, the interval is wider for it)" for one in across]
        said += [*_idle(results), *(_votes(results) if name == "selector" else [])]
        yield Shown(title, question, _answer(name, across or compared, results), [*lines, *_bullets(said)])


def introduction(some: Mapping[str, Any]) -> str:
    """What the sections share."""
    return (
        "The built-in beams are queries about canvases (a digit, a frame, a texture), half of them with two questions "
        "that must both be right, labels permuted for each query, answered by a small learner from the demonstrations "
        "alone. Six of ten annotators are careless: their canvases are clean and four in ten of their labels wrong; "
        "the selector sees who annotated, the learner does not. Accuracy on "
        f"{some['test_queries']:,} held-out queries, each with its own pool of 48 out of a bank that training never "
        f"used; {len(some['seeds'])} seeds; 95 % bootstrap intervals over queries and seeds, those of differences "
        f"paired. All were trained at {some['trained_shots']} shots, and differences, in points, hundredths of "
        "accuracy, are at as many. The best epoch is chosen on other queries."
    )


def table_of(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *rows])


def _table(results: Mapping[str, Any]) -> str:
    shots = results["shots"]
    everyone = results["experiment"] == "selector"
    rows = [row for row in [*results["rows"], *results["controls"]] if everyone or _is_trained(row)]
    at = {(row["policy"], row["shots"]): row for row in rows}
    trained = results["trained_shots"]
    names = sorted({row["policy"] for row in rows}, key=lambda name: -at[name, trained]["accuracy"])
    head = ["policy", *(f"{count} shot{'s' * (count > 1)}" for count in shots)]
    lines = [[policy_words(name, results), *(_cell(at.get((name, count))) for count in shots)] for name in names]
    return table_of(head, lines)


def _is_trained(row: Row) -> bool:
    return "accuracy_per_seed" in row and row["policy"] != "random"


def _cell(row: Row | None) -> str:
    if row is None:
        return "–"
    low, high = row["accuracy_ci95"]
    return f"{row['accuracy']:.3f} [{low:.3f}, {high:.3f}]"


def _compared(name: str, results: Mapping[str, Any]) -> Iterator[Difference]:
    """What the experiment asks about, at the trained number of shots."""
    at = differences_at(results, results["trained_shots"])
    if name == "selector":
        wanted = [(form, "rce") for form in GRPO]
        wanted += [("rce", "sft"), ("sft", "part_similarity"), ("shuffled_recorded", "sft"), ("shuffled_live", "sft")]
        wanted += [("hidden_live", "hidden_sft")]
    elif any(policy in GRPO for policy, _ in at):
        wanted = [*((form, "rce") for form in GRPO), ("rce", "sft")]
    else:
        first, *others = results["variants"]
        wanted = [*((variant, first) for variant in others), (first, "rce")]
        wanted += [("rce", "sft")] if any(results.get("epochs", {}).get("rce", [])) else []
    for pair in wanted:
        if pair in at:
            yield Difference(policy_words(pair[0], results), policy_words(pair[1], results), at[pair])


def _across(results: Mapping[str, Any], base: Mapping[str, Any]) -> list[Difference]:
    """This network against the default one, trained alike: SFT, and GRPO on recorded groups.

    Of two runs the intervals are known and not their answers query by query, so the difference has the interval of
    independent estimates (Newcombe 1998, method 10): too wide, as the queries are the same.
    """
    shots, found = results["trained_shots"], []
    for policy, other in (("sft", "sft"), ("grpo_recorded", base["variants"][0])):
        one, two = (
            next((r for r in side["rows"] if (r["policy"], r["shots"]) == (name, shots)), None)
            for side, name in ((results, policy), (base, other))
        )
        if one is None or two is None:
            continue
        apart = one["accuracy"] - two["accuracy"]
        low = apart - math.hypot(one["accuracy"] - one["accuracy_ci95"][0], two["accuracy_ci95"][1] - two["accuracy"])
        high = apart + math.hypot(one["accuracy_ci95"][1] - one["accuracy"], two["accuracy"] - two["accuracy_ci95"][0])
        words = policy_words(policy, results)
        found.append(Difference(words, "the same with the default network", {"difference": apart, "ci95": [low, high]}))
    return found


def _points(row: Row) -> str:
    low, high = row["ci95"]
    return f"{points(row['difference'])} [{points(low, '')}, {points(high, '')}]"


def _said(one: Difference) -> str:
    if sign(one.row) == 0:
        return f"{one.policy} is not shown to differ from {one.against}: {_points(one.row)} points"
    return f"{one.policy} is {'better' if sign(one.row) > 0 else 'worse'} than {one.against}: {_points(one.row)} points"


def _answer(name: str, compared: Sequence[Difference], results: Mapping[str, Any]) -> str:
    """In a line: what the question is about first, and nothing of what was compared beside."""
    own = [one for one in compared if one.against != policy_words("sft", results)]
    if name not in NETWORKS and not any(form in results["variants"] for form in GRPO):
        own = [one for one in own if one.against != policy_words("rce", results)]
    parts = []
    for against in dict.fromkeys(one.against for one in own):
        clear = sorted((o for o in own if o.against == against and sign(o.row)), key=lambda o: -o.row["difference"])
        unclear = [one.policy for one in own if one.against == against and not sign(one.row)]
        said = [f"{one.policy} {_points(one.row)}" for one in clear]
        if unclear:
            said.append("no difference shown" + (f" for {', '.join(unclear)}" if said or len(own) > 1 else ""))
        parts.append(f"{', '.join(said)} (against {against})")
    return "; ".join(parts) or "nothing compared"


def _idle(results: Mapping[str, Any]) -> list[str]:
    """Trainings that changed nothing: the start was the best on validation, and went on."""
    idle = {name: epochs.count(0) for name, epochs in results.get("epochs", {}).items()}
    seeds = len(results["seeds"])
    return [
        f"{policy_words(name, results)}: no epoch{of_last_round(name)} was better on validation than its start in "
        f"{count} of {seeds} seeds"
        for name, count in idle.items()
        if count
    ]


def _votes(results: Mapping[str, Any]) -> list[str]:
    votes = {row["policy"]: row for row in results.get("votes", []) if row["shots"] == results["trained_shots"]}
    return [
        f"Without the learner, the majority of the labels that {policy_words(policy, results)} chose is right for "
        f"{_cell(votes[policy])}"
        for policy in ("sft", "grpo_live")
        if policy in votes
    ]


def _bullets(said: Sequence[str]) -> list[str]:
    return ["\n".join(f"- {line[0].upper()}{line[1:]}." for line in said)] if said else []
