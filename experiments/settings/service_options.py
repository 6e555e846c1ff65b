"""The settings of `knobwise train experiment=service`, for Hydra."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from knobwise.agents.service.settings import ServiceLossConfig
from knobwise.agents.training.settings import OptimiserConfig
from knobwise.common.checks import at_least, positive
from knobwise.experiments.settings.tracking import Training


@dataclass
class ServiceRun(Training):
    """knobwise train experiment=service: train what a millisecond costs while requests wait, on top of a trained
    controller, and compare it with tuned rules under constant and changing loads."""

    experiment: str = "service"
    checkpoint: str = "runs/latest"
    """The controller, for deadlines: a checkpoint, or the folder of a run, for what it deploys."""
    profile: Any = MISSING
    """What the controller was trained on."""
    loads: list[Any] = field(default_factory=list)
    """Loads of the training, one for each trace in turn: 0.75, `ramp 0.3 1.3`, `steps 0.3 1.3`, `bursts 0.3 1.3`,
    `recorded FILE` (arrivals in ms, one per line) or `recorded FILE 0.75`. A load of 1 is as much as the servers can
    serve if the controller decides as if nobody waited."""
    judged_loads: list[Any] = field(default_factory=list)
    """Loads to judge at."""
    tuned_at: list[float] = field(default_factory=list)
    """Constant loads that a rule is tuned at, beside the one tuned on the loads of the training."""
    requests: int = 200
    """Requests in a trace."""
    traces: int = 100
    """Traces to judge on, at each load; rules are tuned on as many."""
    servers: int = 1
    """Servers of the queue."""
    deadlines_ms: list[float] | None = None
    """Deadlines from arrival to draw from, in ms; None for twice five quantiles of the profile's latencies, because a
    request may have to wait for another one."""
    own_cost: bool = True
    """Charge each decision that reads the request 0.06 ms and the profile's features_ms, during which the server is
    busy."""
    loss: ServiceLossConfig = field(default_factory=ServiceLossConfig)
    """What GRPO minimises."""
    optimiser: OptimiserConfig = field(default_factory=OptimiserConfig)
    """How; contexts are traces."""
    threads: int = 1
    """Threads of torch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("requests", "traces", "servers", "threads"):
            at_least(name, getattr(self, name), 1)
        for load in self.tuned_at:
            positive("tuned_at", load)
