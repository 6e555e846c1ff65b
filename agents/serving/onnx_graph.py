"""A controller for deadlines as an ONNX graph that decides alone, guard included.

`Decision` is the computation of the policy as a module that can be traced: raw feature blocks and a budget in, a
configuration and its knob values out. Networks and regressors are those of the policy itself, but for two regressors
whose loops and counts must be fixed before they are traced.
"""

from __future__ import annotations

import copy
import importlib.util
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from knobwise.agents.controller.networks import UtilityNetwork
from knobwise.agents.predictors.experts import Expert
from knobwise.agents.predictors.regressors import Neighbours, Trees
from knobwise.agents.serving.export import Agent, Decide, arrays_of_static, network_of, rounded_down
from knobwise.agents.stack.priced_policy import PricedChooser
from knobwise.agents.stack.stacked_controller import HOPELESS, StackedController, View
from knobwise.common.errors import InputError
from knobwise.common.files import written_whole
from knobwise.envs.configurations.budgets import log_ms

OPSET = 18


class _TracedNeighbours(nn.Module):
    """`Neighbours` with a fixed k."""

    def __init__(self, of: Neighbours) -> None:
        super().__init__()
        self.of, self.k = of, int(of.k)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.of.weights
        distance = x.square().sum(1, keepdim=True) + self.of.squares - 2 * x @ self.of.points.T
        nearest = distance.clamp_min(0).topk(self.k, largest=False, sorted=False).indices
        return self.of.values[nearest].mean(1)


class _TracedTrees(nn.Module):
    """`Trees` with a fixed depth; every fit has a product of its own."""

    threshold: Tensor

    def __init__(self, of: Trees) -> None:
        super().__init__()
        self.of, self.depth, self.counts = of, int(of.depth), of.fit.bincount().tolist()
        self.register_buffer("threshold", torch.from_numpy(rounded_down(of.threshold.numpy())))

    def forward(self, x: Tensor) -> Tensor:
        of = self.of
        node = of.roots + torch.zeros_like(x[:, :1], dtype=torch.int64)
        for _ in range(self.depth):
            goes_left = x.gather(1, of.feature[node]) <= self.threshold[node]
            node = torch.where(goes_left, of.left[node], of.right[node])
        sums = [part.sum(1) for part in of.value[node].split(self.counts, 1)]
        total = of.bias.expand(x.shape[0], -1)
        for part, components in zip(sums, of.components, strict=True):
            total = total + part @ components
        return total


def _traced(regressor: nn.Module) -> nn.Module:
    if isinstance(regressor, Neighbours):
        return _TracedNeighbours(regressor)
    return _TracedTrees(regressor) if isinstance(regressor, Trees) else regressor


class Decision(nn.Module):
    """A controller for deadlines as one graph: feature blocks [n, d] and budgets [n] in ms → configuration int64 [n],
    and for each knob its values [n] (names by their number among the knob's values).

    Raises:
        InputError: a controller for mean budgets; its NumPy form is what it can be exported to.
    """

    starts: Tensor
    choices: Tensor
    logs: Tensor
    miss: Tensor
    deploy: Tensor

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        if isinstance(agent, PricedChooser) or agent.priced:
            raise InputError("export: a controller for mean budgets has no ONNX form; export it with onnx=false")
        agent = copy.deepcopy(agent)
        self.network = network_of(agent)
        self.names = list(self.network.normaliser.sizes)
        self.stacked, self.guarded = isinstance(agent, StackedController), False
        if isinstance(agent, StackedController):
            self._take_stack(agent)
        for number, knob in enumerate(self.network.knobs):
            values = knob.values if all(isinstance(v, (int, float)) for v in knob.values) else range(len(knob.values))
            of_configuration = torch.tensor([values[i] for i in self.network.configurations[:, number].tolist()])
            self.register_buffer(f"values_{number}", of_configuration)

    def _take_stack(self, stack: StackedController) -> None:
        """Its members that count, and its guard."""
        self.weights = stack.weights.tolist()
        used = zip(self.weights[1:], stack.experts, strict=True)
        self.experts = nn.ModuleList(expert for weight, expert in used if weight > 0)
        for expert in self.experts:
            assert isinstance(expert, Expert)
            expert.accuracy, expert.log_latency = _traced(expert.accuracy), _traced(expert.log_latency)
        if stack.guard is not None and stack.static is not None:
            self.guarded = True
            steps = arrays_of_static(stack.static)
            # no budget is below the first step, which begins at −inf
            self.register_buffer("starts", torch.from_numpy(steps["starts"][1:]))
            self.register_buffer("choices", torch.from_numpy(steps["choices"]))
            self.register_buffer("logs", log_ms(stack.guard.budgets_ms).float())
            self.register_buffer("miss", stack.guard.miss)
            self.register_buffer("deploy", stack.guard.deploy)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The blocks in the order of `names`, then the budgets."""
        *blocks, limits = inputs
        given = dict(zip(self.names, blocks, strict=True))
        # `len` would fix the number of requests
        x = self.network.normaliser(given) if given else limits.new_zeros(limits.shape[0], 0)
        chosen = self._of_stack(x, limits) if self.stacked else self.network(x, limits).argmax(-1)
        knobs = range(len(self.network.knobs))
        return (chosen, *(getattr(self, f"values_{number}")[chosen] for number in knobs))

    def _of_stack(self, x: Tensor, limits: Tensor) -> Tensor:
        score, meets, log_latency = self._view(x, limits)
        if self.guarded:
            group = (log_ms(limits).unsqueeze(1) - self.logs).abs().argmin(1)
            priced = score.double() + self.miss[group].unsqueeze(1) * meets.double()
            static = self.choices[(limits.double().unsqueeze(1) >= self.starts).sum(1)]
            chosen = torch.where(self.deploy[group], _first_of_best(priced, -meets), static)
        else:
            chosen = _first_of_best(score, log_latency)
        return torch.where(meets.amax(1) < HOPELESS, log_latency.argmin(1), chosen)

    def _view(self, x: Tensor, limits: Tensor) -> View:
        views = []
        if self.weights[0] > 0:
            network, members = self.network.network, self.network.config.members
            assert isinstance(network, UtilityNetwork)
            outcomes, own = network.outcomes(x.expand(members, -1, -1)), limits.expand(members, -1)
            said = network.scores(outcomes, own), network.meets(outcomes, own), outcomes.log_latency
            views.append(View(*(part.mean(0) for part in said)))
        wide = x if x.shape[-1] else x.new_zeros(x.shape[0], 1)
        for expert in self.experts:
            of_expert = expert(wide)
            utility, meets = of_expert.expected_utility(limits), of_expert.meets(limits)
            views.append(View(utility, meets, of_expert.log_latency))
        used = [weight for weight in self.weights if weight > 0]
        joined = (
            [weight * part for weight, part in zip(used, parts, strict=True)] for parts in zip(*views, strict=True)
        )
        return View(*(torch.stack(parts).sum(0) for parts in joined))


def _first_of_best(score: Tensor, slow: Tensor) -> Tensor:
    best = score == score.amax(1, keepdim=True)
    return torch.where(best, slow, torch.inf).argmin(1)


def export_onnx(agent: Agent, path: str | Path, int8: bool = False) -> None:
    """Write an ONNX graph: inputs are the feature blocks by name (float32 [n, d]) and `budget_ms` (float32 [n]);
    outputs `configuration` (int64 [n]) and a value for each knob [n], by name.

    Args:
        agent: a controller for deadlines.
        path: of the file.
        int8: weights quantised to 8 bits. Decisions then differ: measure how often (`agreement`).

    Raises:
        InputError: a controller for mean budgets, packages that are missing, a path that cannot be written.
    """
    check_packages()
    decision = Decision(agent).eval()
    with written_whole(path) as temporary:
        _write_onnx(decision, temporary)
        if int8:
            _quantise(temporary)


def check_packages() -> None:
    """Refuse when a package that ONNX files need is missing.

    Raises:
        InputError: saying how to install it.
    """
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(
            f"export: {', '.join(missing)} not installed; pip install 'knobwise[export]', or export with onnx=false"
        )


def _quantise(path: Path) -> None:
    """Weights of matrix products to 8 bits, inputs as they come."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    root = logging.getLogger()  # which this library writes its advice to
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        quantize_dynamic(path, path, weight_type=QuantType.QInt8)
    finally:
        root.setLevel(level)


def _write_onnx(decision: Decision, path: Path) -> None:
    sizes = decision.network.normaliser.sizes
    inputs = [torch.zeros(2, size) for size in sizes.values()] + [torch.ones(2)]
    names = [*sizes, "budget_ms"]
    outputs = ["configuration", *(knob.name for knob in decision.network.knobs)]
    several = torch.export.Dim("n")
    logging.getLogger("onnxscript").setLevel(logging.ERROR)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        traced = torch.export.export(decision, tuple(inputs), dynamic_shapes=(tuple({0: several} for _ in inputs),))
        for node in traced.graph.nodes:  # torch's exporter refuses bounds of which one is an integer and one is not
            if node.target is torch.ops.aten.clamp.default:
                node.args = (node.args[0], *(b if b is None else float(b) for b in node.args[1:]))
        program = torch.onnx.export(
            traced, input_names=names, output_names=outputs, opset_version=OPSET, dynamo=True, verbose=False
        )
    assert program is not None
    program.save(str(path), external_data=False)


def onnx_session(path: str | Path, threads: int = 1) -> Any:
    """An onnxruntime session on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = threads
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def by_onnx(session: Any) -> Decide:
    """Decisions of a session, in the form that `parity` asks for."""
    names: list[str] = [one.name for one in session.get_inputs()]

    def decide(features: Mapping[str, Tensor], limits: Tensor) -> Tensor:
        given = {name: features[name].float().numpy() for name in names if name != "budget_ms"}
        return torch.from_numpy(session.run(["configuration"], {**given, "budget_ms": limits.float().numpy()})[0])

    return decide
