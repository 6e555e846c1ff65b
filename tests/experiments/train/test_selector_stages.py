"""What the stages of the selector experiment start from, and what they learn from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Patch
from commands import same as same_state
from helpers import MatchScorer, small_beams

from knobwise.agents.checkpoint import load_checkpoint
from knobwise.agents.selector.selector import Selector
from knobwise.agents.selector.settings import SelectorConfig
from knobwise.agents.training.settings import StageConfig
from knobwise.envs.demonstrations.beam_table import POLICY, BeamTable
from knobwise.experiments.settings.beams import SelectorData
from knobwise.experiments.settings.selector_options import SelectorRun
from knobwise.experiments.settings.tracking import TrackingSettings
from knobwise.experiments.train import selector
from knobwise.experiments.train.selector import SelectorStages

STAGE = StageConfig(epochs=1, lr=1e-2, queries=16, keep="last")


def data_of(table: BeamTable, scorer: MatchScorer) -> SelectorData:
    split = table.split(0.8, 0.1)
    return SelectorData(table, split, scorer, table, split.test, scorer, None, "scorer")


def run_of(variants: dict[str, Any], **settings: Any) -> SelectorRun:
    return SelectorRun(
        beams=None,
        selector=SelectorConfig(width=16, heads=2),
        sft=STAGE,
        rce=STAGE,
        grpo=STAGE,
        variants=variants,
        seeds=[0],
        judged_shots=[2],
        tracking=TrackingSettings(mode="disabled", tensorboard=False),
        **settings,
    )


class Watched(selector.SelectorTrainer):
    """Writes down what each stage was given."""

    given: dict[str, dict[str, Any]] = {}

    def __init__(self, stage: str, table: BeamTable, split: Any, start: Selector, **settings: Any) -> None:
        name = settings["folder"].name
        self.given[name] = {"stage": stage, "table": table, "start": start, **settings}
        super().__init__(stage, table, split, start, **settings)


def same(first: Selector, second: Selector) -> bool:
    return same_state(dict(first.state_dict()), dict(second.state_dict()))


@pytest.fixture
def given(monkeypatch: Patch, tmp_path: Path) -> dict[str, dict[str, Any]]:
    variants = {
        "warm": {},
        "cold": {"warmup": False},
        "rounds": {"rounds": 2, "own_draws": 3},
        "live": {"live": True},
        "other": {"reward": {"mode": "hard_only"}},
        "hot": {"loss": {"temperature_end": 1.0}},
        "shuffled": {"reward": {"shuffled": True}},
    }
    monkeypatch.setattr(selector, "SelectorTrainer", Watched)
    Watched.given = {}
    SelectorStages(run_of(variants), data_of(*small_beams(60)), 0, tmp_path).all()
    return Watched.given


def test_what_the_stages_start_from(given: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    def last(name: str) -> Selector:
        return load_checkpoint(tmp_path / "checkpoints" / "seed0" / name / "best.pt").selector

    assert not same(last("sft"), last("rce"))
    assert same(given["rce"]["start"], last("sft"))
    for name in ("warm", "live", "shuffled", "rounds-1"):
        assert same(given[name]["start"], last("rce"))
    assert same(given["cold"]["start"], last("sft"))
    assert same(given["rounds"]["start"], last("rounds-1"))
    for name in ("other", "hot"):  # what RCE reads differs, so they have one of their own
        assert same(given[name]["start"], last(f"{name}-rce"))
        assert not same(given[name]["start"], last("rce"))
    for name in ("warm", "cold", "rounds", "live", "other"):  # the KL is to SFT
        assert same(given[name]["reference"], last("sft"))


def test_what_the_stages_learn_from(given: dict[str, dict[str, Any]]) -> None:
    assert given["sft"]["groups"].methods == ("beam",)
    assert not (given["sft"]["table"].found_by == POLICY).any()
    first, second = given["rounds-1"]["table"], given["rounds"]["table"]
    assert set(first.round.unique().tolist()) == {0, 1}
    assert set(second.round.unique().tolist()) == {0, 1, 2}
    assert given["rounds"]["groups"].rounds == 1
    assert "beam" not in given["warm"]["groups"].methods
    assert given["live"]["live"]


def test_own_draws_are_those_of_the_selector(tmp_path: Path) -> None:
    table, scorer = small_beams(30)
    torch.manual_seed(0)
    stages = SelectorStages(run_of({}), data_of(table, scorer), 0, tmp_path)
    sharp = Selector.fitted(SelectorConfig(width=16, heads=2, temperature=1e-4), table.queries, table.candidates)
    found = stages.recorded(table, sharp, 3, 1)
    own = found.found_by == POLICY
    chosen = sharp.choose(table.queries, table.candidates[table.pool], table.pool_mask, 2)
    for row in range(30):
        # candidates that look alike to the selector are drawn alike
        shown, wanted = (table.candidates[table.pool[row][places]] for places in (found.sequences[row], chosen[row]))
        assert (shown[own[row]] == wanted).all()
        pool_rows = table.pool[row][found.sequences[row][own[row]]]
        right = scorer(torch.full((len(pool_rows),), row), pool_rows)["vqa_correct"]
        assert torch.equal(found.fields["vqa_correct"][row][own[row]], right)


def test_the_kept_epoch_is_judged(tmp_path: Path) -> None:
    """Not the last one."""
    config, data = run_of({"warm": {}}), data_of(*small_beams(60))
    SelectorStages(config, data, 0, tmp_path).all()
    before, decisions = selector.judge_run(config, data, tmp_path)
    other = tmp_path / "checkpoints" / "seed0"
    for name in ("sft", "rce", "warm"):
        (other / name / "last.pt").write_bytes((other / "sft" / "epoch0.pt").read_bytes())
    again, decided_again = selector.judge_run(config, data, tmp_path)
    assert decisions.drop("decision_us").equals(decided_again.drop("decision_us"))
    times = ("decision_us_p50",)
    assert [{k: v for k, v in row.items() if k not in times} for row in before["rows"]] == [
        {k: v for k, v in row.items() if k not in times} for row in again["rows"]
    ]
    assert before["epochs"] == {"sft": [1], "rce": [1], "warm": [1]}
    assert {row["policy"] for row in before["votes"]} == {"sft", "rce", "warm"}
