"""The settings of a selector's network, each with its meaning."""

from __future__ import annotations

from dataclasses import dataclass

from knobwise.common.checks import at_least, one_of, positive
from knobwise.common.errors import InputError


@dataclass
class SelectorConfig:
    """The network of a selector."""

    width: int = 128
    """Width of states and keys."""
    layers: int = 1
    """Cross-attention layers, in which the query attends to its pool; 0 for none."""
    heads: int = 4
    """Attention heads in each layer."""
    projection: str = "mlp"
    """From features to states and keys: `mlp` or `linear`."""
    update: str = "additive"
    """How the state s moves on by the key c of what was chosen: `additive` to norm(g·s + (1 − g)·tanh(U[s; c])), which
    can turn to what still lacks; `convex` to norm(g·s + (1 − g)·c), which only moves towards c."""
    temperature: float = 0.1
    """What cosines are divided by."""
    dropout: float = 0.0
    """In projections and layers while in train mode. Old and new log-probs must be taken in the same mode."""

    def __post_init__(self) -> None:
        one_of("selector.projection", self.projection, ("mlp", "linear"))
        one_of("selector.update", self.update, ("additive", "convex"))
        at_least("selector.layers", self.layers, 0)
        for name in ("width", "heads"):
            at_least(f"selector.{name}", getattr(self, name), 1)
        if self.width % self.heads:
            raise InputError(f"selector.width={self.width}: must be a multiple of selector.heads={self.heads}")
        positive("selector.temperature", self.temperature)
        if not 0 <= self.dropout < 1:
            raise InputError(f"selector.dropout={self.dropout}: must be in [0, 1)")
