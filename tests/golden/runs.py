"""The rows of results.json of small trainings: a controller that a teacher taught, one by GRPO
alone, and a selector.

Trainings are short, so that what processors round otherwise does not grow; rows are compared within
a tolerance.
"""

import json
from pathlib import Path

import numpy as np
import polars as pl
from golden.decisions import rows_of
from golden.tables import number

from knobwise.__main__ import main

SHARED = "seeds=[0] name=run tracking=disabled"
TABLE = f"""
    train profile=table profile.path=t.csv profile.features=[words,kind] budgets_ms=[50,90,160]
    {SHARED} own_cost=false baselines=false policy.guard=false policy.hidden=8
    optimiser.evaluate_every=8 optimiser.contexts=64
"""
TAUGHT = f"""
    {TABLE} runs=taught policy.fold_networks=2 policy.experts=[ridge]
    optimiser.teacher_iterations=40 optimiser.pretrain_iterations=40 optimiser.iterations=8
"""
ALONE = f"{TABLE} runs=alone policy=grpo policy.fold_networks=1 optimiser.iterations=300 optimiser.lr=0.01"
SELECTOR = f"""
    train experiment=selector_seeds runs=selector beams=files beams.path=b.json beams.embeddings=e.npz
    beams.train=0.5 beams.validation=0.2 selector.width=8 selector.heads=2 sft.epochs=1 rce.epochs=2
    grpo.epochs=2 sft.queries=16 rce.queries=16 grpo.queries=16 sft.lr=0.003 rce.lr=0.01 grpo.lr=0.01 {SHARED}
"""
NUMBERS = ("accuracy", "utility", "latency_ms_mean", "satisfaction", "gap_closed")
"""That are compared, with their intervals."""


def values():
    """Rows by run, policy and condition."""
    rows_of("deadline", samples=160).write_csv("t.csv")
    _write_beams()
    made = {}
    for name, words in {"taught": TAUGHT, "alone": ALONE, "selector": SELECTOR}.items():
        assert main(words.split()) == 0
        (path,) = Path(name).glob("*/run/results.json")
        # rows of few samples hardly tell one training from another; what was logged does
        logged = pl.read_csv(path.parent / "metrics.csv", infer_schema_length=None)
        for column in logged.columns:
            if (
                column.startswith(("Train/", "Val/"))
                and (numbers := logged[column].drop_nulls()).len()
            ):
                made[f"{name}: {column}"] = rounded(float(numbers.mean()))
        for row in json.loads(path.read_text())["rows"]:
            condition = row.get("budget_ms", row.get("shots"))
            kept = {
                name: rounded(row[name]) for name in row if name.removesuffix("_ci95") in NUMBERS
            }
            made[f"{name}: {row['policy']} at {condition}"] = kept
    return made


def rounded(value):
    """A number, or an interval, by five digits."""
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return value if value is None else float(f"{value:.5g}")


def _write_beams():
    """Forty queries, each with five sequences of two from twenty candidates."""
    vectors = [[number(i, j, 3) / 48 - 1 for j in range(6)] for i in range(60)]
    np.savez("e.npz", embeddings=np.array(vectors, np.float32))
    records = {}
    for query in range(40):
        pool = [40 + (number(query) + 3 * place) % 20 for place in range(8)]
        candidates = []
        for rank in range(5):
            places = [number(query, rank, 1) % 4, 4 + number(query, rank, 2) % 4]
            chosen = [pool[place] for place in places]
            good = sum(vectors[each][0] * vectors[query][0] > 0 for each in chosen)
            outcome = {"vqa_correct": int(good == 2), "vqa_acc_score": good / 2}
            outcome |= {"vqa_gt_prob": (1 + good) / 4, "beam_score": good / 50 + 0.01 / (1 + rank)}
            method = ("beam", "beam", "sample", "retrieval", "random")[rank]
            candidates.append(
                {"pointer": places, "pointer_global": chosen, "gen_method": method, **outcome}
            )
        question = {"question_id": query, "image_id": query}
        records[query] = {
            "query": question,
            "candidate_pool_ids": pool,
            "pointer_candidates": candidates,
        }
    Path("b.json").write_text(json.dumps(records))
