"""The selector experiment: supervised fine-tuning on beams, RCE, GRPO in several forms, with several seeds; judge them
on queries and candidates never seen beside every simple way; report.

Launch it as `python experiments/selector.py key=value …` or `knobwise train experiment=selector key=value …`.
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

import torch
from rich.console import Console
from torch import Tensor

from knobwise.agents.checkpoint import load_checkpoint
from knobwise.agents.pointer import LONGEST
from knobwise.agents.selector import DECODINGS, StoredEmbeddings
from knobwise.agents.selector_baselines import SIMPLE
from knobwise.agents.selector_evaluation import bank_rows, choose, decision_us, judge, judge_selector, judge_simple
from knobwise.agents.settings import at_least, one_of
from knobwise.envs.demonstrations import GroupConfig, recorded_groups
from knobwise.envs.errors import InputError
from knobwise.envs.files import written_whole
from knobwise.experiments.report import print_results, result_images, write_report
from knobwise.experiments.run_folder import claim
from knobwise.experiments.selector_data import SelectorData, check_judged, hide, read_data
from knobwise.experiments.selector_results import UPPER, selector_results
from knobwise.experiments.selector_settings import SelectorRun
from knobwise.experiments.selector_stages import SelectorStages, tracker_of, train_all
from knobwise.experiments.tracking import wandb_mode

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
    console = Console(stderr=True)
    for note in dict.fromkeys([*data.table.notes, *data.test.notes]):
        console.print(f"[dim]{data.table.name}: {note}[/dim]")
    with claim(config, overrides) as folder:
        console.print(f"run: {folder}", soft_wrap=True)
        train_all(config, folder)
        _keep_best(config, folder)
        console.print("judging every policy on held-out queries …")
        results = judge_run(config, data, folder)
        results["experiment"], results["variants"] = config.experiment, list(config.variants)
        results["command"] = " ".join(["knobwise train", *map(shlex.quote, overrides)])
        with written_whole(folder / "results.json") as temporary:
            temporary.write_text(json.dumps(results, indent=1))
        report = write_report(folder)
        with tracker_of(config, folder, data.table.digest, "evaluate") as tracker:
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


def _keep_best(config: SelectorRun, folder: Path) -> None:
    """The seed and policy that were best on validation become the run's `best.pt`; controls do not compete."""
    competing = [
        n for n in config.variants if not config.variant(n).hidden and config.stage(config.variant(n), n).keep == "best"
    ]
    found = {}
    for name, seed in itertools.product(competing or ["rce"], config.seeds):
        path = folder / "checkpoints" / f"seed{seed}" / name
        found[name, path] = float(load_checkpoint(path / "best.pt").extra["validation"])
    _, path = max(found, key=found.__getitem__)
    for file in ("best.pt", "last.pt"):
        with written_whole(folder / "checkpoints" / file) as temporary:
            shutil.copyfile(path / file, temporary)


def judge_run(config: SelectorRun, data: SelectorData, folder: Path) -> dict[str, Any]:
    """Every policy on the same held-out queries, at every number of shots; gives the content of `results.json`."""
    correct: dict[str, dict[int, Tensor]] = {}
    times: dict[str, dict[int, float]] = {}
    votes: dict[str, dict[int, Tensor]] = {}
    epochs: dict[str, list[int]] = {}
    for shots in config.judged_shots:
        simple = judge_simple(
            data.test, data.test_scorer, shots, seeds=config.seeds, rows=data.test_rows, trusted=data.trusted
        )
        for name, found in simple.items():
            correct.setdefault(name, {})[shots] = found
    for name, hidden in policies(config).items():
        test = hide(data.test, hidden)
        embeddings = StoredEmbeddings(test.queries, test.candidates)
        paths = [folder / "checkpoints" / f"seed{seed}" / name / "best.pt" for seed in config.seeds]
        epochs[name] = [load_checkpoint(path).extra["epoch"] for path in paths]
        selectors = [load_checkpoint(path).selector for path in paths]
        correct[name] = {shots: torch.zeros(len(selectors), len(data.test_rows)) for shots in config.judged_shots}
        votes[name] = {shots: torch.zeros_like(found) for shots, found in correct[name].items()}
        for number, one in enumerate(selectors):
            if data.test_scorer is None:
                for shots in config.judged_shots:
                    correct[name][shots][number] = judge_selector(one, embeddings, test, None, shots, data.test_rows)
                continue
            longest = choose(one, embeddings, test, data.test_rows, max(config.judged_shots), config.decoding)
            for shots in config.judged_shots:
                chosen = longest[:, :shots]  # a greedy choice begins as a shorter one does, a beam need not
                if config.decoding != "greedy":
                    chosen = choose(one, embeddings, test, data.test_rows, shots, config.decoding)
                correct[name][shots][number] = judge(test, data.test_scorer, chosen, data.test_rows)
                shown = bank_rows(test, chosen, data.test_rows)
                votes[name][shots][number] = data.test_scorer.vote(data.test_rows, shown)
                if number == 0:
                    spent = decision_us(one, embeddings, test, data.test_rows, shots)
                    times.setdefault(name, {})[shots] = spent
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
    return results | {"epochs": epochs}


if __name__ == "__main__":
    from knobwise.__main__ import main

    named = any(word.startswith("experiment=") for word in sys.argv)
    sys.exit(main(["train", *([] if named else ["experiment=selector"]), *sys.argv[1:]]))
