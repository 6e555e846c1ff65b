"""`knobwise.load`, a module of its own since a policy that decides needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from knobwise.experiments.evidence.run_folder import policy_at
from knobwise.serving.knob_policy import KnobPolicy

if TYPE_CHECKING:
    from knobwise.envs.bandit.rules import Rule


def load(path: str | Path = "runs/latest", rule: str | type[Rule] | None = None) -> KnobPolicy:
    """Load a trained policy from a checkpoint, or from the folder of a run.

    Of a run's seeds it takes the one that was best on validation.

    The folder of a run, or of a version of `knobwise update`, holds the controller as it was
    exported too. It decides, in NumPy alone, and reads texts; the checkpoint is read, which takes
    seconds with torch, at the first use of `policy.agent` or `policy.loaded`, or where an
    explanation is asked for. The checkpoint is read at once where no export belongs to it: a
    checkpoint file, a run of a version of knobwise before this or one whose checkpoint was
    replaced; and for a rule of your own.

    Args:
        path: the checkpoint, or the folder.
        rule: that of a run that was trained under a rule of your own, its class or `module:Class`.
            A checkpoint names it, but holds no code.

    Raises:
        InputError: no such run or checkpoint, a run that is not finished, the checkpoint of a
            selector, a rule of your own that is not given, or another one than the run's.
    """
    if rule is not None:
        # rules are written in torch
        from knobwise.envs.bandit.rule_choice import take_rule

        take_rule(rule, "rule")
    return policy_at(path, rule)
