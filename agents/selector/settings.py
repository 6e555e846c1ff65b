"""The settings of a selector's network, each with its meaning."""

from __future__ import annotations

from dataclasses import dataclass

from knobwise.common.checks import at_least, one_of, positive
from knobwise.common.errors import InputError

UNREAD = {
    "v0": ("update",),
    "v1": ("layers", "heads", "projection", "update"),
    "v2": (),
    "v3": ("update",),
}
"""The options that each version of the network does not read."""


@dataclass
class SelectorConfig:
    """Settings of a selector's network."""

    version: str = "v2"
    """The network. `v0`: a causal transformer reads the query and what was chosen. `v1`: bilinear,
    two MLPs and no attention. `v2`: the query attends to its pool. `v3`: deeper; the query attends
    to its pool and to what was chosen."""
    width: int = 128
    """Width of states and keys."""
    layers: int | None = None
    """Layers in which the query attends to its pool; in v0 those that read what was chosen, in v3
    as many of both. None for 1, in v3 for 3. The original's v2 has 3, which makes no measurable
    difference (docs/original.md); v2 can do without (0)."""
    heads: int = 4
    """Attention heads in each layer."""
    projection: str = "mlp"
    """From features to states and keys: `mlp` or `linear`."""
    update: str = "additive"
    """How the state s moves on by the key c of what was chosen: `additive` to norm(g·s + (1 −
    g)·tanh(U[s; c])), which can turn to what still lacks; `convex` to norm(g·s + (1 − g)·c), which
    only moves towards c."""
    temperature: float = 0.1
    """Temperature, by which cosines are divided."""
    prior: float = 0.0
    """Weight of the cosine of a query's and a candidate's embeddings in the logits, where training
    begins; it is trained too. So a selector starts from nearest neighbours. 0 leaves it out."""
    dropout: float = 0.0
    """Dropout in projections and layers during supervised fine-tuning; draws, log-probs and
    decisions never use it."""

    def __post_init__(self) -> None:
        one_of("selector.version", self.version, tuple(UNREAD))
        for name in UNREAD[self.version]:
            if (value := getattr(self, name)) != getattr(SelectorConfig, name):
                raise InputError(
                    f"selector.{name}={value}: selector.version={self.version} does not read it; "
                    "leave it out"
                )
        one_of("selector.projection", self.projection, ("mlp", "linear"))
        one_of("selector.update", self.update, ("additive", "convex"))
        at_least("selector.layers", self.depth, int(self.version in ("v0", "v3")))
        for name in ("width", "heads"):
            at_least(f"selector.{name}", getattr(self, name), 1)
        if self.version != "v1" and self.width % self.heads:
            raise InputError(
                f"selector.width={self.width}: must be a multiple of selector.heads={self.heads}"
            )
        positive("selector.temperature", self.temperature)
        at_least("selector.prior", self.prior, 0)
        if not 0 <= self.dropout < 1:
            raise InputError(f"selector.dropout={self.dropout}: must be in [0, 1)")

    @property
    def depth(self) -> int:
        """The number of layers: `layers`, or if that is None the default of the version."""
        if self.layers is not None:
            return self.layers
        return 3 if self.version == "v3" else 1


@dataclass
class RewardModelConfig:
    """Settings of a learned reward, an ensemble that predicts if an answer will be right."""

    calls: int = 0
    """True calls of the answering model that correct it, spread evenly over the epochs of GRPO."""
    members: int = 5
    """Networks in the ensemble."""
    width: int = 64
    """Width of each network."""
    epochs: int = 6
    """Passes over the recorded sequences before GRPO."""

    def __post_init__(self) -> None:
        at_least("reward_model.calls", self.calls, 0)
        for name in ("members", "width", "epochs"):
            at_least(f"reward_model.{name}", getattr(self, name), 1)
