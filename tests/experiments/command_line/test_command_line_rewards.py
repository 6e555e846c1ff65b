"""A reward that the user wrote, from the command line to the column of rewards; mistakes before
anything is written."""

import sys
from pathlib import Path

import pytest
from commands import OPTIMISER, TABLE, launch, read_json, refused, words_of, write_table
from omegaconf import OmegaConf
from page_parts import said
from wandb_stub import forget_wandb, offline_runs

from knobwise.experiments.report.verdict import shown_by_run

TRAIN = words_of(
    "train", TABLE, OPTIMISER, "policy=utility policy.fold_networks=2 seeds=[0] reward=function"
)
MODULE = """
def fastest(accuracy, latency_ms, budget_ms, knobs):
    return 3 - latency_ms / budget_ms
"""


@pytest.fixture
def _folder(home, monkeypatch):
    """A folder with a table, and the module `my_rewards` in it."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    write_table()
    Path("my_rewards.py").write_text(MODULE)


@pytest.mark.usefixtures("_folder")
def test_a_run_is_trained_on_it_and_both_verbs_judge_by_it():
    words = words_of("reward=function reward.function=my_rewards:fastest own_cost=false")
    words.append("baselines=false")
    launch(TRAIN, words, "name=x")
    run = Path("runs/controller/x")
    assert OmegaConf.load(run / "config.yaml").reward.function == "my_rewards:fastest"
    trained = read_json(run / "results.json")
    for row in trained["rows"]:
        if row["budget_ms"] is not None and row["policy"] == "budget_aware_static":
            expected = 3 - row["latency_ms_mean"] / row["budget_ms"]
            assert row["reward"] == pytest.approx(expected, abs=1e-3)
    launch("evaluate", TABLE, words, "json=again.json")
    again = read_json("again.json")
    rewards = [
        {(r["policy"], r["budget_ms"]): r["reward"] for r in each["rows"]}
        for each in (trained, again)
    ]
    assert rewards[0] == pytest.approx(rewards[1])


@pytest.mark.usefixtures("_folder")
def test_what_its_training_gained_is_a_reward_and_not_a_utility(home, monkeypatch):
    """Under every name, in the numbers and in words."""
    forget_wandb(monkeypatch, home)
    words = "reward.function=my_rewards:fastest optimiser.teacher_iterations=1 baselines=false"
    launch(
        TRAIN, words, "optimiser.pretrain_iterations=1 optimiser.lr=0.05 tracking=offline name=x"
    )
    run = Path("runs/controller/x")
    trained = read_json(run / "results.json")
    assert "validation_utility" not in trained
    # 3 less the share of the budget that was used: more than a utility can be
    (score,) = trained["validation_reward"]
    assert score > 1
    summary = offline_runs(run)[-1].summary
    assert summary["Val/Reward_Mean"] == pytest.approx(score)
    assert "Val/Utility" not in summary
    # sample by sample, what was gained on the test part
    gain = trained["grpo_gain"]
    # means of float32
    start = trained["chosen"][0]["grpo"]["start"]
    assert gain["held_out"] == pytest.approx(score - start, abs=1e-6)
    assert gain["test"] > 0.1
    raised = said(shown_by_run(trained))["raised"]
    assert (raised["method"], raised["score"]) == ("GRPO", "reward")
    assert raised["gains"].startswith(f"+{gain['test']:.3g} [")
    assert "points" not in raised["gains"]
    launch("evaluate", TABLE, words.split()[0], "reward=function json=again.json baselines=false")
    again = read_json("again.json")
    assert again["validation_reward"] == [score]
    # the policy before GRPO is not judged again
    optimistic = said(shown_by_run(again))["optimistic"]
    assert optimistic["gain"].startswith(f"+{gain['held_out']:.3g} [")
    assert "points" not in optimistic["gain"]


MISTAKES = {
    "reward.function=your_rewards:fastest": "your_rewards",
    "reward.function=math:pi": "pi",
    "reward.function=fastest": "module:name",
    "": "reward.function=module:name",
    "reward=utility reward.function=my_rewards:fastest": "reward.function=module:name",
    "reward.function=my_rewards:fastest policy=auto": "experts",
    "reward.function=my_rewards:fastest budget=mean": "budget=mean",
}


@pytest.mark.usefixtures("_folder")
@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_a_line_and_nothing_is_written(words, capsys):
    assert MISTAKES[words] in refused([*TRAIN, *words.split()], capsys)
