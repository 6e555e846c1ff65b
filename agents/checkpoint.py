"""Checkpoints: tensors and plain values only, so that loading one never executes code."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

from knobwise.agents.controller.controller import Controller
from knobwise.agents.selector.selector import Selector
from knobwise.agents.stack.priced_policy import PricedChooser
from knobwise.agents.stack.stacked_controller import StackedController
from knobwise.common.errors import InputError
from knobwise.common.files import written_whole
from knobwise.envs.demonstrations.beam_table import BeamTable
from knobwise.envs.tables.profile_table import ProfileTable

FORMAT = "knobwise.Controller/2"
Agent = Controller | StackedController | PricedChooser | Selector
KINDS: dict[str, Any] = {kind.__name__: kind for kind in (Controller, StackedController, PricedChooser, Selector)}


class Loaded(NamedTuple):
    """What a checkpoint holds: the agent, in eval mode, on the CPU; the profile that it was trained on; and what the
    writer added, the trainer's state and the run's settings."""

    agent: Agent
    profile_name: str
    profile_digest: str
    extra: dict[str, Any]

    @property
    def controller(self) -> Controller | StackedController | PricedChooser:
        """The agent; an `InputError` when it is a selector."""
        if isinstance(self.agent, Selector):
            raise InputError(f"the checkpoint holds a selector, trained on {self.profile_name!r}, and no controller")
        return self.agent

    @property
    def network(self) -> Controller:
        """The network of a controller, without experts, guard and prices; an `InputError` when it is a selector."""
        agent = self.controller
        inner = agent.chooser if isinstance(agent, PricedChooser) else agent
        network: Controller = inner.network if isinstance(inner, StackedController) else inner
        return network

    @property
    def selector(self) -> Selector:
        """The agent; an `InputError` when it is a controller."""
        if not isinstance(self.agent, Selector):
            raise InputError(f"the checkpoint holds a controller, trained on {self.profile_name!r}, and no selector")
        return self.agent


def save_checkpoint(path: str | Path, agent: Agent, table: ProfileTable | BeamTable, extra: dict[str, Any]) -> None:
    """Write an agent, everything that is needed to decide with it, and `extra` (tensors and plain values)."""
    content = {
        "format": FORMAT,
        "kind": type(agent).__name__,
        "controller": agent.plain(),
        "profile": {"name": table.name, "digest": table.digest},
        "extra": extra,
    }
    with written_whole(path) as temporary:
        torch.save(content, temporary)


def load_checkpoint(path: str | Path) -> Loaded:
    """Read what `save_checkpoint` wrote, strictly.

    Raises:
        InputError: no such file, or not a checkpoint of knobwise.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise InputError(f"{path}: no such checkpoint") from None
    except Exception as error:
        raise InputError(f"{path}: not a checkpoint that knobwise can read ({type(error).__name__})") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise InputError(f"{path}: not a checkpoint of knobwise (expected format {FORMAT})")
    try:
        agent = KINDS[content["kind"]].restored(content["controller"])
        return Loaded(agent, content["profile"]["name"], content["profile"]["digest"], content["extra"])
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{path}: damaged, or written by another version of knobwise ({error})") from error
