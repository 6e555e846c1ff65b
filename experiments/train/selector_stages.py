"""The training of the selector experiment: the stages of one seed, and several seeds at the same time."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from knobwise.agents.checkpoint import load_checkpoint, selector_start
from knobwise.agents.selector.selector import Selector, StoredEmbeddings
from knobwise.agents.training.selector_trainer import SelectorTrainer
from knobwise.common.errors import InputError
from knobwise.common.processes import in_processes
from knobwise.envs.demonstrations.beam_table import BeamTable
from knobwise.envs.demonstrations.settings import GroupConfig
from knobwise.experiments.results.summary import profile_of
from knobwise.experiments.settings.beams import SelectorData, hide, read_data
from knobwise.experiments.settings.selector_options import SelectorRun
from knobwise.experiments.tracking.tracker import Tracker
from knobwise.experiments.train.run import set_up_torch, tracker_of
from knobwise.losses.settings import SelectorLossConfig
from knobwise.profiling.demonstrations.beam_search import probability, score


def train_all(config: SelectorRun, folder: Path) -> None:
    """Every seed, several at the same time."""
    if config.jobs == 1 or len(config.seeds) == 1:
        for seed in config.seeds:
            train_seed(config, seed, folder)
        return
    in_processes("seeds", train_seed, [(config, seed, folder) for seed in config.seeds], config.jobs)


def train_seed(config: SelectorRun, seed: int, folder: Path) -> str:
    """All stages of one seed, but for those that are finished already; gives nothing to note."""
    set_up_torch()
    SelectorStages(config, read_data(config.beams), seed, folder).all()
    return ""


class SelectorStages:
    """The stages of one seed: what each starts from, and what it learns from.

    Args:
        config: the settings.
        data: the beams.
        seed: of initialisation, contexts and draws.
        folder: of the run; each policy's checkpoints go into `checkpoints/seed<k>/<policy>`.
    """

    def __init__(self, config: SelectorRun, data: SelectorData, seed: int, folder: Path | None) -> None:
        self.config, self.data, self.seed, self.folder = config, data, seed, folder
        self.step, self.after = 0, contextlib.ExitStack()
        self.tracker: Tracker | None = None
        self.rows = torch.arange(data.table.num_queries)
        self.zero_shot = None if data.scorer is None else probability(data.scorer, self.rows)

    def check(self, reward: Any) -> None:
        """Refuse a reward that what was recorded does not hold.

        Raises:
            InputError: naming what is missing.
        """
        table, config = self.data.table, self.config
        start = Selector.fitted(config.selector, table.queries, table.candidates)
        SelectorTrainer("rce", table, self.data.split, start, shots=config.shots, config=config.rce, reward=reward)

    def all(self) -> None:
        """Train everything that the settings name."""
        with self.after:
            base = {"": self._base("", self.data.table)}
            for name in self.config.variants:
                hidden = self.config.variant(name).hidden
                key, table = ",".join(hidden), hide(self.data.table, hidden)
                if key not in base:
                    base[key] = self._base("hidden_", table)
                self._variant(name, table, *base[key])

    def _base(self, prefix: str, table: BeamTable) -> tuple[Selector, Selector]:
        """SFT and RCE, which every variant starts from. What hides blocks must not start from what has seen them."""
        start = self._fresh(table) if prefix or self.config.init_from is None else self.init_from(self.config.init_from)
        sft = self.stage(f"{prefix}sft", "sft", table, start, groups=GroupConfig("beams"))
        return sft, self.stage(f"{prefix}rce", "rce", table, sft)

    def _fresh(self, table: BeamTable) -> Selector:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            train = self.data.split.train
            return Selector.fitted(self.config.selector, table.queries[train], table.candidates)

    def init_from(self, path: str) -> Selector:
        """The selector of a checkpoint.

        Raises:
            InputError: another network, or it was trained on queries of these beams that are not trained on here.
        """
        table, split = self.data.table, self.data.split
        selector, loaded = selector_start(path, self.config.selector, table.queries.shape[-1])
        fitted = {table.query_ids[row] for part in split[:2] for row in part.tolist()}
        # beams with draws of a policy added have another digest, and the same name
        known = table.digest == loaded.profile_digest or table.name == loaded.profile_name
        if known and not fitted.issuperset(loaded.extra.get("fitted", ())):
            raise InputError(
                f"init_from={path}: was trained on queries of {table.name!r} that this run holds out; use the same "
                "beams.train, beams.validation and beams.split_seed"
            )
        return selector

    def _variant(self, name: str, table: BeamTable, sft: Selector, rce: Selector) -> None:
        variant = self.config.variant(name)
        reward, loss = self.config.reward_and_loss(variant, name)
        config = self.config.stage(variant, name)
        settings = {"reward": reward, "loss": loss, "config": config, "reference": sft}
        start = sft
        if variant.warmup:
            usual = (self.config.reward, _rce_settings(self.config.loss))
            # what only a control changes is left to it: its warm-up is the same
            same = (replace(reward, shuffled=False), _rce_settings(loss)) == usual
            start = rce if same else self.stage(f"{name}-rce", "rce", table, sft, reward=reward, loss=loss)
        if variant.live:
            self.stage(name, "grpo", table, start, live=True, **settings)
            return
        groups = GroupConfig(variant.groups, rounds=1)
        for number in range(1, variant.rounds + 1):
            if variant.own_draws and self.data.scorer is not None:
                table = self.recorded(table, sft if number == 1 else start, variant.own_draws, number)
            last = number == variant.rounds
            start = self.stage(name if last else f"{name}-{number}", "grpo", table, start, groups=groups, **settings)

    @torch.no_grad()
    def recorded(self, table: BeamTable, selector: Selector, count: int, number: int) -> BeamTable:
        """The table with draws of a selector for every query, scored once, as beams of round `number`."""
        assert self.data.scorer is not None
        assert self.zero_shot is not None
        embeddings, draws = StoredEmbeddings(table.queries, table.candidates), []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed + 1000 * number)
            for rows in self.rows.split(512):
                query, pool = embeddings.both(rows, table.pool[rows])
                dist = selector.distribution(query, pool, table.pool_mask[rows], self.config.shots, count)
                draws.append(dist.sample())
        scored = score(self.data.scorer, self.rows, table.pool, torch.cat(draws), "policy", self.zero_shot)
        return table.with_beams(scored.sequences, scored.fields, scored.found_by, number)

    def stage(self, name: str, stage: str, table: BeamTable, start: Selector, **settings: Any) -> Selector:
        """One training, or what is left of it; gives its best epoch's selector."""
        assert self.folder is not None
        folder = self.folder / "checkpoints" / f"seed{self.seed}" / name
        usual = {"config": getattr(self.config, stage), "loss": self.config.loss, "reward": self.config.reward}
        trainer = SelectorTrainer(
            stage,
            table,
            self.data.split,
            start,
            shots=self.config.shots,
            scorer=self.data.scorer,
            seed=self.seed,
            folder=folder,
            device=self.config.device,
            **(usual | settings),
        )
        trainer.title = f"seed {self.seed} · {name}"
        trainer.resume(folder / "last.pt")
        if not trainer.finished:
            # the checkpoint was written before the rows of its own iteration were complete
            before = self.step + trainer.iteration - 1
            if self.tracker is None:
                opened = selector_tracker(self.config, self.folder, self.data.table, "train", self.seed, before)
                self.tracker = self.after.enter_context(opened)
            trainer.log = _StageLog(self.tracker, name, self.step)
            trainer.run()
        self.step += trainer.total + 1
        return load_checkpoint(folder / "best.pt").selector


def _rce_settings(loss: SelectorLossConfig) -> tuple[Any, ...]:
    """What RCE reads of the settings of the loss."""
    return loss.scores, loss.temperature_start, loss.temperature_end


class _StageLog:
    """One stage's numbers in the log of its seed: under its own name, after the steps of the stages before it."""

    def __init__(self, tracker: Tracker, name: str, first: int) -> None:
        self.tracker, self.name, self.first = tracker, name, first

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        named = {key.replace("/", f"/{self.name}/", 1): value for key, value in metrics.items()}
        self.tracker.log(named, self.first + step)


def selector_tracker(
    config: SelectorRun, folder: Path, table: BeamTable, job_type: str, seed: int | None = None, step: int | None = None
) -> Tracker:
    """Where the numbers of a run, or of one seed, go."""
    tags = [config.selector.version, f"reward-{config.reward.mode}"]
    return tracker_of(config, folder, job_type, tags, profile_of(table), seed, step)
