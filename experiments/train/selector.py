"""The selector experiment: supervised fine-tuning on beams, RCE, and GRPO in several forms, with
several seeds. All are judged on unseen queries and candidates, beside every simple policy."""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import torch
from joblib import Parallel, delayed

from knobwise.agents.selector import evaluation
from knobwise.agents.selector.actor import SelectorActor
from knobwise.agents.selector.baselines import SIMPLE
from knobwise.agents.selector.clip_encoder import ClipEncoder, as_read
from knobwise.agents.selector.reward_model import RewardModel, recorded_answers
from knobwise.agents.selector.selector import Selector
from knobwise.agents.selector.settings import RewardModelConfig
from knobwise.agents.selector.training import selector_trainer
from knobwise.agents.training.checkpoint import Loaded, load_checkpoint, started_from
from knobwise.agents.training.seeding import seeded
from knobwise.agents.training.trainer import Trainer
from knobwise.common.checks import at_least
from knobwise.common.errors import InputError
from knobwise.common.interruption import end_with, stopped_by_signals
from knobwise.common.progress import progress
from knobwise.envs.demonstrations.beam_table import POLICY, BeamTable
from knobwise.envs.demonstrations.settings import GroupConfig
from knobwise.envs.demonstrations.torchrl_env import recorded_groups
from knobwise.experiments.evidence.run_folder import checkpoint_at
from knobwise.experiments.evidence.schema import RunResults
from knobwise.experiments.evidence.selectors import evaluate_selectors
from knobwise.experiments.evidence.task import UPPER
from knobwise.experiments.settings.beams import (
    SelectorData,
    check_judged,
    hide,
    read_data,
    table_for,
    trained_on,
)
from knobwise.experiments.settings.selector_options import (
    Plan,
    SelectorRun,
    resolve_selector,
)
from knobwise.experiments.train.reward_models import learned_rewards
from knobwise.experiments.train.run import (
    Experiment,
    keep_best,
    run_logged,
    seed_folder,
    set_up_torch,
)
from knobwise.profiling.demonstrations.beam_search import score
from knobwise.profiling.demonstrations.scorers import CachedScorer

TAKEN = ("sft", "rce", "hidden_sft", "hidden_rce", *SIMPLE, *UPPER)
"""Names that no variant may have."""


def policies(config: SelectorRun) -> dict[str, list[str]]:
    """Return every policy that is trained, by the name of its folder and row, with the blocks that
    are hidden from it."""
    blocks: dict[str, list[str]] = {"sft": [], "rce": []}
    for name, plan in config.plans.items():
        blocks[name] = plan.variant.hidden
        if blocks[name]:
            blocks |= dict.fromkeys(("hidden_sft", "hidden_rce"), blocks[name])
    return blocks


class SelectorExperiment(Experiment):
    """The stages of all seeds, and the data that they are judged on."""

    config: SelectorRun
    table: BeamTable

    def __init__(self, config: SelectorRun) -> None:
        at_least("jobs", config.jobs, 1)
        at_least("shots", config.shots, 0)
        super().__init__(config)

    def prepare(self) -> None:
        """See `Experiment`: read the beams, and check the settings against them."""
        self.data = read_data(self.config.beams, self.config.encoder)
        self.table = self.data.table
        self.config = resolve_selector(self.config, self.table)
        check(self.config, self.data)
        notes = dict.fromkeys([*self.table.notes, *self.data.test.notes])
        self.notes = [f"{self.table.name}: {note}" for note in notes]

    def train(self, folder: Path) -> None:
        """Train every stage of every seed that is not finished, several seeds at the same time."""
        seeds = self.config.seeds
        jobs = min(self.config.jobs, len(seeds))
        # with one job joblib calls the function in this process
        parallel = Parallel(
            jobs,
            backend="loky",
            return_as="generator_unordered",
            initializer=end_with,
            initargs=(os.getpid(),),
        )
        trained = parallel(delayed(train_seed)(self.config, seed, folder) for seed in seeds)
        with progress("seeds", len(seeds)) as tick:
            for done, _ in enumerate(trained, 1):
                tick(done, "")

    def evaluate(self, folder: Path) -> tuple[RunResults, pl.DataFrame]:
        """Judge every policy on the same held-out queries, and keep the best on validation.
        Controls do not compete."""
        config = self.config
        results, decisions = judge_selectors(config, self.data, folder)
        plans = config.plans.items()
        controls = {name for name, plan in plans if plan.variant.hidden or plan.reward.shuffled}
        # the validation score of every seed of every policy that competes
        scores: dict[Path, float] = {}
        for name in [name for name in config.variants if name not in controls] or ["rce"]:
            folders = [seed_folder(folder, seed) / name for seed in config.seeds]
            scores |= zip(folders, results["validation"][name], strict=True)
        best = keep_best(folder, scores)
        facts: RunResults = {
            "reward_mode": config.reward.mode,
            "variants": list(config.variants),
            "best_policy": best.name,
            "best_seed": int(best.parent.name.removeprefix("seed")),
        }
        return results | facts, decisions


def check(config: SelectorRun, data: SelectorData) -> None:
    """Refuse settings that cannot work with these beams, before anything is written.

    Mistakes in the variants come first, then what the beams lack.
    """
    check_judged(data, config.judged_shots)
    lengths = data.table.recorded_lengths
    if data.scorer is None and config.shots not in lengths:
        raise InputError(
            f"shots={config.shots}: recorded sequences have {lengths} demonstrations only"
        )
    plans = config.plans
    for name, plan in plans.items():
        if name in TAKEN:
            raise InputError(f"variants.{name}: the name is taken; choose another")
        if data.scorer is None and (plan.variant.live or plan.variant.rounds > 1):
            raise InputError(
                f"variants.{name}: live draws and rounds need the model that was recorded; give "
                f"beams.model, leave the variant out by variants.{name}=null, or train with "
                "experiment=selector_replay"
            )
    # the trainers themselves refuse what they cannot learn from
    run = SeedRun(config, data, config.seeds[0], Path(config.runs))
    table = run.data.table
    start = run.first
    run.trainer("rce", table, start)
    recorded_groups(data.table, GroupConfig(config.imitated))
    run.trainer("sft", table, start, groups=GroupConfig(config.imitated))
    for name, plan in plans.items():
        variant = plan.variant
        if data.items is not None and (variant.hidden or plan.reward_model is not None):
            raise InputError(
                f"variants.{name}: hidden and reward_model are for stored embeddings; "
                f"leave it out with encoder=clip, by variants.{name}=null"
            )
        hide(data.table, variant.hidden)
        run.trainer("rce", table, start, reward=plan.reward)
        if plan.reward_model is not None:
            recorded_answers(table, data.split.train)
            learned = RewardModel(plan.reward_model, start.mean, start.scale)
            run.trainer("grpo", table, start, reward_model=learned)
        elif not (variant.live or (variant.own_draws and data.scorer is not None)):
            groups = GroupConfig(variant.groups)
            recorded_groups(data.table, groups)
            run.trainer("grpo", table, start, reward=plan.reward, loss=plan.loss, groups=groups)
    if len({tuple(hidden) for hidden in policies(config).values() if hidden}) > 1:
        raise InputError(
            "variants: those with hidden blocks share hidden_sft, so all must hide the same blocks"
        )


# -- training --------------------------------------------------------------------------------------


def train_seed(config: SelectorRun, seed: int, folder: Path) -> None:
    """Train all unfinished stages of one seed."""
    set_up_torch()
    with stopped_by_signals():
        train_graph(SeedRun(config, read_data(config.beams, config.encoder), seed, folder))


def train_graph(run: SeedRun) -> None:
    """Train every policy of one seed. Each `run.train` is a training of one stage, which starts
    from what an earlier one returned:

        fresh → SFT → RCE → GRPO of each variant, in rounds that add draws to the records

    and the same without the blocks that are hidden from some variants.
    """
    config = run.config
    whole = run.data.table

    def warmed_up(prefix: str, table: BeamTable, start: Selector) -> tuple[Selector, Selector]:
        imitated = GroupConfig(config.imitated)
        sft = run.train(f"{prefix}sft", "sft", table, start, groups=imitated)
        return sft, run.train(f"{prefix}rce", "rce", table, sft)

    sft, rce = warmed_up("", whole, run.first)
    blind = None
    for name, plan in config.plans.items():
        if not plan.variant.hidden:
            train_variant(run, name, plan, whole, sft, rce)
            continue
        table = hide(whole, plan.variant.hidden)
        # all hide the same blocks
        if blind is None:
            blind = warmed_up("hidden_", table, run.fresh(table))
        hidden_sft, hidden_rce = blind
        train_variant(run, name, plan, table, hidden_sft, hidden_rce)


def train_variant(
    run: SeedRun, name: str, plan: Plan, table: BeamTable, sft: Selector, rce: Selector
) -> None:
    """Train a variant, from its warm-up to its last round."""
    variant = plan.variant
    start = sft
    if variant.warmup:
        # a control shuffles the rewards of GRPO only
        start = rce
        reward = replace(plan.reward, shuffled=run.config.reward.shuffled)
        if reward != run.config.reward:
            start = run.train(f"{name}-rce", "rce", table, sft, reward=reward, loss=plan.loss)
    reward_model = None
    if plan.reward_model is not None:
        reward_model = run.reward_model(table, sft, plan.reward_model)
    if variant.live or reward_model is not None:
        run.train(
            name,
            "grpo",
            table,
            start,
            reward=plan.reward,
            loss=plan.loss,
            config=plan.stage,
            reference=sft,
            reward_model=reward_model,
            live=variant.live,
        )
        return
    # in replay, each round adds draws to the records: first of SFT, the same for all variants,
    # then of the round before
    drawing = sft
    # the beams may hold rounds of an earlier policy, which count as earlier ones
    before = int(table.round.max())
    for k in range(1, variant.rounds + 1):
        if variant.own_draws:
            table = run.recorded(table, drawing, variant.own_draws, before + k)
        policy = name if k == variant.rounds else f"{name}-{k}"
        drawing = run.train(
            policy,
            "grpo",
            table,
            start,
            reward=plan.reward,
            loss=plan.loss,
            config=plan.stage,
            reference=sft,
            groups=GroupConfig(variant.groups, rounds=1),
        )
        start = drawing


class SeedRun:
    """One seed of a run: its data, what stages start from, and the training of one stage.

    The checkpoints of a policy go into `checkpoints/seed<k>/<policy>` of the run's folder.
    """

    def __init__(self, config: SelectorRun, data: SelectorData, seed: int, folder: Path) -> None:
        self.config = config
        self.seed = seed
        self.folder = folder
        self.beams = data.table  # with its embeddings, also where items are read in their place
        self.data = data._replace(table=as_read(data.table, data.items))
        self.step = 0  # of the next stage, in metrics.csv

    def trainer(self, stage: str, table: BeamTable, start: Selector, **settings: Any) -> Trainer:
        """Return the trainer of a stage, with `settings` in place of those of the run.

        Raises:
            InputError: the records lack what the stage learns from.
        """
        config = self.config
        usual = {
            "config": getattr(config, stage),
            "loss": config.loss,
            "reward": config.reward,
            "shots": config.shots,
            "scorer": self.data.scorer,
            "seen": self.seen,
            "seed": self.seed,
            "device": config.device,
        }
        return selector_trainer(stage, table, self.data.split, start, **(usual | settings))

    def fresh(self, table: BeamTable) -> Selector:
        """Return a selector for this table, with weights that are drawn by the seed."""
        with seeded(self.seed, "cpu"):
            encoder = None
            # CLIP with fresh LoRA weights, which learn along
            if self.data.items is not None:
                encoder = ClipEncoder(self.config.encoder.model, self.data.items)
            queries = table.queries[self.data.split.train]
            return Selector.fitted(self.config.selector, queries, table.candidates, encoder)

    @functools.cached_property
    def start(self) -> tuple[Path, Loaded] | None:
        """The checkpoint of `init_from`, and where it is."""
        if self.config.init_from is None:
            return None
        path = checkpoint_at(self.config.init_from)
        return path, load_checkpoint(path)

    @functools.cached_property
    def seen(self) -> list[str]:
        """Fingerprints of the queries that are fitted or chosen on, also by the checkpoint started
        from. Nothing is hidden in them."""
        before = [] if self.start is None else self.start[1].extra.get("seen", [])
        rows = torch.cat(self.data.split[:2]).tolist()
        return [*dict.fromkeys([*(self.beams.fingerprints[row] for row in rows), *before])]

    @functools.cached_property
    def first(self) -> Selector:
        """The selector that SFT starts from, where nothing is hidden: a fresh one, or that of
        `init_from`.

        Raises:
            InputError: that does not fit, or was trained on queries of these beams that this run
                holds out.
        """
        fresh = self.fresh(self.data.table)
        if self.start is None:
            return fresh
        path, loaded = self.start
        table = self.data.table
        table_for(table, loaded, self.data.items)
        selector = started_from(path, loaded, fresh)
        if selector.encoder is not None:
            selector.encoder.items = self.data.items
        if trained_on(loaded, self.beams, self.data.items)[self.data.split.test].any():
            raise InputError(
                f"init_from={path}: was trained on queries of {table.name!r} that this run holds "
                "out; use the same beams.train, beams.validation and beams.split_seed"
            )
        return selector

    def recorded(self, table: BeamTable, selector: Selector, count: int, k: int) -> BeamTable:
        """Return the table with draws of a selector for every query, scored once, as beams of round
        k; without a scorer the table as it is."""
        scorer = self.data.scorer
        if scorer is None:
            return table
        rows = torch.arange(table.num_queries)
        with seeded(self.seed + 1000 * k, "cpu"):
            actor = SelectorActor(selector, table, self.config.shots)
            draws = evaluation.draw(actor, rows, count)
        # information is the gain over the answer without demonstrations
        scores = score(CachedScorer(scorer), rows, table.pool, draws)
        return table.with_beams(draws, scores, POLICY, k)

    def reward_model(
        self, table: BeamTable, sft: Selector, config: RewardModelConfig
    ) -> RewardModel:
        """Return the learned reward as it is before GRPO."""
        with seeded(self.seed, "cpu"):
            model = RewardModel(config, sft.mean.cpu(), sft.scale.cpu())
            model.learn(table, recorded_answers(table, self.data.split.train), config.epochs)
        return model

    def train(
        self, name: str, stage: str, table: BeamTable, start: Selector, **settings: Any
    ) -> Selector:
        """Train one stage, or what is left of it; return the selector of its best epoch.

        Args:
            name: the policy that is trained, which names its folder.
            stage: sft, rce or grpo.
            settings: arguments of the trainer in place of those of the run.
        """
        folder = seed_folder(self.folder, self.seed) / name
        trainer = self.trainer(stage, table, start, folder=folder, **settings)
        trainer.title = f"seed {self.seed} · {name}"
        trainer.resume(folder / "last.pt")
        run_logged(trainer, self.config, self.folder, self.data.table, name, self.step)
        # the rows of the next stage follow in metrics.csv
        self.step += trainer.total + 1
        best = load_checkpoint(folder / "best.pt").selector
        if best.encoder is not None:
            best.encoder.items = self.data.items
        return best


# -- judging ---------------------------------------------------------------------------------------


def judge_selectors(
    config: SelectorRun, data: SelectorData, folder: Path
) -> tuple[RunResults, pl.DataFrame]:
    """Judge every policy of a run, see `evaluate_selectors`."""
    # for each trained policy, one entry for each seed
    facts: RunResults = {"epochs": {}, "validation": {}}
    hidden = policies(config)
    trained = {}
    for name in hidden:
        loaded = trained[name] = [
            load_checkpoint(seed_folder(folder, seed) / name / "best.pt") for seed in config.seeds
        ]
        # without epochs there is none to keep
        if name != "sft" or config.sft.epochs:
            facts["epochs"][name] = [checkpoint.extra["epoch"] for checkpoint in loaded]
        facts["validation"][name] = [checkpoint.extra["validation"] for checkpoint in loaded]
    results, decisions = evaluate_selectors(
        data,
        trained,
        judged_shots=config.judged_shots,
        seeds=config.seeds,
        trained_shots=config.shots,
        hidden=hidden,
    )
    return results | facts | learned_rewards(config, data, folder), decisions
