"""What a controller expects of the samples of a profile, for serving those that wait for one another."""

from __future__ import annotations

from typing import Any

import torch

from knobwise.agents.serving.distillation import Lessons
from knobwise.agents.stack.stacked_controller import StackedController
from knobwise.common.errors import InputError
from knobwise.envs.service.queue import Forecast
from knobwise.envs.tables.profile_table import ProfileTable


def forecast_of(agent: Any, table: ProfileTable) -> Forecast:
    """What a controller expects of every sample of a table. Raises InputError: it is none for deadlines that predicts
    outcomes."""
    if not isinstance(agent, StackedController) or agent.priced:
        raise InputError(
            f"checkpoint: holds a {type(agent).__name__}; requests that wait need a controller for deadlines that "
            "predicts outcomes, from knobwise train experiment=controller or experiment=lean"
        )
    _, *predicted = Lessons.of_teacher(agent, agent.features(table.features, table.num_samples))
    return Forecast(*(part.float().where(table.mask, torch.nan) for part in predicted))
