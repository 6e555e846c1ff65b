"""Demonstrations: decisions.parquet of a run, and its summary results.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl
from torch import Tensor

from knobwise.agents.selector.baselines import SIMPLE
from knobwise.agents.selector.evaluation import Decided
from knobwise.envs.demonstrations.beam_table import BeamTable
from knobwise.experiments.results.controllers import profile_of
from knobwise.experiments.results.decisions import DecisionArrays, decision_rows
from knobwise.experiments.results.problem import CONTROLS, LEARNED, PAIRS, TRAINED, UPPER
from knobwise.experiments.results.statistics import mean_intervals

Rows = list[dict[str, Any]]


def selector_decisions(
    decided: Mapping[str, Mapping[int, Decided]],
    test: BeamTable,
    rows: Tensor,
    seeds: Sequence[int],
) -> pl.DataFrame:
    """The content of `decisions.parquet`. A policy has no rows at a number of shots where nothing
    is known about it.

    Args:
        decided: by policy and number of shots.
        rows: int64 [n], the judged queries of `test`.
        seeds: of the selectors, and of `random`.
    """
    samples = pl.DataFrame({"sample_id": [test.query_ids[row] for row in rows.tolist()]})
    frames = []
    for policy, by_shots in decided.items():
        for shots, outcome in by_shots.items():
            if outcome.correct.isnan().all():
                continue
            drawn = policy == "random" or policy not in (*SIMPLE, *UPPER)
            for number, seed in enumerate(seeds[: len(outcome.correct)] if drawn else [None]):
                columns = {
                    "accuracy": outcome.correct[number],
                    "score": outcome.correct[number],
                    "choice": None
                    if outcome.demonstrations is None
                    else _words(outcome.demonstrations[number]),
                    "vote": None if outcome.vote is None else outcome.vote[number],
                    "decision_us": outcome.decision_us,
                }
                frames.append(decision_rows(policy, seed, samples, [shots], columns))
    return pl.concat(frames)


def _words(demonstrations: Tensor) -> pl.Series:
    """Rows of the bank, int64 [n, T], −1 after the end, joined by blanks; null where nothing is
    shown."""
    words = [
        " ".join(str(row) for row in rows if row >= 0) or None for rows in demonstrations.tolist()
    ]
    return pl.Series(words, dtype=pl.String)


def selector_results(
    decisions: pl.DataFrame,
    table: BeamTable,
    *,
    seeds: Sequence[int],
    trained_shots: int,
    test: BeamTable | None = None,
    judged_by: str = "scorer",
    hidden: Sequence[str] = (),
) -> dict[str, Any]:
    """The content of `results.json` of a selector: means over queries and seeds, and intervals over
    both.

    A query of which something is unknown for some policy is left out for all, at that number of
    shots: every comparison is on the same queries. A policy of which nothing is known at a number
    of shots has no row there.

    Args:
        decisions: of `selector_decisions`; trained policies are compared seed by seed.
        table: the data that the selectors were trained on.
        trained_shots: how many demonstrations they were trained to choose.
        test: the held-out queries with their own bank, where they are not part of `table`.
        judged_by: see `knobwise.experiments.settings.beams.SelectorData`.
        hidden: the blocks of the embeddings that the controls `hidden_…` did not see.
    """
    arrays = DecisionArrays(decisions)
    rows, differences = _demonstration_rows(arrays, "accuracy")
    votes, _ = _demonstration_rows(arrays, "vote")
    return {
        "system": "selector",
        "profile": profile_of(table),
        "split": "test",
        "test_queries": len(arrays.samples),
        **(
            {}
            if test is None
            else {"test_digest": test.digest, "test_candidates": len(test.candidates)}
        ),
        "seeds": list(seeds),
        "shots": sorted({row["shots"] for row in rows}),
        "trained_shots": trained_shots,
        "judged_by": judged_by,
        "hidden": list(hidden),
        "rows": [row for row in rows if row["policy"] not in CONTROLS],
        "differences": differences,
        "controls": [row for row in rows if row["policy"] in CONTROLS],
        **({"votes": votes} if votes else {}),
    }


def _demonstration_rows(arrays: DecisionArrays, column: str) -> tuple[Rows, Rows]:
    """Rows policy by policy, and differences, at every number of shots; `column` holds who was
    right."""
    rows: Rows = []
    differences: Rows = []
    for place in np.argsort(arrays.places):
        shots = int(arrays.places[place])
        some = {policy: arrays.array(policy, column)[..., place] for policy in arrays.policies}
        some = {policy: right for policy, right in some.items() if not np.isnan(right).all()}
        if some:
            common = ~np.isnan(np.concatenate(list(some.values()))).any(0)
        else:
            common = np.zeros(1, dtype=bool)
        if not common.any():
            continue
        known = {policy: right[:, common] for policy, right in some.items()}
        for (policy, right), interval in zip(
            known.items(), mean_intervals(list(known.values())), strict=True
        ):
            row = {
                "policy": policy,
                "shots": shots,
                "accuracy": float(right.mean()),
                "accuracy_ci95": interval,
            }
            times = arrays.array(policy, "decision_us")[..., place]
            timed = column == "accuracy" and not np.isnan(times).all()
            row |= {
                "queries": right.shape[1],
                "decision_us_p50": float(np.nanmean(times)) if timed else None,
            }
            if len(right) > 1:
                row["accuracy_per_seed"] = right.mean(1).tolist()
            rows.append(row)
        differences += _differences(known, shots)
    return sorted(rows, key=lambda row: arrays.policies.index(row["policy"])), differences


def _differences(known: Mapping[str, np.ndarray], shots: int) -> Rows:
    """policy − against, query by query and seed by seed."""
    best = [policy for policy in LEARNED if policy in known][:1]
    variants = [policy for policy in known if policy not in (*TRAINED, *SIMPLE, *UPPER)]
    wanted = [*PAIRS, *((policy, way) for policy in best for way in SIMPLE)]
    wanted += [(policy, other) for policy in variants for other in ("rce", "sft")]
    wanted += [(policy, variants[0]) for policy in variants[1:]]
    pairs = [pair for pair in dict.fromkeys(wanted) if set(pair) <= set(known)]
    gains = [_paired(known, *pair) for pair in pairs]
    return [
        {
            "policy": policy,
            "against": against,
            "shots": shots,
            "difference": float(gain.mean()),
            "ci95": interval,
        }
        for (policy, against), gain, interval in zip(
            pairs, gains, mean_intervals(gains), strict=True
        )
    ]


def _paired(known: Mapping[str, np.ndarray], policy: str, against: str) -> np.ndarray:
    """[S, q] of the seeds that both have; what no seed changes goes with every seed."""
    both = [(name, known[name]) for name in (policy, against)]
    seeds = min(
        (len(right) for name, right in both if len(right) > 1 or name in TRAINED), default=1
    )
    first, second = (np.broadcast_to(right[:seeds], (seeds, right.shape[1])) for _, right in both)
    return first - second
