"""The stacked policy: a network trained by GRPO and experts, weighted by how well each predicts out of fold.

Every member predicts each configuration; the weighted mean decides, inside a guard. A decision takes matrix products
and walks down trees, about a millisecond; without experts the network decides alone.

Under a deadline a member predicts an expected utility and the probability of being on time. At a price λ it predicts an
accuracy Â and a cost L̂, and ΣwÂ − λ·ΣwL̂ decides: linear in λ, so that the λ for a mean budget can be found exactly
(`knobwise.agents.stack.prices`). The guard for mean budgets is in `knobwise.agents.stack.priced_policy`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.networks import Outcomes, UtilityNetwork, masked_log_softmax
from knobwise.agents.controller.parts import AT_ONCE, in_parts
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.judging.baselines import BudgetAwareStatic
from knobwise.agents.predictors.experts import Expert, Experts, Fitted, Measured, Prediction, pick
from knobwise.agents.predictors.folds import folds_of
from knobwise.agents.stack.guard import Guard
from knobwise.agents.stack.prices import choose_at_price
from knobwise.agents.stack.weights import HeldOut, stack_weights, weighted
from knobwise.envs.configurations.budgets import LEAST_LATENCY_MS
from knobwise.envs.configurations.reward import expected_utility
from knobwise.envs.tables.profile_table import ProfileTable

GUARD_SETTINGS = ("level", "confidence", "level_cost")
HOPELESS = 0.01
"""If no configuration is more likely than this to be on time, the one expected to be fastest is chosen."""


class View(NamedTuple):
    """Expected utility, probability of meeting the deadline and ln ms for each request, [n, C] each, by one member or
    by all together."""

    score: Tensor
    meets: Tensor
    log_latency: Tensor

    @classmethod
    def of_network(cls, network: UtilityNetwork, outcomes: Outcomes, limits: Tensor) -> View:
        """Of M members side by side, [M, n, C] each."""
        limits = limits.expand(len(outcomes.hidden), -1)
        return cls(network.scores(outcomes, limits), network.meets(outcomes, limits), outcomes.log_latency)

    @classmethod
    def of_expert(cls, prediction: Prediction, limits: Tensor) -> View:
        return cls(prediction.expected_utility(limits), prediction.meets(limits), prediction.log_latency)


class MemberPredictions(NamedTuple):
    """What the members with a weight above 0 predict for n requests, whatever limits these: the M members of the
    network, [M, n, ·] each, None if it does not count, and the experts."""

    weights: list[float]
    network: UtilityNetwork
    outcomes: Outcomes | None
    experts: list[Prediction]

    @classmethod
    def from_features(
        cls, controller: Controller, experts: Iterable[nn.Module], weights: list[float], x: Tensor
    ) -> MemberPredictions:
        """From normalised features [n, width]; `weights` are those of the controller and of each expert."""
        network, outcomes = controller.network, network_outcomes(controller, x) if weights[0] > 0 else None
        assert isinstance(network, UtilityNetwork)
        predictions = [expert(x) for weight, expert in zip(weights[1:], experts, strict=True) if weight > 0]
        return cls([weight for weight in weights if weight > 0], network, outcomes, predictions)

    def view(self, limits: Tensor) -> View:
        """Joint predictions under deadlines [n] in ms."""
        views = [View.of_expert(prediction, limits) for prediction in self.experts]
        if self.outcomes is not None:
            of_members = View.of_network(self.network, self.outcomes, limits)
            views.insert(0, View(*(part.mean(0) for part in of_members)))
        return View(*(weighted(parts, self.weights) for parts in zip(*views, strict=True)))

    def drifted(self, offset: Tensor, scale: float) -> MemberPredictions:
        """The same on a machine where ln ms is off by `offset`, float [C], and its spread by the factor `scale`."""

        def moved(part: Any) -> Any:
            return part._replace(log_latency=part.log_latency + offset, spread=part.spread * scale)

        outcomes = None if self.outcomes is None else moved(self.outcomes)
        return self._replace(outcomes=outcomes, experts=[moved(prediction) for prediction in self.experts])

    def costs(self) -> tuple[Tensor, Tensor]:
        """ΣwÂ and ΣwL̂ in ms, [n, C] each, which decide at a price."""
        costs = [(prediction.accuracy, prediction.latency_ms) for prediction in self.experts]
        if self.outcomes is not None:
            costs.insert(0, (self.outcomes.accuracy.mean(0), self.outcomes.latency_ms.mean(0)))
        accuracy, latency_ms = (weighted(parts, self.weights) for parts in zip(*costs, strict=True))
        return accuracy, latency_ms


class StackedController(nn.Module):
    """Decides by Σ_k w_k·score_k over a network and experts, inside a guard.

    Args:
        network: a controller of structure `utility`; the stack has its features and configurations.
        weights: float [1 + experts], the network's first.
        guard, static: prices of a miss for deadlines, and the policy to fall back to; or None.
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

    def predictions(self, features: Tensor) -> MemberPredictions:
        """From normalised features [n, width]."""
        return MemberPredictions.from_features(self.network, self.experts, self.weights.tolist(), features)

    def view(self, features: Tensor, limits: Tensor) -> View:
        """Normalised features [n, width], deadlines [n] in ms → joint predictions, [n, C] each."""
        return self.predictions(features).view(limits)

    def preference(self, view: View, limits: Tensor) -> Tensor:
        """What the choice under deadlines [n] maximises, guard included, float64 [n, C] in units of accuracy."""
        worth, hopeless = view.score.double(), view.meets.amax(1, keepdim=True) < HOPELESS
        if self.guard is not None and self.static is not None:
            group = self.guard.groups(limits)
            # double because of the highest price
            worth = worth + self.guard.miss[group].unsqueeze(1) * view.meets.double()
            fixed = self.static.choose({}, limits).unsqueeze(1)
            static = torch.full_like(worth, -torch.inf).scatter_(1, fixed, 1.0)
            deployed = self.guard.deploy[group].unsqueeze(1)
            worth, hopeless = torch.where(deployed, worth, static), hopeless & deployed
        return torch.where(hopeless, -view.log_latency.double(), worth)

    def forward(self, features: Tensor, limit: Tensor, mask: Tensor | None = None) -> Tensor:
        """Normalised features float [*, width], limits float [*] in ms, mask bool [*, C] → log-probs [*, C].

        They ignore the guard, which `choose` applies.
        """
        network, flat = self.network.network, limit.reshape(-1)
        x = features.reshape(len(flat), features.shape[-1])
        assert isinstance(network, UtilityNetwork)
        if self.priced:
            accuracy, cost = self.predictions(x).costs()
            score = accuracy - cost / flat.unsqueeze(1)
        else:
            score = self.view(x, flat).score
        return masked_log_softmax(network.sharpness * score.reshape(*limit.shape, -1), mask)

    @torch.no_grad()
    def choose(self, features: Mapping[str, Tensor], limits: Tensor, mask: Tensor | None = None) -> Tensor:
        """Decisions inside the guard: blocks [n, d], limits [n] in ms, mask bool [n, C] → configurations int64 [n]."""
        if len(limits) > AT_ONCE:
            return in_parts(self.choose, features, limits, mask)
        device = self.configurations.device
        normal = self.features({name: block.to(device) for name, block in features.items()}, len(limits))
        return self.choose_from(self.predictions(normal), limits, mask)

    @torch.no_grad()
    def choose_from(self, predicted: MemberPredictions, limits: Tensor, mask: Tensor | None = None) -> Tensor:
        """The same from what the members predict, which serves any limits."""
        device = self.configurations.device
        limits = limits.to(device, torch.float32)
        shape = len(limits), len(self.configurations)
        mask = torch.ones(shape, dtype=torch.bool, device=device) if mask is None else mask.to(device)
        if self.priced:
            return choose_at_price(*predicted.costs(), 1 / limits.double(), mask)
        score, meets, log_latency = predicted.view(limits)
        hopeless = meets.masked_fill(~mask, 0.0).amax(1) < HOPELESS
        if self.guard is None or self.static is None:
            chosen = pick(score, log_latency, mask)
        else:
            chosen = self.guard.choose(score, meets, limits, mask, self.static.choose({}, limits, mask))
            hopeless &= self.guard.deploy[self.guard.groups(limits)]
        return torch.where(hopeless, pick(-log_latency, log_latency, mask), chosen)

    def chosen(self) -> dict[str, Any]:
        """The weights and settings chosen on held-out samples, in plain values."""
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
        experts = [Expert.restored(expert) for expert in plain["experts"]]
        network = Controller.restored(plain["network"])
        return cls(network, experts, plain["weights"], guard, static, plain["held_out_worth"]).eval()


# -- fitting -----------------------------------------------------------------------------------------------------------


def network_outcomes(controller: Controller, features: Tensor) -> Outcomes:
    """What the M members of a controller predict of normalised features [n, width], [M, n, ·] each."""
    assert isinstance(controller.network, UtilityNetwork)
    return controller.network.outcomes(features.expand(controller.config.members, -1, -1))


def _fit_members(
    table: ProfileTable,
    rows: Tensor,
    network: Controller,
    config: PolicyConfig,
    budgets_ms: Tensor,
    seed: int,
    experts: Experts | None,
) -> tuple[Measured, list[Fitted], Outcomes, tuple[Tensor, Tensor]]:
    """Fit the experts, unless there are `experts`; `budgets_ms` are the deadlines that their spreads are chosen for,
    empty at a price.

    Returns the rows' measurements, the experts, the outcomes [M, n, ·] that the network's members predict, and the
    index of what each row's own member predicts, the one that it was held out of: [M, n, C] → [n, C].
    """
    families = config.experts if network.normaliser.width else ()
    if experts is None:
        normaliser = network.normaliser if config.project else None
        experts = Experts.fit(table, rows, budgets_ms, families, seed, normaliser)
    owner = torch.empty(len(rows), dtype=torch.int64)
    for member, (_, hold) in enumerate(folds_of(table, rows, seed, network.config.members)):
        owner[torch.from_numpy(hold)] = member
    features = network.features({name: block[rows] for name, block in table.features.items()}, len(rows))
    outcomes = network_outcomes(network, features)
    return experts.measured, experts.of_families(families), outcomes, (owner, torch.arange(len(rows)))


@torch.no_grad()
def fit_stack(
    table: ProfileTable,
    rows: Tensor,
    network: Controller,
    config: PolicyConfig,
    limits: Tensor,
    seed: int,
    cost_ms: float = 0.0,
    experts: Experts | None = None,
) -> StackedController:
    """Fit the experts for deadlines, weigh all members and calibrate the guard, all out of fold. A member that is worth
    more alone than with the others, by more than chance, decides alone.

    Args:
        rows: int64 [n], the rows that the network's members were fitted on in folds (`folds_of` with the same seed).
        network: of structure `utility`, with at least two members.
        limits: float [B], budgets in ms that the utility of a decision is averaged over.
        seed: of folds and trees.
        cost_ms: what a decision takes from each budget.
        experts: fitted on the same rows, for the same limits; None fits those of `config`.
    """
    measured, fitted, outcomes, unseen = _fit_members(table, rows, network, config, limits, seed, experts)
    inner = network.network
    assert isinstance(inner, UtilityNetwork)
    left = (limits - cost_ms).clamp_min(LEAST_LATENCY_MS)
    each = [limit.expand(len(rows)) for limit in left]
    views = [
        [View(*(part[unseen] for part in View.of_network(inner, outcomes, limit))) for limit in each],
        *([View.of_expert(expert.out_of_fold, limit) for limit in each] for expert in fitted),
    ]
    scores = [torch.stack([view.score for view in of_limits]) for of_limits in views]
    meets = [torch.stack([view.meets for view in of_limits]) for of_limits in views]
    worth = expected_utility(measured.accuracy, measured.measurements_ms, left[:, None, None])
    held_out = HeldOut(scores, worth, measured.mask)
    weights = stack_weights(held_out)
    score, likely = _joined(measured, held_out, weights, scores, meets)
    if (alone := held_out.better_alone(score)) is not None:
        weights = torch.eye(len(scores), dtype=torch.float64)[alone]
        score, likely = scores[alone], meets[alone]
    static = guard = None
    if config.guard:
        static = BudgetAwareStatic(table, rows)
        guard = _calibrated(table, measured, score, likely, config, cost_ms)
    mean_worth = held_out.mean_worth(weighted(scores, weights))
    return StackedController(network, [f.expert for f in fitted], weights, guard, static, mean_worth).eval()


@torch.no_grad()
def fit_priced_stack(
    table: ProfileTable,
    rows: Tensor,
    network: Controller,
    config: PolicyConfig,
    worths: Tensor,
    seed: int,
    experts: Experts | None = None,
) -> tuple[StackedController, tuple[Tensor, Tensor]]:
    """Fit the experts for prices and weigh all members out of fold, arguments as in `fit_stack`: the mean of
    accuracy − latency/worth is averaged over `worths` [B] in ms.

    Returns:
        The stack, and its accuracy and latency in ms for these rows, [n, C] each, predicted by members and weights that
        have not seen them.
    """
    measured, fitted, outcomes, unseen = _fit_members(table, rows, network, config, worths[:0], seed, experts)
    costs = [(outcomes.accuracy[unseen], outcomes.latency_ms[unseen])]
    costs += [(expert.out_of_fold.accuracy, expert.out_of_fold.latency_ms) for expert in fitted]
    worth = worths[:, None, None]
    scores = [accuracy - latency_ms / worth for accuracy, latency_ms in costs]
    held_out = HeldOut(scores, (measured.accuracy - measured.latency_ms / worth).nan_to_num(), measured.mask)
    weights = stack_weights(held_out)
    accuracy, latency_ms = _joined(measured, held_out, weights, *zip(*costs, strict=True))
    mean_worth = held_out.mean_worth(weighted(scores, weights))
    stack = StackedController(network, [f.expert for f in fitted], weights, held_out_worth=mean_worth)
    return stack.eval(), (accuracy, latency_ms)


def _joined(measured: Measured, held_out: HeldOut, weights: Tensor, *parts: Sequence[Tensor]) -> list[Tensor]:
    """Each part [*, n, C] of all members, joined by weights that have not seen the fold that they are used for."""
    joined = [torch.zeros_like(members[0]) for members in parts]
    for fit, hold in measured.folds:
        if len(held_out.scores) > 1:
            weights = stack_weights(held_out.take(torch.from_numpy(fit)))
        for whole, members in zip(joined, parts, strict=True):
            whole[..., hold, :] = weighted([part[..., hold, :] for part in members], weights).to(whole.dtype)
    return joined


def _calibrated(
    table: ProfileTable,
    measured: Measured,
    score: Tensor,
    likely: Tensor,
    config: PolicyConfig,
    cost_ms: float,
) -> Guard:
    """The guard, calibrated by scores and probabilities of being on time [B, n, C], predicted by members and weights
    that have not seen the rows."""
    static_choice = torch.zeros(score.shape[:2], dtype=torch.int64)
    for fit, hold in measured.folds:
        static = BudgetAwareStatic(table, measured.rows[torch.from_numpy(fit)])
        for number, budget in enumerate(measured.budgets_ms):
            static_choice[number, hold] = static.choose({}, budget.expand(len(hold)), measured.mask[hold])
    settings = {name: getattr(config, name) for name in GUARD_SETTINGS} | {"cost_ms": cost_ms}
    first_look_ms = None if table.first_look_ms is None else table.first_look_ms[measured.rows]
    return Guard.calibrate(
        measured, score=score, meets=likely, static_choice=static_choice, first_look_ms=first_look_ms, **settings
    )
