"""Weights to begin a training with, from any checkpoint of the same kind of agent (`init_from=PATH`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from knobwise.agents.checkpoint import Loaded, load_checkpoint
from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.networks import UtilityNetwork
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.selector.selector import Selector
from knobwise.agents.selector.settings import SelectorConfig
from knobwise.common.errors import InputError
from knobwise.envs.readers.joint import DATASET
from knobwise.envs.tables.profile_table import ProfileTable

NETWORK = ("structure", "members", "hidden", "layers", "budget_encoding", "budget_width")
"""The fields of `PolicyConfig` that make the network; a start may differ in the others."""


def controller_start(
    path: str | Path, table: ProfileTable, policy: PolicyConfig, priced: bool
) -> tuple[Controller, Loaded]:
    """A controller with the weights of a checkpoint, in eval mode, and the checkpoint; of a stack its network.

    The normalisation of features and limits belongs to the weights: it stays as fitted on the checkpoint's profile.

    Raises:
        InputError: the checkpoint holds a selector, or differs in limits, knobs, features or network settings.
    """
    loaded, name = load_checkpoint(path), f"profile {table.name!r}"
    _check(path, not isinstance(loaded.agent, Selector), "holds a selector; a controller starts from a controller")
    network, limits = loaded.network, {True: "mean budgets", False: "deadlines"}
    same = network.priced == priced
    _check(path, same, f"was trained for {limits[network.priced]}, and this run is for {limits[priced]}")
    knobs, others = (", ".join(f"{k.name}={list(k.values)}" for k in each) for each in (network.knobs, table.knobs))
    _check(path, knobs == others, f"its knobs are {knobs}; {name} has {others}")
    _check(
        path,
        torch.equal(network.configurations.cpu(), table.configurations),
        f"was trained for {len(network.configurations)} configurations of its knobs; {name} has "
        f"{table.num_configurations}, or has them in another order",
    )
    known, sizes = network.normaliser.sizes, {key: block.shape[-1] for key, block in table.features.items()}
    _check(path, known == sizes, f"reads the features {known}; {name} has {sizes}")
    names = sorted(set(table.dataset_names))
    known_names = loaded.extra.get("told", names) if DATASET in sizes else names
    _check(path, known_names == names, f"knows the data sets {', '.join(known_names)}; {name} has {', '.join(names)}")
    _same_settings(path, "policy", asdict(network.config), asdict(policy), NETWORK)
    controller = Controller.restored(network.plain() | {"policy": asdict(policy)})
    if isinstance(controller.network, UtilityNetwork):
        controller.network.sharpen(0.0)
    return controller, loaded


def selector_start(path: str | Path, config: SelectorConfig, features: int) -> tuple[Selector, Loaded]:
    """A selector with the weights of a checkpoint, in eval mode, and the checkpoint.

    Raises:
        InputError: the checkpoint holds a controller, or differs in the width of the embeddings or network settings.
    """
    loaded, settings = load_checkpoint(path), asdict(config)
    agent = loaded.agent
    if not isinstance(agent, Selector):
        raise InputError(f"init_from={path}: holds a controller; a selector starts from a selector")
    same = agent.features == features
    _check(path, same, f"reads embeddings {agent.features} wide, and these are {features} wide")
    _same_settings(path, "selector", asdict(agent.config), settings, settings.keys() - {"dropout"})
    return Selector.restored(agent.plain() | {"selector": settings}), loaded


def _check(path: str | Path, fits: bool, message: str) -> None:
    if not fits:
        raise InputError(f"init_from={path}: {message}")


def _same_settings(
    path: str | Path, group: str, saved: dict[str, Any], wanted: dict[str, Any], keys: Iterable[str]
) -> None:
    """Refuse a network of other settings."""
    changed = [f"{group}.{key}={saved[key]}" for key in sorted(keys) if saved[key] != wanted[key]]
    _check(path, not changed, f"was trained with {', '.join(changed)}; train with the same")
