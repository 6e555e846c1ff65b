"""The selector: it reads embeddings of a query and of its pool, and decides which demonstrations
to show, in which order.

In the order of the data: embeddings (of the table, or by
`knobwise.agents.selector.clip_encoder`) → standardised → network
(`knobwise.agents.selector.networks`) → `SequenceDistribution`, which draws actions.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from knobwise.agents.selector.networks import NETWORKS
from knobwise.agents.selector.sequences import SequenceDistribution
from knobwise.agents.selector.settings import SelectorConfig
from knobwise.common.checks import at_least
from knobwise.common.errors import InputError

if TYPE_CHECKING:  # it needs packages that other selectors do without
    from knobwise.agents.selector.clip_encoder import ClipEncoder


class Selector(nn.Module):
    """A policy over ordered sequences of demonstrations from a query's own pool.

    `stage` says how far it was trained: `sft`, `rce` or `grpo`. v2 at `grpo` is what the original
    calls v3. It drops out inside `knobwise.losses.dropping_out` alone.

    Args:
        config: the settings of the network.
        features: d, the width of the embeddings.
        encoder: embeds items and learns along; None if embeddings are given.
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
        self.prior: nn.Parameter | None = None
        if config.prior > 0:
            self.prior = nn.Parameter(torch.tensor(float(config.prior)))
        self.eval()

    @classmethod
    @torch.no_grad()
    def fitted(
        cls,
        config: SelectorConfig,
        queries: Tensor,
        candidates: Tensor,
        encoder: ClipEncoder | None = None,
    ) -> Selector:
        """Return a fresh selector that standardises by the embeddings of the training data.

        Args:
            config: the settings of the network.
            queries: [q, d], or with an encoder the indices of its items, [q, 1].
            candidates: [m, d], or with an encoder the indices of its items, [m, 1].
            encoder: embeds items and learns along; None if embeddings are given.
        """
        # statistics of queries and candidates together
        both = torch.cat([queries, candidates])
        if encoder is not None:
            both = encoder(both)
        selector = cls(config, both.shape[-1], encoder)
        both = both.double()
        mean = both.mean(0)
        scale = (both - mean).square().mean(0).sqrt()
        selector.mean.copy_(mean)
        # a column that never varies gives 0; by rounding its deviation may not be exactly 0
        selector.scale.copy_(torch.where(scale > 1e-6 * mean.abs(), scale, torch.inf))
        return selector

    def distribution(
        self,
        query: Tensor,
        pool: Tensor,
        mask: Tensor,
        shots: int,
        temperature: Tensor | float = 1.0,
    ) -> SequenceDistribution:
        """Encode queries and their pools, and return the distribution to draw sequences from.

        Args:
            query: embeddings [P, d].
            pool: embeddings [P, N, d].
            mask: bool [P, N], True where a place holds a candidate.
            shots: T.
            temperature: divides the logits.

        Raises:
            InputError: embeddings of another width than the selector reads, or fewer than one shot.
        """
        at_least("shots", shots, 1)
        query, pool, mask = (x.to(self.mean.device) for x in (query, pool, mask))
        if self.encoder is not None:
            both = self.encoder(torch.cat([query.unsqueeze(1), pool], 1))
            query = both[:, 0]
            pool = both[:, 1:]
        widths = query.shape[-1], pool.shape[-1]
        if widths != (self.features, self.features):
            raise InputError(
                f"query and candidate embeddings are {widths} wide, but this selector reads "
                f"{self.features}; give embeddings of the encoder that it was trained with"
            )
        prior = None
        if self.prior is not None:
            prior = self.prior * F.cosine_similarity(query.unsqueeze(1), pool, dim=-1)
        # encode once, for all draws
        query = (query - self.mean) / self.scale
        pool = (pool - self.mean) / self.scale
        encoded = self.network.encode(query, pool, mask)._replace(prior=prior)
        return SequenceDistribution(self.network, encoded, shots, temperature)

    @torch.no_grad()
    def choose(self, query: Tensor, pool: Tensor, mask: Tensor, shots: int) -> Tensor:
        """Choose demonstrations greedily.

        Args:
            query: embeddings [P, d].
            pool: embeddings [P, N, d].
            mask: bool [P, N], True where a place holds a candidate.
            shots: T.

        Returns:
            Places in the queries' own pools, int64 [P, T], −1 where a pool has fewer than T
            candidates.

        Raises:
            InputError: embeddings of another width.
        """
        return self.distribution(query, pool, mask, shots).mode

    def requirements(self) -> dict[str, Any]:
        """Return what must be the same for weights to be taken over: name in a message → value."""
        parts: dict[str, Any] = {
            f"selector.{name}": value
            for name, value in asdict(self.config).items()
            if name != "dropout"
        }
        return parts | {"the width of the embeddings": self.features}

    def plain(self) -> dict[str, Any]:
        """Return tensors and plain values for a checkpoint."""
        return {
            "selector": asdict(self.config),
            "features": self.features,
            "stage": self.stage,
            "encoder": self.encoder and self.encoder.source,
            "state": self.state_dict(),
        }

    @classmethod
    def restored(cls, plain: dict[str, Any]) -> Selector:
        """Return the selector that `plain` describes.

        Raises:
            Missing: the CLIP model that it was trained along with cannot be loaded.
            RuntimeError: weights are missing, unknown, or of another shape.
        """
        source = plain["encoder"]
        encoder = None
        if source is not None:
            from knobwise.agents.selector.clip_encoder import ClipEncoder

            encoder = ClipEncoder(source)
        selector = cls(SelectorConfig(**plain["selector"]), plain["features"], encoder)
        selector.stage = plain["stage"]
        selector.load_state_dict(plain["state"])
        return selector
