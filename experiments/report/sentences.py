"""Say in sentences what a run shows: its verdict, and why its policy sets the knobs as it does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from knobwise.agents.selector.baselines import SIMPLE
from knobwise.experiments.report.words import (
    COMPARED,
    LEARNED,
    ORACLE,
    SINGLE,
    STATIC,
    TEACHER,
    Results,
    Row,
    difference_words,
    differences_at,
    guarantees,
    in_seeds,
    kept_before_grpo,
    known,
    listed,
    number,
    points,
    policy_name,
    quantity,
    ranked,
    rows_at,
    shots_words,
    sign_of,
    span,
    unit_of,
    value_of,
)
from knobwise.experiments.results.problem import (
    DEADLINE,
    DEMONSTRATIONS,
    MEAN_BUDGET,
    problem_of,
    shown_at,
)


def verdict(results: Results) -> list[str]:
    """Say what the run shows, the most important first."""
    problem = problem_of(results)
    if problem is DEMONSTRATIONS:
        return _of_selectors(results)
    # a run may judge baselines alone
    if LEARNED not in rows_at(results, None):
        best = [row for row in ranked(results) if row["policy"] != ORACLE][:1]
        others = [f" The best is {_with_score(row, problem.ranked_by)}." for row in best]
        return ["".join(["No learned policy was judged.", *others])]
    say = _under_mean_budgets if problem.equal_latency else _under_deadlines
    return [*say(results), *on_training(results), *_on_guard(results)]


def baselines(results: Results) -> list[str]:
    """Return the policies that are neither learned nor references, the best first."""
    problem = problem_of(results)
    policies = [row["policy"] for row in ranked(results)]
    if problem is DEMONSTRATIONS:
        return [name for name in policies if name in SIMPLE]
    references = (*problem.trained, problem.low, SINGLE, problem.high)
    return [name for name in policies if name not in references]


def _with_score(row: Row, score: str) -> str:
    """Name a policy with its score, and the interval of that."""
    interval = span(row.get(f"{score}_ci95"), ".3f").strip(" ()")
    numbers = [number(value_of(row, score), ".3f"), *[interval] * bool(interval)]
    return f"{policy_name(row['policy'])} ({', '.join(numbers)})"


# -- controllers -----------------------------------------------------------------------------------


def _under_deadlines(results: Results) -> list[str]:
    """Compare the learned controller with static, its teacher and the baselines."""
    # the row of each policy with its means over the budgets
    means = rows_at(results, None)
    learned = means[LEARNED]
    utility = value_of(learned)
    static = value_of(means.get(STATIC, {}))
    ci95 = learned.get("gap_closed_ci95")
    lines = [
        f"The learned controller {COMPARED[sign_of(ci95)]} budget-aware static: mean utility "
        f"{number(utility, '.3f')} against {number(static, '.3f')}, "
        f"{number(learned.get('gap_closed'), '.0%')} of the oracle gap closed{span(ci95, '.0%')}."
    ]
    free = learned.get("utility_free")
    if known(free):
        # a busy machine may be all that is between the two
        busy = " On a busy machine decisions take longer than they should."
        lines.append(
            f"A decision takes {quantity(learned.get('decision_us_p50'), 'µs')}; if decisions were "
            f"free, its utility would be {number(free, '.3f')}." + busy * (free > static > utility)
        )
    if TEACHER in means:
        lines.append(
            "It learned from a teacher that predicts every outcome, is too slow to be deployed and "
            f"decides for free here: mean utility {number(value_of(means[TEACHER]), '.3f')}."
        )
    lines += _on_rivals(results, "utility")
    if known(learned.get("satisfaction_feasible")):
        lines.append(_on_time(learned, results.get("satisfaction_level")))
    if "split_seeds" in results:
        lines.append(
            f"All numbers are means over {len(results['split_seeds'])} splits of the samples, on "
            "each of which every policy was fitted and judged anew. What follows is about the "
            "first split, whose policy is deployed."
        )
    return lines


def _on_rivals(results: Results, score: str) -> list[str]:
    """Say how many baselines have a higher score than the controller, and which is the best."""
    means = rows_at(results, None)
    rivals = [means[name] for name in baselines(results)]
    if not rivals:
        return []
    # higher by more than the last digit that is printed: a tie is not better
    learned = value_of(means[LEARNED], score)
    better = sum(round(value_of(row, score) - learned, 3) > 0 for row in rivals)
    return [
        f"{better or 'None'} of the {len(rivals)} other baselines "
        f"{'do' if better > 1 else 'does'} better; the strongest is "
        f"{_with_score(rivals[0], score)}."
    ]


def _on_time(learned: Row, level: float | None) -> str:
    share = round(learned["satisfaction_feasible"], 3)
    line = f"The controller is on time for {number(share, '.1%')} of the feasible requests"
    if level is not None:
        meets = "meets" if share >= level else "falls short of"
        line += f", which {meets} the {number(level, '.0%')} asked for"
    infeasible = number(learned.get("infeasible"), ".1%")
    return f"{line} ({infeasible} of all requests are infeasible)."


def _under_mean_budgets(results: Results) -> list[str]:
    """Say what is gained at equal mean latency over the best single configuration, the static mix
    and other policies."""
    learned = rows_at(results, None)[LEARNED]
    budgets = MEAN_BUDGET.judged_at(results)
    # where time is short, choosing matters most
    tight = [MEAN_BUDGET.row(results, LEARNED, budget) for budget in budgets[:2]]
    gains = listed([points(row["over_best_single"]) for row in tight])
    latencies = listed([quantity(row["latency_ms_mean"], unit_of(results)) for row in tight])
    # the gain of the oracle over the best single configuration
    most = [row["oracle_accuracy"] - row["accuracy"] + row["over_best_single"] for row in tight]
    ci95 = learned["over_static_mix_ci95"]
    return [
        f"At the tightest mean budgets the controller gains {gains} points of accuracy over the "
        f"best single configuration of equal mean latency ({latencies}); the oracle gains "
        f"{listed(list(map(points, most)))}.",
        f"The learned controller {COMPARED[sign_of(ci95)]} the static mix of equal mean latency: "
        f"accuracy {points(learned['over_static_mix'])} points{span(ci95)}, mean over "
        f"{len(budgets)} mean budgets; {number(learned['gap_closed'], '.0%')} of the oracle gap "
        "closed.",
        *_on_rivals(results, MEAN_BUDGET.ranked_by),
    ]


PROMISES = {
    "unattainable": "not possible here",
    "too_dear": "would cost too much utility",
    "unshown": "too few held-out requests to tell",
}
"""What the guard found → why a share on time is not guaranteed."""


def promise(seeds: Sequence[Row]) -> str:
    """Say whether the share on time is guaranteed at a budget, or in how many seeds why not."""
    reasons = []
    for finding, why in PROMISES.items():
        count = sum(row[finding] for row in seeds)
        if count:
            reasons.append(why + in_seeds(count, len(seeds)))
    return "; ".join(reasons) or "kept"


def _on_guard(results: Results) -> list[str]:
    """Say where the guard fell back, and where it does not guarantee a share on time."""
    if problem_of(results).equal_latency:
        deployed = []
        for rows in results.get("guard") or ():
            deployed += [row["deployed"] for row in rows]
        fell_back = deployed.count(False)
        cases = f"In {fell_back} of {len(deployed)} cases (seeds × budgets)"
        return [f"{cases} the guard fell back to the static mix."] * bool(fell_back)
    # budgets, with the number of seeds where it is not all
    fell_back_at = []
    not_kept = []
    level = 0
    for seeds in guarantees(results):
        budget = quantity(seeds[0]["budget_ms"], unit_of(results))
        fallen = sum(not row["deployed"] for row in seeds)
        if fallen:
            fell_back_at.append(budget + in_seeds(fallen, len(seeds)))
        level = seeds[0].get("level", 0)
        if level and promise(seeds) != "kept":
            not_kept.append(f"{budget} ({promise(seeds)})")
    lines = []
    if fell_back_at:
        lines.append(
            f"The guard fell back to budget-aware static at {listed(fell_back_at)}: on held-out "
            "samples the policy is not shown to be better there, or not on time often enough."
        )
    if not_kept:
        lines.append(f"{100 * level:g}% on time is not guaranteed at {listed(not_kept)}.")
    return lines


GAINED_ON = {"test": "on test samples", "held_out": "on held-out samples of the training"}
"""Key of a gain in `results["grpo_gain"]` → the samples that it was measured on, in words."""


def on_training(results: Results) -> list[str]:
    """Say what GRPO or PPO added to the deployed policy, as far as it is known: the gain from its
    start to the weights that are kept, on the same samples; and whether its weights are the
    deployed ones."""
    early = kept_before_grpo(results)
    seeds = len(results.get("chosen") or ())
    method = (results.get("training") or {}).get("method", "GRPO")
    gain = results.get("grpo_gain") or {}
    gains = []
    for key, samples in GAINED_ON.items():
        if key in gain:
            gained = {"difference": gain[key], "ci95": gain[f"{key}_ci95"]}
            gains.append(f"by {difference_words(gained)} {samples}")
    # where all weights are from before GRPO, it added nothing
    lines = []
    if gains and (not early or early < seeds):
        score = "reward" if results.get("sense") else "utility"
        lines.append(
            f"{method} changes the {score} of the deployed controller {', and '.join(gains)}."
        )
    if early:
        lines.append(
            f"{method} does not improve this policy{in_seeds(early, seeds)}: the best checkpoint "
            f"is the one before {method}."
        )
    return lines


# -- selectors -------------------------------------------------------------------------------------

JUDGED_BY = {
    "recorded": "No scorer was available, so every policy was given the recorded sequence that it "
    "prefers, which may have been found by looking at the answer. This compares policies; it does "
    "not say what they would reach.",
    "best_beam": "Neither a scorer nor right answers were available: a choice is right if the "
    "policy prefers the recorded sequence with the highest score. This compares policies; it says "
    "nothing about answers.",
}
"""How policies were judged, if not by a scorer → a warning."""


def _of_selectors(results: Results) -> list[str]:
    """Say what the policy answers, what it gains over others, and whether controls gain nothing."""
    shots = shown_at(results)
    policy = DEMONSTRATIONS.main_policy(results)
    rows = rows_at(results, shots)
    lines = [JUDGED_BY[judge] for judge in JUDGED_BY if judge == results.get("judged_by")]
    # the best simple baseline
    simple = [_with_score(rows[name], "accuracy") for name in baselines(results)[:1]]
    if policy not in rows:
        best = [f" The best simple baseline is {name}." for name in simple]
        return [*lines, "".join(["No learned policy was judged.", *best])]
    row = rows[policy]
    name = policy_name(policy, results)
    lines.append(
        f"With {shots_words(shots)}, {name} answers {number(row['accuracy'], '.1%')} of "
        f"{row.get('queries') or results['test_queries']:,} held-out queries correctly"
        f"{span(row.get('accuracy_ci95'), '.1%')}."
    )
    # (policy, against) → the paired difference
    at = differences_at(results, shots)
    lines += _of_stages(results, policy, at)
    gaps = [at[policy, other] for other in baselines(results) if (policy, other) in at]
    if gaps:
        signs = [sign_of(gap["ci95"]) for gap in gaps]
        lines.append(
            f"Of {len(gaps)} simple baselines {name} is better than {signs.count(1)} and worse "
            f"than {signs.count(-1)}; over the strongest, {simple[0]}: "
            f"{difference_words(gaps[0])}."
        )
    lines += [*_shuffled(at), *_hidden(results, at, at.get((policy, "sft")))]
    if vote := rows_at(results, shots, "votes").get(policy):
        lines.append(
            f"Without the model, the majority of the demonstrations that {name} chose is right for "
            f"{number(vote['accuracy'], '.1%')}{span(vote.get('accuracy_ci95'), '.1%')}."
        )
    return lines + _at_other_shots(results, policy)


def _of_stages(results: Results, policy: str, at: Mapping[tuple[str, str], Row]) -> list[str]:
    """Compare trained selectors with the stages before them, and say which trainings changed
    nothing because validation preferred the policy that they started from."""
    lines = []
    for name in dict.fromkeys((policy, *DEMONSTRATIONS.trained)):
        parts = []
        for other in ("rce", "sft"):
            if row := at.get((name, other)):
                outcome = f"{COMPARED[sign_of(row['ci95'])]} {policy_name(other, results)}"
                parts.append(f"{outcome}: {difference_words(row)}")
        if parts:
            lines.append(f"{policy_name(name, results)} {'; it '.join(parts)}.")
        epochs = results.get("epochs", {}).get(name, [])
        if 0 in epochs:
            # a round starts from the round before
            last = " of its last round" * (name == "grpo_rounds")
            lines.append(
                f"{policy_name(name, results)}: in {epochs.count(0)} of {len(results['seeds'])} "
                f"seeds no epoch{last} is better on validation than the start, so the policy stays "
                "what it was."
            )
    return lines


def _shuffled(at: Mapping[tuple[str, str], Row]) -> list[str]:
    """Say whether GRPO on shuffled rewards gained anything, which it should not."""
    lines = []
    shuffled = {"recorded groups": "shuffled_recorded", "live draws": "shuffled_live"}
    for groups, control in shuffled.items():
        # GRPO starts from RCE, which may have gained before any shuffling
        over = {other: at[control, other] for other in ("sft", "rce") if (control, other) in at}
        if "sft" in over:
            gaps = [f"{difference_words(gap)} against {name.upper()}" for name, gap in over.items()]
            outcome = "no gain, as expected"
            if all(sign_of(gap["ci95"]) > 0 for gap in over.values()):
                outcome = "an unexpected gain: something other than the reward is at work"
            lines.append(f"Control: shuffled rewards on {groups}: {', '.join(gaps)}, {outcome}.")
    return lines


def _hidden(results: Results, at: Mapping[tuple[str, str], Row], real: Row | None) -> list[str]:
    """Say whether the gain vanishes without the features that matter, as it should."""
    hidden = at.get(("hidden_live", "hidden_sft"))
    if not hidden or not real:
        return []
    features = listed(results.get("hidden") or ["information"])
    # without a gain there is nothing to attribute
    outcome = f"the gain does not vanish, so not all of it is shown to come from the {features}"
    if sign_of(real["ci95"]) <= 0:
        outcome = "there is no gain that could vanish"
    elif sign_of(hidden["ci95"]) <= 0:
        outcome = f"the gain vanishes, as expected if it comes from the {features}"
    return [
        f"Control: without the {features}, GRPO against SFT: {difference_words(hidden)}; with it, "
        f"{points(real['difference'])}: {outcome}."
    ]


def _at_other_shots(results: Results, policy: str) -> list[str]:
    """Say what the policy reaches with other numbers of shots, and where some queries are left
    out."""
    accuracies = []
    fewer = []
    for shots in results["shots"]:
        rows = rows_at(results, shots)
        if policy in rows and shots != results["trained_shots"]:
            accuracies.append(f"{rows[policy]['accuracy']:.3f} with {shots}")
        # the same for all policies
        judged = min(row.get("queries") or results["test_queries"] for row in rows.values())
        if judged < results["test_queries"]:
            fewer.append(f"{judged:,} with {shots}")
    lines = []
    if fewer:
        lines.append(
            f"Of {results['test_queries']:,} test queries not all have a recorded sequence to be "
            f"judged by: {listed(fewer)} were judged, the same for every policy."
        )
    if accuracies:
        lines.append(
            f"Trained only with {shots_words(results['trained_shots'])}, "
            f"{policy_name(policy, results)} reaches {listed(accuracies)}."
        )
    return lines


# -- why -------------------------------------------------------------------------------------------


def setting(knobs: Mapping[str, Any]) -> str:
    """Return a configuration in words: `crops=2, mode=fast`."""
    return ", ".join(f"{name}={value}" for name, value in knobs.items())


def condition(bounds: Sequence[tuple[str, str, float]], unit: str) -> str:
    """Return the condition of a rule in words; "always" without bounds."""
    parts = []
    for name, sign, value in bounds:
        bound = quantity(value, unit) if name == "budget" else f"{value:.3g}"
        parts.append(f"{name} {sign} {bound}")
    return " and ".join(parts) or "always"


def on_usage(results: Results) -> list[str]:
    """Say for each budget how often each value of a knob is used."""
    lines = []
    usage = [row for row in results["knob_usage"] if row["policy"] == LEARNED and row["share"] > 0]
    usage.sort(key=lambda row: -row["share"])
    for budget in problem_of(results).judged_at(results):
        knobs: dict[str, list[str]] = {row["knob"]: [] for row in results["knob_usage"]}
        for row in usage:
            if row["budget_ms"] == budget:
                knobs[row["knob"]].append(f"{row['value']} ({number(row['share'], '.0%')})")
        used = "; ".join(f"{knob} {', '.join(shares)}" for knob, shares in knobs.items())
        lines.append(f"At {quantity(budget, unit_of(results))}: {used}.")
    return lines


def on_difficulty(results: Results) -> list[str]:
    """Say whether hard samples get costly settings, and whether more time is used."""
    why = results["explanation"]
    hard = why["difficulty"]
    lines = [
        "The difficulty of a sample is the latency of its cheapest right configuration (right: an "
        f"accuracy of at least 0.5). {hard['unanswered']} of {why['samples']} samples have none, "
        "and are left out."
    ]
    if hard["groups"]:
        lines.append(_on_correlation(results))
    else:
        lines.append("At every budget all samples get the same setting: nothing can be compared.")
    if more := why["more_time"]:
        lines.append(
            f"From one budget to the next larger one {number(more['cheaper'], '.1%')} of the "
            f"choices get cheaper, and {number(more['worse'], '.1%')} get slower and less "
            "accurate, by the means of their settings over these samples; with static "
            f"{number(more['static_cheaper'], '.1%')} and {number(more['static_worse'], '.1%')}."
        )
    return lines


SPENDS_ON = {
    1: "easy samples get cheap settings, hard ones costly settings.",
    -1: "hard samples, which are often slow under every setting, get cheaper settings.",
    0: "it is not shown that easy samples get cheaper settings than hard ones.",
}
"""`sign_of` the correlation of settings with difficulty → what it shows."""


def _on_correlation(results: Results) -> str:
    """Say how the latency of the choice goes with difficulty, and what of that is the setting."""
    hard = results["explanation"]["difficulty"]
    row = next(row for row in hard["at"] if row["budget_ms"] == hard["budget_ms"])
    sign = sign_of(row["setting_ci95"])
    worthwhile = ""
    if sign < 0 and problem_of(results) is DEADLINE:
        worthwhile = (
            " A deadline makes this worthwhile: time that is left over is worth nothing, and a "
            "costly setting would be late."
        )
    return (
        f"At {quantity(hard['budget_ms'], unit_of(results))} the latency of the choice and "
        f"difficulty have a rank correlation of {number(row['correlation'], '+.2f')}"
        f"{span(row['ci95'], '+.2f')}; with static, which treats all samples alike, it is "
        f"{number(row['static'], '+.2f')}. With each setting at its mean latency it is "
        f"{number(row['setting'], '+.2f')}{span(row['setting_ci95'], '+.2f')}: "
        f"{SPENDS_ON[sign]}{worthwhile}"
    )


def on_tree(tree: Row) -> str:
    """Say how well a few rules describe the decisions."""
    return (
        f"A tree with at most eight leaves sets {number(tree['fidelity'], '.0%')}"
        f"{span(tree['ci95'], '.0%')} of the knob values of held-out decisions as the policy does, "
        f"and all knobs in {number(tree['exact'], '.0%')} of them; a tree that sees the budget "
        f"alone sets {number(tree['by_budget_alone'], '.0%')}."
    )


def decision(explained: Row, unit: str) -> list[str]:
    """Say why a controller decided as it did for one sample, and what was measured of the choice.

    Args:
        explained: the explanation of `knobwise.load(…).decide`, with what was measured.
        unit: of the budgets.
    """
    budget_ms = explained["budget_ms"]
    question = f" ({explained['question']})" if explained["question"] else ""
    lines = [
        f"Sample {explained['sample']}{question} under a budget of {quantity(budget_ms, unit)}: "
        f"{setting(explained['decision'])}. Why: {explained['reason']}."
    ]
    if guard := explained["guard"]:
        reason = guard["reason"] or ("deployed" if guard["deployed"] else "fell back")
        nearest = quantity(guard["budget_ms"], unit)
        lines.append(f"The guard at {nearest}, its nearest calibrated budget: {reason}.")
    if without := explained["without_drift"]:
        lines.append(
            f"This uses what the tracker has learned; without it the choice is {setting(without)}."
        )
    steps = explained["by_budget"]
    if steps:
        lines.append("The choice by budget, each up to the next one:")
    for (budget, configuration), (following, _) in pairwise([*steps, (float("inf"), {})]):
        mark = " ← this budget" if budget <= budget_ms < following else ""
        lines.append(f"from {quantity(budget, unit)}: {setting(configuration)}{mark}")
    chosen = next(
        row for row in explained["expected"] if row["configuration"] == explained["decision"]
    )["measured"]
    if not chosen:
        return [*lines, "The profile did not measure this configuration for this sample."]
    late = "on time"
    if chosen["latency_ms"] > budget_ms:
        late = f"{quantity(chosen['latency_ms'] - budget_ms, unit)} late"
    return [
        *lines,
        f"What the profile measured: accuracy {number(chosen['accuracy'], '.2f')} in "
        f"{quantity(chosen['latency_ms'], unit)}, {late}.",
    ]
