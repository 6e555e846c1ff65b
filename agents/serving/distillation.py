"""Distillation: a small network that imitates the decisions of a whole stack, for when milliseconds are too slow.

The teacher can label any request, so the student sees far more than was measured: the samples, and requests composed of
them (feature blocks of different samples, then mixtures of two such requests). At budgets redrawn in each step it is
fitted to the softmax of the teacher's preference, guard included (Hinton, Vinyals and Dean 2015, "Distilling the
Knowledge in a Neural Network"). It predicts only this preference, by one product per layer.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.stack.stacked_controller import StackedController
from knobwise.common.errors import InputError
from knobwise.common.progress import progress
from knobwise.envs.configurations.budgets import BudgetSampler
from knobwise.envs.configurations.settings import BudgetConfig
from knobwise.envs.tables.profile_table import ProfileTable


@dataclass
class StudentConfig:
    """The network of a student and how it is fitted."""

    hidden: int = 64
    """Width of its hidden layers."""
    layers: int = 2
    """Number of its hidden layers."""
    requests: int = 16384
    """Number of requests that the teacher labels; those beyond the samples are composed of them."""
    steps: int = 3000
    """Steps of AdamW."""
    minibatch: int = 256
    """Requests in each step."""
    lr: float = 3e-3
    """Peak learning rate; it falls to 0 as a cosine."""
    sharpness: float = 40.0
    """Factor on the teacher's preference before the softmax."""


def composed(x: Tensor, widths: list[int], count: int, generator: torch.Generator) -> Tensor:
    """Requests composed of samples, normalised features in blocks of these widths: [n, width] → [count, width].

    In half of them each block of columns comes from another sample; half of them are mixed with another request.
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
    """Fit a student to a stack's decisions; it is saved, judged and exported like any other controller.

    It imitates the teacher's guard but has no guard itself: measure how often it keeps a budget. `rows`, int64 [n], are
    those of `table` that the stack was fitted on; no other row is read. The seed is that of the network and all draws.

    Raises:
        InputError: if the stack is for mean budgets.
    """
    if stack.priced:
        raise InputError("student: only a controller for deadlines can be distilled")
    config = config or StudentConfig()
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        student = _fresh(stack.network, config)
    samples = student.features({name: block[rows] for name, block in table.features.items()}, len(rows))
    widths = list(student.normaliser.sizes.values())
    if indicators := student.normaliser.width - sum(widths):  # of missing values
        widths.append(indicators)
    more = composed(samples, widths, max(config.requests - len(samples), 0), generator)
    x = torch.cat([samples, more])
    with torch.no_grad():
        predictions = stack.predictions(x)
    budgets = BudgetSampler(table, BudgetConfig(), rows)
    optimiser = torch.optim.AdamW(student.network.parameters(), lr=config.lr, weight_decay=1e-3)

    def rate(step: int) -> float:
        """A short rise, then half a cosine."""
        share = (step + 1) / config.steps
        return min(share / 0.05, 0.5 + 0.5 * math.cos(math.pi * share))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, rate)
    drawn_from = rows[torch.randint(len(rows), (config.steps, config.minibatch), generator=generator)]
    with progress("fitting a student", config.steps, quiet_s=2) as tick:
        for step, of_samples in enumerate(drawn_from, 1):
            some = torch.randint(len(x), (config.minibatch,), generator=generator)
            limits = budgets(of_samples, generator)
            preference = stack.preference(predictions.take(some).view(limits), limits)
            wanted = (config.sharpness * preference).softmax(-1).float()
            optimiser.zero_grad()
            loss = -(wanted * student(x[some], limits)).sum(-1).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(student.network.parameters(), 5.0)
            optimiser.step()
            schedule.step()
            tick(step, "")
    return student.requires_grad_(False).eval()


def _fresh(teacher: Controller, config: StudentConfig) -> Controller:
    """A student with the teacher's normaliser and encoding."""
    of_budgets = {name: getattr(teacher.config, name) for name in ("budget_encoding", "budget_width")}
    policy = PolicyConfig(structure="joint", hidden=config.hidden, layers=config.layers, dropout=0.0, **of_budgets)
    encoding = copy.deepcopy(teacher.network.encoding)
    return Controller(teacher.knobs, teacher.configurations, copy.deepcopy(teacher.normaliser), encoding, policy)
