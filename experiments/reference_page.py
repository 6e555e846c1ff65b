"""docs/results.md: what every experiment found, in tables and sentences that follow from the numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import polars as pl
import torch
from torch import Tensor

from knobwise.agents.evaluation import mean_ci95
from knobwise.experiments.reference_selectors import introduction, question_of, selector_sections, table_of
from knobwise.experiments.verdict import LEARNED, ORACLE, STATIC, known, means_of, number, policy_name, ranked

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
    "warm_up_only": Section("Warm-up without GRPO", "lean"),
    "cold_start": Section("GRPO without warm-up", "lean"),
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
        "controller",
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


class Compared(NamedTuple):
    """What a policy has more than another, with a 95 % interval; in utility or accuracy."""

    name: str
    against: str
    difference: float
    low: float
    high: float
    samples: int

    @property
    def sign(self) -> int:
        """1 or −1 where the interval is above or below 0, else 0."""
        return int(self.low > 0) - int(self.high < 0)

    @property
    def points(self) -> str:
        """In hundredths."""
        return f"{100 * self.difference:+z.2f} [{100 * self.low:z.2f}, {100 * self.high:z.2f}]"


def page_of(found: Sequence[Found], seeds: Sequence[int], open_runs: int = 0) -> str:
    """The page.

    Args:
        found: what is finished.
        seeds: of the training.
        open_runs: how many are not.
    """
    answers, parts, compared = list[tuple[str, str, str]](), list[str](), list[Compared]()
    for name, section in CONTROLLERS.items():
        if own := [one for one in found if one.experiment == name]:
            lines, of_profiles = _section(name, section, own, found)
            parts += lines
            compared += [one for many in of_profiles.values() for one in many]
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
    shown = sum(one.sign != 0 for one in compared)
    return "\n\n".join([*_head(found, seeds, open_runs, len(compared), shown), _summary(answers), *parts]) + "\n"


def _head(found: Sequence[Found], seeds: Sequence[int], open_runs: int, compared: int, shown: int) -> list[str]:
    profiles = {one.profile: one.results["profile"] for one in found if one.profile in PROFILES}
    sizes = {name: f"{facts['samples']:,} samples × {facts['configurations']}" for name, facts in profiles.items()}
    words = {
        "builtin": "*built-in*: a small elastic vision-language model, really measured",
        "calibrated": "*calibrated*: three simulated data sets, calibrated to published numbers "
        "(`knobwise.envs.calibrated`), nothing of which was measured on a model",
    }
    listed = "; ".join(f"{words[name]} ({sizes[name]} configurations)" for name in PROFILES if name in sizes)
    head = [
        "# Reference results",
        "Made by `python experiments/reference.py`: every experiment of "
        f"`experiments/conf/experiment/`, {len(seeds)} training seeds ({', '.join(map(str, seeds))}), each held "
        "against what it changes. Sentences are made from the numbers: *better* and *worse* where the 95 % interval of "
        "the paired difference leaves out 0, otherwise *no difference shown*, which is not the same as none. "
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
            "budget, seed by seed, and in points, hundredths of utility. They are not corrected for their number: of "
            f"the {compared} on this page {0.05 * compared:.0f} would leave out 0 by chance alone if nothing mattered, "
            f"and {shown} do.",
        ]
    if open_runs:
        head.append(f"**Not complete: {open_runs} runs are not finished.**")
    return head


def _summary(answers: Sequence[tuple[str, str, str]]) -> str:
    rows = []
    for title, question, answer in answers:
        anchor = "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c in "-_")
        rows.append([f"[{title}](#{anchor})", question[: question.find("?") + 1], answer])
    return "## In short\n\n" + table_of(["section", "question", "answer"], rows)


def _section(
    name: str, section: Section, own: Sequence[Found], found: Sequence[Found]
) -> tuple[list[str], dict[str, list[Compared]]]:
    """The lines of an experiment, and for each profile what was compared."""
    swept = any(one.variant for one in own)
    words = PROFILES[section.profiles[0]].words[:1] if len(section.profiles) > 1 else []
    command = " ".join(["knobwise train", *["-m"] * swept, f"experiment={name}", *words])
    lines = [f"### {section.title}", f"*{question_of(name)}* `{command}`", *([section.note] if section.note else [])]
    compared = {profile: _compare(section, [o for o in own if o.profile == profile], found) for profile in PROFILES}
    findings = []
    for profile, many in compared.items():
        runs = [one for one in own if one.profile == profile]
        findings += [f"{PROFILES[profile].called}: {line}" for line in (_finding(many) if many else [])]
        findings += [f"{PROFILES[profile].called}: {line}" for one in runs for line in _by_dataset(section, one)]
    if section.every_simple_way:
        for one in own:
            lines += [f"On the {PROFILES[one.profile].called} profile:", _simple_ways(one)]
    else:
        lines.append(_variants(own, compared))
    if findings:
        lines.append("\n".join(f"- {line[0].upper()}{line[1:]}" for line in findings))
    return lines, {profile: many for profile, many in compared.items() if many}


# -- differences -------------------------------------------------------------------------------------------------------


def _compare(section: Section, own: Sequence[Found], found: Sequence[Found]) -> list[Compared]:
    """Every variant of an experiment, on one profile, against what it is held against."""
    if not own:
        return []
    if section.every_simple_way:
        return [
            compared
            for one in own
            for compared in _against_policies(one, [row["policy"] for row in ranked(one.results)])
        ]
    if section.against not in (OWN, *CONTROLLERS):
        return [compared for one in own for compared in _against_policies(one, [section.against])]
    if section.against == OWN:
        # before all are finished the one that the others are held against may not be there
        base = next((one for one in own if one.default), own[0])
    else:
        bases = [one for one in found if (one.experiment, one.profile) == (section.against, own[0].profile)]
        if not bases:
            return []
        base = bases[0]
    compared = []
    for one in own:
        if one is not base and (apart := paired(one.decisions, base.decisions)) is not None:
            compared.append(_of(_called(one), _called(base), apart))
    return compared


def _against_policies(one: Found, policies: Sequence[str]) -> list[Compared]:
    """The learned policy against others of the same run. Under mean budgets it is what they get at what it spent."""
    learned, compared = means_of(one.results)[LEARNED], []
    for policy in policies:
        if policy in (LEARNED, ORACLE):
            continue
        if one.results.get("sense") == "mean":
            samples, name = one.results["test_samples"], policy_name(policy)
            if (over := learned.get(f"over_{policy}")) is not None:
                low, high = learned[f"over_{policy}_ci95"]
                compared.append(Compared(_called(one), name, over, low, high, samples))
        elif (apart := paired(one.decisions, one.decisions, against=policy)) is not None:
            compared.append(_of(_called(one), policy_name(policy), apart))
    return compared


def paired(
    one: pl.DataFrame | None, other: pl.DataFrame | None, policy: str = LEARNED, against: str = LEARNED
) -> Tensor | None:
    """What `policy` of one run has more in utility than `against` of another: float64 [S, n], mean over budgets.

    On the samples that both were judged on, seed by seed (what no seed changes goes with every seed); None where they
    share no sample or no seed, or were not judged under the same budgets.
    """
    if one is None or other is None:
        return None
    first, second = one.filter(pl.col("policy") == policy), other.filter(pl.col("policy") == against)
    if set(first["budget_ms"]) != set(second["budget_ms"]):
        return None
    keys = ["dataset", "sample_id", "budget_ms", *(["seed"] if second["seed"].null_count() == 0 else [])]
    worth = pl.col("utility").cast(pl.Float64)
    both = first.select(*dict.fromkeys([*keys, "seed"]), own=worth).join(
        second.select(*keys, others=worth), on=keys, nulls_equal=True
    )
    of_samples = (
        both.group_by("dataset", "sample_id", "seed")
        .agg((pl.col("own") - pl.col("others")).mean())
        .sort("seed", "dataset", "sample_id")
    )
    if not len(of_samples):
        return None
    return torch.from_numpy(of_samples["own"].to_numpy().copy()).view(of_samples["seed"].n_unique(), -1)


def _of(name: str, against: str, apart: Tensor) -> Compared:
    low, high = mean_ci95(apart).tolist()
    return Compared(name, against, float(apart.mean()), low, high, apart.shape[1])


def _called(one: Found) -> str:
    return f"`{one.variant or one.experiment}`"


# -- sentences ---------------------------------------------------------------------------------------------------------


def _finding(compared: Sequence[Compared]) -> Iterator[str]:
    """Sentences on everything that was compared, by what it was held against."""
    if len({one.name for one in compared}) == 1 and len(compared) > 1:  # one policy against many
        yield f"{compared[0].name} is {_sorted_out([one._replace(name=one.against) for one in compared], 'than ')}."
        return
    for against in dict.fromkeys(one.against for one in compared):
        yield f"against {against}: {_sorted_out([one for one in compared if one.against == against])}."


def _sorted_out(compared: Sequence[Compared], than: str = "") -> str:
    parts = []
    for sign, word in ((1, f"better {than}"), (-1, f"worse {than}"), (0, "no difference shown: ")):
        some = [f"{one.name} ({one.points})" for one in compared if one.sign == sign]
        if some:
            parts.append((word if than or not sign else f"{word.strip()}: ") + ", ".join(some))
    return "; ".join(parts)


def _answer(compared: Sequence[Compared]) -> str:
    """In a line."""
    names = {one.name for one in compared}
    if len(names) == 1 and len(compared) > 1:
        best = min(compared, key=lambda one: one.difference)
        static = next((one for one in compared if one.against == policy_name(STATIC)), best)
        said = [f"{_word(one)} {one.against} by {one.points}" for one in dict.fromkeys((static, best))]
        return " and ".join(said) + (", the best of the simple ways here" if static is not best else "")
    parts = []
    for one in sorted(compared, key=lambda one: -one.difference):
        if one.sign:
            parts.append(f"{one.name} {one.points}")
    unclear = [one.name for one in compared if not one.sign]
    if unclear:
        parts.append("no difference shown" + (f" for {', '.join(unclear)}" if parts else ""))
    return ", ".join(parts) + f" (against {', '.join(dict.fromkeys(one.against for one in compared))})"


def _word(one: Compared) -> str:
    return {1: "better than", -1: "worse than", 0: "not shown to differ from"}[one.sign]


def _by_dataset(section: Section, one: Found) -> list[str]:
    """The learned policy against static, data set by data set, where the experiment is about data sets."""
    if len(section.profiles) > 1 or one.decisions is None or one.decisions["dataset"].n_unique() < 2:
        return []
    compared = []
    for dataset in sorted(one.decisions["dataset"].unique()):
        rows = one.decisions.filter(pl.col("dataset") == dataset)
        if (apart := paired(rows, rows, against=STATIC)) is not None:
            compared.append(_of(dataset, policy_name(STATIC), apart))
    return [f"{_called(one)} against budget-aware static, by data set: {_sorted_out(compared)}."] if compared else []


# -- tables ------------------------------------------------------------------------------------------------------------


def _variants(own: Sequence[Found], compared: Mapping[str, Sequence[Compared]]) -> str:
    mean = all(one.results.get("sense") == "mean" for one in own)
    others = {c.against for many in compared.values() for c in many}
    words = others.pop() if len(others) == 1 else "what it is held against"
    head = ["profile", "variant", "accuracy [95 %]" if mean else "utility [95 %]", "gap closed [95 %]"]
    head += ["mean latency"] if mean else ["where possible"]
    head.append(f"points more than {words} [95 %]")
    rows = []
    for one in own:
        row = means_of(one.results)[LEARNED]
        mine = [c for c in compared[one.profile] if c.name == _called(one)]
        unit = one.results.get("unit", "ms")
        kept = number(row.get("latency_ms_mean"), ".2f", f" {unit}") if mean else _percent(row, "satisfaction_feasible")
        samples = (
            f" ({mine[0].samples} common samples)" if mine and mine[0].samples < one.results["test_samples"] else ""
        )
        gap = number(row.get("gap_closed"), ".0%") + _ends(row.get("gap_closed_ci95"), ".0%")
        cells = [PROFILES[one.profile].called, _called(one), _utility(row), gap, kept]
        rows.append([*cells, mine[0].points + samples if mine else "–"])
    return table_of(head, rows)


def _simple_ways(one: Found) -> str:
    """Every policy of a run, and what the learned one has more."""
    more = {c.against: c.points for c in _against_policies(one, [row["policy"] for row in ranked(one.results)])}
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
