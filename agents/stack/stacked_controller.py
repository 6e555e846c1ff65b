"""The stacked policy: a network trained by GRPO and experts beside it, weighted by what each got out of fold.

Every member says what it expects of each configuration; the weighted mean decides, inside a guard. A decision is matrix
products and walks down trees, about a millisecond; without experts it is the network's alone.

Under a deadline a member says an expected utility and the probability of being in time. At a price λ it says an
accuracy Â and a cost L̂, and ΣwÂ − λ·ΣwL̂ decides: linear in λ, so that the λ for a mean budget can be found exactly
(`knobwise.agents.stack.prices`); the guard of that sense is around the whole (`knobwise.agents.stack.priced_policy`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.heads import masked_log_softmax
from knobwise.agents.controller.networks import UtilityNetwork
from knobwise.agents.judging.baselines import BudgetAwareStatic
from knobwise.agents.predictors.experts import Expert, Fitted, Measured, fit_experts
from knobwise.agents.predictors.folds import folds_of
from knobwise.agents.predictors.prediction import Prediction, pick
from knobwise.agents.stack.guard import Guard
from knobwise.agents.stack.prices import choose_at_price
from knobwise.agents.stack.weights import HeldOut, stack_weights, weighted
from knobwise.agents.training.settings import PolicyConfig
from knobwise.envs.configurations.reward import utility
from knobwise.envs.tables.profile_table import ProfileTable

GUARD_SETTINGS = ("level", "confidence", "level_cost")

HOPELESS = 0.01
"""Where no configuration is more likely than this to be in time, the one expected to be fastest is taken."""


class View(NamedTuple):
    """What one member, or all together, expect under one deadline for each request."""

    score: Tensor
    """[n, C], expected utility."""
    meets: Tensor
    """[n, C], probability of meeting the deadline."""
    log_latency: Tensor
    """[n, C], ln ms."""


class Costs(NamedTuple):
    """What one member, or all together, expect of each request, whatever the price."""

    accuracy: Tensor
    """[n, C]."""
    latency_ms: Tensor
    """[n, C]."""


def _of_expert(prediction: Prediction, limits: Tensor) -> View:
    return View(prediction.expected_utility(limits), prediction.meets(limits), prediction.log_latency)


class StackedController(nn.Module):
    """Decides by Σ_k w_k·score_k over a network and experts, inside a guard.

    Args:
        network: a controller of structure `utility`; its features and configurations are those of the whole.
        experts: what stands beside it.
        weights: float [1 + experts], the network's first.
        guard: prices of a miss and fall-backs for deadlines; None for none.
        static: what the guard falls back to.
        held_out_worth: mean utility, or at prices mean of accuracy − latency/worth, out of fold and without the guard.
    """

    weights: Tensor

    def __init__(
        self,
        network: Controller,
        experts: Sequence[Expert],
        weights: Tensor,
        guard: Guard | None = None,
        static: BudgetAwareStatic | None = None,
        held_out_worth: float = float("nan"),
    ) -> None:
        super().__init__()
        self.held_out_worth = held_out_worth
        self.network, self.experts = network, nn.ModuleList(experts)
        self.register_buffer("weights", weights.double())
        self.guard, self.static = guard, static
        self.knobs, self.index = network.knobs, network.index
        self.normaliser, self.config, self.priced = network.normaliser, network.config, network.priced
        self.limit_key = network.limit_key

    @property
    def configurations(self) -> Tensor:
        """int64 [C, K]."""
        return self.network.configurations

    def features(self, blocks: Mapping[str, Tensor], *shape: int) -> Tensor:
        """Normalised features [*shape, width]."""
        return self.network.features(blocks, *shape)

    def view(self, features: Tensor, limits: Tensor) -> View:
        """Normalised features [n, width], deadlines [n] in ms → what the whole expects, [n, C] each."""
        views = [View(*_mean(_of_members(self.network, features, limits)))] if self.weights[0] > 0 else []
        return View(*self._joined([*views, *(_of_expert(p, limits) for p in self._predictions(features))]))

    def accuracy_and_cost(self, features: Tensor) -> Costs:
        """Normalised features [n, width] → ΣwÂ and ΣwL̂ in ms, [n, C] each: what decides at a price."""
        costs = [Costs(*_mean(_costs_of_members(self.network, features)))] if self.weights[0] > 0 else []
        return Costs(*self._joined([*costs, *(Costs(p.accuracy, p.latency_ms) for p in self._predictions(features))]))

    def _predictions(self, features: Tensor) -> list[Prediction]:
        """Of the experts that count."""
        x = features if features.shape[-1] else features.new_zeros(len(features), 1)
        return [expert(x) for weight, expert in zip(self.weights[1:].tolist(), self.experts, strict=True) if weight > 0]

    def _joined(self, said: Sequence[tuple[Tensor, ...]]) -> Iterator[Tensor]:
        used = self.weights[self.weights > 0]
        return (weighted(parts, used) for parts in zip(*said, strict=True))

    def forward(self, features: Tensor, limit: Tensor, mask: Tensor | None = None) -> Tensor:
        """Normalised features float [*, width], limits float [*] in ms, mask bool [*, C] → log-probs [*, C].

        The guard is not in them; `choose` has it.
        """
        network, flat = self.network.network, limit.reshape(-1)
        x = features.reshape(len(flat), features.shape[-1])
        assert isinstance(network, UtilityNetwork)
        if self.priced:
            accuracy, cost = self.accuracy_and_cost(x)
            score = accuracy - cost / flat.unsqueeze(1)
        else:
            score = self.view(x, flat).score
        return masked_log_softmax(network.sharpness * score.reshape(*limit.shape, -1), mask)

    @torch.no_grad()
    def choose(self, features: Mapping[str, Tensor], limits: Tensor, mask: Tensor | None = None) -> Tensor:
        """Decisions inside the guard: blocks [n, d], limits [n] in ms, mask bool [n, C] → configurations int64 [n]."""
        device = self.configurations.device
        normal = self.features({name: block.to(device) for name, block in features.items()}, len(limits))
        limits = limits.to(device, torch.float32)
        if mask is None:
            mask = torch.ones(len(limits), len(self.configurations), dtype=torch.bool)
        mask = mask.to(device)
        if self.priced:
            return choose_at_price(*self.accuracy_and_cost(normal), 1 / limits.double(), mask)
        score, meets, log_latency = self.view(normal, limits)
        if self.guard is None or self.static is None:
            chosen = pick(score, log_latency, mask)
        else:
            chosen = self.guard.choose(score, meets, limits, mask, self.static.choose({}, limits, mask))
        hopeless = meets.masked_fill(~mask, 0.0).amax(1) < HOPELESS
        return torch.where(hopeless, pick(-log_latency, log_latency, mask), chosen)

    def chosen(self) -> dict[str, Any]:
        """What was chosen on held-out samples, in plain values."""
        names = ["network", *(expert.name for expert in self.experts)]
        return {
            "weights": dict(zip(names, self.weights.tolist(), strict=True)),
            "settings": {expert.name: expert.settings for expert in self.experts},
        }

    def plain(self) -> dict[str, Any]:
        """Tensors and plain values, for a checkpoint."""
        guard = self.guard
        return {
            "network": self.network.plain(),
            "experts": [expert.plain() for expert in self.experts if isinstance(expert, Expert)],
            "weights": self.weights,
            "guard": guard and {name: getattr(guard, name) for name in GUARD_SETTINGS} | {"state": guard.state_dict()},
            "static": self.static and self.static.plain(),
            "held_out_worth": self.held_out_worth,
        }

    @classmethod
    def restored(cls, plain: dict[str, Any]) -> StackedController:
        """The inverse of `plain`, in eval mode."""
        guard = None
        if plain["guard"] is not None:
            state = plain["guard"]["state"]
            guard = Guard(len(state["budgets_ms"]), **{name: plain["guard"][name] for name in GUARD_SETTINGS})
            guard.load_state_dict(state)
        static = None if plain["static"] is None else BudgetAwareStatic.restored(plain["static"])
        experts = [Expert.restored(one) for one in plain["experts"]]
        network = Controller.restored(plain["network"])
        return cls(network, experts, plain["weights"], guard, static, plain["held_out_worth"]).eval()


# -- fitting -----------------------------------------------------------------------------------------------------------


def _of_members(controller: Controller, features: Tensor, limits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Score, probability of being in time and log-latency of each member of a network, [M, n, C] each."""
    network, members = controller.network, controller.config.members
    assert isinstance(network, UtilityNetwork)
    outcomes, own = network.outcomes(features.expand(members, -1, -1)), limits.expand(members, -1)
    return network.scores(outcomes, own), network.meets(outcomes, own), outcomes.log_latency


def _costs_of_members(controller: Controller, features: Tensor) -> tuple[Tensor, Tensor]:
    """Accuracy and latency in ms that each member of a network expects, [M, n, C] each."""
    network = controller.network
    assert isinstance(network, UtilityNetwork)
    outcomes = network.outcomes(features.expand(controller.config.members, -1, -1))
    return outcomes.accuracy, outcomes.latency_ms


def _mean(of_members: tuple[Tensor, ...]) -> Iterator[Tensor]:
    return (part.mean(0) for part in of_members)


class _Basis(NamedTuple):
    """What every member is asked on: the rows, and who has not seen which."""

    measured: Measured
    fitted: list[Fitted]
    features: Tensor
    """Normalised, [n, width]."""
    owner: Tensor
    """int64 [n], the member of the network that each row was held out of."""

    def own(self, of_members: tuple[Tensor, ...]) -> Iterator[Tensor]:
        """[M, n, C] each → [n, C], of every row what the member says that has not seen it."""
        return (part[self.owner, torch.arange(len(self.owner))] for part in of_members)


def _basis(
    table: ProfileTable, rows: Tensor, network: Controller, config: PolicyConfig, budgets_ms: Tensor, seed: int
) -> _Basis:
    """Fit the experts; `budgets_ms` are the deadlines that their spreads are chosen for, none at a price."""
    measured = Measured.of(table, rows, budgets_ms, seed)
    fitted = fit_experts(table, measured, network.normaliser, config.experts, seed) if network.normaliser.width else []
    owner = torch.empty(len(rows), dtype=torch.int64)
    for member, (_, hold) in enumerate(folds_of(table, rows, seed, network.config.members)):
        owner[torch.from_numpy(hold)] = member
    features = network.features({name: block[rows] for name, block in table.features.items()}, len(rows))
    return _Basis(measured, fitted, features, owner)


@torch.no_grad()
def fit_stack(
    table: ProfileTable, rows: Tensor, network: Controller, config: PolicyConfig, limits: Tensor, seed: int
) -> StackedController:
    """Fit the experts beside a network for deadlines, weigh all of them, calibrate the guard: all out of fold.

    Args:
        table: the profile.
        rows: int64 [n], what the network's members were fitted on in folds (`folds_of` of the same seed).
        network: of structure `utility`, at least two members.
        config: which experts, and the guard.
        limits: float [B], budgets in ms that the utility of a decision is averaged over.
        seed: of folds and trees.
    """
    basis = _basis(table, rows, network, config, limits, seed)
    measured = basis.measured
    each = [limit.expand(len(rows)) for limit in limits]
    views = [[View(*basis.own(_of_members(network, basis.features, limit))) for limit in each]]
    views += [[_of_expert(one.out_of_fold, limit) for limit in each] for one in basis.fitted]
    scores, meets, _ = (
        [torch.stack([getattr(v, part) for v in of_limits]) for of_limits in views] for part in View._fields
    )
    got = utility(measured.accuracy, measured.latency_ms, limits[:, None, None])
    held_out = HeldOut(scores, got, measured.mask)
    weights = stack_weights(held_out)
    static = guard = None
    if config.guard:
        static = BudgetAwareStatic(table, rows)
        guard = _calibrated(table, measured, held_out, meets, weights, config)
    worth_held_out = held_out.mean_worth(weighted(scores, weights))
    return StackedController(network, [f.expert for f in basis.fitted], weights, guard, static, worth_held_out).eval()


@torch.no_grad()
def fit_priced_stack(
    table: ProfileTable, rows: Tensor, network: Controller, config: PolicyConfig, worths: Tensor, seed: int
) -> tuple[StackedController, Costs]:
    """Fit the experts beside a network for prices and weigh all of them out of fold.

    Args:
        table, rows, network, config, seed: see `fit_stack`.
        worths: float [B], in ms, that the mean of accuracy − latency/worth is averaged over.

    Returns:
        The stack, and what it expects of these rows with nothing in it that has seen them, its weights included.
    """
    basis = _basis(table, rows, network, config, worths[:0], seed)
    measured = basis.measured
    said = [Costs(*basis.own(_costs_of_members(network, basis.features)))]
    said += [Costs(one.out_of_fold.accuracy, one.out_of_fold.latency_ms) for one in basis.fitted]
    worth = worths[:, None, None]
    scores = [costs.accuracy - costs.latency_ms / worth for costs in said]
    held_out = HeldOut(scores, (measured.accuracy - measured.latency_ms / worth).nan_to_num(), measured.mask)
    weights = stack_weights(held_out)
    costs = Costs(*(torch.zeros_like(part) for part in said[0]))
    for hold, own in _weights_of_folds(measured, held_out, weights):
        for joined, parts in zip(costs, zip(*said, strict=True), strict=True):
            joined[hold] = weighted([part[hold] for part in parts], own).to(joined.dtype)
    stack = StackedController(network, [one.expert for one in basis.fitted], weights)
    stack.held_out_worth = held_out.mean_worth(weighted(scores, weights))
    return stack.eval(), costs


def _weights_of_folds(measured: Measured, held_out: HeldOut, weights: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """For each fold its positions int64 [h], and weights that have not seen it."""
    for fit, hold in measured.folds:
        own = stack_weights(held_out.take(torch.from_numpy(fit))) if len(held_out.scores) > 1 else weights
        yield torch.from_numpy(hold), own


def _calibrated(
    table: ProfileTable,
    measured: Measured,
    held_out: HeldOut,
    meets: Sequence[Tensor],
    weights: Tensor,
    config: PolicyConfig,
) -> Guard:
    """The guard, calibrated with weights that have not seen the fold they are judged on either."""
    score, likely = torch.zeros_like(meets[0]), torch.zeros_like(meets[0])
    static_choice = torch.zeros(score.shape[:2], dtype=torch.int64)
    of_folds = _weights_of_folds(measured, held_out, weights)
    for (fit, _), (place, own) in zip(measured.folds, of_folds, strict=True):
        score[:, place] = weighted([s[:, place] for s in held_out.scores], own)
        likely[:, place] = weighted([m[:, place] for m in meets], own)
        static = BudgetAwareStatic(table, measured.rows[torch.from_numpy(fit)])
        for number, budget in enumerate(measured.budgets_ms):
            mask = measured.mask[place]
            static_choice[number, place] = static.choose({}, budget.expand(len(place)), mask)
    return Guard.calibrate(
        budgets_ms=measured.budgets_ms,
        score=score,
        meets=likely,
        accuracy=measured.accuracy,
        latency_ms=measured.latency_ms,
        mask=measured.mask,
        static_choice=static_choice,
        **{name: getattr(config, name) for name in GUARD_SETTINGS},
    )
