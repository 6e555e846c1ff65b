"""The learner: a small transformer that answers a question about a canvas by looking at
demonstrations before it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from knobwise.envs.tables.tensor_file import tensors_of
from knobwise.testbeds.canvases.canvases import LABELS, PIXELS, QUESTIONS, VALUES

WIDTH = 64
HEADS = 4
LAYERS = 2
_TOWER_WIDTH = 128
_UNANSWERED = LABELS  # the label of a query


class LearnerBlock(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(WIDTH)
        self.norm_mlp = nn.LayerNorm(WIDTH)
        self.q = nn.Linear(WIDTH, WIDTH)
        self.kv = nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, attended: Tensor | None, last: bool = False) -> Tensor:
        """Transform tokens [n, T, width]; return as many, or [n, 1, width] where only the last
        token is needed; attended bool [n, 1, 1, T]."""
        # the last block needs the query's token alone, which is last
        y = self.norm_attention(x)
        k, v = self.kv(y).unflatten(-1, (2, HEADS, -1)).permute(2, 0, 3, 1, 4)
        if last:
            x = x[:, -1:]
            y = y[:, -1:]
        q = self.q(y).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=attended)
        x = x + self.out(seen.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm_mlp(x))


class Learner(nn.Module):
    """The learner, 91 k parameters.

    Labels mean something else for every query (`Queries.labels`), so it cannot answer from its
    weights: it must find the demonstration that covers the question and repeat its label. One token
    is one demonstration (image + question + label), the last token is the query. There are no
    positions: the order of demonstrations does not matter.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(
            nn.Linear(PIXELS, _TOWER_WIDTH), nn.GELU(), nn.Linear(_TOWER_WIDTH, WIDTH)
        )
        self.questions = nn.Embedding(len(QUESTIONS), WIDTH)
        self.labels = nn.Embedding(LABELS + 1, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(LearnerBlock() for _ in range(LAYERS))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, LABELS))
        self.attributes = nn.ModuleList(
            nn.Linear(WIDTH, count) for count in VALUES
        )  # used in training only

    def see(self, images: Tensor, question: Tensor) -> Tensor:
        """Embed canvases [..., 100] with their questions [...] → [..., width], all that does not
        depend on labels."""
        return self.tower(images) + self.questions(question)

    def forward(self, query: Tensor, demonstrations: Tensor, labels: Tensor) -> Tensor:
        """Return the logits of the query's label, [n, 10], from `see` of the query, float32 [n,
        width], and of the demonstrations, [n, T, width], with their labels, int64 [n, T], −1 where
        there is none; T may be 0."""
        # demonstrations get their labels, the query one of its own
        padding = labels < 0
        labelled = demonstrations + self.labels(labels.clamp_min(0))
        x = torch.cat([labelled, (query + self.labels.weight[_UNANSWERED])[:, None]], 1)
        attended = None
        if padding.any():
            attended = ~F.pad(padding, (0, 1))[:, None, None]
        # no positions: the order does not matter
        x = self.norm(x)
        for i, block in enumerate(self.blocks):
            x = block(x, attended, last=i == LAYERS - 1)
        return self.head(x[:, -1])

    @property
    def digest(self) -> str:
        """Compute `sha256:…` of the weights in half precision, as their file holds them."""
        # in half precision, so that a reloaded learner has the same digest
        sha = hashlib.sha256()
        for name, weight in sorted(self.state_dict().items()):
            sha.update(name.encode() + weight.half().contiguous().numpy().tobytes())
        return f"sha256:{sha.hexdigest()}"

    @classmethod
    def load(cls, path: Path) -> Learner:
        """Read weights in half precision; the learner is in evaluation mode, single precision."""
        learner = cls()
        learner.load_state_dict(tensors_of(path))
        return learner.eval()
