"""The stages before GRPO of a controller that has a teacher: the teacher learns, and the heads
imitate it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torch.nn import functional
from torchrl.data import ReplayBuffer

from knobwise.agents.training.controller_stages import ControllerStage
from knobwise.agents.training.controllers import ControllerSetup
from knobwise.agents.training.stage import Validation
from knobwise.agents.training.state import Best
from knobwise.agents.training.trainer import Trainer
from knobwise.envs.bandit.budgets import log_moments
from knobwise.losses.functional import reward_weighted_cross_entropy
from knobwise.losses.regression import regression_losses

if TYPE_CHECKING:
    from knobwise.agents.teacher.teacher import Teacher

# the optimiser of the regression
LR = 3e-3
WEIGHT_DECAY = 0.05
CLIP_GRAD = 5.0
PATIENCE = 6


def sizes_of_minibatches(contexts: int, minibatch: int) -> Iterator[int]:
    """Cut a pass of `contexts` into minibatches: the size of each, the last one perhaps smaller."""
    return (min(minibatch, contexts - first) for first in range(0, contexts, minibatch))


class Regression(ControllerStage):
    """The teacher's network learns what was measured of its samples.

    Args:
        with_bins: the weights to begin with, of a network that also reads bins of the features.
    """

    name = "regression"
    loss_name = "Regression_Loss"
    dropout = True
    collects = False

    def __init__(
        self, setup: ControllerSetup, teacher: Teacher, with_bins: dict[str, Tensor] | None = None
    ) -> None:
        super().__init__(
            setup,
            teacher,
            iterations=setup.settings.teacher_iterations,
            lr=LR,
            weight_decay=WEIGHT_DECAY,
            clip_grad=CLIP_GRAD,
            patience=PATIENCE,
        )
        self.teacher = teacher
        self.with_bins = with_bins
        if with_bins is not None:
            self.name = "regression with bins"
        device = setup.rows.all_features.device
        self.accuracy = setup.facts.accuracy.to(device)
        self.log_latency, self.variance = log_moments(setup.facts.measurements_ms.to(device))

    def start(self, trainer: Trainer) -> None:
        if self.with_bins is not None:
            self.teacher.load_state_dict(self.with_bins)

    def minibatches(self, buffer: ReplayBuffer) -> Iterator[TensorDictBase]:
        """Draw rows of the networks' samples, [n, M], instead of collected contexts."""
        networks = self.setup.networks
        for count in sizes_of_minibatches(self.settings.contexts, self.settings.minibatch):
            rows = self.setup.env.contexts.draw_rows(count * networks).to(self.setup.device)
            yield TensorDict({"row": rows.view(count, networks)}, [count])

    def loss(self, minibatch: TensorDictBase) -> TensorDictBase:
        """Compute two means over the drawn samples: the cross-entropy of their accuracies, and the
        negative log-likelihood of their ln ms."""
        row = minibatch["row"][:, : self.teacher.networks].T  # [M, n]
        predicted = self.teacher.network(self.setup.rows.features_of(row))
        row = row % self.setup.facts.num_samples  # row i + k·N is a copy of sample i
        wrong, off = regression_losses(
            predicted,
            accuracy=functional.embedding(row, self.accuracy),
            log_latency=functional.embedding(row, self.log_latency),
            variance=functional.embedding(row, self.variance),
        )
        return TensorDict({"loss_accuracy": wrong.mean(), "loss_latency": off.mean()})

    def validate(self, trainer: Trainer) -> Validation:
        """Judge what the teacher's networks would choose."""
        held_out = self.setup.held_out
        return held_out.validation(held_out.policies(self._log_probs), trainer.log is not None)

    @torch.no_grad()
    def _log_probs(self, limit: Tensor) -> Tensor:
        """Return log-probs like those of `HeldOut.log_probs`, but by the teacher's networks."""
        setup = self.setup
        rows = setup.held_out.by_network[:, : self.teacher.networks].T
        predicted = self.teacher.network(setup.rows.all_features[rows]).predicted()
        scores = setup.policy.sharpness * predicted.score(limit.to(setup.device), setup.rule)
        mask = setup.problem.mask[rows].to(setup.device)
        scores = scores.masked_fill(~mask, -torch.inf).transpose(0, 1)  # [longest, M, C]
        return scores[setup.held_out.positions].log_softmax(-1)


class Distillation(ControllerStage):
    """The heads imitate what the teacher expects of requests.

    Args:
        targets: makes the distillation targets, float [M, R, V, …], when they are first drawn.
    """

    name = "imitation"
    loss_name = "Imitation_Loss"
    dropout = True
    collects = False

    def __init__(self, setup: ControllerSetup, targets: Callable[[], TensorDict]) -> None:
        super().__init__(
            setup,
            setup.controller,
            iterations=setup.settings.pretrain_iterations,
            lr=setup.settings.pretrain_lr,
        )
        self.targets = targets

    def start(self, trainer: Trainer) -> None:
        """Load the best teacher; from here on the heads are judged and kept."""
        if trainer.state.best.state is not None:
            trainer.agent.load_state_dict(trainer.state.best.state)
        trainer.state.best = Best()

    def minibatches(self, buffer: ReplayBuffer) -> Iterator[TensorDictBase]:
        """Sample distillation minibatches, [M, n], instead of collected contexts."""
        targets = self.targets()
        device = self.setup.device
        networks, requests, limits = targets.shape
        # every tensor as rows, which are looked up faster than along three axes; features are the
        # same under all limits of a request
        x = targets["x"][:, :, 0].flatten(0, 1)
        others = {name: part.flatten(0, 2) for name, part in targets.items() if name != "x"}
        first = requests * torch.arange(networks, device=device).unsqueeze(1)
        for count in sizes_of_minibatches(self.settings.contexts, self.settings.minibatch):
            # drawn on the CPU, so that a seed gives the same ones on every device
            request = first + torch.randint(requests, (networks, count)).to(device)
            limit = torch.randint(limits, (networks, count)).to(device)
            place = limits * request + limit
            drawn = {name: rows_at(part, place) for name, part in others.items()}
            yield TensorDict({"x": rows_at(x, request), **drawn}, place.shape)

    def loss(self, minibatch: TensorDictBase) -> TensorDictBase:
        """Return the heads' cross-entropy to the teacher, a scalar.

        The target is softmax(sharpness · the utility that the teacher expects).
        """
        log_probs = self.setup.controller.network(
            minibatch["x"], minibatch["limit"], by_value=minibatch.get("by_value", None)
        )
        temperature = 1 / self.setup.policy.sharpness
        loss = reward_weighted_cross_entropy(log_probs, minibatch["utility"], temperature)
        return TensorDict({"loss_imitation": loss.mean()})


def rows_at(values: Tensor, index: Tensor) -> Tensor:
    """Return `values[index]`, [n, …] at int64 [*] → [*, …], which an index of rows alone makes
    faster."""
    rows = values.index_select(0, index.flatten())
    return rows.unflatten(0, index.shape)


def regression_stages(setup: ControllerSetup, teacher: Teacher) -> list[ControllerStage]:
    """Return the regression, and where bins of the features are tried another with them."""
    if not teacher.network.edges.numel():
        return [Regression(setup, teacher)]
    with_bins = copy.deepcopy(teacher.state_dict())
    teacher.network.leave_out_bins()
    return [Regression(setup, teacher), Regression(setup, teacher, with_bins)]
