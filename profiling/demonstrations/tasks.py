"""Tasks that beam data are recorded for: queries, their pools, and the model that answers them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.random import RandomState
from numpy.typing import NDArray
from torch import Tensor

from knobwise.common.errors import InputError
from knobwise.common.imports import imported, instance
from knobwise.envs.demonstrations.beam_files import read_embeddings
from knobwise.envs.demonstrations.beam_table import BeamTable
from knobwise.profiling import DATA
from knobwise.profiling.demonstrations import canvases
from knobwise.profiling.demonstrations.canvases import (
    ANNOTATORS,
    QUESTIONS,
    VARIANTS,
    Bank,
    Queries,
)
from knobwise.profiling.demonstrations.learner import WIDTH, Learner
from knobwise.profiling.demonstrations.pools import Kinds, draw_pools
from knobwise.profiling.demonstrations.scorers import LearnerScorer, Scorer
from knobwise.profiling.demonstrations.settings import (
    SAMPLERS,
    LearnerTaskConfig,
    PoolConfig,
    VLMTaskConfig,
)
from knobwise.profiling.measuring.machine import digests
from knobwise.profiling.measuring.questions import VQAData, read_vqa_data
from knobwise.profiling.smollm import folder
from knobwise.profiling.smollm.questions import QUESTIONS_CSV

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
MEMBERS = ("__call__", "vote")
"""What a scorer of the user's own must have."""
TEXT_COLUMNS = 128
"""Columns of the embeddings that are made of questions."""

Task = tuple[Queries, Bank]


class BeamTask(NamedTuple):
    """A task that sequences are recorded for."""

    table: BeamTable  # with pools, without beams
    scorer: Scorer
    options: dict[str, Any]  # the model and the settings that make the task
    # sha256 of the files that it is read from, where the table does not contain them
    sources: Mapping[str, str] = {}
    # the kinds of questions of queries and bank; None where the items do not name them
    kinds: Kinds | None = None


def learner_task(config: LearnerTaskConfig, pool: PoolConfig) -> BeamTask:
    """Draw a part of the built-in task, with its own pools or pools drawn by a sampler, without
    beams."""
    task = draw_part(config)
    table = part_table(config, task, **no_beams(len(task[0])))
    if pool.sampler in (None, "covers"):
        # covers and look-alikes, by another stream than that of queries and bank
        rng = RandomState([config.seed, PARTS.index(config.part), 1])
        rows = canvases.draw_covering_pools(rng, *task, VARIANTS[config.variant])
        table = replace(table, pool=torch.from_numpy(rows))
    else:
        table = replace(table, pool=draw_pools(table, pool))
    options = {"model": "learner", "learner": asdict(config), "pool": asdict(pool)}
    return BeamTask(table, LearnerScorer(builtin_learner(), *task), options)


def vlm_task(model: str, config: VLMTaskConfig, pool: PoolConfig) -> BeamTask:
    """Load a vision-language model or a language model (a folder, or a name on the Hugging Face
    hub) with data and embeddings from files.

    Raises InputError for settings that are missing or do not fit, files that cannot be read, no
    such model.
    """
    if pool.sampler == "covers":
        raise InputError(
            f"pool.sampler=covers is for model=learner; other models take {', '.join(SAMPLERS)}"
        )
    # the model comes last, since it takes longest
    answerer = read_answerer(model, config)
    data = answerer.data
    queries, candidates, blocks = _read_embeddings(data, config)
    table = BeamTable(
        name=answerer.path.stem,
        query_ids=tuple(item.id for item in data.queries),
        **no_beams(len(queries)),
        queries=queries,
        candidates=candidates,
        query_images=tuple(item.image_id for item in data.queries),
        candidate_images=tuple(item.image_id for item in data.bank),
        blocks=blocks,
    )
    table = replace(table, pool=draw_pools(table, pool, data.queries is data.bank))
    options = {"model": model, "vlm": asdict(config), "pool": asdict(pool)}
    sources = digests(Path(), filter(None, (str(answerer.path), config.bank)))
    return BeamTask(table, answerer.load(), options, sources, kinds_of(data))


def kinds_of(data: VQAData) -> Kinds | None:
    """Return the kinds of questions as numbers, of queries int64 [Q] and of the bank int64 [M];
    None where no item names its kind."""
    items = (*data.queries, *data.bank)
    names = sorted({item.question_type for item in items})
    if names == [""]:
        return None
    numbers = torch.tensor([names.index(item.question_type) for item in items])
    return Kinds(*numbers.split([len(data.queries), len(data.bank)]))


class Answerer(NamedTuple):
    """A model that is not loaded yet, and its items."""

    path: Path
    """The file of its items."""
    data: VQAData
    load: Callable[[], Scorer]
    """Loads the model. Raises InputError if it cannot be loaded."""


def read_answerer(model: str, config: VLMTaskConfig, prefix: str = "") -> Answerer:
    """Read the items of a model: a folder, a name on the Hugging Face hub, smollm2, or
    `module:Class`, a scorer of the user's own that is made from its items. If its class has
    `sees = False`, the items need no images. `prefix` is that of the settings, for messages.

    Raises InputError for settings that are missing, files that cannot be read, no such model.
    """
    if not config.data and model != folder.NAME:
        raise InputError(
            f"{prefix}model={model}: needs {prefix}vlm.data, the items that it answers; only "
            f"{folder.NAME} has its own"
        )
    path = Path(config.data) if config.data else QUESTIONS_CSV
    if ":" in model:
        key = f"{prefix}model={model}"
        made = imported(key, model, "class", "my_module:MyScorer")
        data = read_vqa_data(path, config.bank or None, images=getattr(made, "sees", True))
        return Answerer(path, data, partial(instance, key, made, MEMBERS, Scorer, data))
    from knobwise.profiling.huggingface.loading import reads_text_alone
    from knobwise.profiling.huggingface.scorer import VLMScorer
    from knobwise.profiling.huggingface.text_scorer import TextScorer

    source = folder.source_of(model)
    text_alone = reads_text_alone(source)
    data = read_vqa_data(path, config.bank or None, images=not text_alone)
    options = {name: getattr(config, name) for name in ("device", "dtype", "batch_size", "chats")}
    kind = TextScorer if text_alone else VLMScorer
    return Answerer(path, data, partial(kind.load, source, data, **options))


def _read_embeddings(
    data: VQAData, config: VLMTaskConfig
) -> tuple[Tensor, Tensor, dict[str, tuple[int, int]]]:
    """Read the embeddings of queries and bank, or make those of texts.

    The dictionary says which of their columns describe the image, and which the question.
    """
    if not config.embeddings:
        if config.query_embeddings or config.image_columns:
            raise InputError("vlm.query_embeddings, vlm.image_columns: need vlm.embeddings")
        if not all(item.image is None for item in data.queries):
            raise InputError("vlm.embeddings: embeddings of items with images must be given")
        known = [item.question for item in data.bank]
        embed = question_embedder(known)
        return embed([item.question for item in data.queries]), embed(known), {}
    candidates = read_embeddings(config.embeddings)
    if data.queries is not data.bank and not config.query_embeddings:
        raise InputError(
            "vlm.query_embeddings: is needed, since the queries are not the bank's items"
        )
    source = config.query_embeddings or config.embeddings
    queries = read_embeddings(source)
    for path, rows, items in (
        (source, queries, data.queries),
        (config.embeddings, candidates, data.bank),
    ):
        if len(rows) != len(items):
            raise InputError(
                f"{path}: has {len(rows)} rows for {len(items)} items; it needs a row for each, "
                "in order"
            )
    # the first columns describe the image, the others the question
    split = config.image_columns
    if split is None:
        return queries, candidates, {}
    return queries, candidates, {"image": (0, split), "question": (split, queries.shape[1])}


def question_embedder(bank: list[str]) -> Callable[[list[str]], Tensor]:
    """Learn to embed questions from those of a bank: TF-IDF of their characters, reduced to
    `TEXT_COLUMNS` or fewer.

    Returns a function of n texts that gives their embeddings [n, d].
    """
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer

    counts = TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 4), sublinear_tf=True)
    known = counts.fit_transform(bank)
    reduced = TruncatedSVD(min(TEXT_COLUMNS, *known.shape), random_state=0).fit(known)

    def embed(texts: list[str]) -> Tensor:
        # rounded, so that machines agree
        columns = reduced.transform(counts.transform(texts)).round(4)
        return torch.from_numpy(columns).float()

    return embed


def no_beams(queries: int) -> dict[str, Any]:
    """Return the fields of a table that has no pools and no recorded beams yet."""
    empty = torch.zeros(queries, 0, dtype=torch.int64)
    return {
        "pool": empty,
        "sequences": empty[:, :, None],
        "fields": {},
        "found_by": empty,
        "round": empty,
    }


@cache
def builtin_learner() -> Learner:
    """Load the learner that comes with knobwise."""
    return Learner.load(DATA / "learner.safetensors")


def draw_part(config: LearnerTaskConfig) -> Task:
    """Draw the queries and the bank of a part."""
    queries, candidates = SIZES[config.part]
    rng = RandomState([config.seed, PARTS.index(config.part)])
    held_out = config.part == "test"
    variant = VARIANTS[config.variant]
    bank = canvases.draw_bank(rng, config.candidates or candidates, held_out, variant)
    return canvases.draw_queries(rng, config.queries or queries, held_out), bank


def part_table(config: LearnerTaskConfig, task: Task, **beams: Any) -> BeamTable:
    """Return the table of a part that was drawn, with embeddings and these beams."""
    queries, candidates = embeddings_of(*task)
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
