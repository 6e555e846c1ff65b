"""Checkpoints: tensors and plain values only, so that loading one never executes code."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch
from torch import nn

from knobwise.agents.training.claims import WithinFile, refuse_repeated
from knobwise.agents.training.state import Provenance
from knobwise.common.errors import Damaged, InputError
from knobwise.common.files import is_damaged, written_whole
from knobwise.common.progress import say
from knobwise.envs.bandit.rule_choice import refuse_other_rule
from knobwise.envs.tables.profile_table import Split

if TYPE_CHECKING:
    from knobwise.agents.calibration.deployed_controller import DeployedController
    from knobwise.agents.controller.controller import Controller
    from knobwise.agents.selector.selector import Selector
    from knobwise.envs.bandit.rules import Rule

FORMAT = "knobwise.Controller/3"
KINDS = {
    "Controller": "knobwise.agents.controller.controller",
    "DeployedController": "knobwise.agents.calibration.deployed_controller",
    "Selector": "knobwise.agents.selector.selector",
}
"""The agents that a checkpoint may hold, and the module of each. A file names its kind; what is
imported for it stands here."""
Trained = TypeVar("Trained", bound=nn.Module)


class TrainingData(Protocol):
    """What a checkpoint notes of the profile or the beams that an agent was trained on."""

    @property
    def name(self) -> str: ...
    @property
    def digest(self) -> str: ...


class Loaded(NamedTuple):
    """The content of a checkpoint."""

    agent: Any
    """The agent, of one of `KINDS`, in eval mode, on the CPU."""
    profile_name: str
    """The name of the profile that it was trained on."""
    profile_digest: str
    """The digest of that profile."""
    extra: Provenance
    """How it came about."""

    @property
    def kind(self) -> str:
        """The kind of the agent: one of `KINDS`."""
        return type(self.agent).__name__

    @property
    def controller(self) -> DeployedController:
        """The agent as a `DeployedController`, if it is a controller.

        Raises:
            InputError: it is a selector.
        """
        self._refuse_selector()
        if self.kind == "Controller":
            return class_of("DeployedController")(self.agent).eval()
        return self.agent

    @property
    def network(self) -> Controller:
        """The `Controller` of a controller, without teacher and guard.

        Raises:
            InputError: the agent is a selector.
        """
        self._refuse_selector()
        if self.kind == "Controller":
            return self.agent
        return self.agent.controller

    @property
    def split(self) -> Split | None:
        """The samples that a controller was trained, chosen and judged on, as rows of its profile;
        None where that was not noted."""
        if not {"train_rows", "validation_rows", "test_rows"} <= self.extra.keys():
            return None
        extra = self.extra
        return Split(extra["train_rows"], extra["validation_rows"], extra["test_rows"])

    def _refuse_selector(self) -> None:
        if self.kind == "Selector":
            raise InputError(
                f"it holds a selector trained on {self.profile_name!r}; give that of a controller, "
                "or use knobwise.agents.load_checkpoint(…).selector"
            )

    @property
    def selector(self) -> Selector:
        """The agent, if it is a `Selector`.

        Raises:
            InputError: it is a controller.
        """
        if self.kind != "Selector":
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
            "kind": self.kind,
            "controller": self.agent.plain(),
            "profile": {"name": self.profile_name, "digest": self.profile_digest},
            "extra": self.extra,
        }
        # half a file never takes the place of a whole one
        with written_whole(path, previous) as temporary:
            torch.save(content, temporary)


def class_of(kind: str) -> Any:
    """Return the class of a kind of agent. Raises KeyError: there is no such kind."""
    return getattr(import_module(KINDS[kind]), kind)


def save_checkpoint(
    path: str | Path, agent: nn.Module, table: TrainingData, extra: Provenance
) -> None:
    """Write an agent with everything that is needed to decide with it.

    Args:
        path: the file to write.
        agent: the agent.
        table: the profile or beams that it was trained on.
        extra: how it came about.
    """
    Loaded(agent, table.name, table.digest, extra).save(path)


def load_checkpoint(path: str | Path, rule: str | type[Rule] | None = None) -> Loaded:
    """Read a file that `save_checkpoint` wrote, strictly.

    Args:
        path: of the file.
        rule: that of the user's own which a controller was trained under, taken by `take_rule`;
            None where there is none, or it does not matter.

    Raises:
        Damaged: the file is not whole, or does not agree with its checksums.
        InputError: no such file, not a checkpoint of knobwise, one of another version, one that
            claims to hold more than it does, weights that are not finite, or a model that the agent
            was trained along with is missing; or it was trained under another rule.
    """
    try:
        # a damaged file is told from one of another program
        if is_damaged(path):
            raise Damaged(path)
        if Path(path).suffix == ".npz" and Path(path).is_file():
            raise InputError(
                f"{path}: is an exported controller, no checkpoint; `knobwise decide` and `serve` "
                "take it, and in Python knobwise.agents.NumpyController.load"
            )
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
        size = Path(path).stat().st_size
        refuse_repeated(content, size)
        with WithinFile(size):
            agent = class_of(content["kind"]).restored(content["controller"])
        _refuse_nan(agent)
        if rule is not None and hasattr(agent, "rule"):
            refuse_other_rule(rule, agent.rule)
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


def _refuse_nan(agent: nn.Module) -> None:
    """Raise InputError if some weights are NaN."""
    for name, values in (*agent.named_parameters(), *agent.named_buffers()):
        if values.isnan().any():
            raise InputError(f"{name} holds NaN")


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
    selects = type(fresh).__name__ == "Selector"
    group = "selector" if selects else "policy"
    try:
        start: Any = loaded.selector if selects else loaded.network
    except InputError as error:
        raise InputError(f"init_from={path}: {error}") from error
    # a `last.pt` does not hold the samples of its training
    if not {"seen", "fitted"} & loaded.extra.keys():
        raise InputError(f"init_from={path}: does not say what it was trained on; use a best.pt")
    # everything that the weights depend on must be the same
    made: Any = fresh
    saved = start.requirements()
    wanted = made.requirements()
    for name in wanted | saved:
        if saved.get(name) != wanted.get(name):
            raise InputError(
                f"init_from={path}: the checkpoint has {name}={saved.get(name)}, this run "
                f"{wanted.get(name)}; give the same"
            )
    plain = made.plain()
    # an earlier version has true and false as text
    taken = {name: plain[name] for name in (group, "knobs") if name in plain}
    started: Trained = type(made).restored(start.plain() | taken)
    return started
