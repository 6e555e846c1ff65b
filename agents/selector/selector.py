"""The selector: embeddings of a query and of its pool in, which demonstrations to show and in which
order out.

In the order of the data: embeddings (`StoredEmbeddings`, or
`knobwise.agents.selector.clip_encoder`) → standardised → network
(`knobwise.agents.selector.networks`) → `SequenceDistribution`, which draws actions.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from knobwise.agents.selector.networks import NETWORKS
from knobwise.agents.selector.sequences import SequenceDistribution
from knobwise.agents.selector.settings import SelectorConfig
from knobwise.common.checks import at_least
from knobwise.common.errors import InputError

if TYPE_CHECKING:  # it needs packages that other selectors do without
    from knobwise.agents.selector.clip_encoder import ClipEncoder


class StoredEmbeddings(nn.Module):
    """Embeddings that are known already, looked up by row: of queries float [Q, d] and of the whole
    bank [M, d]."""

    query_table: Tensor
    candidate_table: Tensor

    def __init__(self, queries: Tensor, candidates: Tensor) -> None:
        super().__init__()
        self.register_buffer("query_table", queries, persistent=False)
        self.register_buffer("candidate_table", candidates, persistent=False)

    def both(self, rows: Tensor, pool: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of queries, int64 [P], and of candidates, int64 [P, N] → [P, d] and [P, N, d]; zeros
        for row −1."""
        return _looked_up(self.query_table, rows), _looked_up(self.candidate_table, pool)


def _looked_up(table: Tensor, rows: Tensor) -> Tensor:
    features = nn.functional.embedding(rows.clamp_min(0).to(table.device), table)
    return features.masked_fill((rows < 0).unsqueeze(-1).to(table.device), 0.0)


class Selector(nn.Module):
    """A policy over ordered sequences of demonstrations from a query's own pool, for embeddings of
    width `features`.

    `stage` says how far it was trained: `sft`, `rce` or `grpo`. v2 at `grpo` is what the original
    calls v3.
    """

    mean: Tensor
    scale: Tensor

    def __init__(
        self, config: SelectorConfig, features: int, encoder: ClipEncoder | None = None
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.config = config
        self.features = features
        self.stage = "sft"
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("scale", torch.ones(features))
        self.network = NETWORKS[config.version](config, features)

    @classmethod
    @torch.no_grad()
    def fitted(
        cls,
        config: SelectorConfig,
        queries: Tensor,
        candidates: Tensor,
        encoder: ClipEncoder | None = None,
    ) -> Selector:
        """Return a fresh selector that standardises by these embeddings, [q, d] and [m, d]: those
        of training alone.

        With an encoder, which then learns along, they are the numbers of its items, [q, 1] and [m,
        1].
        """
        both = torch.cat([queries, candidates])
        if encoder is not None:
            both = encoder.eval()(both)
        selector = cls(config, both.shape[-1], encoder)
        both = both.double()
        mean = both.mean(0)
        scale = (both - mean).square().mean(0).sqrt()
        selector.mean.copy_(mean)
        # a column that never varies gives 0; relative to the mean, from which it differs by
        # rounding
        selector.scale.copy_(torch.where(scale > 1e-6 * mean.abs(), scale, torch.inf))
        return selector

    def distribution(
        self,
        query: Tensor,
        pool: Tensor,
        mask: Tensor,
        shots: int,
        group_size: int | None = None,
        temperature: Tensor | float = 1.0,
    ) -> SequenceDistribution:
        """Embeddings of queries [P, d] and of their pools [P, N, d], mask bool [P, N] → what to
        draw sequences from (see `SequenceDistribution`). Everything is encoded here, once.

        Raises:
            InputError: embeddings of another width than the selector reads, or fewer than one shot.
        """
        at_least("shots", shots, 1)
        if self.encoder is not None:
            both = self.encoder(torch.cat([query.unsqueeze(1), pool], 1))
            query = both[:, 0]
            pool = both[:, 1:]
        for name, width in (("query", query.shape[-1]), ("candidate", pool.shape[-1])):
            if width != self.features:
                raise InputError(
                    f"{name} embeddings are {width} wide, but this selector reads {self.features}; "
                    "give embeddings of the encoder that it was trained with"
                )
        query, pool = ((x - self.mean) / self.scale for x in (query, pool))
        encoded = self.network.encode(query, pool, mask)
        return SequenceDistribution(self.network, encoded, shots, group_size, temperature)

    @torch.no_grad()
    def choose(self, query: Tensor, pool: Tensor, mask: Tensor, shots: int) -> Tensor:
        """What to show, greedily: places in the queries' own pools, int64 [P, T], −1 where a pool
        has fewer than T candidates. Queries are [P, d], pools [P, N, d], the mask bool [P, N].

        Raises:
            InputError: embeddings of another width.
        """
        training = self.training
        device = self.mean.device
        self.eval()
        sequences = self.distribution(
            query.to(device), pool.to(device), mask.to(device), shots
        ).mode
        self.train(training)
        return sequences

    def plain(self) -> dict[str, Any]:
        """Tensors and plain values, for a checkpoint."""
        return {
            "selector": asdict(self.config),
            "features": self.features,
            "stage": self.stage,
            "encoder": self.encoder and self.encoder.source,
            "state": self.state_dict(),
        }

    @classmethod
    def restored(cls, plain: dict[str, Any]) -> Selector:
        """The inverse of `plain`, in eval mode.

        Raises:
            Missing: the CLIP model that it was trained along with cannot be loaded.
            RuntimeError: weights that are missing, too many, or of another shape: none is left as
                it was drawn.
        """
        source = plain.get("encoder")
        encoder = None
        if source is not None:
            from knobwise.agents.selector.clip_encoder import ClipEncoder

            encoder = ClipEncoder(source)
        selector = cls(SelectorConfig(**plain["selector"]), plain["features"], encoder)
        selector.stage = plain["stage"]
        selector.load_state_dict(plain["state"])
        return selector.eval()
