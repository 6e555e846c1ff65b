"""The selector experiment: supervised fine-tuning on beams, RCE, GRPO in several forms, with several seeds; judge them
on queries and candidates never seen beside every simple way; report.

Launch it as `python experiments/selector.py key=value …` or `knobwise train experiment=selector key=value …`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import multiprocessing
import os
import shlex
import shutil
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from rich.console import Console
from torch import Tensor

from knobwise.agents.checkpoint import load_checkpoint, save_checkpoint
from knobwise.agents.selector import DECODINGS, Selector, StoredEmbeddings
from knobwise.agents.selector_baselines import SIMPLE
from knobwise.agents.selector_evaluation import decision_us, judge_selector, judge_simple, recorded
from knobwise.agents.selector_trainer import SelectorTrainer
from knobwise.agents.settings import at_least, one_of
from knobwise.envs.beam_files import read_beam_data
from knobwise.envs.beam_records import TrailingQuery
from knobwise.envs.beams import BeamTable
from knobwise.envs.demonstrations import GroupConfig, recorded_groups
from knobwise.envs.errors import InputError
from knobwise.envs.files import written_whole
from knobwise.envs.table import Split
from knobwise.experiments.report import print_results, result_images, write_report
from knobwise.experiments.run_folder import claim
from knobwise.experiments.selector_results import UPPER, selector_results
from knobwise.experiments.selector_settings import BeamFiles, BuiltinBeams, SelectorRun
from knobwise.experiments.tracking import Tracker, wandb_mode
from knobwise.profiling.beam_search import probability, score
from knobwise.profiling.demonstrations import builtin_demonstrations, careful_candidates
from knobwise.profiling.scorers import Scorer

TAKEN = ("sft", "rce", "hidden_sft", "hidden_rce", *SIMPLE, *UPPER)
"""Names that no variant may have."""


class SelectorData(NamedTuple):
    """What is learned from and what is judged on."""

    table: BeamTable
    split: Split
    """Of `table`: fit, choose; its third part is judged on where `test` is the same table."""
    scorer: Scorer | None
    test: BeamTable
    test_rows: Tensor
    test_scorer: Scorer | None
    trusted: Tensor | None
    """bool [M], candidates of the test's bank whose annotator is known to be careful; None where nobody knows."""


def read_data(config: BuiltinBeams | BeamFiles) -> SelectorData:
    """Read the beams that a config of group `beams` names.

    Raises:
        InputError: see the readers.
    """
    if isinstance(config, BuiltinBeams):
        found = builtin_demonstrations(config.variant)
        train, test = found.train, found.test
        split = train.split(0.9, 0.1)
        trusted = careful_candidates(config.variant, "test")
        return SelectorData(
            train, split, found.train_scorer, test, torch.arange(test.num_queries), found.test_scorer, trusted
        )
    if config.path.endswith(".safetensors"):
        table = BeamTable.load(config.path)
    elif config.embeddings is None:
        raise InputError("beams.embeddings: beams in JSON need the embeddings of their candidates")
    else:
        table = read_beam_data(
            config.path,
            config.embeddings,
            config.query_embeddings,
            trailing_query=cast(TrailingQuery, config.trailing_query),
            candidate_images=config.candidate_images,
            keep_fallback=config.keep_fallback,
            name=config.name,
        )
    split = table.split(config.train, config.validation, config.split_seed)
    if not len(split.test):
        raise InputError("beams: train and validation leave no queries to judge on; their shares must be below 1")
    return SelectorData(table, split, None, table, split.test, None, None)


def hide(table: BeamTable, blocks: list[str]) -> BeamTable:
    """The table with columns of its embeddings set to 0.

    Raises:
        InputError: the table has no such block.
    """
    queries, candidates = table.queries.clone(), table.candidates.clone()
    for name in blocks:
        if name not in table.blocks:
            raise InputError(f"hidden={name}: {table.name} has the blocks {', '.join(table.blocks) or 'unknown'}")
        start, end = table.blocks[name]
        queries[:, start:end] = 0
        candidates[:, start:end] = 0
    return replace(table, queries=queries, candidates=candidates)


def policies(config: SelectorRun) -> dict[str, list[str]]:
    """What is trained, by the name of its folder and row, and which blocks it does not see."""
    found: dict[str, list[str]] = {"sft": [], "rce": []}
    for name in config.variants:
        hidden = config.variant(name).hidden
        if hidden:
            found |= {"hidden_sft": hidden, "hidden_rce": hidden}
        found[name] = hidden
    return found


def run(config: SelectorRun, overrides: list[str]) -> Path:
    """The whole way once, from beams to a report; returns the run's folder.

    A run that was stopped goes on where it was when it is started again with the same settings.

    Raises:
        InputError: settings or files that cannot be used; nothing has been written then.
    """
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    wandb_mode(config.tracking)
    data = _checked(config)
    console = Console(stderr=True)
    for note in dict.fromkeys([*data.table.notes, *data.test.notes]):
        console.print(f"[dim]{data.table.name}: {note}[/dim]")
    with claim(config, overrides) as folder:
        console.print(f"run: {folder}", soft_wrap=True)
        _train(config, folder)
        _keep_best(config, data, folder)
        console.print("judging every policy on held-out queries …")
        results = judge_run(config, data, folder)
        results["experiment"], results["variants"] = config.experiment, list(config.variants)
        results["command"] = " ".join(["knobwise train", *map(shlex.quote, overrides)])
        with written_whole(folder / "results.json") as temporary:
            temporary.write_text(json.dumps(results, indent=1))
        report = write_report(folder)
        with _tracker(config, folder, data.table.digest, "evaluate") as tracker:
            tracker.log_results(results, images=result_images(results))
    print_results(results, Console())
    print(f"report: {report}")
    return folder


def _checked(config: SelectorRun) -> SelectorData:
    """What can be refused is refused before anything is written."""
    if not config.seeds or len(set(config.seeds)) < len(config.seeds):
        raise InputError(f"seeds={config.seeds}: at least one seed is needed, and none twice")
    if config.device not in ("cpu", "cuda") or (config.device == "cuda" and not torch.cuda.is_available()):
        raise InputError(f"device={config.device}: must be cpu, or cuda where torch finds it")
    one_of("decoding", config.decoding, DECODINGS)
    for key in ("jobs", "shots"):
        at_least(key, getattr(config, key), 1)
    if not config.judged_shots or len(set(config.judged_shots)) < len(config.judged_shots):
        raise InputError(f"judged_shots={config.judged_shots}: at least one number is needed, and none twice")
    for shots in config.judged_shots:
        at_least("judged_shots", shots, 1)
    data = read_data(config.beams)
    if data.test_scorer is None:
        test = data.test.select(data.test_rows)
        if all(recorded(test, t, torch.zeros_like(test.beam_mask)).isnan().all() for t in config.judged_shots):
            lengths = sorted(set(test.lengths[test.beam_mask].tolist()))
            raise InputError(f"judged_shots={config.judged_shots}: recorded test sequences have {lengths} shots only")
    stages = SelectorStages(config, data, config.seeds[0], None)
    stages.check(config.reward)
    recorded_groups(data.table, GroupConfig("beams"), config.shots)
    for name in config.variants:
        variant = config.variant(name)
        if name in TAKEN:
            raise InputError(f"variants.{name}: the name is taken; choose another")
        if data.scorer is None and (variant.live or variant.rounds > 1):
            raise InputError(
                f"variants.{name}: live draws and rounds need a scorer, which recorded beams do not have; leave it out "
                f"by variants.{name}=null, or train with experiment=selector_replay"
            )
        hide(data.table, variant.hidden)
        reward, _ = config.of(variant, name)
        stages.check(reward)
        if not (variant.live or (variant.own_draws and data.scorer is not None)):
            recorded_groups(data.table, GroupConfig(variant.groups, rounds=1), config.shots)
    if len({tuple(hidden) for hidden in policies(config).values() if hidden}) > 1:
        raise InputError("variants: those with hidden blocks share hidden_sft, so all must hide the same blocks")
    return data


def _train(config: SelectorRun, folder: Path) -> None:
    """Every seed, several at the same time."""
    if config.jobs == 1 or len(config.seeds) == 1:
        for seed in config.seeds:
            train_seed(config, seed, folder)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(config.jobs, len(config.seeds)), mp_context=context, initializer=_plain) as pool:
        started = [pool.submit(train_seed, config, seed, folder) for seed in config.seeds]
        try:
            for future in as_completed(started):
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def _plain() -> None:
    """Bars of several processes would write over one another: they say a line once in a while instead.

    And no process outlives the one that started it: that run may be started again, and would meet it in its folder.
    """
    os.environ["TTY_COMPATIBLE"] = "0"
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def train_seed(config: SelectorRun, seed: int, folder: Path) -> None:
    """All stages of one seed, but for those that are finished already."""
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    data = read_data(config.beams)
    with SelectorStages(config, data, seed, folder) as stages:
        stages.all()


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

    def __enter__(self) -> SelectorStages:
        return self

    def __exit__(self, *error: Any) -> None:
        self.after.__exit__(*error)

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
        base: dict[str, tuple[Selector, Selector]] = {}
        for name in self.config.variants or ["sft"]:
            hidden = self.config.variant(name).hidden if self.config.variants else []
            key, prefix = ",".join(hidden), "hidden_" if hidden else ""
            table = hide(self.data.table, hidden)
            if key not in base:
                sft = self.stage(f"{prefix}sft", "sft", table, self._fresh(table), groups=GroupConfig("beams"))
                rce = self.stage(f"{prefix}rce", "rce", table, sft)
                base[key] = sft, rce
            if self.config.variants:
                self._variant(name, table, *base[key])

    def _fresh(self, table: BeamTable) -> Selector:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            train = self.data.split.train
            return Selector.fitted(self.config.selector, table.queries[train], table.candidates)

    def _variant(self, name: str, table: BeamTable, sft: Selector, rce: Selector) -> None:
        variant = self.config.variant(name)
        reward, loss = self.config.of(variant, name)
        config = replace(
            self.config.grpo,
            **{key: value for key in ("epochs", "lr") if (value := getattr(variant, key)) is not None},
        )
        settings = {"reward": reward, "loss": loss, "config": config, "reference": sft}
        start = sft
        if variant.warmup:
            same = (reward, loss.scores) == (self.config.reward, self.config.loss.scores) or reward.shuffled
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
        embeddings, found = StoredEmbeddings(table.queries, table.candidates), []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed + 1000 * number)
            for rows in self.rows.split(512):
                query, pool = embeddings.both(rows, table.pool[rows])
                dist = selector.distribution(query, pool, table.pool_mask[rows], self.config.shots, count)
                found.append(dist.sample())
        scored = score(self.data.scorer, self.rows, table.pool, torch.cat(found), "policy", self.zero_shot)
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
                opened = _tracker(self.config, self.folder, table.digest, "train", self.seed, before)
                self.tracker = self.after.enter_context(opened)
            trainer.log = _StageLog(self.tracker, name, self.step)
            trainer.run()
        self.step += trainer.total + 1
        return load_checkpoint(folder / "best.pt").selector


def _keep_best(config: SelectorRun, data: SelectorData, folder: Path) -> None:
    """The seed and policy that were best on validation become the run's `best.pt`; controls do not compete."""
    competing = [n for n in config.variants if not config.variant(n).hidden and not config.variant(n).last]
    found = {}
    for name, seed in itertools.product(competing or ["rce"], config.seeds):
        path = folder / "checkpoints" / f"seed{seed}" / name
        found[name, path] = float(load_checkpoint(path / "best.pt").extra["validation"])
    name, path = max(found, key=found.__getitem__)
    fitted = torch.cat([data.split.train, data.split.validation])
    extra = {"policy": name, "validation": found[name, path], "shots": config.shots}
    extra |= {"fitted": [data.table.query_ids[row] for row in fitted.tolist()]}
    save_checkpoint(folder / "checkpoints" / "best.pt", load_checkpoint(path / "best.pt").selector, data.table, extra)
    with written_whole(folder / "checkpoints" / "last.pt") as temporary:
        shutil.copyfile(path / "last.pt", temporary)


class _StageLog:
    """One stage's numbers in the log of its seed: under its own name, after the steps of the stages before it."""

    def __init__(self, tracker: Tracker, name: str, first: int) -> None:
        self.tracker, self.name, self.first = tracker, name, first

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        named = {key.replace("/", f"/{self.name}/", 1): value for key, value in metrics.items()}
        self.tracker.log(named, self.first + step)


def judge_run(config: SelectorRun, data: SelectorData, folder: Path) -> dict[str, Any]:
    """Every policy on the same held-out queries, at every number of shots; gives the content of `results.json`."""
    correct: dict[str, dict[int, Tensor]] = {}
    times: dict[str, dict[int, float]] = {}
    for shots in config.judged_shots:
        simple = judge_simple(
            data.test, data.test_scorer, shots, seeds=config.seeds, rows=data.test_rows, trusted=data.trusted
        )
        for name, found in simple.items():
            correct.setdefault(name, {})[shots] = found
    for name, hidden in policies(config).items():
        test = hide(data.test, hidden)
        embeddings = StoredEmbeddings(test.queries, test.candidates)
        last = name in config.variants and config.variant(name).last
        file = "last.pt" if last else "best.pt"
        paths = [folder / "checkpoints" / f"seed{seed}" / name / file for seed in config.seeds]
        selectors = [load_checkpoint(path).selector for path in paths]
        for shots in config.judged_shots:
            judged = [
                judge_selector(one, embeddings, test, data.test_scorer, shots, data.test_rows, config.decoding)
                for one in selectors
            ]
            correct.setdefault(name, {})[shots] = torch.stack(judged)
            if data.test_scorer is not None:
                times.setdefault(name, {})[shots] = decision_us(selectors[0], embeddings, test, data.test_rows, shots)
    return selector_results(
        correct,
        data.table,
        seeds=config.seeds,
        trained_shots=config.shots,
        test=data.test if data.test is not data.table else None,
        decision_us=times,
        judged_by="recorded" if data.test_scorer is None else "scorer",
        hidden=sorted({block for blocks in policies(config).values() for block in blocks}),
    )


def _tracker(
    config: SelectorRun, folder: Path, digest: str, job_type: str, seed: int | None = None, step: int | None = None
) -> Tracker:
    return Tracker(
        folder,
        name=folder.name,
        experiment=config.experiment,
        job_type=job_type,
        config=asdict(config),
        settings=config.tracking,
        seed=seed,
        tags=[config.selector.version, f"reward-{config.reward.mode}"],
        profile_digest=digest,
        resume_step=step if step is not None and step >= 0 else None,
    )


if __name__ == "__main__":
    from knobwise.__main__ import main

    named = any(word.startswith("experiment=") for word in sys.argv)
    sys.exit(main(["train", *([] if named else ["experiment=selector"]), *sys.argv[1:]]))
