"""The selector experiment: supervised fine-tuning on beams, RCE, GRPO in several forms, with several seeds; judge them
on queries and candidates never seen beside every simple way; report.

Launch it as `knobwise train experiment=selector key=value …`.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import polars as pl
import torch

from knobwise.agents.checkpoint import load_checkpoint
from knobwise.agents.selector.baselines import SIMPLE
from knobwise.agents.selector.evaluation import (
    Decided,
    choose,
    decide_selectors,
    decide_simple,
    decision_us,
    judged_choices,
)
from knobwise.agents.selector.networks import LONGEST
from knobwise.agents.selector.selector import DECODINGS, Selector, StoredEmbeddings
from knobwise.common.checks import at_least, one_of
from knobwise.common.errors import InputError
from knobwise.envs.demonstrations.beam_table import BeamTable
from knobwise.envs.demonstrations.settings import GroupConfig
from knobwise.envs.demonstrations.torchrl_env import recorded_groups
from knobwise.experiments.results.problem import UPPER
from knobwise.experiments.results.selectors import selector_decisions, selector_results
from knobwise.experiments.settings.beams import SelectorData, check_judged, hide, read_data
from knobwise.experiments.settings.selector_options import SelectorRun
from knobwise.experiments.tracking.tracker import Tracker
from knobwise.experiments.train.run import begin, keep_best, run_experiment
from knobwise.experiments.train.selector_stages import SelectorStages, selector_tracker, train_all

TAKEN = ("sft", "rce", "hidden_sft", "hidden_rce", *SIMPLE, *UPPER)
"""Names that no variant may have."""


def policies(config: SelectorRun) -> dict[str, list[str]]:
    """What is trained, by the name of its folder and row, and which blocks it does not see."""
    blocks: dict[str, list[str]] = {"sft": [], "rce": []}
    for name in config.variants:
        hidden = config.variant(name).hidden
        if hidden:
            blocks |= {"hidden_sft": hidden, "hidden_rce": hidden}
        blocks[name] = hidden
    return blocks


def run(config: SelectorRun, overrides: list[str]) -> Path:
    """From beams to a report; returns the run's folder, see `knobwise.experiments.train.run`.

    Raises:
        InputError: settings or files that cannot be used; nothing has been written then.
    """
    return run_experiment(SelectorExperiment(config), overrides)


class SelectorExperiment:
    """The stages of all seeds, and what they are judged on.

    Raises:
        InputError: settings or files that cannot be used.
    """

    def __init__(self, config: SelectorRun) -> None:
        begin(config)
        self.config, self.data = config, _checked(config)
        self.notes = [
            f"{self.data.table.name}: {note}" for note in dict.fromkeys([*self.data.table.notes, *self.data.test.notes])
        ]

    def train(self, folder: Path) -> None:
        """Train every stage of every seed that is not finished."""
        train_all(self.config, folder)

    def judge(self, folder: Path) -> tuple[dict[str, Any], pl.DataFrame]:
        """Every policy on the same held-out queries; the best on validation becomes the run's."""
        policy, seed = _keep_best(self.config, folder)
        results, decisions = judge_run(self.config, self.data, folder)
        results["variants"], results["best_policy"], results["best_seed"] = list(self.config.variants), policy, seed
        return results, decisions

    def tracker(self, folder: Path, job_type: str, seed: int | None = None, step: int | None = None) -> Tracker:
        """Where numbers go."""
        return selector_tracker(self.config, folder, self.data.table, job_type, seed, step)


def _checked(config: SelectorRun) -> SelectorData:
    """What can be refused is refused before anything is written."""
    one_of("decoding", config.decoding, DECODINGS)
    for key in ("jobs", "shots"):
        at_least(key, getattr(config, key), 1)
    for seed in config.seeds:
        at_least("seeds", seed, 0)
    if config.selector.version == "v0" and max([config.shots, *config.judged_shots]) > LONGEST:
        raise InputError(f"shots, judged_shots: selector.version=v0 has positions for {LONGEST} demonstrations")
    data = read_data(config.beams)
    check_judged(data, config.judged_shots)
    lengths = sorted(set(data.table.lengths[data.table.beam_mask].tolist()))
    if data.scorer is None and config.shots not in lengths:
        raise InputError(f"shots={config.shots}: recorded sequences have {lengths} demonstrations only")
    for name in config.variants:  # what is wrong in itself, before what these beams do not have
        variant = config.variant(name)
        config.stage(variant, name)
        config.reward_and_loss(variant, name)
        if name in TAKEN:
            raise InputError(f"variants.{name}: the name is taken; choose another")
        if data.scorer is None and (variant.live or variant.rounds > 1):
            raise InputError(
                f"variants.{name}: live draws and rounds need a scorer, which recorded beams do not have; leave it out "
                f"by variants.{name}=null, or train with experiment=selector_replay"
            )
    stages = SelectorStages(config, data, config.seeds[0], None)
    stages.check(config.reward)
    if config.init_from is not None:
        stages.init_from(config.init_from)
    recorded_groups(data.table, GroupConfig("beams"))
    for name in config.variants:
        variant = config.variant(name)
        hide(data.table, variant.hidden)
        stages.check(config.reward_and_loss(variant, name)[0])
        if not (variant.live or (variant.own_draws and data.scorer is not None)):
            try:
                recorded_groups(data.table, GroupConfig(variant.groups, rounds=1))
            except InputError as error:
                raise InputError(f"{error}; variants.{name}.groups=all takes every sequence") from error
    if len({tuple(hidden) for hidden in policies(config).values() if hidden}) > 1:
        raise InputError("variants: those with hidden blocks share hidden_sft, so all must hide the same blocks")
    return data


def _keep_best(config: SelectorRun, folder: Path) -> tuple[str, int]:
    """The policy and seed that were best on validation become the run's `best.pt`; controls do not compete."""
    variants = {name: config.variant(name) for name in config.variants}
    competing = [
        name for name, variant in variants.items() if not variant.hidden and config.stage(variant, name).keep == "best"
    ]
    scores = {}
    for name, seed in itertools.product(competing or ["rce"], config.seeds):
        path = folder / "checkpoints" / f"seed{seed}" / name
        scores[path] = float(load_checkpoint(path / "best.pt").extra["validation"])
    best = keep_best(folder, scores)
    return best.name, int(best.parent.name.removeprefix("seed"))


def judge_run(config: SelectorRun, data: SelectorData, folder: Path) -> tuple[dict[str, Any], pl.DataFrame]:
    """Every policy on the same held-out queries, at every number of shots; gives the contents of `results.json` and of
    `decisions.parquet`."""
    decided: dict[str, dict[int, Decided]] = {}
    facts: dict[str, dict[str, list[Any]]] = {"epochs": {}, "validation": {}}
    for shots in config.judged_shots:
        simple = decide_simple(
            data.test, data.test_scorer, shots, seeds=config.seeds, rows=data.test_rows, trusted=data.trusted
        )
        for name, outcome in simple.items():
            decided.setdefault(name, {})[shots] = outcome
    for name, hidden in policies(config).items():
        test = hide(data.test, hidden)
        embeddings = StoredEmbeddings(test.queries, test.candidates)
        loaded = [load_checkpoint(folder / "checkpoints" / f"seed{seed}" / name / "best.pt") for seed in config.seeds]
        facts["epochs"][name] = [checkpoint.extra["epoch"] for checkpoint in loaded]
        facts["validation"][name] = [checkpoint.extra["validation"] for checkpoint in loaded]
        decided[name] = _decided(config, data, test, embeddings, [checkpoint.selector for checkpoint in loaded])
    decisions = selector_decisions(decided, data.test, data.test_rows, config.seeds)
    results = selector_results(
        decisions,
        data.table,
        seeds=config.seeds,
        trained_shots=config.shots,
        test=data.test if data.test is not data.table else None,
        judged_by=data.judged_by,
        hidden=sorted({block for blocks in policies(config).values() for block in blocks}),
    )
    return results | facts, decisions


def _decided(
    config: SelectorRun, data: SelectorData, test: BeamTable, embeddings: StoredEmbeddings, selectors: list[Selector]
) -> dict[int, Decided]:
    """The choices of one policy with every seed, by the number of shots."""
    rows, scorer, decided = data.test_rows, data.test_scorer, {}
    greedy = scorer is not None and config.decoding == "greedy"
    # a greedy choice begins as a shorter one does, a beam need not
    longest = max(config.judged_shots)
    whole = [choose(selector, embeddings, test, rows, longest) for selector in selectors if greedy]
    for shots in config.judged_shots:
        if scorer is not None and greedy:
            outcome = judged_choices(test, scorer, [chosen[:, :shots] for chosen in whole], rows)
        else:
            outcome = decide_selectors(selectors, embeddings, test, scorer, shots, rows, config.decoding)
        if scorer is not None:
            assert outcome.demonstrations is not None
            votes = [scorer.vote(rows, demonstrations) for demonstrations in outcome.demonstrations]
            times = decision_us(selectors[0], embeddings, test, rows, shots)
            outcome = outcome._replace(vote=torch.stack(votes).float().cpu(), decision_us=times)
        decided[shots] = outcome
    return decided
