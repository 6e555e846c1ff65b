"""Say in sentences what a run shows: its verdict, and why its policy sets the knobs as it does."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from knobwise.envs.tables.units import TIMES
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
from knobwise.experiments.evidence.schema import (
    Attainable,
    DifferenceRow,
    PolicyRow,
    RunResults,
    TrainingFacts,
)
from knobwise.experiments.evidence.task import (
    DEMONSTRATIONS,
    MEAN_BUDGET,
    Row,
    shown_at,
    task_of,
)
from knobwise.experiments.wording.words import (
    COMPARED,
    LEARNED,
    ORACLE,
    STATIC,
    TEACHER,
    difference_words,
    hidden_words,
    in_seeds,
    listed,
    number,
    points,
    policy_name,
    quantity,
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
    if task is DEMONSTRATIONS:
        return _of_selectors(results)
    # a run may judge baselines alone
    if LEARNED not in rows_at(results, None):
        line = "No learned policy was judged."
        for row in [row for row in ranked(results) if row["policy"] != ORACLE][:1]:
            line += f" The best is {with_score(row, task.ranked_by)}."
        return [line]
    say = _under_mean_budgets if task.equal_latency else _under_deadlines
    return [*say(results), *on_training(results), *_on_guard(results)]


# -- controllers -----------------------------------------------------------------------------------


def _under_deadlines(results: RunResults) -> list[str]:
    """Compare the learned controller with static, its teacher and the baselines."""
    # the row of each policy with its means over the budgets
    means = rows_at(results, None)
    learned = means[LEARNED]
    utility = value_of(learned)
    static = value_of(means.get(STATIC, {}))
    lines = [_over_static(results, learned, utility, static)]
    if estimate := results.get("attainable"):
        share = ""
        if known(learned.get("attained")):
            share = f"; the controller gained {number(learned['attained'], '.0%')} of that"
        lines.append(f"{learnable(estimate)}{share}.")
    free = learned.get("utility_free")
    micros = learned.get("decision_us_p50")
    if unit_of(results) not in TIMES:
        # costs that are no times cannot be compared with it
        lines.append(
            f"A decision takes {quantity(micros, 'µs')}; it is not charged, since budgets are in "
            f"{unit_of(results)}, no time."
        )
    elif known(free):
        share = ""
        if known(micros):
            share = f", {micros / 1000 / learned['latency_ms_mean']:.1%} of the mean latency"
        lines.append(
            f"A decision takes {quantity(micros, 'µs')}{share}; if decisions were free, its "
            f"utility would be {number(free, '.3f')}."
        )
    if TEACHER in means:
        lines.append(
            f"Its teacher has utility {number(value_of(means[TEACHER]), '.3f')}: it predicts every "
            "outcome, is too slow to deploy, and decides for free here."
        )
    lines += _on_rivals(results, "utility")
    if known(learned.get("satisfaction_feasible")):
        lines.append(_on_time(learned, results.get("satisfaction_level")))
    if "split_seeds" in results:
        lines.append(
            f"All numbers are means over {len(results['split_seeds'])} splits of the samples; "
            "every policy was fitted and judged anew on each. What follows is about the first "
            "split, whose policy is deployed."
        )
    return lines


def _over_static(results: RunResults, learned: PolicyRow, utility: float, static: float) -> str:
    """Say whether the controller is better than static, by how much, and how sure that is."""
    ci95 = learned.get("over_static_ci95")
    gain = learned.get("over_static", utility - static)
    sign = sign_of(ci95 or learned.get("gap_closed_ci95"))
    line = (
        f"The learned controller {COMPARED[sign]} budget-aware static: {points(gain)} points"
        f"{span(ci95)}, utility {number(utility, '.3f')} against {number(static, '.3f')}, "
        f"{number(learned.get('gap_closed'), '.0%')} of the oracle gap closed."
    )
    if not sign and known(results.get("test_samples")):
        line += f" {results['test_samples']:,} test samples are too few to tell."
    return line


def learnable(estimate: Attainable) -> str:
    """Say what looks predictable from the features, `attainable` in results; without a full
    stop."""
    gained = f"{points(estimate['gain'])} points{span(estimate['gain_ci95'])}"
    if sign_of(estimate["gain_ci95"]) > 0:
        return f"About {gained} look predictable from your features"
    return f"No gain looks predictable from your features: {gained}"


def _on_rivals(results: RunResults, score: str) -> list[str]:
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
        f"{with_score(rivals[0], score)}."
    ]


def _on_time(learned: PolicyRow, level: float | None) -> str:
    share = number(learned["satisfaction_feasible"], ".1%")
    line = f"The controller is on time for {share} of the feasible requests"
    if level is not None:
        # as printed: 95.0 % does not fall short of 95 %
        meets = "meets" if float(share.rstrip("%")) >= 100 * level - 1e-9 else "falls short of"
        line += f", which {meets} the {number(level, '.0%')} that policy.level asks for"
    infeasible = number(learned.get("infeasible"), ".1%")
    return f"{line} ({infeasible} of all requests are infeasible)."


def _under_mean_budgets(results: RunResults) -> list[str]:
    """Say what is gained at equal mean latency over the best single configuration, the static mix
    and other policies."""
    learned = rows_at(results, None)[LEARNED]
    budgets = MEAN_BUDGET.conditions(results)
    # the two tightest: where time is short, choosing matters most
    tight = [MEAN_BUDGET.row(results, LEARNED, budget) for budget in budgets[:2]]
    gains = listed([points(row["over_best_single"]) for row in tight])
    latencies = listed([quantity(row["latency_ms_mean"], unit_of(results)) for row in tight])
    # the gain of the oracle over the best single configuration
    of_oracle = [
        row["oracle_accuracy"] - row["accuracy"] + row["over_best_single"] for row in tight
    ]
    ci95 = learned["over_static_mix_ci95"]
    return [
        f"At the tightest mean budgets the controller gains {gains} points of accuracy over the "
        f"best single configuration of equal mean latency ({latencies}); the oracle gains "
        f"{listed(list(map(points, of_oracle)))}.",
        f"The learned controller {COMPARED[sign_of(ci95)]} the static mix of equal mean latency: "
        f"accuracy {points(learned['over_static_mix'])} points{span(ci95)}, mean over "
        f"{len(budgets)} mean budgets; {number(learned['gap_closed'], '.0%')} of the oracle gap "
        "closed.",
        *_on_rivals(results, MEAN_BUDGET.ranked_by),
    ]


def promise(seeds: Sequence[GuardRow]) -> str:
    """Say whether the share on time is guaranteed at a budget, or in how many seeds why not."""
    missed = Counter(row["missed"] for row in seeds if row["missed"])
    reasons = [why + in_seeds(count, len(seeds)) for why, count in missed.items()]
    return "; ".join(reasons) or "kept"


def _on_guard(results: RunResults) -> list[str]:
    """Say where the guard fell back, and where it does not guarantee a share on time."""
    cases = list(itertools.chain(*results.get("guard") or ()))
    lines = []
    if fell_back := sum(not row["deployed"] for row in cases):
        lines.append(
            f"In {fell_back:,} of {len(cases):,} cases (seeds × budgets) the guard fell back to "
            f"{policy_name(task_of(results).low)}: on held-out samples the policy showed no "
            "gain there, or was late too often."
        )
    not_kept = [
        f"{quantity(seeds[0]['budget_ms'], unit_of(results))} ({promise(seeds)})"
        for seeds in guard_by_budget(results)
        if "level" in seeds[0] and promise(seeds) != "kept"
    ]
    if not_kept:
        lines.append(
            f"The share on time that policy.level asks for is not guaranteed at {listed(not_kept)}."
        )
    return lines


CHANGED = {1: "shows a gain", -1: "shows a loss", 0: "shows no difference"}
"""`sign_of` a gain in `results["grpo_gain"]` → what it shows."""
GAINED_ON = {"test": "on test samples", "held_out": "on held-out samples of training"}
"""Key of a gain in `results["grpo_gain"]` → the samples that it was measured on, in words."""


def on_training(results: RunResults) -> list[str]:
    """Say what GRPO or PPO added to the deployed policy, as far as it is known: the gain from its
    start to the weights that are kept, on the same samples; and whether its weights are the
    deployed ones."""
    early = kept_before_grpo(results)
    seeds = len(results.get("chosen") or ())
    method = (results.get("training") or {}).get("method", "GRPO")
    gain: Row = results.get("grpo_gain") or {}
    gains = []
    signs = []
    for key, samples in GAINED_ON.items():
        if key in gain:
            gained: DifferenceRow = {"difference": gain[key], "ci95": gain[f"{key}_ci95"]}
            gains.append(f"{difference_words(gained)} {samples}")
            signs.append(sign_of(gained["ci95"]))
    lines = []
    if gains:
        score = "reward" if results.get("sense") else "utility"
        # the test samples, where they are known, decide what it shows
        lines.append(f"{method} {CHANGED[signs[0]]} in {score}: {', '.join(gains)}.")
    lines += _on_patience(results.get("training") or {}, method)
    if early:
        lines.append(
            f"{method} improves nothing{in_seeds(early, seeds)}: the checkpoint from before "
            f"{method} is kept."
        )
    return lines


def _on_patience(training: TrainingFacts, method: str) -> list[str]:
    """Say where training stopped before its last iteration, and why."""
    total = training.get("warmup_iterations", 0) + training.get("iterations", 0)
    ended = training.get("ended_at", [])
    stopped = [f"{iteration:,}" for iteration in ended if iteration < total]
    if not stopped:
        return []
    return [
        f"Training stopped early{in_seeds(len(stopped), len(ended))}, at iteration "
        f"{listed(stopped)} of {total:,}: {method} was no better on validation for "
        f"{training['patience']:,} iterations (optimiser.patience)."
    ]


# -- selectors -------------------------------------------------------------------------------------

JUDGED_BY = {
    "recorded": "Without a scorer, every policy was judged by the recorded sequence that it "
    "prefers, which may have been chosen by looking at the answer. This compares policies; it "
    "does not say what they would reach.",
    "best_beam": "Without a scorer and right answers, a choice counts as right if the policy "
    "prefers the recorded sequence with the highest score. This compares policies; it says nothing "
    "about answers.",
}
"""How policies were judged, if not by a scorer → a warning."""


FEW_QUERIES = 100
"""With fewer test queries an interval is 20 points wide or more."""


def _of_selectors(results: RunResults) -> list[str]:
    """Say what the policy answers, what it gains over others, and whether controls gain nothing."""
    shots = shown_at(results)
    policy = DEMONSTRATIONS.main_policy(results)
    rows = rows_at(results, shots)
    lines = list(filter(None, [JUDGED_BY.get(results.get("judged_by", ""))]))
    # the best simple baseline
    simple = [with_score(rows[name], "accuracy") for name in baselines(results)[:1]]
    if policy not in rows:
        best = "".join(f" The best simple baseline is {name}." for name in simple)
        return [*lines, f"No learned policy was judged.{best}"]
    row = rows[policy]
    name = policy_name(policy, results)
    lines.append(
        f"With {shots_words(shots)}, {name} answers {number(row['accuracy'], '.1%')} of "
        f"{row.get('queries') or results['test_queries']:,} held-out queries correctly"
        f"{span(row.get('accuracy_ci95'), '.1%')}."
        + " So few queries show large differences only."
        * (results["test_queries"] < FEW_QUERIES)
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


def _of_stages(
    results: RunResults, policy: str, at: Mapping[tuple[str, str], DifferenceRow]
) -> list[str]:
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
                f"seeds no epoch{last} is better on validation than the start, which is kept."
            )
    return lines


def _shuffled(at: Mapping[tuple[str, str], DifferenceRow]) -> list[str]:
    """Say whether GRPO on shuffled rewards gained anything, which it should not.

    Args:
        at: the paired differences, by the policy and what it is compared with.
    """
    lines = []
    shuffled = {"recorded groups": "shuffled_recorded", "live draws": "shuffled_live"}
    for groups, control in shuffled.items():
        # GRPO starts from RCE, which may have gained before any shuffling
        over = [at[control, other] for other in ("sft", "rce") if (control, other) in at]
        if (control, "sft") in at:
            gaps = [f"{difference_words(gap)} against {gap['against'].upper()}" for gap in over]
            outcome = "no gain, as expected"
            if all(sign_of(gap["ci95"]) > 0 for gap in over):
                outcome = "an unexpected gain: something other than the reward is at work"
            lines.append(f"Control: shuffled rewards on {groups}: {', '.join(gaps)}, {outcome}.")
    return lines


def _hidden(
    results: RunResults, at: Mapping[tuple[str, str], DifferenceRow], real: DifferenceRow | None
) -> list[str]:
    """Say whether the gain vanishes without the features that matter, as it should."""
    hidden = at.get(("hidden_live", "hidden_sft"))
    if not hidden or not real:
        return []
    features = hidden_words(results)
    # without a gain there is nothing to attribute
    outcome = f"the gain does not vanish, so not all of it comes from the {features}"
    if sign_of(real["ci95"]) <= 0:
        outcome = "there is no gain that could vanish"
    elif sign_of(hidden["ci95"]) <= 0:
        outcome = f"the gain vanishes, as expected if it comes from the {features}"
    return [
        f"Control: without the {features}, GRPO against SFT: {difference_words(hidden)}; with it, "
        f"{points(real['difference'])}: {outcome}."
    ]


def _at_other_shots(results: RunResults, policy: str) -> list[str]:
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
            f"Not all of the {results['test_queries']:,} test queries have a recorded sequence to "
            f"judge by: {listed(fewer)} were judged, equal for every policy."
        )
    if accuracies:
        lines.append(
            f"Trained only with {shots_words(results['trained_shots'])}, "
            f"{policy_name(policy, results)} reaches {listed(accuracies)}."
        )
    return lines
