"""Say in sentences what a run shows, the answer first."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from knobwise.experiments.evidence.results import (
    baselines,
    differences_at,
    guard_by_budget,
    kept_before_grpo,
    known,
    ranked,
    rows_at,
    unit_of,
    value_of,
)
from knobwise.experiments.evidence.schema import Attainable, DifferenceRow, PolicyRow, RunResults
from knobwise.experiments.evidence.task import DEMONSTRATIONS, GRPO, Row, shown_at, task_of
from knobwise.experiments.wording.words import (
    COMPARED,
    LEARNED,
    ORACLE,
    condition_words,
    difference_words,
    in_seeds,
    listed,
    number,
    points,
    policy_name,
    quantity,
    reward_words,
    said_of,
    shots_words,
    sign_of,
    span,
    with_score,
)

if TYPE_CHECKING:
    from knobwise.agents.calibration.guard import GuardRow


def verdict(results: RunResults) -> list[str]:
    """Say what the run shows, the most important first."""
    return [said_of(results, line) for line in _verdict(results)]


def _verdict(results: RunResults) -> list[str]:
    """Return the lines of `verdict`, as they are said of times."""
    task = task_of(results)
    if task.name == DEMONSTRATIONS.name:
        return _of_selectors(results)
    # a run may judge baselines alone
    learned = rows_at(results, None).get(LEARNED)
    if learned is None:
        line = "No learned policy was judged."
        for row in [row for row in ranked(results) if row["policy"] != ORACLE][:1]:
            line += f" The best is {with_score(row, task.ranked_by)}."
        return [line]
    lines = [_answer(results, learned), *_on_estimates(results, learned), *_on_sample(results)]
    if task.equal_latency:
        lines += [_at_tight_budgets(results), *_on_spending(results)]
    if estimate := results.get("attainable"):
        share = ""
        if known(learned.get("attained")):
            share = f"; the controller gained {number(learned['attained'], '.0%')} of that"
        lines.append(f"{learnable(estimate)}{share}.")
    lines += [*_on_rivals(results, learned), *_on_time(results, learned)]
    return [*lines, *on_training(results), *_on_guard(results)]


# -- controllers -----------------------------------------------------------------------------------


OVER_STATIC = {
    1: "The controller beats",
    -1: "The controller is worse than",
    0: "No measurable gain over",
}
"""`sign_of` the controller's gain over static → how the answer begins."""


def _on_estimates(results: RunResults, learned: Row) -> list[str]:
    """Say how much was measured of what the controller chooses, where that is not all."""
    cells = learned.get("effective_cells")
    if not known(cells) or cells > 0.99 * results["test_samples"]:
        return []
    line = (
        "Not every choice was measured, so these scores are estimates: as sure as "
        f"{number(cells, '.0f')} measured samples at a budget, of {results['test_samples']:,}."
    )
    if cells < results["test_samples"] / 2:
        line += " knobwise profile complete=RUN measures what the controller chooses."
    return [line]


SAMPLED = {"test": "policies are judged on", "experts": "experts are fitted on"}
"""What only a sample of a large profile is used for."""


def _on_sample(results: RunResults) -> list[str]:
    """Say for what only a sample of a large profile was used."""
    parts = []
    for name, (used, total) in results.get("sampled", {}).items():
        parts.append(f"{SAMPLED[name]} {used:,} of {total:,} samples")
    return [f"The profile is large: {', '.join(parts)}."] * bool(parts)


def _answer(results: RunResults, learned: Row) -> str:
    """Say whether the controller is better than the reference, by how much, and how sure that
    is."""
    task = task_of(results)
    low = rows_at(results, None).get(task.low, {})
    value = value_of(learned, task.score)
    against = value_of(low, task.score)
    gain = learned.get(task.compared[0], value - against)
    ci95 = learned.get(f"{task.compared[0]}_ci95")
    sign = sign_of(ci95 or learned.get("gap_closed_ci95"))
    scores = f"{task.score} {number(value, '.3f')} against {number(against, '.3f')}"
    if task.equal_latency:
        # what the two policies spend on average is not the same
        scores = f"{task.score} at equal mean latency"
    if known(learned.get("gap_closed")):
        scores += f"; {number(learned['gap_closed'], '.0%')} of the oracle gap closed"
    line = f"{OVER_STATIC[sign]} {_static(results)}: {points(gain)} points{span(ci95)} ({scores})."
    # an interval without width says that there is no difference at all
    wide = ci95 is None or ci95[0] < ci95[1]
    if not sign and wide and known(results.get("test_samples")):
        line += f" {results['test_samples']:,} test samples cannot resolve a difference this small."
    return line


def _static(results: RunResults) -> str:
    """Name what the controller is compared with, and falls back to, for a sentence."""
    task = task_of(results)
    return f"{'the ' * task.equal_latency}{policy_name(task.low)}"


def _at_tight_budgets(results: RunResults) -> str:
    """Say what is gained over the best single configuration where time is short."""
    task = task_of(results)
    rows = [task.row(results, LEARNED, budget) for budget in task.conditions(results)[:2]]
    gains = listed([points(row["over_best_single"]) for row in rows])
    latencies = listed([quantity(row["latency_ms_mean"], unit_of(results)) for row in rows])
    return (
        f"At the tightest mean budgets it gains {gains} points over the best single configuration "
        f"of equal mean latency ({latencies})."
    )


def _on_spending(results: RunResults) -> list[str]:
    """Say at which mean budgets the controller spent more, by more than chance."""
    task = task_of(results)
    unit = unit_of(results)
    above = []
    for budget in task.conditions(results):
        row = task.row(results, LEARNED, budget)
        ci95 = row.get("latency_ms_mean_ci95")
        if ci95 and ci95[0] > budget:
            spent = f"{quantity(row['latency_ms_mean'], unit)}{span(ci95, '.3g')}"
            above.append(f"{spent} at {quantity(budget, unit)}")
    if not above:
        return []
    return [f"On the test samples it spends more than its mean budget: {listed(above)}."]


def learnable(estimate: Attainable) -> str:
    """Say what looks predictable from the features, `attainable` in results; without a full
    stop."""
    gained = f"{points(estimate['gain'])} points{span(estimate['gain_ci95'])}"
    if sign_of(estimate["gain_ci95"]) > 0:
        return f"About {gained} look predictable from your features"
    return f"The gain predictable from your features may be zero: estimate {gained}"


def _on_rivals(results: RunResults, learned: Row) -> list[str]:
    """Say how many baselines have a higher score than the controller, and which is the best."""
    score = task_of(results).ranked_by
    means = rows_at(results, None)
    rivals = [means[name] for name in baselines(results)]
    if not rivals:
        return []
    # higher by more than the last digit that is printed: a tie is not better
    gaps = [value_of(row, score) - value_of(learned, score) for row in rivals]
    better = sum(round(gap, 3) > 0 for gap in gaps)
    return [
        f"{better or 'None'} of {len(rivals)} other baselines "
        f"score{'s' * (better < 2)} higher; best: {with_score(rivals[0], score)}."
    ]


def _on_time(results: RunResults, learned: Row) -> list[str]:
    """Say how often the controller is on time, and whether that is what was asked for."""
    if not known(learned.get("satisfaction_feasible")):
        return []
    share = number(learned["satisfaction_feasible"], ".1%")
    line = f"On time: {share} of feasible requests"
    level = results.get("satisfaction_level")
    if level is not None:
        # as printed: 95.0 % is not below 95 %
        meets = "meeting" if float(share.rstrip("%")) >= 100 * level - 1e-9 else "below"
        line += f", {meets} the {number(level, '.0%')} target (policy.level)"
    infeasible = number(learned.get("infeasible"), ".1%")
    return [f"{line}. No configuration is on time for {infeasible} of all requests."]


def promise(seeds: Sequence[GuardRow]) -> str:
    """Say whether the share on time is guaranteed at a budget, or in how many seeds why not."""
    missed = Counter(row["missed"] for row in seeds if row["missed"])
    reasons = [why + in_seeds(count, len(seeds)) for why, count in missed.items()]
    return "; ".join(reasons) or "kept"


def _on_guard(results: RunResults) -> list[str]:
    """Say where the guard fell back, and where it does not guarantee a share on time; of budgets
    that were not judged, nothing."""
    judged = task_of(results).conditions(results)
    by_budget = [
        seeds
        for seeds in guard_by_budget(results)
        if any(math.isclose(seeds[0]["budget_ms"], budget, rel_tol=1e-4) for budget in judged)
    ]
    cases = list(itertools.chain(*by_budget))
    lines = []
    if fell_back := sum(not row["deployed"] for row in cases):
        pairs = "seed–budget pairs" if len(results["guard"]) > 1 else "budgets"
        otherwise = "no price met the budget" if task_of(results).equal_latency else LATE
        lines.append(
            f"The guard deploys {_static(results)} for {fell_back:,} of {len(cases):,} {pairs}: "
            f"there the policy showed no clear held-out gain, or {otherwise}."
        )
    # budgets with the same reason stand together
    missed: dict[str, list[str]] = {}
    for seeds in by_budget:
        if "level" in seeds[0] and promise(seeds) != "kept":
            budget = quantity(seeds[0]["budget_ms"], unit_of(results))
            missed.setdefault(promise(seeds), []).append(budget)
    if missed:
        parts = [f"{listed(budgets)} ({why})" for why, budgets in missed.items()]
        level = number(by_budget[0][0]["level"], ".0%")
        lines.append(
            f"The {level} on-time target (policy.level) is not guaranteed at "
            f"{', nor at '.join(parts)}."
        )
    return lines


LATE = "was late too often"
CHANGED = {1: "raised {}", -1: "lowered {}", 0: "made no measurable difference in {}"}
"""`sign_of` a gain in `results["grpo_gain"]` → what it shows of a score."""
GAINED_ON = {"test": "on test samples", "held_out": "on held-out training samples"}
"""Key of a gain in `results["grpo_gain"]` → the samples that it was measured on, in words."""

GAIN_WORDS = {"utility": difference_words, "reward": reward_words}
"""What training was to raise → a difference of it in words."""


def on_training(results: RunResults) -> list[str]:
    """Say what GRPO or PPO added to the deployed policy, as far as it is known, on the same
    samples; where training stopped early; and whether the weights from before it are kept."""
    training = results.get("training") or {}
    method = training.get("method", "GRPO")
    gain: Row = results.get("grpo_gain") or {}
    gains: dict[str, DifferenceRow] = {}
    for key, samples in GAINED_ON.items():
        if key in gain:
            gains[samples] = {"difference": gain[key], "ci95": gain[f"{key}_ci95"]}
    lines = []
    if gains:
        score = task_of(results).judged_by
        # the test samples, if they are known, decide what it shows
        changed = CHANGED[sign_of(next(iter(gains.values()))["ci95"])].format(score)
        parts = [f"{GAIN_WORDS[score](row)} {samples}" for samples, row in gains.items()]
        lines.append(f"{method} {changed}: {', '.join(parts)}.")
    total = training.get("warmup_iterations", 0) + training.get("iterations", 0)
    ended = training.get("ended_at", [])
    stopped = [f"{iteration:,}" for iteration in ended if iteration < total]
    if stopped:
        lines.append(
            f"Training stopped early{in_seeds(len(stopped), len(ended))}, at iteration "
            f"{listed(stopped)} of {total:,}: no better validation score for "
            f"{training['patience']:,} iterations (optimiser.patience)."
        )
    if early := kept_before_grpo(results):
        seeds = in_seeds(early, len(results.get("chosen") or ()))
        lines.append(
            f"{method} never beat its starting point on validation{seeds}: the pre-{method} "
            "checkpoint is kept."
        )
    return lines


# -- selectors -------------------------------------------------------------------------------------

JUDGED_BY = {
    "recorded": "No scorer: each policy is scored on the recorded sequence it ranks highest, and "
    "some of those were found with the answer in view. Use these numbers to rank policies, not as "
    "absolute accuracies.",
    "best_beam": "No scorer and no right answers, so these numbers say nothing about answers: use "
    "them to rank policies.",
}
"""How policies were judged, if not by a scorer → a warning."""
FEW_QUERIES = 100
"""With fewer test queries an interval is 20 points wide or more."""


def _of_selectors(results: RunResults) -> list[str]:
    """Say what the policy answers, what it gains over others, and whether controls gain nothing."""
    shots = shown_at(results)
    policy = DEMONSTRATIONS.main_policy(results)
    rows = rows_at(results, shots)
    limits = list(filter(None, [JUDGED_BY.get(results.get("judged_by", ""))]))
    simple = [with_score(rows[name], "accuracy") for name in baselines(results)[:1]]
    if policy not in rows:
        best = "".join(f" The best simple baseline is {name}." for name in simple)
        return [f"No learned policy was judged.{best}", *limits]
    # (policy, against) → the paired difference
    at = differences_at(results, shots)
    gaps = [at[policy, other] for other in baselines(results) if (policy, other) in at]
    gained = ""
    if gaps:
        gained = f", {difference_words(gaps[0])} over the best simple baseline, {simple[0]}"
    lines = [_answered(results, rows[policy], shots) + f"{gained}.", *limits]
    if gaps:
        signs = [sign_of(gap["ci95"]) for gap in gaps]
        lines.append(
            f"Of {len(gaps)} simple baselines it is better than {signs.count(1)} and worse than "
            f"{signs.count(-1)}."
        )
    # each stage against those before it, controls too
    stages = {policy, *DEMONSTRATIONS.trained, *DEMONSTRATIONS.controls}
    for (name, other), gap in at.items():
        if name in stages and other in ("sft", "rce", "hidden_sft", "hidden_rce"):
            control = " (negative control: should gain nothing)" * (name in DEMONSTRATIONS.controls)
            names = policy_name(name, results), policy_name(other, results)
            outcome = COMPARED[sign_of(gap["ci95"])].format(*names)
            lines.append(f"{outcome}: {difference_words(gap)}{control}.")
            kept = 0 in results.get("epochs", {}).get(name, [])
            if name in GRPO and other == "rce" and not (any(gap["ci95"] or [1]) or kept):
                lines.append(
                    f"{policy_name(name, results)} did as well on every query: GRPO hardly moved "
                    "the policy. Raise grpo.lr or grpo.epochs, or lower loss.kl_to_ref_coeff."
                )
    for name, epochs in results.get("epochs", {}).items():
        if 0 in epochs:
            lines.append(
                f"{policy_name(name, results)} never beat its starting point on validation"
                f"{in_seeds(epochs.count(0), len(epochs))}: that checkpoint is kept."
            )
    return lines + _left_out(results)


def _answered(results: RunResults, row: PolicyRow, shots: int) -> str:
    """Say how many queries a policy answers; without a full stop."""
    few = ""
    if results["test_queries"] < FEW_QUERIES:
        few = " (so few show large differences only)"
    verb = "answers"
    how = " correctly"
    if results.get("judged_by") == "best_beam":
        verb = "ranks the recorded sequence with the highest score first for"
        how = ""
    return (
        f"With {shots_words(shots)}, {policy_name(row['policy'], results)} {verb} "
        f"{number(row['accuracy'], '.1%')}{span(row.get('accuracy_ci95'), '.1%')} of "
        f"{row.get('queries') or results['test_queries']:,} test queries{how}{few}"
    )


def _left_out(results: RunResults) -> list[str]:
    """Say at which numbers of shots some queries are left out, the same for all policies."""
    fewer = []
    for shots in results["shots"]:
        rows = rows_at(results, shots).values()
        judged = min(row.get("queries") or results["test_queries"] for row in rows)
        if judged < results["test_queries"]:
            fewer.append(f"{judged:,} with {condition_words(results, shots)}")
    if not fewer:
        return []
    return [
        f"{listed(fewer)} of {results['test_queries']:,} test queries are scored, the same ones "
        "for every policy; the others have no recorded sequence of that length."
    ]
