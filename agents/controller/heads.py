"""Policy heads: from a hidden vector to log-probs of every configuration that exists.

`forward(hidden [M, n, H], mask bool [M, n, C] or None)` returns normalised log-probs [M, n, C], −inf where the mask is
False. M members of an ensemble are side by side, so that one matrix product serves all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class MemberLinear(nn.Module):
    """M linear layers side by side: [M, n, inputs] → [M, n, outputs]; `zero` initialises them to 0."""

    def __init__(self, members: int, inputs: int, outputs: int, zero: bool = False) -> None:
        super().__init__()
        bound = 0.0 if zero else max(inputs, 1) ** -0.5
        self.weight = nn.Parameter(torch.empty(members, inputs, outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(members, 1, outputs).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        return torch.baddbmm(self.bias, x, self.weight)


def masked_log_softmax(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Log-softmax over what the mask allows, −inf elsewhere. [*, C] → [*, C]."""
    return (logits if mask is None else logits.masked_fill(~mask, -torch.inf)).log_softmax(-1)


class JointHead(nn.Module):
    """One logit for each configuration."""

    def __init__(self, hidden: int, configurations: Tensor, members: int = 1) -> None:
        super().__init__()
        self.logits = MemberLinear(members, hidden, len(configurations))

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        return masked_log_softmax(self.logits(hidden), mask)


class AdditiveHead(nn.Module):
    """One logit for each value of each knob, summed, and one softmax over the configurations that exist.

    It keeps the form of a head per knob, but if some combinations do not exist it can still weigh those that do. On a
    full grid without a mask it is the same as `IndependentHead`.
    """

    places: Tensor

    def __init__(self, hidden: int, configurations: Tensor, members: int = 1) -> None:
        super().__init__()
        sizes = configurations.amax(0) + 1
        first = sizes.cumsum(0) - sizes
        self.logits = MemberLinear(members, hidden, int(sizes.sum()))
        # [values of all knobs, C]: which values make up a configuration
        membership = torch.zeros(int(sizes.sum()), len(configurations))
        membership.T.scatter_(1, configurations + first, 1.0)
        self.register_buffer("places", membership, persistent=False)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        return masked_log_softmax(self.logits(hidden) @ self.places, mask)


class _PrefixTree(nn.Module):
    """Every way of setting the first k knobs, k = 1 … K, as the nodes of a tree, and a softmax below each of them.

    A node is a prefix with one more value. The probability of a configuration is the product along its path, where each
    value is drawn among those that its prefix leaves possible; it sums to 1 over the configurations that exist.
    """

    value: Tensor
    node: Tensor
    prefix: Tensor
    path: Tensor

    def __init__(self, configurations: Tensor) -> None:
        super().__init__()
        sizes = configurations.amax(0) + 1
        first = sizes.cumsum(0) - sizes
        # the column of 0 is the root
        rooted = torch.cat([torch.zeros_like(configurations[:, :1]), configurations], 1)
        value, node, prefix, path = [], [], [], []
        nodes, prefixes = 0, 0
        for knob in range(len(sizes)):
            level, node_of = rooted[:, : knob + 2].unique(dim=0, return_inverse=True)
            above, prefix_of = level[:, :-1].unique(dim=0, return_inverse=True)
            value.append(level[:, -1] + first[knob])
            node.append(node_of + nodes)
            prefix.append(prefix_of + prefixes)
            path.append(torch.zeros(len(above), int(sizes.sum())).scatter_(1, above[:, 1:] + first[:knob], 1.0))
            nodes, prefixes = nodes + len(level), prefixes + len(above)
        self.register_buffer("value", torch.cat(value), persistent=False)  # [nodes]: index among all knobs' values
        self.register_buffer("node", torch.stack(node), persistent=False)  # [K, C]: the nodes of a configuration
        self.register_buffer("prefix", torch.cat(prefix), persistent=False)  # [nodes]: the prefix above a node
        self.register_buffer("path", torch.cat(path), persistent=False)  # [prefixes, values]: 1 where a value is set
        self.prefixes = prefixes

    def log_probs(self, logits: Tensor, mask: Tensor | None) -> Tensor:
        """Logits of the nodes [*, nodes] → log-probs of the configurations [*, C]."""
        if mask is not None:
            alive = torch.zeros_like(logits, dtype=torch.bool)
            for nodes in self.node:  # a node is possible if an allowed configuration leads through it
                alive = alive.scatter_reduce(-1, nodes.expand(mask.shape), mask, "amax")
            logits = logits.masked_fill(~alive, -torch.inf)
        where = self.prefix.expand(logits.shape)
        shape = (*logits.shape[:-1], self.prefixes)
        # log-sum-exp inside each prefix; an impossible prefix stays at 0
        top = logits.new_full(shape, -torch.inf).scatter_reduce(-1, where, logits.detach(), "amax")
        top = top.masked_fill(top == -torch.inf, 0.0)
        total = logits.new_zeros(shape).scatter_add(-1, where, (logits - top.gather(-1, where)).exp())
        normal = top + total.clamp_min(torch.finfo(logits.dtype).tiny).log()
        log_probs = (logits - normal.gather(-1, where))[..., self.node].sum(-2)
        return log_probs if mask is None else log_probs.masked_fill(~mask, -torch.inf)


class IndependentHead(nn.Module):
    """A categorical for each knob, as in the original controller: ln p = Σ_k ln p_k.

    If some combinations do not exist, each knob is drawn among the values that the knobs before it leave possible. On a
    full grid the knobs are independent.
    """

    def __init__(self, hidden: int, configurations: Tensor, members: int = 1) -> None:
        super().__init__()
        self.tree = _PrefixTree(configurations)
        self.logits = MemberLinear(members, hidden, self.tree.path.shape[1])

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.tree.log_probs(self.logits(hidden)[..., self.tree.value], mask)


class AutoregressiveHead(nn.Module):
    """Knob after knob: ln p = Σ_k ln p(value_k | hidden, earlier values). The earlier values are embedded and added to
    the hidden vector; all prefixes are computed at once."""

    def __init__(self, hidden: int, configurations: Tensor, members: int = 1) -> None:
        super().__init__()
        self.tree = _PrefixTree(configurations)
        values = self.tree.path.shape[1]
        self.embedding = MemberLinear(members, values, hidden)
        self.logits = MemberLinear(members, hidden, values)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        tree, (members, n, _) = self.tree, hidden.shape
        before = self.embedding(tree.path.expand(members, -1, -1))  # [M, prefixes, H]
        states = nn.functional.silu(hidden.unsqueeze(2) + before.unsqueeze(1)).flatten(1, 2)
        of_values = self.logits(states).unflatten(1, (n, tree.prefixes))
        return tree.log_probs(of_values[:, :, tree.prefix, tree.value], mask)


HEADS: dict[str, type[JointHead] | type[AdditiveHead] | type[IndependentHead] | type[AutoregressiveHead]] = {
    "additive": AdditiveHead,
    "autoregressive": AutoregressiveHead,
    "independent": IndependentHead,
    "joint": JointHead,
}
