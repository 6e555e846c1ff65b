"""Losses of an actor that draws each knob under its own key, by TorchRL's `CompositeDistribution`."""

import math
from typing import Any

import pytest
import torch
from actors import actor_of
from tensordict import TensorDict
from tensordict.nn import (
    CompositeDistribution,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    set_composite_lp_aggregate,
)
from tensordict.utils import NestedKey
from torch import Tensor, nn, vmap
from torch.distributions import Categorical
from torchrl.objectives import ClipPPOLoss

from knobwise.losses import GRPOLoss, RCELoss

NAMES: list[NestedKey] = ["max_crops", "top_k", "num_active_blocks"]
SIZES = (3, 2, 2)
GRID = torch.cartesian_prod(*map(torch.arange, SIZES))
LOSSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "sampled": (GRPOLoss, {"kl_to_ref_coeff": 0.1, "entropy_coeff": 0.01}),
    "masked": (GRPOLoss, {"kl_to_ref_coeff": 0.1, "masked": True}),
    "exact": (GRPOLoss, {"objective": "exact", "kl_to_ref_coeff": 0.1, "entropy_coeff": 0.01}),
    "rce": (RCELoss, {"temperature": 0.3}),
    "recorded": (RCELoss, {"recorded": True}),
}
every_loss = pytest.mark.parametrize("kind", sorted(LOSSES))


class Heads(nn.Module):
    """Logits for each knob from an observation; a group axis where each draw is to have a distribution of its own."""

    def __init__(self, group_size: int | None = None, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear, self.group_size = nn.Linear(3, sum(SIZES)).double(), group_size

    def forward(self, observation: Tensor) -> tuple[Tensor, ...]:
        logits = self.linear(observation)
        if self.group_size is not None:
            logits = logits.unsqueeze(-2).expand(*logits.shape[:-1], self.group_size, -1)
        return logits.split(SIZES, -1)


class Joint(nn.Module):
    """The same as logits of the configurations."""

    def __init__(self, heads: Heads) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, observation: Tensor) -> Tensor:
        each = zip(self.heads(observation), GRID.unbind(1), strict=True)
        return sum(logits[..., column] for logits, column in each)


def composite(heads: nn.Module, names: list[NestedKey] = NAMES, **settings: Any) -> ProbabilisticTensorDictSequential:
    """As a TorchRL user writes it."""
    outputs = [("params", *([name] if isinstance(name, str) else name), "logits") for name in names]
    draw = ProbabilisticTensorDictModule(
        in_keys=["params"],
        distribution_class=CompositeDistribution,
        distribution_kwargs={
            "distribution_map": dict.fromkeys(names, Categorical),
            "extra_kwargs": {name: {"validate_args": False} for name in names},
        },
        return_log_prob=True,
        **settings,
    )
    return ProbabilisticTensorDictSequential(TensorDictModule(heads, ["observation"], outputs), draw)


def recorded(contexts: int = 5, group: int = 4, names: list[NestedKey] = NAMES) -> TensorDict:
    generator = torch.Generator().manual_seed(0)
    old, reference = torch.randn(2, contexts, len(GRID), dtype=torch.float64, generator=generator).log_softmax(-1)
    index = torch.randint(len(GRID), (contexts, group), generator=generator)
    reward = torch.rand(contexts, len(GRID), dtype=torch.float64, generator=generator)
    data = {
        "observation": torch.randn(contexts, 3, dtype=torch.float64, generator=generator),
        "action": GRID[index],
        "action_log_prob": old.gather(1, index),
        "reference_log_prob": reference.gather(1, index),
        "group_mask": torch.arange(group) < torch.arange(contexts).unsqueeze(1),
        "reward_per_configuration": reward,
        "behaviour_log_probs": old,
        "reference_log_probs": reference,
        "next": {"reward": reward.gather(1, index)},
    }
    data = TensorDict(data, [contexts])
    for name, column in zip(names, data["action"].unbind(-1), strict=True):
        if isinstance(name, tuple) and name[0] in data and isinstance(data[name[0]], Tensor):
            del data[name[0]]  # the key now holds the knobs
        data[name] = column
    return data


def total(out: TensorDict) -> Tensor:
    return torch.stack([value for name, value in out.items() if name.startswith("loss_")]).sum()


def gradient(out: TensorDict, heads: nn.Module) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(total(out), list(heads.parameters()))])


# -- by hand -----------------------------------------------------------------------------------------------------------


class Certain(nn.Module):
    """p(a) = (.6, .4) and p(b) = (.7, .3), whatever it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.tensor(p).log()) for p in ([0.6, 0.4], [0.7, 0.3]))

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        return self.a.expand(len(observation), -1), self.b.expand(len(observation), -1)


AB: list[NestedKey] = ["a", "b"]
SQUARE = torch.cartesian_prod(torch.arange(2), torch.arange(2))
ENTROPY = -sum(p * math.log(p) for p in (0.6, 0.4, 0.7, 0.3))


def test_sampled_grpo_by_hand() -> None:
    loss = GRPOLoss(composite(Certain(), AB), clip_epsilon=0.1, entropy_coeff=0.01, advantage="centred")
    # draws (0, 0) and (1, 1), of probability .42 and .12, drawn with ½ · ¾ and ½ · ¼
    half, parts = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.75, 0.25]]).log()
    data = {"observation": torch.ones(1, 1), "a": torch.tensor([[0, 1]]), "b": torch.tensor([[0, 1]])}
    data |= {"a_log_prob": half, "b_log_prob": parts, "next": {"reward": torch.tensor([[1.0, 0.0]])}}
    out = loss(TensorDict(data, [1]))
    # A = ±½, ρ = .42/.375 = 1.12, clipped to 1.1, and .12/.125 = .96: −(½·1.1 − ½·.96)/2
    assert out["loss_objective"].item() == pytest.approx(-0.035)
    assert out["entropy"].item() == pytest.approx(ENTROPY)
    assert out["loss_entropy"].item() == pytest.approx(-0.01 * ENTROPY)
    assert out["ratio_mean"].item() == pytest.approx((1.12 + 0.96) / 2)


def test_exact_grpo_and_rce_by_hand() -> None:
    data = {"observation": torch.ones(1, 1), "behaviour_log_probs": torch.full((1, 4), 0.25).log()}
    data["reward_per_configuration"] = torch.tensor([[math.log(2), 0.0, 0.0, 0.0]])
    data = TensorDict(data, [1])
    actor = composite(Certain(), AB)
    out = GRPOLoss(actor, objective="exact", advantage="unnormalised", clip_epsilon=9, configurations=SQUARE)(data)
    # ρ of (0, 0) is .42/.25, the only one with a reward
    assert out["loss_objective"].item() == pytest.approx(-0.25 * 1.68 * math.log(2))
    assert out["entropy"].item() == pytest.approx(ENTROPY)
    out = RCELoss(actor, temperature=1.0, configurations=SQUARE)(data)  # target 2 : 1 : 1 : 1
    wanted = -(2 * math.log(0.42) + math.log(0.18) + math.log(0.28) + math.log(0.12)) / 5
    assert out["loss_rce"].item() == pytest.approx(wanted)


# -- the same as one distribution over configurations ------------------------------------------------------------------


@every_loss
@pytest.mark.parametrize("group_size", [None, 4])
@pytest.mark.parametrize("functional", [True, False])
def test_losses_and_gradients_are_those_of_the_joint_distribution(
    kind: str, group_size: int | None, functional: bool
) -> None:
    make, settings = LOSSES[kind]
    joint, heads = Joint(Heads()), Heads(group_size)
    wanted = make(actor_of(joint, GRID, 4), functional=functional, **settings)(recorded())
    loss = make(composite(heads), configurations=GRID, functional=functional, **settings)
    loss.set_keys(**({"sample_log_prob": "action_log_prob"} if make is GRPOLoss else {}))
    out = loss(recorded())
    for name, value in wanted.items():
        torch.testing.assert_close(out[name], value)
    torch.testing.assert_close(gradient(out, heads), gradient(wanted, joint))


def test_a_flat_batch_is_what_torchrls_ppo_gives() -> None:
    heads, data = Heads(), recorded(16, 5)
    flat = TensorDict({"observation": data["observation"].repeat_interleave(5, 0)}, [80])
    for name in NAMES:
        flat[name] = data[name].flatten()
        flat[f"{name}_log_prob"] = flat[name] * 0.1 - 1.0
        data[f"{name}_log_prob"] = flat[f"{name}_log_prob"].reshape(16, 5)
    flat["advantage"] = (data["next", "reward"] - data["next", "reward"].mean(-1, keepdim=True)).reshape(-1, 1)
    stock = ClipPPOLoss(composite(heads), None, critic_coeff=None, entropy_coeff=0.02, functional=False)
    ours = GRPOLoss(composite(heads), advantage="centred", entropy_coeff=0.02, functional=False)
    wanted, out = stock(flat), ours(data)
    for name in ("loss_objective", "loss_entropy"):
        torch.testing.assert_close(out[name], wanted[name])
    assert stock.tensor_keys.action == ours.tensor_keys.action == NAMES
    assert stock.tensor_keys.sample_log_prob == ours.tensor_keys.sample_log_prob


# -- keys --------------------------------------------------------------------------------------------------------------


def test_keys_are_those_of_the_actor_and_all_are_read() -> None:
    loss = GRPOLoss(composite(Heads()))
    assert loss.tensor_keys.action == NAMES
    assert loss.tensor_keys.sample_log_prob == [f"{name}_log_prob" for name in NAMES]
    drawn = [*NAMES, *loss.tensor_keys.sample_log_prob]
    read = set(composite(Heads()).in_keys)
    assert set(loss.in_keys) == {*read, *drawn, ("next", "reward"), "reference_log_prob"}
    assert set(RCELoss(composite(Heads()), configurations=GRID).in_keys) == {*read, "reward_per_configuration"}
    with set_composite_lp_aggregate(True):
        assert GRPOLoss(composite(Heads())).tensor_keys.sample_log_prob == "sample_log_prob"


def split_log_prob(data: TensorDict, shares: tuple[float, ...] = (0.5, 0.3, 0.2)) -> TensorDict:
    for name, share in zip(NAMES, shares, strict=True):
        for source in ("action", "reference"):
            data[source, f"{name}_lp"] = data[f"{source}_log_prob"] * share
    return data


def test_log_probs_may_be_a_list_of_keys_or_one_summed_and_keys_may_be_nested() -> None:
    nested: list[NestedKey] = [("action", name) for name in NAMES]
    loss = GRPOLoss(composite(Heads()), kl_to_ref_coeff=0.1)
    loss.set_keys(action=NAMES, sample_log_prob="action_log_prob")
    wanted = loss(recorded())
    loss = GRPOLoss(composite(Heads(), nested), kl_to_ref_coeff=0.1)
    lists = {
        f"{s}_log_prob": [(t, f"{name}_lp") for name in NAMES] for s, t in (("sample", "action"), ("reference",) * 2)
    }
    loss.set_keys(action=nested[::-1], **lists)  # names say which is which, not their order
    assert {*nested, *lists["sample_log_prob"], *lists["reference_log_prob"]} <= set(loss.in_keys)
    data = split_log_prob(recorded(names=nested))
    for name, value in loss(data.clone()).items():
        torch.testing.assert_close(value, wanted[name])
    # without a tensordict
    keys = [key for key in loss.in_keys if key in data.keys(True)]
    keywords = {"_".join([key] if isinstance(key, str) else key): data[key] for key in keys}
    for name, value in zip(loss.out_keys, loss(**keywords), strict=True):
        torch.testing.assert_close(value, wanted[name])
    del data["reference", "top_k_lp"]
    assert loss(data)["loss_kl_to_ref"].isnan()


def test_keys_that_are_not_those_of_the_actor_are_refused() -> None:
    loss = GRPOLoss(composite(Heads()))
    for keys in ("action", ["max_crops", "top_k"], [*NAMES, "depth"]):
        loss.set_keys(action=keys, sample_log_prob="action_log_prob")
        with pytest.raises(ValueError, match=r"the actor draws max_crops, top_k, num_active_blocks, .*set_keys"):
            loss(recorded())


@pytest.mark.parametrize("kind", ["exact", "rce"])
def test_over_all_configurations_they_have_to_be_known(kind: str) -> None:
    make, settings = LOSSES[kind]
    with pytest.raises(ValueError, match=r"configurations=table\.configurations"):
        make(composite(Heads()), **settings)(recorded())


def test_rewards_without_the_group_of_the_draws_are_refused() -> None:
    data = recorded()
    data["next", "reward"] = data["next", "reward"][:, :1]
    loss = GRPOLoss(composite(Heads()))
    loss.set_keys(sample_log_prob="action_log_prob")
    with pytest.raises(ValueError, match=r"rewards are \(5, 1\) and log-probs of draws \(5, 4\).*group_size"):
        loss(data)


# -- what TorchRL asks -------------------------------------------------------------------------------------------------


@every_loss
def test_many_parameters_at_once_under_vmap(kind: str) -> None:
    make, settings = LOSSES[kind]
    losses = [make(composite(Heads(seed=seed)), configurations=GRID, **settings) for seed in range(3)]
    for loss in losses:
        loss.set_keys(**({"sample_log_prob": "action_log_prob"} if make is GRPOLoss else {}))
    stacked = torch.stack([TensorDict.from_module(loss).data for loss in losses])

    def call(parameters: TensorDict, data: TensorDict) -> Tensor:
        with parameters.to_module(losses[0]):
            return total(losses[0](data.clone()))

    result = vmap(call, (0, None))(stacked, recorded())
    torch.testing.assert_close(result, torch.stack([total(loss(recorded())).detach() for loss in losses]))


@pytest.mark.parametrize("aggregate", [False, True])
def test_what_such_an_actor_draws_is_what_the_loss_reads(aggregate: bool) -> None:
    with set_composite_lp_aggregate(aggregate):
        actor = composite(Heads())
        loss = GRPOLoss(actor, functional=False)
        data = TensorDict({"observation": torch.randn(20, 3, dtype=torch.float64)}, [20])
        with torch.no_grad():
            data = actor(data)
        group = data.select(*NAMES, *actor.log_prob_keys).unsqueeze(-1)
        group.batch_size = [20]
        group["observation"], group["next", "reward"] = data["observation"], torch.rand(20, 1, dtype=torch.float64)
        out = loss(group)
        assert out["ratio_mean"].item() == pytest.approx(1)
        assert out["kl_approx"].item() == pytest.approx(0, abs=1e-12)
