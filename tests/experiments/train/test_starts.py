"""What runs and their stages start from, and what they learn from."""

import shutil
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

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
    selector_trainers,
    words_of,
    write_table,
)
from helpers import equal_states, input_error, small_beams
from polars.testing import assert_frame_equal

from knobwise.__main__ import main
from knobwise.agents.selector.selector import Selector
from knobwise.agents.selector.settings import SelectorConfig
from knobwise.agents.training.checkpoint import load_checkpoint
from knobwise.agents.training.settings import StageConfig
from knobwise.envs.demonstrations.beam_table import POLICY
from knobwise.envs.demonstrations.torchrl_env import recorded_groups
from knobwise.experiments.settings.beams import SelectorData, trained_on
from knobwise.experiments.settings.selector_options import SelectorRun
from knobwise.experiments.settings.tracking import TrackingSettings
from knobwise.experiments.train import selector
from knobwise.experiments.train.selector import SeedRun, train_graph

STAGE = StageConfig(epochs=1, lr=1e-2, queries=16, keep="last")


def data_of(table, scorer):
    split = table.split(0.8, 0.1)
    return SelectorData(table, split, scorer, table, split.test, scorer, None, "scorer")


def run_of(variants, **settings):
    quick = {"selector": SelectorConfig(width=16, heads=2), "shots": 2, "judged_shots": [2]}
    quick |= dict.fromkeys(("sft", "rce", "grpo"), STAGE)
    tracking = TrackingSettings(mode="disabled", tensorboard=False)
    return SelectorRun(variants=variants, seeds=[0], tracking=tracking, **quick, **settings)


def test_what_the_stages_start_and_learn_from(monkeypatch, tmp_path):
    variants = {
        "warm": {},
        "cold": {"warmup": False},
        "rounds": {"rounds": 2, "own_draws": 3},
        "live": {"live": True},
        "other": {"reward": {"mode": "legacy"}},
        "shuffled": {"reward": {"shuffled": True}},
    }
    trainer = Mock(side_effect=selector.selector_trainer)
    monkeypatch.setattr(selector, "selector_trainer", trainer)
    train_graph(SeedRun(run_of(variants), data_of(*small_beams(60)), 0, tmp_path))
    last, starts, tables, settings = {}, {}, {}, {}
    for call in trainer.call_args_list:
        folder = call.kwargs["folder"]
        last[folder.name] = load_checkpoint(folder / "best.pt").selector
        _, tables[folder.name], _, starts[folder.name] = call.args
        settings[folder.name] = call.kwargs
    assert not equal_states(last["sft"], last["rce"])
    before = {"rce": "sft", "cold": "sft", "rounds": "rounds-1"}
    before |= dict.fromkeys(("warm", "live", "shuffled", "rounds-1"), "rce")
    # what RCE reads differs, so this has an RCE stage for itself
    before["other"] = "other-rce"
    for name, start in before.items():
        assert equal_states(starts[name], last[start])
    assert not equal_states(starts["other"], last["rce"])
    for name in ("warm", "cold", "rounds", "live", "other"):  # the KL is to SFT
        assert equal_states(settings[name]["reference"], last["sft"])

    assert settings["sft"]["groups"].methods == "beams"
    assert not (tables["sft"].found_by == POLICY).any()
    assert tables["rounds-1"].round.unique().tolist() == [0, 1]
    assert tables["rounds"].round.unique().tolist() == [0, 1, 2]
    assert settings["rounds"]["groups"].rounds == 1
    assert settings["warm"]["groups"].methods == "without_beams"
    assert settings["live"]["live"]


def test_own_draws_are_learned_from_also_where_the_beams_hold_rounds(monkeypatch, tmp_path):
    """They are the latest, not those that another policy left in the file."""
    table, scorer = small_beams(60)
    rows = torch.arange(60)
    places = torch.tensor([[0, 1]]).expand(60, 1, 2)
    for number in (1, 2):
        scores = scorer(rows, table.pool[rows.unsqueeze(1), places[:, 0]])
        scores = {name: values.unsqueeze(1) for name, values in scores.items()}
        table = table.with_beams(places, scores, POLICY, number)
    trainer = Mock(side_effect=selector.selector_trainer)
    monkeypatch.setattr(selector, "selector_trainer", trainer)
    variants = {"rounds": {"rounds": 2, "own_draws": 3, "groups": "own"}}
    train_graph(SeedRun(run_of(variants), data_of(table, scorer), 0, tmp_path))
    for call, latest in zip(trainer.call_args_list[-2:], (3, 4), strict=True):
        group = recorded_groups(call.args[1], call.kwargs["groups"])
        assert group.round[group.found_by == POLICY].unique().tolist() == [latest]
        assert group.num_beams == 3


def test_own_draws_are_those_of_the_selector(tmp_path):
    table, scorer = small_beams(30)
    stages = SeedRun(run_of({}), data_of(table, scorer), 0, tmp_path)
    config = SelectorConfig(width=16, heads=2, temperature=1e-4)
    sharp = Selector.fitted(config, table.queries, table.candidates)
    recorded = stages.recorded(table, sharp, 3, 1)
    candidates = table.candidates[table.pool]
    chosen = sharp.choose(table.queries, candidates, table.pool_mask, 2)
    for row, drawn in enumerate(recorded.found_by == POLICY):
        places = recorded.sequences[row][drawn]
        # candidates that look alike to the selector are drawn alike
        assert (candidates[row][places] == candidates[row][chosen[row]]).all()
        right = scorer(torch.full_like(places[:, 0], row), table.pool[row][places])["vqa_correct"]
        assert torch.equal(recorded.fields["vqa_correct"][row][drawn], right)


def test_the_kept_epoch_is_judged(tmp_path):
    """Not the last one."""
    config, data = run_of({"warm": {}}), data_of(*small_beams(60))
    train_graph(SeedRun(config, data, 0, tmp_path))
    before, decisions = selector.judge_selectors(config, data, tmp_path)
    epochs = {"sft": [1], "rce": [1], "warm": [1]}
    assert before["epochs"] == epochs
    assert {row["policy"] for row in before["votes"]} == epochs.keys()
    seed = tmp_path / "checkpoints" / "seed0"
    for name in epochs:
        shutil.copy(seed / "sft" / "epoch0.pt", seed / name / "last.pt")
    again, decided_again = selector.judge_selectors(config, data, tmp_path)
    assert_frame_equal(decisions.drop("decision_us"), decided_again.drop("decision_us"))
    for row in (*before["rows"], *again["rows"]):
        del row["decision_us_p50"]
    assert before["rows"] == again["rows"]


def test_queries_that_a_selector_was_trained_on_are_known_in_other_beams(tmp_path, monkeypatch):
    """Under other ids in a table of another name, also where parts of them were hidden."""
    table, scorer = small_beams(40)
    # every query has an embedding of its own
    table = replace(table, queries=table.queries + torch.arange(40.0).unsqueeze(1) / 1000)
    data = data_of(table, scorer)
    train_graph(SeedRun(run_of({"blind": {"hidden": ["liar"]}}), data, 0, tmp_path / "first"))
    fitted = torch.ones(40, dtype=torch.bool)
    fitted[data.split.test] = False
    names = tuple(f"query {i}" for i in range(40))
    renamed = replace(table, name="other", query_ids=names)
    seed = tmp_path / "first" / "checkpoints" / "seed0"
    for name in ("sft", "hidden_sft", "blind"):
        loaded = load_checkpoint(seed / name / "best.pt")
        for beams in (table, renamed, replace(renamed, query_ids=table.query_ids)):
            assert torch.equal(trained_on(loaded, beams), fitted)
        # other queries under other ids
        assert not trained_on(loaded, replace(renamed, queries=table.queries + 1)).any()
        # as it was before there were fingerprints: by id, where the name is the same
        del loaded.extra["seen"]
        assert not trained_on(loaded, renamed).any()
        assert torch.equal(trained_on(loaded, replace(table, queries=table.queries + 1)), fitted)
    # nothing starts from what it holds out, and what went before is noted
    start = str(seed / "sft" / "best.pt")
    held_out = data_of(renamed, scorer)._replace(split=renamed.split(0.8, 0.1, seed=3))
    with input_error("holds out"):
        train_graph(SeedRun(run_of({}, init_from=start), held_out, 0, tmp_path / "second"))
    others = replace(renamed, queries=table.queries + 1)
    train_graph(
        SeedRun(run_of({}, init_from=start), data_of(others, scorer), 0, tmp_path / "third")
    )
    again = load_checkpoint(tmp_path / "third" / "checkpoints" / "seed0" / "rce" / "best.pt")
    assert torch.equal(trained_on(again, renamed), fitted)
    # nor is it judged on them
    monkeypatch.chdir(tmp_path)
    renamed.save("renamed.safetensors")
    words = "beams=files beams.path=renamed.safetensors beams.train=0.3 judged_shots=[2]"
    launch("evaluate", f"checkpoint={start}", words_of(words), "json=judged.json")
    judged = {*renamed.split(0.3, 0.1).test.tolist()} & {*data.split.test.tolist()}
    assert read_json("judged.json")["test_queries"] == len(judged) == 4


# -- runs that start from a checkpoint, through the command line -----------------------------------

TRAIN = words_of(
    "train",
    TABLE,
    "policy=independent seeds=[0] optimiser.pretrain_iterations=0",
    "optimiser.iterations=9 policy.hidden=16 policy.dropout=0 baselines=false",
    "tracking=disabled optimiser.contexts=32 optimiser.evaluate_every=3",
)
START = "init_from=runs/controller/warm"
SFT = "checkpoints/seed0/sft/best.pt"


@pytest.fixture(scope="module", autouse=True)
def _made(tmp_path_factory):
    """Work in a folder with a profile, beams, a finished run of a controller, and the stages of a
    selector."""
    with chdir(tmp_path_factory.mktemp("starts")):
        write_table()
        beams = small_beams(60)
        beams[0].save("b.safetensors")
        train_graph(SeedRun(run_of({"warm": {}}), data_of(*beams), 0, Path()))
        launch(TRAIN, "optimiser.pretrain_iterations=30 optimiser.iterations=0 name=warm")
        yield


def state(path):
    return dict(load_checkpoint(path).agent.state_dict())


def test_grpo_alone_from_the_folder_of_a_run_also_after_an_interruption():
    launch(TRAIN, START, "name=whole")
    killed = [*TRAIN, START, "name=killed"]
    with ctrl_c_at("GRPO", 7):
        assert main(killed) == 130
    launch(killed)
    runs = [Path("runs/controller", name) for name in ("whole", "killed")]
    for name in ("best.pt", "last.pt"):
        assert same(*(state(run / "checkpoints" / name) for run in runs))
    whole, again = ((run / "metrics.csv").read_bytes() for run in runs)
    assert whole == again
    start = load_checkpoint("runs/controller/warm/checkpoints/best.pt").network.state_dict()
    training = load_checkpoint(runs[0] / "checkpoints" / "last.pt").extra["training"]
    assert same(training["stages"][-1]["reference"], start)
    results = read_json(runs[0] / "results.json")
    training = {"warmup_iterations": 0, "iterations": 9, "method": "GRPO", "hidden": 16}
    training |= {"patience": 24, "ended_at": [9]}
    assert results["training"] == training
    assert "grpo_gain" not in results  # without a warm-up there is nothing to compare with


def test_rce_and_grpo_from_an_sft_checkpoint_also_after_an_interruption(tmp_path):
    config = run_of({"warm": {}, "blind": {"hidden": ["liar"]}}, init_from=SFT)
    config.sft = replace(STAGE, epochs=0)

    def train(name):
        train_graph(SeedRun(config, data_of(*small_beams(60)), 0, tmp_path / name))
        return tmp_path / name / "checkpoints" / "seed0"

    with ctrl_c_at("rce", 2), pytest.raises(KeyboardInterrupt):
        train("killed")
    killed = train("killed")
    with selector_trainers() as trainers:
        whole = train("whole")
    start = state(SFT)
    assert same(start, state(whole / "sft" / "best.pt"))
    reference = trainers["warm"].setup.reference.selector
    assert same(start, dict(reference.state_dict()))
    for name in ("rce", "warm"):
        assert same(*(state(seed / name / "last.pt") for seed in (whole, killed)))
    # what must not see a block does not start from weights that have seen it
    assert not same(start, state(whole / "hidden_sft" / "best.pt"))
    # another start is another training
    config.init_from = str(whole / "warm" / "best.pt")
    with input_error("last.pt"):
        train("whole")


def test_supervised_fine_tuning_goes_on_where_the_checkpoint_ended(tmp_path):
    train_graph(SeedRun(run_of({}, init_from=SFT), data_of(*small_beams(60)), 0, tmp_path))
    more = tmp_path / "checkpoints" / "seed0" / "sft"
    assert same(state(SFT), state(more / "epoch0.pt"))
    assert not same(state(SFT), state(more / "epoch1.pt"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*TRAIN, START, "policy.hidden=8"], "policy.hidden=16"),
        ([*TRAIN, "init_from=nowhere/none.pt"], "nowhere/none.pt"),
        ([*TRAIN, START, "split.seed=5"], "test samples"),
        ([*REPLAY, START], "holds a controller"),
        ([*REPLAY, f"init_from={SFT}", "beams.split_seed=3"], "holds out"),
    ],
)
def test_what_differs_is_one_line_and_nothing_is_written(words, message, capsys):
    assert message in refused([*words, "name=refused"], capsys)
