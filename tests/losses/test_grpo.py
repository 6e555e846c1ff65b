import doctest
import math

import pytest
import torch
from actors import actor_of, certain_actor, real_actor
from helpers import small_table
from tensordict import TensorDict
from tensordict.nn import (
    CompositeDistribution,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    set_composite_lp_aggregate,
)
from torch import nn
from torch.distributions import Categorical
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.objectives import ClipPPOLoss

from knobwise.agents.controller.distributions import KnobCategoricals
from knobwise.common.errors import InputError
from knobwise.losses import GRPOLoss, RCELoss, grpo

both_objectives = pytest.mark.parametrize("objective", ["sampled", "exact"])
GRID = torch.cartesian_prod(torch.arange(3), torch.arange(2))


def linear_actor(group_size, seed=0):
    torch.manual_seed(seed)
    return actor_of(nn.Linear(3, len(GRID)).double(), GRID, group_size)


def drawn(actor, contexts, group_size, seed=0):
    """Contexts, draws of this actor, and the rewards of draws and of every configuration."""
    generator = torch.Generator().manual_seed(seed)
    observation = torch.randn(contexts, 3, dtype=torch.float64, generator=generator)
    reward = torch.rand(contexts, len(GRID), dtype=torch.float64, generator=generator)
    with torch.no_grad():
        log_probs = actor.get_dist(TensorDict({"observation": observation}, [contexts])).log_probs
    index = torch.multinomial(log_probs.exp(), group_size, replacement=True, generator=generator)
    data = {
        "observation": observation,
        "action": GRID[index],
        "action_log_prob": log_probs.gather(1, index),
    }
    data |= {"reward_per_configuration": reward, "behaviour_log_probs": log_probs}
    return TensorDict({**data, "next": {"reward": reward.gather(1, index)}}, [contexts])


def total(loss, data):
    return sum(value for name, value in loss(data).items() if name.startswith("loss_"))


def gradient(loss, data):
    return torch.cat(
        [g.flatten() for g in torch.autograd.grad(total(loss, data), list(loss.parameters()))]
    )


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


def test_sampled_by_hand():
    loss = GRPOLoss(
        certain_actor([0.6, 0.4]),
        clip_epsilon=0.1,
        entropy_coeff=0.01,
        kl_to_ref_coeff=0.5,
        advantage="centred",
    )
    data = two_draws(reference_log_prob=torch.tensor([[0.7, 0.3]]).log())
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
        "ESS": 1 / 1.04,
        "ratio_mean": 1.0,
        "zero_advantage_fraction": 0.0,
        "advantage_mean": 0.0,
        "advantage_std": 0.5,
    }
    assert set(loss(data).keys()) == set(wanted) == set(loss.out_keys)
    check(loss(data), **wanted)


def test_exact_by_hand():
    loss = GRPOLoss(
        certain_actor([0.6, 0.4]), objective="exact", clip_epsilon=0.1, advantage="centred"
    )
    data = exact_context([0.75, 0.25], [1.0, 0.0])
    # mean ¾, A = ¼ and −¾, ρ = .8 and 1.6, neither is cut: −(¾·.8·¼ − ¼·1.6·¾)
    kl = -0.75 * math.log(0.8) - 0.25 * math.log(1.6)
    ess = 1 / (0.75 * 0.64 + 0.25 * 2.56)
    check(loss(data), loss_objective=0.15, kl_approx=kl, ESS=ess)
    assert loss(data)["clip_fraction"] == loss(data)["loss_kl_to_ref"] == 0


def test_groups_that_teach_nothing_are_counted():
    data = drawn(linear_actor(4), 8, 4)
    data["next", "reward"][:2] = 0.3
    assert GRPOLoss(linear_actor(4))(data)["zero_advantage_fraction"] == 0.25
    assert GRPOLoss(linear_actor(1))(drawn(linear_actor(1), 5, 1))["zero_advantage_fraction"] == 1
    loss, data = played("exact", holes=0.5)
    data["reward_per_configuration"][:8] = torch.where(
        data["behaviour_log_probs"][:8] > -torch.inf, 0.3, torch.nan
    )
    assert (
        loss(data)["zero_advantage_fraction"] == 0.25
    )  # what was not profiled does not count as a lesson


def test_the_clip_of_the_advantage_arrives():
    loss = GRPOLoss(certain_actor([0.6, 0.4]), advantage="centred", advantage_clip=0.2)
    check(loss(two_draws()), loss_objective=-(1.2 - 0.8) / 2 * 0.2)


@pytest.mark.parametrize("advantage", ["zscore", "centred"])
def test_a_group_is_what_torchrls_ppo_gives_on_flat_rows_with_repeated_contexts(
    advantage,
):
    data = drawn(linear_actor(5, seed=1), 16, 5)
    ours = GRPOLoss(linear_actor(5), advantage=advantage, entropy_coeff=0.02)
    stock = ClipPPOLoss(
        linear_actor(None), None, critic_coeff=None, entropy_coeff=0.02, functional=False
    )
    flat = TensorDict(
        {
            "observation": data["observation"].repeat_interleave(5, 0),
            "action": data["action"].flatten(0, 1),
            "action_log_prob": data["action_log_prob"].flatten(),
            "advantage": grpo.group_advantage(data["next", "reward"], advantage).reshape(-1, 1),
        },
        [80],
    )
    group, wanted = ours(data), stock(flat)
    assert 0 < group["clip_fraction"] < 1
    for name in ("loss_objective", "loss_entropy", "entropy", "kl_approx"):
        torch.testing.assert_close(group[name], wanted[name])
    for out in (group, wanted):
        (out["loss_objective"] + out["loss_entropy"]).backward()
    for p, q in zip(ours.actor_network.parameters(), stock.actor_network.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_the_exact_gradient_at_the_behaviour_policy_is_the_policy_gradient():
    actor = linear_actor(None)
    data = drawn(actor, 7, 2)
    loss = GRPOLoss(actor, objective="exact", advantage="centred")
    log_probs = actor.get_dist(data).log_probs
    probabilities, reward = log_probs.detach().exp(), data["reward_per_configuration"]
    value = (probabilities * reward).sum(-1, keepdim=True)
    analytic = -(probabilities * (reward - value) * log_probs).sum(-1).mean()
    wanted = torch.autograd.grad(analytic, list(actor.parameters()))
    torch.testing.assert_close(gradient(loss, data), torch.cat([g.flatten() for g in wanted]))


@both_objectives
def test_what_was_recorded_gets_no_gradient(objective):
    loss, data = played(objective, holes=0.3)
    recorded = [("next", "reward"), "action_log_prob", "behaviour_log_probs", "reference_log_prob"]
    recorded += ["reference_log_probs", "reward_per_configuration"]
    for key in recorded:
        data[key] = data[key].clone().requires_grad_()
    total(loss, data).backward()
    assert all(data[key].grad is None for key in recorded)


def played(objective, holes):
    actor, env = real_actor(holes, group_size=6)
    with set_exploration_type(ExplorationType.RANDOM), torch.no_grad():
        data = env.rollout(1, actor).squeeze(-1)
    data["behaviour_log_probs"] = data["reference_log_probs"] = data.pop("log_probs")
    data["reference_log_prob"] = data["action_log_prob"]
    loss = GRPOLoss(actor, objective=objective, kl_to_ref_coeff=0.1, entropy_coeff=0.01)
    return loss, data


@both_objectives
@pytest.mark.parametrize("advantage", ["zscore", "centred"])
def test_what_was_not_profiled_gives_no_nan(objective, advantage):
    loss, data = played(objective, holes=0.6)
    loss.advantage = advantage
    assert data["reward_per_configuration"].isnan().any()
    assert (data["behaviour_log_probs"] == -torch.inf).any()
    with torch.no_grad():
        for parameter in loss.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    out = loss(data)
    assert all(value.isfinite() for value in out.values())
    assert gradient(loss, data).isfinite().all()
    assert gradient(loss, data).abs().sum() > 0
    assert out["kl_to_ref"] > 0
    assert 0 < out["ESS"] < 1


def test_the_index_of_a_draw_may_stand_in_for_its_action():
    loss, data = played("sampled", holes=0.3)
    wanted, slope = loss(data), gradient(loss, data)
    data["configuration"] = small_table(holes=0.3).find(data.pop("action"))
    assert all(torch.equal(wanted[name], value) for name, value in loss(data).items())
    assert torch.equal(gradient(loss, data), slope)


def test_what_is_next_to_impossible_spoils_no_diagnostics():
    loss = GRPOLoss(certain_actor([1.0, math.exp(-60), 1e-3]), objective="exact")
    with torch.no_grad():
        loss.actor_network[0].module.weight[1] -= (
            200  # e⁻²⁶⁰ is 0 in float32, its logarithm is not −∞
        )
        behaviour = loss.actor_network.get_dist(
            TensorDict({"observation": torch.ones(1, 1)}, [1])
        ).log_probs
    assert behaviour[0, 1] < -200
    out = loss(exact_context([1, 1, 1], [1.0, 0.5, 0.0]).set("behaviour_log_probs", behaviour))
    check(out, ESS=1, ratio_mean=1, kl_approx=0, clip_fraction=0)


@both_objectives
def test_leading_axes_are_free_and_without_diagnostics_the_losses_are_the_same(
    objective,
):
    loss, data = played(objective, holes=0.3)
    wanted, folded = loss(data), loss(data.reshape(8, 4))
    for name, value in wanted.items():
        torch.testing.assert_close(folded[name], value)
    loss.diagnostics = False
    losses = loss(data)
    assert list(losses.keys()) == ["loss_objective", "loss_entropy", "loss_kl_to_ref"]
    assert all(torch.equal(wanted[name], value) for name, value in losses.items())


def test_coefficients_may_be_set_between_steps():
    data = drawn(linear_actor(4, seed=1), 8, 4)
    data["reference_log_prob"] = data["action_log_prob"]
    loss = GRPOLoss(linear_actor(4))
    assert "reference_log_prob" in loss.in_keys
    before = loss(data)
    loss.clip_epsilon, loss.kl_to_ref_coeff, loss.entropy_coeff = 0.05, 0.7, 0.3
    after = loss(data)
    assert after["clip_fraction"] > before["clip_fraction"]
    torch.testing.assert_close(after["loss_kl_to_ref"].detach(), 0.7 * before["kl_to_ref"])
    torch.testing.assert_close(after["loss_entropy"].detach(), -0.3 * before["entropy"])


def test_a_reference_that_is_asked_for_but_missing_is_loud():
    data = drawn(linear_actor(4), 8, 4)
    for objective in ("sampled", "exact"):
        assert GRPOLoss(linear_actor(4), objective=objective)(data)["loss_kl_to_ref"] == 0
        loss = GRPOLoss(linear_actor(4), objective=objective, kl_to_ref_coeff=0.1)
        assert loss(data)["loss_kl_to_ref"].isnan()


@pytest.mark.parametrize("settings", [{"objective": "all"}, {"advantage": "gae"}])
def test_other_settings_are_refused(settings):
    with pytest.raises(ValueError, match=str(*settings)):
        GRPOLoss(linear_actor(4), **settings)


def test_the_example_in_the_docstring_runs():
    failed, attempted = doctest.testmod(grpo)
    assert failed == 0
    assert attempted > 5


def test_rewards_without_the_group_of_the_draws_are_refused():
    data = drawn(linear_actor(4), 5, 4)
    data["next", "reward"] = data["next", "reward"][:, :1]
    with pytest.raises(ValueError, match="group_size"):
        GRPOLoss(linear_actor(4))(data)


def test_far_from_the_reference_a_free_kl_does_not_reach_the_gradient():
    net = nn.Linear(1, 4)
    net.bias.data = torch.tensor([200.0, 0.0, 0.0, 0.0])
    actor = actor_of(net, torch.arange(4).unsqueeze(1), 2)
    loss = GRPOLoss(actor, kl_to_ref_coeff=0.0)
    data = {"observation": torch.zeros(1, 1), "action": torch.tensor([[[1], [2]]])}
    data |= {
        "action_log_prob": torch.full((1, 2), -200.0),
        "reference_log_prob": torch.full((1, 2), -1.0),
    }
    data = TensorDict({**data, "next": {"reward": torch.rand(1, 2)}}, [1])
    assert loss(data)["loss_kl_to_ref"] == 0
    assert gradient(loss, data).isfinite().all()


# -- parts of an action under keys of their own ----------------------------------------------------

KNOBS = ["crops", "blocks"]


def separate_actor(group_size):
    """The same policy as `linear_actor` with each knob under its own key."""
    net = linear_actor(group_size)[0]
    draw = ProbabilisticTensorDictModule(
        in_keys=["log_probs"],
        out_keys=KNOBS,
        distribution_class=KnobCategoricals,
        distribution_kwargs={"names": KNOBS, "configurations": GRID, "group_size": group_size},
        return_log_prob=True,
    )
    return ProbabilisticTensorDictSequential(net, draw)


@pytest.mark.parametrize("kind", ["sampled", "masked", "exact", "rce", "recorded"])
@pytest.mark.parametrize("aggregate", [False, True])
def test_knobs_under_their_own_keys_have_the_losses_and_gradients_of_whole_actions(kind, aggregate):
    data = drawn(linear_actor(4, seed=1), 8, 4)
    data["group_mask"] = torch.arange(4) < torch.arange(8).unsqueeze(1)
    data["reference_log_prob"] = data["action_log_prob"] - 0.1
    data["reference_log_probs"] = data["behaviour_log_probs"].roll(1, -1)
    parts = data.exclude("action")
    for name, column in zip(KNOBS, data["action"].unbind(-1), strict=True):
        parts[name], parts[f"{name}_log_prob"] = column, data["action_log_prob"] / 2
    parts["sample_log_prob"] = data["action_log_prob"]
    make = RCELoss if kind in ("rce", "recorded") else GRPOLoss
    options = {"recorded": kind == "recorded"}
    if make is GRPOLoss:
        options = {"kl_to_ref_coeff": 0.1, "entropy_coeff": 0.01, "masked": kind == "masked"}
        options["objective"] = "exact" if kind == "exact" else "sampled"
    with set_composite_lp_aggregate(aggregate):
        whole = make(linear_actor(4), **options)
        loss = make(separate_actor(4), **options)
        if kind == "sampled":
            wanted_keys = (
                ["sample_log_prob"] if aggregate else [f"{name}_log_prob" for name in KNOBS]
            )
            assert loss.tensor_keys.sample_log_prob == wanted_keys
            assert {*KNOBS, *wanted_keys} <= set(loss.in_keys)
            loss.set_keys(action=KNOBS[::-1])  # names say which is which, not their order
        wanted, out = whole(data.clone()), loss(parts.clone())
        torch.testing.assert_close(out.to_dict(), wanted.to_dict())
        torch.testing.assert_close(gradient(loss, parts), gradient(whole, data))


def test_a_composite_distribution_of_torchrl_gives_what_its_ppo_gives():
    nested = [("knobs", "crops"), ("knobs", "blocks")]
    draw = ProbabilisticTensorDictModule(
        in_keys=["params"],
        distribution_class=CompositeDistribution,
        distribution_kwargs={"distribution_map": dict.fromkeys(nested, Categorical)},
        return_log_prob=True,
    )
    torch.manual_seed(0)
    logits = TensorDictModule(nn.Linear(3, 5).double(), ["observation"], ["logits"])
    of_knobs = [("params", *name, "logits") for name in nested]
    split = TensorDictModule(lambda logits: logits.split([3, 2], -1), ["logits"], of_knobs)
    actor = ProbabilisticTensorDictSequential(logits, split, draw)
    flat = TensorDict({"observation": torch.randn(12, 3, dtype=torch.float64)}, [12])
    with set_exploration_type(ExplorationType.RANDOM), torch.no_grad():
        flat = actor(flat)
    flat["knobs", "crops_log_prob"] -= 0.1
    reward = torch.rand(4, 3, dtype=torch.float64)
    flat["advantage"] = (reward - reward.mean(-1, keepdim=True)).reshape(-1, 1)
    stock = ClipPPOLoss(actor, None, critic_coeff=None, entropy_coeff=0.02, functional=False)
    ours = GRPOLoss(actor, advantage="centred", entropy_coeff=0.02)
    assert ours.tensor_keys.action == stock.tensor_keys.action == nested
    groups = flat.reshape(4, 3).set(("next", "reward"), reward)
    groups.batch_size = [4]
    wanted, out = stock(flat), ours(groups)
    for name in ("loss_objective", "loss_entropy"):
        torch.testing.assert_close(out[name], wanted[name])
    with pytest.raises(InputError, match="CompositeDistribution"):
        RCELoss(actor)(groups.set("reward_per_configuration", torch.rand(4, 6)))
    with pytest.raises(KeyError, match="crops"):
        ours(groups.exclude(("knobs", "crops")))
