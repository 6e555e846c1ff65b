"""What a run of selectors shows, in sentences."""

from __future__ import annotations

from collections.abc import Mapping

from knobwise.experiments.report.words import (
    COMPARED,
    baselines,
    difference_words,
    differences_at,
    listed,
    number,
    points,
    policy_name,
    rows_at,
    shots_words,
    sign_of,
    span,
    with_score,
)
from knobwise.experiments.results.problem import (
    DEMONSTRATIONS,
    Results,
    Row,
    shown_at,
)

JUDGED_BY = {
    "recorded": "Without a scorer, every policy was judged by the recorded sequence that it "
    "prefers, which may have been chosen by looking at the answer. This compares policies; it "
    "does not say what they would reach.",
    "best_beam": "Without a scorer and right answers, a choice counts as right if the policy "
    "prefers the recorded sequence with the highest score. This compares policies; it says nothing "
    "about answers.",
}
"""How policies were judged, if not by a scorer → a warning."""


def of_selectors(results: Results) -> list[str]:
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
                f"seeds no epoch{last} is better on validation than the start, which is kept."
            )
    return lines


def _shuffled(at: Mapping[tuple[str, str], Row]) -> list[str]:
    """Say whether GRPO on shuffled rewards gained anything, which it should not."""
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


def _hidden(results: Results, at: Mapping[tuple[str, str], Row], real: Row | None) -> list[str]:
    """Say whether the gain vanishes without the features that matter, as it should."""
    hidden = at.get(("hidden_live", "hidden_sft"))
    if not hidden or not real:
        return []
    features = listed(results.get("hidden") or ["information"])
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
            f"Not all of the {results['test_queries']:,} test queries have a recorded sequence to "
            f"judge by: {listed(fewer)} were judged, equal for every policy."
        )
    if accuracies:
        lines.append(
            f"Trained only with {shots_words(results['trained_shots'])}, "
            f"{policy_name(policy, results)} reaches {listed(accuracies)}."
        )
    return lines
