"""A controller for deadlines as an ONNX graph that decides alone, guard included: `Decision` is the policy as a module
that can be traced."""

from __future__ import annotations

import copy
import importlib.util
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from knobwise.agents.checkpoint import network_of
from knobwise.agents.serving.export import Agent, Decide, arrays_of_static
from knobwise.agents.stack.priced_policy import PricedChooser
from knobwise.agents.stack.stacked_controller import HOPELESS, MemberPredictions, StackedController
from knobwise.common.errors import InputError
from knobwise.common.files import written_whole
from knobwise.envs.configurations.budgets import log_ms

OPSET = 18


class Decision(nn.Module):
    """A controller for deadlines as one graph: feature blocks [n, d] and budgets [n] in ms → configuration int64 [n],
    and for each knob its values [n] (names as their index among the knob's values).
    """

    starts: Tensor
    choices: Tensor
    logs: Tensor
    miss: Tensor
    deploy: Tensor

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        if isinstance(agent, PricedChooser) or agent.priced:
            raise InputError("export: a controller for mean budgets has no ONNX form; leave onnx=true out")
        agent = copy.deepcopy(agent)
        self.network = network_of(agent)
        self.names = list(self.network.normaliser.sizes)
        self.stacked = isinstance(agent, StackedController)
        self.guarded = isinstance(agent, StackedController) and agent.guard is not None
        if isinstance(agent, StackedController):
            self.weights, self.experts = agent.weights.tolist(), agent.experts
            if agent.guard is not None and agent.static is not None:
                steps = arrays_of_static(agent.static)
                # the first step begins at −inf, so no budget is below it
                self.register_buffer("starts", torch.from_numpy(steps["starts"][1:]))
                self.register_buffer("choices", torch.from_numpy(steps["choices"]))
                self.register_buffer("logs", log_ms(agent.guard.budgets_ms).float())
                self.register_buffer("miss", agent.guard.miss)
                self.register_buffer("deploy", agent.guard.deploy)
        for number, knob in enumerate(self.network.knobs):
            values = knob.values if all(isinstance(v, (int, float)) for v in knob.values) else range(len(knob.values))
            of_configuration = torch.tensor([values[i] for i in self.network.configurations[:, number].tolist()])
            self.register_buffer(f"values_{number}", of_configuration)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The blocks in the order of `names`, then the budgets."""
        *blocks, limits = inputs
        features = dict(zip(self.names, blocks, strict=True))
        # `len` would fix the number of requests
        x = self.network.normaliser(features) if features else limits.new_zeros(limits.shape[0], 0)
        chosen = self._of_stack(x, limits) if self.stacked else self.network(x, limits).argmax(-1)
        knobs = range(len(self.network.knobs))
        return (chosen, *(getattr(self, f"values_{number}")[chosen] for number in knobs))

    def _of_stack(self, x: Tensor, limits: Tensor) -> Tensor:
        members = MemberPredictions.from_features(self.network, self.experts, self.weights, x)
        score, meets, log_latency = members.view(limits)
        hopeless = meets.amax(1) < HOPELESS
        if self.guarded:
            group = (log_ms(limits).unsqueeze(1) - self.logs).abs().argmin(1)
            priced = score.double() + self.miss[group].unsqueeze(1) * meets.double()
            static = self.choices[(limits.double().unsqueeze(1) >= self.starts).sum(1)]
            chosen = torch.where(hopeless, log_latency.argmin(1), _first_of_best(priced, -meets))
            return torch.where(self.deploy[group], chosen, static)
        return torch.where(hopeless, log_latency.argmin(1), _first_of_best(score, log_latency))


def _first_of_best(score: Tensor, slow: Tensor) -> Tensor:
    best = score == score.amax(1, keepdim=True)
    return torch.where(best, slow, torch.inf).argmin(1)


def export_onnx(agent: Agent, path: str | Path) -> None:
    """Write an ONNX graph: inputs are the feature blocks by name (float32 [n, d]) and `budget_ms` (float32 [n]);
    outputs `configuration` (int64 [n]) and a value for each knob [n], by name.

    Raises:
        InputError: if the controller is for mean budgets, packages are missing, or the path cannot be written.
    """
    check_packages()
    decision = Decision(agent).eval()
    sizes = decision.network.normaliser.sizes
    inputs = [torch.zeros(2, size) for size in sizes.values()] + [torch.ones(2)]
    names = [*sizes, "budget_ms"]
    outputs = ["configuration", *(knob.name for knob in decision.network.knobs)]
    several = torch.export.Dim("n")
    for library in ("onnxscript", "onnx_ir"):
        logging.getLogger(library).setLevel(logging.ERROR)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        traced = torch.export.export(decision, tuple(inputs), dynamic_shapes=(tuple({0: several} for _ in inputs),))
        for node in traced.graph.nodes:  # torch's exporter refuses bounds of different types
            if node.target is torch.ops.aten.clamp.default:
                node.args = (node.args[0], *(b if b is None else float(b) for b in node.args[1:]))
        program = torch.onnx.export(
            traced, input_names=names, output_names=outputs, opset_version=OPSET, dynamo=True, verbose=False
        )
    assert program is not None
    with written_whole(path) as temporary:
        program.save(str(temporary), external_data=False)


def check_packages() -> None:
    """Raise an InputError, saying how to install it, if a package that ONNX files need is missing."""
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(
            f"export: {', '.join(missing)} not installed; pip install 'knobwise[export]', or leave onnx=true out"
        )


def quantise_onnx(source: Path, path: Path) -> None:
    """Write a graph with the weights of its matrix products quantised to 8 bits. Some decisions then differ."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    root = logging.getLogger()  # this library logs advice to it
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        quantize_dynamic(source, path, weight_type=QuantType.QInt8)
    finally:
        root.setLevel(level)


def onnx_session(path: str | Path, threads: int = 1) -> Any:
    """An onnxruntime session on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = threads
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def by_onnx(session: Any) -> Decide:
    """Decisions of a session, for `parity`."""

    def decide(blocks: Mapping[str, NDArray[Any]], limits: NDArray[Any]) -> NDArray[np.int64]:
        feed = {name: block.astype(np.float32) for name, block in {**blocks, "budget_ms": limits}.items()}
        return session.run(["configuration"], {value.name: feed[value.name] for value in session.get_inputs()})[0]

    return decide
