"""Export: a controller as arrays that decide with NumPy alone (`knobwise.agents.serving.numpy_controller`), guard
included, and the comparison of its decisions with the trained policy's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knobwise.agents.checkpoint import network_of
from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.networks import UtilityNetwork
from knobwise.agents.judging.baselines import BudgetAwareStatic
from knobwise.agents.predictors.experts import Expert
from knobwise.agents.serving.numpy_controller import FORMAT, NumpyController, digest_of
from knobwise.agents.stack.priced_policy import PricedChooser
from knobwise.agents.stack.stacked_controller import StackedController
from knobwise.common.errors import InputError
from knobwise.common.files import written_whole
from knobwise.common.progress import progress
from knobwise.envs.configurations.budgets import default_budgets
from knobwise.envs.tables.profile_table import ProfileTable

Agent = Controller | StackedController | PricedChooser
Arrays = dict[str, NDArray[Any]]
Decide = Callable[[Mapping[str, NDArray[Any]], NDArray[Any]], NDArray[np.int64]]
"""Blocks [n, d], budgets [n] in ms → configurations int64 [n], as `NumpyController.choose`."""
TOLERANCE = 1e-5
"""Configurations whose scores differ by at most this are equally good: rounding decides between them."""


def configurations_of(controller: Any) -> list[dict[str, Any]]:
    """The values that each of a controller's or a table's configurations gives the knobs, by name."""
    knobs = controller.knobs
    named = knobs if isinstance(knobs, Mapping) else {knob.name: knob.values for knob in knobs}
    rows = controller.configurations.tolist()
    return [{name: named[name][i] for name, i in zip(named, row, strict=True)} for row in rows]


# -- NumPy -------------------------------------------------------------------------------------------------------------


def arrays_of(agent: Agent) -> Arrays:
    """The content of an exported file: every array by name, and `header`, JSON as bytes.

    Raises:
        InputError: if prices for mean budgets are not calibrated, or the controller weighs a further cost.
    """
    network, inner = network_of(agent), agent.chooser if isinstance(agent, PricedChooser) else agent
    stack = inner if isinstance(inner, StackedController) else None
    if network.cost:
        raise InputError(f"export: a controller that weighs {network.cost} decides in Python only, by knobwise.load")
    if network.priced and not isinstance(agent, PricedChooser):
        raise InputError("export: the controller's prices are not calibrated yet; let its training finish")
    experts = [expert for expert in stack.experts if isinstance(expert, Expert)] if stack else []
    config = network.config
    weights = stack.weights.tolist() if stack else [1.0]
    header = {
        "format": FORMAT,
        "knobs": [[knob.name, list(knob.values)] for knob in network.knobs],
        "features": network.normaliser.sizes,
        "clip": network.normaliser.clip,
        "structure": config.structure,
        "layers": config.layers,
        "members": config.members,
        "budget_width": config.budget_width,
        "datasets": network.normaliser.datasets,
        "priced": network.priced,
        "stacked": stack is not None,
        "weights": weights,
        "experts": [[type(r).__name__ for _, r in expert.named_children()] for expert in experts],
        "guard": stack is not None and stack.guard is not None,
        "mean_budgets": isinstance(agent, PricedChooser),
    }
    tensors: dict[str, Tensor] = {"configurations": network.configurations}
    tensors |= {f"normaliser.{name}": buffer for name, buffer in network.normaliser.state_dict().items()}
    tensors |= {f"network.{name}": values for name, values in network.network.state_dict().items()}
    for number, expert in enumerate(experts):
        if weights[number + 1] > 0:
            tensors |= {f"experts.{number}.{name}": values for name, values in expert.state_dict().items()}
    arrays = {name: values.detach().cpu().numpy() for name, values in tensors.items()}
    if stack is not None and stack.guard is not None and stack.static is not None:
        arrays |= {f"guard.{name}": stack.guard.state_dict()[name].numpy() for name in ("budgets_ms", "miss", "deploy")}
        arrays |= {f"static.{name}": values for name, values in arrays_of_static(stack.static).items()}
    if isinstance(agent, PricedChooser):
        arrays |= {f"mean.{name}": values for name, values in mean_arrays(agent).items()}
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    return arrays | {"digest": np.frombuffer(digest_of(arrays), np.uint8)}


def to_numpy(agent: Agent) -> NumpyController:
    """The same decisions by NumPy, in memory."""
    return NumpyController(arrays_of(agent))


def export_numpy(agent: Agent, path: str | Path) -> NumpyController:
    """Write the `.npz` that `NumpyController.load` reads, and return the same controller."""
    arrays = arrays_of(agent)
    with written_whole(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)
    return NumpyController(arrays)


def arrays_of_static(static: BudgetAwareStatic) -> Arrays:
    """Its tables (latency_ms [C], sorted_ms [C, n], running [C, n + 1]), and its choices among all configurations as a
    step function of the budget: from `starts[i]` ms on it chooses `choices[i]`, [s] each.

    A configuration's mean utility never falls as the budget grows, so the best one is the running maximum over all
    cells in order of latency; among equals the one with the lower mean latency.
    """
    plain = {name.removeprefix("_"): values.numpy() for name, values in static.plain().items()}
    count, samples = plain["sorted_ms"].shape
    order = np.argsort(plain["latency_ms"], kind="stable")
    ranks = np.concatenate([[0], np.repeat(np.argsort(order), samples)])
    time = np.concatenate([[-np.inf], plain["sorted_ms"].reshape(-1)])
    worth = np.concatenate([[0.0], plain["running"][:, 1:].reshape(-1)])
    measured = time < np.inf
    time, worth, ranks = time[measured], worth[measured], ranks[measured]
    place = np.unique(worth, return_inverse=True)[1].reshape(-1)
    by_time = np.argsort(time, kind="stable")
    best = np.maximum.accumulate((place * count + (count - 1 - ranks))[by_time])
    time, chosen = time[by_time], order[count - 1 - best % count]
    last = np.append(time[1:] != time[:-1], True)  # the last cell of each latency, which includes the others
    time, chosen = time[last], chosen[last]
    new = np.append(True, chosen[1:] != chosen[:-1])
    exact = plain["sorted_ms"].astype(np.float32)
    plain["sorted_ms"] = exact if (exact == plain["sorted_ms"]).all() else plain["sorted_ms"]
    return {**plain, "starts": time[new], "choices": chosen[new]}


def mean_arrays(agent: PricedChooser) -> Arrays:
    """Prices of mean budgets, and the static mix."""
    arrays = {
        "budgets_ms": agent.budgets_ms.double().numpy(),
        "prices": agent.prices.numpy(),
        "deployed": agent.deployed.numpy(),
    }
    if agent.mix is not None:
        plain = agent.mix.plain()
        parts = dict(zip(("mean_accuracy", "mean_cost", "budgets"), plain["_means"], strict=True))
        parts |= {name: plain[name] for name in ("first", "second", "share")}
        arrays |= {f"mix.{name}": values.numpy() for name, values in parts.items()}
    return arrays


# -- parity ------------------------------------------------------------------------------------------------------------


def contexts_of(agent: Agent, table: ProfileTable) -> Tensor:
    """The budgets to compare decisions at, float32 [B]: the default ones and the calibrated ones."""
    if isinstance(agent, PricedChooser):
        return agent.budgets_ms.float()
    calibrated = [agent.guard.budgets_ms] if isinstance(agent, StackedController) and agent.guard is not None else []
    return torch.cat([budgets.float() for budgets in (default_budgets(table), *calibrated)]).unique()


def parity(
    agent: Agent,
    decide: Decide,
    table: ProfileTable,
    budgets_ms: Tensor,
    what: str,
    samples: int | None = None,
    reference: Decide | None = None,
    exact: bool = True,
) -> dict[str, int]:
    """Check that another form of a controller makes the same decisions, over samples (all, or only the first ones) ×
    budgets (float [B], ms): the same as the agent, or as `reference`, a form of it that was compared before.

    Returns: how many `contexts` there are, and in how many the decision is the `same` or another one with the same
    score within `TOLERANCE` (`rounding`).

    Raises:
        InputError: if a decision is different, unless `exact` is False.
    """
    counts = {"contexts": 0, "same": 0, "rounding": 0}
    features = {name: block[:samples] for name, block in table.features.items()}
    blocks = {name: block.numpy() for name, block in features.items()}
    with progress("comparing decisions", len(budgets_ms), quiet_s=2) as tick:
        for number, budget in enumerate(budgets_ms, 1):
            limits = budget.expand(min(table.num_samples, samples or table.num_samples))
            if reference is None:
                wanted = agent.choose(features, limits)
            else:
                wanted = torch.from_numpy(reference(blocks, limits.numpy()))
            other = torch.from_numpy(decide(blocks, limits.numpy()))
            rows = (wanted != other).nonzero().squeeze(1)
            counts["contexts"] += len(wanted)
            counts["same"] += len(wanted) - len(rows)
            if len(rows):
                some = {name: block[rows] for name, block in features.items()}
                equal = _equally_good(agent, some, limits[rows], wanted[rows], other[rows])
                counts["rounding"] += int(equal.sum())
            tick(number, "budgets")
    different = counts["contexts"] - counts["same"] - counts["rounding"]
    if different and exact:
        raise InputError(
            f"{what}: decides differently from the controller in {different} of {counts['contexts']} "
            f"contexts of profile {table.name!r}; nothing was written"
        )
    return counts


@torch.no_grad()
def _equally_good(agent: Agent, features: Mapping[str, Tensor], limits: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Whether two choices [n] have the same score by the agent, up to rounding."""
    inner: Any = agent
    scale, rounds = torch.ones(len(limits), dtype=torch.float64), torch.ones(len(limits), dtype=torch.bool)
    if isinstance(agent, PricedChooser):
        group = agent.groups(limits)
        rounds = agent.deployed[group]  # a static mix is not subject to rounding
        inner, limits = agent.chooser, (1 / agent.prices[group]).float()
    x = inner.features(features, len(limits))
    if isinstance(inner, Controller):
        sharpness = inner.network.sharpness if isinstance(inner.network, UtilityNetwork) else 1.0
        score = inner(x, limits).double() / sharpness
    elif inner.priced:
        accuracy, cost = inner.predictions(x).costs()
        score = accuracy.double() - cost.double() / limits.double().unsqueeze(1)
    else:
        score = inner.preference(inner.view(x, limits), limits)
        if inner.guard is not None:
            scale = 1 + inner.guard.miss[inner.guard.groups(limits)]
    difference = (score.gather(1, a[:, None]) - score.gather(1, b[:, None])).squeeze(1).abs()
    return rounds & (difference <= TOLERANCE * scale)


def one_by_one(controller: NumpyController) -> Decide:
    """Decisions for one request at a time, which run other code than many together."""

    def decide(blocks: Mapping[str, NDArray[Any]], limits: NDArray[Any]) -> NDArray[np.int64]:
        rows = ({name: block[row] for name, block in blocks.items()} for row in range(len(limits)))
        return np.array([controller.decide_index(*each) for each in zip(rows, limits.tolist(), strict=True)], np.int64)

    return decide
