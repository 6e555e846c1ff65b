"""GRPO on a learned reward: true calls are counted, a control gains nothing, a stop changes
nothing."""

from dataclasses import replace

import pytest
import torch
from commands import same, stopped_and_resumed
from helpers import Lines, equal_states, small_beams

from knobwise.agents.selector.reward_model import RewardModel, recorded_answers
from knobwise.agents.selector.selector import Selector
from knobwise.agents.selector.settings import RewardModelConfig, SelectorConfig
from knobwise.agents.training.selector_trainer import SelectorTrainer
from knobwise.agents.training.settings import StageConfig
from knobwise.common.errors import InputError
from knobwise.envs.demonstrations.settings import DemonstrationRewardConfig

TINY = RewardModelConfig(width=16, members=3, calls=50)
SHORT = StageConfig(epochs=3, lr=3e-3, queries=8, keep="last")


def trainer(
    data,
    reward=TINY,
    shuffled=False,
    **settings,
):
    table, scorer = data
    split = table.split(0.8, 0.1)
    torch.manual_seed(0)
    start = Selector.fitted(SelectorConfig(width=16, heads=2), table.queries, table.candidates)
    model = RewardModel(reward, start.mean, start.scale)
    model.learn(table, recorded_answers(table, split.train), reward.epochs)
    options = {"scorer": scorer, "config": SHORT, "reward_model": model}
    options |= {"reward": DemonstrationRewardConfig(shuffled=shuffled)} | settings
    return SelectorTrainer("grpo", table, split, start, **options)


@pytest.mark.parametrize("calls", [0, 1, 50])
def test_true_calls_are_counted_exactly(calls):
    """The scorer answers what training asks, and judges the validation queries after each epoch;
    nothing else."""
    table, scorer = small_beams()
    answered, log = [], Lines()

    def counted(rows, sequences):
        answered.append(rows)
        return scorer(rows, sequences)

    student = trainer((table, scorer), replace(TINY, calls=calls), scorer=counted, log=log)
    student.run()
    validation = set(student.split.validation.tolist())
    training = [rows for rows in answered if not set(rows.tolist()) <= validation]
    assert sum(map(len, training)) == student.calls == calls
    assert sum(map(len, answered)) - calls == (SHORT.epochs + 1) * len(validation)
    assert log.values("Train/True_Calls") == [calls * epoch // 3 for epoch in (1, 2, 3)]
    assert not log.values("Train/Accuracy_Mean")
    assert student.reward_model is not None
    assert student.reward_model.answered is not None
    assert len(student.reward_model.answered.rows) == 4 * len(student.split.train) + calls


def test_the_learned_reward_teaches_and_the_shuffled_one_does_not():
    data = small_beams(300, seed=1)
    config, model = replace(SHORT, epochs=5, queries=16), replace(TINY, calls=300)
    learned = trainer(data, model, config=config)
    before, _ = learned._judge()
    learned.run()
    shuffled = trainer(data, model, config=config, shuffled=True)
    shuffled.run()
    assert learned.best["score"] > before + 0.15
    assert shuffled.best["score"] < before + 0.1


@pytest.mark.parametrize("stop", [4, 6])
def test_a_stop_changes_nothing(stop, tmp_path):
    """Neither in the iteration in which true calls were made, nor between two of them."""
    data = small_beams()
    both = stopped_and_resumed(lambda folder: trainer(data, folder=folder), tmp_path, stop)
    assert equal_states(*(each.agent for each in both))
    assert same(*(each.reward_model.state_dict() for each in both))
    assert [each.calls for each in both] == [TINY.calls] * 2


def test_another_learned_reward_is_another_training(tmp_path):
    data = small_beams()
    trainer(data, folder=tmp_path, config=replace(SHORT, epochs=1)).run()
    for other in (replace(TINY, members=2), replace(TINY, calls=10)):
        with pytest.raises(InputError, match="choose another name"):
            trainer(data, other, config=replace(SHORT, epochs=1)).resume(tmp_path / "last.pt")


def test_true_calls_need_a_scorer():
    data = small_beams()
    with pytest.raises(InputError, match=r"reward_model\.calls=50: true calls need a scorer"):
        trainer(data, scorer=None)
    recorded = trainer(data, replace(TINY, calls=0), scorer=None)
    recorded.run()
    assert recorded.calls == 0
