"""`make_actor`: any controller as a TensorDict policy, in whatever form the requests come."""

import functools
import math

import pytest
import torch
from helpers import WITH_TEACHER, close, deployed, driven_apart, input_error, small_table
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import set_composite_lp_aggregate
from torchrl.envs.utils import ExplorationType, set_exploration_type

from knobwise.agents.calibration.deployed_controller import DeployedController
from knobwise.agents.controller.actor import make_actor
from knobwise.agents.controller.distributions import KnobCategoricals
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.training.checkpoint import load_checkpoint, save_checkpoint
from knobwise.envs.bandit.budgets import mean_budgets


@functools.cache
def agent_of(kind):
    """As `load_checkpoint(path).controller` gives it."""
    table = small_table(holes=0.6, features=kind != "no features")
    if kind == "guarded":
        return table, deployed(table)
    if kind == "mean budgets":
        return table, deployed(table, WITH_TEACHER, mean_budgets(table, torch.arange(60)), "mean")
    members = 2 if kind == "several networks" else 1
    controller = driven_apart(table, PolicyConfig(hidden=8, fold_networks=members))
    return table, DeployedController(controller)


KINDS = ["controller", "several networks", "guarded", "mean budgets"]


def requests(table, agent):
    content = {agent.controller.limit_key: torch.linspace(4, 40, 60), "mask": table.mask}
    return TensorDict(content | table.features, [60])


# -- from a checkpoint -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_any_controller_of_a_checkpoint_becomes_a_policy(kind, tmp_path):
    table, agent = agent_of(kind)
    save_checkpoint(tmp_path / "c.pt", agent, table, {})
    policy = make_actor(load_checkpoint(tmp_path / "c.pt").controller, group_size=3)
    data, inner = requests(table, agent), agent.controller
    with set_exploration_type(ExplorationType.RANDOM):
        drawn = policy(data.clone()).select(*policy.out_keys)
    assert table.mask.gather(1, inner.index(drawn["action"])).all()
    assert drawn["action_log_prob"].isfinite().all()
    assert len(drawn["action"].unique(dim=1)[0]) > 1
    # the network inside: neither the guard nor calibrated values play a part
    x = inner.normaliser(table.features, 60)
    greedy = inner(x, data[inner.limit_key], table.mask).argmax(-1)
    out = policy(data)
    assert torch.equal(inner.index(out["action"]), greedy.unsqueeze(1).expand(-1, 3))
    assert out["action_log_prob"].isfinite().all()


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


def test_conditionals_by_hand():
    """Two knobs of two values each: (0, 0), (0, 1), (1, 0), (1, 1)."""
    grid = torch.cartesian_prod(torch.arange(2), torch.arange(2))
    log_probs = torch.tensor([[0.1, 0.3, 0.6, 0.0]]).log()
    policy = KnobCategoricals(log_probs, ["a", "b"], 3, configurations=grid, normalised=True)
    draws = TensorDict({"a": torch.tensor([[0, 0, 1]]), "b": torch.tensor([[0, 1, 0]])}, [1, 3])
    each = policy.log_prob(draws)
    # p(a) = .4, .4, .6; p(b | a) = .1/.4, .3/.4, 1
    close(each["a_log_prob"].exp(), [[0.4, 0.4, 0.6]])
    close(each["b_log_prob"].exp(), [[0.25, 0.75, 1.0]])
    close(policy["a"].probs, [[[0.4, 0.6]] * 3])
    close(policy["b"].probs, [[[0.7, 0.3]] * 3])
    # H(a), and H(b | a) = .4·H(¼)
    first, second = (-p * math.log(p) - (1 - p) * math.log(1 - p) for p in (0.4, 0.25))
    close(policy.entropy()["a_entropy"], [[first] * 3])
    close(policy.entropy()["b_entropy"], [[0.4 * second] * 3])
    assert policy.mode["a"].tolist() == [[1, 1, 1]]
    assert policy.mode["b"].tolist() == [[0, 0, 0]]
    with set_composite_lp_aggregate(True):
        close(policy.log_prob(draws).exp(), [[0.1, 0.3, 0.6]])
        close(policy.entropy(), [first + 0.4 * second])


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
        action = together(data.clone())["action"]
    assert torch.equal(torch.stack([out[name] for name in names], -1), action)
    assert table.mask.gather(1, table.find(action).view(60, -1)).all()
    wanted = together.get_dist(data)
    log_prob = wanted.log_prob(action)
    close(sum(out[f"{name}_log_prob"] for name in names), log_prob)
    if aggregate:
        close(out["action_log_prob"], log_prob)
    close(entropy.view(60, -1)[:, 0], wanted.entropy())
    for part in (dist.mode, dist.sample((5,))):
        assert part[names[0]].shape == (*part.shape,)


def test_what_cannot_be_a_policy_or_be_separate_is_refused():
    _, agent = agent_of("guarded")
    for part in (agent.decider, agent.teacher):
        with input_error(type(part).__name__):
            make_actor(part)
    with input_error("action"):
        make_actor(agent, action="index")
    with input_error("separate"):
        make_actor(agent, action="configuration", separate=True)
    with input_error("offsets"):
        make_actor(agent, small_table(4), offsets=torch.zeros(4, 2))


# -- however the requests come ---------------------------------------------------------------------


FLOATS = st.sampled_from([torch.float32, torch.float64])


@pytest.mark.parametrize("kind", ["controller", "no features", *KINDS[1:]])
@settings(max_examples=15, deadline=None)
@given(
    limit=FLOATS,
    blocks=FLOATS,
    mask=st.sampled_from([torch.bool, torch.int8]),
    batch=st.sampled_from([(), (1,), (4,), (2, 3)]),
    trailing=st.booleans(),
)
def test_other_axes_and_types_change_nothing(kind, limit, blocks, mask, batch, trailing):
    table, agent = agent_of(kind)
    policy = make_actor(agent)
    n, every = math.prod(batch), requests(table, agent)
    data, wanted = (each[:n].reshape(batch) for each in (every, policy(every.clone())))
    other = data.clone()
    key = policy.in_keys[0]
    other[key] = data[key].to(limit).unsqueeze(-1) if trailing else data[key].to(limit)
    other["mask"] = data["mask"].to(mask)
    for name in table.features:
        other[name] = data[name].to(blocks)
    out = policy(other)
    assert torch.equal(out["action"], wanted["action"])
    close(out["log_probs"], wanted["log_probs"])


@pytest.mark.parametrize("separate", [True, False])
def test_a_choice_has_no_mean(separate):
    table, agent = agent_of("controller")
    policy, data = make_actor(agent, separate=separate), requests(table, agent)
    with set_exploration_type(ExplorationType.MEAN), input_error("MEAN"):
        policy(data)


def test_a_policy_that_reads_rows_takes_limits_of_either_shape():
    table, agent = agent_of("controller")
    policy = make_actor(agent, table)
    rows = torch.arange(5)
    limit = torch.linspace(2.0, 30.0, 5)
    key = policy.in_keys[1]
    wanted, out = (
        policy(TensorDict({"row": rows, key: limits}, [5]))["log_probs"]
        for limits in (limit, limit.unsqueeze(1))
    )
    assert torch.equal(out, wanted)


def test_without_a_mask_every_configuration_is_possible_and_collectors_do_not_lose_it():
    table, agent = agent_of("controller")
    policy, data = make_actor(agent), requests(table, agent)
    unmasked = data.exclude("mask")
    drawn = policy(**unmasked)
    assert drawn[0].isfinite().all()
    assert policy(unmasked)["log_probs"].isfinite().all()
    out = policy(data.select(*policy.in_keys))
    assert torch.equal(out["log_probs"] > -torch.inf, table.mask)
    for key in ("budget_ms", "image_features"):
        with input_error(key):
            policy(data.exclude(key))
