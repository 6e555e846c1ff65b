"""What a teacher is to the training of a controller: it is made with the networks, fitted when its
own network is trained, and asked for what the
heads are to imitate."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDict

from knobwise.agents.teacher.distillation import distillation_targets
from knobwise.agents.teacher.experts import Experts
from knobwise.agents.teacher.teacher import FittedTeacher, Teacher, fit_teacher

if TYPE_CHECKING:
    from knobwise.agents.training.controllers import ControllerSetup


class Distiller:
    """The teacher of one training, and what the heads learn from it.

    Args:
        experts: returns the teacher's experts, fitted on the training and validation samples; None
            fits them here.
    """

    teacher: Teacher
    setup: ControllerSetup

    def __init__(self, experts: Callable[[], Experts] | None = None) -> None:
        self._experts = experts

    def make(self, setup: ControllerSetup) -> Teacher:
        """Return an untrained teacher for the networks of a setup."""
        self.setup = setup
        masks = torch.stack([torch.isin(setup.fitted, rows) for rows in setup.folds[0]])
        normaliser = setup.controller.normaliser
        self.teacher = Teacher.for_table(
            setup.facts,
            setup.fitted,
            setup.policy,
            normaliser,
            masks,
            setup.rule,
        )
        return self.teacher

    @functools.cached_property
    def fitted(self) -> FittedTeacher:
        """The teachers of all samples and of the folds, on the CPU, fitted from the trained
        network."""
        setup = self.setup
        teacher = copy.deepcopy(self.teacher).cpu()
        experts = None
        # shared experts read features by the statistics of this profile, not of a checkpoint
        if self._experts is not None and setup.start_sums is None:
            experts = self._experts()
        return fit_teacher(
            setup.facts,
            setup.fitted,
            teacher,
            setup.policy,
            limits=setup.limits,
            seed=setup.fold_seed,
            experts=experts,
        )

    @functools.cached_property
    def targets(self) -> TensorDict:
        """What the heads imitate, float [M, R, V, …], see `distillation_targets`."""
        setup = self.setup
        settings = setup.settings
        draws = settings.pretrain_iterations * settings.epochs * settings.contexts
        return distillation_targets(
            self.fitted,
            setup.facts,
            judged=setup.limits,
            draws=draws,
            seed=setup.seed,
            drift=setup.drift,
            values=setup.controller.network.values.cpu(),
            augment=setup.augment,
            device=setup.device,
        )
