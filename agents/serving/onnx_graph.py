"""Export a controller for deadlines as an ONNX graph that decides alone, guard included.

Only `Deployed` depends on what kind of controller it is; everything else works for any torch module that turns feature
blocks and budgets into configurations.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from knobwise.agents.checkpoint import network_of
from knobwise.agents.judging.baselines import BudgetAwareStatic
from knobwise.agents.serving.export import Agent, arrays_of_static, configurations_of
from knobwise.agents.stack.stacked_controller import MemberPredictions, StackedController
from knobwise.common.errors import InputError


class Steps:
    """Choose what budget-aware static chooses, as a step function of the budget, which can be traced."""

    def __init__(self, static: BudgetAwareStatic) -> None:
        steps = arrays_of_static(static)
        # the first step begins at −inf, so that no budget is below it
        self.starts = torch.from_numpy(steps["starts"][1:])
        self.choices = torch.from_numpy(steps["choices"])

    def choose(self, features: Mapping[str, Tensor], limits: Tensor) -> Tensor:
        """Return configurations int64 [n] for budgets [n] in ms."""
        return self.choices[(limits.double().unsqueeze(1) >= self.starts).sum(1)]


class Deployed(nn.Module):
    """Decide as a controller for deadlines does: feature blocks [n, d] and budgets [n] in ms → configurations [n].

    `sizes` holds the width of each block by name, in the order of the inputs, and `configurations` their knob values.

    Raises:
        InputError: a controller for mean budgets or weights, a stack with experts, or missing packages.
    """

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        try:
            import onnx  # noqa: F401
            import onnxruntime  # noqa: F401
            import onnxscript  # noqa: F401
        except ImportError as error:
            raise InputError(f"onnx=true: {error}; pip install 'knobwise[onnx]'") from error
        network = network_of(agent)
        if network.priced:
            raise InputError(
                "onnx=true: the controller is for worths or a mean over requests; leave onnx=true out, or train one "
                "with budget=quantiles"
            )
        self.agent: Any = copy.deepcopy(agent)
        self.sizes = network.normaliser.sizes
        self.configurations = configurations_of(network)
        if isinstance(agent, StackedController):
            if agent.weights[1:].any():
                raise InputError(
                    "onnx=true: the experts of a stack (trees, neighbours …) have no graph; give a run that was "
                    "trained with policy.deploy=auto, which deploys a student without experts"
                )
            if agent.static is not None:
                self.agent.static = Steps(agent.static)  # type: ignore[union-attr]

    def forward(self, *inputs: Tensor) -> Tensor:
        """Decide, given the blocks and then the budgets."""
        *blocks, limits = inputs
        x = self.agent.features(dict(zip(self.sizes, blocks, strict=True)), limits.shape[0])
        if isinstance(self.agent, StackedController):
            view = MemberPredictions.from_features(self.agent.network, [], [1.0], x).view(limits)
            return self.agent.preference(view, limits).argmax(1)
        return self.agent(x, limits).argmax(1)


def write_onnx(deployed: Deployed, path: Path) -> None:
    """Write an ONNX graph.

    Its inputs are the blocks by name, float32 [n, d], and `budget_ms`, float32 [n]; its output is `configuration`,
    int64 [n]. The knob values of each configuration are in its metadata as `configurations`, JSON.
    """
    inputs = (*(torch.zeros(2, size) for size in deployed.sizes.values()), torch.ones(2))
    program: Any = torch.onnx.export(
        deployed.eval(),
        inputs,
        input_names=[*deployed.sizes, "budget_ms"],
        output_names=["configuration"],
        dynamic_shapes=(({0: torch.export.Dim.DYNAMIC},) * len(inputs),),
        dynamo=True,
        verbose=False,
    )
    program.model.metadata_props["configurations"] = json.dumps(deployed.configurations)
    program.save(path)


def quantise(source: Path, path: Path) -> None:
    """Write a graph with the weights of its matrix products in 8 bits (onnxruntime's dynamic quantisation)."""
    from onnxruntime.quantization import quantize_dynamic

    logging.disable(logging.WARNING)  # it logs advice
    try:
        quantize_dynamic(source, path)
    finally:
        logging.disable(logging.NOTSET)


class OnnxController:
    """Decides by a file that `write_onnx` wrote, on the CPU, as `NumpyController` does."""

    def __init__(self, path: Path, threads: int = 1) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        # the graph has no input for what it does not read
        self._names = [value.name for value in self._session.get_inputs()]

    def choose(self, blocks: Mapping[str, NDArray[Any]], limits: NDArray[Any]) -> NDArray[np.int64]:
        """Return configurations int64 [n]: blocks [n, d], budgets [n] in ms."""
        requested = {**blocks, "budget_ms": limits}
        feed = {name: requested[name].astype(np.float32, copy=False) for name in self._names}
        (chosen,) = self._session.run(None, feed)
        return chosen

    def decide_index(self, features: Mapping[str, NDArray[Any]], budget_ms: float) -> int:
        """Return the configuration for one request: blocks [d]."""
        blocks = {name: block[None] for name, block in features.items()}
        return int(self.choose(blocks, np.array([budget_ms]))[0])
