"""Writes the tables of docs/results.md, and its chart, from the numbers in docs/results.json.

    python docs/results.py

`collect.py` collects these numbers from the runs of both studies.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from knobwise.experiments.evidence.statistics import CHANCE, corrected

KEPT = Path(__file__).with_name("results.json")
PAGE = KEPT.with_suffix(".md")
CHART = KEPT.with_suffix(".svg")
BEGIN = "<!-- tables of results.json -->\n"
END = "<!-- end of tables -->\n"

PROFILES = {
    "builtin": "built-in",
    "ocr": "RapidOCR",
    "smollm": "SmolLM2",
    "calibrated": "calibrated",
    "python_files": "Python files",
    "digits": "digits",
    "breast_cancer": "breast cancer",
    "diabetes": "diabetes",
}
POLICIES = {
    "controller": "**controller**",
    "teacher": "teacher",
    "gradient_boosting": "gradient boosting",
    "random_forest": "random forest",
    "kernel_ridge": "kernel ridge",
    "gaussian_process": "Gaussian process",
    "ridge": "ridge",
    "knn": "nearest neighbours",
    "latency_only": "latency only",
    "budget_aware_static": "budget-aware static",
    "static_per_dataset": "static per data set",
    "best_static": "best static",
    "lookup_table": "lookup table",
    "random": "random",
    "oracle": "oracle",
}
ABLATIONS = {
    "lean": ("a teacher without base learners", "`lean` − `controller`"),
    "warm_up_only": ("… and no GRPO after it", "`warm_up_only` − `lean`"),
    "heads": (
        "heads that learn from reward alone",
        "`heads policy=independent` − `policy=utility`",
    ),
    "objective": (
        "… by 16 draws, not by every configuration",
        "`objective loss=sampled` − `exact`",
    ),
    "rce_only": ("… by RCE without GRPO", "`rce_only` − `objective`"),
    "cold_start": ("… by GRPO without RCE", "`cold_start` − `objective`"),
    "ppo": ("… by PPO with a value network", "`ppo loss=ppo` − `sampled`"),
    "seeds": ("the original system's settings", "`seeds` − `lean`"),
    "seeds_small": ("… with 500 K parameters", "`seeds_small` − `seeds`"),
}
"""Section of the study → what it changes, and what is compared."""
SELECTORS = {
    "selector": "What post-training gains",
    "selector_language": "SmolLM2",
    "selector_reward_model": "A learned reward",
    "selector_careful": "Careful annotators alone",
    "selector_groups": "Which sequences form a group",
    "selector_rewards": "Reward modes (plan 1)",
    "selector_advantages": "Advantages (plan 2)",
    "selector_weights": "Weights of the reward (plan 3)",
    "selector_warm_up": "RCE before GRPO",
    "selector_kl": "The KL to the SFT policy",
    "selector_curriculum": "The best sequences first",
    "selector_seeds": "The original selector",
}
TASKS = {
    "selector": "built-in",
    "selector_careful": "built-in, careful annotators alone",
    "selector_language": "SmolLM2",
}
"""Experiments that compare ways of choosing, each with its own answers."""
Numbers = dict[str, Any]


# -- the page --------------------------------------------------------------------------------------


class Difference(NamedTuple):
    """A difference that the chart shows."""

    section: str
    label: str
    kind: str
    """A key of `KINDS`."""
    shown: bool
    """Whether it is better or worse by more than chance."""
    points: list[float]
    """The difference and its interval."""


def text_of(points: list[float] | None) -> str:
    """Write a difference with its interval, in points."""
    if points is None:
        return "–"
    middle, low, high = (f"{round(value, 1) + 0.0:.1f}".replace("-", "−") for value in points)
    sign = "+" * (round(points[0], 1) > 0)
    return f"{sign}{middle} [{low}, {high}]"


def emphasised(points: list[float] | None, shown: bool) -> str:
    """Write a difference, in bold where it is shown."""
    return f"**{text_of(points)}**" if shown else text_of(points)


def excludes_0(points: list[float] | None) -> bool:
    return points is not None and (points[1] > 0 or points[2] < 0)


def p_of_interval(points: list[float]) -> float:
    """Return the two-sided p of a difference from its 95 % interval, as if it were normal, for rows
    that were collected without their p."""
    middle, low, high = points
    normal = NormalDist()
    error = (high - low) / (2 * normal.inv_cdf(0.975))
    if not error:
        return float(middle == 0)
    return 2 * normal.cdf(-abs(middle) / error)


def significant(rows: list[Numbers]) -> list[bool]:
    """Return which of these differences are shown to be better or worse, corrected for the number
    of all (Holm)."""
    p = [row["p"] if "p" in row else p_of_interval(row["points"]) for row in rows]
    return [
        value < CHANCE and excludes_0(row["points"])
        for row, value in zip(rows, corrected(p), strict=True)
    ]


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [f"| {' | '.join(line)} |" for line in [header, *rows]]
    lines.insert(1, "|---" * len(header) + "|")
    return "\n".join(lines) + "\n"


def tables(numbers: Numbers) -> str:
    """Return the part of the page that holds tables."""
    parts = [
        ("The controller", controllers_table(numbers["controllers"])),
        ("What GRPO adds to the policy", grpo_table(numbers["controllers"])),
        ("Every policy", policies_table(numbers["controllers"])),
        ("What each part of the training adds", ablations_table(numbers["ablations"])),
        ("Mean budgets, and data sets never seen", others_table(numbers)),
        ("Choosing demonstrations", choices_table(numbers["selectors"])),
        ("At one to four shots", shots_table(numbers["shots"])),
        ("What changes a selector", selectors_table(numbers["selectors"])),
    ]
    texts = []
    for title, body in parts:
        texts.append(f"## {title}\n\n{ABOUT[title]}\n\n{body}")
    texts.append(commits_of(numbers))
    return "\n".join(texts)


def commits_of(numbers: Numbers) -> str:
    """Return a paragraph that says of which commits the runs are, those of most runs last."""
    runs = [
        (row["commit"], f"the controller of {PROFILES[name]}")
        for name, row in numbers["controllers"].items()
    ]
    for row in numbers["ablations"]:
        runs.append((row["commit"], f"`{row['section']}` ({PROFILES[row['profile']]})"))
    for profile, row in numbers["means"].items():
        runs.append((row["commit"], f"`mean_budget` ({PROFILES[profile]})"))
    for row in numbers["unseen"]:
        runs.append((row["commit"], f"`split.leave_out={row['left_out']}`"))
    runs += [(row["commit"], f"`{name}`") for name, row in numbers["selectors"].items()]
    for name, row in numbers["shots"].items():
        runs.append((row["commit"], f"`{name}` at one to four shots"))
    names: dict[str, list[str]] = {}
    for commit, name in runs:
        names.setdefault(commit, []).append(name)
    ordered = sorted(names, key=lambda commit: len(names[commit]))
    parts = [f"Of commit {commit}: {', '.join(names[commit])}." for commit in ordered[:-1]]
    return " ".join([*parts, f"All {'other ' * bool(parts)}runs: {ordered[-1]}."]) + "\n"


ABOUT = {
    "The controller": "`knobwise train experiment=controller profile=…`, five seeds: points of "
    "utility, a mean over five budgets, in bold where the interval excludes 0. Only the controller "
    "is charged for its decisions. *Predictable* is the [predictable "
    "gain](profiles.md#predictable-gain). The best of the seven simple predictors is chosen on "
    "these test samples, which is in its favour; profiles that were split three times are not "
    "tested against it.",
    "What GRPO adds to the policy": "Change in utility, in points, on the held-out samples that "
    "choose the iteration, at the last evaluation of GRPO, and its iterations until then (a mean "
    "over seeds); then the deployed policy minus the one before GRPO, which is kept where GRPO "
    "does not improve it.",
    "Every policy": "Utility × 100.",
    "What each part of the training adds": "Points of utility, five seeds, in bold where "
    "significant after Holm's correction for all differences of this table, by the p of a normal "
    "distribution with the same interval where none was collected.",
    "Mean budgets, and data sets never seen": "`experiment=mean_budget`: points of accuracy over "
    "the best random mix of static configurations. `-m experiment=leave_one_out`, which evaluates "
    "on the data set that training left out: points of utility over budget-aware static. What GRPO "
    "adds is on the held-out samples that chose the checkpoint: optimistic, and so never bold.",
    "Choosing demonstrations": "The share of right answers with two demonstrations, on test "
    "queries; three seeds. "
    "[Metrics](metrics.md#results) explains the policies.",
    "At one to four shots": "The share of right answers with the nearest and with random "
    "demonstrations, then differences in points: what each stage of training gains over the one "
    "before it, and GRPO over both. All train with two shots.",
    "What changes a selector": "Points with two demonstrations, in bold where the interval "
    "excludes 0. A reference has its share of right answers, too. SmolLM2 is another run than "
    "above, with live draws.",
}


def controllers_table(controllers: Numbers) -> str:
    """Return what the controller gains on each profile."""
    header = ["profile", "over static", "gap closed", "predictable"]
    header += ["over the best simple predictor"]
    rows = []
    for name, numbers in controllers.items():
        closed = numbers["gap_closed"]
        best = numbers.get("over_best")
        versus = POLICIES[numbers["best"]]
        if best is not None:
            versus = f"{emphasised(best, excludes_0(best))}, {versus}"
        gain = numbers["over_static"]
        row = [PROFILES[name], emphasised(gain, excludes_0(gain))]
        row += [f"{closed[0]:.0f} %".replace("-", "−")]
        row += [text_of(numbers.get("attainable")), versus]
        rows.append(row)
    return table(header, rows)


def grpo_table(controllers: Numbers) -> str:
    """Return what GRPO changes at its last evaluation, and in the deployed policy."""
    rows = []
    for name, numbers in controllers.items():
        if "grpo_last" in numbers:
            change, iterations = numbers["grpo_last"]
            shown = f"{change + 0.0:+.2f}".replace("-", "−")
            rows.append([PROFILES[name], str(iterations), shown, text_of(numbers["grpo"])])
    header = ["profile", "iterations", "at the last evaluation", "deployed, on test samples"]
    return table(header, rows)


def policies_table(controllers: Numbers) -> str:
    """Return the utility of every policy that all profiles have."""
    rows = []
    for policy, words in POLICIES.items():
        values = [numbers["utility"].get(policy) for numbers in controllers.values()]
        if None not in values:
            rows.append([words, *(f"{100 * value:.1f}" for value in values)])
    free = [f"{100 * numbers['free']:.1f}" for numbers in controllers.values()]
    rows.insert(1, ["controller, without overhead", *free])
    return table(["policy", *(PROFILES[name] for name in controllers)], rows)


def ablations_table(ablations: list[Numbers]) -> str:
    """Return the differences between experiments on two profiles."""
    # section → profile → cell
    cells: dict[str, dict[str, str]] = {}
    for row, shown in zip(ablations, significant(ablations), strict=True):
        cells.setdefault(row["section"], {})[row["profile"]] = emphasised(row["points"], shown)
    rows = []
    for section, by_profile in cells.items():
        row = list(ABLATIONS[section])
        rows.append(row + [by_profile.get(name, "–") for name in ("builtin", "calibrated")])
    return table(["what", "difference", "built-in", "calibrated"], rows)


def others_table(numbers: Numbers) -> str:
    """Return the gains under mean budgets and on unseen data sets."""
    rows = []
    for profile, mean in numbers["means"].items():
        points = mean["points"]
        cell = emphasised(points, excludes_0(points))
        rows.append(
            [f"`mean_budget`, {PROFILES[profile]}", cell, text_of(mean.get("grpo_held_out"))]
        )
    for row in numbers["unseen"]:
        cell = emphasised(row["points"], excludes_0(row["points"]))
        name = f"`split.leave_out={row['left_out']}`, calibrated"
        rows.append([name, cell, text_of(row.get("grpo_held_out"))])
    return table(["experiment", "gain", "GRPO, held out"], rows)


def choices_table(selectors: Numbers) -> str:
    """Return the accuracy of every way of choosing two demonstrations, for each task."""
    policies = dict.fromkeys(name for task in TASKS for name in selectors[task]["accuracy"])
    rows = []
    for policy in policies:
        row = [f"`{policy}`"]
        for task in TASKS:
            accuracy = selectors[task]["accuracy"].get(policy, {})
            row.append(f"{accuracy['2']:.3f}" if "2" in accuracy else "–")
        rows.append(row)
    return table(["policy", *TASKS.values()], rows)


def shots_table(shots: Numbers) -> str:
    """Return what each stage of a selector gains, with a column for each number of shots."""
    rows = []
    for experiment, numbers in shots.items():
        task = TASKS[experiment]
        for policy, shares in numbers["share"].items():
            rows.append([task, f"`{policy}`", *(f"{share:.3f}" for share in shares)])
        for pair, gains in numbers["gains"].items():
            policy, against = pair.split(" − ")
            cells = [emphasised(points, excludes_0(points)) for points in gains]
            rows.append([task, f"`{policy}` − `{against}`", *cells])
    columns = next(iter(shots.values()))["shots"]
    names = [f"{count} shot{'s' * (count > 1)}" for count in columns]
    return table(["task", "policy", *names], rows)


def selectors_table(selectors: Numbers) -> str:
    """Return what every learned policy gains, with a row for each experiment."""
    rows = []
    shared = set[str]()
    for experiment, numbers in selectors.items():
        reference = numbers["first"] or "rce"
        share = numbers["accuracy"][reference]["2"]
        start = f"`{reference}` {share:.3f}, {gain_of(numbers, reference, reference)}"
        gains = []
        for policy, accuracy in numbers["accuracy"].items():
            gain = gain_of(numbers, policy, reference)
            # SFT and RCE stand in the first experiment with them
            seen = f"{policy} {accuracy}"
            if gain and policy != reference and seen not in shared:
                gains.append(f"`{policy}` {gain}")
            shared.add(seen)
        # a line for each policy
        title = f"{SELECTORS[experiment]} (`{experiment}`)"
        rows.append([title, start, "<br>".join(gains)])
    return table(["experiment", "reference", "difference from it"], rows)


def gain_of(numbers: Numbers, policy: str, reference: str) -> str:
    """Return what a policy gains: a variant over the first one, other learned policies over what
    they start from, which is named where it is not the reference of the experiment."""
    against = against_of(numbers, policy)
    for row in numbers["gains"]:
        if (row["policy"], row["against"]) == (policy, against):
            cell = emphasised(row["points"], excludes_0(row["points"]))
            return cell if against == reference else f"{cell} over `{against}`"
    return ""


def against_of(numbers: Numbers, policy: str) -> str:
    """Return what a policy is compared with on the page; "" for nothing."""
    pairs = [row["against"] for row in numbers["gains"] if row["policy"] == policy]
    for against in (numbers["first"], "rce", "sft", "question_similarity"):
        if against in pairs:
            return against
    return ""


# -- the chart -------------------------------------------------------------------------------------

KINDS = {"builtin": "built-in", "ocr": "RapidOCR", "calibrated": "calibrated"}
KINDS |= {"small": "other profiles", "beams": "demonstrations"}


def differences(numbers: Numbers) -> list[Difference]:
    """Return what the chart shows, in the order of the page."""
    shown = []
    title = "controller − budget-aware static"
    for profile, row in numbers["controllers"].items():
        kind = profile if profile in KINDS else "small"
        points = row["over_static"]
        label = PROFILES[profile]
        shown.append(Difference(title, label, kind, excludes_0(points), points))
    title = "What each part adds"
    ablations = numbers["ablations"]
    for row, clear in zip(ablations, significant(ablations), strict=True):
        label = ABLATIONS[row["section"]][1].replace("`", "")
        shown.append(Difference(title, label, row["profile"], clear, row["points"]))
    title = "Mean budgets, and data sets never seen"
    for profile, mean in numbers["means"].items():
        points = mean["points"]
        clear = excludes_0(points)
        shown.append(Difference(title, "mean_budget − static mix", profile, clear, points))
    for row in numbers["unseen"]:
        label = f"{row['left_out']}, never seen − budget-aware static"
        clear = excludes_0(row["points"])
        shown.append(Difference(title, label, "calibrated", clear, row["points"]))
    title = "Choosing demonstrations"
    for experiment, selector in numbers["selectors"].items():
        for policy in selector["accuracy"]:
            against = against_of(selector, policy)
            for row in selector["gains"]:
                if (row["policy"], row["against"]) == (policy, against):
                    label = f"{policy} − {against}".replace("_", " ")
                    clear = excludes_0(row["points"])
                    part = f"{title}. {SELECTORS[experiment]}"
                    # what several experiments share stands in the first of them
                    if not any((d.label, d.points) == (label, row["points"]) for d in shown):
                        shown.append(Difference(part, label, "beams", clear, row["points"]))
    return shown


WIDTH, LABELS, ROW, MARGIN, TOP = 860, 340, 14, 20, 74
TICKS = (-30, -10, -3, -1, 0, 1, 3, 10, 30)
STYLE = """
text { font: 11px system-ui, sans-serif; fill: #333 } .title { font-weight: 600; fill: #111 }
.back { fill: #fff } .grid { stroke: #e3e3e3 } .zero { stroke: #888 }
.a { stroke: #1f64ad; --c: #1f64ad } .b { stroke: #c05215; --c: #c05215 }
.c { stroke: #2b7a3d; --c: #2b7a3d }
.d { stroke: #7a3d9e; --c: #7a3d9e } .e { stroke: #8a6d00; --c: #8a6d00 }
.open { fill: #fff } .full { fill: var(--c) } .line { stroke-width: 1.5 }
@media (prefers-color-scheme: dark) {
  text { fill: #ccc } .title { fill: #fff } .back, .open { fill: #1e2129 }
  .grid { stroke: #363a45 } .zero { stroke: #999 }
  .a { stroke: #7db8f5; --c: #7db8f5 } .b { stroke: #f3a26d; --c: #f3a26d }
  .c { stroke: #7fcf92; --c: #7fcf92 }
  .d { stroke: #c79be8; --c: #c79be8 } .e { stroke: #d9c36a; --c: #d9c36a }
}
"""


def across(points: float) -> float:
    """The place on the axis, which is linear near 0 and logarithmic far from it."""
    half = (WIDTH - LABELS - MARGIN) / 2
    return LABELS + half * (1 + math.asinh(points) / math.asinh(45))


def drawing(every: list[Difference]) -> str:
    """The plot as SVG, with colours for light and dark pages."""
    rows: dict[tuple[str, str], list[Difference]] = {}
    for each in every:
        rows.setdefault((each.section, each.label), []).append(each)
    parts, y, section = list[str](), TOP, ""
    for (title, label), shared in rows.items():
        if title != section:
            y, section = y + ROW + 6, title
            parts.append(f'<text class="title" x="8" y="{y}">{escape(title)}</text>')
        y += ROW
        parts.append(f'<text x="18" y="{y}">{escape(label)}</text>')
        parts += [
            marker(each, y - 4 + 4 * index - 2 * (len(shared) - 1))
            for index, each in enumerate(shared)
        ]
    height = y + 34
    for tick in TICKS:
        x, line = across(tick), "grid" if tick else "zero"
        parts.insert(
            0, f'<line class="{line}" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{height - 26}"/>'
        )
        number = f"{tick:+d}".replace("-", "−") if tick else "0"
        parts += [
            f'<text x="{x:.1f}" y="{at}" text-anchor="middle">{number}</text>'
            for at in (TOP - 6, height - 12)
        ]
    for index, words in enumerate(KINDS.values()):
        x = 18 + 130 * index
        parts.append(
            f'<circle class="{"adbec"[index]} full" cx="{x}" cy="40" r="3.5"/><text x="{x + 8}" '
            f'y="44">{words}</text>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" '
        'role="img"><title>Differences in points, with 95 % '
        f"intervals</title><style>{STYLE}</style>"
        f'<rect class="back" width="{WIDTH}" height="{height}"/>'
        '<text class="title" x="8" y="20">Differences in points, with 95 % intervals; filled: '
        "in bold in the tables, open: not shown</text>" + "\n".join(parts) + "</svg>\n"
    )


def marker(each: Difference, y: float) -> str:
    """A dot with its interval."""
    (x, low, high), kind = (
        (across(number) for number in each.points),
        "adbec"[list(KINDS).index(each.kind)],
    )
    return (
        f'<line class="line {kind}" x1="{low:.1f}" x2="{high:.1f}" y1="{y}" y2="{y}"/>'
        f'<circle class="{kind} {"full" if each.shown else "open"}" cx="{x:.1f}" cy="{y}" r="3"/>'
    )


def write(numbers: Numbers) -> None:
    """Write the tables into the page, and the chart."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{tables(numbers)}\n{END}{after}", encoding="utf-8")
    CHART.write_text(drawing(differences(numbers)), encoding="utf-8")


if __name__ == "__main__":
    write(json.loads(KEPT.read_text(encoding="utf-8")))
    print(f"written: {PAGE}, {CHART}")
