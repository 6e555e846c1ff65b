"""Distillation: a stack taught to one small network that predicts the same outcomes, for when milliseconds are too
slow.

The student is a `StackedController` of one network without experts, inside the teacher's guard; what works on a stack
works on it: explanations, exports, a tracker of latencies. It learns the moments of the teacher's mixture: accuracy
Â = Σ_k w_k·Â_k, and of ln ms the mean μ = Σ_k w_k·μ_k and the variance σ² = Σ_k w_k·(σ_k² + μ_k²) − μ² (Hinton, Vinyals
and Dean 2015, "Distilling the Knowledge in a Neural Network", with outcomes in the place of classes). Fitted to the
teacher's decisions too, it predicts outcomes far less exactly and decides no better.

The teacher can label any request. The student learns from requests composed of samples, and only an eighth of these are
samples as they are: what the teacher predicts of those that it was fitted on is too close to what was measured.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.networks import Outcomes, UtilityNetwork
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.stack.stacked_controller import StackedController
from knobwise.agents.stack.weights import weighted
from knobwise.common.progress import progress
from knobwise.envs.tables.profile_table import ProfileTable

WIDE = 1024
"""Number of inputs from which on the first layer takes most of a decision's time: fewer hidden units, no skip."""
AT_ONCE = 1024
"""Requests that the teacher labels together."""


@dataclass
class StudentConfig:
    """How a student is fitted."""

    requests: int = 4096
    """Number of composed requests that the teacher labels."""
    steps: int = 1000
    """Steps of AdamW."""
    minibatch: int = 256
    """Requests in each step."""
    lr: float = 3e-3
    """Peak learning rate; it falls to 0 as a cosine."""


class Lessons(NamedTuple):
    """What a teacher predicts of n requests with normalised features x [n, width]: accuracy, and mean and standard
    deviation of ln ms, [n, C] each."""

    x: Tensor
    accuracy: Tensor
    log_latency: Tensor
    spread: Tensor

    @classmethod
    @torch.no_grad()
    def of_teacher(cls, stack: StackedController, x: Tensor) -> Lessons:
        """The moments of the mixture of a stack's members by their weights."""
        parts = []
        for some in x.split(AT_ONCE):
            predicted = stack.predictions(some)
            experts = predicted.experts
            members = [(p.accuracy.clamp(0, 1), p.log_latency, p.spread**2 + p.log_latency**2) for p in experts]
            if (network := predicted.outcomes) is not None:
                squares = network.spread**2 + network.log_latency**2
                members.insert(0, (network.accuracy.mean(0), network.log_latency.mean(0), squares.mean(0)))
            accuracy, mean, square = (weighted(each, predicted.weights) for each in zip(*members, strict=True))
            parts.append((some, accuracy, mean, (square - mean**2).clamp_min(1e-6).sqrt()))
        return cls(*map(torch.cat, zip(*parts, strict=True)))

    def take(self, rows: Tensor) -> Lessons:
        """For some of the requests, int64 [m]."""
        return Lessons(*(part[rows] for part in self))

    def divergence(self, network: UtilityNetwork) -> Tensor:
        """How far a network's predictions are from these, up to constants, as a mean over configurations: the binary
        cross-entropy of the accuracies, and Kullback and Leibler's divergence of normal variables ln ms."""
        outcomes = Outcomes(*(part[0] for part in network.outcomes(self.x.unsqueeze(0))[:4]))
        entropy = binary_cross_entropy_with_logits(outcomes.accuracy_logits, self.accuracy)
        squares = self.spread**2 + (self.log_latency - outcomes.log_latency) ** 2
        return entropy + (outcomes.spread.log() + squares / (2 * outcomes.spread**2)).mean()


def composed(x: Tensor, widths: list[int], count: int, generator: torch.Generator) -> Tensor:
    """Requests composed of samples, normalised features in blocks of these widths: [n, width] → [count, width].

    Each is made of two: in half of these each block of columns comes from another sample; half of them are a mean with
    another sample. In half of the requests some columns, up to half of them, come from the second.
    """
    n = len(x)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator)

    def crossed() -> Tensor:
        rows = torch.randint(n, (count, 1), generator=generator).expand(-1, len(widths))
        others = torch.randint(n, (count, len(widths)), generator=generator)
        rows = torch.where(uniform(count, 1) < 0.5, others, rows)
        blocks = [block[rows[:, number]] for number, block in enumerate(x.split(widths, 1))]
        return torch.cat(blocks, 1) if blocks else x.new_zeros(count, 0)

    first, second = (
        torch.lerp(crossed(), crossed(), 0.5 * uniform(count, 1) * (uniform(count, 1) < 0.5)) for _ in range(2)
    )
    taken = uniform(count, x.shape[1]) < 0.5 * uniform(count, 1) * (uniform(count, 1) < 0.5)
    return torch.where(taken, second, first)


def student_of(
    stack: StackedController, table: ProfileTable, rows: Tensor, seed: int, config: StudentConfig | None = None
) -> StackedController:
    """Fit a student; it is saved, judged and exported like any other stack.

    `rows`, int64 [n], are those of `table` that the stack was fitted on; no other row is read. The seed is that of the
    network and all draws.

    Under mean budgets it has no prices yet (`knobwise.agents.stack.priced_policy.taught`).
    """
    config, generator = config or StudentConfig(), torch.Generator().manual_seed(seed)
    normaliser, blocks = stack.normaliser, {name: x[rows] for name, x in table.features.items()}
    samples = normaliser.normal(blocks, len(rows))
    widths = list(normaliser.sizes.values())
    if indicators := samples.shape[1] - sum(widths):  # of missing values
        widths.append(indicators)
    requests = composed(samples, widths, config.requests, generator)
    lessons = Lessons.of_teacher(stack, normaliser.project(requests))
    network = _beginner(stack.network, lessons, seed)
    student = StackedController(network, [], torch.ones(1), stack.guard, stack.static, stack.held_out_worth)
    inner, weights = network.network, [weight for weight in network.parameters() if weight.requires_grad]
    assert isinstance(inner, UtilityNetwork)
    optimiser = torch.optim.AdamW(weights, lr=config.lr, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: _rate((step + 1) / config.steps))
    with progress("fitting a student", config.steps, quiet_s=2) as tick:
        for step in range(1, config.steps + 1):
            some = torch.randint(config.requests, (config.minibatch,), generator=generator)
            loss = lessons.take(some).divergence(inner)
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 5.0)
            optimiser.step()
            schedule.step()
            tick(step, "")
    network.requires_grad_(False)
    return student.eval()


def _beginner(teacher: Controller, lessons: Lessons, seed: int) -> Controller:
    """A student's network, with the teacher's normaliser and encoding, that begins at the mean of the lessons. Only
    weights that are trained require a gradient: the residual stays 0, and for many inputs the skip too."""
    origin = teacher.network
    assert isinstance(origin, UtilityNetwork)
    wide = origin.skip.weight.shape[1] >= WIDE
    hidden, width = 64 if wide else 96, teacher.config.budget_width
    config = PolicyConfig(structure="utility", hidden=hidden, layers=2, dropout=0.0, budget_width=width)
    normaliser, encoding = copy.deepcopy(teacher.normaliser), copy.deepcopy(origin.encoding)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        about = teacher.knobs, teacher.configurations, normaliser, encoding, config
        student = Controller(*about, priced=teacher.priced, bins=origin.reads_bins)
    network = student.network
    assert isinstance(network, UtilityNetwork)
    if origin.reads_bins:
        network.edges.copy_(origin.edges)
    means = (
        lessons.accuracy.mean(0).clamp(0.01, 0.99).logit(),
        lessons.log_latency.mean(0),
        lessons.spread.log().mean(0),
    )
    network.outcome_head.bias.data[0, 0] = torch.cat(means)
    unused = ["residual", "modulation"] * (not teacher.priced) + ["skip"] * wide
    for name in unused:
        network.get_submodule(name).requires_grad_(False)
    return student


def _rate(share: float) -> float:
    """A short rise, then half a cosine."""
    return min(share / 0.05, 0.5 + 0.5 * math.cos(math.pi * share))
