"""Rewards of demonstration sequences: every mode by hand, weights by length, adaptive weights, and
the control."""

import pytest
import torch
from helpers import close, identical, input_error
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cosine_similarity

from knobwise.envs import DemonstrationRewardConfig
from knobwise.envs.demonstrations.reward import (
    coherence_and_diversity,
    demonstration_reward,
    shuffle,
)
from knobwise.envs.demonstrations.settings import LEVELS, MODES

NAN = float("nan")
SIGNALS = {
    "beam_score": torch.tensor([0.05, -0.02, 0.3, NAN]),
    "logprob_score": torch.tensor([-0.2, -2.3, -0.7, NAN]),
    "vqa_correct": torch.tensor([1.0, 0.0, 1.0, NAN]),
    "vqa_acc_score": torch.tensor([0.9, 0.3, 0.6, NAN]),
    "vqa_gt_prob": torch.tensor([0.8, 0.1, 0.5, NAN]),
    "vqa_rel_score": torch.tensor([0.7, 0.4, 0.2, NAN]),
    "coherence": torch.tensor([0.5, 1.0, 0.0, NAN]),
    "diversity": torch.tensor([0.5, 0.0, 1.0, NAN]),
}
MASK = torch.tensor([True, True, True, False])
LENGTHS = torch.tensor([1, 2, 2, 0])


def rewards(fields=SIGNALS, mask=MASK, **settings):
    lengths = LENGTHS[: mask.shape[-1]]
    return demonstration_reward(fields, lengths, mask, DemonstrationRewardConfig(**settings))


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({}, [2.9, 0.3, 2.6]),
        ({"mode": "legacy"}, [0.05, -0.02, 0.3]),
        ({"mode": "legacy", "information": "logprob_score"}, [-0.2, -2.3, -0.7]),
        ({"mode": "legacy", "alpha": 0.5, "beta": 2.0}, [2.025, -0.01, 2.15]),
        ({"mode": "hard_plus_soft", "hard_weight": 2, "soft_weight": 0.5}, [2.45, 0.15, 2.3]),
        ({"mode": "hybrid"}, [0.975, -0.025, 1.15]),
        ({"mode": "hybrid", "alpha": 0.0, "hard_weight": 2.0, "soft_weight": 1.0}, [2.9, 0.3, 2.6]),
        ({"mode": "multi_level"}, [1.325, 0.53, 1.4]),
        (
            {"mode": "multi_level", "beam_weight": 0, "diversity_weight": 0, "coherence_weight": 1},
            [1.4, 1.3, 0.6],
        ),
        ({"mode": "hard_plus_soft", "by_shots": {2: {"hard_weight": 3.0}}}, [1.9, 0.3, 3.6]),
        (
            {
                "mode": "hard_plus_soft",
                "by_shots": {1: {"hard_weight": 0, "soft_weight": 2.0}, 9: {}},
            },
            [1.8, 0.3, 1.6],
        ),
        ({"mode": "hybrid", "by_shots": {2: {"alpha": 1.0}}}, [0.975, -0.2, 1.0]),
    ],
)
def test_every_mode_by_hand(config, wanted):
    reward = rewards(**config)
    assert reward.dtype == torch.float32
    close(reward, [*wanted, 0.0])


@pytest.mark.parametrize(
    ("config", "needs"),
    [
        ({}, ("vqa_correct", "vqa_acc_score")),
        ({"mode": "legacy"}, ("beam_score",)),
        ({"mode": "legacy", "information": "vqa_correct"}, ("vqa_correct",)),
        (
            {"mode": "legacy", "information": "logprob_score", "beta": 1.0},
            ("logprob_score", "vqa_correct"),
        ),
        ({"mode": "legacy", "by_shots": {3: {"beta": 1.0}}}, ("beam_score", "vqa_correct")),
        ({"mode": "hard_plus_soft", "soft_weight": 0.0}, ("vqa_correct",)),
        ({"mode": "hybrid"}, ("beam_score", "vqa_correct", "vqa_acc_score")),
        ({"mode": "multi_level", "task_weight": 0.0}, ("beam_score",)),
    ],
)
def test_a_mode_needs_what_it_is_made_of_and_nothing_else(config, needs):
    assert DemonstrationRewardConfig(**config).needs == needs
    rewards({name: SIGNALS[name] for name in (*needs, *LEVELS)}, **config)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("adaptive", [False, True])
def test_groups_of_one_and_of_none_are_finite_in_every_mode(mode, adaptive):
    fields = {name: x.expand(2, 4) for name, x in SIGNALS.items()}
    mask = torch.tensor([[True, False, False, False], [False] * 4])
    config = DemonstrationRewardConfig(mode, adaptive=adaptive)
    reward = demonstration_reward(fields, LENGTHS.expand(2, 4), mask, config)
    # nothing to compare with: the weights stay
    close(reward[0, 0], rewards(mode=mode)[0])
    assert not reward.flatten()[1:].any()


@pytest.mark.parametrize(
    ("correct", "accuracy", "config", "wanted"),
    [
        # all right: the soft accuracy gets both weights
        ([1.0, 1.0, 1.0], [0.9, 0.3, 0.6], {}, [1.8, 0.6, 1.2]),
        # all wrong, all alike: the weights stay
        ([0.0, 0.0, 0.0], [0.4, 0.4, 0.4], {}, [0.4, 0.4, 0.4]),
        # deviations .5 and .2 share 2 as 10/7 and 4/7
        ([1.0, 0.0], [0.6, 0.2], {}, [12.4 / 7, 0.8 / 7]),
        # 2·.5 and 1·.2 share 3 as 2.5 and .5
        ([1.0, 0.0], [0.6, 0.2], {"hard_weight": 2.0}, [2.8, 0.1]),
        # a weight of 0 stays 0
        ([1.0, 1.0], [0.6, 0.2], {"soft_weight": 0.0}, [1.0, 1.0]),
        # of one demonstration hard weighs 1·.5 beside .2, of two 3·.5 beside .2 of a sum of 4
        ([1.0, 0.0], [0.6, 0.2], {"by_shots": {2: {"hard_weight": 3.0}}}, [12.4 / 7, 0.16 / 1.7]),
    ],
)
def test_adaptive_weights_by_hand(correct, accuracy, config, wanted):
    fields = {
        "vqa_correct": torch.tensor([*correct, NAN]),
        "vqa_acc_score": torch.tensor([*accuracy, 7.0]),
    }
    mask = ~fields["vqa_correct"].isnan()
    reward = rewards(fields, mask, mode="hard_plus_soft", adaptive=True, **config)
    close(reward, [*wanted, 0.0])


def test_coherence_and_diversity_of_few_and_of_zeros():
    similar = [[1.0, 0.0], [3.0, 4.0], [9.0, 9.0]]  # cosine .6 of the first two
    with_zeros = [[0.0, 0.0], [3.0, 4.0], [3.0, 4.0]]  # zeros are like nothing
    embeddings = torch.tensor([similar, similar, similar, with_zeros])
    coherence, diversity = coherence_and_diversity(embeddings, torch.tensor([2, 1, 0, 3]))
    close(coherence, [0.6, 0.0, 0.0, 0.5])
    close(diversity, [0.4, 0.0, 0.0, 2 / 3])


@given(length=st.integers(2, 5), seed=st.integers(0, 99))
@settings(max_examples=20)
def test_coherence_and_diversity_are_those_of_the_pairs(length, seed):
    embeddings = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))
    coherence, diversity = coherence_and_diversity(embeddings, torch.tensor(length))
    shown = embeddings[:length]
    cosines = cosine_similarity(shown[:, None], shown[None], dim=-1)
    close(coherence, cosines.diagonal(1).mean())
    pairs = torch.triu_indices(length, length, 1)
    close(diversity, 1 - cosines[pairs[0], pairs[1]].mean())


@given(seed=st.integers(0, 99), mask=st.lists(st.booleans(), min_size=1, max_size=6))
@settings(max_examples=30)
def test_shuffling_permutes_what_exists(seed, mask):
    there = torch.tensor([mask, mask])
    reward = torch.arange(1.0, 2 * len(mask) + 1).reshape(2, -1) * there
    result, again = (shuffle(reward, there, torch.Generator().manual_seed(seed)) for _ in range(2))
    identical(result.sort(1).values, reward.sort(1).values)
    assert not result[~there].any()
    identical(result, again)


def test_every_permutation_is_as_likely():
    reward = torch.tensor([1.0, 2.0, 0.0, 3.0]).expand(12_000, 4)
    result = shuffle(reward, reward > 0, torch.Generator().manual_seed(0))
    permutations, counts = result.unique(dim=0, return_counts=True)
    assert len(permutations) == 6
    assert ((counts - 2000).abs() < 200).all()


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"mode": "hard"}, "mode"),
        ({"hard_weight": -1.0}, "hard_weight"),
        ({"mode": "hard_plus_soft", "alpha": 0.5}, "alpha"),
        ({"coherence_weight": 0.5}, "coherence_weight"),
        ({"mode": "legacy", "hard_weight": 1.0}, "hard_weight"),
        ({"mode": "legacy", "alpha": 0.0}, "legacy"),
        ({"mode": "hybrid", "alpha": 1.5}, "alpha"),
        ({"mode": "hybrid", "by_shots": {2: {"alpha": 2}}}, "by_shots.2.alpha"),
        ({"by_shots": {2: 3.0}}, "by_shots.2"),
        ({"by_shots": {2: {"hard_weight": "x"}}}, "by_shots.2.hard_weight"),
        ({"by_shots": {0: {}}}, "by_shots.0"),
        ({"by_shots": {2: {"luck": 3.0}}}, "by_shots.2.luck"),
        ({"by_shots": {2: {"hard_weight": 0, "soft_weight": 0}}}, "by_shots.2"),
        ({"information": "luck"}, "information"),
    ],
)
def test_settings_that_make_no_sense(config, field):
    with input_error(field):
        DemonstrationRewardConfig(**config)


@pytest.mark.parametrize(
    ("recorded", "mode"),
    [
        (("vqa_correct", "beam_score"), "hard_plus_soft_v2"),
        (("vqa_acc_score", "beam_score"), "hard_plus_soft_v2"),
        (("beam_score", "vqa_gt_prob"), "legacy"),
        (("logprob_score",), "hard_plus_soft_v2"),
    ],
)
def test_without_a_mode_the_recorded_fields_decide(recorded, mode):
    config = DemonstrationRewardConfig(shuffled=True)
    assert config.resolved(recorded) == DemonstrationRewardConfig(mode, shuffled=True)
    chosen = DemonstrationRewardConfig("hybrid")
    assert chosen.resolved(recorded) is chosen


def test_auto_takes_the_weights_of_the_mode_that_the_beams_make_of_it():
    scored = DemonstrationRewardConfig(alpha=25.0)
    assert scored.resolved({"beam_score"}).signals() == {"information": 25.0, "vqa_correct": 0.0}
    with input_error("reward.alpha"):
        scored.resolved({"beam_score", "vqa_correct", "vqa_acc_score"})
