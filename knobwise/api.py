"""Knobs from Python: `knobwise.read` a profile, `knobwise.fit` a policy, `knobwise.load` one, and
`knobwise.wrap` a callable with it.

policy = knobwise.fit("measured.csv", "features.npz")
policy.decide({"image_features": image, "language_features": question}, budget_ms=25.0)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from knobwise.common.errors import InputError
from knobwise.common.progress import say
from knobwise.envs.readers.feature_files import attach_features
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.report.verdict import verdict
from knobwise.experiments.settings.values import training_settings
from knobwise.experiments.train.controller import ControllerExperiment
from knobwise.experiments.train.judging import calibrate_trained, judge_controllers
from knobwise.loading import load
from knobwise.reading import content_of, read
from knobwise.serving.knob_policy import Explanation, KnobPolicy
from knobwise.serving.wrapper import wrap

if TYPE_CHECKING:
    from knobwise.reading import Features

__all__ = ["Explanation", "KnobPolicy", "fit", "load", "read", "wrap"]


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
        policy: auto, a head for each knob, distilled from networks and base learners that predict
            outcomes, then trained by GRPO; utility, like auto but without base learners, which
            trains several times faster; grpo, by GRPO alone, from a cold start; or independent, by
            rewards alone, without a teacher and a guard.
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
        content = content_of(features, sample_id=table.sample_ids, dataset=table.dataset_names)
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
