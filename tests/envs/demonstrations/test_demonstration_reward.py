"""Rewards of demonstration sequences: every mode by hand, and the control."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import small_beams
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from knobwise.common.errors import InputError
from knobwise.envs.demonstrations.reward import demonstration_reward, shuffle
from knobwise.envs.demonstrations.settings import FIELDS, MODES, DemonstrationRewardConfig
from knobwise.envs.demonstrations.torchrl_env import DemonstrationBandit

NAN = float("nan")
RECORDED = {
    "beam_score": torch.tensor([0.05, -0.02, 0.3, NAN]),
    "logprob_score": torch.tensor([-0.2, -2.3, -0.7, NAN]),
    "vqa_correct": torch.tensor([1.0, 0.0, 1.0, NAN]),
    "vqa_acc_score": torch.tensor([0.9, 0.3, 0.6, NAN]),
    "vqa_gt_prob": torch.tensor([0.8, 0.1, 0.5, NAN]),
    "vqa_rel_score": torch.tensor([0.7, 0.4, 0.2, NAN]),
}
MASK = torch.tensor([True, True, True, False])


def rewards(fields: dict[str, Tensor] | None = None, mask: Tensor = MASK, **settings: Any) -> Tensor:
    fields = RECORDED if fields is None else fields
    return demonstration_reward(fields, mask, DemonstrationRewardConfig(**settings))


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({}, [2.9, 0.3, 2.6]),
        ({"mode": "legacy"}, [0.05, -0.02, 0.3]),
        ({"mode": "legacy", "information": "logprob_score"}, [-0.2, -2.3, -0.7]),
        ({"mode": "legacy", "information": "vqa_correct"}, [1.0, 0.0, 1.0]),
    ],
)
def test_every_mode_by_hand(config: dict[str, Any], wanted: list[float]) -> None:
    reward = rewards(**config)
    assert reward.dtype == torch.float32
    torch.testing.assert_close(reward, torch.tensor([*wanted, 0.0]))


def test_the_default_puts_every_right_answer_above_every_wrong_one() -> None:
    mask = torch.ones(11, dtype=torch.bool)
    for correct, low, high in ((1.0, 2.0, 3.0), (0.0, 0.0, 1.0)):
        fields = {"vqa_correct": torch.full((11,), correct), "vqa_acc_score": torch.linspace(0, 1, 11)}
        reward = demonstration_reward(fields, mask, DemonstrationRewardConfig())
        assert (float(reward.min()), float(reward.max())) == (low, high)


@pytest.mark.parametrize(
    ("config", "needs"),
    [
        ({}, ("vqa_correct", "vqa_acc_score")),
        ({"mode": "legacy"}, ("beam_score",)),
        ({"mode": "legacy", "information": "logprob_score"}, ("logprob_score",)),
        ({"mode": "legacy", "information": "vqa_correct"}, ("vqa_correct",)),
    ],
)
def test_a_mode_needs_what_it_is_made_of_and_nothing_else(config: dict[str, Any], needs: tuple[str, ...]) -> None:
    assert tuple(DemonstrationRewardConfig(**config).weights) == needs
    rewards({name: RECORDED[name] for name in needs}, **config)
    for missing in needs:
        left = {name: RECORDED[name] for name in FIELDS if name != missing}
        with pytest.raises(InputError, match=f"reward.mode={config.get('mode', 'hard_plus_soft_v2')}.*{missing}"):
            rewards(left, **config)


@pytest.mark.parametrize("mode", MODES)
def test_groups_of_one_and_of_none_are_finite_in_every_mode(mode: str) -> None:
    fields = {name: torch.stack([x, x]) for name, x in RECORDED.items()}
    mask = torch.tensor([[True, False, False, False], [False] * 4])
    reward = demonstration_reward(fields, mask, DemonstrationRewardConfig(mode))
    torch.testing.assert_close(reward[0, 0], rewards(mode=mode)[0])
    assert not reward[:, 1:].any()
    assert not reward[1].any()


@given(seed=st.integers(0, 99), mask=st.lists(st.booleans(), min_size=1, max_size=6))
@settings(max_examples=30, deadline=None)
def test_shuffling_permutes_what_exists(seed: int, mask: list[bool]) -> None:
    there = torch.tensor([mask, mask])
    reward = torch.arange(1.0, 2 * len(mask) + 1).reshape(2, -1) * there
    result = shuffle(reward, there, torch.Generator().manual_seed(seed))
    assert torch.equal(result.sort(1).values, reward.sort(1).values)
    assert not result[~there].any()
    assert torch.equal(result, shuffle(reward, there, torch.Generator().manual_seed(seed)))


def test_every_permutation_is_as_likely() -> None:
    reward, there = torch.tensor([1.0, 2.0, 0.0, 3.0]), torch.tensor([True, True, False, True])
    result = shuffle(reward.expand(12_000, 4), there.expand(12_000, 4), torch.Generator().manual_seed(0))
    permutations, counts = result.unique(dim=0, return_counts=True)
    assert len(permutations) == 6
    assert ((counts - 2000).abs() < 200).all()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"mode": "hard"}, "reward.mode='hard': must be one of auto, legacy, hard_plus_soft_v2"),
        ({"information": "luck"}, "reward.information='luck': must be one of beam_score, logprob_score, vqa_correct"),
    ],
)
def test_settings_that_make_no_sense(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        DemonstrationRewardConfig(**config)


@pytest.mark.parametrize(
    ("recorded", "mode"),
    [
        (("vqa_correct", "beam_score"), "hard_plus_soft_v2"),
        (("vqa_acc_score", "beam_score"), "hard_plus_soft_v2"),
        (("beam_score", "vqa_gt_prob"), "legacy"),
        (("logprob_score",), "hard_plus_soft_v2"),
        ((), "hard_plus_soft_v2"),
    ],
)
def test_without_a_mode_the_recorded_fields_decide(recorded: tuple[str, ...], mode: str) -> None:
    config = DemonstrationRewardConfig(shuffled=True)
    assert config.mode == "auto"
    assert config.resolved(recorded) == DemonstrationRewardConfig(mode, shuffled=True)
    chosen = DemonstrationRewardConfig("hard_plus_soft_v2")
    assert chosen.resolved(recorded) is chosen


def test_scores_alone_are_the_reward_of_an_environment_too() -> None:
    table, _ = small_beams(20)
    scores = replace(table, fields={"beam_score": table.fields["beam_score"]})
    env = DemonstrationBandit(scores, batch_size=20)
    assert env.reward_config.mode == "legacy"
    assert torch.equal(env.rewards[scores.beam_mask], scores.fields["beam_score"][scores.beam_mask])
    with pytest.raises(InputError, match=r"reward\.mode=hard_plus_soft_v2 needs vqa_correct, which"):
        DemonstrationBandit(scores, reward=DemonstrationRewardConfig("hard_plus_soft_v2"))
