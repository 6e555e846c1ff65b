"""docs/results.md: what every experiment found, in tables and sentences that follow from the numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from knobwise.experiments.command_line.settings import question_of
from knobwise.experiments.compare.compared_runs import ComparedRun, kind_of, place_of
from knobwise.experiments.report.verdict import (
    LEARNED,
    ORACLE,
    STATIC,
    kept_before_grpo,
    known,
    means_of,
    number,
    policy_name,
    ranked,
)
from knobwise.experiments.results.paired import CHANCE, Difference, differences, holm
from knobwise.experiments.studies.reference_selectors import introduction, selector_sections, table_of

OWN = ""


class Profile(NamedTuple):
    """What controllers are trained on."""

    called: str
    words: list[str]
    """Of the command line."""


PROFILES = {
    "builtin": Profile("built-in", ["profile=builtin"]),
    "calibrated": Profile(
        "calibrated",
        [
            "profile=calibrated",
            "profile.samples=400",
            "profile.grid=27",
            "profile.image_width=48",
            "profile.language_width=64",
        ],
    ),
}


class Section(NamedTuple):
    """How an experiment of the controller is shown."""

    title: str
    against: str = OWN
    """What its variants are held against: the experiment of that name, or of its own variants the one that its file
    sets without a sweep, or a policy of the same run."""
    profiles: Sequence[str] = tuple(PROFILES)
    every_simple_way: bool = False
    note: str = ""


CONTROLLERS = {
    "controller": Section("The controller beside every simple way", STATIC, every_simple_way=True),
    "lean": Section("Experts beside the network", "controller"),
    "objective": Section("Every configuration, or draws", OWN),
    "group_size": Section("Group size"),
    "advantages": Section("Advantages"),
    "clip": Section("The clip"),
    "kl": Section("The KL to the warmed-up policy"),
    "rce_only": Section("RCE without GRPO", "objective"),
    "cold_start": Section("GRPO without RCE", "objective"),
    "warm_up_only": Section("Regression without GRPO", "lean"),
    "heads": Section("Structures over the knobs"),
    "retrieval": Section("Looking at similar samples", "lean"),
    "augmented": Section("Features varied in training", "lean"),
    "budget_encodings": Section("How the budget is put in"),
    "budget_strategies": Section("Budgets in training"),
    "miss": Section("The cost of a missed budget"),
    "reward_coefficients": Section("The original shaped reward"),
    "seeds": Section("The original settings", "lean"),
    "mean_budget": Section("When the mean is limited", "static_mix"),
    "joint_data_sets": Section("Several data sets", profiles=("calibrated",)),
    "balanced": Section(
        "Small data sets drawn as often",
        "lean",
        ("calibrated",),
        note="The simulated data sets are of one size, so that hardly anything changes: what is shown is that it does "
        "no harm, not what it gains.",
    ),
    "leave_one_out": Section(
        "A data set never seen",
        STATIC,
        ("calibrated",),
        note="Static is fitted on the same other data sets, and gap closed measured from it.",
    ),
}
"""Experiments by name, in the order of the page. What two of them share is run by the first."""


class Found(NamedTuple):
    """A finished run."""

    experiment: str
    profile: str
    variant: str
    default: bool
    results: Mapping[str, Any]
    decisions: pl.DataFrame | None
    """Of a controller."""

    def judged(self, dataset: str | None = None) -> ComparedRun:
        """As `knobwise compare` sees it; on one data set alone where that is asked for."""
        decisions = self.decisions
        if decisions is not None and dataset is not None:
            decisions = decisions.filter(pl.col("dataset") == dataset)
        return ComparedRun(Path(), _called(self), kind_of(self.results), dict(self.results), {}, decisions)


def page_of(found: Sequence[Found], seeds: Sequence[int], open_runs: int = 0) -> str:
    """The page.

    Args:
        found: what is finished.
        seeds: of the training.
        open_runs: how many are not.
    """
    answers, parts, families = list[tuple[str, str, str]](), list[str](), list[Sequence[Difference]]()
    for name, section in CONTROLLERS.items():
        if own := [one for one in found if one.experiment == name]:
            lines, of_profiles, of_datasets = _section(name, section, own, found)
            parts += lines
            families += [*of_profiles.values(), *of_datasets]
            said = [f"{PROFILES[profile].called}: {_answer(many)}" for profile, many in of_profiles.items() if many]
            answers.append((section.title, question_of(name), "; ".join(said) or "not finished"))
    if parts:
        parts.insert(0, "## Choosing configurations")
    selectors = {one.experiment: one.results for one in found if one.profile == "beams"}
    if selectors:
        parts += ["## Choosing demonstrations", introduction(next(iter(selectors.values())))]
    for shown_one in selector_sections(selectors):
        parts += [f"### {shown_one.title}", *shown_one.lines]
        answers.append((shown_one.title, shown_one.question, shown_one.answer))
    return "\n\n".join([*_head(found, seeds, open_runs), *_chance(families), _summary(answers), *parts]) + "\n"


def _head(found: Sequence[Found], seeds: Sequence[int], open_runs: int) -> list[str]:
    profiles = {one.profile: one.results["profile"] for one in found if one.profile in PROFILES}
    sizes = {name: f"{facts['samples']:,} samples × {facts['configurations']}" for name, facts in profiles.items()}
    words = {
        "builtin": "*built-in*: a small elastic vision-language model, really measured",
        "calibrated": "*calibrated*: three simulated data sets, calibrated to published numbers "
        "(`knobwise.envs.simulated.calibrated`), nothing of which was measured on a model",
    }
    listed = "; ".join(f"{words[name]} ({sizes[name]} configurations)" for name in PROFILES if name in sizes)
    head = [
        "# Reference results",
        "Made by `python experiments/studies/reference.py`: every experiment of "
        "`experiments/conf/experiment/`, but for `selector_replay`, which is for recorded beams of your own, "
        f"{len(seeds)} training seeds ({', '.join(map(str, seeds))}), each held "
        "against what it changes. Sentences are made from the numbers; *no difference shown* is not the same as none: "
        "how large one could be is in the interval. Differences are in points, hundredths of utility or of accuracy. "
        "Single runs: `knobwise train`, and `knobwise compare` for two or more of them.",
    ]
    if listed:
        head += [
            f"Controllers are trained on two profiles, {listed}. The command of each section is for the built-in one; "
            f"for the other give `{' '.join(PROFILES['calibrated'].words)}`. "
            "Judged on the test split, which nothing was fitted or chosen on, mean over five budgets. "
            "Utility is the accuracy of an answer that came in time, 0 for a late "
            "one; *gap closed* the share of the way from budget-aware static to the oracle; *where possible* the share "
            "of requests answered in time among those that some configuration could have answered in time. Intervals "
            "are 95 % bootstrap intervals over samples and seeds; differences are paired, sample by sample, budget by "
            "budget, seed by seed, and their intervals are wider where few seeds differ much.",
        ]
    if open_runs:
        head.append(f"**Not complete: {open_runs} runs are not finished.**")
    return head


def _chance(families: Sequence[Sequence[Difference]]) -> list[str]:
    """How many differences are looked at, and what chance alone would show."""
    every = [one for family in families for one in family]
    if not every:
        return []
    outside, shown = sum(one.ci95[0] > 0 or one.ci95[1] < 0 for one in every), sum(one.sign != 0 for one in every)
    return [
        f"The tables on controllers hold {len(every)} differences. If nothing mattered, chance alone would put "
        f"{CHANCE * len(every):.1f} of their intervals off 0; {outside} are. *Better* and *worse* ask for more, as "
        "`knobwise compare` does: the interval leaves out 0, and p, corrected for the number of differences of the "
        f"same question on the same profile (Holm), is below {CHANCE:g}. That is so for {shown}; by chance alone "
        f"at most {CHANCE * len(families):.1f} of the {len(families)} questions would show any."
    ]


def _summary(answers: Sequence[tuple[str, str, str]]) -> str:
    rows = []
    for title, question, answer in answers:
        anchor = "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c in "-_")
        rows.append([f"[{title}](#{anchor})", question[: question.find("?") + 1], answer])
    return "## In short\n\n" + table_of(["section", "question", "answer, in points [95 %]"], rows)


def _section(
    name: str, section: Section, own: Sequence[Found], found: Sequence[Found]
) -> tuple[list[str], dict[str, list[Difference]], list[list[Difference]]]:
    """The lines of an experiment, for each profile what was compared, and what was data set by data set."""
    swept = any(one.variant for one in own)
    words = PROFILES[section.profiles[0]].words[:1] if len(section.profiles) > 1 else []
    command = " ".join(["knobwise train", *["-m"] * swept, f"experiment={name}", *words])
    lines = [f"### {section.title}", f"*{question_of(name)}* `{command}`", *([section.note] if section.note else [])]
    compared = {profile: _compare(section, [o for o in own if o.profile == profile], found) for profile in PROFILES}
    findings, datasets = list[str](), list[list[Difference]]()
    for profile, many in compared.items():
        runs = [one for one in own if one.profile == profile]
        findings += [f"{PROFILES[profile].called}: {words}" for words in (_finding(many) if many else ())]
        for one in runs:
            if idle := _before_grpo(one):
                findings.append(f"{PROFILES[profile].called}: {idle}")
            if by_dataset := _by_dataset(section, one):
                datasets.append(by_dataset)
                told = f"{_called(one)} against budget-aware static, by data set: {_sorted_out(by_dataset)}."
                findings.append(f"{PROFILES[profile].called}: {told}")
    if section.every_simple_way:
        for one in own:
            lines += [f"On the {PROFILES[one.profile].called} profile:", _simple_ways(one)]
    else:
        lines.append(_variants(own, compared))
    if findings:
        lines.append("\n".join(f"- {said[0].upper()}{said[1:]}" for said in findings))
    return lines, {profile: many for profile, many in compared.items() if many}, datasets


# -- differences -------------------------------------------------------------------------------------------------------


def _compare(section: Section, own: Sequence[Found], found: Sequence[Found]) -> list[Difference]:
    """Every variant of an experiment, on one profile, against what it is held against."""
    if not own:
        return []
    if section.every_simple_way:
        return [
            found for one in own for found in _against_policies(one, [row["policy"] for row in ranked(one.results)])
        ]
    if section.against not in (OWN, *CONTROLLERS):
        return holm([found for one in own for found in _against_policies(one, [section.against])])
    if section.against == OWN:
        # before all are finished the one that the others are held against may not be there
        base = next((one for one in own if one.default), own[0])
    else:
        bases = [one for one in found if (one.experiment, one.profile) == (section.against, own[0].profile)]
        if not bases:
            return []
        base = next((one for one in bases if one.default), bases[0])
    return holm([apart for one in own if one is not base and (apart := _apart(one, base)) is not None])


def _against_policies(one: Found, policies: Sequence[str], dataset: str | None = None) -> list[Difference]:
    """The learned policy against others of the same run."""
    others = [policy for policy in policies if policy not in (LEARNED, ORACLE)]
    return holm([apart for policy in others if (apart := _apart(one, one, policy, dataset)) is not None])


def _apart(one: Found, other: Found, against: str = LEARNED, dataset: str | None = None) -> Difference | None:
    """What the learned policy of one run has more than a policy of another, as `knobwise compare` has it, over all
    budgets; None where they share too few samples, or were not judged under the same budgets."""
    run, reference = one.judged(dataset), other.judged(dataset)
    if run.decisions is None or reference.decisions is None:
        return None
    places, others = (
        {place_of(b) for b in r.decisions["budget_ms"]} for r in (run, reference) if r.decisions is not None
    )
    if places != others:
        return None
    found = differences(reference, run, (against, LEARNED), sorted(places))[0]
    whole = next((apart for apart in found if apart.place is None), None)
    held_against = _called(other) if against == LEARNED else policy_name(against)
    return None if whole is None else replace(whole, run=dataset or _called(one), against=held_against)


def _called(one: Found) -> str:
    return f"`{one.variant or one.experiment}`"


# -- sentences ---------------------------------------------------------------------------------------------------------


def _finding(compared: Sequence[Difference]) -> Iterator[str]:
    """Sentences on everything that was compared, by what it was held against."""
    if len({one.run for one in compared}) == 1 and len(compared) > 1:  # one policy against many
        yield f"{compared[0].run} is {_sorted_out([replace(one, run=one.against) for one in compared], 'than ')}."
        return
    for against in dict.fromkeys(one.against for one in compared):
        yield f"against {against}: {_sorted_out([one for one in compared if one.against == against])}."


def _sorted_out(compared: Sequence[Difference], than: str = "") -> str:
    parts = []
    for sign, word in ((1, f"better {than}"), (-1, f"worse {than}"), (0, "no difference shown: ")):
        some = [f"{one.run} ({_points(one)})" for one in compared if one.sign == sign and not one.nothing]
        if some:
            parts.append((word if than or not sign else f"{word.strip()}: ") + ", ".join(some))
    if same := [one.run for one in compared if one.nothing]:
        parts.append(f"the same on every sample: {', '.join(same)}")
    return "; ".join(parts)


def _answer(compared: Sequence[Difference]) -> str:
    """In a line."""
    names = {one.run for one in compared}
    if len(names) == 1 and len(compared) > 1:
        best = min(compared, key=lambda one: one.difference)
        static = next((one for one in compared if one.against == policy_name(STATIC)), best)
        said = [f"{_word(one)} {one.against} by {_points(one)}" for one in dict.fromkeys((static, best))]
        return " and ".join(said) + (", the best of the simple ways here" if static is not best else "")
    parts = [f"{one.run} {_points(one)}" for one in sorted(compared, key=lambda one: -one.difference) if one.sign]
    if unclear := [one for one in compared if not one.sign]:
        whose = f" for {', '.join(one.run for one in unclear)}" if parts else ""
        low, high = min(one.ci95[0] for one in unclear), max(one.ci95[1] for one in unclear)
        among = "all intervals within" if len(unclear) > 1 else "the interval is"
        same = all(one.nothing for one in unclear)
        parts.append(
            f"the same on every sample{whose}" if same else f"no difference shown{whose}, {among} {_span(low, high)}"
        )
    return "; ".join(parts) + f" (against {', '.join(dict.fromkeys(one.against for one in compared))})"


def _points(one: Difference) -> str:
    """In hundredths."""
    return f"{100 * one.difference:+z.2f} {_span(*one.ci95)}"


def _span(low: float, high: float) -> str:
    return f"[{100 * low:z.2f}, {100 * high:z.2f}]"


def _word(one: Difference) -> str:
    return {1: "better than", -1: "worse than", 0: "not shown to differ from"}[one.sign]


def _before_grpo(one: Found) -> str:
    """In how many seeds GRPO changed nothing, "" where in none."""
    early = kept_before_grpo(one.results)
    seeds = len(one.results.get("chosen") or ())
    return f"{_called(one)}: what validation chose is from before GRPO in {early} of {seeds} seeds." if early else ""


def _by_dataset(section: Section, one: Found) -> list[Difference]:
    """The learned policy against static, data set by data set, where the experiment is about data sets."""
    if len(section.profiles) > 1 or one.decisions is None or one.decisions["dataset"].n_unique() < 2:
        return []
    datasets = sorted(one.decisions["dataset"].unique())
    return holm([found for name in datasets for found in _against_policies(one, [STATIC], name)])


# -- tables ------------------------------------------------------------------------------------------------------------


def _variants(own: Sequence[Found], compared: Mapping[str, Sequence[Difference]]) -> str:
    mean = all(one.results.get("sense") == "mean" for one in own)
    others = {c.against for many in compared.values() for c in many}
    words = others.pop() if len(others) == 1 else "what it is held against"
    head = ["profile", "variant", "accuracy [95 %]" if mean else "utility [95 %]", "gap closed [95 %]"]
    head += ["mean latency"] if mean else ["where possible"]
    head.append(f"points more than {words} [95 %]")
    rows = []
    for one in own:
        row = means_of(one.results)[LEARNED]
        mine = [c for c in compared[one.profile] if c.run == _called(one)]
        unit = one.results.get("unit", "ms")
        kept = number(row.get("latency_ms_mean"), ".2f", f" {unit}") if mean else _percent(row, "satisfaction_feasible")
        samples = (
            f" ({mine[0].samples} common samples)" if mine and mine[0].samples < one.results["test_samples"] else ""
        )
        gap = number(row.get("gap_closed"), ".0%") + _ends(row.get("gap_closed_ci95"), ".0%")
        cells = [PROFILES[one.profile].called, _called(one), _utility(row), gap, kept]
        rows.append([*cells, _points(mine[0]) + samples if mine else "–"])
    return table_of(head, rows)


def _simple_ways(one: Found) -> str:
    """Every policy of a run, and what the learned one has more."""
    more = {c.against: _points(c) for c in _against_policies(one, [row["policy"] for row in ranked(one.results)])}
    rows = []
    for row in ranked(one.results):
        gap = number(row.get("gap_closed"), ".0%") + _ends(row.get("gap_closed_ci95"), ".0%")
        name = policy_name(row["policy"])
        shown = f"**{name}**" if row["policy"] == LEARNED else name
        rows.append([shown, _utility(row), gap, _percent(row, "satisfaction_feasible"), more.get(name, "–")])
    head = [
        "policy",
        "utility [95 %]",
        "gap closed [95 %]",
        "where possible",
        "the learned one has more, points [95 %]",
    ]
    return table_of(head, rows)


def _utility(row: Mapping[str, Any]) -> str:
    return number(row.get("utility"), ".3f") + _ends(row.get("utility_ci95"), ".3f")


def _percent(row: Mapping[str, Any], key: str) -> str:
    return number(row.get(key), ".1%")


def _ends(ends: Sequence[float] | None, how: str) -> str:
    return f" [{ends[0]:z{how}}, {ends[1]:z{how}}]" if ends and all(map(known, ends)) and ends[0] < ends[1] else ""
