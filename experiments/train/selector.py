"""The selector experiment: supervised fine-tuning on beams, RCE, GRPO in several forms, with several seeds; judge them
on queries and candidates never seen beside every simple way; report.

Launch it as `python experiments/train/selector.py key=value …` or `knobwise train experiment=selector key=value …`.
"""

from __future__ import annotations

import itertools
import json
import logging
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import polars as pl
import torch
from rich.console import Console
from torch import Tensor

from knobwise.agents.checkpoint import load_checkpoint
from knobwise.agents.selector.baselines import SIMPLE
from knobwise.agents.selector.evaluation import (
    Decided,
    choose,
    decide_selector,
    decide_simple,
    decision_us,
    judged_choices,
)
from knobwise.agents.selector.networks import LONGEST
from knobwise.agents.selector.selector import DECODINGS, Selector, StoredEmbeddings
from knobwise.agents.training.settings import at_least, one_of
from knobwise.common.errors import InputError
from knobwise.common.files import written_whole
from knobwise.common.progress import say
from knobwise.envs.demonstrations.beam_table import BeamTable
from knobwise.envs.demonstrations.torchrl_env import GroupConfig, recorded_groups
from knobwise.experiments.report.report import print_results, result_images, write_report
from knobwise.experiments.results.decisions_file import write_decisions
from knobwise.experiments.results.run_folder import claim
from knobwise.experiments.results.selector_results import UPPER, selector_decisions, selector_results
from knobwise.experiments.settings.beams import SelectorData, check_judged, hide, read_data
from knobwise.experiments.settings.selector_options import SelectorRun
from knobwise.experiments.tracking.tracker import wandb_mode
from knobwise.experiments.train.selector_stages import SelectorStages, tracker_of, train_all

TAKEN = ("sft", "rce", "hidden_sft", "hidden_rce", *SIMPLE, *UPPER)
"""Names that no variant may have."""


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
    for note in dict.fromkeys([*data.table.notes, *data.test.notes]):
        say(f"{data.table.name}: {note}")
    with claim(config, overrides) as folder:
        say(f"run: {folder}")
        train_all(config, folder)
        best_policy, best_seed = _keep_best(config, folder)
        say("judging every policy on held-out queries …")
        results, decisions = judge_run(config, data, folder)
        results["experiment"], results["variants"] = config.experiment, list(config.variants)
        results["best_policy"], results["best_seed"] = best_policy, best_seed
        results["command"] = " ".join(["knobwise train", *map(shlex.quote, overrides)])
        with written_whole(folder / "results.json") as temporary:
            temporary.write_text(json.dumps(results, indent=1))
        write_decisions(folder, decisions)
        report = write_report(folder)
        with tracker_of(config, folder, data.table, "evaluate") as tracker:
            shown = tracker.mode != "disabled"  # pictures take longer to draw than all else here
            tracker.log_results(results, images=result_images(results) if shown else None)
    print_results(results, Console())
    print(f"report: {report}")
    return folder


def _checked(config: SelectorRun) -> SelectorData:
    """What can be refused is refused before anything is written."""
    if config.device not in ("cpu", "cuda") or (config.device == "cuda" and not torch.cuda.is_available()):
        raise InputError(f"device={config.device}: must be cpu, or cuda where torch finds it")
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
        config.of(variant, name)
        if name in TAKEN:
            raise InputError(f"variants.{name}: the name is taken; choose another")
        if data.scorer is None and (variant.live or variant.rounds > 1):
            raise InputError(
                f"variants.{name}: live draws and rounds need a scorer, which recorded beams do not have; leave it out "
                f"by variants.{name}=null, or train with experiment=selector_replay"
            )
    stages = SelectorStages(config, data, config.seeds[0], None)
    stages.check(config.reward)
    recorded_groups(data.table, GroupConfig("beams"))
    for name in config.variants:
        variant = config.variant(name)
        hide(data.table, variant.hidden)
        stages.check(config.of(variant, name)[0])
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
    competing = [
        n for n in config.variants if not config.variant(n).hidden and config.stage(config.variant(n), n).keep == "best"
    ]
    found = {}
    for name, seed in itertools.product(competing or ["rce"], config.seeds):
        path = folder / "checkpoints" / f"seed{seed}" / name / "best.pt"
        found[name, seed] = float(load_checkpoint(path).extra["validation"])
    name, seed = max(found, key=found.__getitem__)
    for file in ("best.pt", "last.pt"):
        with written_whole(folder / "checkpoints" / file) as temporary:
            shutil.copyfile(folder / "checkpoints" / f"seed{seed}" / name / file, temporary)
    return name, seed


def judge_run(config: SelectorRun, data: SelectorData, folder: Path) -> tuple[dict[str, Any], pl.DataFrame]:
    """Every policy on the same held-out queries, at every number of shots; gives the contents of `results.json` and of
    `decisions.parquet`."""
    decided: dict[str, dict[int, Decided]] = {}
    times: dict[str, dict[int, float]] = {}
    votes: dict[str, dict[int, Tensor]] = {}
    epochs: dict[str, list[int]] = {}
    validation: dict[str, list[float]] = {}
    for shots in config.judged_shots:
        simple = decide_simple(
            data.test, data.test_scorer, shots, seeds=config.seeds, rows=data.test_rows, trusted=data.trusted
        )
        for name, found in simple.items():
            decided.setdefault(name, {})[shots] = found
    for name, hidden in policies(config).items():
        test = hide(data.test, hidden)
        embeddings = StoredEmbeddings(test.queries, test.candidates)
        loaded = [load_checkpoint(folder / "checkpoints" / f"seed{seed}" / name / "best.pt") for seed in config.seeds]
        epochs[name] = [one.extra["epoch"] for one in loaded]
        validation[name] = [one.extra["validation"] for one in loaded]
        selectors = [one.selector for one in loaded]
        decided[name] = _decided(config, data, test, embeddings, selectors)
        if data.test_scorer is not None:
            votes[name], times[name] = {}, {}
            for shots, found in decided[name].items():
                assert found.shown is not None
                voted = [data.test_scorer.vote(data.test_rows, shown) for shown in found.shown]
                votes[name][shots] = torch.stack(voted).float().cpu()
                times[name][shots] = decision_us(selectors[0], embeddings, test, data.test_rows, shots)
    correct = {name: {n: found.correct for n, found in by_shots.items()} for name, by_shots in decided.items()}
    results = selector_results(
        correct,
        data.table,
        seeds=config.seeds,
        trained_shots=config.shots,
        test=data.test if data.test is not data.table else None,
        decision_us=times,
        judged_by=data.judged_by,
        hidden=sorted({block for blocks in policies(config).values() for block in blocks}),
    )
    if data.test_scorer is not None:
        voted_rows = selector_results(votes, data.table, seeds=config.seeds, trained_shots=config.shots)
        results["votes"] = [row for part in ("rows", "controls") for row in voted_rows[part]]
    return results | {"epochs": epochs, "validation": validation}, selector_decisions(
        decided, data.test, data.test_rows, config.seeds
    )


def _decided(
    config: SelectorRun, data: SelectorData, test: BeamTable, embeddings: StoredEmbeddings, selectors: list[Selector]
) -> dict[int, Decided]:
    """What one policy chose with every seed, by the number of shots."""
    rows, longest = data.test_rows, max(config.judged_shots)
    found = {}
    if data.test_scorer is not None and config.decoding == "greedy":
        # a greedy choice begins as a shorter one does, a beam need not
        whole = [choose(one, embeddings, test, rows, longest) for one in selectors]
        for shots in config.judged_shots:
            found[shots] = judged_choices(test, data.test_scorer, [chosen[:, :shots] for chosen in whole], rows)
        return found
    for shots in config.judged_shots:
        seeds = [
            decide_selector(one, embeddings, test, data.test_scorer, shots, rows, config.decoding) for one in selectors
        ]
        shown = [one.shown for one in seeds if one.shown is not None]
        found[shots] = Decided(torch.cat([one.correct for one in seeds]), torch.cat(shown))
    return found


if __name__ == "__main__":
    from knobwise.__main__ import main

    named = any(word.startswith("experiment=") for word in sys.argv)
    sys.exit(main(["train", *([] if named else ["experiment=selector"]), *sys.argv[1:]]))
