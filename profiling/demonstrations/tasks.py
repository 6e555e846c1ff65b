"""Tasks that beam data are recorded of: queries, their pools, and the model that answers them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from knobwise.common.errors import InputError
from knobwise.envs.demonstrations.beam_files import read_embeddings
from knobwise.envs.demonstrations.beam_table import BeamTable
from knobwise.profiling.demonstrations.pools import SAMPLERS, draw_pools

if TYPE_CHECKING:
    from knobwise.profiling.demonstrations.scorers import Scorer


@dataclass
class LearnerTaskConfig:
    """The built-in task: a small in-context learner answers questions about canvases."""

    variant: str = "careless"
    """careless: six of ten annotators often give wrong answers, on clean images; careful: none does."""
    part: str = "train"
    """train, or test: other digits and another bank."""
    queries: int | None = None
    """How many are made; None for 3,300 (train) or 1,500 (test)."""
    candidates: int | None = None
    """Items of the bank; None for 12,000 or 4,000."""
    seed: int = 0
    """Of all that is made; what comes with knobwise has 0."""


@dataclass
class VLMTaskConfig:
    """A Hugging Face vision-language model and the questions that it answers."""

    data: str = ""
    """Items as JSON lines, JSON, Parquet or CSV: id, image, question, answers, optionally image_id and choices. Each is
    a query, and without `bank` a possible demonstration of the others."""
    bank: str = ""
    """File of the possible demonstrations."""
    embeddings: str = ""
    """Embeddings of the bank (.safetensors, .npz, .npy, .pt), a row for each item; knobwise does not make them."""
    query_embeddings: str = ""
    """Those of the queries, of the same encoder; not needed without `bank`."""
    image_columns: int | None = None
    """So many columns at the beginning are of the image and the others of the question; None where both are mixed, as
    in the mean of CLIP's two: then whole embeddings are compared."""
    queries: int | None = None
    """Record the first so many queries; None for all."""
    batch_size: int = 8
    """Prompts computed at a time."""
    max_choices: int = 16
    """Answers that a model chooses among where the data name no choices."""
    dtype: str = "auto"
    """Of the weights: auto, bfloat16, float16 or float32."""
    device: str | None = None
    """cpu, cuda; None for the GPU where there is one."""


@dataclass
class PoolConfig:
    """Which candidates a query's demonstrations are chosen from."""

    sampler: str | None = None
    """random, text_similarity, image_similarity, mixed (the mean of both similarities), or with model=learner covers:
    some candidates that answer the question, others that look alike. None for covers there, else mixed."""
    size: int = 48
    """Candidates in a pool; those of covers are 48 whatever stands here."""
    seed: int = 0
    """Of what is drawn."""

    def __post_init__(self) -> None:
        if self.sampler not in (None, "covers", *SAMPLERS):
            raise InputError(f"pool.sampler={self.sampler}: known are covers, {', '.join(SAMPLERS)}")
        if self.size < 1:
            raise InputError(f"pool.size must be 1 at least, not {self.size}")


class BeamTask(NamedTuple):
    """What sequences are recorded of."""

    table: BeamTable
    """With pools, without beams."""
    scorer: Scorer
    words: list[str]
    """The settings of the command line that make it."""
    sources: dict[str, str] = {}
    """sha256 of the files that it is read from, where the table does not hold their content."""


def learner_task(config: LearnerTaskConfig, pool: PoolConfig) -> BeamTask:
    """The built-in task, on pools of its own or drawn by the sampler.

    Raises:
        InputError: no such variant or part.
    """
    from knobwise.profiling.demonstrations.builtin import task_table

    table, scorer = task_table(
        config.variant, config.part, queries=config.queries, candidates=config.candidates, seed=config.seed
    )
    if pool.sampler not in (None, "covers"):
        table = replace(table, pool=_pools(table, pool, None))
    return BeamTask(table, scorer, ["model=learner", *changed("learner.", config), *changed("pool.", pool)])


def vlm_task(model: str, config: VLMTaskConfig, pool: PoolConfig) -> BeamTask:
    """A vision-language model (a folder, or a name on the Hugging Face hub) with data and embeddings from files.

    Raises:
        InputError: settings that are missing or do not fit, files that cannot be read, no such model.
    """
    for name in ("data", "embeddings"):
        if not getattr(config, name):
            raise InputError(
                f"model={model}: a vision-language model needs vlm.{name} (knobwise profile --help); other models are "
                "model=elastic and model=learner"
            )
    if pool.sampler == "covers":
        raise InputError(f"pool.sampler=covers is of model=learner; for others there are {', '.join(SAMPLERS)}")
    from knobwise.profiling.huggingface.scorer import VLMScorer
    from knobwise.profiling.measuring.questions import read_vqa_data

    data = read_vqa_data(config.data, config.bank or None)
    same = data.queries is data.bank
    candidates = read_embeddings(config.embeddings)
    if not same and not config.query_embeddings:
        raise InputError(f"{config.data}: queries that are not the bank's items need vlm.query_embeddings")
    queries = read_embeddings(config.query_embeddings) if config.query_embeddings else candidates.clone()
    for path, found, items in (
        (config.query_embeddings or config.embeddings, queries, data.queries),
        (config.embeddings, candidates, data.bank),
    ):
        if len(found) != len(items):
            raise InputError(f"{path}: has {len(found)} rows for {len(items)} items; it needs one each, in their order")
    if queries.shape[1] != candidates.shape[1]:
        raise InputError(f"{config.query_embeddings}: is {queries.shape[1]} wide, the bank's {candidates.shape[1]}")
    width, split = queries.shape[1], config.image_columns
    if split is not None and not 0 < split < width:
        raise InputError(f"vlm.image_columns={split}: must leave columns to both parts of the {width}")
    none = torch.empty(len(queries), 0, dtype=torch.int64)
    table = BeamTable(
        name=Path(config.data).stem,
        query_ids=tuple(item.id for item in data.queries),
        pool=none,
        sequences=none[..., None],
        fields={},
        found_by=none,
        round=none,
        queries=queries,
        candidates=candidates,
        query_images=tuple(item.image_id for item in data.queries),
        candidate_images=tuple(item.image_id for item in data.bank),
        blocks={} if split is None else {"image": (0, split), "question": (split, width)},
    )
    if config.queries is not None:
        table = table.select(torch.arange(min(config.queries, table.num_queries)))
    table = replace(table, pool=_pools(table, pool, torch.arange(table.num_queries) if same else None))
    about = {"batch_size": config.batch_size, "max_choices": config.max_choices}
    scorer = VLMScorer.load(model, data, device=config.device, dtype=config.dtype, **about)
    words = [f"model={model}", *changed("vlm.", config), *changed("pool.", pool)]
    files = [path for path in (config.data, config.bank) if path]
    return BeamTask(table, scorer, words, {path: hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in files})


def _pools(table: BeamTable, config: PoolConfig, own: Tensor | None) -> Tensor:
    return draw_pools(
        config.sampler or "mixed",
        table.queries,
        table.candidates,
        config.size,
        blocks=table.blocks,
        query_images=table.query_images,
        candidate_images=table.candidate_images,
        own=own,
        seed=config.seed,
    )


def changed(prefix: str, settings: Any, leave_out: tuple[str, ...] = ()) -> list[str]:
    """Every setting that is not the default, as key=value."""
    values = {f.name: getattr(settings, f.name) for f in fields(settings) if f.name not in leave_out}
    usual = type(settings)()
    return [f"{prefix}{name}={_word(x)}" for name, x in values.items() if x != getattr(usual, name)]


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
