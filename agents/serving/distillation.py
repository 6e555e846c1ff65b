"""Distillation: one light network that decides as a whole stack does, for where milliseconds are too slow.

The teacher can label any request, so the student sees far more than was measured: the samples, and requests put
together from them (the blocks of features of different samples, then a mixture of two such). At budgets drawn anew in
each step it is fitted to the softmax of what the teacher decides by, guard included (Hinton, Vinyals and Dean 2015,
"Distilling the Knowledge in a Neural Network"). It predicts nothing but the preference: one product for each layer, and
the largest wins.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.networks import Outcomes, UtilityNetwork
from knobwise.agents.predictors.prediction import Prediction
from knobwise.agents.stack.stacked_controller import HOPELESS, StackedController, View
from knobwise.agents.stack.weights import weighted
from knobwise.agents.training.settings import PolicyConfig
from knobwise.common.errors import InputError
from knobwise.common.progress import progress
from knobwise.envs.configurations.budgets import BudgetConfig, BudgetSampler, log_ms
from knobwise.envs.tables.profile_table import ProfileTable


@dataclass
class StudentConfig:
    """How a student is fitted."""

    hidden: int = 64
    """Width of its hidden layers."""
    layers: int = 2
    """Number of its hidden layers."""
    requests: int = 16384
    """How many requests the teacher labels; those beyond the samples are put together from them."""
    steps: int = 3000
    """Steps of AdamW."""
    minibatch: int = 256
    """Requests in each step."""
    lr: float = 3e-3
    """Learning rate at its highest; it falls to 0 as a cosine."""
    sharpness: float = 40.0
    """What the teacher decides by is multiplied by this for the softmax."""


class Teacher:
    """What a stack says of fixed requests, at any budget, and how much it prefers each configuration.

    Args:
        stack: for deadlines.
        x: normalised features, float [n, width].
    """

    @torch.no_grad()
    def __init__(self, stack: StackedController, x: Tensor) -> None:
        self.guard, self.static = stack.guard, stack.static
        self.weights = stack.weights[stack.weights > 0]
        network = stack.network.network
        assert isinstance(network, UtilityNetwork)
        self.network = network
        members = stack.network.config.members
        # the network's predictions are those of all members side by side
        self.outcomes = network.outcomes(x.expand(members, -1, -1)) if stack.weights[0] > 0 else None
        wide = x if x.shape[1] else x.new_zeros(len(x), 1)
        used = zip(stack.weights[1:].tolist(), stack.experts, strict=True)
        self.predictions: list[Prediction] = [expert(wide) for weight, expert in used if weight > 0]

    @torch.no_grad()
    def view(self, rows: Tensor, limits: Tensor) -> View:
        """For some of the requests (int64 [m]) under their budgets [m] in ms, [m, C] each."""
        views: list[View] = []
        if self.outcomes is not None:
            some = Outcomes(*(part[:, rows] for part in self.outcomes))
            own = limits.expand(len(some.hidden), -1)
            said = self.network.scores(some, own), self.network.meets(some, own), some.log_latency
            views.append(View(*(part.mean(0) for part in said)))
        for one in self.predictions:
            of_rows = Prediction(one.accuracy[rows], one.log_latency[rows], one.spread)
            views.append(View(of_rows.expected_utility(limits), of_rows.meets(limits), of_rows.log_latency))
        return View(*(weighted(parts, self.weights) for parts in zip(*views, strict=True)))

    @torch.no_grad()
    def preference(self, rows: Tensor, limits: Tensor) -> Tensor:
        """What the stack decides by, guard included, for some of the requests (int64 [m]) under their budgets [m] in
        ms: its choice is where it is largest. [m, C], in units of accuracy."""
        view = self.view(rows, limits)
        worth = view.score.double()
        if self.guard is not None and self.static is not None:
            group = (log_ms(limits).unsqueeze(1) - log_ms(self.guard.budgets_ms)).abs().argmin(1)
            # double, for the highest price
            worth = worth + self.guard.miss[group].unsqueeze(1) * view.meets.double()
            fixed = self.static.choose({}, limits, torch.ones_like(worth, dtype=torch.bool))
            static = torch.nn.functional.one_hot(fixed, worth.shape[1]).double()
            worth = torch.where(self.guard.deploy[group].unsqueeze(1), worth, static)
        hopeless = view.meets.amax(1, keepdim=True) < HOPELESS
        return torch.where(hopeless, -view.log_latency.double(), worth)


def composed(x: Tensor, widths: list[int], count: int, generator: torch.Generator) -> Tensor:
    """Requests put together from samples: [n, width] → [count, width].

    Each block of columns comes from a sample of its own in half of them; half of them are mixed with another one.

    Args:
        x: normalised features.
        widths: of the blocks that `x` consists of.
        count: how many.
        generator: of what is drawn.
    """
    n, both = len(x), []
    for _ in range(2):
        rows = torch.randint(n, (count, 1), generator=generator).expand(-1, len(widths))
        others = torch.randint(n, (count, len(widths)), generator=generator)
        rows = torch.where(torch.rand(count, 1, generator=generator) < 0.5, others, rows)
        blocks = [block[rows[:, number]] for number, block in enumerate(x.split(widths, 1))]
        both.append(torch.cat(blocks, 1) if blocks else x.new_zeros(count, 0))
    share = 0.5 * torch.rand(count, 1, generator=generator) * (torch.rand(count, 1, generator=generator) < 0.5)
    return torch.lerp(both[0], both[1], share)


def student_of(
    stack: StackedController, table: ProfileTable, rows: Tensor, seed: int, config: StudentConfig | None = None
) -> Controller:
    """Fit a student to what a stack decides; it is saved, judged and exported as any other controller.

    The teacher's guard is in what it imitates, and it has none of its own: how often it keeps a budget is to be
    measured.

    Args:
        stack: for deadlines.
        table: the profile that it was trained on.
        rows: int64 [n], what it was fitted on. Nothing else is looked at.
        seed: of the network, and of what is drawn.
        config: how.

    Raises:
        InputError: a stack for mean budgets.
    """
    if stack.priced:
        raise InputError("student: only a controller for deadlines can be distilled")
    config = config or StudentConfig()
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        student = _fresh(stack, config)
    own = student.features({name: block[rows] for name, block in table.features.items()}, len(rows))
    x = torch.cat([own, composed(own, _widths(student), max(config.requests - len(own), 0), generator)])
    teacher = Teacher(stack, x)
    budgets = BudgetSampler(table, BudgetConfig(), rows)
    optimiser = torch.optim.AdamW(student.network.parameters(), lr=config.lr, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: _rate((step + 1) / config.steps))
    drawn_from = rows[torch.randint(len(rows), (config.steps, config.minibatch), generator=generator)]
    with progress("fitting a student", config.steps, quiet_s=2) as tick:
        for step, of_samples in enumerate(drawn_from, 1):
            some = torch.randint(len(x), (config.minibatch,), generator=generator)
            limits = budgets(of_samples, generator)
            wanted = (config.sharpness * teacher.preference(some, limits)).softmax(-1).float()
            optimiser.zero_grad()
            loss = -(wanted * student(x[some], limits)).sum(-1).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(student.network.parameters(), 5.0)
            optimiser.step()
            schedule.step()
            tick(step, "")
    return student.requires_grad_(False).eval()


def _rate(share: float) -> float:
    """Of the highest learning rate, when this share of the steps is done: a short rise, then half a cosine."""
    return min(share / 0.05, 0.5 + 0.5 * math.cos(math.pi * share))


def _fresh(stack: StackedController, config: StudentConfig) -> Controller:
    """A student with the teacher's normaliser and encoding."""
    teacher = stack.network
    of_budgets = {name: getattr(teacher.config, name) for name in ("budget_encoding", "budget_width")}
    policy = PolicyConfig(structure="joint", hidden=config.hidden, layers=config.layers, dropout=0.0, **of_budgets)
    encoding = copy.deepcopy(teacher.network.encoding)
    return Controller(teacher.knobs, teacher.configurations, copy.deepcopy(teacher.normaliser), encoding, policy)


def _widths(controller: Controller) -> list[int]:
    """Of the blocks of normalised features; the indicators of missing values are one more."""
    widths = list(controller.normaliser.sizes.values())
    indicators = controller.normaliser.width - sum(widths)
    return [*widths, indicators] if indicators else widths
