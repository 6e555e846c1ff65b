"""The object that a run deploys: a controller, and the results of calibrating it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn

from knobwise.agents.calibration import guard as guards
from knobwise.agents.calibration import promise as promises
from knobwise.agents.calibration.guard import GuardRow
from knobwise.agents.calibration.mean_policies import MeanBudgetPolicy, StaticMix
from knobwise.agents.calibration.promise import PromiseRow
from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.drift import DRIFT_SCALE
from knobwise.agents.controller.networks import KnobHeads
from knobwise.agents.deployed.arrays import Array, digest_of
from knobwise.agents.deployed.calibrated import Guard, Static
from knobwise.agents.deployed.controller import FORMAT, Drift, NumpyController
from knobwise.agents.deployed.limits import CostLimits
from knobwise.agents.deployed.promise import Promise
from knobwise.agents.evaluation.baselines import FittedStatic, StaticUnderPromise
from knobwise.agents.evaluation.policy import Guarded
from knobwise.agents.teacher.teacher import Teacher
from knobwise.common.errors import InputError
from knobwise.common.files import written_whole

Arrays = dict[str, Array]
ARRAYS = ("static", "latency", "costs", "mean", "judged", "ranges")
"""Fields of `Calibration` that hold arrays; the others hold rows of plain values."""


@dataclass
class Calibration:
    """Everything that was calibrated on held-out samples, in plain values and arrays.

    Attributes:
        guard: a row for each calibrated budget, see `knobwise.agents.calibration.guard.calibrate`,
            or under mean budgets `knobwise.agents.calibration.mean_policies.compare_with_mix`; []
            without a guard.
        guard_if_free: the rows if decisions and features cost nothing, for comparison.
        promise: a row for each calibrated budget, see `knobwise.agents.calibration.promise`; []
            where nothing was to be promised.
        promise_of_static: the same for single configurations alone.
        guard_of_teacher: the rows of the teacher, which decides for free.
        static: what the guard falls back to under deadlines, see `FittedStatic.arrays`.
        latency: the latency that the tracker expects: `bias` and `spread` [C], and perhaps `weight`
            [width, C].
        costs: what K further costs are expected to stay below: `bias` and `margin` [K, C], and
            perhaps `weight` [K, width, C], see `agents.evaluation.limits.fit_bounds`; {} for none.
        cost_names: of these costs.
        mean: the mean budgets, see `policy.calibrated.MeanBudgets`.
        limits: the limits on further costs that held in training, by the names of
            `agents.evaluation.limits.Limits`; {} for none.
        judged: where not every cell was measured, the choices that the guard is about, for n
            validation samples, by policies that were not fitted on them: `rows` [n], `chosen` and
            `static` [n, B], and `cost_ms`, what a decision is charged.
        texts: what makes feature blocks of texts, by the name of both: the arrays of a
            `TextEncoder`.
        ranges: with a promise the range of each feature in training, see
            `agents.calibration.ranges.fit_ranges`; {} for none.
    """

    guard: list[GuardRow] = field(default_factory=list)
    guard_if_free: list[GuardRow] = field(default_factory=list)
    guard_of_teacher: list[GuardRow] = field(default_factory=list)
    promise: list[PromiseRow] = field(default_factory=list)
    promise_of_static: list[PromiseRow] = field(default_factory=list)
    static: Arrays = field(default_factory=dict)
    latency: Arrays = field(default_factory=dict)
    costs: Arrays = field(default_factory=dict)
    cost_names: list[str] = field(default_factory=list)
    mean: Arrays = field(default_factory=dict)
    judged: Arrays = field(default_factory=dict)
    ranges: Arrays = field(default_factory=dict)
    texts: dict[str, Arrays] = field(default_factory=dict)
    limits: dict[str, Any] = field(default_factory=dict)

    def scale_static(self, times: Array, accuracies: Array) -> None:
        """Multiply times and accuracies that static knows by factors [C] of the configurations."""
        if self.static:
            self.static = FittedStatic(self.static).scaled(times, accuracies).arrays()


class _Made(NamedTuple):
    """A NumPy controller, the tensors that it was made of, and how they were then."""

    decider: NumpyController
    tensors: list[Tensor]
    weights: list[tuple[int, int]]


class DeployedController(nn.Module):
    """A controller with its teacher and its calibration (guard, static, mean budgets).

    It decides in NumPy, by `decider`; the torch modules are there to be trained further, to be
    asked what they expect, and to be exported to other forms.
    """

    def __init__(
        self,
        controller: Controller,
        teacher: Teacher | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        super().__init__()
        self.controller = controller
        self.knobs = controller.knobs
        self.rule = controller.rule
        self.teacher: Any = teacher
        """A `Teacher`, or None."""
        self.calibration = calibration or Calibration()

    @property
    def if_free(self) -> NumpyController:
        """The controller that would decide if decisions and features cost nothing."""
        calibration = replace(self.calibration, guard=self.calibration.guard_if_free)
        return DeployedController(self.controller, None, calibration).decider

    @property
    def without_fallback(self) -> NumpyController:
        """The controller that would decide at every budget."""
        guard: list[Any] = [{**row, "deployed": True} for row in self.calibration.guard]
        calibration = replace(self.calibration, guard=guard)
        return DeployedController(self.controller, None, calibration).decider

    @property
    def guarded_teacher(self) -> Any:
        """The teacher, and static where its guard found that it was no better; None without one."""
        rows = self.calibration.guard_of_teacher
        if self.teacher is None or not rows:
            return self.teacher
        guard = Guard(guards.arrays_of(rows), Static(self.calibration.static))
        return Guarded(self.teacher, guard)

    @property
    def static_under_promise(self) -> StaticUnderPromise | None:
        """The best single configuration at each budget that keeps the same promise; None without
        one."""
        calibration = self.calibration
        if not calibration.promise_of_static:
            return None
        arrays = promises.arrays_of(calibration.promise_of_static)
        return StaticUnderPromise(Promise(arrays, Static(calibration.static)))

    @property
    def configurations(self) -> Tensor:
        """The value index of each knob for each configuration, int64 [C, K]."""
        return self.controller.configurations

    @property
    def decider(self) -> NumpyController:
        """The NumPy controller that decides.

        It is made at the first use, and anew where a step of training has changed a weight or
        `load_state_dict` all of them.
        """
        made = self.__dict__.get("_made")
        if made is None or made.weights != _changes_of(made.tensors):
            self.decide_by(NumpyController(self.arrays()))
        decider: NumpyController = self.__dict__["_made"].decider
        return decider

    def decide_by(self, decider: NumpyController) -> None:
        """Let a NumPy controller with the same arrays be the `decider`: one that decided before may
        have used up turns of a static mix."""
        tensors = [*self.controller.parameters(), *self.controller.buffers()]
        # no module, so it stands beside them
        self.__dict__["_made"] = _Made(decider, tensors, _changes_of(tensors))

    def settled(self, budget_ms: float) -> DeployedController:
        """Return the controller for requests with this budget, see `NumpyController.settled`."""
        decider = self.decider.settled(budget_ms)
        if decider is self.decider:
            return self
        settled = DeployedController(self.controller, self.teacher, self.calibration)
        settled.decide_by(decider)
        return settled

    def __getstate__(self) -> dict[str, Any]:
        # a copy makes its own decider
        return {name: value for name, value in self.__dict__.items() if name != "_made"}

    def train(self, mode: bool = True) -> Self:
        """Set the mode, and forget the `decider`, for weights that were replaced as a whole."""
        self.__dict__.pop("_made", None)
        return super().train(mode)

    def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
        """Take over weights, see `nn.Module`, and forget the `decider`."""
        self.__dict__.pop("_made", None)
        return super().load_state_dict(*arguments, **options)

    def choose(
        self,
        features: Mapping[str, Any],
        limits: Any,
        mask: Any = None,
        drift: Drift = None,
        random: np.random.Generator | None = None,
        cost_limits: CostLimits = None,
    ) -> Array:
        """Return configurations int64 [n], see `NumpyController.choose`.

        Raises:
            InputError: the features are not those that it reads, as with a checkpoint of another
                profile, or another argument is refused.
        """
        try:
            return self.decider.choose(
                features, limits, mask, drift=drift, random=random, cost_limits=cost_limits
            )
        except ValueError as error:
            # NumPy's folder stands alone and knows no errors of ours
            raise InputError(str(error)) from error

    @torch.no_grad()
    def expected(
        self,
        blocks: Mapping[str, Array],
        budgets: Array,
        limits: CostLimits,
        drift: Drift | None,
    ) -> dict[str, Tensor]:
        """Return what is expected of each configuration by name, [n, C] each: the numbers of
        `Explanation.expected` (`knobwise.serving.knob_policy`).

        Args:
            blocks: [n, d] by name.
            budgets: [n].
            limits: on further costs, in place of those that were declared.
            drift: how latencies differ from those predicted.
        """
        allowed, _ = self.decider.allowed(blocks, len(budgets), limits)
        log_probs = self.decider.log_probs(blocks, budgets, allowed, drift)
        numbers = {"probability": torch.from_numpy(np.exp(log_probs))}
        if self.teacher is None:
            return numbers
        tensors = {name: torch.tensor(block) for name, block in blocks.items()}
        moments = self.teacher.moments(self.controller.normaliser(tensors, len(budgets)))
        numbers |= {"accuracy": moments.accuracy, "latency_ms": moments.latency_ms}
        scored = torch.tensor(self.decider.budgets.limits(budgets))
        if not self.rule.late:
            return numbers | {"utility": moments.score(scored, self.rule)}
        if drift is not None:
            # the teacher expects the drifted latencies
            slow = moments.log_latency + torch.as_tensor(drift[0]).float()
            moved = moments._replace(log_latency=slow, spread=moments.spread * drift[1])
            slower = moved.latency_ms / moments.latency_ms
            numbers |= {"latency_ms": moved.latency_ms, "slower": slower}
            moments = moved
        utility = moments.score(scored, self.rule)
        return numbers | {"on_time": moments.meets(scored), "utility": utility}

    def reads_features(self, limits: Array) -> Array:
        """Tell under which limits [n] the features are read at all, bool [n]: False where the guard
        falls back to static."""
        return self.decider.reads_features(limits)

    def under_mean_budgets(self) -> MeanBudgetPolicy:
        """Return a policy for the mean budgets that it was calibrated for.

        Its static mix gives expectations instead of draws.
        """
        mean = self.decider.mean
        assert mean is not None

        def decide(features: Mapping[str, Array], group: int, mask: Array) -> Array:
            limits = np.full(len(mask), mean.budgets_ms[group])
            return self.decider.log_probs(features, limits, mask).argmax(1)

        columns = mean.budgets_ms, mean.values_ms, mean.deployed
        budgets_ms, values_ms, deployed = map(torch.from_numpy, columns)
        mix = None
        if mean.mix:
            averages = mean.mix["mean_accuracy"], mean.mix["mean_cost"]
            accuracy, cost = map(torch.from_numpy, averages)
            mix = StaticMix(accuracy, cost, budgets_ms)
        return MeanBudgetPolicy(
            "controller", decide, budgets_ms, values_ms, deployed=deployed, mix=mix
        )

    def arrays(self) -> Arrays:
        """Return the content of an exported file: every array by name, and `header`, JSON."""
        controller = self.controller
        calibration = self.calibration
        header = self._header()
        arrays = {"configurations": controller.configurations.cpu().numpy()}
        if len(controller.network.values):
            by_value = DRIFT_SCALE * controller.network.values
            arrays["values"] = by_value.cpu().float().numpy()
        # where no latency was expected, ln ms is 0 with a spread of 1
        zeros = np.zeros(len(controller.configurations), np.float32)
        parts = {
            "normaliser": _numpy_of(controller.normaliser.state_dict()),
            "network": _network_arrays(controller),
            "costs": calibration.costs,
            "latency": calibration.latency or {"bias": zeros, "spread": zeros + 1},
            "static": calibration.static,
            "mean": calibration.mean,
        }
        for number, encoder in enumerate(calibration.texts.values()):
            parts[f"texts.{number}"] = encoder
        if header["guard"]:
            parts["guard"] = guards.arrays_of(calibration.guard)
        if calibration.promise:
            parts["promise"] = promises.arrays_of(calibration.promise)
        if calibration.ranges:
            parts["range"] = {name: calibration.ranges[name] for name in ("low", "high")}
        for part, named in parts.items():
            for name, values in named.items():
                arrays[f"{part}.{name}"] = values
        arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
        return arrays | {"digest": np.frombuffer(digest_of(arrays), np.uint8)}

    def _header(self) -> dict[str, Any]:
        """Return what is no array in an exported file: settings and names, as plain values."""
        controller = self.controller
        normaliser = controller.normaliser
        calibration = self.calibration
        by_knobs = controller.network.head.by_knobs
        limit = "budget_ms"
        if controller.rule.kind == "mean":
            # before its prices are calibrated it decides under none
            limit = "mean" if calibration.mean else ""
        header: dict[str, Any] = {
            "format": FORMAT,
            "knobs": [[knob.name, list(knob.values)] for knob in controller.knobs],
            "features": normaliser.sizes,
            "clip": normaliser.clip,
            "layers": controller.config.layers,
            "heads": "knobs" if by_knobs else "configurations",
            "budget_width": controller.config.budget_width,
            "drift_values": len(controller.network.values),
            "sharpness": controller.config.sharpness,
            "datasets": normaliser.datasets,
            "columns": normaliser.columns,
            "limit": limit,
            "unit": controller.unit,
            "guard": bool(calibration.guard and calibration.static),
        }
        # what has no promise, texts or further costs stays as it was
        if calibration.promise:
            header["promise"] = True
        if calibration.ranges:
            # by which the ranges of training are widened, as a share of each
            header["margin"] = float(calibration.ranges["margin"])
        if calibration.texts:
            header["texts"] = list(calibration.texts)
        if calibration.costs:
            header["costs"] = calibration.cost_names
        if calibration.limits:
            header["limits"] = calibration.limits["values"]
        return header

    def export(self, path: str | Path) -> NumpyController:
        """Write the `.npz` that `NumpyController.load` reads, and return the same controller."""
        arrays = self.arrays()
        with written_whole(path) as temporary, temporary.open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, **arrays)
        return NumpyController(arrays)

    def plain(self) -> dict[str, Any]:
        """Pack controller, teacher and calibration into a dictionary of tensors and plain values,
        the part of a checkpoint that `restored` reads."""
        plain: dict[str, Any] = vars(self.calibration) | {
            "controller": self.controller.plain(),
            "teacher": self.teacher and self.teacher.plain(),
        }
        for part in ARRAYS:
            plain[part] = _tensors_of(plain[part])
        texts = self.calibration.texts.items()
        plain["texts"] = {name: _tensors_of(arrays) for name, arrays in texts}
        return plain

    @classmethod
    def restored(cls, plain: Mapping[str, Any]) -> DeployedController:
        """Return the controller that `plain` describes, in eval mode."""
        controller = Controller.restored(plain["controller"])
        teacher = None
        if plain["teacher"]:
            teacher = Teacher.restored(plain["teacher"], controller)
        # checkpoints of earlier versions know no ranges
        plain = {"ranges": {}, **plain}
        calibration = Calibration(**{name: plain[name] for name in vars(Calibration())})
        for part in ARRAYS:
            setattr(calibration, part, _numpy_of(plain[part]))
        texts = plain["texts"].items()
        calibration.texts = {name: _numpy_of(tensors) for name, tensors in texts}
        deployed = cls(controller, teacher, calibration).eval()
        _ = deployed.decider  # making it checks the controller
        return deployed


def _changes_of(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Identify tensors by address and version counter, so that a step of training shows: (id,
    version) of each."""
    return [(id(x), 0 if x.is_inference() else x._version) for x in tensors]


def _numpy_of(tensors: Mapping[str, Tensor]) -> Arrays:
    """Return tensors as arrays, under the same names."""
    return {name: values.detach().cpu().numpy() for name, values in tensors.items()}


def _tensors_of(arrays: Mapping[str, Array]) -> dict[str, Tensor]:
    """Return copies of arrays as tensors, under the same names."""
    return {name: torch.from_numpy(np.array(values)) for name, values in arrays.items()}


def _network_arrays(controller: Controller) -> Arrays:
    """Return the arrays of the network that is deployed, as `policy.network` reads them."""
    network = controller.network
    assert isinstance(network.head, KnobHeads)
    tensors = {f"encoding.{name}": values for name, values in network.encoding.state_dict().items()}
    layers = {
        f"layers.{i}": layer for i, layer in enumerate([*network.layers, network.head.logits])
    }
    if network.utility is not None:
        layers["utility"] = network.utility.outcomes
        tensors["utility.slope"] = network.utility.log_slope[-1, 0].exp()
    for name, layer in layers.items():
        # the last network is the one that is deployed
        tensors |= {f"{name}.weight": layer.weight[-1], f"{name}.bias": layer.bias[-1]}
    return _numpy_of(tensors)
