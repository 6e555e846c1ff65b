"""results.json of a selector: how often answers were right, for each policy and number of shots, and what differs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import polars as pl
import torch
from torch import Tensor

from knobwise.agents.judging.evaluation import mean_ci95
from knobwise.agents.selector.baselines import SIMPLE
from knobwise.envs.demonstrations.beam_table import BeamTable
from knobwise.experiments.results.decisions_file import SELECTOR

if TYPE_CHECKING:
    from knobwise.agents.selector.evaluation import Decided

GRPO = ("grpo_live", "grpo_rounds", "grpo_recorded")
"""The forms of post-training; the first that there is stands for the run."""
LEARNED = (*GRPO, "rce", "sft")
"""What is trained. GRPO starts from RCE where that is used, and RCE from SFT."""
UPPER = ("best_recorded", "oracle")
"""What looks at the answer: no policy, but what the recorded sequences hold."""
CONTROLS = ("shuffled_recorded", "shuffled_live", "hidden_sft", "hidden_rce", "hidden_live")
"""Trained on rewards shuffled inside each group; trained without what makes the difference."""
TRAINED = (*LEARNED, *CONTROLS)
PAIRS = (
    *((form, other) for form in GRPO for other in ("rce", "sft")),
    ("grpo_live", "grpo_rounds"),
    ("rce", "sft"),
    *(("sft", way) for way in ("random", "similarity", "part_similarity")),
    *((control, other) for control in CONTROLS[:2] for other in ("sft", "rce")),
    ("hidden_rce", "hidden_sft"),
    ("hidden_live", "hidden_sft"),
)
"""Policy and what it is compared with; beside these the best form of GRPO is compared with every simple way."""

Correct = Mapping[str, Mapping[int, Tensor]]
"""By policy and number of shots: float [S, Q], 0 or 1, NaN where nothing is known; [1, Q] of what no seed changes."""


def selector_results(
    correct: Correct,
    table: BeamTable,
    *,
    seeds: Sequence[int],
    trained_shots: int,
    test: BeamTable | None = None,
    decision_us: Mapping[str, Mapping[int, float]] | None = None,
    judged_by: str = "scorer",
    hidden: Sequence[str] = (),
) -> dict[str, Any]:
    """The content of `results.json`: means over queries and seeds, and bootstrap intervals over both.

    A query of which something is unknown for some policy is left out for all, at that number of shots: every
    comparison is on the same queries. A policy of which nothing is known at a number of shots has no row there.

    Args:
        correct: what came of every policy. Trained policies have one row a seed, the first of `seeds` where they have
            fewer; they are compared seed by seed.
        table: the data that the selectors were trained on.
        seeds: of the selectors.
        trained_shots: how many demonstrations they were trained to choose.
        test: the held-out queries with their own bank, where they are not part of `table`.
        decision_us: by policy and number of shots, in µs.
        judged_by: see `knobwise.experiments.settings.beams.SelectorData`.
        hidden: the blocks of the embeddings that the controls `hidden_…` did not see.

    Raises:
        ValueError: tensors for more seeds than there are, or for other queries.
    """
    shapes = {values.shape for by_shots in correct.values() for values in by_shots.values()}
    if len({q for _, q in shapes}) != 1 or any(not 1 <= s <= len(seeds) for s, _ in shapes):
        raise ValueError(f"correct has shapes {sorted(shapes)}, expected [S, Q] with S ≤ {len(seeds)} seeds and one Q")
    every = sorted({shots for by_shots in correct.values() for shots in by_shots})
    rows, differences = [], []
    for shots in every:
        known = _known({name: by_shots[shots] for name, by_shots in correct.items() if shots in by_shots})
        rows += _rows(known, shots, decision_us or {})
        differences += _differences(known, shots)
    # policy by policy, in the order given
    rows.sort(key=lambda row: list(correct).index(row["policy"]))
    return {
        "system": "selector",
        "profile": profile_of(table),
        "split": "test",
        "test_queries": next(iter(shapes))[1],
        **({} if test is None else {"test_digest": test.digest, "test_candidates": len(test.candidates)}),
        "seeds": list(seeds),
        "shots": sorted({row["shots"] for row in rows}),
        "trained_shots": trained_shots,
        "judged_by": judged_by,
        "hidden": list(hidden),
        "rows": [row for row in rows if row["policy"] not in CONTROLS],
        "differences": differences,
        "controls": [row for row in rows if row["policy"] in CONTROLS],
    }


def selector_decisions(
    decided: Mapping[str, Mapping[int, Decided]], test: BeamTable, rows: Tensor, seeds: Sequence[int]
) -> pl.DataFrame:
    """The content of `decisions.parquet` (`knobwise.experiments.results.decisions_file.SELECTOR`). A policy of which
    nothing is
    known at a number of shots has no rows there, as in `selector_results`.

    Args:
        decided: by policy and number of shots.
        test: the held-out queries.
        rows: int64 [n], those that were judged.
        seeds: of the selectors, and of `random`.
    """
    queries, frames = [test.query_ids[row] for row in rows.tolist()], []
    for name, by_shots in decided.items():
        for shots, found in by_shots.items():
            if found.correct.isnan().all():
                continue
            drawn = name == "random" or name not in (*SIMPLE, *UPPER)
            for number, seed in enumerate(seeds if drawn else [None]):
                shown = None if found.shown is None else found.shown[number].tolist()
                words = [None] * len(queries) if shown is None else [_words(row) for row in shown]
                correct = [None if math.isnan(value) else value for value in found.correct[number].tolist()]
                columns = {"sample_id": queries, "demonstrations": words, "correct": correct}
                schema = {column: SELECTOR[column] for column in columns}
                frame = pl.DataFrame(columns, schema=schema)
                frames.append(frame.with_columns(policy=pl.lit(name), seed=seed, shots=pl.lit(shots)))
    return pl.concat(frames, how="vertical_relaxed")


def _words(shown: Sequence[int]) -> list[str] | None:
    """Rows of the bank, −1 after the end, as a list of words; None where nothing is shown."""
    return [str(row) for row in shown if row >= 0] or None


def profile_of(table: BeamTable) -> dict[str, Any]:
    """What results say of the beams that were learned from: their name, digest and sizes."""
    sizes = {"samples": table.num_queries, "candidates": len(table.candidates)}
    return {"name": table.name, "digest": table.digest, **sizes}


def shown_at(results: Mapping[str, Any]) -> int:
    """The number of shots that sentences are about: that of training, or the nearest that was judged."""
    return min(results["shots"], key=lambda shots: abs(shots - results["trained_shots"]))


def _known(correct: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """float64 [S, q] of the queries of which every policy knows everything; none of a policy that knows nothing."""
    some = {name: values.double() for name, values in correct.items() if not values.isnan().all()}
    if not some:
        return {}
    common = ~torch.cat(list(some.values())).isnan().any(0)
    return {name: values[:, common] for name, values in some.items()} if common.any() else {}


def _rows(
    known: Mapping[str, Tensor], shots: int, decision_us: Mapping[str, Mapping[int, float]]
) -> list[dict[str, Any]]:
    """One row a policy."""
    rows = []
    for (name, values), interval in zip(known.items(), _intervals(list(known.values())), strict=True):
        row = {"policy": name, "shots": shots, "accuracy": float(values.mean()), "accuracy_ci95": interval}
        row |= {"queries": values.shape[1], "decision_us_p50": decision_us.get(name, {}).get(shots)}
        if len(values) > 1:
            row["accuracy_per_seed"] = values.mean(1).tolist()
        rows.append(row)
    return rows


def _differences(known: Mapping[str, Tensor], shots: int) -> list[dict[str, Any]]:
    """policy − against, query by query and seed by seed."""
    form = next((name for name in LEARNED if name in known), None)
    own = [name for name in known if name not in (*TRAINED, *SIMPLE, *UPPER)]
    pairs = dict.fromkeys(
        [
            *PAIRS,
            *((form, way) for way in SIMPLE if form is not None),
            *((name, other) for name in own for other in ("rce", "sft")),
            *((name, own[0]) for name in own[1:]),
        ]
    )
    pairs = {pair: None for pair in pairs if set(pair) <= set(known)}
    apart = [_paired(known, *pair) for pair in pairs]
    return [
        {"policy": policy, "against": against, "shots": shots, "difference": float(values.mean()), "ci95": interval}
        for (policy, against), values, interval in zip(pairs, apart, _intervals(apart), strict=True)
    ]


def _paired(known: Mapping[str, Tensor], policy: str, against: str) -> Tensor:
    """[S, q] of the seeds that both have; what no seed changes goes with every seed."""
    both = [(name, known[name]) for name in (policy, against)]
    seeds = min((len(values) for name, values in both if len(values) > 1 or name in TRAINED), default=1)
    first, second = (values[:seeds].expand(seeds, -1) for _, values in both)
    return first - second


def _intervals(values: Sequence[Tensor]) -> list[list[float]]:
    """Bootstrap intervals of the means of float [S, q], all from the same draws where S is the same."""
    found: dict[int, list[float]] = {}
    for seeds in {len(one) for one in values}:
        places = [i for i, one in enumerate(values) if len(one) == seeds]
        found |= dict(zip(places, mean_ci95(torch.stack([values[i] for i in places])).tolist(), strict=True))
    return [found[i] for i in range(len(values))]
