"""A trained controller as people use it: features and a budget in, knob values out, with reasons on request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from knobwise.agents.checkpoint import Loaded
from knobwise.agents.controller.networks import UtilityNetwork
from knobwise.agents.serving.export import configurations_of
from knobwise.agents.stack.priced_policy import PricedChooser
from knobwise.agents.stack.stacked_controller import StackedController
from knobwise.common.errors import InputError

Numbers = ArrayLike | Tensor
Blocks = Mapping[str, Numbers] | Numbers | None
GUARD = (
    "the guard: it keeps budgets, takes the fastest where nothing is likely to be on time, and decides alike for all "
    "inputs where choosing did not pay on held-out samples"
)


@dataclass(frozen=True)
class Explanation:
    """A decision, the rule that made it, and what the policy expects of every configuration.

    Each row of `expected` is a `configuration` with its expected `accuracy` in 0 … 1, `latency_ms`, `on_time` (the
    probability) and `utility`, accuracy · on_time with the network's learned correction; the highest utility first.
    Under a mean budget nothing is late, and utility is accuracy − latency/worth. A policy that predicts no outcomes has
    only the `probability` with which it draws the configuration; the highest first.
    """

    decision: dict[str, Any]
    reason: str
    expected: list[dict[str, Any]]


class KnobPolicy:
    """Sets the knobs for each input under its budget.

    Attributes:
        agent: the controller; `agent.choose` is the same for tensors, and keeps to a mask.
        features: the widths of the feature blocks that it reads, by name; empty if it sees the budget only.
        knobs, configurations: the values of each knob, and the knob values of each configuration.
        judged: how it did on test samples, as in `results.json`, if `knobwise.fit` trained it.

    Raises:
        InputError: a checkpoint of a selector, or one from inside a training for mean budgets.
    """

    def __init__(self, loaded: Loaded) -> None:
        self.loaded, self.agent, network = loaded, loaded.controller, loaded.network
        if network.priced and not isinstance(self.agent, PricedChooser):
            raise InputError("the prices for mean budgets are not calibrated yet; let the training finish")
        self.features: dict[str, int] = network.normaliser.sizes
        self.knobs = {knob.name: knob.values for knob in network.knobs}
        self.configurations = configurations_of(network)
        self.judged: dict[str, Any] | None = loaded.extra.get("judged")

    def __repr__(self) -> str:
        blocks = ", ".join(f"{name} [{width}]" for name, width in self.features.items()) or "no features"
        kind, count, knobs = type(self.agent).__name__, len(self.configurations), ", ".join(self.knobs)
        return f"<KnobPolicy: {kind}, {blocks} and a budget → {count} configurations of {knobs}>"

    def decide(self, features: Blocks, budget_ms: Numbers, *, explain: bool = False) -> Any:
        """Decide for one input, or for n.

        Args:
            features: blocks [n, d] by name, or [d] for one input or for all alike: lists, NumPy or torch, NaN where a
                value is missing. A policy that reads one block takes it without its name, one without features None.
            budget_ms: the time that an answer may take, in ms, for all inputs or [n]; of a controller for mean budgets
                the mean over all inputs, one that it was calibrated for.
            explain: give an `Explanation`.

        Returns:
            The knob values by name, or an `Explanation`; a list of n if any argument is for n inputs.

        Raises:
            InputError: a block is missing, unknown, infinite or of another shape, or a budget is not positive and
                finite or, as a mean, not calibrated.
        """
        arrays, budgets = self._blocks(features), _numbers("budget_ms", budget_ms)
        if budgets.ndim > 1 or not ((budgets > 0) & (budgets < np.inf)).all():
            raise InputError(f"budget_ms={budget_ms!r}: a number or [n], all positive and finite, in ms")
        sizes = {len(block) for block in arrays.values() if block.ndim == 2} | set(budgets.shape)
        if len(sizes) > 1:
            raise InputError(f"decide: features and budgets are for {sorted(sizes)} inputs")
        n = next(iter(sizes), 1)
        if n == 0:
            return []
        blocks = {name: torch.from_numpy(block).expand(n, -1) for name, block in arrays.items()}
        limits = torch.from_numpy(budgets).expand(n)
        chosen = self.agent.choose(blocks, limits).tolist()
        results: list[Any] = [dict(self.configurations[index]) for index in chosen]
        if explain:
            results = self._explained(results, blocks, limits)
        return results if sizes else results[0]

    def save(self, path: str | Path) -> None:
        """Write a checkpoint; `knobwise.load` reads it. Raises InputError if it cannot be written."""
        self.loaded.save(path)

    def _blocks(self, features: Any) -> dict[str, NDArray[np.float32]]:
        """Blocks [d] or [n, d] by name, checked."""
        if features is not None and not isinstance(features, Mapping):
            features = {next(iter(self.features)) if len(self.features) == 1 else "without a name": features}
        blocks = {name: _numbers(f"features: {name}", values) for name, values in (features or {}).items()}
        fits = [x.ndim in (1, 2) and x.shape[-1] == self.features.get(name) for name, x in blocks.items()]
        if blocks.keys() != self.features.keys() or not all(fits):
            wanted = ", ".join(f"{name} [{width}] or [n, {width}]" for name, width in self.features.items())
            got = ", ".join(f"{name} {list(block.shape)}" for name, block in blocks.items())
            raise InputError(f"features: this policy reads {wanted or 'none'}; got {got or 'none'}")
        if infinite := [name for name, block in blocks.items() if np.isinf(block).any()]:
            raise InputError(f"features: {', '.join(infinite)}: infinite values; write NaN for what is missing")
        return blocks

    def _explained(self, decisions: list[Any], blocks: Mapping[str, Tensor], limits: Tensor) -> list[Explanation]:
        numbers = self._expected(blocks, limits)
        key, rule = "utility", "highest expected utility"
        if key not in numbers:
            key, rule = "probability", "most probable"
        explained = []
        for decision, rows in zip(decisions, torch.stack(list(numbers.values()), -1).tolist(), strict=True):
            expected = [
                {"configuration": dict(knobs), **dict(zip(numbers, row, strict=True))}
                for knobs, row in zip(self.configurations, rows, strict=True)
            ]
            expected.sort(key=itemgetter(key), reverse=True)
            reason = rule if decision == expected[0]["configuration"] else GUARD
            explained.append(Explanation(decision, reason, expected))
        return explained

    @torch.no_grad()
    def _expected(self, blocks: Mapping[str, Tensor], limits: Tensor) -> dict[str, Tensor]:
        """The numbers of `Explanation.expected` by name, [n, C] each."""
        agent, network = self.agent, self.loaded.network
        if isinstance(agent, PricedChooser):
            agent, limits = agent.chooser, (1 / agent.prices[agent.groups(limits)]).float()
        x = network.features(blocks, len(limits))
        if not isinstance(network.network, UtilityNetwork):
            return {"probability": network(x, limits).exp()}
        stack = agent if isinstance(agent, StackedController) else StackedController(network, [], torch.ones(1))
        members = stack.predictions(x)
        accuracy, latency_ms = members.costs()
        numbers = {"accuracy": accuracy.clamp(0, 1), "latency_ms": latency_ms}
        if network.priced:
            return numbers | {"utility": accuracy - latency_ms / limits.unsqueeze(1)}
        utility, on_time, _ = members.view(limits)
        return numbers | {"on_time": on_time, "utility": utility}


def _numbers(name: str, value: Any) -> NDArray[np.float32]:
    """A copy as float32. Raises InputError if these are no numbers."""
    try:
        with np.errstate(over="ignore"):  # infinite values are refused by name
            return np.array(value.detach().float().cpu().numpy() if isinstance(value, Tensor) else value, np.float32)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name}: not an array of numbers ({error})") from error
