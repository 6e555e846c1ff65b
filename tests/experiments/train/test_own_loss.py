"""Losses of the user's own, from the command line and from Python."""

import shlex
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from commands import (
    TABLE,
    UNTAUGHT,
    ctrl_c,
    launch,
    read_json,
    refused,
    stopped_and_resumed,
    words_of,
    write_table,
)
from helpers import BRIEF, equal_states, small_table

import knobwise
from knobwise.__main__ import main
from knobwise.agents import PolicyConfig, load_checkpoint
from knobwise.agents.training.controllers import controller_trainer
from knobwise.common.errors import InputError
from knobwise.losses.settings import LossConfig

RUN = words_of(
    "train experiment=lean baselines=false", TABLE, UNTAUGHT, "seeds=[0] policy=independent"
)
OWN = """
import torch
from tensordict import TensorDict
from torch import nn
from knobwise.losses import ExactGRPOLoss, GRPOLoss

class Same(GRPOLoss):
    pass

class SameExact(ExactGRPOLoss):
    pass

class Plain(nn.Module):
    def __init__(self, actor):
        super().__init__()
        self.actor = actor

    def log_prob(self, contexts):
        return self.actor.get_dist(contexts).log_prob_of_index(contexts["configuration"])

    def forward(self, contexts):
        return {"loss_objective": -self.log_prob(contexts).mean()}

class Mine(Plain):
    def forward(self, contexts):
        return {"loss_mine": -self.log_prob(contexts).mean(), "mine": torch.tensor(3.0)}

class Raises(Plain):
    def forward(self, contexts):
        raise RuntimeError("boo")

class OfActions(Plain):
    def log_prob(self, contexts):
        return self.actor.get_dist(contexts).log_prob_of_index(contexts["action"])

class NoLoss(Plain):
    def forward(self, contexts):
        return TensorDict({"entropy": self.log_prob(contexts).mean()})

class NotANumber(Plain):
    def forward(self, contexts):
        return {"loss_objective": self.log_prob(contexts).mean() * torch.nan}

class Wide(Plain):
    def forward(self, contexts):
        return {"loss_objective": self.log_prob(contexts)}

class OfNothing(Plain):
    def forward(self, contexts):
        return {"loss_objective": contexts["next", "reward"].mean()}

class OfItself(Plain):
    def __init__(self, actor):
        super().__init__(actor)
        self.own = nn.Parameter(torch.ones(()))

    def forward(self, contexts):
        return {"loss_objective": 2 * self.own}

class Keeps(Plain):
    def __init__(self, actor):
        super().__init__(actor)
        self.register_buffer("mean", torch.zeros(()))
        self.baseline = nn.Linear(1, 1)

    def forward(self, contexts):
        reward = contexts["next", "reward"]
        with torch.no_grad():
            self.mean.lerp_(reward.mean(), 0.05)
        expected = self.baseline(torch.ones(1))
        gain = reward - (self.mean + expected.detach()) / 2
        return {
            "loss_mine": -(gain * self.log_prob(contexts)).mean(),
            "loss_value": (reward - expected).square().mean(),
        }

class Grows(Plain):
    def forward(self, contexts):
        self.register_buffer("later", torch.ones(3))
        return super().forward(contexts)

class Text(Plain):
    def forward(self, contexts):
        return "loss"

class Signature:
    def __init__(self):
        pass

class NoModule:
    def __init__(self, actor):
        pass
"""
BOO = OWN.splitlines().index('        raise RuntimeError("boo")') + 1
CISPO = "loss=examples.losses:CISPOLoss"


@pytest.fixture
def table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_table()
    Path("own_losses.py").write_text(OWN)
    yield
    # the next test imports it anew, from its own folder
    sys.modules.pop("own_losses", None)


def last_weights(name):
    return load_checkpoint(f"runs/lean/{name}/checkpoints/seed0/last.pt").network.state_dict()


def test_a_loss_of_ones_own_trains_and_is_named(table):
    launch(RUN, CISPO, "loss.settings={most:2} name=own")
    launch(RUN, "loss=sampled name=grpo")
    training = read_json("runs/lean/own/results.json")["training"]
    assert training["method"] == "CISPOLoss"
    assert training["loss"] == "examples.losses:CISPOLoss"
    assert training["loss_settings"] == {"most": 2}
    assert "loss" not in read_json("runs/lean/grpo/results.json")["training"]
    assert "objective: examples.losses:CISPOLoss" in Path("runs/lean/own/config.yaml").read_text()
    # its diagnostic has the name of one that is logged
    assert "Train/Ratio_Mean" in Path("runs/lean/own/metrics.csv").read_text()
    launch("evaluate baselines=false json=again.json checkpoint=runs/lean/own")
    assert read_json("again.json")["training"] == {"method": "CISPOLoss"}
    # what was trained needs none of the code
    policy = knobwise.load("runs/lean/own")
    features = {name: np.zeros(width) for name, width in policy.features.items()}
    assert policy.decide(features, 20.0) in policy.configurations


def trained_by(name, folder):
    """A training by this loss, in a folder."""
    profile = small_table(60)
    return controller_trainer(
        profile,
        profile.split(),
        folder=folder,
        policy=PolicyConfig(hidden=8),
        loss=LossConfig(objective=f"own_losses:{name}", group_size=4),
        optimiser=replace(BRIEF, pretrain_iterations=0, iterations=8, evaluate_every=2),
    )


def test_what_a_loss_keeps_learns_along_and_is_saved(table, tmp_path):
    fresh = trained_by("Keeps", None).stages[-1].grpo
    # it has a running mean, and a baseline that learns; a trial leaves no trace in them
    assert float(fresh.mean) == 0
    trainers = stopped_and_resumed(lambda folder: trained_by("Keeps", folder), tmp_path, 5)
    whole, again = (trainer.stages[-1].grpo for trainer in trainers)
    for name, values in whole.state_dict().items():
        assert torch.equal(values, again.state_dict()[name]), name
    assert float(whole.mean) != 0
    for part in ("weight", "bias"):
        assert not torch.equal(getattr(whole.baseline, part), getattr(fresh.baseline, part))
    assert equal_states(*(trainer.agent for trainer in trainers))


def test_what_a_loss_registers_later_cannot_be_resumed(table, tmp_path):
    trained_by("Grows", tmp_path).run()
    with pytest.raises(InputError, match=r"own_losses:Grows: later"):
        trained_by("Grows", tmp_path).resume(tmp_path / "last.pt")


def test_all_numbers_that_it_returns_are_logged(table):
    launch(RUN, "loss=own_losses:Mine name=mine")
    logged = pl.read_csv("runs/lean/mine/metrics.csv").drop_nulls("Train/mine")
    assert set(logged["Train/mine"]) == {3.0}
    assert logged["Train/loss_mine"].is_finite().all()


@pytest.mark.parametrize(("own", "ours"), [("Same", "sampled"), ("SameExact", "exact")])
def test_a_subclass_that_changes_nothing_learns_the_same(table, own, ours):
    launch(RUN, f"loss=own_losses:{own} name=own loss.kl_to_ref_coeff=0.1")
    launch(RUN, f"loss={ours} name=ours loss.kl_to_ref_coeff=0.1")
    for name, values in last_weights("own").items():
        assert torch.equal(values, last_weights("ours")[name])


def stop(*parts):
    """Begin a run, and press Ctrl-C in its ninth iteration."""
    with ctrl_c(lambda trainer: trainer.state.iteration == 9):
        assert main(words_of(*parts)) == 130


def test_a_training_with_it_goes_on_as_if_it_had_not_stopped(table):
    launch(RUN, CISPO, "name=whole")
    stop(RUN, CISPO, "name=stopped")
    launch(RUN, CISPO, "name=stopped")
    for name, values in last_weights("whole").items():
        assert torch.equal(values, last_weights("stopped")[name])


def test_a_run_with_another_loss_is_another_run(table):
    stop(RUN, CISPO, "name=x")
    launch(RUN, CISPO, "loss.settings={most:3} name=x")
    assert read_json("runs/lean/x-2/results.json")["training"]["loss_settings"] == {"most": 3}


def test_a_sweep_is_named_by_what_it_sweeps_and_its_commands_can_be_repeated(table):
    launch("train -m", RUN[1:], CISPO, "loss.settings={most:2},{most:3}")
    for most in (2, 3):
        (folder,) = Path("runs/lean").glob(f"*most-{most}*")
        assert "CISPO" not in folder.name
        assert CISPO in shlex.split(read_json(folder / "results.json")["command"])


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("loss=own_losses:Raises", f"RuntimeError: boo (own_losses.py, line {BOO})"),
        ("loss=own_losses:OfActions", "action"),
        ("loss=own_losses:Signature", "making one raises TypeError"),
        ("loss=own_losses:NoLoss", "entropy"),
        ("loss=own_losses:NotANumber", "loss_objective is nan"),
        ("loss=own_losses:Wide", "loss_objective"),
        ("loss=own_losses:OfNothing", "gradient"),
        ("loss=own_losses:OfItself", "gradient"),
        ("loss=own_losses:Text", "str"),
        ("loss=own_losses:NoModule", "NoModule"),
        ("loss=own_losses:Absent", "Absent"),
        ("loss=absent:Loss", "absent"),
        ("loss=own_losses:Plain loss.settings={a:1}", "loss.settings"),
        ("loss=sampled loss.settings={a:1}", "loss.settings"),
        (f"{CISPO} loss.clip_epsilon=0.3", "loss.clip_epsilon=0.3"),
        (f"{CISPO} loss.kl_band=[0.1,0.2]", "loss.kl_band"),
    ],
)
def test_what_is_refused_before_anything_is_written(table, capsys, words, part):
    line = refused([*RUN, *words.split()], capsys)
    assert part in line
    assert not Path("runs").exists()


def test_from_python(table):
    options = {
        "experiment": "lean",
        "policy": "independent",
        "optimiser": {"pretrain_iterations": 4, "iterations": 4, "contexts": 32},
    }
    policy = knobwise.fit("t.parquet", "f.npz", loss="examples.losses:CISPOLoss", **options)
    assert policy.judged["training"]["loss"] == "examples.losses:CISPOLoss"
    with pytest.raises(InputError, match="loss"):
        knobwise.fit("t.parquet", "f.npz", loss="examples", **options)
