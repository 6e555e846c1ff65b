"""Policy heads: from a hidden vector to log-probs of every configuration that exists.

`forward(hidden [*, H], mask bool [*, C] or None)` gives normalised log-probs [*, C], −inf where the mask is False.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def masked_log_softmax(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Log-softmax over what the mask allows, −inf elsewhere. [*, C] → [*, C]."""
    return (logits if mask is None else logits.masked_fill(~mask, -torch.inf)).log_softmax(-1)


class JointHead(nn.Module):
    """One logit for each configuration."""

    def __init__(self, hidden: int, configurations: Tensor) -> None:
        super().__init__()
        self.logits = nn.Linear(hidden, len(configurations))

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        return masked_log_softmax(self.logits(hidden), mask)


class AdditiveHead(nn.Module):
    """One logit for each value of each knob, summed, and one softmax over the configurations that exist.

    It keeps the form of one head per knob, and can still say which combinations fit a budget.
    """

    places: Tensor

    def __init__(self, hidden: int, configurations: Tensor) -> None:
        super().__init__()
        sizes = configurations.amax(0) + 1
        first = sizes.cumsum(0) - sizes
        self.logits = nn.Linear(hidden, int(sizes.sum()))
        # [values of all knobs, C]: which values make up a configuration
        membership = torch.zeros(int(sizes.sum()), len(configurations))
        membership.T.scatter_(1, configurations + first, 1.0)
        self.register_buffer("places", membership, persistent=False)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        return masked_log_softmax(self.logits(hidden) @ self.places, mask)


class IndependentHead(nn.Module):
    """One categorical for each knob, the form of the original controller: ln p = Σ_k ln p_k.

    Where some combinations do not exist, each knob is drawn among the values that the knobs before it leave possible:
    the product still sums to 1 over the configurations that exist. On a full grid the knobs are independent.
    """

    value: Tensor
    node: Tensor
    prefix: Tensor

    def __init__(self, hidden: int, configurations: Tensor) -> None:
        super().__init__()
        sizes = (configurations.amax(0) + 1).tolist()
        self.logits = nn.Linear(hidden, sum(sizes))
        # a tree of prefixes, level by level: a node is a prefix with one more value; the column of 0 is its root
        rooted = torch.cat([torch.zeros_like(configurations[:, :1]), configurations], 1)
        value, node, prefix = [], [], []
        nodes, prefixes, first = 0, 0, 0
        for knob, size in enumerate(sizes):
            here, of_here = rooted[:, : knob + 2].unique(dim=0, return_inverse=True)
            above, of_above = here[:, :-1].unique(dim=0, return_inverse=True)
            value.append(here[:, -1] + first)
            node.append(of_here + nodes)
            prefix.append(of_above + prefixes)
            nodes, prefixes, first = nodes + len(here), prefixes + len(above), first + size
        self.register_buffer("value", torch.cat(value), persistent=False)  # [nodes]: which logit
        self.register_buffer("node", torch.stack(node), persistent=False)  # [K, C]: the nodes of a configuration
        self.register_buffer("prefix", torch.cat(prefix), persistent=False)  # [nodes]: what stands before
        self.prefixes = prefixes

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        logits = self.logits(hidden)[..., self.value]
        if mask is not None:
            alive = torch.zeros_like(logits, dtype=torch.bool)
            for nodes in self.node:  # a node is possible when any configuration through it is
                alive = alive.scatter_reduce(-1, nodes.expand(mask.shape), mask, "amax")
            logits = logits.masked_fill(~alive, -torch.inf)
        where = self.prefix.expand(logits.shape)
        shape = (*logits.shape[:-1], self.prefixes)
        # log-sum-exp inside each prefix; a prefix that is not possible at all is left at 0
        top = logits.new_full(shape, -torch.inf).scatter_reduce(-1, where, logits.detach(), "amax")
        top = top.masked_fill(top == -torch.inf, 0.0)
        total = logits.new_zeros(shape).scatter_add(-1, where, (logits - top.gather(-1, where)).exp())
        normal = top + total.clamp_min(torch.finfo(logits.dtype).tiny).log()
        log_probs = (logits - normal.gather(-1, where))[..., self.node].sum(-2)
        return log_probs if mask is None else log_probs.masked_fill(~mask, -torch.inf)


HEADS: dict[str, type[JointHead] | type[AdditiveHead] | type[IndependentHead]] = {
    "additive": AdditiveHead,
    "independent": IndependentHead,
    "joint": JointHead,
}
