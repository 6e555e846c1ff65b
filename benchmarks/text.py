"""What the text of a request adds to a profile's own features.

On three splits of the built-in profile and of SmolLM2's, a policy is trained on the profile's own
features, on the text of the questions alone, and on both: a teacher is trained and imitated as in
`benchmarks/sparse.py`, without GRPO. Each policy is judged without its guard on test samples, at
the profile's default budgets; decisions cost nothing. Intervals are bootstraps over test samples.

    python -m knobwise.testbeds.smollm.questions --out questions.csv
    python benchmarks/text.py questions.csv
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import torch
from sparse import SPLITS, TUNED, Imitation, judged
from sparse_tables import Row, rows_of, words_of

from knobwise.agents.evaluation.baselines import fit_static
from knobwise.agents.evaluation.policy import Array
from knobwise.agents.evaluation.texts import with_texts_encoded
from knobwise.envs.bandit.budgets import default_budgets
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.testbeds.profiles import builtin_profile, smollm_profile

RESAMPLES = 4000
SAMPLES = Path(__file__).parents[1] / "testbeds/data/builtin/samples.parquet"


def with_questions(table: ProfileTable, ids: pl.Series, questions: pl.Series) -> ProfileTable:
    """Return a table with the question of each sample as its text."""
    question_of = dict(zip(ids.cast(pl.String), questions, strict=True))
    texts = [question_of[sample_id] for sample_id in table.sample_ids]
    return replace(table, texts={"question": texts})


def utilities(table: ProfileTable, seed: int) -> tuple[Array, dict[str, Array]]:
    """Return the test rows of a split, int64 [n], and the utility of each policy on them, [n]."""
    split = table.split(seed=seed)
    budgets_ms = default_budgets(table)
    tables = {
        "own": replace(table, texts={}),
        "text": with_texts_encoded(replace(table, features={}), split),
        "both": with_texts_encoded(table, split),
    }
    values = {"static": judged(fit_static(table, split.fitted), table, split.test, budgets_ms)}
    for name, part in tables.items():
        policy = Imitation(part, split, budgets_ms, TUNED["imitation"]).agent.decider
        values[name] = judged(policy, part, split.test, budgets_ms)
    return split.test.numpy(), {name: value.double().numpy() for name, value in values.items()}


def difference(runs: list[tuple[Array, dict[str, Array]]], way: str, other: str) -> Array:
    """Return the mean difference of two policies, first in truth, then in each resample of the
    samples: a sample that several splits test is drawn with all of its results."""
    count = 1 + max(int(rows.max()) for rows, _ in runs)
    sums = np.zeros((2, count))
    for rows, values in runs:
        np.add.at(sums[0], rows, values[way] - values[other])
        np.add.at(sums[1], rows, 1)
    drawn = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), RESAMPLES)
    weights = np.concatenate([np.ones((1, count)), drawn])
    means: Array = (weights @ sums[0]) / (weights @ sums[1])
    return means


def table_of(profiles: dict[str, ProfileTable]) -> Iterator[Row]:
    """Yield utilities, and differences in points."""
    ways = ("static", "own", "text", "both")
    pairs = (("text", "static"), ("text", "own"), ("both", "own"))
    yield ("profile", *ways, *(f"{way} − {other}" for way, other in pairs))
    for name, table in profiles.items():
        runs = [utilities(table, seed) for seed in range(SPLITS)]
        means = [np.mean([values[way].mean() for _, values in runs]) for way in ways]
        gains = [words_of(difference(runs, *pair)) for pair in pairs]
        yield (name, *(f"{mean:.3f}" for mean in means), *gains)


if __name__ == "__main__":
    torch.set_num_threads(1)
    builtin = pl.read_parquet(SAMPLES)
    smollm = pl.read_csv(sys.argv[1])
    PROFILES = {
        "built-in": with_questions(builtin_profile(), builtin["sample_id"], builtin["question"]),
        "SmolLM2": with_questions(smollm_profile(), smollm["id"], smollm["question"]),
    }
    print(rows_of([*table_of(PROFILES)]))
