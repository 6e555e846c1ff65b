"""What a run shows, the answer first: which sentences are said of it, with which numbers."""

from __future__ import annotations

import itertools
import math
from collections import Counter

from knobwise.common.words import format_number, is_known, join_words, points, quantity
from knobwise.envs.tables.measured_decisions import FEWEST_MEASURED
from knobwise.experiments.evidence.results import (
    baselines,
    differences_at,
    guard_by_budget,
    kept_before_grpo,
    not_known,
    rank_rows,
    rows_at,
    unit_of,
    value_of,
)
from knobwise.experiments.evidence.schema import (
    Attainable,
    DifferenceRow,
    PolicyRow,
    PromiseFacts,
    RunResults,
)
from knobwise.experiments.evidence.statistics import sign_of
from knobwise.experiments.evidence.task import DEMONSTRATIONS, GRPO, Row, shown_at, task_of
from knobwise.experiments.report.sentences import Sentence, write_sentences
from knobwise.experiments.report.words import (
    LEARNED,
    ORACLE,
    condition_words,
    difference_words,
    in_seeds,
    policy_name,
    reward_words,
    shots_words,
    span,
    with_score,
)


def verdict(results: RunResults) -> list[str]:
    """Say what the run shows, the most important first."""
    return write_sentences(shown_by_run(results), unit_of(results))


def shown_by_run(results: RunResults) -> list[Sentence]:
    """Return the sentences of `verdict`."""
    task = task_of(results)
    if task.name == DEMONSTRATIONS.name:
        return _of_selectors(results)
    # a run may judge baselines alone
    learned = rows_at(results, None).get(LEARNED)
    if learned is None:
        others = [row for row in rank_rows(results) if row["policy"] != ORACLE]
        best = with_score(others[0], task.ranked_by) if others else ""
        return [Sentence("no_policy", best=Sentence("best_policy", policy=best) if others else "")]
    if unknown := _on_unknown(results, learned):
        return [*unknown, *_on_sample(results), *on_training(results), *_on_guard(results)]
    lines = [_answer(results, learned), *_on_promise(results)]
    lines += [*_on_estimates(results, learned), *_on_sample(results)]
    if task.equal_latency:
        lines += [_at_tight_budgets(results), *_on_spending(results)]
    if estimate := results.get("attainable"):
        share: Sentence | str = ""
        if is_known(learned.get("attained")):
            share = Sentence("share_attained", share=format_number(learned["attained"], ".0%"))
        lines.append(Sentence("attained", learnable=learnable(estimate), share=share))
    if "promises" not in results:
        # others promise nothing, so a higher accuracy is no better
        lines += _on_rivals(results, learned)
    lines += _on_time(results, learned)
    return [*lines, *on_training(results), *_on_guard(results)]


# -- controllers -----------------------------------------------------------------------------------


OVER_STATIC = {1: "beats", -1: "loses", 0: "no_gain"}
"""`sign_of` the controller's gain over static → the answer."""


def _answer(results: RunResults, learned: Row) -> Sentence:
    """Say whether the controller is better than the reference, by how much, and how sure that
    is."""
    task = task_of(results)
    low = rows_at(results, None).get(task.low, {})
    value = value_of(learned, task.score)
    against = value_of(low, task.score)
    gain = learned.get(task.compared[0], value - against)
    ci95 = learned.get(f"{task.compared[0]}_ci95")
    sign = sign_of(ci95 or learned.get("gap_closed_ci95"))
    score = Sentence(
        "scores",
        score=task.score,
        value=format_number(value, ".3f"),
        against=format_number(against, ".3f"),
    )
    if task.equal_latency:
        score = Sentence("score_at_equal_latency", score=task.score)
    closed: Sentence | str = ""
    if is_known(learned.get("gap_closed")):
        closed = Sentence("gap_closed", share=format_number(learned["gap_closed"], ".0%"))
    # an interval without width says that there is no difference at all
    wide = ci95 is None or ci95[0] < ci95[1]
    too_few: Sentence | str = ""
    if not sign and wide and is_known(results.get("test_samples")):
        more: Sentence | str = ""
        # mean budgets have no folds, and there are none after the training
        trained = "ended_at" in results.get("training", {})
        if trained and "split_seeds" not in results and not task.equal_latency:
            more = Sentence("more_by_folds")
        too_few = Sentence("too_few_to_tell", samples=f"{results['test_samples']:,}", more=more)
    return Sentence(
        OVER_STATIC[sign],
        static=_static(results),
        gain=points(gain),
        ci95=span(ci95),
        score=score,
        closed=closed,
        too_few=too_few,
    )


def _on_unknown(results: RunResults, learned: PolicyRow) -> list[Sentence]:
    """Say why nothing is known of the controller, of what it is compared with, or of what it would
    gain, where too few of their decisions were measured; [] where that is known."""
    low = rows_at(results, None).get(task_of(results).low, {})
    rows = {"the controller": learned, _static(results): low}
    counts = [
        f"{row['measured_decisions']:,} of {row['decisions']:,} decisions of {name}"
        for name, row in rows.items()
        if not_known(row)
    ]
    if not counts:
        return []
    also: Sentence | str = ""
    known = [row for row in (learned, low) if row and not not_known(row)]
    if known:
        also = Sentence("still_known", policy=with_score(known[0], task_of(results).score))
    filled = {"counts": join_words(counts), "fewest": FEWEST_MEASURED, "also": also}
    return [Sentence("not_known_gain", static=_static(results), **filled)]


def _static(results: RunResults) -> str:
    """Name what the controller is compared with, and falls back to, for a sentence."""
    task = task_of(results)
    return f"{'the ' * task.equal_latency}{policy_name(task.low)}"


def _on_estimates(results: RunResults, learned: Row) -> list[Sentence]:
    """Say how much was measured of what the controller chooses, where that is not all."""
    cells = learned.get("effective_cells")
    samples = results.get("test_samples")
    if not is_known(cells) or cells > 0.99 * results["test_samples"]:
        return []
    complete = Sentence("complete") if cells < results["test_samples"] / 2 else ""
    return [
        Sentence(
            "estimated",
            cells=format_number(cells, ".0f"),
            samples=f"{samples:,}",
            complete=complete,
        )
    ]


SAMPLED = {"test": "judged_on", "experts": "fitted_on"}
"""What only a sample of a large profile is used for."""


def _on_sample(results: RunResults) -> list[Sentence]:
    """Say for what only a sample of a large profile was used."""
    parts = []
    for name, (used, total) in results.get("sampled", {}).items():
        parts.append(str(Sentence(SAMPLED[name], used=f"{used:,}", total=f"{total:,}")))
    return [Sentence("sampled", parts=", ".join(parts))] if parts else []


def _at_tight_budgets(results: RunResults) -> Sentence:
    """Say what is gained over the best single configuration where time is short."""
    task = task_of(results)
    rows = [task.row(results, LEARNED, budget) for budget in task.conditions(results)[:2]]
    return Sentence(
        "at_tight_budgets",
        gains=join_words([points(row.get("over_best_single")) for row in rows]),
        latencies=join_words([quantity(row["latency_ms_mean"], unit_of(results)) for row in rows]),
    )


def _on_spending(results: RunResults) -> list[Sentence]:
    """Say at which mean budgets the controller spent more, by more than chance."""
    task = task_of(results)
    unit = unit_of(results)
    above = []
    for budget in task.conditions(results):
        row = task.row(results, LEARNED, budget)
        ci95 = row.get("latency_ms_mean_ci95")
        if ci95 and ci95[0] > budget:
            spent = Sentence(
                "spent",
                latency=quantity(row["latency_ms_mean"], unit),
                ci95=span(ci95, ".3g"),
                budget=quantity(budget, unit),
            )
            above.append(str(spent))
    return [Sentence("overspends", budgets=join_words(above))] if above else []


def learnable(estimate: Attainable) -> Sentence:
    """Say what looks predictable from the features, `attainable` in results; without a full
    stop."""
    filled = {"gain": points(estimate["gain"]), "ci95": span(estimate["gain_ci95"])}
    if sign_of(estimate["gain_ci95"]) > 0:
        return Sentence("learnable", **filled)
    return Sentence("perhaps_learnable", **filled, needed=_needed(estimate))


MOST_NEEDED = 20
"""Where so many times the samples would be needed, the gain is as good as none."""


def _needed(estimate: Attainable) -> Sentence | str:
    """Say how many samples would tell a gain of this size from zero, since an interval shrinks with
    their root; "" where no number of them may."""
    gain = estimate["gain"]
    ratio = (1 - estimate["gain_ci95"][0] / gain) ** 2 if gain > 0 else math.inf
    if not ratio <= MOST_NEEDED:
        return ""
    needed = ratio * estimate["samples"]
    # up to two digits
    digit = 10.0 ** math.floor(math.log10(needed) - 1)
    samples = digit * math.ceil(needed / digit)
    return Sentence("needed_to_tell", samples=f"{samples:,.0f}")


def _on_rivals(results: RunResults, learned: Row) -> list[Sentence]:
    """Say how many baselines have a higher score than the controller, and which is the best."""
    score = task_of(results).ranked_by
    means = rows_at(results, None)
    rivals = [means[name] for name in baselines(results)]
    if not rivals:
        return []
    # higher by more than the last digit that is printed: a tie is not better
    gaps = [value_of(row, score) - value_of(learned, score) for row in rivals]
    # what is not known is −∞
    better = sum(round(gap, 3) > 0 for gap in gaps if math.isfinite(gap))
    return [
        Sentence(
            "rivals",
            better=better or "None",
            count=len(rivals),
            verb="scores" if better < 2 else "score",
            best=with_score(rivals[0], score),
        )
    ]


def _on_time(results: RunResults, learned: Row) -> list[Sentence]:
    """Say how often the controller is on time, where nothing is promised about that."""
    promised = "promises" in results or results.get("live", {}).get("promises")
    if promised or not is_known(learned.get("satisfaction_feasible")):
        return []
    share = format_number(learned["satisfaction_feasible"], ".1%")
    too_short: Sentence | str = ""
    # where it is printed as 0 there is nothing to say
    if is_known(infeasible := learned.get("infeasible")) and round(infeasible, 3):
        too_short = Sentence("too_short", share=format_number(infeasible, ".1%"))
    return [Sentence("on_time", share=share, too_short=too_short)]


PROMISES = {
    "promised": ("promise", "requests"),
    "promise_goes_on": (),
    "not_promised": ("bound", "too_few"),
    "promise_broken": (),
}
"""Sentences on a promise → what they are filled with, beside budgets."""


def _on_promise(results: RunResults) -> list[Sentence]:
    """Say at which budgets a share on time is promised, where it is not, and where test samples
    contradict it."""
    if "promises" not in results:
        return []
    promised = [row for row in results["promises"] if row["policy"] == LEARNED]
    if not promised:
        return [Sentence("promised_elsewhere")]
    promise = f"{100 * promised[0]['promise']:g}%"
    requests = min(row["held_out_requests"] for row in promised)
    needed = promised[0]["requests_needed"]
    # budget → how many of its seeds and splits keep the promise, and break it
    budgets: dict[str, list[PromiseFacts]] = {}
    for row in promised:
        budgets.setdefault(quantity(row["budget_ms"], unit_of(results)), []).append(row)
    places: dict[str, list[str]] = {name: [] for name in PROMISES}
    for budget, rows in budgets.items():
        counts = Counter(promise_at(row) for row in rows)
        counts["promise_broken"] = sum(row["broken"] for row in rows)
        for name, count in counts.items():
            if count:
                of_all = f" ({count} of {len(rows)} trainings)" * (count < len(rows))
                places[name].append(f"{budget}{of_all}")
    too_few: Sentence | str = ""
    if requests < needed:
        too_few = Sentence("too_few_to_promise", promise=promise, needed=f"{needed:,}")
    # a promise up to this would be made at each budget
    unkept = [row["held_out_bound"] for row in promised if promise_at(row) == "not_promised"]
    bound = min(unkept, default=0.0)
    filled = {
        "promise": promise,
        "requests": f"{requests:,}",
        "bound": format_number(bound, ".1%"),
        "too_few": too_few,
    }
    return [
        Sentence(name, budgets=join_words(where), **{key: filled[key] for key in PROMISES[name]})
        for name, where in places.items()
        if where
    ]


def promise_at(row: PromiseFacts) -> str:
    """Return the sentence that says what is promised at a budget."""
    if row["kept"]:
        return "promised"
    goes_on = row.get("rule_ms", row["budget_ms"]) < row["budget_ms"]
    return "promise_goes_on" if goes_on else "not_promised"


def _on_guard(results: RunResults) -> list[Sentence]:
    """Say where the guard fell back; of budgets that were not judged, nothing."""
    judged = task_of(results).conditions(results)
    by_budget = [
        seeds
        for seeds in guard_by_budget(results)
        if any(math.isclose(seeds[0]["budget_ms"], budget, rel_tol=1e-4) for budget in judged)
    ]
    cases = list(itertools.chain(*by_budget))
    fell_back = [row for row in cases if not row["deployed"]]
    if not fell_back:
        return []
    # earlier versions judged whatever was measured
    unknown = [row for row in fell_back if row.get("gain", 0.0) is None]
    filled = {
        "static": _static(results),
        "cases": f"{len(cases):,}",
        "pairs": "seed–budget pairs" if len(results["guard"]) > 1 else "budgets",
    }
    lines = []
    if count := len(fell_back) - len(unknown):
        why = Sentence("no_price") if task_of(results).equal_latency else ""
        lines.append(Sentence("fell_back", count=f"{count:,}", why=why, **filled))
    if unknown:
        of_static = [row.get("utility_static", row.get("accuracy_static_mix")) for row in unknown]
        too: Sentence | str = Sentence("static_unknown", static=_static(results))
        if all(map(is_known, of_static)):
            too = ""
        lines.append(Sentence("fell_back_unknown", count=f"{len(unknown):,}", too=too, **filled))
    return lines


# -- training --------------------------------------------------------------------------------------


CHANGED = {1: "raised", -1: "lowered", 0: "changed_nothing"}
"""`sign_of` the gain on test samples in `results["grpo_gain"]` → what it shows of a score."""
GAINED_ON = {"test": "gained_on_test", "held_out": "gained_on_held_out"}
"""Key of a gain in `results["grpo_gain"]` → how it is said what it was measured on."""

GAIN_WORDS = {"utility": difference_words, "reward": reward_words}
"""What training was to raise → a difference of it in words."""


def on_training(results: RunResults) -> list[Sentence]:
    """Say what GRPO or PPO added to the deployed policy, as far as it is known, on the same
    samples; where training stopped early; and whether the weights from before it are kept."""
    training = results.get("training") or {}
    method = training.get("method", "GRPO")
    gain: Row = results.get("grpo_gain") or {}
    gains: dict[str, DifferenceRow] = {}
    for key, measured_on in GAINED_ON.items():
        if key in gain:
            gains[measured_on] = {"difference": gain[key], "ci95": gain[f"{key}_ci95"]}
    lines = []
    score = task_of(results).judged_by
    words = GAIN_WORDS[score]
    if "test" in gain:
        changed = CHANGED[sign_of(gain["test_ci95"])]
        parts = [str(Sentence(name, gain=words(row))) for name, row in gains.items()]
        lines.append(Sentence(changed, method=method, score=score, gains=", ".join(parts)))
    elif gains:
        # the best of several evaluations less the first: no sign of it shows anything
        (row,) = gains.values()
        lines.append(Sentence("optimistic", method=method, score=score, gain=words(row)))
    total = training.get("warmup_iterations", 0) + training.get("iterations", 0)
    ended = training.get("ended_at", [])
    stopped = [f"{iteration:,}" for iteration in ended if iteration < total]
    if stopped:
        lines.append(
            Sentence(
                "stopped_early",
                seeds=in_seeds(len(stopped), len(ended)),
                iterations=join_words(stopped),
                total=f"{total:,}",
                patience=f"{training['patience']:,}",
            )
        )
    if early := kept_before_grpo(results):
        seeds = in_seeds(early, len(results.get("chosen") or ()))
        lines.append(Sentence("start_kept", method=method, seeds=seeds))
    return lines


# -- selectors -------------------------------------------------------------------------------------

JUDGED_BY = {"recorded": "judged_by_recorded", "best_beam": "judged_by_best_beam"}
"""How policies were judged, if not by a scorer → a warning."""
FEW_QUERIES = 100
"""With fewer test queries an interval is 20 points wide or more."""
COMPARED = {1: "better", -1: "worse", 0: "no_difference"}
"""`sign_of` a difference → what it shows of two."""


def _of_selectors(results: RunResults) -> list[Sentence]:
    """Say what the policy answers, what it gains over others, and whether controls gain nothing."""
    shots = shown_at(results)
    policy = DEMONSTRATIONS.main_policy(results)
    rows = rows_at(results, shots)
    limits = []
    if results.get("judged_by") in JUDGED_BY:
        limits.append(Sentence(JUDGED_BY[results["judged_by"]]))
    simple = [with_score(rows[name], "accuracy") for name in baselines(results)[:1]]
    if policy not in rows:
        best = Sentence("best_baseline", policy=simple[0]) if simple else ""
        return [Sentence("no_policy", best=best), *limits]
    # (policy, against) → the paired difference
    at = differences_at(results, shots)
    gaps = [at[policy, other] for other in baselines(results) if (policy, other) in at]
    gained: Sentence | str = ""
    if gaps:
        gain = difference_words(gaps[0])
        gained = Sentence("over_best_baseline", gain=gain, baseline=simple[0])
    lines = [_answered(results, rows[policy], shots, gained), *limits]
    if gaps:
        signs = [sign_of(gap["ci95"]) for gap in gaps]
        lines.append(
            Sentence("of_baselines", count=len(gaps), better=signs.count(1), worse=signs.count(-1))
        )
    # each stage against those before it, controls too
    stages = {policy, *DEMONSTRATIONS.trained, *DEMONSTRATIONS.controls}
    for (name, other), gap in at.items():
        if name in stages and other in ("sft", "rce", "hidden_sft", "hidden_rce"):
            lines += _stage(results, name, other, gap)
    for name, epochs in results.get("epochs", {}).items():
        if 0 in epochs:
            seeds = in_seeds(epochs.count(0), len(epochs))
            stage = policy_name(name, results)
            lines.append(Sentence("stage_kept_start", policy=stage, seeds=seeds))
    return lines + _left_out(results)


def _stage(results: RunResults, name: str, other: str, gap: DifferenceRow) -> list[Sentence]:
    """Say what a stage gains over an earlier one, and whether GRPO moved the policy at all."""
    policy = policy_name(name, results)
    compared = Sentence(
        COMPARED[sign_of(gap["ci95"])],
        policy=policy,
        against=policy_name(other, results),
        gain=difference_words(gap),
        more=Sentence("control") if name in DEMONSTRATIONS.controls else "",
    )
    kept = 0 in results.get("epochs", {}).get(name, [])
    if name in GRPO and other == "rce" and not (any(gap["ci95"] or [1]) or kept):
        return [compared, Sentence("hardly_moved", policy=policy)]
    return [compared]


def _answered(results: RunResults, row: PolicyRow, shots: int, gained: Sentence | str) -> Sentence:
    """Say how many queries a policy answers, and what that gains over a baseline."""
    few = Sentence("few_queries") if results["test_queries"] < FEW_QUERIES else ""
    return Sentence(
        "ranks_first" if results.get("judged_by") == "best_beam" else "answers",
        shots=shots_words(shots),
        policy=policy_name(row["policy"], results),
        share=format_number(row["accuracy"], ".1%"),
        ci95=span(row.get("accuracy_ci95"), ".1%"),
        queries=f"{row.get('queries') or results['test_queries']:,}",
        few=few,
        gained=gained,
    )


def _left_out(results: RunResults) -> list[Sentence]:
    """Say at which numbers of shots some queries are left out, the same for all policies."""
    fewer = []
    for shots in results["shots"]:
        rows = rows_at(results, shots).values()
        judged = min(row.get("queries") or results["test_queries"] for row in rows)
        if judged < results["test_queries"]:
            part = Sentence(
                "left_out_at", queries=f"{judged:,}", shots=condition_words(results, shots)
            )
            fewer.append(str(part))
    if not fewer:
        return []
    return [Sentence("left_out", queries=join_words(fewer), total=f"{results['test_queries']:,}")]
