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
    loaded = load_checkpoint(path)
    if isinstance(loaded.agent, Selector):
        raise InputError(f"init_from={path}: holds a selector; a controller starts from a controller")
    network = loaded.network
    if network.priced != priced:
        before, now = ("mean budgets", "deadlines") if network.priced else ("deadlines", "mean budgets")
        raise InputError(f"init_from={path}: was trained for {before}, and this run is for {now}")
    knobs, others = (", ".join(f"{k.name}={list(k.values)}" for k in each) for each in (network.knobs, table.knobs))
    if knobs != others:
        raise InputError(f"init_from={path}: its knobs are {knobs}; profile {table.name!r} has {others}")
    if not torch.equal(network.configurations.cpu(), table.configurations):
        raise InputError(
            f"init_from={path}: was trained for {len(network.configurations)} configurations of its knobs; profile "
            f"{table.name!r} has {table.num_configurations}, or has them in another order"
        )
    sizes = {name: block.shape[-1] for name, block in table.features.items()}
    if network.normaliser.sizes != sizes:
        raise InputError(
            f"init_from={path}: reads the features {network.normaliser.sizes}; profile {table.name!r} has {sizes}"
        )
    names = sorted(set(table.dataset_names))
    if DATASET in sizes and loaded.extra.get("told", names) != names:
        raise InputError(
            f"init_from={path}: knows the data sets {', '.join(loaded.extra['told'])}; profile {table.name!r} has "
            f"{', '.join(names)}"
        )
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
    loaded = load_checkpoint(path)
    if not isinstance(loaded.agent, Selector):
        raise InputError(f"init_from={path}: holds a controller; a selector starts from a selector")
    if loaded.agent.features != features:
        raise InputError(
            f"init_from={path}: reads embeddings {loaded.agent.features} wide, and these are {features} wide"
        )
    settings = asdict(config)
    _same_settings(
        path, "selector", asdict(loaded.agent.config), settings, [key for key in settings if key != "dropout"]
    )
    return Selector.restored(loaded.agent.plain() | {"selector": settings}), loaded


def _same_settings(
    path: str | Path, group: str, saved: dict[str, Any], wanted: dict[str, Any], keys: Iterable[str]
) -> None:
    """Refuse a network of other settings."""
    changed = [f"{group}.{key}={saved[key]}" for key in sorted(keys) if saved[key] != wanted[key]]
    if changed:
        raise InputError(f"init_from={path}: was trained with {', '.join(changed)}; train with the same")
