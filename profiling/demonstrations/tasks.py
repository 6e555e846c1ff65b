"""Tasks that beam data are recorded for: queries, their pools, and the model that answers them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from knobwise.common.errors import InputError, Missing
from knobwise.common.extras import install_command
from knobwise.common.imports import import_callable, instance
from knobwise.envs.demonstrations.beam_files import read_embeddings
from knobwise.envs.demonstrations.beam_table import BeamTable
from knobwise.profiling.demonstrations.pools import Kinds, draw_pools
from knobwise.profiling.demonstrations.scorers import Scorer
from knobwise.profiling.demonstrations.settings import SAMPLERS, PoolConfig, VLMTaskConfig
from knobwise.profiling.endpoint.settings import NAME as ENDPOINT
from knobwise.profiling.endpoint.settings import EndpointOptions
from knobwise.profiling.huggingface import smollm
from knobwise.profiling.measuring.machine import digests
from knobwise.profiling.measuring.questions import VQAData, read_vqa_data

MEMBERS = ("__call__", "vote")
"""What a scorer of the user's own must have."""
TEXT_COLUMNS = 128
"""Columns of the embeddings that are made of questions."""


class BeamTask(NamedTuple):
    """A task that sequences are recorded for."""

    table: BeamTable  # with pools, without beams
    scorer: Scorer
    options: Mapping[str, object]  # the model and the settings that make the task
    # sha256 of the files that it is read from, where the table does not contain them
    sources: Mapping[str, str] = {}
    # the kinds of questions of queries and bank; None where the items do not name them
    kinds: Kinds | None = None


def vlm_task(
    model: str, config: VLMTaskConfig, pool: PoolConfig, endpoint: EndpointOptions | None = None
) -> BeamTask:
    """Load a vision-language model or a language model (a folder, a name on the Hugging Face hub,
    or `openai` for one behind an endpoint) with data and embeddings from files.

    Raises InputError for settings that are missing or do not fit, files that cannot be read, no
    such model.
    """
    if pool.sampler == "covers":
        raise InputError(
            f"pool.sampler=covers is for model=learner; other models take {', '.join(SAMPLERS)}"
        )
    # the model comes last, since it takes longest
    answerer = read_answerer(model, config, endpoint=endpoint)
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
    scorer = answerer.load()
    settings = asdict(config)
    # only models behind an endpoint have a name of their own
    if not config.model:
        settings.pop("model")
    options = {"model": model, "vlm": settings, "pool": asdict(pool)}
    options |= getattr(scorer, "identity", {})
    sources = digests(Path(), filter(None, (str(answerer.path), config.bank)))
    return BeamTask(table, scorer, options, sources, kinds_of_questions(data))


def kinds_of_questions(data: VQAData) -> Kinds | None:
    """Return the kinds of questions as numbers, of queries int64 [Q] and of the bank int64 [M];
    None where no item names its kind."""
    items = (*data.queries, *data.bank)
    names = sorted({item.question_type for item in items if item.question_type})
    if not names:
        return None
    numbers = {name: number for number, name in enumerate(names)}
    return Kinds(
        queries=torch.tensor([numbers.get(item.question_type, -1) for item in data.queries]),
        candidates=torch.tensor([numbers.get(item.question_type, -2) for item in data.bank]),
    )


class Answerer(NamedTuple):
    """A model that is not loaded yet, and its items."""

    path: Path
    """The file of its items."""
    data: VQAData
    load: Callable[[], Scorer]
    """Loads the model. Raises InputError if it cannot be loaded."""


def read_answerer(
    model: str, config: VLMTaskConfig, prefix: str = "", endpoint: EndpointOptions | None = None
) -> Answerer:
    """Read the items of a model: a folder, a name on the Hugging Face hub, smollm2, `openai` for a
    model behind an endpoint, or `module:Class`, a scorer of the user's own that is made from its
    items. If its class has `sees = False`, the items need no images. `prefix` is that of the
    settings, for messages.

    Raises InputError for settings that are missing or that this model does not read, files that
    cannot be read, no such model.
    """
    if not config.data and model != smollm.NAME:
        raise InputError(
            f"{prefix}model={model}: needs {prefix}vlm.data, the items that it answers; only "
            f"{smollm.NAME} has its own"
        )
    path = Path(config.data) if config.data else smollm.QUESTIONS_CSV
    if ":" in model:
        key = f"{prefix}model={model}"
        made = import_callable(key, model, "class", "my_module:MyScorer")
        data = read_vqa_data(path, config.bank or None, images=getattr(made, "sees", True))
        return Answerer(path, data, partial(instance, key, made, MEMBERS, Scorer, data))
    if model == ENDPOINT:
        return _behind_endpoint(path, config, prefix, endpoint or EndpointOptions())
    if config.model:
        raise InputError(f"{prefix}vlm.model: is for {prefix}model={ENDPOINT}; leave it out")
    from knobwise.profiling.huggingface.loading import reads_text_alone
    from knobwise.profiling.huggingface.scorer import VLMScorer
    from knobwise.profiling.huggingface.text_scorer import TextScorer

    source = smollm.source_of(model)
    text_alone = reads_text_alone(source)
    data = read_vqa_data(path, config.bank or None, images=not text_alone)
    kind = TextScorer if text_alone else VLMScorer
    load = partial(
        kind.load,
        source,
        data,
        device=config.device,
        dtype=config.dtype,
        batch_size=config.batch_size,
        chats=config.chats,
    )
    return Answerer(path, data, load)


def _behind_endpoint(
    path: Path, config: VLMTaskConfig, prefix: str, endpoint: EndpointOptions
) -> Answerer:
    """Read the items of a model behind an endpoint."""
    try:
        from knobwise.profiling.endpoint.scorer import EndpointScorer
    except ImportError as error:
        raise Missing(f"model={ENDPOINT} needs: {install_command('endpoint')}") from error
    if not config.model:
        raise InputError(f"{prefix}vlm.model: is needed, the server's name of the model")
    # how a model runs is the server's matter
    for name in ("dtype", "device", "batch_size"):
        if getattr(config, name) != getattr(VLMTaskConfig(), name):
            raise InputError(f"{prefix}vlm.{name}: {ENDPOINT} does not read it; leave it out")
    data = read_vqa_data(path, config.bank or None, images=None)
    chats = config.chats is not False
    return Answerer(path, data, partial(EndpointScorer.load, config.model, data, endpoint, chats))


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
