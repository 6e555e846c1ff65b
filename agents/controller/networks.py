"""The networks of a controller: normalised features and a budget in, log-probs of every configuration out.

`forward(x [M, n, d], limit [M, n], mask bool [M, n, C] or None)` → log-probs [M, n, C]. M members of an ensemble are
side by side, each fitted on other samples. `limit` is the request's budget in ms, or under a mean budget the worth of a
right answer in ms (1/λ), or under weights [M, n, 2] this worth and that in the unit of the further cost.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from knobwise.agents.controller.settings import PolicyConfig
from knobwise.envs.configurations.budgets import LEAST_LATENCY_MS, BudgetEncoding, log_measured, log_ms
from knobwise.envs.configurations.reward import at_worths

WIDEST = 132
"""With more features no network is tried that also reads them in bins; so many had the widest tables that gained."""
BINS = 8
"""Bins of a feature, with as many samples each."""
BEYOND = 1e9
"""Edges of bins that no feature reaches: the inputs from bins are all 0, as if there were no bins."""


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


class IndependentHead(nn.Module):
    """A categorical for each knob, as in the original controller: ln p = Σ_k ln p_k.

    If some combinations do not exist or the mask forbids them, it is the distribution of independent draws that are
    repeated until the combination is allowed: one softmax of the summed logits over the allowed configurations.
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
        """[M, n, H] and bool [M, n, C] → normalised log-probs [M, n, C], −inf where the mask is False."""
        return masked_log_softmax(self.logits(hidden) @ self.places, mask)


class ValueHead(MemberLinear):
    """Expects the reward of a context, V(s), in the place of a head over the knobs: [M, n, H] → [M, n, 1]."""

    def __init__(self, members: int, hidden: int) -> None:
        super().__init__(members, hidden, 1, zero=True)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(hidden)


class KnobNetwork(nn.Module):
    """A plain MLP with a head over the knobs.

    `typical`, [2, C], is not used for decisions: mean and standard deviation of each configuration's ln ms.
    """

    typical: Tensor

    def __init__(self, features: int, configurations: Tensor, encoding: BudgetEncoding, config: PolicyConfig) -> None:
        super().__init__()
        self.encoding, self.dropout, members = encoding, config.dropout, config.members
        widths = [features + encoding.width] + [config.hidden] * config.layers
        self.layers = nn.ModuleList(MemberLinear(members, i, o) for i, o in itertools.pairwise(widths))
        self.head: IndependentHead | ValueHead = IndependentHead(config.hidden, configurations, members)
        self.register_buffer("typical", torch.zeros(2, len(configurations)))

    def start_from(self, accuracy: Tensor, latency_ms: Tensor) -> None:
        """Note what is typical in a table: accuracy and latency [n, C], NaN where not profiled."""
        _, mean, log_spread = _means(accuracy, log_measured(latency_ms))
        self.typical.copy_(torch.stack([mean, log_spread.exp()]))

    def forward(self, x: Tensor, limit: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden = torch.cat([x, self.encoding(limit)], -1)
        for number, layer in enumerate(self.layers):
            if number:
                hidden = functional.dropout(hidden, self.dropout, self.training)
            hidden = functional.silu(layer(hidden))
        return self.head(hidden, mask)


class Outcomes(NamedTuple):
    """Predictions of a `UtilityNetwork` for every configuration, [M, n, C] each (`spread` is the standard deviation of
    ln ms), and the hidden vector [M, n, H]; under weights also ln of the expected further cost."""

    accuracy_logits: Tensor
    log_latency: Tensor
    spread: Tensor
    hidden: Tensor
    log_cost: Tensor | None = None

    @property
    def accuracy(self) -> Tensor:
        return torch.sigmoid(self.accuracy_logits)

    @property
    def latency_ms(self) -> Tensor:
        """E[latency] in ms of a log-normal variable: exp(μ + σ²/2)."""
        return torch.exp(self.log_latency + self.spread.square() / 2)


class UtilityNetwork(nn.Module):
    """Predicts accuracy and log-latency of every configuration; logits = s·score.

    Under a deadline b the score is Â·Φ((ln b − μ)/σ) plus a residual, learned from the hidden vector and the limit. At
    a price λ it is only Â − λ·exp(μ + σ²/2), so that the price for a mean budget can be found exactly
    (`knobwise.agents.stack.prices`). The heads start at 0 on top of the table's means, so that training starts at the
    best static choice; a linear skip connects the inputs with accuracy and latency. With `bins` it also reads every
    feature cut into bins, piecewise linearly (Gorishniy et al. 2022, "On Embeddings for Numerical Features in Tabular
    Deep Learning", section 3.1).

    `priced`: the limit is not a deadline but the worth of a right answer in ms, 1/λ. `weighs`: it is a pair of worths,
    the further cost K̂ is predicted too, and the score is Â − L̂/worth − K̂/worth (the preference of Abels et al. 2019,
    "Dynamic Weights in Multi-Objective Deep Reinforcement Learning", as an input of the policy).
    """

    edges: Tensor
    sharpness: Tensor

    def __init__(
        self,
        features: int,
        configurations: Tensor,
        encoding: BudgetEncoding,
        config: PolicyConfig,
        priced: bool,
        bins: bool,
        weighs: bool = False,
    ) -> None:
        super().__init__()
        self.weighs = weighs
        self.encoding, self.dropout, self.priced, members = encoding, config.dropout, priced, config.members
        self.register_buffer("edges", torch.zeros(BINS + 1, features if bins else 0))
        self.register_buffer("sharpness", torch.tensor(20.0))
        inputs, count = features * (1 + BINS * bins), len(configurations)
        widths = [inputs] + [config.hidden] * config.layers
        self.layers = nn.ModuleList(MemberLinear(members, i, o) for i, o in itertools.pairwise(widths))
        self.outcome_head = MemberLinear(members, config.hidden, (3 + weighs) * count, zero=True)
        self.skip = MemberLinear(members, inputs, (2 + weighs) * count, zero=True)
        if not priced:
            self.modulation = MemberLinear(members, encoding.width, config.hidden)
            self.residual = MemberLinear(members, config.hidden, count, zero=True)

    @torch.no_grad()
    def start_from(
        self,
        x: Tensor,
        accuracy: Tensor,
        latency_ms: Tensor,
        member_rows: Tensor | None = None,
        cost: Tensor | None = None,
    ) -> None:
        """Begin at the means of a table: features [n, d], accuracy, latency and under weights further cost [n, C], NaN
        where not profiled, and which samples each member is fitted on, bool [M, n], None for all."""
        shares = torch.linspace(0, 1, BINS + 1)
        for column in range(self.edges.shape[1]):
            self.edges[:, column] = x[:, column].quantile(shares)
        if member_rows is None:
            member_rows = torch.ones(len(self.outcome_head.bias), len(x), dtype=torch.bool)
        log_latency = log_measured(latency_ms)
        for member, mine in enumerate(member_rows):  # what was held out of a member must not be in what it starts from
            start = [*_means(accuracy[mine], log_latency[mine]), *([] if cost is None else [_log_mean(cost[mine])])]
            self.outcome_head.bias[member, 0].copy_(torch.cat(start))

    def outcomes(self, x: Tensor) -> Outcomes:
        """Features [M, n, d] → predictions."""
        if self.edges.shape[1]:
            x = torch.cat([x, self._shares(x)], -1)
        hidden = functional.silu(self.layers[0](x))
        for layer in self.layers[1:]:
            hidden = hidden + functional.silu(layer(functional.dropout(hidden, self.dropout, self.training)))
        hidden = functional.dropout(hidden, self.dropout, self.training)
        logits, log_latency, log_spread, *cost = self.outcome_head(hidden).chunk(3 + self.weighs, -1)
        more_logits, more_latency, *more_cost = self.skip(x).chunk(2 + self.weighs, -1)
        spread = log_spread.clamp(-5.0, 1.5).exp()
        logits, log_latency = logits + more_logits, log_latency + more_latency
        return Outcomes(logits, log_latency, spread, hidden, cost[0] + more_cost[0] if self.weighs else None)

    @property
    def reads_bins(self) -> bool:
        return bool((self.edges < BEYOND).any())

    @torch.no_grad()
    def leave_out_bins(self) -> None:
        """Make an untrained network with bins one without: the same as if it had never had these inputs."""
        self.edges.fill_(BEYOND)
        for parameter in self.layers[0].parameters():
            parameter.mul_((1 + BINS) ** 0.5)  # as wide a start as fewer inputs give

    def _shares(self, x: Tensor) -> Tensor:
        """How much of each bin lies below [*, d] → [*, BINS · d]."""
        low, width = self.edges[:-1], self.edges.diff(dim=0).clamp_min(1e-6)
        return ((x.unsqueeze(-2) - low) / width).clamp(0, 1).flatten(-2)

    def meets(self, outcomes: Outcomes, budgets_ms: Tensor) -> Tensor:
        """P(latency ≤ budget), [M, n, C]."""
        return torch.special.ndtr((log_ms(budgets_ms).unsqueeze(-1) - outcomes.log_latency) / outcomes.spread)

    def scores(self, outcomes: Outcomes, limit: Tensor) -> Tensor:
        """Expected utility and residual, or at a price Â − L̂/worth, or at two of them: [M, n, C]."""
        if outcomes.log_cost is not None:
            return at_worths(outcomes.accuracy, outcomes.latency_ms, outcomes.log_cost.exp(), limit)
        if self.priced:
            return outcomes.accuracy - outcomes.latency_ms / limit.unsqueeze(-1)
        residual: Tensor = self.residual(outcomes.hidden * (1 + self.modulation(self.encoding(limit))))
        return outcomes.accuracy * self.meets(outcomes, limit) + residual

    def log_probs(self, outcomes: Outcomes, limit: Tensor, mask: Tensor | None = None) -> Tensor:
        """Log-probs from predictions made before, [M, n, C]."""
        return masked_log_softmax(self.sharpness * self.scores(outcomes, limit), mask)

    def forward(self, x: Tensor, limit: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.log_probs(self.outcomes(x), limit, mask)

    def sharpen(self, share: float) -> None:
        """Set s, which rises from 20 to 60 during fine-tuning, for a share of it in 0 … 1."""
        self.sharpness.fill_(20.0 * math.exp(math.log(3.0) * share))


def _means(accuracy: Tensor, log_latency: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logit of the mean accuracy, mean of ln ms, and ln of its standard deviation, [C] each; NaN is not profiled.

    Each configuration counts one more cell, half right and as slow as the average.
    """
    profiled = ~accuracy.isnan()
    count = profiled.sum(0)
    mean = ((accuracy.nan_to_num().sum(0) + 0.5) / (count + 1)).clamp(0.02, 0.98)
    centre = (log_latency.nan_to_num().sum(0) + log_latency[profiled].mean()) / (count + 1)
    square = (log_latency - centre).square().nan_to_num().sum(0)
    spread = ((square + square.sum() / count.sum()) / (count + 1)).sqrt().clamp_min(0.02)
    return mean.logit(), centre, spread.log()


def _log_mean(cost: Tensor) -> Tensor:
    """ln of the mean cost, [C], likewise with one more cell, of the average cost; a millionth of it counts as 0."""
    average = cost.nanmean()
    mean = (cost.nansum(0) + average) / ((~cost.isnan()).sum(0) + 1)
    return mean.clamp_min((1e-6 * average).clamp_min(LEAST_LATENCY_MS)).log()
