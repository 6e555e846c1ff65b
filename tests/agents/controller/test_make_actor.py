"""`make_actor`: any controller as a TensorDict policy, in whatever form the requests come."""

import functools
import math

import pytest
import torch
from helpers import TAUGHT, deployed, driven_apart, small_table
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import set_composite_lp_aggregate
from torchrl.envs.utils import ExplorationType, set_exploration_type

from knobwise.agents.checkpoint import load_checkpoint, save_checkpoint
from knobwise.agents.controller.actor import make_actor
from knobwise.agents.controller.distributions import KnobCategoricals
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.stack.deployed import DeployedController
from knobwise.agents.stack.prices import mean_budgets
from knobwise.common.errors import InputError

ALL = torch.arange(60)
both_ways = pytest.mark.parametrize("how", [ExplorationType.RANDOM, ExplorationType.DETERMINISTIC])


@functools.cache
def agent_of(kind, holes=0.6):
    """As `load_checkpoint(path).controller` gives it."""
    table = small_table(holes=holes, features=kind != "no features")
    if kind == "guarded":
        return table, deployed(table)
    if kind == "mean budgets":
        budgets_ms = mean_budgets(table, ALL)
        return table, deployed(table, TAUGHT, budgets_ms, "mean")
    members = 2 if kind == "several networks" else 1
    controller = driven_apart(table, PolicyConfig(hidden=8, members=members))
    return table, DeployedController(controller)


KINDS = ["controller", "several networks", "guarded", "mean budgets"]


def requests(table, agent, rows=ALL):
    limits = torch.linspace(4, 40, len(rows))
    content = {"row": rows, agent.controller.limit_key: limits, "mask": table.mask[rows]}
    content |= table.blocks(rows)
    return TensorDict(content, [len(rows)])


# -- from a checkpoint -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@both_ways
def test_any_controller_of_a_checkpoint_becomes_a_policy(kind, how, tmp_path):
    table, agent = agent_of(kind)
    save_checkpoint(tmp_path / "c.pt", agent, table, {})
    policy = make_actor(load_checkpoint(tmp_path / "c.pt").controller, group_size=3)
    data = requests(table, agent)
    with set_exploration_type(how):
        out = policy(data.clone())
    assert set(policy.out_keys) <= set(out.keys())
    inner = agent.controller
    chosen = inner.index(out["action"])
    assert table.mask.gather(1, chosen).all()
    assert out["action_log_prob"].isfinite().all()
    if how == ExplorationType.DETERMINISTIC:
        # the network inside: neither the guard nor calibrated worths play a part
        x = inner.normaliser(table.features, 60)
        greedy = inner(x, data[inner.limit_key], table.mask).argmax(-1)
        assert torch.equal(chosen, greedy.unsqueeze(1).expand(-1, 3))
    else:
        assert len(chosen.unique(dim=1)[0]) > 1


def test_an_action_may_be_the_index_of_a_configuration():
    table, agent = agent_of("controller")
    by_knobs = make_actor(agent, group_size=4)
    by_index = make_actor(agent, group_size=4, action="configuration")
    data = requests(table, agent)
    with set_exploration_type(ExplorationType.RANDOM):
        out = by_index(data.clone())
    index = out["action"]
    assert table.mask.gather(1, index).all()
    wanted = by_knobs.get_dist(data).log_prob(table.configurations[index])
    assert torch.equal(out["action_log_prob"], wanted)
    dist = by_index.get_dist(data)
    assert torch.equal(dist.log_prob(index), wanted)
    greedy = by_knobs(data.clone())["action"]
    assert torch.equal(table.configurations[by_index(data.clone())["action"]], greedy)
    # there are 12: 0 to 11
    assert dist.log_prob(torch.full((60, 4), 12)).isneginf().all()


# -- each knob under its own key -------------------------------------------------------------------


def by_hand(probabilities, group_size=None):
    """Two knobs of two values each: (0, 0), (0, 1), (1, 0), (1, 1)."""
    grid = torch.cartesian_prod(torch.arange(2), torch.arange(2))
    log_probs = torch.tensor([probabilities]).log()
    return KnobCategoricals(
        log_probs, ["a", "b"], group_size=group_size, configurations=grid, normalised=True
    )


def test_conditionals_by_hand():
    policy = by_hand([0.1, 0.3, 0.6, 0.0], group_size=3)
    draws = TensorDict({"a": torch.tensor([[0, 0, 1]]), "b": torch.tensor([[0, 1, 0]])}, [1, 3])
    each = policy.log_prob(draws)
    # p(a) = .4, .4, .6; p(b | a) = .1/.4, .3/.4, 1
    torch.testing.assert_close(each["a_log_prob"].exp(), torch.tensor([[0.4, 0.4, 0.6]]))
    torch.testing.assert_close(each["b_log_prob"].exp(), torch.tensor([[0.25, 0.75, 1.0]]))
    torch.testing.assert_close(policy["a"].probs, torch.tensor([0.4, 0.6]).expand(1, 3, 2))
    torch.testing.assert_close(policy["b"].probs, torch.tensor([0.7, 0.3]).expand(1, 3, 2))
    # H(a), and H(b | a) = .4·H(¼)
    entropies = [-sum(p * math.log(p) for p in each) for each in ((0.4, 0.6), (0.25, 0.75))]
    assert policy.entropy()["a_entropy"].tolist() == [pytest.approx([entropies[0]] * 3)]
    assert policy.entropy()["b_entropy"].tolist() == [pytest.approx([0.4 * entropies[1]] * 3)]
    assert policy.mode["a"].tolist() == [[1, 1, 1]]
    assert policy.mode["b"].tolist() == [[0, 0, 0]]
    with set_composite_lp_aggregate(True):
        torch.testing.assert_close(policy.log_prob(draws).exp(), torch.tensor([[0.1, 0.3, 0.6]]))
        assert policy.entropy().tolist() == pytest.approx([entropies[0] + 0.4 * entropies[1]])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group_size", [None, 1, 3])
@pytest.mark.parametrize("aggregate", [False, True])
def test_separate_knobs_are_the_masked_policy_over_configurations(kind, group_size, aggregate):
    table, agent = agent_of(kind)
    names, data = [knob.name for knob in table.knobs], requests(table, agent)
    with set_composite_lp_aggregate(aggregate), set_exploration_type(ExplorationType.RANDOM):
        together = make_actor(agent, group_size=group_size)
        separate = make_actor(agent, group_size=group_size, separate=True)
        assert separate.dist_sample_keys == names
        torch.manual_seed(0)
        out = separate(data.clone())
        assert set(separate.out_keys) <= set(out.keys())
        dist = separate.get_dist(data)
        entropy = dist.entropy() if aggregate else sum(dist.entropy().values())
        torch.manual_seed(0)
        assert torch.equal(
            torch.stack([out[name] for name in names], -1), together(data.clone())["action"]
        )
    action = torch.stack([out[name] for name in names], -1)
    assert table.mask.gather(1, table.find(action).view(60, -1)).all()
    wanted = together.get_dist(data)
    torch.testing.assert_close(
        sum(out[f"{name}_log_prob"] for name in names), wanted.log_prob(action)
    )
    if aggregate:
        torch.testing.assert_close(out["action_log_prob"], wanted.log_prob(action))
    torch.testing.assert_close(entropy.view(60, -1)[:, 0], wanted.entropy())
    for part in (dist.mode, dist.sample((5,))):
        assert part[names[0]].shape == (*part.shape,)


@pytest.mark.parametrize(
    ("give", "options", "name"),
    [
        (lambda agent: agent, {"action": "index"}, "action"),
        (lambda agent: agent, {"action": "configuration", "separate": True}, "separate"),
        (lambda agent: agent.decider, {}, "NumpyController"),
        (lambda agent: agent.teacher, {}, "Teacher"),
    ],
)
def test_what_cannot_be_a_policy_or_be_separate_is_refused(give, options, name):
    with pytest.raises(InputError, match=name):
        make_actor(give(agent_of("guarded")[1]), **options)


# -- however the requests come ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["controller", "no features", *KINDS[1:]])
@settings(max_examples=15, deadline=None)
@given(
    limit=st.sampled_from([torch.float32, torch.float64]),
    blocks=st.sampled_from([torch.float32, torch.float64]),
    mask=st.sampled_from([torch.bool, torch.int8]),
    batch=st.sampled_from([(), (1,), (4,), (2, 3)]),
    trailing=st.booleans(),
)
def test_other_types_and_a_trailing_axis_change_nothing(
    kind,
    limit,
    blocks,
    mask,
    batch,
    trailing,
):
    table, agent = agent_of(kind)
    data, policy = requests(table, agent), make_actor(agent)
    data = data[0] if batch == () else data[: math.prod(batch)].reshape(batch)
    wanted = policy(data.clone())
    other = data.clone()
    key = policy.in_keys[0]
    other[key] = other[key].to(limit).unsqueeze(-1) if trailing else other[key].to(limit)
    other["mask"] = other["mask"].to(mask)
    for name in table.features:
        other[name] = other[name].to(blocks)
    out = policy(other)
    assert torch.equal(out["action"], wanted["action"])
    torch.testing.assert_close(out["log_probs"], wanted["log_probs"])


def test_without_a_mask_every_configuration_is_possible_and_collectors_do_not_lose_it():
    table, agent = agent_of("controller")
    policy, data = make_actor(agent), requests(table, agent)
    assert policy(data.clone().exclude("mask"))["log_probs"].isfinite().all()
    out = policy(data.select(*policy.in_keys))
    assert torch.equal(out["log_probs"] > -torch.inf, table.mask)
    drawn = policy(**{key: data[key] for key in policy.in_keys if key != "mask"})
    assert drawn[0].isfinite().all()
    with pytest.raises(InputError, match="the tensordict lacks 'budget_ms'"):
        policy(data.clone().exclude("budget_ms"))
    with pytest.raises(InputError, match="'image_features' must be 4 wide, got nothing"):
        policy(data.clone().exclude("image_features"))
