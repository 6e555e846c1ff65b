"""The built-in task of the selector: a small in-context learner answers questions about
canvases."""

from __future__ import annotations

import copy
from dataclasses import asdict, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.random import RandomState
from numpy.typing import NDArray
from torch import Tensor

from knobwise.envs.demonstrations.beam_table import BeamTable
from knobwise.profiling.demonstrations.pools import draw_pools
from knobwise.profiling.demonstrations.settings import LearnerTaskConfig, PoolConfig
from knobwise.profiling.demonstrations.tasks import BeamTask, no_beams
from knobwise.testbeds import DATA
from knobwise.testbeds.canvases import canvases
from knobwise.testbeds.canvases.canvases import (
    ANNOTATORS,
    QUESTIONS,
    VARIANTS,
    Bank,
    Queries,
)
from knobwise.testbeds.canvases.learner import WIDTH, Learner
from knobwise.testbeds.canvases.scorer import LearnerScorer

SIZES = {"train": (3300, 12000), "test": (1500, 4000)}
"""Queries and items of the bank, by part. The digits of the test part were held out when the
learner was trained."""
PARTS = tuple(SIZES)
BLOCKS = {
    "image": (0, WIDTH),
    "question": (WIDTH, WIDTH + len(QUESTIONS)),
    "annotator": (WIDTH + len(QUESTIONS), WIDTH + len(QUESTIONS) + ANNOTATORS),
}
"""Columns of the embeddings: what the learner's tower makes of the canvas; which questions are
asked (queries) or answered (candidates), one-hot; who annotated, one-hot (queries: 0)."""
_IMAGE_SCALE = 0.2  # the image's columns then weigh about as much as the others together
# embeddings are multiples of 1/4096: the same on every machine, and so is the table's digest
_STEPS = 4096


def learner_task(config: LearnerTaskConfig, pool: PoolConfig) -> BeamTask:
    """Draw a part of the built-in task, with its own pools or pools drawn by a sampler, without
    beams."""
    queries, bank = draw_part(config)
    table = part_table(config, queries, bank, **no_beams(len(queries)))
    if pool.sampler in (None, "covers"):
        # covers and look-alikes, by another stream than that of queries and bank
        rng = RandomState([config.seed, PARTS.index(config.part), 1])
        rows = canvases.draw_covering_pools(rng, queries, bank, VARIANTS[config.variant])
        table = replace(table, pool=torch.from_numpy(rows))
    else:
        table = replace(table, pool=draw_pools(table, pool))
    options = {"model": "learner", "learner": asdict(config), "pool": asdict(pool)}
    return BeamTask(table, LearnerScorer(builtin_learner(), queries, bank), options)


@cache
def builtin_learner() -> Learner:
    """Load the learner that comes with knobwise."""
    return Learner.load(DATA / "learner.safetensors")


def draw_part(config: LearnerTaskConfig) -> tuple[Queries, Bank]:
    """Draw the queries and the bank of a part."""
    query_count, candidate_count = SIZES[config.part]
    rng = RandomState([config.seed, PARTS.index(config.part)])
    held_out = config.part == "test"
    variant = VARIANTS[config.variant]
    # the bank is drawn first
    bank = canvases.draw_bank(rng, config.candidates or candidate_count, held_out, variant)
    queries = canvases.draw_queries(rng, config.queries or query_count, held_out)
    return queries, bank


def part_table(
    config: LearnerTaskConfig, drawn_queries: Queries, bank: Bank, **beams: Any
) -> BeamTable:
    """Return the table of a part that was drawn, with embeddings and these beams."""
    queries, candidates = embeddings_of(drawn_queries, bank)
    return BeamTable(
        name=f"canvases, {config.variant} annotators, {config.part}",
        query_ids=tuple(f"{config.part}-{i}" for i in range(len(queries))),
        queries=queries,
        candidates=candidates,
        blocks=BLOCKS,
        **beams,
    )


def embeddings_of(queries: Queries, bank: Bank) -> tuple[Tensor, Tensor]:
    """Compute the embeddings of queries [Q, 77] and of the bank's items [M, 77], float32."""
    # in double precision and then rounded, so that every machine gives the same
    tower = copy.deepcopy(builtin_learner().tower).double()

    @torch.no_grad()
    def columns(images: NDArray[np.float32], *others: NDArray[Any]) -> Tensor:
        image = (
            tower(torch.from_numpy(images).double()) * (_IMAGE_SCALE * _STEPS)
        ).round() / _STEPS
        return torch.cat([image, *map(torch.from_numpy, others)], 1).float()

    # one-hot; nobody annotated a query
    questions = np.arange(len(QUESTIONS))
    nobody = np.zeros((len(queries), ANNOTATORS))
    wanted = (queries.questions[:, :, None] == questions).any(1)
    answered = bank.question[:, None] == questions
    annotator = bank.annotator[:, None] == np.arange(ANNOTATORS)
    return columns(queries.images, wanted, nobody), columns(bank.images, answered, annotator)
