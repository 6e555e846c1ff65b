"""The network of a controller: normalised features and a limit in, log-probs of every configuration
out.

All tensors have a first axis M, see `side_by_side`; think of M = 1.

A limit is the request's budget in ms, or under a mean budget the value of a right answer in ms
(1/λ).
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from knobwise.agents.controller.drift import drift_values
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.controller.side_by_side import StackedLinear
from knobwise.envs.bandit.budgets import BudgetEncoding
from knobwise.losses.dropout import Dropout


class KnobHeads(nn.Module):
    """A categorical for each knob, as in the original controller: ln p = Σ_k ln p_k.

    If some combinations do not exist or the mask forbids them, it is the distribution of
    independent draws that are repeated until the combination is allowed: one softmax of the summed
    logits over the allowed configurations.

    Where the table has at most half of the grid's cells, as where its knobs are not a grid at all,
    a sum over knobs says little, and there is one head over the configurations.

    Attributes:
        one_hot: float32 [values of all knobs, C], 1 for the values that make up a configuration;
            None for one head over the configurations.
    """

    one_hot: Tensor | None

    def __init__(self, hidden: int, configurations: Tensor, networks: int = 1) -> None:
        super().__init__()
        count = len(configurations)
        # in Python's integers: a grid of 63 knobs has more cells than int64 counts
        self.by_knobs = 2 * count > math.prod((configurations.amax(0) + 1).tolist())
        one_hot = None
        if self.by_knobs:
            values = [functional.one_hot(column) for column in configurations.T]
            one_hot = torch.cat(values, 1).T.float().contiguous()
        self.register_buffer("one_hot", one_hot, persistent=False)
        # one logit for each knob value, or for each configuration
        outputs = count if one_hot is None else len(one_hot)
        self.logits = StackedLinear(networks, hidden, outputs)

    def forward(
        self, hidden: Tensor, mask: Tensor | None = None, further: Tensor | None = None
    ) -> Tensor:
        """Return log-probs [M, n, C] for hidden [M, n, H], −inf where the mask is False.

        `further` [M, n, C] is added to the logits of the configurations.
        """
        logits = self.logits(hidden)
        # a configuration's logit is the sum over its knob values
        if self.one_hot is not None:
            logits = logits @ self.one_hot
        if further is not None:
            logits = logits + further
        if mask is not None:
            logits = logits.masked_fill(~mask, -torch.inf)
        return logits.log_softmax(-1)


SLOPE = 4.0
"""How steeply the chance to be on time rises with the standardised ln budget, where training
begins."""


class UtilityHead(nn.Module):
    """Expects the utility of whole configurations, which a sum over knobs cannot express.

    It predicts accuracy and ln latency of every configuration. The expected utility under a budget
    is accuracy · P(on time), where P is logistic in the ln of budget / latency. The head is not
    fitted to outcomes: it learns through the policy's log-probs, as the heads of the knobs do.

    Args:
        networks, hidden, count: the networks M, the width of their last layer, configurations C.
        sharpness: how much a logit rises with the expected utility.
    """

    def __init__(self, networks: int, hidden: int, count: int, sharpness: float) -> None:
        super().__init__()
        self.sharpness = sharpness
        # logits of the accuracies, then standardised ln latencies
        self.outcomes = StackedLinear(networks, hidden, 2 * count, zero=True)
        self.log_slope = nn.Parameter(torch.full((networks, 1, count), math.log(SLOPE)))

    def forward(self, hidden: Tensor, z: Tensor) -> Tensor:
        """Return what a configuration's logit gains, [M, n, C].

        Args:
            hidden: [M, n, H].
            z: standardised ln budgets [M, n], see `BudgetEncoding`.
        """
        accuracy_logits, latency = self.outcomes(hidden).chunk(2, -1)
        on_time = (self.log_slope.exp() * (z.unsqueeze(-1) - latency)).sigmoid()
        return self.sharpness * accuracy_logits.sigmoid() * on_time


class ValueHead(StackedLinear):
    """Expects the reward of a context, V(s), in the place of heads: [M, n, H] → [M, n, 1]."""

    def __init__(self, networks: int, hidden: int) -> None:
        super().__init__(networks, hidden, 1, zero=True)

    def forward(
        self, hidden: Tensor, mask: Tensor | None = None, further: Tensor | None = None
    ) -> Tensor:
        return super().forward(hidden)


class KnobNetwork(nn.Module):
    """A plain MLP with heads over the knobs, the policy that GRPO trains and a run deploys.

    Attributes:
        values: float32 [V, C], see `drift_values`.
        utility: a head for whole configurations beside those of the knobs, or None.
    """

    values: Tensor

    def __init__(
        self,
        features: int,
        configurations: Tensor,
        encoding: BudgetEncoding,
        config: PolicyConfig,
    ) -> None:
        super().__init__()
        self.encoding = encoding
        self.dropout = Dropout(config.dropout or 0.0)
        networks = config.networks_trained
        # an input for each knob value: how much slower it is than the others, in ln ms
        self.register_buffer("values", drift_values(configurations, config.drift), persistent=False)
        widths = [features + encoding.width + len(self.values)] + [config.hidden] * config.layers
        self.layers = nn.ModuleList(
            StackedLinear(networks, before, after) for before, after in itertools.pairwise(widths)
        )
        self.head: KnobHeads | ValueHead = KnobHeads(config.hidden, configurations, networks)
        self.utility: UtilityHead | None = None
        if config.utility_head:
            count = len(configurations)
            self.utility = UtilityHead(networks, config.hidden, count, config.sharpness)

    def forward(
        self, x: Tensor, limit: Tensor, mask: Tensor | None = None, by_value: Tensor | None = None
    ) -> Tensor:
        """Return log-probs [M, n, C] for features [M, n, d], limits [M, n], mask [M, n, C], and
        the drift of each knob value [M, n, V] (see `drift_inputs`), None for none."""
        if by_value is None:
            by_value = x.new_zeros(*x.shape[:-1], len(self.values))
        z = self.encoding.standardised(limit)
        hidden = torch.cat([x, self.encoding.encoded(z), by_value], -1)
        # hidden layers → heads
        for i, layer in enumerate(self.layers):
            if i:
                hidden = self.dropout(hidden)
            hidden = functional.silu(layer(hidden))
        further = None
        if self.utility is not None:
            further = self.utility(hidden, z)
        return self.head(hidden, mask, further)
