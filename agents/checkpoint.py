"""Checkpoints: tensors and plain values only, so that loading one never executes code."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from knobwise.agents.calibration.deployed_controller import DeployedController
from knobwise.agents.controller.controller import Controller
from knobwise.agents.selector.selector import Selector
from knobwise.common.errors import Damaged, InputError
from knobwise.common.files import is_damaged, written_whole
from knobwise.common.progress import say
from knobwise.envs.demonstrations.beam_table import BeamTable
from knobwise.envs.tables.profile_table import ProfileTable

FORMAT = "knobwise.Controller/3"
Agent = DeployedController | Selector
Trained = TypeVar("Trained", Controller, Selector)
KINDS: dict[str, Any] = {kind.__name__: kind for kind in (DeployedController, Selector)}

OUTSIDE_THE_NETWORK = (
    "augment",
    "dropout",
    "guard",
    "level",
    "sharpness",
    "teacher",
    "experts",
    "teacher_hidden",
    "teacher_dropout",
)
"""Settings that the network's weights do not depend on. A training may change them and still start
from a checkpoint."""


class Loaded(NamedTuple):
    """The content of a checkpoint."""

    agent: Agent
    """The agent, in eval mode, on the CPU."""
    profile_name: str
    """The name of the profile that it was trained on."""
    profile_digest: str
    """The digest of that profile."""
    extra: dict[str, Any]
    """What the writer added, such as the trainer's state and the run's settings."""

    @property
    def controller(self) -> DeployedController:
        """The agent, if it is a controller.

        Raises:
            InputError: it is a selector.
        """
        if isinstance(self.agent, Selector):
            raise InputError(
                f"it holds a selector trained on {self.profile_name!r}; give that of a controller, "
                "or use knobwise.agents.load_checkpoint(…).selector"
            )
        return self.agent

    @property
    def network(self) -> Controller:
        """The network of a controller, without teacher and guard.

        Raises:
            InputError: the agent is a selector.
        """
        return self.controller.controller

    @property
    def selector(self) -> Selector:
        """The agent, if it is a selector.

        Raises:
            InputError: it is a controller.
        """
        if not isinstance(self.agent, Selector):
            raise InputError(
                f"it holds a controller trained on {self.profile_name!r}; give that of a selector"
            )
        return self.agent

    def save(self, path: str | Path, previous: Path | None = None) -> None:
        """Write the checkpoint, which `load_checkpoint` reads.

        Args:
            path: the file to write.
            previous: where a file at `path` is moved first; None to overwrite it.

        Raises:
            InputError: it cannot be written.
        """
        content = {
            "format": FORMAT,
            "kind": type(self.agent).__name__,
            "controller": self.agent.plain(),
            "profile": {"name": self.profile_name, "digest": self.profile_digest},
            "extra": self.extra,
        }
        # half a file never takes the place of a whole one
        with written_whole(path, previous) as temporary:
            torch.save(content, temporary)


def save_checkpoint(
    path: str | Path, agent: Agent, table: ProfileTable | BeamTable, extra: dict[str, Any]
) -> None:
    """Write an agent with everything that is needed to decide with it.

    Args:
        path: the file to write.
        agent: the agent.
        table: the profile or beams that it was trained on.
        extra: tensors and plain values to add.
    """
    Loaded(agent, table.name, table.digest, extra).save(path)


def load_checkpoint(path: str | Path) -> Loaded:
    """Read a file that `save_checkpoint` wrote, strictly.

    Raises:
        Damaged: the file is not whole, or does not agree with its checksums.
        InputError: no such file, not a checkpoint of knobwise, one of an earlier version, weights
            that are not finite, or a model that the agent was trained along with is missing.
    """
    try:
        # a damaged file is told from one of another program
        if is_damaged(path):
            raise Damaged(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise InputError(f"{path}: no such checkpoint") from None
    except InputError:
        raise
    except Exception as error:
        kind = type(error).__name__
        raise InputError(f"{path}: not a checkpoint that knobwise can read ({kind})") from error
    # what is whole may still be of another version
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise InputError(f"{path}: not a checkpoint of knobwise (expected format {FORMAT})")
    try:
        agent = KINDS[content["kind"]].restored(content["controller"])
        _check_decides(agent)
        profile = content["profile"]
        return Loaded(agent, profile["name"], profile["digest"], content["extra"])
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except Exception as error:
        problem = f"damaged, or written by another version of knobwise ({error})"
        raise InputError(f"{path}: {problem}") from error


def load_if_whole(path: Path) -> Loaded | None:
    """Read a checkpoint; return None if there is none, or if it is damaged.

    A damaged checkpoint is reported and removed.
    """
    if not path.exists():
        return None
    try:
        return load_checkpoint(path)
    except Damaged:
        say(f"{path}: is damaged; continuing from the checkpoint before it")
        path.unlink()
        return None


def _check_decides(agent: Any) -> None:
    """Check that an agent can decide.

    Raises:
        InputError: some weights are NaN, or a controller lacks something to decide with.
    """
    for name, values in (*agent.named_parameters(), *agent.named_buffers()):
        if values.isnan().any():
            raise InputError(f"{name} holds NaN")
    if isinstance(agent, DeployedController):
        _ = agent.decider  # building it checks the controller


# -- to start a training from (`init_from=PATH`) ---------------------------------------------------


def started_from(path: str | Path, loaded: Loaded, fresh: Trained) -> Trained:
    """Return an agent with the weights of a checkpoint and the settings of a fresh agent.

    The statistics that standardise features, embeddings and limits come from the checkpoint too:
    with other statistics the weights would decide differently. The teacher and the guard of a
    controller are not taken over.

    Args:
        path: the checkpoint's path, for messages.
        loaded: the checkpoint.
        fresh: a fresh agent with the settings of the training.

    Returns:
        The agent, in eval mode.

    Raises:
        InputError: one agent is a controller and the other a selector; knobs, configurations,
            features, limits or settings of the network differ; or the checkpoint does not say what
            it was trained on.
    """
    selects = isinstance(fresh, Selector)
    group = "selector" if selects else "policy"
    try:
        start: Any = loaded.selector if selects else loaded.network
    except InputError as error:
        raise InputError(f"init_from={path}: {error}") from error
    # a `last.pt` does not hold the samples of its training
    if not {"seen", "fitted"} & loaded.extra.keys():
        raise InputError(f"init_from={path}: does not say what it was trained on; use a best.pt")
    # everything that the weights depend on must be the same
    saved = _described(start, group)
    wanted = _described(fresh, group)
    for name in wanted | saved:
        if saved.get(name) != wanted.get(name):
            values = f"{saved.get(name)} in the checkpoint and {wanted.get(name)} in this training"
            raise InputError(f"init_from={path}: {name} is {values}")
    return type(fresh).restored(start.plain() | {group: fresh.plain()[group]})


def _described(agent: Controller | Selector, group: str) -> dict[str, Any]:
    """Return what must be the same for weights to be taken over: name in a message → value."""
    plain = agent.plain()
    parts: dict[str, Any] = {}
    for key, value in plain[group].items():
        if key not in OUTSIDE_THE_NETWORK:
            parts[f"{group}.{key}"] = value
    if isinstance(agent, Selector):
        return parts | {"the width of the embeddings": agent.features}
    configurations = agent.configurations
    # the order of the configurations matters too
    checksum = zlib.crc32(configurations.numpy().tobytes())
    return parts | {
        "knobs": plain["knobs"],
        "features": plain["features"],
        "columns": {column.name: column.labels for column in agent.normaliser.columns},
        "the limit of a request": (agent.limit_key, agent.unit),
        "the number of configurations and their checksum": (len(configurations), checksum),
    }
