"""What a run of the selector found, in sentences, and the words for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from knobwise.agents.selector.baselines import SIMPLE
from knobwise.experiments.report.verdict import Row, interval, number
from knobwise.experiments.results.selector_results import CONTROLS, LEARNED, UPPER, shown_at

WORDS = {
    "grpo_live": ("GRPO on live draws", "after RCE: GRPO on the policy's own draws, scored as they are drawn"),
    "grpo_rounds": (
        "GRPO on rounds of draws",
        "after RCE: GRPO on recorded draws of the policy, several rounds of them",
    ),
    "grpo_recorded": (
        "GRPO on recorded groups",
        "after RCE: GRPO on groups of sequences that were scored once, before it began",
    ),
    "rce": ("RCE", "after SFT: cross-entropy to recorded sequences, weighted by their scores"),
    "sft": ("SFT", "imitates recorded beams"),
    "random": ("random", "drawn from the query's pool, each as likely"),
    "image_similarity": ("image similarity", "the demonstrations with the most similar images"),
    "question_similarity": ("question similarity", "those with the most similar questions"),
    "similarity": ("similarity of both", "those with the most similar images and questions together"),
    "part_similarity": (
        "similarity by parts",
        "for each part of the question in turn the demonstration that answers it with the most similar image",
    ),
    "careful_rule": (
        "careful-annotator rule",
        "similarity by parts among demonstrations of annotators that are known, from outside, to be careful",
    ),
    "vote": (
        "vote without a model",
        "the answer of most of the five most similar demonstrations of each part; the same for every number of shots",
    ),
    "best_recorded": (
        "best recorded beam",
        "of the recorded sequences the one that raises the right answer's probability most, so it looks at the answer",
    ),
    "oracle": (
        "oracle",
        "right wherever any recorded sequence of this length is right; beam search looks at the answer to find them",
    ),
    "shuffled_recorded": ("shuffled, recorded groups", "GRPO on recorded groups, rewards permuted inside each"),
    "shuffled_live": ("shuffled, live draws", "GRPO on live draws, rewards permuted inside each group"),
    "hidden_sft": ("SFT, {hidden} hidden", "SFT on embeddings without the {hidden}"),
    "hidden_rce": ("RCE, {hidden} hidden", "RCE on embeddings without the {hidden}"),
    "hidden_live": ("GRPO, {hidden} hidden", "GRPO on live draws, on embeddings without the {hidden}"),
}
KINDS = {"learned": LEARNED, "simple way": SIMPLE, "looks at the answer": UPPER, "control": CONTROLS}
TERMS = {
    "accuracy": "share of held-out queries answered right with the demonstrations that a policy chose",
    "shots": "how many demonstrations are shown; selectors are trained for one number and asked for others too",
    "brackets": "95% bootstrap interval over the test queries, and over the seeds where there are several; that of a "
    "difference is paired: both policies on the same queries, seed by seed",
    "points": "hundredths of accuracy",
    "decision": "median time that one choice takes, for one query, its pool encoded in it, on one thread",
}


JUDGED_BY = {
    "recorded": "No scorer was at hand: every policy was given the recorded sequence that it prefers, some of them "
    "perhaps found by looking at the answer. This compares policies; it is not what they would reach.",
    "best_beam": "Neither a scorer nor any right answer was at hand: right means here that of the recorded sequences "
    "of a query a policy prefers the one with the highest score. This compares policies; it says nothing of answers.",
}


def verdict(results: Mapping[str, Any]) -> list[str]:
    """What the run showed, in plain sentences, at the shots that were trained, and one on the others."""
    found, at = rows_at(results, shown_at(results)), differences_at(results, shown_at(results))
    form = form_of(results)
    sentences = [JUDGED_BY[results["judged_by"]]] if results.get("judged_by") in JUDGED_BY else []
    if form is None:
        simple = [name for name in SIMPLE if name in found]
        best = max(simple, key=lambda name: float(found[name]["accuracy"]), default=None)
        words = "" if best is None else f" The best simple way is {with_accuracy(found[best], results)}."
        return [*sentences, f"No learned policy was judged.{words}"]
    queries = found[form].get("queries") or results["test_queries"]
    sentences.append(
        f"At {shots_words(shown_at(results))} {policy_words(form, results)} gets {found[form]['accuracy']:.1%} of "
        f"{queries:,} held-out queries right{span(found[form].get('accuracy_ci95'), '.1%')}."
    )
    for name in dict.fromkeys((form, *LEARNED)):
        clauses = [_gain(at[name, other], results) for other in ("rce", "sft") if (name, other) in at]
        if clauses:
            sentences.append(f"{policy_words(name, results)} {'; it '.join(clauses)}.")
    sentences += _on_epochs(results)
    sentences += _against_simple(form, found, at, results)
    sentences += _on_controls(form, at, results)
    votes = {row["policy"]: row for row in results.get("votes", []) if row["shots"] == shown_at(results)}
    if form in votes:
        sentences.append(
            f"Without the model, the majority of the demonstrations that {policy_words(form, results)} chose is right "
            f"for {votes[form]['accuracy']:.1%}{span(votes[form].get('accuracy_ci95'), '.1%')}."
        )
    more = [
        f"{rows_at(results, shots)[form]['accuracy']:.3f} at {shots}"
        for shots in results["shots"]
        if shots != results["trained_shots"] and form in rows_at(results, shots)
    ]
    if more:
        sentences.append(
            f"Trained at {shots_words(results['trained_shots'])} alone, {policy_words(form, results)} has "
            f"{listed(more)}."
        )
    return sentences


def _on_epochs(results: Mapping[str, Any]) -> list[str]:
    """Trainings that changed nothing: the start was the best on validation, and goes on."""
    idle = {name: epochs.count(0) for name, epochs in results.get("epochs", {}).items() if name in LEARNED}
    return [
        f"No epoch of {policy_words(name, results)}{of_last_round(name)} was better on validation than its start in "
        f"{count} of {len(results['seeds'])} seeds: there it is its start."
        for name, count in idle.items()
        if count
    ]


def of_last_round(name: str) -> str:
    """Of which epochs results speak where a policy was trained in rounds: the last one starts from the one before."""
    return " of its last round" if name == "grpo_rounds" else ""


def _gain(row: Row, results: Mapping[str, Any]) -> str:
    """What a policy adds to another, without naming it."""
    other, gap, interval_ = policy_words(row["against"], results), points(row["difference"]), span(row["ci95"])
    if sign(row) == 0:
        return f"is not shown to differ from {other}: {gap} points{interval_}"
    size = points(abs(row["difference"]), "")
    return (
        f"adds {size} points to {other}{interval_}"
        if sign(row) > 0
        else f"is {size} points worse than {other}{interval_}"
    )


def _against_simple(
    form: str, found: Mapping[str, Row], at: Mapping[tuple[str, str], Row], results: Mapping[str, Any]
) -> list[str]:
    """Whether a simple way wins."""
    rivals = sorted((n for n in SIMPLE if (form, n) in at), key=lambda n: -float(found[n]["accuracy"]))
    if not rivals:
        return []
    ways = f"the {len(rivals)} simple ways"
    ours, best = policy_words(form, results), with_accuracy(found[rivals[0]], results)
    difference = at[form, rivals[0]]
    beaten = [name for name in rivals if sign(at[form, name]) > 0]
    winners = [name for name in rivals if sign(at[form, name]) < 0]
    if winners:
        better = "; ".join(
            f"{with_accuracy(found[n], results)}, by {points(-at[form, n]['difference'], '')} points" for n in winners
        )
        return [f"{len(winners)} of {ways} did better than {ours}: {better}."]
    gap = f"{points(difference['difference'])} points{span(difference['ci95'])}"
    if len(beaten) == len(rivals):
        return [f"{ours} beats all of {ways}; over the strongest, {best}, it has {gap}."]
    open_ = listed([with_accuracy(found[n], results) for n in rivals if n not in beaten])
    return [f"It is not shown that {ours} beats {open_}; over the strongest of {ways} it has {gap}."]


def _on_controls(form: str, at: Mapping[tuple[str, str], Row], results: Mapping[str, Any]) -> list[str]:
    """Whether the controls behave as they should."""
    sentences = []
    for control in CONTROLS[:2]:
        row, start = at.get((control, "sft")), at.get((control, "rce"))
        if row is None:
            continue
        group = "recorded groups" if control == "shuffled_recorded" else "live draws"
        words = f"Control: shuffled rewards on {group} bring {points(row['difference'])} points to SFT"
        words += span(row["ci95"])
        if sign(row) <= 0:
            words += ": no gain, as it should be."
        elif start is not None and sign(start) <= 0:
            words += f", but {points(start['difference'])} to RCE, where it starts: no gain, as it should be."
        else:
            words += ": a gain that should not be, so something other than the reward is at work."
        sentences.append(words)
    hidden, real = at.get(("hidden_live", "hidden_sft")), at.get((form, "sft"))
    if hidden is not None and real is not None:
        what, gain = hidden_words(results), f"{points(hidden['difference'])} points over SFT{span(hidden['ci95'])}"
        words = f"Control: with the {what} hidden, GRPO has {gain}; with it, {points(real['difference'])}"
        if sign(real) <= 0:
            words += "; there was no gain that could vanish."
        elif sign(hidden) <= 0:
            words += ": the gain vanishes, as it should where it comes from there."
        elif hidden["ci95"][1] < real["ci95"][0]:
            words += ": the gain shrinks, but part of it comes from elsewhere."
        else:
            words += f": the gain does not vanish, so it is not shown to come from the {what}."
        sentences.append(words)
    return sentences


# -- words and look-ups -----------------------------------------------------------------------------------------------


def rows_at(results: Mapping[str, Any], shots: int) -> dict[str, Row]:
    return {row["policy"]: row for row in results["rows"] if row["shots"] == shots}


def differences_at(results: Mapping[str, Any], shots: int) -> dict[tuple[str, str], Row]:
    return {(r["policy"], r["against"]): r for r in results.get("differences", []) if r["shots"] == shots}


def names_of(results: Mapping[str, Any]) -> set[str]:
    return {row["policy"] for row in [*results["rows"], *results.get("controls", [])]}


def form_of(results: Mapping[str, Any]) -> str | None:
    """The policy that stands for the run: the one that was best on validation, whose checkpoint is kept; where that is
    not known the furthest trained, and None where nothing was trained."""
    found = rows_at(results, shown_at(results))
    return next((name for name in (results.get("best_policy"), *LEARNED) if name in found), None)


def ranked(results: Mapping[str, Any], rows: str = "rows") -> list[str]:
    """Policies by accuracy where sentences look; those not judged there last."""
    first = {row["policy"]: -1.0 for row in results.get(rows, [])}
    first |= {r["policy"]: r["accuracy"] for r in results.get(rows, []) if r["shots"] == shown_at(results)}
    return sorted(first, key=lambda policy: -first[policy])


def hidden_words(results: Mapping[str, Any]) -> str:
    return listed(results.get("hidden") or ["information"])


def policy_words(policy: str, results: Mapping[str, Any]) -> str:
    """A policy of these results in plain words."""
    words = WORDS[policy][0] if policy in WORDS else policy.replace("_", " ")
    return words.format(hidden=hidden_words(results))


def with_accuracy(row: Row, results: Mapping[str, Any]) -> str:
    return f"{policy_words(row['policy'], results)} ({row['accuracy']:.3f})"


def with_interval(row: Row) -> str:
    return number(row.get("accuracy"), ".3f") + interval(row.get("accuracy_ci95"), ".3f")


def sign(row: Row) -> int:
    """1 or −1 where the interval is above or below 0, else 0."""
    low, high = row["ci95"]
    return int(low > 0) - int(high < 0)


def shots_words(count: int) -> str:
    return f"{count} shot{'s' * (count > 1)}"


def points(share: float, sign: str = "+") -> str:
    """`sign` is "+", or "" to write it where it is negative only."""
    return f"{100 * share:{sign}z.1f}"


def span(ends: Sequence[float] | None, how: str = "") -> str:
    """An interval in a sentence: of shares, or of points."""
    if not ends:
        return ""
    low, high = (f"{end:{how}}" if how else points(end, "") for end in ends)
    return f" (95% interval {low} to {high})"


def listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
