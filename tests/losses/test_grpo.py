import doctest
import math

import pytest
import torch
from actors import actor_of, certain_actor, drawn, linear_actor, total
from helpers import close, identical, input_error, small_table
from tensordict import TensorDict
from tensordict.nn import (
    CompositeDistribution,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    set_composite_lp_aggregate,
)
from torch import nn
from torch.distributions import Categorical
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.objectives import ClipPPOLoss

from knobwise.agents.controller.actor import make_actor
from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.envs.bandit.torchrl_env import ConfigBandit
from knobwise.losses import ADVANTAGES, ExactGRPOLoss, GRPOLoss, RCELoss, grpo

LOSSES = {"sampled": GRPOLoss, "exact": ExactGRPOLoss}
both_objectives = pytest.mark.parametrize("objective", ["sampled", "exact"])


def gradient_of(value, loss):
    slopes = torch.autograd.grad(value, list(loss.parameters()))
    return torch.cat([slope.flatten() for slope in slopes])


def gradient(loss, data):
    return gradient_of(total(loss(data)), loss)


def check(out, **wanted):
    assert {name: out[name].item() for name in wanted} == pytest.approx(wanted, abs=1e-6)


def two_draws(**more):
    """One context with both actions drawn, as likely as each other; the first is right."""
    data = {"observation": torch.ones(1, 1), "action": torch.tensor([[[0], [1]]])}
    data |= {"action_log_prob": torch.tensor([[0.5, 0.5]]).log(), **more}
    return TensorDict({**data, "next": {"reward": torch.tensor([[1.0, 0.0]])}}, [1])


def exact_context(behaviour, rewards):
    """One context with the probabilities of the behaviour policy and the rewards of all
    configurations."""
    data = {"observation": torch.ones(1, 1), "behaviour_log_probs": torch.tensor([behaviour]).log()}
    return TensorDict({**data, "reward_per_configuration": torch.tensor([rewards])}, [1])


def played(objective, holes):
    """A loss of a controller, and what it drew in the environment."""
    table = small_table(holes=holes)
    torch.manual_seed(0)
    controller = Controller.for_table(table, torch.arange(60), PolicyConfig(hidden=16, dropout=0.0))
    settings = {"observe_features": False, "full_information": True, "reward": "shaped", "seed": 0}
    env = ConfigBandit(table, group_size=6, batch_size=32, **settings)
    actor = make_actor(controller, table, 6)
    with set_exploration_type(ExplorationType.RANDOM), torch.no_grad():
        data = env.rollout(1, actor).squeeze(-1)
    data["behaviour_log_probs"] = data["reference_log_probs"] = data.pop("log_probs")
    data["reference_log_prob"] = data["action_log_prob"]
    loss = LOSSES[objective](actor, kl_to_ref_coeff=0.1, entropy_coeff=0.01)
    return loss, data


def test_sampled_by_hand():
    settings = {"clip_epsilon": 0.1, "entropy_coeff": 0.01, "kl_to_ref_coeff": 0.5}
    loss = GRPOLoss(certain_actor(0.6, 0.4), advantage="centred", **settings)
    out = loss(two_draws(reference_log_prob=torch.tensor([[0.7, 0.3]]).log()))
    # A = ±½, ρ = 1.2 and .8, clipped to 1.1 and .9: −(½·1.1 − ½·.9)/2
    entropy = -0.6 * math.log(0.6) - 0.4 * math.log(0.4)
    k3 = (0.7 / 0.6 - 1 - math.log(0.7 / 0.6) + 0.3 / 0.4 - 1 - math.log(0.3 / 0.4)) / 2
    wanted = {
        "loss_objective": -0.05,
        "loss_entropy": -0.01 * entropy,
        "loss_kl_to_ref": 0.5 * k3,
        "entropy": entropy,
        "kl_to_ref": k3,
        "kl_approx": -(math.log(1.2) + math.log(0.8)) / 2,
        "clip_fraction": 1.0,
        "cut_fraction": 1.0,
        "ESS": 1 / 1.04,
        "ratio_mean": 1.0,
        "zero_advantage_fraction": 0.0,
        "advantage_mean": 0.0,
        "advantage_std": 0.5,
    }
    assert set(out.keys()) == set(wanted) == set(loss.out_keys)
    check(out, **wanted)


def test_sampled_by_hand_with_an_epsilon_for_each_end():
    settings = {"clip_epsilon": (0.3, 0.1), "advantage": "centred"}
    out = GRPOLoss(certain_actor(0.6, 0.4), **settings)(two_draws())
    # A = ±½, ρ = 1.2 and .8, of which 1.2 is clipped to 1.1: −(½·1.1 − ½·.8)/2
    check(out, loss_objective=-0.075, clip_fraction=0.5, cut_fraction=0.5)


def test_exact_by_hand():
    settings = {"clip_epsilon": 0.1, "advantage": "centred"}
    out = ExactGRPOLoss(certain_actor(0.6, 0.4), **settings)(
        exact_context([0.75, 0.25], [1.0, 0.0])
    )
    # mean ¾, A = ¼ and −¾, ρ = .8 and 1.6, both outside 1 ± .1, but no gradient is cut:
    # −(¾·.8·¼ − ¼·1.6·¾)
    kl = -0.75 * math.log(0.8) - 0.25 * math.log(1.6)
    ess = 1 / (0.75 * 0.64 + 0.25 * 2.56)
    check(out, loss_objective=0.15, kl_approx=kl, ESS=ess, loss_kl_to_ref=0)
    check(out, clip_fraction=1, cut_fraction=0)


def test_groups_that_teach_nothing_are_counted():
    data = drawn(8, 4)
    data["next", "reward"][:2] = 0.3
    assert GRPOLoss(linear_actor(4))(data)["zero_advantage_fraction"] == 0.25
    lonely = GRPOLoss(linear_actor(1))
    with pytest.warns(UserWarning, match="group_size"):
        assert lonely(drawn(5, 1))["zero_advantage_fraction"] == 1
    lonely(drawn(5, 1))  # says it once
    # what was not profiled does not count as a lesson
    loss, data = played("exact", holes=0.5)
    possible = data["behaviour_log_probs"][:8] > -torch.inf
    data["reward_per_configuration"][:8] = torch.where(possible, 0.3, torch.nan)
    assert loss(data)["zero_advantage_fraction"] == 0.25


@both_objectives
@pytest.mark.parametrize("advantage", [*ADVANTAGES, lambda reward, weight: reward**2])
@pytest.mark.parametrize("unit", [25.0, 0.04])
def test_rewards_in_another_unit_give_the_same_loss(objective, advantage, unit):
    loss, data = played(objective, holes=0.3)
    loss.advantage = advantage
    loss.advantage_clip = 5.0
    loss.kl_to_ref_coeff = loss.entropy_coeff = 0.1
    for parameter in loss.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    loss.reward_spread = 0.5
    loss.advantage_std_floor = loss.advantage_std_eps = 0.01
    wanted = loss(data)
    for key in (("next", "reward"), "reward_per_configuration"):
        data[key] = unit * data[key]
    loss.reward_spread = 0.5 * unit
    loss.advantage_std_floor = loss.advantage_std_eps = 0.01 * unit
    check(loss(data), **{name: value.item() for name, value in wanted.items()})


def test_the_clip_of_the_advantage_arrives():
    loss = GRPOLoss(certain_actor(0.6, 0.4), advantage="centred", advantage_clip=0.2)
    check(loss(two_draws()), loss_objective=-(1.2 - 0.8) / 2 * 0.2)


@pytest.mark.parametrize("advantage", ["zscore", "centred"])
def test_a_group_is_what_torchrls_ppo_gives_on_flat_rows_with_repeated_contexts(advantage):
    data = drawn(16, 5)
    ours = GRPOLoss(linear_actor(5), advantage=advantage, entropy_coeff=0.02)
    stock = ClipPPOLoss(
        linear_actor(None), None, critic_coeff=None, entropy_coeff=0.02, functional=False
    )
    rows = {
        "observation": data["observation"].repeat_interleave(5, 0),
        "action": data["action"].flatten(0, 1),
        "action_log_prob": data["action_log_prob"].flatten(),
        "advantage": grpo.group_advantage(data["next", "reward"], advantage).reshape(-1, 1),
    }
    group, wanted = ours(data), stock(TensorDict(rows, [80]))
    assert 0 < group["clip_fraction"] < 1
    for name in ("loss_objective", "loss_entropy", "entropy", "kl_approx", "clip_fraction"):
        close(group[name], wanted[name])
    slope, wanted_slope = (
        gradient_of(out["loss_objective"] + out["loss_entropy"], loss.actor_network)
        for out, loss in ((group, ours), (wanted, stock))
    )
    close(slope, wanted_slope)


def test_the_exact_gradient_at_the_behaviour_policy_is_the_policy_gradient():
    actor = linear_actor(None)
    data = drawn(7, 2, actor)
    loss = ExactGRPOLoss(actor, advantage="centred")
    log_probs = actor.get_dist(data).log_probs
    probabilities, reward = log_probs.detach().exp(), data["reward_per_configuration"]
    value = (probabilities * reward).sum(-1, keepdim=True)
    analytic = -(probabilities * (reward - value) * log_probs).sum(-1).mean()
    close(gradient(loss, data), gradient_of(analytic, actor))


@both_objectives
def test_what_was_recorded_gets_no_gradient(objective):
    loss, data = played(objective, holes=0.3)
    recorded = [("next", "reward"), "action_log_prob", "behaviour_log_probs", "reference_log_prob"]
    recorded += ["reference_log_probs", "reward_per_configuration"]
    for key in recorded:
        data[key] = data[key].clone().requires_grad_()
    total(loss(data)).backward()
    assert all(data[key].grad is None for key in recorded)


@both_objectives
@pytest.mark.parametrize("advantage", ["zscore", "centred"])
def test_what_was_not_profiled_gives_no_nan(objective, advantage):
    loss, data = played(objective, holes=0.6)
    loss.advantage = advantage
    assert data["reward_per_configuration"].isnan().any()
    assert data["behaviour_log_probs"].isneginf().any()
    for parameter in loss.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    out, slope = loss(data), gradient(loss, data)
    assert all(value.isfinite() for value in out.values())
    assert slope.isfinite().all()
    assert slope.any()
    assert out["kl_to_ref"] > 0
    assert 0 < out["ESS"] < 1


def test_what_is_next_to_impossible_spoils_no_diagnostics():
    actor = certain_actor(1.0, math.exp(-60), 1e-3)
    actor[0].module.weight.data[1] -= 200  # e⁻²⁶⁰ is 0 in float32, its logarithm is not −∞
    data = exact_context([1, 1, 1], [1.0, 0.5, 0.0])
    data["behaviour_log_probs"] = actor.get_dist(data).log_probs.detach()
    assert data["behaviour_log_probs"][0, 1] < -200
    out = ExactGRPOLoss(actor)(data)
    check(out, ESS=1, ratio_mean=1, kl_approx=0, clip_fraction=0)


@both_objectives
def test_leading_axes_are_free_and_without_diagnostics_the_losses_are_the_same(objective):
    loss, data = played(objective, holes=0.3)
    wanted, folded = loss(data), loss(data.reshape(8, 4))
    for name, value in wanted.items():
        close(folded[name], value)
    loss.diagnostics = False
    identical(loss(data), wanted.select("loss_objective", "loss_entropy", "loss_kl_to_ref"))


def test_coefficients_may_be_set_between_steps():
    data, loss = drawn(8, 4), GRPOLoss(linear_actor(4))
    before = loss(data)
    loss.clip_epsilon, loss.kl_to_ref_coeff, loss.entropy_coeff = 0.05, 0.7, 0.3
    after = loss(data)
    assert after["clip_fraction"] > before["clip_fraction"]
    close(after["loss_kl_to_ref"].detach(), 0.7 * before["kl_to_ref"])
    close(after["loss_entropy"].detach(), -0.3 * before["entropy"])


@both_objectives
def test_a_reference_that_is_asked_for_but_missing_is_refused(objective):
    data = drawn(8, 4).exclude("reference_log_prob", "reference_log_probs")
    loss = LOSSES[objective](linear_actor(4))
    assert loss(data)["loss_kl_to_ref"] == 0
    loss.kl_to_ref_coeff = 0.1
    with input_error("'reference_log_prob"):
        loss(data)


def test_an_unknown_advantage_is_refused():
    with pytest.raises(ValueError, match="advantage"):
        GRPOLoss(linear_actor(4), advantage="gae")


def test_the_example_in_the_docstring_runs():
    failed, attempted = doctest.testmod(grpo)
    assert failed == 0
    assert attempted > 5


def test_rewards_without_the_group_of_the_draws_are_refused():
    data = drawn(5, 4)
    data["next", "reward"] = data["next", "reward"][:, :1]
    with pytest.raises(ValueError, match="group_size"):
        GRPOLoss(linear_actor(4))(data)


def test_far_from_the_reference_a_free_kl_does_not_reach_the_gradient():
    net = nn.Linear(1, 2)
    net.bias.data = torch.tensor([0.0, 200.0])
    loss = GRPOLoss(actor_of(net, torch.arange(2).unsqueeze(1), 2), kl_to_ref_coeff=0.0)
    data = two_draws(reference_log_prob=torch.full((1, 2), -1.0))
    data["observation"] = torch.zeros(1, 1)
    data["action_log_prob"] = torch.tensor([[-200.0, 0.0]])
    assert loss(data)["loss_kl_to_ref"] == 0
    assert gradient(loss, data).isfinite().all()


# -- parts of an action under keys of their own ----------------------------------------------------

KNOBS = ["crops", "blocks"]


@pytest.mark.parametrize("kind", ["sampled", "masked", "exact", "rce", "recorded"])
@pytest.mark.parametrize("aggregate", [False, True])
def test_knobs_under_their_own_keys_have_the_losses_and_gradients_of_whole_actions(kind, aggregate):
    data = drawn(8, 4)
    parts = data.exclude("action")
    for name, column in zip(KNOBS, data["action"].unbind(-1), strict=True):
        parts[name], parts[f"{name}_log_prob"] = column, data["action_log_prob"] / 2
    parts["sample_log_prob"] = data["action_log_prob"]
    make, options = RCELoss, {"recorded": kind == "recorded"}
    if kind in ("sampled", "masked", "exact"):
        make, options = GRPOLoss, {"kl_to_ref_coeff": 0.1, "entropy_coeff": 0.01}
        if kind == "exact":
            make = ExactGRPOLoss
        else:
            options["masked"] = kind == "masked"
    with set_composite_lp_aggregate(aggregate):
        whole = make(linear_actor(4), **options)
        loss = make(linear_actor(4, knobs=KNOBS), **options)
        if kind == "sampled":
            keys = ["sample_log_prob"] if aggregate else ["crops_log_prob", "blocks_log_prob"]
            assert loss.tensor_keys.sample_log_prob == keys
            assert {*KNOBS, *keys} <= set(loss.in_keys)
            loss.set_keys(action=KNOBS[::-1])  # names say which is which, not their order
        wanted, out = whole(data.clone()), loss(parts.clone())
        torch.testing.assert_close(out.to_dict(), wanted.to_dict())
        close(gradient(loss, parts), gradient(whole, data))


def test_a_composite_distribution_of_torchrl_gives_what_its_ppo_gives():
    nested = [("knobs", "crops"), ("knobs", "blocks")]
    draw = ProbabilisticTensorDictModule(
        in_keys=["params"],
        distribution_class=CompositeDistribution,
        distribution_kwargs={"distribution_map": dict.fromkeys(nested, Categorical)},
        return_log_prob=True,
    )
    torch.manual_seed(0)
    net = nn.Linear(3, 5).double()
    of_knobs = [("params", *name, "logits") for name in nested]
    split = TensorDictModule(lambda x: net(x).split([3, 2], -1), ["observation"], of_knobs)
    actor = ProbabilisticTensorDictSequential(split, draw)
    flat = TensorDict({"observation": torch.randn(12, 3, dtype=torch.float64)}, [12])
    with set_exploration_type(ExplorationType.RANDOM), torch.no_grad():
        flat = actor(flat)
    flat["knobs", "crops_log_prob"] -= 0.1
    reward = torch.rand(4, 3, dtype=torch.float64)
    flat["advantage"] = grpo.group_advantage(reward, "centred").reshape(-1, 1)
    stock = ClipPPOLoss(actor, None, critic_coeff=None, entropy_coeff=0.02, functional=False)
    ours = GRPOLoss(actor, advantage="centred", entropy_coeff=0.02)
    assert ours.tensor_keys.action == stock.tensor_keys.action == nested
    groups = flat.reshape(4, 3).set(("next", "reward"), reward)
    groups.batch_size = [4]
    wanted, out = stock(flat), ours(groups)
    for name in ("loss_objective", "loss_entropy"):
        close(out[name], wanted[name])
    with input_error("CompositeDistribution"):
        RCELoss(actor)(groups.set("reward_per_configuration", torch.rand(4, 6)))
    with input_error("crops"):
        ours(groups.exclude(("knobs", "crops")))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_heads_that_draw_groups_have_the_entropy_of_an_action(reduction):
    # the parameters are those of contexts, [P], and each head draws a group of 16
    heads = ("crops", "experts", "blocks")
    draw = ProbabilisticTensorDictModule(
        in_keys=["params"],
        distribution_class=CompositeDistribution,
        distribution_kwargs={"distribution_map": dict.fromkeys(heads, Categorical)},
        return_log_prob=True,
    )

    def logits(x):
        return (x.unsqueeze(1).expand(-1, 16, 4).clone(),) * 3

    keys = [("params", head, "logits") for head in heads]
    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(nn.Linear(3, 4), ["observation"], ["x"]),
        TensorDictModule(logits, ["x"], keys),
        draw,
    )
    for parameter in actor.parameters():
        nn.init.zeros_(parameter)
    data = TensorDict({"observation": torch.randn(5, 3)}, [5])
    with set_exploration_type(ExplorationType.RANDOM), torch.no_grad():
        data = actor(data)
    data["next", "reward"] = torch.rand(5, 16)
    out = GRPOLoss(actor, entropy_coeff=0.01, reduction=reduction)(data)
    of_an_action = 3 * math.log(4)
    close(out["entropy"], torch.tensor(of_an_action))
    wanted = {"mean": of_an_action, "sum": 5 * of_an_action}
    expected = torch.full_like(out["loss_entropy"], -0.01 * wanted.get(reduction, of_an_action))
    close(out["loss_entropy"], expected)
    assert out["loss_entropy"].numel() == (5 if reduction == "none" else 1)


class DrawsGroups(TensorDictModuleBase):
    """Its distribution is over the draws of groups, [P, 8], and so is its entropy."""

    in_keys = ["observation"]
    out_keys = ["action", "action_log_prob"]

    def __init__(self):
        super().__init__()
        self.logits = nn.Linear(3, 5)

    def get_dist(self, contexts):
        logits = self.logits(contexts["observation"]).unsqueeze(-2)
        return torch.distributions.Categorical(logits=logits.expand(*logits.shape[:-2], 8, 5))


@pytest.mark.parametrize("batch", [(7,), (7, 2)])
def test_a_distribution_over_draws_has_the_entropy_of_an_action(batch):
    actor, observation = DrawsGroups(), torch.randn(*batch, 3)
    dist = actor.get_dist({"observation": observation})
    action = dist.sample()
    data = TensorDict({"observation": observation, "action": action}, batch)
    data["action_log_prob"] = dist.log_prob(action).detach()
    data["next"] = TensorDict({"reward": torch.rand(*batch, 8)}, batch)
    wanted = -dist.entropy()[..., 0]
    of = {"none": wanted, "sum": wanted.sum(), "mean": wanted.mean()}
    for reduction, loss in of.items():
        out = GRPOLoss(actor, entropy_coeff=1.0, reduction=reduction)(data)
        close(out["loss_entropy"], loss)
        assert out["loss_entropy"].shape == out["loss_objective"].shape
        close(out["entropy"], -of["mean"])
