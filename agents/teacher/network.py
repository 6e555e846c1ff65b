"""The network of a teacher: it predicts accuracy and latency of every configuration, from which the
best choice under any limit follows. M of them lie side by side, each fitted on other samples.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.controller.side_by_side import StackedLinear
from knobwise.agents.teacher.outcomes import Prediction
from knobwise.envs.bandit.budgets import log_measured
from knobwise.losses.dropout import Dropout

WIDEST = 132
"""With more features no network is tried that also reads them in bins; so many had the widest
tables that gained."""
BINS = 8
"""Bins of a feature, with as many samples each."""
BEYOND = 1e9
"""Edges of bins that no feature reaches: the inputs from bins are all 0, as if there were none."""


class PredictedOutcomes(NamedTuple):
    """Predicted outcomes of every configuration, [*, C] each.

    Attributes:
        accuracy_logits: of the accuracy.
        log_latency: the mean of ln ms.
        spread: the standard deviation of ln ms.
    """

    accuracy_logits: Tensor
    log_latency: Tensor
    spread: Tensor

    def predicted(self) -> Prediction:
        """Turn logits of accuracy into probabilities; ln ms and its spread stay, [*, C] each."""
        return Prediction(
            accuracy=self.accuracy_logits.sigmoid(),
            log_latency=self.log_latency,
            spread=self.spread,
        )


class OutcomeNetwork(nn.Module):
    """Predicts accuracy and log-latency of every configuration.

    The heads start at 0 on top of the table's means; a linear skip connects the inputs with all
    outputs but the spread. With `bins` it also reads every feature cut into bins, piecewise
    linearly (Gorishniy et al. 2022, "On Embeddings for Numerical Features in Tabular Deep
    Learning", section 3.1).
    """

    edges: Tensor

    def __init__(self, features: int, count: int, config: PolicyConfig, bins: bool) -> None:
        super().__init__()
        networks = config.fold_networks
        self.dropout = Dropout(config.teacher_dropout)
        self.register_buffer("edges", torch.zeros(BINS + 1, features if bins else 0))
        inputs = features * (1 + BINS * bins)
        widths = [inputs] + [config.teacher_hidden] * config.layers
        self.layers = nn.ModuleList(
            StackedLinear(networks, before, after) for before, after in itertools.pairwise(widths)
        )
        # accuracy, mean and spread of ln ms
        self.outcome_head = StackedLinear(networks, config.teacher_hidden, 3 * count, zero=True)
        self.skip = StackedLinear(networks, inputs, 2 * count, zero=True)

    @torch.no_grad()
    def start_from(
        self, x: Tensor, accuracy: Tensor, latency_ms: Tensor, network_rows: Tensor
    ) -> None:
        """Begin at the means of a table.

        Args:
            x: features [n, d].
            accuracy, latency_ms: [n, C], NaN where not profiled.
            network_rows: bool [M, n], which samples each network is fitted on.
        """
        # bins with as many samples each
        shares = torch.linspace(0, 1, BINS + 1)
        for column in range(self.edges.shape[1]):
            self.edges[:, column] = x[:, column].quantile(shares)
        log_latency = log_measured(latency_ms)
        # what was held out of a network must not be in what it starts from
        for network, mine in enumerate(network_rows):
            start = _means(accuracy[mine], log_latency[mine])
            self.outcome_head.bias[network, 0].copy_(torch.cat(start))

    def forward(self, x: Tensor) -> PredictedOutcomes:
        """Predict outcomes [M, n, C] for features [M, n, d]."""
        if self.edges.shape[1]:
            x = torch.cat([x, self._shares(x)], -1)
        # residual layers
        hidden = functional.silu(self.layers[0](x))
        for layer in self.layers[1:]:
            hidden = hidden + functional.silu(layer(self.dropout(hidden)))
        hidden = self.dropout(hidden)
        # the heads, and the linear skip beside them
        logits, log_latency, log_spread = self.outcome_head(hidden).chunk(3, -1)
        more_logits, more_latency = self.skip(x).chunk(2, -1)
        return PredictedOutcomes(
            logits + more_logits,
            log_latency + more_latency,
            log_spread.clamp(-5.0, 1.5).exp(),
        )

    @torch.no_grad()
    def leave_out_bins(self) -> None:
        """Make an untrained network with bins the same as one that never had these inputs."""
        self.edges.fill_(BEYOND)
        for parameter in self.layers[0].parameters():
            parameter.mul_((1 + BINS) ** 0.5)  # as wide a start as fewer inputs give

    def _shares(self, x: Tensor) -> Tensor:
        """Return the share of each bin that lies below x: [*, d] → [*, BINS · d]."""
        low = self.edges[:-1]
        width = self.edges.diff(dim=0).clamp_min(1e-6)
        return ((x.unsqueeze(-2) - low) / width).clamp(0, 1).flatten(-2)


def _means(accuracy: Tensor, log_latency: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logit of the mean accuracy, and mean and ln standard deviation of ln ms, [C] each.

    Each configuration counts one more cell, half right and as slow as the average. NaN is not
    profiled.
    """
    profiled = ~accuracy.isnan()
    count = profiled.sum(0)
    mean = ((accuracy.nan_to_num().sum(0) + 0.5) / (count + 1)).clamp(0.02, 0.98)
    centre = (log_latency.nan_to_num().sum(0) + log_latency[profiled].mean()) / (count + 1)
    square = (log_latency - centre).square().nan_to_num().sum(0)
    spread = ((square + square.sum() / count.sum()) / (count + 1)).sqrt().clamp_min(0.02)
    return mean.logit(), centre, spread.log()
