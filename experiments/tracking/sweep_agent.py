"""A job that an agent of a W&B sweep started: which of its W&B runs the sweep sees.

The agent knows one W&B run for each job, and names it in the environment; a job of ours is several: one for each seed,
one for the results. The sweep gets the results, which hold the validation score as a mean over the seeds. The seeds are
runs of their own: `wandb.init` would otherwise give them all the agent's id, and each would write over the one before.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ID, SWEEP_ID, PARAMETERS = "WANDB_RUN_ID", "WANDB_SWEEP_ID", "WANDB_SWEEP_PARAM_PATH"
VARIABLES = (ID, SWEEP_ID, PARAMETERS)
"""What an agent tells its job."""


@dataclass(frozen=True)
class SweepJob:
    """What the agent asked for."""

    run_id: str
    """Under which the sweep waits for the results."""
    sweep_id: str
    """Of the sweep."""
    parameters: dict[str, Any] = field(default_factory=dict)
    """What was swept, `optimiser.lr` and the like: the sweep looks for them in the run's config under these names."""

    def config(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The config of the run: all settings, and what was swept under the names that the sweep knows.

        Where what was swept is an option of a group (`policy: joint`), the word stands in the place of the group, whose
        settings go on under their whole names (`policy.hidden`).
        """
        found: dict[str, Any] = {}
        for name, value in settings.items():
            if name in self.parameters and isinstance(value, Mapping):
                found |= {f"{name}.{key}": one for key, one in value.items()}
            else:
                found[name] = value
        return found | self.parameters


def sweep_job() -> SweepJob | None:
    """The job that an agent started, None when none did."""
    run_id, sweep_id = os.environ.get(ID), os.environ.get(SWEEP_ID)
    if not run_id or not sweep_id:
        return None
    said: dict[str, Any] = {}
    path = os.environ.get(PARAMETERS)
    if path and Path(path).is_file():
        from omegaconf import OmegaConf

        words = OmegaConf.to_container(OmegaConf.load(path))
        said = {str(key): one["value"] for key, one in dict(words).items() if isinstance(one, dict)}  # type: ignore[arg-type]
    return SweepJob(run_id, sweep_id, said)
