"""A trained controller as people use it: features and a budget in, knob values out, with reasons on request."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from knobwise.agents.checkpoint import Loaded, network_of
from knobwise.agents.controller.networks import UtilityNetwork
from knobwise.agents.serving.export import arrays_of, configurations_of, knob_values, write_arrays
from knobwise.agents.serving.numpy_controller import NumpyController
from knobwise.agents.stack.priced_policy import PricedChooser
from knobwise.agents.stack.stacked_controller import StackedController
from knobwise.common.errors import InputError

Numbers = ArrayLike | Tensor
Blocks = Mapping[str, Numbers] | Numbers | None
GUARD = "the guard: it keeps budgets, and decides alike for all inputs where choosing did not pay on held-out samples"


@dataclass(frozen=True)
class Explanation:
    """A decision, the rule that made it, and what the policy expects of every configuration that could be chosen.

    Each row of `expected` is a `configuration` with its expected `accuracy` in 0 … 1, `latency_ms`, `on_time` (the
    probability) and `utility`, accuracy · on_time with the network's learned correction; the highest utility first.
    Under a mean budget nothing is late, and utility is accuracy − latency/worth. A policy that predicts no outcomes has
    only the `probability` with which it draws the configuration; the highest first.
    """

    decision: dict[str, Any]
    reason: str
    expected: list[dict[str, Any]]


class KnobPolicy:
    """Sets the knobs for each input under its budget; a `Policy` of tensors too.

    Args:
        source: a checkpoint of a controller, or an exported controller, which is faster and explains nothing.

    Raises:
        InputError: a checkpoint of a selector, or one from inside a training for mean budgets.
    """

    def __init__(self, source: Loaded | NumpyController) -> None:
        self.source = source
        self.agent: Any = source if isinstance(source, NumpyController) else source.controller
        network: Any = self.agent if isinstance(self.agent, NumpyController) else network_of(self.agent)
        if getattr(network, "priced", False) and not isinstance(self.agent, PricedChooser):
            raise InputError("the prices for mean budgets are not calibrated yet; let the training finish")
        self.features: dict[str, int] = (
            network.feature_sizes if isinstance(network, NumpyController) else network.normaliser.sizes
        )
        """The widths of the feature blocks that it reads, by name; empty if it sees the budget only."""
        self.knobs, self.configurations = knob_values(network), configurations_of(network)
        """The values of each knob, and the knob values of each configuration in the order of masks and `choose`."""
        self.judged: dict[str, Any] | None = getattr(source, "extra", {}).get("judged")
        """How it did on test samples, as in `results.json`, if `knobwise.fit` trained it."""

    def __repr__(self) -> str:
        blocks = ", ".join(f"{name} [{width}]" for name, width in self.features.items()) or "no features"
        kind, count, knobs = type(self.agent).__name__, len(self.configurations), ", ".join(self.knobs)
        return f"<KnobPolicy: {kind}, {blocks} and a budget → {count} configurations of {knobs}>"

    def choose(self, features: Mapping[str, Tensor], limits: Tensor, mask: Tensor | None = None) -> Tensor:
        """Blocks [n, d], budgets [n] in ms, mask bool [n, C] → configurations int64 [n], see `Policy.choose`."""
        try:
            return torch.as_tensor(self.agent.choose(features, limits, mask))
        except ValueError as error:  # an exported controller knows no InputError
            raise InputError(str(error)) from error

    def decide(
        self, features: Blocks, budget_ms: Numbers, *, mask: Numbers | None = None, explain: bool = False
    ) -> Any:
        """Decide for one input, or for n.

        Args:
            features: blocks [n, d] by name, or [d] for one input or for all alike: lists, NumPy or torch, NaN where a
                value is missing. A policy that reads one block takes it without its name, one without features None.
            budget_ms: the time that an answer may take, in ms, for all inputs or [n]; of a controller for mean budgets
                the mean over all inputs, one that it was calibrated for.
            mask: bool [C] or [n, C], which `configurations` may be chosen; None for all.
            explain: give an `Explanation`.

        Returns:
            The knob values by name, or an `Explanation`; a list of n if any argument is for n inputs.

        Raises:
            InputError: a block is missing, unknown, infinite or of another shape, a budget is not positive and finite
                or, as a mean, not calibrated, or a mask leaves nothing to choose.
        """
        blocks, budgets = self._blocks(features), _array("budget_ms", budget_ms)
        if budgets.ndim > 1 or not ((budgets > 0) & (budgets < np.inf)).all():
            raise InputError(f"budget_ms={budget_ms!r}: a number or [n], all positive and finite, in ms")
        count = len(self.configurations)
        allowed = np.ones(count, np.float32) if mask is None else _array("mask", mask)
        if allowed.ndim not in (1, 2) or allowed.shape[-1] != count or not allowed.any(-1).all():
            raise InputError(f"mask: bool [{count}] or [n, {count}], a True for each input; got {list(allowed.shape)}")
        batches = [array for array in (*blocks.values(), allowed) if array.ndim == 2] + [budgets] * budgets.ndim
        sizes = {len(array) for array in batches} or {1}
        if len(sizes) > 1:
            raise InputError(f"decide: features, budgets and mask are for {sorted(sizes)} inputs")
        n = sizes.pop()
        if n == 0:
            return []
        tensors = {name: torch.from_numpy(block).expand(n, -1) for name, block in blocks.items()}
        limits, may = torch.from_numpy(budgets).expand(n), torch.from_numpy(allowed).bool().expand(n, -1)
        chosen = self.choose(tensors, limits, None if mask is None else may).tolist()
        results: list[Any] = [dict(self.configurations[index]) for index in chosen]
        if explain:
            results = self._explained(results, tensors, limits, may)
        return results if batches else results[0]

    def save(self, path: str | Path) -> None:
        """Write a `.pt`, a checkpoint, or a `.npz`, which decides with NumPy alone; `knobwise.load` reads both. Raises
        InputError if the policy has no such form, or the path cannot be written."""
        if Path(path).suffix == ".npz":
            write_arrays(self.agent.arrays if isinstance(self.agent, NumpyController) else arrays_of(self.agent), path)
        elif Path(path).suffix == ".pt" and isinstance(self.source, Loaded):
            self.source.save(path)
        else:
            raise InputError(f"{path}: save as .npz, or as .pt what was not exported before")

    def _blocks(self, features: Any) -> dict[str, NDArray[np.float32]]:
        """Blocks [d] or [n, d] by name, checked."""
        if features is not None and not isinstance(features, Mapping):
            features = {next(iter(self.features)) if len(self.features) == 1 else "without a name": features}
        blocks = {name: _array(f"features: {name}", values) for name, values in (features or {}).items()}
        fits = {name: a.ndim in (1, 2) and a.shape[-1] == self.features.get(name) for name, a in blocks.items()}
        if blocks.keys() != self.features.keys() or not all(fits.values()):
            wanted = ", ".join(f"{name} [{width}] or [n, {width}]" for name, width in self.features.items())
            got = ", ".join(f"{name} {list(block.shape)}" for name, block in blocks.items())
            raise InputError(f"features: this policy reads {wanted or 'none'}; got {got or 'none'}")
        if infinite := [name for name, block in blocks.items() if np.isinf(block).any()]:
            raise InputError(f"features: {', '.join(infinite)}: infinite values; write NaN for what is missing")
        return blocks

    @torch.no_grad()
    def _explained(
        self, decisions: list[Any], blocks: Mapping[str, Tensor], limits: Tensor, mask: Tensor
    ) -> list[Explanation]:
        numbers = self._expected(blocks, limits, mask)
        *_, key = numbers
        rule = "highest expected utility" if key == "utility" else "most probable"
        values, explained = torch.stack(list(numbers.values()), -1).tolist(), []
        for decision, rows, allowed in zip(decisions, values, mask.tolist(), strict=True):
            named = zip(self.configurations, (dict(zip(numbers, row, strict=True)) for row in rows), strict=True)
            expected = [{"configuration": dict(knobs), **row} for knobs, row in itertools.compress(named, allowed)]
            expected.sort(key=itemgetter(key), reverse=True)
            reason = rule if decision == expected[0]["configuration"] else GUARD
            explained.append(Explanation(decision, reason, expected))
        return explained

    def _expected(self, blocks: Mapping[str, Tensor], limits: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """The numbers of `Explanation.expected` by name, [n, C] each, and last what they are sorted by."""
        inner = agent = self.agent
        if isinstance(agent, NumpyController):
            raise InputError("explain: an exported file only decides; load the checkpoint that it was made from")
        if isinstance(agent, PricedChooser):
            inner, limits = agent.chooser, (1 / agent.prices[agent.groups(limits)]).float()
        network = network_of(agent)
        x = network.features(blocks, len(limits))
        if not isinstance(network.network, UtilityNetwork):
            return {"probability": network(x, limits, mask).exp()}
        stack = inner if isinstance(inner, StackedController) else StackedController(network, [], torch.ones(1))
        members = stack.predictions(x)
        accuracy, latency_ms = members.costs()
        numbers = {"accuracy": accuracy.clamp(0, 1), "latency_ms": latency_ms}
        if network.priced:
            return numbers | {"utility": accuracy - latency_ms / limits.unsqueeze(1)}
        utility, on_time, _ = members.view(limits)
        return numbers | {"on_time": on_time, "utility": utility}


def _array(name: str, value: Any) -> NDArray[np.float32]:
    """A copy as float32. Raises InputError if these are no numbers."""
    try:
        with np.errstate(over="ignore"):  # infinite values are refused by name
            return np.array(value.detach().float().cpu().numpy() if isinstance(value, Tensor) else value, np.float32)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name}: not an array of numbers ({error})") from error
