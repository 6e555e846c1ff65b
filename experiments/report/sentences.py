"""Say in sentences what a run shows: its verdict, and why its policy sets the knobs as it does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from knobwise.agents.selector.baselines import SIMPLE
from knobwise.experiments.report.words import (
    COMPARED,
    LEARNED,
    MIX,
    ORACLE,
    SINGLE,
    STATIC,
    TEACHER,
    Row,
    difference_words,
    differences_at,
    guarantees,
    hundredths,
    kept_before_grpo,
    known,
    listed,
    mean_of,
    means_of,
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

Results = Mapping[str, Any]


def verdict(results: Results, guard: bool = True) -> list[str]:
    """Say what the run shows, the most important first.

    Args:
        results: the content of `results.json`.
        guard: whether to say where the guard fell back; a page has a table of that.
    """
    problem = problem_of(results)
    if problem is DEMONSTRATIONS:
        return _of_selectors(results)
    # a run may judge baselines alone
    if LEARNED not in means_of(results):
        best = [row for row in ranked(results, problem.ranked_by) if row["policy"] != ORACLE][:1]
        others = [f" The best is {_with_score(row)}." for row in best]
        return ["".join(["No learned policy was judged.", *others])]
    if problem.equal_latency:
        lines = _under_mean_budgets(results)
        of_guard = _mean_guard(results)
    else:
        lines = _under_deadlines(results)
        of_guard = _deadline_guard(results)
    return [*lines, *on_training(results), *of_guard * guard]


def baselines(results: Results) -> list[str]:
    """Return the policies that are neither learned nor references, the best first."""
    problem = problem_of(results)
    if not problem.averaged:
        rows = rows_at(results, shown_at(results))
        simple = [name for name in SIMPLE if name in rows]
        return sorted(simple, key=lambda name: -float(rows[name]["accuracy"]))
    references = (*problem.trained, problem.low, SINGLE, problem.high)
    policies = (row["policy"] for row in ranked(results, problem.ranked_by))
    return [name for name in policies if name not in references]


def _with_score(row: Row, score: str = "utility") -> str:
    return f"{policy_name(row['policy'])} ({number(value_of(row, score), '.3f')})"


# -- under deadlines -------------------------------------------------------------------------------


def _under_deadlines(results: Results) -> list[str]:
    """Compare the learned controller with static, its teacher and the baselines."""
    # the row of each policy with its means over the budgets
    means = means_of(results)
    learned = means[LEARNED]
    lines = _against_static(learned, means.get(STATIC))
    if TEACHER in means:
        lines.append(_against_teacher(learned, means[TEACHER]))
    lines += _against_baselines(learned, [means[name] for name in baselines(results)])
    if known(learned.get("satisfaction_feasible")):
        lines.append(_on_time(learned, results.get("satisfaction_level")))
    if "split_seeds" in results:
        lines.append(
            f"All numbers are means over {len(results['split_seeds'])} splits of the samples, on "
            "each of which every policy was fitted and judged anew. What follows is about the "
            "first split, whose policy is deployed."
        )
    return lines


def _against_static(learned: Row, static: Row | None) -> list[str]:
    utility = number(value_of(learned), ".3f")
    if static is None:
        return [
            f"The learned controller has a mean utility of {utility}; no static policy was judged."
        ]
    both = f"mean utility {utility} against {number(value_of(static), '.3f')}"
    gap = learned.get("gap_closed")
    ci95 = learned.get("gap_closed_ci95")
    if known(gap) and ci95 and all(map(known, ci95)):
        lines = [
            f"The learned controller {COMPARED[sign_of(ci95)]} budget-aware static: {both}, "
            f"{number(gap, '.0%')} of the oracle gap closed{span(ci95, '.0%')}."
        ]
    else:
        lines = [f"Learned controller and budget-aware static: {both}; no interval is known."]
    # a busy machine may be all that is between the two
    free = learned.get("utility_free")
    if known(free) and free > value_of(static) > value_of(learned):
        lines.append(
            f"Its decisions took {quantity(learned['decision_us_p50'], 'µs')} here. If they were "
            f"free, its utility would be {number(free, '.3f')}, above budget-aware static. On a "
            "busy machine decisions take longer than they should."
        )
    return lines


def _against_teacher(learned: Row, teacher: Row) -> str:
    lead, free = (
        round(value_of(learned, key) - value_of(teacher), 3) for key in ("utility", "utility_free")
    )
    line = (
        "The controller learned from a teacher that predicts every outcome. The teacher is too "
        "slow to be deployed and is not charged for its decisions: mean utility "
        f"{number(value_of(teacher), '.3f')}. The controller is {_lead(lead)}"
    )
    # what the decisions cost, where that changes the number printed
    if known(free) and free != lead:
        line += f", and would be {_lead(free)} if its own decisions were free"
    if known(learned.get("decision_us_p50")):
        line += f"; a decision takes {quantity(learned['decision_us_p50'], 'µs')}"
    return f"{line}."


def _lead(lead: float) -> str:
    if not lead:
        return "as good"
    return f"{points(abs(lead), '')} points {'above' if lead > 0 else 'below'}"


def _against_baselines(learned: Row, rivals: Sequence[Row]) -> list[str]:
    """Compare by the interval that each has by itself: intervals that do not overlap leave no
    doubt."""
    if not rivals:
        return []
    # by more than the last digit that is printed
    leads = {row["policy"]: round(value_of(row) - value_of(learned), 3) for row in rivals}
    compared = []
    for row in rivals:
        lead = leads[row["policy"]]
        text = f"{_with_score(row)}, the same"
        if lead:
            higher = "higher" if lead > 0 else "lower"
            text = f"{_with_score(row)}, {number(abs(lead), '.3f')} {higher}"
        first = row.get("utility_ci95")
        second = learned.get("utility_ci95")
        if first and second:
            overlap = first[0] <= second[1] and second[0] <= first[1]
            text += f", intervals {'overlap' if overlap else 'do not overlap'}"
        compared.append(text)
    # a tie is not better
    better = sum(lead > 0 for lead in leads.values())
    if better:  # rivals are sorted, the best first
        return [
            f"{better} of {len(rivals)} other baselines do better than the controller: "
            f"{'; '.join(compared[:better])}."
        ]
    return [
        f"None of the {len(rivals)} other baselines does better; the strongest is {compared[0]}."
    ]


def _on_time(learned: Row, level: float | None) -> str:
    share = round(learned["satisfaction_feasible"], 3)
    line = f"The controller is on time for {number(share, '.1%')} of the feasible requests"
    if level is not None:
        meets = "meets" if share >= level else "falls short of"
        line += f", which {meets} the {number(level, '.0%')} asked for"
    if (learned.get("infeasible") or 0) > 0:
        line += f" ({number(learned['infeasible'], '.1%')} of all requests are infeasible)"
    return f"{line}."


ON_GUARD = {
    "worse": "The guard fell back to budget-aware static at {budgets}: on held-out samples the "
    "policy is not shown to be better.",
    "safer": "The guard fell back to budget-aware static at {budgets}: only static is on time "
    "often enough.",
    "unattainable": "At {budgets}, {level} is unattainable, so it is not enforced.",
    "too_dear": "At {budgets}, a guarantee of {level} would cost too much utility, so there is "
    "none.",
    "unshown": "At {budgets}, held-out requests are too few to guarantee {level}.",
}
"""What the guard found at some budgets → a sentence."""


def _deadline_guard(results: Results) -> list[str]:
    guard = guarantees(results)
    lines = []
    # a sentence for each finding, with the budgets where it holds
    for finding, sentence in ON_GUARD.items():
        budgets = []
        everywhere = True
        for seeds in guard:
            # a row for each seed
            passed = [row for row in seeds if row[finding]]
            everywhere = everywhere and len(passed) == len(seeds)
            if not passed:
                continue
            # where static decides, nothing is promised, so its share on time is not said
            notes = []
            if finding not in ("worse", "safer"):
                notes.append(number(mean_of(passed, "satisfaction_deployed"), ".1%", " on time"))
            if len(passed) < len(seeds):
                notes.append(f"{len(passed)} of {len(seeds)} seeds")
            budget = quantity(seeds[0]["budget_ms"], unit_of(results))
            budgets.append(f"{budget} ({', '.join(notes)})" if notes else budget)
        if budgets:
            where = "every budget" if everywhere and finding == "worse" else listed(budgets)
            level = f"{100 * guard[0][0].get('level', 0):g}% on time"
            lines.append(sentence.format(budgets=where, level=level))
    return lines


# -- under mean budgets ----------------------------------------------------------------------------


def _under_mean_budgets(results: Results) -> list[str]:
    """Say what is gained at equal mean latency over the best single configuration, the static mix
    and other policies."""
    policies = {row["policy"]: row for row in ranked(results, MEAN_BUDGET.ranked_by)}
    learned = policies[LEARNED]
    budgets = MEAN_BUDGET.judged_at(results)
    # where time is short, choosing matters most
    tight = [MEAN_BUDGET.row(results, LEARNED, budget) for budget in budgets[:2]]
    gains = listed([points(row["over_best_single"]) for row in tight])
    latencies = listed([quantity(row["latency_ms_mean"], unit_of(results)) for row in tight])
    # the gain of the oracle over the best single configuration
    most = [row["oracle_accuracy"] - row["accuracy"] + row["over_best_single"] for row in tight]
    tightest = "two tightest mean budgets" if len(tight) > 1 else "mean budget"
    ci95 = learned["over_static_mix_ci95"]
    lines = [
        f"At the {tightest} the controller gains {gains} points of accuracy over the best single "
        f"configuration of equal mean latency ({latencies}); the oracle gains "
        f"{listed(list(map(points, most)))}.",
        f"The learned controller {COMPARED[sign_of(ci95)]} the static mix of equal mean latency: "
        f"accuracy {points(learned['over_static_mix'])} points{span(ci95)}, mean over "
        f"{len(budgets)} mean budgets; {number(learned['gap_closed'], '.0%')} of the oracle gap "
        "closed.",
    ]
    rivals = [row for name, row in policies.items() if name not in (LEARNED, MIX, SINGLE, ORACLE)]
    if rivals:
        better = sum(row["over_static_mix"] > learned["over_static_mix"] for row in rivals)
        lines.append(
            f"{f'{better} of' if better else 'None of the'} {len(rivals)} other policies that see "
            f"the input {'do' if better > 1 else 'does'} better; the strongest is "
            f"{policy_name(rivals[0]['policy'])} ({points(rivals[0]['over_static_mix'])} points)."
        )
    return lines


def _mean_guard(results: Results) -> list[str]:
    deployed = []
    for rows in results.get("guard") or ():
        deployed += [row["deployed"] for row in rows]
    if all(deployed):
        return []
    return [
        f"In {deployed.count(False)} of {len(deployed)} cases (seeds × budgets) the guard fell "
        "back to the static mix."
    ]


# -- training --------------------------------------------------------------------------------------

GAINED_ON = {"test": "on test samples", "held_out": "on held-out samples of the training"}
"""Key of a gain in `results["grpo_gain"]` → the samples that it was measured on, in words."""
ALL = {1: "", 2: "in both seeds ", 3: "in all three seeds ", 4: "in all four seeds "}
ALL |= {5: "in all five seeds "}
"""Number of seeds → all of them, in words."""


def on_training(results: Results) -> list[str]:
    """Say what GRPO or PPO added to the deployed policy, as far as it is known: the gain in
    hundredths from its start to the weights that are kept, on the same samples; and whether its
    weights are the deployed ones."""
    early = kept_before_grpo(results)
    seeds = len(results.get("chosen") or ())
    method = (results.get("training") or {}).get("method", "GRPO")
    gain = results.get("grpo_gain") or {}
    gains = []
    for key, samples in GAINED_ON.items():
        if key in gain:
            bounds = " to ".join(map(hundredths, gain[f"{key}_ci95"]))
            gains.append(
                f"by {hundredths(gain[key], '+.2f')} points (95% interval {bounds}) {samples}"
            )
    # where all weights are from before GRPO, it added nothing
    lines = []
    if gains and (not early or early < seeds):
        score = "reward" if results.get("sense") else "utility"
        lines.append(
            f"{method} changes the {score} of the deployed controller {', and '.join(gains)}."
        )
    before = f"the best checkpoint is the one before {method}."
    if 0 < early < seeds:
        lines.append(f"In {early} of {seeds} seeds {method} does not improve this policy: {before}")
    elif early:
        everywhere = ALL.get(seeds, f"in all {seeds} seeds ")
        lines.append(f"{method} does not improve this policy: {everywhere}{before}")
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
    lines = []
    if results.get("judged_by") in JUDGED_BY:
        lines.append(JUDGED_BY[results["judged_by"]])
    # simple baselines in words, the best first
    simple = {name: _named(results, rows[name]) for name in baselines(results)}
    if policy not in rows:
        best = [f" The best simple baseline is {name}." for name in list(simple.values())[:1]]
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
    lines += _against_simple(name, simple, {other: at.get((policy, other)) for other in simple})
    lines += [*_shuffled(at), *_hidden(results, at, at.get((policy, "sft")))]
    if vote := rows_at(results, shots, "votes").get(policy):
        lines.append(
            f"Without the model, the majority of the demonstrations that {name} chose is right for "
            f"{number(vote['accuracy'], '.1%')}{span(vote.get('accuracy_ci95'), '.1%')}."
        )
    return lines + _at_other_shots(results, policy)


def _named(results: Results, row: Row) -> str:
    return f"{policy_name(row['policy'], results)} ({row['accuracy']:.3f})"


def _of_stages(results: Results, policy: str, at: Mapping[tuple[str, str], Row]) -> list[str]:
    """Compare trained selectors with the stages before them, and say which trainings changed
    nothing because validation preferred the policy that they started from."""
    learned = list(dict.fromkeys((policy, *DEMONSTRATIONS.trained)))
    lines = []
    for name in learned:
        parts = []
        for other in ("rce", "sft"):
            if row := at.get((name, other)):
                gap = difference_words(row)
                outcome = COMPARED[sign_of(row["ci95"])]
                parts.append(f"{outcome} {policy_name(other, results)}: {gap}")
        if parts:
            lines.append(f"{policy_name(name, results)} {'; it '.join(parts)}.")
    # trainings that changed nothing
    for name, epochs in results.get("epochs", {}).items():
        if name in learned and 0 in epochs:
            # a round starts from the round before
            last = " of its last round" if name == "grpo_rounds" else ""
            lines.append(
                f"{policy_name(name, results)}: in {epochs.count(0)} of {len(results['seeds'])} "
                f"seeds no epoch{last} is better on validation than the start, so the policy stays "
                "what it was."
            )
    return lines


def _against_simple(
    name: str, simple: Mapping[str, str], gaps: Mapping[str, Row | None]
) -> list[str]:
    """Compare with the simple baselines: name → in words, and → the difference, if known."""
    rivals = {other: row for other, row in gaps.items() if row}
    if not rivals:
        return []
    count = f"{len(rivals)} simple baselines"
    # 1 better than the baseline, −1 worse, 0 not shown
    signs = {other: sign_of(row["ci95"]) for other, row in rivals.items()}
    winners = []
    for other, row in rivals.items():
        if signs[other] < 0:
            winners.append(f"{simple[other]}, by {points(-row['difference'], '')} points")
    strongest, row = next(iter(rivals.items()))
    over = difference_words(row)
    close = [simple[other] for other in rivals if signs[other] == 0]
    if winners:
        text = f"{len(winners)} of the {count} do better than {name}: {'; '.join(winners)}."
    elif close:
        text = f"{name} {COMPARED[0]} {listed(close)}; over the strongest of the {count}: {over}."
    else:
        text = f"{name} {COMPARED[1]} all {count}; over the strongest, {simple[strongest]}: {over}."
    return [text]


def _shuffled(at: Mapping[tuple[str, str], Row]) -> list[str]:
    """Say whether GRPO on shuffled rewards gained anything, which it should not."""
    lines = []
    shuffled = {"recorded groups": "shuffled_recorded", "live draws": "shuffled_live"}
    for groups, control in shuffled.items():
        row = at.get((control, "sft"))
        if row is None:
            continue
        # GRPO starts from RCE, which may have gained before any shuffling
        start = at.get((control, "rce"))
        if sign_of(row["ci95"]) <= 0:
            outcome = "no gain, as expected"
        elif start and sign_of(start["ci95"]) <= 0:
            gain = points(start["difference"])
            outcome = f"but {gain} against RCE, its start: no gain, as expected"
        else:
            outcome = "an unexpected gain: something other than the reward is at work"
        gap = difference_words(row)
        lines.append(f"Control: shuffled rewards on {groups} against SFT: {gap}, {outcome}.")
    return lines


def _hidden(results: Results, at: Mapping[tuple[str, str], Row], real: Row | None) -> list[str]:
    """Say whether the gain vanishes without the features that matter, as it should."""
    hidden = at.get(("hidden_live", "hidden_sft"))
    if not hidden or not real:
        return []
    features = listed(results.get("hidden") or ["information"])
    # without a gain there is nothing to attribute
    if sign_of(real["ci95"]) <= 0:
        outcome = "; there is no gain that could vanish."
    elif sign_of(hidden["ci95"]) <= 0:
        outcome = f": the gain vanishes, as expected if it comes from the {features}."
    elif hidden["ci95"][1] < real["ci95"][0]:
        outcome = ": the gain shrinks, but part of it comes from elsewhere."
    else:
        outcome = f": the gain does not vanish, so it is not shown to come from the {features}."
    gap = difference_words(hidden)
    return [
        f"Control: without the {features}, GRPO against SFT: {gap}; with it, "
        f"{points(real['difference'])}{outcome}"
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
            f"Not all of the {results['test_queries']:,} test queries could be judged with every "
            f"number of shots, for lack of a recorded sequence: {listed(fewer)}. Every policy was "
            "judged on the same ones."
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


def explanation(results: Results) -> list[str]:
    """Say why the deployed policy sets the knobs as it does, from `results["explanation"]`."""
    why = results["explanation"]
    unit = unit_of(results)
    lines = [*_usage(results), *on_difficulty(results)]
    if why["importance"]:
        lost = []
        for row in why["importance"]:
            lost.append(f"{feature_name(row)} {points(row['lost'])}{span(row['ci95'])}")
        features = "; ".join(lost)
        lines.append(
            f"What is lost when each sample gets the features of another, in points: {features}."
        )
    # the policy in a few rules
    lines.append(on_tree(why["tree"]))
    for rule in why["tree"]["rules"]:
        when = f"If {condition(rule['when'], unit)}" if rule["when"] else "Always"
        lines.append(
            f"{when}: {setting(rule['then'])} ({number(rule['share'], '.0%')} of the decisions; "
            f"{number(rule['alike'], '.0%')} of their knob values agree)."
        )
    # single decisions
    for key, verb in (("best", "gains most over"), ("worst", "loses most against")):
        cases = []
        for row in why[key]:
            question = f" ({row['question']})" if row["question"] else ""
            cases.append(f"{row['sample_id']}{question} at {quantity(row['budget_ms'], unit)}")
        if cases:
            lines.append(f"The policy {verb} static for: {'; '.join(cases)}.")
    return lines


def feature_name(row: Row) -> str:
    """Return a block of features in words, or one of its columns."""
    return row["name"] if row["column"] is None else f"{row['name']} [{row['column']}]"


def _usage(results: Results) -> list[str]:
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
        read = budget in results["explanation"]["reads"]
        blind = "" if read else " (decided without features)"
        lines.append(f"At {quantity(budget, unit_of(results))}{blind}: {used}.")
    return lines


def on_difficulty(results: Results) -> list[str]:
    """Say whether hard samples get costly settings, and whether more time is used."""
    why = results["explanation"]
    hard = why["difficulty"]
    left_out = ""
    if hard["unanswered"]:
        left_out = (
            f" {hard['unanswered']} of the {why['samples']} samples are left out: no configuration "
            "answers them right."
        )
    lines = [
        "The difficulty of a sample is the latency of its cheapest right configuration (right: an "
        f"accuracy of at least 0.5).{left_out}"
    ]
    if hard["groups"]:
        lines.append(_on_correlation(results))
    else:
        lines.append(
            "At every budget all samples get the same setting, so there is nothing to compare."
        )
    if more := why["more_time"]:
        lines.append(
            f"From one budget to the next larger one {number(more['cheaper'], '.1%')} of the "
            f"choices get cheaper, and {number(more['worse'], '.1%')} get slower and less "
            "accurate, by the means of their settings over these samples; with static "
            f"{number(more['static_cheaper'], '.1%')} and {number(more['static_worse'], '.1%')}."
        )
    return lines


def _on_correlation(results: Results) -> str:
    """Say how the latency of the choice goes with difficulty, and what of that is the setting."""
    hard = results["explanation"]["difficulty"]
    row = next(row for row in hard["at"] if row["budget_ms"] == hard["budget_ms"])
    line = f"At {quantity(hard['budget_ms'], unit_of(results))} the latency of the choice "
    if row["correlation"] is None:
        line += "does not vary with difficulty"
    else:
        line += (
            "and difficulty have a rank correlation of "
            f"{number(row['correlation'], '+.2f')}{span(row['ci95'], '+.2f')}"
        )
    if row["static"] is not None:
        static = number(row["static"], "+.2f")
        line += f"; with static, which treats all samples alike, it is {static}"
    sign = sign_of(row["setting_ci95"])
    outcome = {
        1: "easy samples get cheap settings, hard ones costly settings.",
        -1: "hard samples, which are often slow under every setting, get cheaper settings.",
        0: "it is not shown that easy samples get cheaper settings than hard ones.",
    }[sign]
    if sign < 0 and problem_of(results) is DEADLINE:
        outcome += (
            " A deadline makes this worthwhile: time that is left over is worth nothing, and a "
            "costly setting would be late."
        )
    return (
        f"{line}. With each setting at its mean latency it is {number(row['setting'], '+.2f')}"
        f"{span(row['setting_ci95'], '+.2f')}: {outcome}"
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
        same = "the same" if without == explained["decision"] else setting(without)
        lines.append(f"This uses what the tracker has learned; without it the choice is {same}.")
    steps = explained["by_budget"]
    if steps:
        changes = "is the same at all budgets" if len(steps) == 1 else "changes with the budget"
        lines.append(f"The choice {changes}:")
    # each choice holds up to the next budget in the list
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
