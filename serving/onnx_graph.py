"""Export a controller for deadlines as an ONNX graph that decides alone, guard included; and
compare the decisions of such another form with the controller's.

Only `Deployed` depends on what kind of controller it is; everything else works for any torch module
that turns feature blocks and budgets into configurations.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from knobwise.agents.calibration.deployed_controller import DeployedController
from knobwise.agents.deployed.arrays import Array, Arrays, configurations_of
from knobwise.agents.deployed.controller import MAX_MS, NumpyController
from knobwise.common.errors import InputError
from knobwise.common.extras import install_command
from knobwise.common.progress import progress
from knobwise.envs.bandit.budgets import MIN_LATENCY_MS
from knobwise.envs.tables.profile_table import ProfileTable

Decide = Callable[[Arrays, Array], Array]
"""Blocks [n, d], budgets [n] in ms → configurations int64 [n], as `NumpyController.choose`."""
REFUSED = -1
"""What a graph, which cannot raise an error, chooses for a request that cannot be decided."""
TOLERANCE = 1e-4
"""Configurations whose log-probabilities differ by at most this are equally good: rounding decides
between them."""


class Deployed(nn.Module):
    """Decides as a controller for deadlines does, in torch, so that it can be traced.

    Feature blocks [n, d] and budgets [n] in ms → configurations int64 [n], `REFUSED` for what the
    controller refuses: a budget that is not positive and finite, or infinite features.

    Attributes:
        sizes: the width of each block by name, in the order of the inputs.
        configurations: their knob values.

    Raises:
        InputError: a controller for mean budgets, or missing packages.
    """

    def __init__(self, agent: DeployedController) -> None:
        super().__init__()
        try:
            import onnx  # noqa: F401
            import onnxruntime  # noqa: F401
            import onnxscript  # noqa: F401
        except ImportError as error:
            raise InputError(f"onnx=true: {error}; {install_command('onnx')}") from error
        if agent.rule.kind != "deadline":
            raise InputError(
                "onnx=true: the controller is for a mean over requests; leave onnx=true out, or "
                "train one with budget=quantiles"
            )
        if agent.calibration.limits:
            raise InputError(
                "onnx=true: a graph knows no limits on further costs, which this controller keeps; "
                "leave onnx=true out, or train without budget.limits"
            )
        if agent.calibration.promise:
            raise InputError(
                "onnx=true: a graph knows no promise (policy.promise), which this controller "
                "keeps; leave onnx=true out, or train without it"
            )
        self.controller = agent.controller.alone()
        self.sizes = agent.controller.normaliser.sizes
        self.configurations = configurations_of(agent.decider)
        decider = agent.decider
        self.guard = decider.guard
        self.whole = torch.from_numpy(decider.whole)
        if decider.guard is not None and decider.static is not None:
            self.logs = torch.from_numpy(np.log(decider.guard.budgets_ms))
            self.deploy = torch.from_numpy(decider.guard.deployed)
            # the first step begins at −∞, so that no budget is below it
            self.starts = torch.from_numpy(decider.static.starts[1:])
            self.choices = torch.from_numpy(decider.static.choices)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Decide, given the blocks and then the budgets."""
        *blocks, limits = inputs
        x = self.controller.normaliser(dict(zip(self.sizes, blocks, strict=True)), limits.shape[0])
        chosen = self.controller(x, limits).argmax(1)
        if self.guard is not None:
            # as `policy.calibrated.Guard` has it: the calibrated budget nearest in ln ms
            logs = limits.double().clamp_min(MIN_LATENCY_MS).log()
            group = (logs.unsqueeze(1) - self.logs).abs().argmin(1)
            # as `Static` there has it: the last step that begins at or below the budget
            static = self.choices[(limits.double().unsqueeze(1) >= self.starts).sum(1)]
            # what lacks a number that no training sample lacked gets what static chooses
            deploys = self.deploy[group]
            if len(self.whole):
                deploys = deploys & ~torch.cat(blocks, 1)[:, self.whole].isnan().any(1)
            chosen = torch.where(deploys, chosen, static)
        # nothing is true of NaN
        usable = (limits > 0) & (limits < MAX_MS)
        for block in blocks:
            usable = usable & ~block.isinf().any(1)
        return torch.where(usable, chosen, REFUSED)


def write_onnx(deployed: Deployed, path: Path) -> None:
    """Write an ONNX graph.

    Its inputs are the blocks by name, float32 [n, d], and `budget_ms`, float32 [n]; its output is
    `configuration`, int64 [n], `REFUSED` where there is none. The knob values of each configuration
    are in its metadata as `configurations`, JSON.
    """
    inputs = (*(torch.zeros(2, size) for size in deployed.sizes.values()), torch.ones(2))
    program = torch.onnx.export(
        deployed.eval(),
        inputs,
        input_names=[*deployed.sizes, "budget_ms"],
        output_names=["configuration"],
        dynamic_shapes=(({0: torch.export.Dim.DYNAMIC},) * len(inputs),),
        dynamo=True,
        verbose=False,
    )
    assert program is not None
    program.model.metadata_props["configurations"] = json.dumps(deployed.configurations)
    program.save(path)


def quantise(source: Path, path: Path) -> None:
    """Write a graph with the weights of its matrix products in 8 bits.

    This is the dynamic quantisation of onnxruntime.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    logging.disable(logging.WARNING)  # it logs advice
    try:
        # signed weights overflow on CPUs without VNNI, whose sums of two products have 16 bits
        quantize_dynamic(source, path, weight_type=QuantType.QUInt8)
    finally:
        logging.disable(logging.NOTSET)


class OnnxController:
    """Decides by a file that `write_onnx` wrote, on the CPU, as `NumpyController` does."""

    def __init__(self, path: Path) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(
            path, options, providers=["CPUExecutionProvider"]
        )
        # the graph has no input for what it does not read
        self._names = [value.name for value in self._session.get_inputs()]

    def choose(self, blocks: Arrays, limits: Array) -> Array:
        """Return configurations int64 [n]: blocks [n, d], budgets [n] in ms."""
        requested = {**blocks, "budget_ms": limits}
        feed = {name: requested[name].astype(np.float32, copy=False) for name in self._names}
        (chosen,) = self._session.run(None, feed)
        return chosen

    def decide_index(self, features: Arrays, budget_ms: float) -> int:
        """Return the configuration for one request: blocks [d]."""
        blocks = {name: block[None] for name, block in features.items()}
        return int(self.choose(blocks, np.array([budget_ms]))[0])


def agreement(
    controller: NumpyController,
    decide: Decide,
    table: ProfileTable,
    budgets_ms: Tensor,
    what: str,
    exact: bool = True,
) -> dict[str, int]:
    """Compare the decisions of another form of a controller, over all samples × budgets [B] in ms,
    as people type them: 16.7, not 16.700000762939453, the nearest float32.

    Returns:
        how many `contexts` there are, and in how many the decision is the `same`, or another one
        that is as probable within `TOLERANCE` (`rounding`).

    Raises:
        InputError: a decision is different, unless `exact` is False.
    """
    counts = {"contexts": table.num_samples * len(budgets_ms), "same": 0, "rounding": 0}
    blocks = {name: block.numpy() for name, block in table.features.items()}
    rows = np.arange(table.num_samples)
    with progress("comparing decisions", len(budgets_ms), quiet_s=2) as tick:
        for done, budget in enumerate(budgets_ms.tolist(), 1):
            limits = np.full(len(rows), float(str(np.float32(budget))))
            wanted = controller.choose(blocks, limits)
            other = decide(blocks, limits)
            # decisions that are equally probable may differ by rounding
            log_probs = controller.log_probs(blocks, limits)
            close = np.abs(log_probs[rows, wanted] - log_probs[rows, other]) <= TOLERANCE
            counts["same"] += int((wanted == other).sum())
            counts["rounding"] += int((close & (wanted != other)).sum())
            tick(done, "budgets")
    contexts, same, rounding = counts.values()
    if exact and same + rounding < contexts:
        raise InputError(
            f"{what}: decides differently from the controller in {contexts - same - rounding} of "
            f"{contexts} contexts of profile {table.name!r}; nothing was written"
        )
    return counts
