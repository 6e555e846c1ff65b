"""Knobs from Python: `knobwise.read` a profile, `knobwise.fit` a policy, `knobwise.load` one, and
`knobwise.wrap` a callable with it.

policy = knobwise.fit("measured.csv", "features.npz")
policy.decide({"image_features": image, "language_features": question}, budget_ms=25.0)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl
import torch

from knobwise.agents.training.checkpoint import load_checkpoint
from knobwise.common.errors import InputError, naming
from knobwise.common.progress import say
from knobwise.envs.bandit.rule_choice import take_rule
from knobwise.envs.bandit.rules import Rule
from knobwise.envs.readers.embeddings import embed_texts
from knobwise.envs.readers.feature_files import attach_features, features_from
from knobwise.envs.readers.folders import refuse_folder
from knobwise.envs.readers.long_table import table_from_frame
from knobwise.envs.readers.tool_files import of_frame, tool_of
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.evidence.run_folder import checkpoint_at
from knobwise.experiments.report.verdict import verdict
from knobwise.experiments.settings.profiles import TableProfile, read_profile
from knobwise.experiments.settings.values import training_settings
from knobwise.experiments.train.controller import ControllerExperiment
from knobwise.experiments.train.judging import calibrate_trained, judge_controllers
from knobwise.serving.knob_policy import Blocks, Explanation, KnobPolicy
from knobwise.serving.wrapper import wrap

__all__ = ["Explanation", "KnobPolicy", "fit", "load", "read", "wrap"]
Features = str | Path | Blocks | list[str]


def read(data: Any, features: Features = None, **options: Any) -> ProfileTable:
    """Read a profile: a row for each sample and configuration.

    Args:
        data: the path of a table, such as CSV or Parquet, of a `.safetensors` that
            `ProfileTable.save` wrote, of a folder that `knobwise profile` wrote, features
            included, or of the results of a tool (see docs/profiles.md); a list of paths, of one
            tool or of scores and times; or a data frame of polars or pandas.
        features: a feature file, or a mapping of `sample_id` [N] and blocks [N, d] by name; or the
            names of columns of `data`, "auto" for all that are constant inside each sample; None
            for a policy that sees the budget only. Columns may be free text, such as prompts.
        options: the other options of `profile=table`: id, repeat, knobs, accuracy, right, latency,
            unit, costs, wide, wide_latency, name, group, time, features_from.

    Raises:
        InputError: no such file, or wrong content, see `table_from_frame` and `read_features`.

    >>> cells = {"crops": [1, 4], "accuracy": [0, 1], "latency_ms": [2, 9]}
    >>> frame = polars.DataFrame({"sample_id": 2 * ["q"], **cells})
    >>> table = knobwise.read(frame, {"sample_id": ["q"], "image": [[0.1, 0.2]]})
    >>> table.num_samples, table.num_configurations, list(table.features)
    (1, 2, ['image'])
    """
    if isinstance(features, Mapping) and options.get("id") in features:
        features = {**features, "sample_id": features[options["id"]]}
        del features[options["id"]]
    content = _content(features)
    if isinstance(data, (list, tuple)):
        return read_profile(TableProfile(path=[*map(str, data)], features=content, **options))
    if not isinstance(data, (str, Path)):
        frame = data
        if not isinstance(data, pl.DataFrame):  # of pandas
            frame = pl.DataFrame(_columns(data)).fill_nan(None)
        features_from = options.pop("features_from", None)
        notes = list[str]()
        given = {"name": "frame", "features": content, **options}
        with naming(given["name"]):
            frame, given = of_frame(frame, given, notes)
        table = table_from_frame(frame, notes=notes, **given)
        return table if features_from is None else embed_texts(table, features_from)
    path = Path(data)
    if path.is_dir() and tool_of(path) is None:
        content = content or next(path.glob("features.*"), None)
        options = {"name": path.name, **options}
        if not (path / "table.parquet").is_file():
            refuse_folder(path)
        path /= "table.parquet"
    return read_profile(TableProfile(path=str(path), features=content, **options))


def load(path: str | Path = "runs/latest", rule: str | type[Rule] | None = None) -> KnobPolicy:
    """Load a trained policy from a checkpoint, or from the folder of a run.

    Of a run's seeds it takes the one that was best on validation.

    Args:
        path: the checkpoint, or the folder.
        rule: that of a run that was trained under a rule of your own, its class or `module:Class`.
            A checkpoint names it, but holds no code.

    Raises:
        InputError: no such run or checkpoint, a run that is not finished, the checkpoint of a
            selector, a rule of your own that is not given, or another one than the run's.
    """
    if rule is not None:
        take_rule(rule, "rule")
    return KnobPolicy(load_checkpoint(checkpoint_at(path), rule))


def fit(
    data: Any, features: Features = None, *, policy: str = "auto", seed: int = 0, **options: Any
) -> KnobPolicy:
    """Train a policy as `knobwise train` does with one seed, and return it.

    It says how the policy did on test samples beside budget-aware static, and how much GRPO added.
    It writes no files.

    Args:
        data: a profile, or what `read` takes.
        features: as in `read`; of a profile also blocks [N, d] in the order of its samples, without
            ids.
        policy: auto, a head for each knob, distilled from a network and experts that predict
            outcomes, then trained by GRPO; utility, like auto but without experts, which trains
            several times faster; or independent, by rewards alone, without a teacher and a guard.
        options: any other option of `knobwise train`, such as reward="shaped", budget="mean",
            budgets_ms=[20, 40] or optimiser={"iterations": 100}.

    Raises:
        InputError: data or options that cannot be used.

    >>> table = builtin_profile()
    >>> quick = {"teacher_iterations": 20, "pretrain_iterations": 20, "iterations": 0}
    >>> policy = knobwise.fit(table, policy="utility", optimiser=quick)
    >>> features = {name: block[0] for name, block in table.features.items()}
    >>> policy.decide(features, budget_ms=3.0).keys()
    dict_keys(['max_crops', 'top_k', 'num_active_blocks'])
    """
    table = data
    if not isinstance(data, ProfileTable):
        table = read(data, features)
    elif features is not None:
        content = _content(features, sample_id=table.sample_ids, dataset=table.dataset_names)
        table = attach_features(table, content)
    options = {
        "tracking": "disabled",
        "baselines": False,
        "policy": policy,
        **options,
        "seeds": [seed],
    }
    threads = torch.get_num_threads()
    try:
        experiment = ControllerExperiment(training_settings(options), table)
        if max(experiment.config.split.repeats, experiment.config.split.folds) > 1:
            keys = "split.repeats and split.folds"
            raise InputError(f"{keys}: fit trains on one split; use knobwise train")
        experiment.prepare()
        for note in experiment.notes:
            say(note)
        (training,) = experiment.splits
        (trainer,) = training.trainers
        trainer.run()
        deployed = calibrate_trained(training, trainer)
        results, _ = judge_controllers(training, [deployed])
        deployed.extra["judged"] = results
    finally:
        torch.set_num_threads(threads)
    say(" ".join(verdict(results)))
    return KnobPolicy(deployed)


def _columns(data: Any) -> dict[str, Any]:
    """Return the columns of a pandas data frame, and those of its index that have a name."""
    index = getattr(data, "index", None)
    if any(name is not None for name in getattr(index, "names", ())):
        data = data.reset_index()
    return data.to_dict("list")


def _content(features: Any, **ids: Any) -> Any:
    """Return features in memory with their ids, `ids` if they have none; a path, and names of
    columns, as they are."""
    if features is None or isinstance(features, (str, Path)):
        return features
    if isinstance(features, (list, tuple)) and all(isinstance(name, str) for name in features):
        return list(features)
    blocks = features
    if not isinstance(features, Mapping):
        blocks = {"features": features}
    if "sample_id" not in blocks:
        blocks = ids | {**blocks}
    return features_from(blocks)
