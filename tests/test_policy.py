from __future__ import annotations

import math

import pytest
import torch
from helpers import small_table
from tensordict import TensorDict
from torch import Tensor
from torchrl.envs.utils import ExplorationType, set_exploration_type

from knobwise.agents.heads import HEADS
from knobwise.agents.policy import ConfigurationCategorical, Controller, make_actor
from knobwise.agents.settings import PolicyConfig
from knobwise.envs.bandit import ConfigBandit
from knobwise.envs.errors import InputError
from knobwise.envs.table import ProfileTable

SOME = torch.tensor([[0, 0], [0, 1], [2, 1]])  # (1, ·), (2, 0) and (0, 2) do not exist


def distribution(
    *shape: int, group_size: int | None = None, configurations: Tensor = SOME, seed: int = 0
) -> ConfigurationCategorical:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(*shape, len(configurations), generator=generator)
    return ConfigurationCategorical(logits, configurations, group_size)


def small_controller(table: ProfileTable, head: str = "additive", dropout: float = 0.1) -> Controller:
    torch.manual_seed(0)
    config = PolicyConfig(head=head, hidden=16, dropout=dropout)
    return Controller.for_table(table, torch.arange(table.num_samples), config)


def contexts(table: ProfileTable, count: int = 20, seed: int = 0) -> TensorDict:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(table.num_samples, (count,), generator=generator)
    budgets = 5 + 20 * torch.rand(count, generator=generator)
    blocks = {name: block[rows] for name, block in table.features.items()}
    return TensorDict({"row": rows, "budget_ms": budgets, "mask": table.mask[rows], **blocks}, [count])


# -- the distribution --------------------------------------------------------------------------------------------------


def test_probabilities_sum_to_one_whether_the_logits_did_or_not() -> None:
    torch.testing.assert_close(distribution(4, 2).log_probs.exp().sum(-1), torch.ones(4, 2))


@pytest.mark.parametrize("group_size", [None, 1, 5])
@pytest.mark.parametrize("batch", [(), (4,), (4, 2)])
@pytest.mark.parametrize("sample", [(), (3,), (3, 2)])
def test_shapes_of_draws_and_their_log_probs(
    group_size: int | None, batch: tuple[int, ...], sample: tuple[int, ...]
) -> None:
    dist = distribution(*batch, group_size=group_size)
    group = () if group_size is None else (group_size,)
    drawn = dist.sample(sample)
    assert drawn.shape == (*sample, *batch, *group, 2)
    found = dist.log_prob(drawn)
    assert found.shape == (*sample, *batch, *group)
    # what is drawn exists, and its log-prob is that of its own context
    wanted = dist.log_probs.reshape(*([1] * len(sample)), *batch, *([1] * len(group)), 3).expand(*found.shape, 3)
    torch.testing.assert_close(found, wanted.gather(-1, dist.index(drawn).unsqueeze(-1)).squeeze(-1))
    assert dist.entropy().shape == batch
    assert dist.mode.shape == (*batch, *group, 2)


@pytest.mark.parametrize("group_size", [None, 4])
def test_draws_have_the_frequencies_of_their_context(group_size: int | None) -> None:
    torch.manual_seed(0)
    dist = distribution(2, group_size=group_size)
    drawn = dist.index(dist.sample((20_000,)))  # [20000, 2, (4)]
    for context in range(2):
        seen = drawn[:, context].flatten().bincount(minlength=3) / drawn[:, context].numel()
        torch.testing.assert_close(seen, dist.log_probs[context].exp(), atol=0.015, rtol=0)


def test_actions_that_do_not_exist_have_log_prob_minus_infinity() -> None:
    actions = torch.tensor([[1, 0], [2, 0], [0, 2], [-1, 0], [3, 1], [2, 1]])
    found = distribution().log_prob(actions)
    assert found[:5].tolist() == [-math.inf] * 5
    assert found[5].isfinite()
    assert distribution(group_size=6).log_prob(actions).tolist() == found.tolist()


def test_masked_configurations_are_never_drawn() -> None:
    dist = ConfigurationCategorical(torch.tensor([[0.0, -torch.inf, 0.0]]), SOME, group_size=1000)
    assert set(dist.sample_index().flatten().tolist()) == {0, 2}
    assert dist.entropy().item() == pytest.approx(math.log(2))


def test_mode_is_the_most_probable_action() -> None:
    dist = ConfigurationCategorical(torch.tensor([[1.0, 3.0, 2.0], [0.0, -1.0, 5.0]]), SOME)
    assert dist.mode.tolist() == [[0, 1], [2, 1]]
    assert dist.deterministic_sample.tolist() == dist.mode.tolist()
    grouped = ConfigurationCategorical(torch.tensor([1.0, 3.0, 2.0]), SOME, group_size=2)
    assert grouped.mode.tolist() == [[0, 1], [0, 1]]


def test_entropy_and_kl_are_those_of_torch() -> None:
    p, q = distribution(4, 2), distribution(4, 2, seed=1)
    stock_p, stock_q = (torch.distributions.Categorical(logits=d.log_probs) for d in (p, q))
    torch.testing.assert_close(p.entropy(), stock_p.entropy())
    torch.testing.assert_close(p.kl(q), torch.distributions.kl_divergence(stock_p, stock_q))
    assert p.kl(p).abs().max() == 0


def test_configurations_in_another_order_are_found() -> None:
    shuffled = distribution(configurations=SOME[[2, 0, 1]])
    assert shuffled.log_prob(SOME[[2, 0, 1]]).tolist() == shuffled.log_probs.tolist()


def test_gradient_of_a_log_prob_is_that_of_softmax() -> None:
    logits = torch.tensor([0.2, -0.1, 0.7], requires_grad=True)
    ConfigurationCategorical(logits, SOME).log_prob(torch.tensor([0, 1])).backward()
    torch.testing.assert_close(logits.grad, torch.tensor([0.0, 1.0, 0.0]) - logits.detach().softmax(-1))


# -- the controller ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", sorted(HEADS))
@pytest.mark.parametrize("holes", [0.0, 0.6])
def test_choose_is_the_argmax_inside_the_mask(head: str, holes: float) -> None:
    table = small_table(holes=holes)
    controller, data = small_controller(table, head), contexts(table)
    chosen = controller.choose(data, data["budget_ms"], data["mask"])
    assert data["mask"].gather(1, chosen[:, None]).all()
    actor = make_actor(controller.eval(), table)
    assert torch.equal(chosen, actor.get_dist(data).log_probs.argmax(-1))
    assert torch.equal(table.configurations[chosen], actor(data)["action"])  # TorchRL's default: deterministic


@pytest.mark.parametrize("head", sorted(HEADS))
def test_rows_of_a_table_and_feature_blocks_give_the_same(head: str) -> None:
    table = small_table()
    controller, data = small_controller(table, head).eval(), contexts(table)
    by_row, by_blocks = make_actor(controller, table, 3), make_actor(controller, group_size=3)
    assert by_row.in_keys == ["row", "budget_ms"]
    assert by_blocks.in_keys == ["budget_ms", "image_features", "language_features"]
    torch.testing.assert_close(by_row(data.clone())["log_probs"], by_blocks(data.clone())["log_probs"])
    assert torch.equal(by_row(data.clone())["action"], by_blocks(data.clone())["action"])


@pytest.mark.parametrize("head", sorted(HEADS))
def test_a_profile_without_features_has_a_policy_that_sees_the_budget_alone(head: str) -> None:
    table = small_table(features=False)
    controller, data = small_controller(table, head).eval(), contexts(table)
    assert controller.normaliser.width == 0
    by_row, by_blocks = make_actor(controller, table), make_actor(controller)
    assert by_blocks.in_keys == ["budget_ms"]
    torch.testing.assert_close(by_row(data.clone())["log_probs"], by_blocks(data.clone())["log_probs"])
    same = torch.full((20,), 9.0)
    assert len(controller.choose({}, same).unique()) == 1


@pytest.mark.parametrize("group_size", [None, 3])
@pytest.mark.parametrize("batch", [(), (4,), (4, 2)])
@pytest.mark.parametrize("features", [True, False])
def test_the_actor_takes_contexts_one_by_one_in_batches_and_in_time(
    group_size: int | None, batch: tuple[int, ...], features: bool
) -> None:
    table = small_table(features=features)
    controller, data = small_controller(table).eval(), contexts(table, 8)
    data = data[0] if batch == () else data[: 4 * (len(batch))].reshape(batch)
    group = () if group_size is None else (group_size,)
    for actor in (make_actor(controller, table, group_size), make_actor(controller, None, group_size)):
        for how in (ExplorationType.RANDOM, ExplorationType.DETERMINISTIC):
            with set_exploration_type(how):
                out = actor(data.clone())
            assert out["action"].shape == (*batch, *group, 3)
            assert out["action_log_prob"].shape == (*batch, *group)


@pytest.mark.parametrize("training", [True, False])
def test_choose_is_without_dropout_and_leaves_the_mode_as_it_was(training: bool) -> None:
    table = small_table()
    controller, data = small_controller(table, dropout=0.5).train(training), contexts(table, 200)
    decisions = [controller.choose(data, data["budget_ms"]) for _ in range(2)]
    assert torch.equal(*decisions)
    assert all(module.training == training for module in controller.modules())


def test_dropout_is_there_in_training_mode_only() -> None:
    table = small_table()
    controller, data = small_controller(table, dropout=0.5), contexts(table)
    features = controller.features(data, 20)
    noisy = [controller.train()(features, data["budget_ms"]) for _ in range(2)]
    assert not torch.equal(*noisy)
    quiet = [controller.eval()(features, data["budget_ms"]) for _ in range(2)]
    assert torch.equal(*quiet)


def test_statistics_come_from_the_rows_given_alone() -> None:
    table, rows = small_table(), torch.arange(10)
    controller = Controller.for_table(table, rows, PolicyConfig(hidden=8))
    torch.testing.assert_close(controller.normaliser.mean[:4], table.features["image_features"][:10].mean(0))
    torch.testing.assert_close(controller.encoding.mean, table.latency_ms[:10].log().mean())


def test_gradients_reach_every_parameter() -> None:
    table = small_table(holes=0.5)
    for head in HEADS:
        controller, data = small_controller(table, head), contexts(table)
        make_actor(controller, table, 4).get_dist(data).entropy().sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in controller.parameters())


def test_another_head_is_refused() -> None:
    with pytest.raises(InputError, match=r"policy\.head='tree'"):
        small_controller(small_table(), "tree")


# -- in the environment ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize("group_size", [1, 3])
def test_the_policy_plays_in_the_environment(by_row: bool, group_size: int) -> None:
    table = small_table()
    env = ConfigBandit(table, batch_size=5, group_size=group_size, lean=False)
    policy = make_actor(small_controller(table).eval(), table if by_row else None, group_size)
    with set_exploration_type(ExplorationType.RANDOM):
        played = env.rollout(1, policy)
    assert played["action"].shape == (5, 1, group_size, 3)
    assert played["next", "reward"].isfinite().all()
    dist = policy.get_dist(played)
    torch.testing.assert_close(dist.log_prob(played["action"]), played["action_log_prob"])


def test_a_policy_that_knows_the_table_never_leaves_its_holes() -> None:
    table = small_table(holes=0.7)
    env = ConfigBandit(table, batch_size=60, group_size=16)
    policy = make_actor(small_controller(table).eval(), table, 16)
    with set_exploration_type(ExplorationType.RANDOM):
        assert env.rollout(1, policy)["next", "reward"].isfinite().all()
