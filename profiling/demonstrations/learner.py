"""The learner: a small transformer that answers a question about a canvas by looking at demonstrations before it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from knobwise.profiling.demonstrations.canvases import LABELS, PIXELS, QUESTIONS, VALUES, paint
from knobwise.profiling.elastic.resumable_training import read_weights, save_weights, train_resumably

WIDTH, HEADS, LAYERS = 64, 4, 2
_TOWER_WIDTH = 128
_UNANSWERED = LABELS  # the label of a query


@dataclass
class LearnerConfig:
    """How the learner is trained."""

    steps: int = 3000
    """Optimiser steps; one step is one batch with one number of demonstrations."""
    batch_size: int = 256
    """Queries per step."""
    learning_rate: float = 2e-3
    """Peak of AdamW's rate, reached after 200 steps, cosine to 3 % of it."""
    max_shots: int = 4
    """The most demonstrations before a query."""
    zero_shot: float = 0.02
    """Share of the steps without any demonstration, so that the learner knows when it cannot know."""
    noise: tuple[float, float] = (0.05, 0.3)
    """Standard deviations of the pixels' noise; each canvas has one of the two."""
    covered: float = 0.4
    """Share of the demonstrations that cover the query's question."""
    wrong: float = 0.1
    """Share of the demonstrations with a random label."""
    attributes: float = 0.3
    """Weight of the auxiliary loss: what digit, frame and texture an image shows, read from the tower's output."""
    seed: int = 0
    """Seeds the weights and every batch."""


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.kv, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor, bias: Tensor | None, last: bool = False) -> Tensor:
        """[n, T, width] → the same, or [n, 1, width] where only the last token is needed; bias [n, 1, 1, T]."""
        y = self.norm_attention(x)
        k, v = self.kv(y).unflatten(-1, (2, HEADS, -1)).permute(2, 0, 3, 1, 4)
        if last:
            x, y = x[:, -1:], y[:, -1:]
        q = self.q(y).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        x = x + self.out(seen.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm_mlp(x))


class Learner(nn.Module):
    """The learner, 91 k parameters; `training_s` are the CPU seconds that its training took.

    Labels mean something else for every query (`Queries.labels`), so it cannot answer from its weights: it must find
    the demonstration that covers the question and repeat its label. One token is one demonstration (image + question +
    label), the last token is the query. There are no positions: the order of demonstrations does not matter.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(PIXELS, _TOWER_WIDTH), nn.GELU(), nn.Linear(_TOWER_WIDTH, WIDTH))
        self.questions, self.labels = nn.Embedding(len(QUESTIONS), WIDTH), nn.Embedding(LABELS + 1, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, LABELS))
        self.attributes = nn.ModuleList(nn.Linear(WIDTH, count) for count in VALUES)  # used in training only
        self.training_s = 0.0

    def see(self, images: Tensor, question: Tensor) -> Tensor:
        """Canvases [..., 100] with their questions [...] → [..., width], all that does not depend on labels."""
        seen: Tensor = self.tower(images) + self.questions(question)
        return seen

    def forward(self, query: Tensor, demonstrations: Tensor, labels: Tensor) -> Tensor:
        """Logits of the query's label, [n, 10], from `see` of the query, float32 [n, width], and of the demonstrations,
        [n, T, width], with their labels, int64 [n, T], −1 where there is none; T may be 0."""
        padding = labels < 0
        labelled = demonstrations + self.labels(labels.clamp_min(0))
        x = torch.cat([labelled, (query + self.labels.weight[_UNANSWERED])[:, None]], 1)
        bias = None
        if padding.any():
            bias = F.pad(torch.zeros(padding.shape).masked_fill(padding, -torch.inf), (0, 1))[:, None, None]
        x = self.norm(x)
        for i, block in enumerate(self.blocks):
            x = block(x, bias, last=i == LAYERS - 1)
        logits: Tensor = self.head(x[:, -1])
        return logits

    @property
    def digest(self) -> str:
        """`sha256:…` of the weights as `save` writes them."""
        sha = hashlib.sha256()
        for name, weight in sorted(self.state_dict().items()):
            sha.update(name.encode() + weight.half().contiguous().numpy().tobytes())
        return f"sha256:{sha.hexdigest()}"

    def save(self, path: Path) -> None:
        """Write weights in half precision."""
        save_weights(self, path, {"format": "knobwise.Learner/1", "training_s": json.dumps(self.training_s)})

    @classmethod
    def load(cls, path: Path) -> Learner:
        """Read what `save` wrote; the learner is in evaluation mode, single precision."""
        weights, metadata = read_weights(path)
        learner = cls()
        learner.training_s = float(metadata["training_s"])
        learner.load_state_dict(weights)
        return learner.eval()


def train_learner(config: LearnerConfig, state: Path, save_every_s: float = 15.0) -> Learner:
    """Train from scratch on the digits of the training half, or resume from the checkpoint at `state`; batches depend
    on (seed, step) alone, and errors are as for `train_resumably`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        learner = Learner()
    learner.training_s = train_resumably(
        learner,
        lambda step: _loss(learner, config, step),
        state,
        asdict(config),
        what="training the learner",
        steps=config.steps,
        learning_rate=config.learning_rate,
        rise=200,
        save_every_s=save_every_s,
    )
    return learner


def _loss(learner: Learner, config: LearnerConfig, step: int) -> Tensor:
    """Cross-entropy of the query's label, and of what each image shows."""
    rng = np.random.default_rng((config.seed, step))
    n, shots = config.batch_size, int(rng.integers(1, config.max_shots + 1))
    if rng.random() < config.zero_shot:
        shots = 0
    # demonstrations first, the query last; [n, shots + 1, …]
    shape = (n, shots + 1)
    values = np.stack([rng.integers(count, size=shape) for count in VALUES], 2)
    question = rng.integers(len(QUESTIONS), size=shape)
    covers, same = rng.random(shape) < config.covered, rng.random(shape) < 0.5
    question = np.where(covers | same, question[:, -1:], question)
    of_question = question[:, :, None] == np.arange(len(QUESTIONS))
    values = np.where(covers[:, :, None] & of_question, values[:, -1:], values)
    stated = np.take_along_axis(values, question[:, :, None], 2)[:, :, 0]
    wrong = rng.random(shape) < config.wrong
    wrong[:, -1] = False
    stated = np.where(wrong, (rng.random(shape) * np.array(VALUES)[question]).astype(np.int64), stated)
    permutation = rng.random((n, len(QUESTIONS), LABELS)).argsort(2)
    labels = torch.from_numpy(permutation[np.arange(n)[:, None], question, stated])
    clean = paint(values.reshape(-1, len(VALUES)), rng.integers(1 << 30, size=n * (shots + 1)), held_out=False)
    noise = np.array(config.noise, np.float32)[rng.integers(2, size=len(clean))]
    images = clean + noise[:, None] * rng.standard_normal(clean.shape, dtype=np.float32)

    seen = learner.tower(torch.from_numpy(images)).unflatten(0, shape)
    tokens = seen + learner.questions(torch.from_numpy(question))
    logits = learner(tokens[:, -1], tokens[:, :-1], labels[:, :-1])
    shown_values = torch.from_numpy(values).flatten(0, 1).T
    attributes = [
        F.cross_entropy(head(seen).flatten(0, 1), value)
        for head, value in zip(learner.attributes, shown_values, strict=True)
    ]
    return F.cross_entropy(logits, labels[:, -1]) + config.attributes * torch.stack(attributes).sum()
