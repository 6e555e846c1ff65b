"""Export: a controller as arrays for NumPy, which decide alone, guard included; and whether a form decides as it does.

`arrays_of` is what the NumPy form (`knobwise.agents.serving.numpy_controller`) reads; the other form is an ONNX graph
(`knobwise.agents.serving.onnx_graph`). `parity` holds either against the policy that was trained.
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

from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.networks import UtilityNetwork
from knobwise.agents.judging.baselines import BudgetAwareStatic
from knobwise.agents.predictors.experts import Expert
from knobwise.agents.serving.numpy_controller import FORMAT, NumpyController
from knobwise.agents.stack.priced_policy import SEED, PricedChooser
from knobwise.agents.stack.stacked_controller import HOPELESS, StackedController
from knobwise.common.errors import InputError
from knobwise.common.files import written_whole
from knobwise.common.progress import progress
from knobwise.envs.configurations.budgets import default_budgets, log_ms
from knobwise.envs.tables.profile_table import ProfileTable

Agent = Controller | StackedController | PricedChooser
Arrays = dict[str, NDArray[Any]]
Decide = Callable[[Mapping[str, Tensor], Tensor], Tensor]
"""Blocks [n, d], budgets [n] in ms → configurations int64 [n]."""
TOLERANCE = 1e-5
"""Two configurations whose scores differ by no more than this are equally good: rounding decides between them."""


def network_of(agent: Agent) -> Controller:
    """The network inside."""
    inner = agent.chooser if isinstance(agent, PricedChooser) else agent
    return inner.network if isinstance(inner, StackedController) else inner


# -- NumPy -------------------------------------------------------------------------------------------------------------


def arrays_of(agent: Agent) -> Arrays:
    """What an exported file holds: every array by name, and `header`, JSON as bytes.

    Raises:
        InputError: a controller for mean budgets whose prices were not calibrated; or one that falls back to a static
            mix but has no features by which the same request would be known again.
    """
    inner = agent.chooser if isinstance(agent, PricedChooser) else agent
    network = network_of(agent)
    stack = inner if isinstance(inner, StackedController) else None
    if network.priced and not isinstance(agent, PricedChooser):
        raise InputError("export: the controller's prices were not calibrated yet; let its training end")
    # in one place with the experts, whose weight decides whether they are read at all
    experts = [one for one in stack.experts if isinstance(one, Expert)] if stack else []
    guarded = stack is not None and stack.guard is not None and stack.static is not None
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
        "priced": network.priced,
        "stacked": stack is not None,
        "weights": weights,
        "experts": [[type(r).__name__ for _, r in expert.named_children()] for expert in experts],
        "guard": guarded,
        "mean_budgets": isinstance(agent, PricedChooser),
    }
    tensors: dict[str, Tensor] = {"configurations": network.configurations}
    tensors |= {f"normaliser.{name}": buffer for name, buffer in network.normaliser.state_dict().items()}
    tensors |= {f"network.{name}": values for name, values in network.network.state_dict().items()}
    for number, expert in enumerate(experts):
        if weights[number + 1] > 0:
            tensors |= {f"experts.{number}.{name}": values for name, values in expert.state_dict().items()}
    arrays = {name: values.detach().cpu().numpy() for name, values in tensors.items()}
    for name in [name for name in arrays if name.endswith(".threshold")]:
        arrays[name] = rounded_down(arrays[name])
    if guarded:
        assert stack is not None
        assert stack.guard is not None
        assert stack.static is not None
        arrays |= {f"guard.{name}": stack.guard.state_dict()[name].numpy() for name in ("budgets_ms", "miss", "deploy")}
        arrays |= {f"static.{name}": values for name, values in arrays_of_static(stack.static).items()}
    if isinstance(agent, PricedChooser):
        arrays |= {f"mean.{name}": values for name, values in _mean_arrays(agent, network).items()}
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    return arrays


def to_numpy(agent: Agent) -> NumpyController:
    """The same decisions by NumPy, in memory."""
    return NumpyController(arrays_of(agent))


def export_numpy(agent: Agent, path: str | Path) -> NumpyController:
    """Write the `.npz` that `NumpyController.load` reads; returns what it holds."""
    arrays = arrays_of(agent)
    with written_whole(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)
    return NumpyController(arrays)


def rounded_down(threshold: NDArray[Any]) -> NDArray[Any]:
    """float64 → the largest float32 that is not above: x ≤ t is the same for every float32 x."""
    nearest = threshold.astype(np.float32)
    above = nearest.astype(np.float64) > threshold
    return np.where(above, np.nextafter(nearest, np.float32(-np.inf)), nearest)


def arrays_of_static(static: BudgetAwareStatic) -> Arrays:
    """Its tables, and as a step function what it chooses where every configuration may be taken."""
    plain = {name.removeprefix("_"): values.numpy() for name, values in static.plain().items()}
    starts, choices = static_steps(plain["latency_ms"], plain["sorted_ms"], plain["running"])
    exact = plain["sorted_ms"].astype(np.float32)
    plain["sorted_ms"] = exact if (exact == plain["sorted_ms"]).all() else plain["sorted_ms"]
    return {**plain, "starts": starts, "choices": choices}


def static_steps(
    latency_ms: NDArray[Any], sorted_ms: NDArray[Any], running: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Budget-aware static as a step function: from `starts[i]` ms on it takes `choices[i]`, [s] each.

    A configuration's mean utility never falls as the budget grows, so the best one is the largest value met so far
    when all cells are gone through in order of latency; among equals the one with the lower mean latency.

    Args:
        latency_ms: float [C], mean latencies.
        sorted_ms: float [C, n], latencies in order, inf where not profiled.
        running: float [C, n + 1], mean utility when the first 0 … n of them meet the budget.
    """
    count, samples = sorted_ms.shape
    order = np.argsort(latency_ms, kind="stable")
    rank = np.argsort(order)
    time = np.concatenate([[-np.inf], sorted_ms.reshape(-1)])
    worth = np.concatenate([[0.0], running[:, 1:].reshape(-1)])
    ranks = np.concatenate([[0], np.repeat(rank, samples)])
    measured = time < np.inf
    time, worth, ranks = time[measured], worth[measured], ranks[measured]
    place = np.unique(worth, return_inverse=True)[1].reshape(-1)
    by_time = np.argsort(time, kind="stable")
    best = np.maximum.accumulate((place * count + (count - 1 - ranks))[by_time])
    time, chosen = time[by_time], order[count - 1 - best % count]
    last = np.append(time[1:] != time[:-1], True)  # of the cells with the same latency all count
    time, chosen = time[last], chosen[last]
    new = np.append(True, chosen[1:] != chosen[:-1])
    return time[new], chosen[new]


def _mean_arrays(agent: PricedChooser, network: Controller) -> Arrays:
    sizes = network.normaliser.sizes
    if agent.mix is not None and not sizes and not bool(agent.deployed.all()):
        raise InputError(
            "export: without features the static mix of a mean budget draws by chance, which a file cannot repeat; "
            "train with features, or with policy.guard=false"
        )
    generator = torch.Generator().manual_seed(SEED)
    keys = torch.randint(-(1 << 63), (1 << 63) - 1, (sum(sizes.values()) + 1,), generator=generator)
    places = dict(zip(sizes, np.split(np.arange(sum(sizes.values())), np.cumsum(list(sizes.values()))), strict=False))
    order = [places[name] for name in sorted(sizes)]
    found = {
        "budgets_ms": agent.budgets_ms.double().numpy(),
        "prices": agent.prices.numpy(),
        "deployed": agent.deployed.numpy(),
        "hash_keys": keys.numpy(),
        "hash_order": np.concatenate(order) if order else np.zeros(0, np.int64),
    }
    if agent.mix is not None:
        plain = agent.mix.plain()
        parts = dict(zip(("mean_accuracy", "mean_cost", "budgets"), plain["_means"], strict=True))
        parts |= {name: plain[name] for name in ("first", "second", "share")}
        found |= {f"mix.{name}": values.numpy() for name, values in parts.items()}
    return found


# -- parity ------------------------------------------------------------------------------------------------------------


def contexts_of(agent: Agent, table: ProfileTable, budgets_ms: Tensor | None = None) -> Tensor:
    """The budgets that decisions are compared at, float32 [B]: those given or the default ones, and the calibrated."""
    if isinstance(agent, PricedChooser):
        return agent.budgets_ms.float()
    judged = default_budgets(table) if budgets_ms is None else budgets_ms
    calibrated = [agent.guard.budgets_ms] if isinstance(agent, StackedController) and agent.guard is not None else []
    return torch.cat([budgets.float() for budgets in (judged, *calibrated)]).unique()


def agreement(
    agent: Agent, decide: Decide, table: ProfileTable, budgets_ms: Tensor, samples: int | None = None
) -> dict[str, Any]:
    """How often another form of a controller decides as it does, over all samples × budgets (float [B], ms), or over
    the first so many samples.

    Returns: `contexts`, `same`, and of the others `rounding`, where the scores of both choices are equal within
    `TOLERANCE`, and `different`.
    """
    counts = {"contexts": 0, "same": 0, "rounding": 0, "different": 0}
    features = {name: block[:samples] for name, block in table.features.items()}
    with progress("comparing decisions", len(budgets_ms), quiet_s=2) as tick:
        for number, budget in enumerate(budgets_ms, 1):
            limits = budget.expand(min(table.num_samples, samples or table.num_samples))
            own, other = agent.choose(features, limits), decide(features, limits)
            rows = (own != other).nonzero().squeeze(1)
            counts["contexts"] += len(own)
            counts["same"] += len(own) - len(rows)
            if len(rows):
                some = {name: block[rows] for name, block in features.items()}
                equal = _equally_good(agent, some, limits[rows], own[rows], other[rows])
                counts["rounding"] += int(equal.sum())
                counts["different"] += int((~equal).sum())
            tick(number, "budgets")
    return {**counts, "share": 1 - counts["different"] / max(counts["contexts"], 1)}


def parity(
    agent: Agent,
    decide: Decide,
    table: ProfileTable,
    budgets_ms: Tensor,
    what: str = "export",
    samples: int | None = None,
) -> Any:
    """`agreement`, which must be complete but for rounding.

    Raises:
        InputError: another decision somewhere.
    """
    found = agreement(agent, decide, table, budgets_ms, samples)
    if found["different"]:
        raise InputError(
            f"{what}: decides otherwise than the controller in {found['different']} of {found['contexts']} contexts of "
            f"profile {table.name!r}; nothing was written"
        )
    return found


@torch.no_grad()
def _equally_good(agent: Agent, features: Mapping[str, Tensor], limits: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Whether two choices [n] have the same score but for rounding, by the agent's own scores."""
    inner: Any = agent
    scale, rounds = torch.ones(len(limits), dtype=torch.float64), torch.ones(len(limits), dtype=torch.bool)
    if isinstance(agent, PricedChooser):
        group = agent.groups(limits)
        rounds = agent.deployed[group]  # a static mix does not round
        inner, limits = agent.chooser, (1 / agent.prices[group]).float()
    x = inner.features(features, len(limits))
    if isinstance(inner, Controller):
        sharpness = inner.network.sharpness if isinstance(inner.network, UtilityNetwork) else 1.0
        score = inner(x, limits).double() / sharpness
    elif inner.priced:
        accuracy, cost = inner.accuracy_and_cost(x)
        score = accuracy.double() - cost.double() / limits.double().unsqueeze(1)
    else:
        view = inner.view(x, limits)
        score, meets = view.score.double(), view.meets.double()
        if inner.guard is not None:
            group = (log_ms(limits).unsqueeze(1) - log_ms(inner.guard.budgets_ms)).abs().argmin(1)
            price = inner.guard.miss[group]
            score, scale = score + price.unsqueeze(1) * meets, 1 + price
            score = torch.where(inner.guard.deploy[group].unsqueeze(1), score, torch.nan)  # nor does static
        hopeless = (meets.amax(1, keepdim=True) < HOPELESS).expand_as(score)
        score = torch.where(hopeless, -view.log_latency.double(), score)
    apart = (score.gather(1, a[:, None]) - score.gather(1, b[:, None])).squeeze(1).abs()
    return rounds & (apart <= TOLERANCE * scale)


def by_numpy(controller: NumpyController) -> Decide:
    """Decisions of the NumPy form, likewise."""

    def decide(features: Mapping[str, Tensor], limits: Tensor) -> Tensor:
        blocks = {name: block.numpy() for name, block in features.items()}
        return torch.from_numpy(controller.choose(blocks, limits.numpy()))

    return decide


def one_by_one(controller: NumpyController) -> Decide:
    """Decisions of the NumPy form for one request at a time, which takes a shorter way than many together."""

    def decide(features: Mapping[str, Tensor], limits: Tensor) -> Tensor:
        blocks = {name: block.numpy() for name, block in features.items()}
        rows = ({name: block[row] for name, block in blocks.items()} for row in range(len(limits)))
        return torch.tensor([controller.decide_index(*each) for each in zip(rows, limits.tolist(), strict=True)])

    return decide
