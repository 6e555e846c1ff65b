"""A deployed controller learns from its log, in three steps, each judged beside the best so far on held-out requests:

1. Offsets of ln ms by configuration, from the times of all requests, as far as the tracker did not follow them.
2. Offsets of the accuracies' logits by configuration, from the labelled requests.
3. GRPO on all configurations, whose rewards are doubly robust: what the model of 1 and 2 expects, corrected by the
   logged outcome over its probability. Only the last layer learns, near the policy before it.

A step takes over where its gain is above 0 with the stated confidence. A step that does not stays in those after it: a
small gain may show only together with others. With three steps the chance that a useless update takes over is at most
three times that of a single one.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from knobwise.agents.checkpoint import network_of
from knobwise.agents.controller.actor import ConfigurationCategorical
from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.networks import Outcomes, UtilityNetwork
from knobwise.agents.learning.adaptation import (
    LEAST_CELLS,
    Offsets,
    Scales,
    adapted,
    fit_offsets,
    prior_covariance,
)
from knobwise.agents.learning.off_policy import Judgement, decisions, judge
from knobwise.agents.learning.settings import UpdateConfig
from knobwise.agents.predictors.experts import Expert
from knobwise.agents.predictors.regressors import Regressor
from knobwise.agents.serving.distillation import Lessons
from knobwise.agents.serving.export import to_numpy
from knobwise.agents.serving.request_log import Logged
from knobwise.agents.stack.stacked_controller import StackedController
from knobwise.common.errors import InputError
from knobwise.losses.functional import doubly_robust, gaussian_nll
from knobwise.losses.grpo import GRPOLoss

Agent = Controller | StackedController
ACCURACY_SCALES = [Scales(*each, 0.0) for each in itertools.product((0.05, 0.3, 1.0), (0.05, 0.3, 1.0))]
"""Prior standard deviations that offsets of logits are averaged over."""
FREE_LOGIT = 1.0
"""That of the offset that all configurations share."""
SPREADS = 0.5, 3.0
"""Bounds of the factor on predicted spreads in an update."""


class Update(NamedTuple):
    """What came of an update."""

    agent: Any
    """The controller to serve: the last step that took over, or else the old one."""
    candidate: Any
    """The controller after the last step."""
    better: bool
    """Whether `agent` is a new one."""
    steps: dict[str, Judgement]
    """Each step beside the best before it, in their order."""
    factors: list[float]
    """What the first step multiplies the expected latency of each configuration by."""
    logits: list[float]
    """What the second step adds to the logit of each expected accuracy."""


class Contexts(NamedTuple):
    """Logged requests as tensors: normalised features x [n, width], and the rest as in `Logged`."""

    x: Tensor
    limit: Tensor
    offset: Tensor
    scale: Tensor
    choice: Tensor
    probability: Tensor
    accuracy: Tensor
    met: Tensor
    log_answer: Tensor

    @classmethod
    def of_log(cls, agent: Agent, logged: Logged) -> Contexts:
        blocks = {name: torch.from_numpy(block) for name, block in logged.features.items()}
        parts = (logged.limit_ms, logged.offset, logged.scale, logged.choice, logged.probability, logged.accuracy)
        rest = [torch.from_numpy(part) for part in (*parts, logged.met, np.log(logged.answer_ms))]
        x = agent.features(blocks, len(logged.ids))
        return cls(x, *(part.float() if part.dtype == torch.float64 else part for part in rest))


def update(agent: Any, logged: Logged, config: UpdateConfig | None = None) -> Update:
    """Let a controller learn from a log, and judge it.

    Args:
        agent: for deadlines, of structure `utility`. It is not changed.
        logged: requests of this controller or of versions before it.

    Raises:
        InputError: a controller that predicts no outcomes, too few requests.
    """
    config, network = config or UpdateConfig(), network_of(agent)
    if network.config.structure != "utility" or network.priced:
        raise InputError("update: the controller must be for deadlines and predict outcomes: policy=auto or utility")
    labelled = ~np.isnan(logged.accuracy)
    held_out = np.arange(len(labelled)) % config.held_out == config.held_out - 1
    fit, test = logged.take(~held_out), logged.take(held_out & labelled)
    if len(fit.ids) < LEAST_CELLS:
        raise InputError(f"update: {len(logged.ids)} requests are too few; let it serve some more")
    steps: dict[str, Judgement] = {}
    offsets = _latency_offsets(agent, fit)
    candidate: Any = adapted(agent, offsets, Contexts.of_log(agent, fit).x)
    candidates = {"latencies": candidate}
    lessons = fit.take(fit.seen & ~np.isnan(fit.accuracy))
    logits = torch.zeros(len(network.configurations), dtype=torch.float64)
    if len(lessons.ids):
        logits = _accuracy_offsets(candidate, lessons)
        candidates["accuracies"] = candidate = _with_logits(candidate, logits, lessons)
        if config.steps and _decides_alone(candidate):
            candidates["grpo"] = _with_grpo(candidate, lessons, config)
    expected = _expected_utility(candidate, test)  # before GRPO: a model of outcomes
    best, serving = decisions(to_numpy(agent), test), agent
    for name, candidate in candidates.items():
        choices = decisions(to_numpy(candidate), test)
        steps[name] = judge(test, expected, best, choices, config.clip, config.confidence)
        if steps[name].better:
            best, serving = choices, candidate
    return Update(serving, candidate, serving is not agent, steps, offsets.mean.exp().tolist(), logits.tolist())


# -- the steps ---------------------------------------------------------------------------------------------------------


def _predictions(agent: Agent, x: Tensor) -> Lessons:
    """What a controller expects of every configuration."""
    stack = agent if isinstance(agent, StackedController) else StackedController(agent, [], torch.ones(1))
    return Lessons.of_teacher(stack, x)


@torch.no_grad()
def _expected_utility(agent: Agent, logged: Logged) -> Tensor:
    """Of every configuration for logged requests, float [n, C]."""
    contexts = Contexts.of_log(agent, logged)
    _, accuracy, log_latency, spread = _predictions(agent, contexts.x)
    late = log_latency + contexts.offset - contexts.limit.log().unsqueeze(1)
    return accuracy * torch.special.ndtr(-late / (spread * contexts.scale.unsqueeze(1)))


@torch.no_grad()
def _latency_offsets(agent: Agent, logged: Logged) -> Offsets:
    """Offsets of ln ms that neither the controller nor the tracker allowed for. The variance is what the spreads miss
    or have too much of, by the median of the residuals, in which a stall counts little."""
    contexts = Contexts.of_log(agent, logged)
    lessons, rows = _predictions(agent, contexts.x), torch.arange(len(contexts.x))
    place = rows, contexts.choice
    seen = torch.from_numpy(logged.seen)
    predicted = lessons.log_latency[place].double().where(seen, torch.from_numpy(logged.log_latency))
    residual = torch.from_numpy(np.log(logged.answer_ms)) - predicted - contexts.offset[place]
    offsets = fit_offsets(network_of(agent).configurations, contexts.choice, residual)
    z = (residual - offsets.mean[contexts.choice]) / (lessons.spread[place] * contexts.scale)
    factor = 1.4826 * z[seen].abs().median() if seen.any() else torch.ones(())
    spare = factor.clamp(*SPREADS).square() - 1
    return offsets._replace(variance=spare * lessons.spread.square().mean(0).double())


@torch.no_grad()
def _accuracy_offsets(agent: Agent, logged: Logged) -> Tensor:
    """Offsets δ of the accuracies' logits, float64 [C]: additive over the knobs and shrunk as those of latencies, the
    mode of the posterior by Newton steps, averaged over prior scales by Laplace's approximation of their evidence
    (Rasmussen and Williams 2006, "Gaussian Processes for Machine Learning", algorithm 3.1)."""
    contexts = Contexts.of_log(agent, logged)
    place = torch.arange(len(contexts.x)), contexts.choice
    predicted = _predictions(agent, contexts.x).accuracy[place].double().clamp(0.01, 0.99).logit()
    label, choice = contexts.accuracy.double(), contexts.choice
    configurations = network_of(agent).configurations
    count = len(configurations)

    def fit(scales: Scales) -> tuple[Tensor, float]:
        prior, mode = prior_covariance(configurations, scales, FREE_LOGIT), torch.zeros(count, dtype=torch.float64)
        for _ in range(12):
            p = (predicted + mode[choice]).sigmoid()
            slope = torch.zeros_like(mode).index_add_(0, choice, label - p)
            curvature = torch.zeros_like(mode).index_add_(0, choice, p * (1 - p))
            root = curvature.sqrt()
            factor = torch.linalg.cholesky(torch.eye(count, dtype=prior.dtype) + root.outer(root) * prior)
            target = curvature * mode + slope
            solved = torch.cholesky_solve((root * (prior @ target)).unsqueeze(1), factor).squeeze(1)
            weight = target - root * solved
            mode = prior @ weight
        logits = predicted + mode[choice]
        fits = -binary_cross_entropy_with_logits(logits, label, reduction="sum")
        return mode, float(fits - 0.5 * weight @ mode - factor.diagonal().log().sum())

    modes, evidence = zip(*map(fit, ACCURACY_SCALES), strict=True)
    return torch.tensor(evidence, dtype=torch.float64).softmax(0) @ torch.stack(modes)


@torch.no_grad()
def _with_logits(agent: Agent, logits: Tensor, logged: Logged) -> Any:
    """A copy whose accuracies have these offsets of their logits; of experts and of static by their mean effect on
    logged requests."""
    agent = copy.deepcopy(agent)
    before = _predictions(agent, Contexts.of_log(agent, logged).x).accuracy.double().clamp(0.01, 0.99)
    after = (before.logit() + logits).sigmoid()
    network = network_of(agent).network
    assert isinstance(network, UtilityNetwork)
    network.outcome_head.bias[..., : len(logits)] += logits.float()
    if isinstance(agent, StackedController):
        for expert in agent.experts:
            assert isinstance(expert, Expert)
            assert isinstance(expert.accuracy, Regressor)
            shift = (after - before).mean(0).float()
            expert.accuracy = expert.accuracy.rescaled(torch.ones(len(shift)), shift)
        if agent.static is not None:
            agent.static = agent.static.scaled(torch.ones(len(logits)), after.mean(0) / before.mean(0))
    return agent


def _decides_alone(agent: Agent) -> bool:
    """Whether the network decides without experts."""
    return not isinstance(agent, StackedController) or bool((agent.weights[1:] == 0).all())


class _Drifting(nn.Module):
    """Log-probs of configurations under limits and drift."""

    def __init__(self, controller: Controller) -> None:
        super().__init__()
        assert isinstance(controller.network, UtilityNetwork)
        self.network, self.members = controller.network, controller.config.members

    def outcomes(self, x: Tensor) -> Outcomes:
        return self.network.outcomes(x.expand(self.members, -1, -1))

    def forward(self, x: Tensor, limit: Tensor, offset: Tensor, scale: Tensor) -> Tensor:
        outcomes = self.outcomes(x)
        late, wide = outcomes.log_latency + offset, outcomes.spread * scale.unsqueeze(-1)
        drifted = outcomes._replace(log_latency=late, spread=wide)
        log_probs = self.network.log_probs(drifted, limit.expand(self.members, -1))
        return log_probs.mean(0).log_softmax(-1)


def _with_grpo(agent: Agent, logged: Logged, config: UpdateConfig) -> Any:
    """A copy after GRPO on labelled requests."""
    contexts, expected = Contexts.of_log(agent, logged), _expected_utility(agent, logged)
    agent = copy.deepcopy(agent)
    controller = network_of(agent)
    policy, head = _Drifting(controller), controller.network.get_submodule("outcome_head")
    for weight in agent.parameters():
        weight.requires_grad_(False)
    head.requires_grad_(True)
    reward = contexts.accuracy * contexts.met
    data = TensorDict(contexts._asdict(), [len(contexts.x)])
    data["reward_per_configuration"] = doubly_robust(
        expected, contexts.choice, reward, contexts.probability, config.clip
    )
    with torch.no_grad():
        before = policy(contexts.x, contexts.limit, contexts.offset, contexts.scale)
    data["behaviour_log_probs"] = data["reference_log_probs"] = before
    draw = ProbabilisticTensorDictModule(
        in_keys=["log_probs"],
        out_keys=["action"],
        distribution_class=ConfigurationCategorical,
        distribution_kwargs={"configurations": controller.configurations},
    )
    module = TensorDictModule(policy, ["x", "limit", "offset", "scale"], ["log_probs"])
    actor = ProbabilisticTensorDictSequential(module, draw)
    beta = config.kl_coeff
    loss = GRPOLoss(actor, objective="exact", advantage="centred", kl_to_ref_coeff=beta, functional=False)
    loss.diagnostics = False
    optimiser = torch.optim.Adam(head.parameters(), lr=config.lr)
    generator = torch.Generator().manual_seed(config.seed)
    for _ in range(config.steps):
        batch = data[torch.randint(len(data), (min(config.minibatch, len(data)),), generator=generator)]
        losses = loss(batch)
        total = losses["loss_objective"] + losses["loss_kl_to_ref"]
        if config.regression_coeff:
            total = total + config.regression_coeff * _regression(policy, batch)
        optimiser.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimiser.step()
    return agent.requires_grad_(False).eval()


def _regression(policy: _Drifting, batch: TensorDict) -> Tensor:
    """How far the predictions for the chosen configurations are from labels and times."""
    outcomes = policy.outcomes(batch["x"])
    place = torch.arange(len(batch)), batch["choice"]
    logits, mean, spread = (part[:, *place] for part in outcomes[:3])
    offset, labels = batch["offset"][place], batch["accuracy"].expand_as(logits)
    error = binary_cross_entropy_with_logits(logits, labels)
    return error + gaussian_nll(batch["log_answer"], mean + offset, spread * batch["scale"]).mean()
