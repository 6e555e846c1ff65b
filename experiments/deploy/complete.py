"""`knobwise profile complete=RUN`: measure what a trained controller and static choose for samples
that it was not fitted on, and let these measurements decide between the two.

In a profile of part of the cells most of what a controller would choose was never measured. Its
guard then goes by estimates that are too uncertain to decide. At most two cells a budget settle it
for a sample.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from torch import Tensor

from knobwise.agents.calibration.calibrate import calibrated_again, cells_to_judge
from knobwise.agents.evaluation.limits import budget_with
from knobwise.agents.evaluation.problems import problem_of
from knobwise.agents.training.checkpoint import Loaded, load_checkpoint
from knobwise.common.errors import InputError, naming
from knobwise.common.json_text import decode_json
from knobwise.envs.tables.profile_table import ProfileTable, Split
from knobwise.experiments.evidence.exports import CONTROLLER, export_beside
from knobwise.experiments.evidence.run_folder import checkpoint_at
from knobwise.experiments.settings.measuring_options import ProfileRun
from knobwise.experiments.settings.profiles import (
    PROFILES,
    TableProfile,
    read_profile,
)
from knobwise.experiments.settings.settings_of_run import group_of_run
from knobwise.experiments.settings.words import shell_word
from knobwise.profiling.measuring.settings import VLMProfileConfig


def complete(
    config: ProfileRun,
    measure: Callable[[ProfileRun, Callable[[], tuple[ProfileTable, Tensor]]], Path],
) -> None:
    """Measure, calibrate the guard again, and write the checkpoint and `controller.npz` of the run.

    Args:
        measure: measures a model with further cells, and returns the folder.

    Raises:
        InputError: no such run or profile, a controller that needs no further cells or was trained
            on other samples; see also `profile_vlm`.
    """
    run = str(config.complete)
    path = checkpoint_at(run)
    loaded = load_checkpoint(path, config.rule)
    agent = loaded.controller
    if not agent.calibration.judged or loaded.split is None:
        raise InputError(
            f"complete={run}: nothing to measure; only a controller for deadlines with a guard, "
            "trained on a profile of part of the cells, has choices that were not measured"
        )

    split = loaded.split

    def needed() -> tuple[ProfileTable, Tensor]:
        table = _profile(Path(config.out), run, loaded)
        _check_samples(run, loaded, split, table)
        return table, cells_to_judge(agent, table, split.test)

    # as the profile was measured
    folder = measure(replace(config, knobs=_settings_of(Path(config.out))), needed)
    table = _profile(folder, run, loaded)
    budget = budget_with(agent.rule, agent.calibration.limits)
    again = calibrated_again(agent, problem_of(table, split, budget))
    Loaded(again, loaded.profile_name, table.digest, loaded.extra).save(path)
    folder = path.parent.parent
    if (folder / CONTROLLER).exists():
        export_beside(path, again, folder)
    for row in again.calibration.guard:
        print(f"{row['budget_ms']:.4g} ms: {row['reason']}")
    print(f"next:    knobwise evaluate {shell_word('checkpoint', run)}")


def _check_samples(run: str, loaded: Loaded, split: Split, table: ProfileTable) -> None:
    """Refuse a profile of other samples or configurations than those that the run was trained on.

    Rows of the two then mean different samples.
    """
    count = len(split.fitted) + len(split.test)
    knobs = [[knob.spelled for knob in each.knobs] for each in (loaded.controller, table)]
    same = count == table.num_samples and knobs[0] == knobs[1]
    if not same or not {*table.fingerprints(split.fitted)} <= {*loaded.extra["seen"]}:
        raise InputError(
            f"complete={run}: was trained on other samples or configurations than profile "
            f"{table.name!r}; give the out folder of its profile"
        )


def _settings_of(out: Path) -> VLMProfileConfig:
    """Return the settings that the profile in a folder was measured with.

    Raises:
        InputError: there is no profile, or it cannot be read.
    """
    path = out / "profile.json"
    with naming(path):
        if not path.exists():
            raise InputError("there is no profile to complete; measure one first")
        try:
            noted = decode_json(path.read_bytes())["config"]
            known = {field.name for field in fields(VLMProfileConfig)}
            return VLMProfileConfig(**{k: x for k, x in noted.items() if k in known})
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"is damaged ({error}); measure the profile again") from error


def _profile(folder: Path, run: str, loaded: Loaded) -> ProfileTable:
    """Read the profile in a folder as the run read it: with its features, texts and costs."""
    path = str(folder / "table.parquet")
    trained_on = group_of_run(run, "profile", PROFILES)
    settings: Any = TableProfile(path=path, features=str(folder / "features.safetensors"))
    # a run may have read exp5/exp6 files of the folder, and a checkpoint alone has no settings
    if trained_on is not None and trained_on.format == "table":
        if isinstance(trained_on.features_from, str):
            raise InputError(
                f"{run}: its features are made by code, profile.features_from="
                f"{trained_on.features_from}, which complete= does not run; train with texts or "
                "with stored features"
            )
        settings = OmegaConf.to_object(trained_on)
    return read_profile(replace(settings, path=path, name=folder.name), loaded)
