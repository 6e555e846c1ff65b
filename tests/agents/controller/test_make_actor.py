"""`make_actor`: any controller as a TensorDict policy, in whatever form the requests come."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import driven_apart, small_table
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import set_composite_lp_aggregate
from torch import Tensor
from torchrl.collectors import Collector
from torchrl.envs.utils import ExplorationType, set_exploration_type

from knobwise.agents.checkpoint import Agent, load_checkpoint, save_checkpoint
from knobwise.agents.controller.actor import make_actor
from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.distributions import KnobCategoricals
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.serving.export import to_numpy
from knobwise.agents.stack.priced_policy import PricedChooser
from knobwise.agents.stack.stacked_controller import StackedController, fit_stack
from knobwise.common.errors import InputError
from knobwise.envs.configurations.budgets import default_budgets
from knobwise.envs.configurations.settings import BudgetConfig
from knobwise.envs.configurations.torchrl_env import ConfigBandit
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.losses import GRPOLoss, RCELoss

ALL = torch.arange(60)
both_ways = pytest.mark.parametrize("how", [ExplorationType.RANDOM, ExplorationType.DETERMINISTIC])


def network(table: ProfileTable, structure: str = "independent", members: int = 1, priced: bool = False) -> Controller:
    return driven_apart(table, PolicyConfig(structure=structure, hidden=8, members=members), priced=priced)


@functools.cache
def agent_of(kind: str, holes: float = 0.6) -> tuple[ProfileTable, Agent]:
    """As `load_checkpoint(path).controller` gives it."""
    table = small_table(holes=holes, features=kind != "no features")
    if kind in ("controller", "no features"):
        return table, network(table)
    if kind == "ensemble":
        return table, network(table, "utility", 3)
    config = PolicyConfig(structure="utility", members=3, hidden=8, experts=("ridge",))
    if kind == "stack":
        return table, fit_stack(table, ALL, driven_apart(table, config), config, default_budgets(table), seed=0)
    prices, budgets = torch.tensor([0.1, 0.2]), torch.tensor([9.0, 6.0])
    inner = StackedController(network(table, "utility", priced=True), [], torch.ones(1))
    return table, PricedChooser("controller", inner, budgets, prices)


KINDS = ["controller", "ensemble", "stack", "priced stack"]


def requests(table: ProfileTable, agent: Agent, rows: Tensor = ALL) -> TensorDict:
    limit = getattr(agent, "chooser", agent).limit_key
    limits = torch.linspace(4, 40, len(rows))
    blocks = {name: block[rows] for name, block in table.features.items()}
    return TensorDict({"row": rows, limit: limits, "mask": table.mask[rows], **blocks}, [len(rows)])


# -- from a checkpoint -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@both_ways
def test_any_controller_of_a_checkpoint_becomes_a_policy(kind: str, how: ExplorationType, tmp_path: Path) -> None:
    table, agent = agent_of(kind)
    save_checkpoint(tmp_path / "c.pt", agent, table, {})
    policy = make_actor(load_checkpoint(tmp_path / "c.pt").controller, group_size=3)
    data = requests(table, agent)
    with set_exploration_type(how):
        out = policy(data.clone())
    assert set(policy.out_keys) <= set(out.keys())
    inner = getattr(agent, "chooser", agent)
    chosen = inner.index(out["action"])
    assert table.mask.gather(1, chosen).all()
    drawn = "stack" not in kind
    assert ("action_log_prob" in out) == drawn
    if how == ExplorationType.DETERMINISTIC or not drawn:
        greedy = inner.choose(table.features, data[inner.limit_key], table.mask)
        assert torch.equal(chosen, greedy.unsqueeze(1).expand(-1, 3))
    else:
        assert len(chosen.unique(dim=1)[0]) > 1


@pytest.mark.parametrize("kind", ["controller", "no features", "stack"])
@pytest.mark.parametrize("group_size", [None, 1, 3])
@pytest.mark.parametrize("action", ["knobs", "configuration"])
@pytest.mark.parametrize("by_row", [False, True])
def test_shapes_whatever_the_batch(kind: str, group_size: int | None, action: str, by_row: bool) -> None:
    table, agent = agent_of(kind)
    policy = make_actor(agent, table if by_row else None, group_size, action=action)
    data, group = requests(table, agent), () if group_size is None else (group_size,)
    for batch in ((), (1,), (5,), (4, 3)):
        part = data[0] if batch == () else data[: math.prod(batch)].reshape(batch)
        for how in (ExplorationType.RANDOM, ExplorationType.DETERMINISTIC):
            with set_exploration_type(how):
                out = policy(part.clone())
            assert out["action"].shape == (*batch, *group, *((3,) if action == "knobs" else ()))
            assert out["action"].dtype == torch.int64
            if kind != "stack":
                assert out["action_log_prob"].shape == (*batch, *group)
                log_prob = policy.get_dist(part).log_prob(out["action"])
                torch.testing.assert_close(log_prob, out["action_log_prob"])


def test_an_action_may_be_the_index_of_a_configuration() -> None:
    table, agent = agent_of("controller")
    by_knobs, by_index = make_actor(agent, group_size=4), make_actor(agent, group_size=4, action="configuration")
    data = requests(table, agent)
    with set_exploration_type(ExplorationType.RANDOM):
        out = by_index(data.clone())
    assert table.mask.gather(1, out["action"]).all()
    wanted = by_knobs.get_dist(data).log_prob(table.configurations[out["action"]])
    assert torch.equal(out["action_log_prob"], wanted)
    assert torch.equal(by_index.get_dist(data).log_prob(out["action"]), wanted)
    assert torch.equal(table.configurations[by_index(data.clone())["action"]], by_knobs(data.clone())["action"])
    assert by_index.get_dist(data).log_prob(torch.full((60, 4), 12)).isneginf().all()  # there are 12: 0 to 11
    with pytest.raises(InputError, match="action"):
        make_actor(agent, action="index")


# -- each knob under its own key ---------------------------------------------------------------------------------------


def by_hand(probabilities: list[float], group_size: int | None = None) -> KnobCategoricals:
    """Two knobs of two values each: (0, 0), (0, 1), (1, 0), (1, 1)."""
    grid = torch.cartesian_prod(torch.arange(2), torch.arange(2))
    log_probs = torch.tensor([probabilities]).log()
    return KnobCategoricals(log_probs, ["a", "b"], group_size=group_size, configurations=grid, normalised=True)


def test_conditionals_by_hand() -> None:
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


def test_where_all_is_possible_they_are_the_categoricals_of_the_heads() -> None:
    table, agent = agent_of("controller", 0.0)
    data = requests(table, agent)
    dist = make_actor(agent, separate=True).get_dist(data)
    head = agent.network.head.logits
    hidden = {}
    head.register_forward_hook(lambda _module, _inputs, out: hidden.update(logits=out[0]))
    make_actor(agent).get_dist(data)
    for knob, logits in zip(table.knobs, hidden["logits"].split(table.knob_sizes, -1), strict=True):
        torch.testing.assert_close(dist[knob.name].probs, logits.softmax(-1))
        values = torch.zeros(60, dtype=torch.int64)
        each = dist.log_prob(TensorDict({k.name: values for k in table.knobs}, [60]))
        torch.testing.assert_close(each[f"{knob.name}_log_prob"], logits.log_softmax(-1)[:, 0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group_size", [None, 1, 3])
@pytest.mark.parametrize("aggregate", [False, True])
def test_separate_knobs_are_the_masked_policy_over_configurations(
    kind: str, group_size: int | None, aggregate: bool
) -> None:
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
        assert torch.equal(torch.stack([out[name] for name in names], -1), together(data.clone())["action"])
    if "stack" in kind:
        assert not any(str(key).endswith("_log_prob") for key in list(out.keys()))
        return
    action = torch.stack([out[name] for name in names], -1)
    assert table.mask.gather(1, table.find(action).view(60, -1)).all()
    wanted = together.get_dist(data)
    torch.testing.assert_close(sum(out[f"{name}_log_prob"] for name in names), wanted.log_prob(action))
    if aggregate:
        torch.testing.assert_close(out["action_log_prob"], wanted.log_prob(action))
    torch.testing.assert_close(entropy.view(60, -1)[:, 0], wanted.entropy())
    for part in (dist.mode, dist.sample((5,))):
        assert part[names[0]].shape == (*part.shape,)


def test_what_cannot_be_a_policy_or_be_separate_is_refused() -> None:
    agent = agent_of("controller")[1]
    with pytest.raises(InputError, match=r"separate=True: .*leave out action=configuration"):
        make_actor(agent, action="configuration", separate=True)
    with pytest.raises(InputError, match="NumpyController is not a controller"):
        make_actor(to_numpy(agent))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["stack", "priced stack"])
@pytest.mark.parametrize("loss", [GRPOLoss, RCELoss])
def test_a_policy_that_only_decides_is_not_trained_but_its_network_is(kind: str, loss: Any) -> None:
    table, agent = agent_of(kind)
    with pytest.raises(
        InputError, match=r"decides without probabilities.*make_actor\(load_checkpoint\(path\)\.network"
    ):
        loss(make_actor(agent, table, 4))
    loss(make_actor(getattr(agent, "chooser", agent).network, table, 4))


# -- however the requests come -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["controller", "no features", "ensemble", "stack", "priced stack"])
@settings(max_examples=15, deadline=None)
@given(
    limit=st.sampled_from([torch.float32, torch.float64]),
    blocks=st.sampled_from([torch.float32, torch.float64]),
    mask=st.sampled_from([torch.bool, torch.int8]),
    batch=st.sampled_from([(), (1,), (4,), (2, 3)]),
    trailing=st.booleans(),
)
def test_other_types_and_a_trailing_axis_change_nothing(
    kind: str, limit: torch.dtype, blocks: torch.dtype, mask: torch.dtype, batch: Any, trailing: bool
) -> None:
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


def test_without_a_mask_every_configuration_is_possible_and_collectors_do_not_lose_it() -> None:
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group_size", [1, 3])
@pytest.mark.parametrize("by_row", [False, True])
def test_in_the_environment_it_never_draws_what_was_not_profiled(kind: str, group_size: int, by_row: bool) -> None:
    table, agent = agent_of(kind)
    budget = BudgetConfig(sense="mean") if kind.startswith("priced") else None
    env = ConfigBandit(table, batch_size=30, group_size=group_size, budget=budget, unprofiled="error", seed=0)
    policy = make_actor(agent, table if by_row else None, group_size)
    collector = Collector(env, policy, frames_per_batch=60, total_frames=120, auto_register_policy_transforms=False)
    collected = torch.cat([data.reshape(-1) for data in collector])
    collector.shutdown()
    assert collected["action"].shape == (120, group_size, 3)
    assert collected["next", "reward"].isfinite().all()


@pytest.mark.parametrize("by_row", [False, True])
def test_it_plays_in_the_environment_and_learns(by_row: bool) -> None:
    table = small_table()
    agent = network(table, "independent")
    env = ConfigBandit(table, batch_size=64, group_size=4, full_information=True, unprofiled="error", seed=0)
    policy = make_actor(agent, table if by_row else None, 4)
    loss = GRPOLoss(policy, functional=False)
    optimiser = torch.optim.Adam(loss.parameters(), lr=0.02)
    torch.manual_seed(0)
    rewards = []
    for _ in range(30):
        with set_exploration_type(ExplorationType.RANDOM), torch.no_grad():
            data = env.rollout(1, policy).squeeze(1)
        rewards.append(data["next", "reward"].mean().item())
        loss(data)["loss_objective"].backward()
        optimiser.step()
        optimiser.zero_grad()
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.05
