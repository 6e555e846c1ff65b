"""The settings of recorded beams, each with its meaning."""

from __future__ import annotations

from dataclasses import dataclass

from knobwise.common.checks import at_least, one_of
from knobwise.common.errors import InputError

SAMPLERS = ("random", "text_similarity", "image_similarity", "mixed")
_COUNTS = ("width", "retrieved", "random", "same_kind")


@dataclass
class BeamProfileConfig:
    """Which sequences of demonstrations are recorded."""

    shots: int = 2
    """Demonstrations in a sequence."""
    width: int = 5
    """Sequences found by beam search on information gain, which uses the answer."""
    retrieved: int = 3
    """Sequences of the most similar candidates: ranks 1 to `shots`, 2 to `shots` + 1, …"""
    random: int = 4
    """Sequences drawn uniformly."""
    same_kind: int = 0
    """Sequences drawn uniformly among the candidates of the query's own `question_type`; they are
    recorded as `sample`. Training learns from them that these help. A policy is not told kinds."""
    chunk: int = 50
    """Queries in a chunk on disk: an interrupted run loses at most one chunk. Use few for slow
    models."""
    json: bool = True
    """Also write the original project's JSON format (RL data), with its embeddings."""
    draws: int = 8
    """Sequences to sample per query from the given checkpoint's policy; they are recorded as a new
    round."""
    draw_seed: int = 0
    """Seed of those draws. The same checkpoint with another seed adds another round."""

    def __post_init__(self) -> None:
        # each method may be left out, but not all of them
        least = {"shots": 1, "chunk": 1, "draws": 1} | dict.fromkeys(_COUNTS, 0)
        for name, minimum in least.items():
            at_least(f"beams.{name}", getattr(self, name), minimum)
        if not any(getattr(self, name) for name in _COUNTS):
            raise InputError(f"beams: nothing to record: {', '.join(_COUNTS)} are all 0")


@dataclass
class LearnerTaskConfig:
    """The built-in task: a small in-context learner answers questions about canvases."""

    variant: str = "careless"
    """careless: six of ten annotators often give wrong answers, on clean images; careful: none
    does."""
    part: str = "train"
    """train, or test: other digits and another bank."""
    queries: int | None = None
    """Number of queries; None for 3,300 (train) or 1,500 (test)."""
    candidates: int | None = None
    """Items of the bank; None for 12,000 or 4,000."""
    seed: int = 0
    """Seed of everything that is drawn; the data that come with knobwise have seed 0."""

    def __post_init__(self) -> None:
        one_of("learner.variant", self.variant, ("careless", "careful"))
        one_of("learner.part", self.part, ("train", "test"))
        for name in ("queries", "candidates"):
            if getattr(self, name) is not None:
                at_least(f"learner.{name}", getattr(self, name), 1)


@dataclass
class VLMTaskConfig:
    """A Hugging Face vision-language model or language model, and the questions that it answers."""

    data: str = ""
    """Items, a table such as JSON lines: id, image (not for a language model), question,
    answers, optionally image_id, choices, question_type and part. Each is a query, and without
    `bank` a possible demonstration of the others. smollm2 comes with questions of its own."""
    bank: str = ""
    """File of the possible demonstrations."""
    embeddings: str = ""
    """Embeddings of the bank (.safetensors, .npz, .npy, .pt), a row for each item. For a language
    model knobwise makes them where none are given: TF-IDF of characters, reduced to 128 columns."""
    query_embeddings: str = ""
    """Embeddings of the queries by the same encoder; not needed without `bank`."""
    image_columns: int | None = None
    """The first columns that describe the image; the others describe the question. None where both
    are mixed, as in the mean of CLIP's two embeddings; whole embeddings are then compared."""
    batch_size: int = 8
    """Prompts computed at a time."""
    chats: bool | None = None
    """Whether prompts follow the model's chat template; None: where it has one. Without it a prompt
    is plain: a line for each question and each answer."""
    model: str = ""
    """With model=openai: the name by which the server knows the model."""
    dtype: str = "auto"
    """Type of the weights: auto, bfloat16, float16 or float32."""
    device: str | None = None
    """cpu or cuda; None for the GPU where there is one."""


@dataclass
class PoolConfig:
    """Which candidates a query's demonstrations are chosen from."""

    sampler: str | None = None
    """random, text_similarity, image_similarity, mixed (the mean of both similarities), or with
    model=learner covers: some candidates that answer the question, others that look alike. None for
    covers there, else mixed."""
    size: int = 48
    """Candidates in a pool; the sampler covers always takes 48."""
    seed: int = 0
    """Seed of everything that is drawn."""

    def __post_init__(self) -> None:
        if self.sampler is not None:
            one_of("pool.sampler", self.sampler, ("covers", *SAMPLERS))
        at_least("pool.size", self.size, 1)
