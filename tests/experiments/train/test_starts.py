"""What runs and their stages start from, and what they learn from."""

from __future__ import annotations

from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import (
    REPLAY,
    TABLE,
    ctrl_c_at,
    launch,
    read_json,
    refused,
    same,
    words_of,
    write_table,
)
from helpers import equal_states, small_beams

from knobwise.__main__ import main
from knobwise.agents.checkpoint import load_checkpoint
from knobwise.agents.selector.selector import Selector
from knobwise.agents.selector.settings import SelectorConfig
from knobwise.agents.training.settings import StageConfig
from knobwise.common.errors import InputError
from knobwise.envs.demonstrations.beam_table import POLICY
from knobwise.experiments.settings.beams import SelectorData
from knobwise.experiments.settings.selector_options import SelectorRun
from knobwise.experiments.settings.tracking import TrackingSettings
from knobwise.experiments.train import selector
from knobwise.experiments.train.selector import SelectorStages

STAGE = StageConfig(epochs=1, lr=1e-2, queries=16, keep="last")


def data_of(table, scorer):
    split = table.split(0.8, 0.1)
    return SelectorData(table, split, scorer, table, split.test, scorer, None, "scorer")


def run_of(variants, **settings):
    quick = {"selector": SelectorConfig(width=16, heads=2), "shots": 2, "judged_shots": [2]}
    quick |= dict.fromkeys(("sft", "rce", "grpo"), STAGE)
    tracking = TrackingSettings(mode="disabled", tensorboard=False)
    return SelectorRun(variants=variants, seeds=[0], tracking=tracking, **quick, **settings)


class Watched(selector.SelectorTrainer):
    """Writes down what each stage gets."""

    stages: dict[str, dict[str, Any]] = {}

    def __init__(self, stage, table, split, start, **settings):
        self.stages[settings["folder"].name] = {"table": table, "start": start, **settings}
        super().__init__(stage, table, split, start, **settings)


@pytest.fixture
def stages(monkeypatch, tmp_path):
    variants = {
        "warm": {},
        "cold": {"warmup": False},
        "rounds": {"rounds": 2, "own_draws": 3},
        "live": {"live": True},
        "other": {"reward": {"mode": "legacy"}},
        "shuffled": {"reward": {"shuffled": True}},
    }
    monkeypatch.setattr(selector, "SelectorTrainer", Watched)
    Watched.stages = {}
    SelectorStages(run_of(variants), data_of(*small_beams(60)), 0, tmp_path).all()
    return Watched.stages


def test_what_the_stages_start_from(stages, tmp_path):
    last = {
        folder.name: load_checkpoint(folder / "best.pt").selector
        for folder in (tmp_path / "checkpoints" / "seed0").iterdir()
    }
    assert not equal_states(last["sft"], last["rce"])
    before = {"rce": "sft", "cold": "sft", "rounds": "rounds-1"}
    before |= dict.fromkeys(("warm", "live", "shuffled", "rounds-1"), "rce")
    # what RCE reads differs, so this has an RCE stage for itself
    before["other"] = "other-rce"
    for name, start in before.items():
        assert equal_states(stages[name]["start"], last[start])
    assert not equal_states(stages["other"]["start"], last["rce"])
    for name in ("warm", "cold", "rounds", "live", "other"):  # the KL is to SFT
        assert equal_states(stages[name]["reference"], last["sft"])


def test_what_the_stages_learn_from(stages):
    assert stages["sft"]["groups"].methods == "beams"
    assert not (stages["sft"]["table"].found_by == POLICY).any()
    first, second = stages["rounds-1"]["table"], stages["rounds"]["table"]
    assert set(first.round.unique().tolist()) == {0, 1}
    assert set(second.round.unique().tolist()) == {0, 1, 2}
    assert stages["rounds"]["groups"].rounds == 1
    assert stages["warm"]["groups"].methods == "without_beams"
    assert stages["live"]["live"]


def test_own_draws_are_those_of_the_selector(tmp_path):
    table, scorer = small_beams(30)
    torch.manual_seed(0)
    stages = SelectorStages(run_of({}), data_of(table, scorer), 0, tmp_path)
    sharp = Selector.fitted(
        SelectorConfig(width=16, heads=2, temperature=1e-4), table.queries, table.candidates
    )
    recorded = stages.recorded(table, sharp, 3, 1)
    draws = recorded.found_by == POLICY
    chosen = sharp.choose(table.queries, table.candidates[table.pool], table.pool_mask, 2)
    for row in range(30):
        pool_rows = table.pool[row][recorded.sequences[row][draws[row]]]
        # candidates that look alike to the selector are drawn alike
        assert (table.candidates[pool_rows] == table.candidates[table.pool[row][chosen[row]]]).all()
        right = scorer(torch.full((len(pool_rows),), row), pool_rows)["vqa_correct"]
        assert torch.equal(recorded.fields["vqa_correct"][row][draws[row]], right)


def test_the_kept_epoch_is_judged(tmp_path):
    """Not the last one."""
    config, data = run_of({"warm": {}}), data_of(*small_beams(60))
    SelectorStages(config, data, 0, tmp_path).all()
    before, decisions = selector.judge_run(config, data, tmp_path)
    seed = tmp_path / "checkpoints" / "seed0"
    for name in ("sft", "rce", "warm"):
        (seed / name / "last.pt").write_bytes((seed / "sft" / "epoch0.pt").read_bytes())
    again, decided_again = selector.judge_run(config, data, tmp_path)
    assert decisions.drop("decision_us").equals(decided_again.drop("decision_us"))
    for row in (*before["rows"], *again["rows"]):
        row.pop("decision_us_p50")
    assert before["rows"] == again["rows"]
    assert before["epochs"] == {"sft": [1], "rce": [1], "warm": [1]}
    assert {row["policy"] for row in before["votes"]} == {"sft", "rce", "warm"}


# -- runs that start from a checkpoint, through the command line -----------------------------------

TRAIN = words_of(
    "train",
    TABLE,
    "policy=independent seeds=[0] optimiser.warmup_iterations=0",
    "optimiser.iterations=9 policy.hidden=16 policy.dropout=0 baselines=false",
    "tracking=disabled optimiser.contexts=32 optimiser.evaluate_every=3",
)
START = "init_from=runs/controller/warm"
SFT = "checkpoints/seed0/sft/best.pt"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a profile, beams, a finished run of a controller, and the stages of a
    selector."""
    folder = tmp_path_factory.mktemp("starts")
    with chdir(folder):
        write_table()
        beams = small_beams(60)
        beams[0].save("b.safetensors")
        SelectorStages(run_of({"warm": {}}), data_of(*beams), 0, folder).all()
        launch(TRAIN, "optimiser.warmup_iterations=30 optimiser.iterations=0 name=warm")
    return folder


@pytest.fixture
def folder(made, monkeypatch):
    monkeypatch.chdir(made)
    return made


def state(path):
    return dict(load_checkpoint(path).agent.state_dict())


def interrupted(words, iteration, stage):
    """Run the command until Ctrl-C in this iteration of a stage, then again."""
    with ctrl_c_at(stage, iteration):
        assert main(words) == 130
    launch(words)


def test_grpo_alone_from_the_folder_of_a_run_also_after_an_interruption(folder):
    assert main([*TRAIN, START, "name=whole"]) == 0
    interrupted([*TRAIN, START, "name=killed"], 7, "GRPO")
    runs = [f"runs/controller/{name}" for name in ("whole", "killed")]
    for name in ("best.pt", "last.pt"):
        assert same(*(state(f"{run}/checkpoints/{name}") for run in runs))
    assert Path(runs[0], "metrics.csv").read_bytes() == Path(runs[1], "metrics.csv").read_bytes()
    start = load_checkpoint("runs/controller/warm/checkpoints/best.pt").network.state_dict()
    training = load_checkpoint(f"{runs[0]}/checkpoints/last.pt").extra["training"]
    assert same(training["reference"], start)
    results = read_json(Path(runs[0], "results.json"))
    training = {"warmup_iterations": 0, "iterations": 9, "method": "GRPO", "hidden": 16}
    assert results["training"] == training
    assert "grpo_gain" not in results  # without a warm-up there is nothing to compare with


def test_rce_and_grpo_from_an_sft_checkpoint_also_after_an_interruption(folder, tmp_path):
    data = data_of(*small_beams(60))
    config = run_of({"warm": {}, "blind": {"hidden": ["liar"]}}, init_from=SFT)
    config.sft = replace(STAGE, epochs=0)
    SelectorStages(config, data, 0, tmp_path / "whole").all()
    with ctrl_c_at("rce", 2), pytest.raises(KeyboardInterrupt):
        SelectorStages(config, data, 0, tmp_path / "killed").all()
    SelectorStages(config, data, 0, tmp_path / "killed").all()
    seeds = [tmp_path / name / "checkpoints" / "seed0" for name in ("whole", "killed")]
    start = state(SFT)
    assert same(start, state(f"{seeds[0]}/sft/best.pt"))
    reference = load_checkpoint(seeds[0] / "warm" / "last.pt").extra["training"]["reference"]
    assert same({f"selector.{name}": values for name, values in start.items()}, reference)
    for name in ("rce", "warm"):
        assert same(*(state(f"{seed}/{name}/last.pt") for seed in seeds))
    # what must not see a block does not start from weights that have seen it
    assert not same(start, state(f"{seeds[0]}/hidden_sft/best.pt"))
    # another start is another training
    config.init_from = str(seeds[0] / "warm" / "best.pt")
    with pytest.raises(InputError, match="was trained on other beams or with other settings"):
        SelectorStages(config, data, 0, tmp_path / "whole").all()


def test_supervised_fine_tuning_goes_on_where_the_checkpoint_ended(folder, tmp_path):
    SelectorStages(run_of({}, init_from=SFT), data_of(*small_beams(60)), 0, tmp_path).all()
    more = tmp_path / "checkpoints" / "seed0" / "sft"
    assert same(state(SFT), state(f"{more}/epoch0.pt"))
    assert not same(state(SFT), state(f"{more}/epoch1.pt"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*TRAIN, START, "policy.hidden=8"], "policy.hidden is 16"),
        ([*TRAIN, "init_from=nowhere/none.pt"], "nowhere/none.pt"),
        ([*TRAIN, START, "split.seed=5"], "test samples"),
        ([*REPLAY, START], "holds a controller"),
        ([*REPLAY, f"init_from={SFT}", "beams.split_seed=3"], "holds out"),
    ],
)
def test_what_differs_is_one_line_and_nothing_is_written(folder, words, message, capsys):
    assert message in refused([*words, "name=refused"], capsys)
