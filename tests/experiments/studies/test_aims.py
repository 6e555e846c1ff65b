"""docs/aims.md from made-up measurements, expected rewards by hand, and a measurement on few samples."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import small_table

from knobwise.agents.predictors.experts import Measured, Prediction
from knobwise.envs.configurations.reward import RewardTable
from knobwise.envs.configurations.settings import RewardConfig
from knobwise.experiments.studies import aims, decisions
from knobwise.experiments.studies.running import run_from_words


def test_the_page_counts_wins_by_hand() -> None:
    def cell(seed: int, grpo: float) -> dict[str, object]:
        policies = {aims.REGRESSION: 10.0, aims.GRPO: grpo + seed, aims.RULES[0]: 20.0, aims.RULES[1]: 30.0}
        return {"table": "t", "seed": seed, "rewards": dict.fromkeys(aims.AIMS, policies)}

    page = aims.aims_page([cell(seed, 21.0) for seed in (0, 0, 1, 1)])
    assert "- network, regression only: better by more than the interval on 3, worse on 0.\n" in page
    assert "- two stages, experts: better by more than the interval on 0, worse on 3.\n" in page
    assert "**None of these aims needs reinforcement.**" in page
    # 21 and 22 twice: mean 21.5, standard error .289, Student's t with three degrees of freedom 3.182
    assert "| late_answers | t | 10.0 ± 0.0 | 21.5 ± 0.9 | 20.0 ± 0.0 | 30.0 ± 0.0 | 11.5 ± 0.9 | 1.5 ± 0.9 |" in page
    page = aims.aims_page([cell(0, 40.0), cell(0, 40.0)])
    assert "GRPO is better than both rules for late_answers on t, worst_lateness on t, accuracy_floor on t.\n" in page


@pytest.mark.parametrize("graded", [False, True])
def test_the_expected_reward_is_that_of_the_closed_form_where_there_is_one(
    graded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    body = "return accuracy * (latency_ms <= budget_ms)"
    Path("aim_on_time.py").write_text(f"def f(accuracy, latency_ms, budget_ms, knobs):\n    {body}\n")
    table = small_table(30)
    table = replace(table, accuracy=table.accuracy * 0.5) if graded else table
    rewards = RewardTable(table, RewardConfig(kind="function", function="aim_on_time:f"))
    known = Measured.from_table(table, torch.arange(30), torch.tensor([8.0, 14.0]), 0)
    shape = table.accuracy.shape
    predicted = Prediction(torch.full(shape, 0.4), table.latency_ms.log(), torch.full(shape, 0.3))
    seen = predicted._replace(accuracy=table.accuracy)  # no residuals
    result = aims.expected(rewards, known, seen, predicted)
    wanted = torch.stack([predicted.expected_utility(limit.expand(30)) for limit in known.budgets_ms])
    torch.testing.assert_close(result, wanted, rtol=0, atol=0.4 / 40)


def test_every_policy_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def quick(verb: str, words: list[str]) -> object:
        settings = read(verb, [*words, "policy.members=2", "policy.hidden=8"])
        return replace(settings, optimiser=replace(settings.optimiser, warmup_iterations=2, iterations=1, contexts=16))

    read = aims.read_settings
    monkeypatch.setattr(aims, "read_settings", quick)
    monkeypatch.setattr(aims, "EXPERTS", ("ridge", "knn"))
    monkeypatch.setattr(decisions, "TEST_SAMPLES", 60)
    rewards = aims.measure("few_samples", 0)["rewards"]
    assert list(rewards) == list(aims.AIMS)
    assert all(set(each) == {aims.REGRESSION, aims.GRPO, *aims.RULES} for each in rewards.values())


def test_a_mistake_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_from_words("aims", aims.AimsConfig, aims.run, ["tables=[ruoter]"]) == 2
    assert "ruoter" in capsys.readouterr().err
