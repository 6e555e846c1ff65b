"""What TorchRL asks of a loss module, for all of ours (as its own test suite asks it of the stock
ones)."""

import copy

import pytest
import torch
from actors import actor_of
from tensordict import TensorDict
from tensordict.utils import unravel_key
from torch import nn

from knobwise.losses import ExactGRPOLoss, GRPOLoss, RCELoss

GRID = torch.cartesian_prod(torch.arange(2), torch.arange(3))
SAMPLED = {"kl_to_ref_coeff": 0.1, "entropy_coeff": 0.01}
DRAWN = {"action", ("next", "reward")}
OLD = {"action_log_prob", "reference_log_prob"}
ALL = {"reward_per_configuration", "behaviour_log_probs", "reference_log_probs"}
KINDS = {
    "sampled": (GRPOLoss, SAMPLED, DRAWN | OLD),
    "exact": (ExactGRPOLoss, SAMPLED, ALL),
    "masked": (GRPOLoss, SAMPLED | {"masked": True}, DRAWN | OLD | {"group_mask"}),
    "rce": (RCELoss, {}, {"reward_per_configuration"}),
    "recorded": (RCELoss, {"recorded": True}, DRAWN | {"group_mask"}),
}
every_kind = pytest.mark.parametrize("kind", sorted(KINDS))
# tensordict asks for a setting that this torch no longer has
library_warning = pytest.mark.filterwarnings("ignore:.*inline_inbuilt_nn_modules:FutureWarning")
either_way = pytest.mark.parametrize("functional", [True, False])


def make_actor(seed=0):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, len(GRID)))
    return actor_of(net, GRID, 4)


def make_loss(kind, seed=0, **settings):
    loss, defaults, _ = KINDS[kind]
    return loss(make_actor(seed), **{**defaults, **settings})


def make_data(contexts=5):
    generator = torch.Generator().manual_seed(0)
    old, reference = torch.randn(2, contexts, len(GRID), generator=generator).log_softmax(-1)
    index = torch.randint(len(GRID), (contexts, 4), generator=generator)
    reward = torch.rand(contexts, len(GRID), generator=generator)
    return TensorDict(
        {
            "observation": torch.randn(contexts, 3, generator=generator),
            "action": GRID[index],
            "action_log_prob": old.gather(1, index),
            "reference_log_prob": reference.gather(1, index),
            "group_mask": torch.arange(4)
            < torch.arange(contexts).unsqueeze(1),  # the first group is empty
            "next": {"reward": reward.gather(1, index)},
            "reward_per_configuration": reward,
            "behaviour_log_probs": old,
            "reference_log_probs": reference,
        },
        [contexts],
    )


def total(out):
    return torch.stack([value for name, value in out.items() if name.startswith("loss_")]).sum()


def assert_same(result, wanted):
    assert all(torch.equal(result[name], value) for name, value in wanted.items())


@every_kind
def test_reading_and_writing_keys_are_told(kind):
    loss = make_loss(kind)
    assert set(loss.in_keys) == {"observation", *KINDS[kind][2]}
    out = loss(make_data().select(*loss.in_keys))
    assert set(out.keys()) == set(loss.out_keys)
    assert out.batch_size == torch.Size([])
    assert all(value.requires_grad == name.startswith("loss_") for name, value in out.items())


@every_kind
@either_way
def test_every_key_can_be_renamed(kind, functional):
    wanted = make_loss(kind, functional=functional)(make_data())
    loss = make_loss(kind, functional=functional)
    for name in loss.default_keys.__dataclass_fields__:
        key = getattr(loss.default_keys(), name)
        changed = copy.deepcopy(loss)
        assert changed.tensor_keys == loss.default_keys()
        changed.set_keys(**{name: ("other", "place")})
        assert (("other", "place") in changed.in_keys) == (unravel_key(key) in KINDS[kind][2])
        assert key not in changed.in_keys
        data = make_data()
        if name == "configuration":  # may stand in for the action
            data["configuration"] = data.pop("action") @ torch.tensor([3, 1])
        assert_same(changed(data.rename_key_(key, ("other", "place"))), wanted)
        changed.set_keys(**{name: None})  # back to what it was
        assert changed.in_keys == loss.in_keys
    with pytest.raises(ValueError, match="unknown"):
        loss.set_keys(unknown="key")


class Rows(nn.Module):
    """A network with a table of its own, which it does not save."""

    def __init__(self, rows):
        super().__init__()
        self.layer = nn.Linear(3, len(GRID))
        self.register_buffer("table", torch.arange(float(rows)), persistent=False)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x):
        return self.layer(x) * self.scale


@pytest.mark.parametrize("before", [True, False], ids=["saved before", "saved now"])
def test_a_state_holds_nothing_of_a_table_and_fits_with_another(before):
    first, other = (GRPOLoss(actor_of(Rows(rows), GRID, 4)) for rows in (50, 7))
    state = first.state_dict()
    assert all(values.numel() < 50 for values in state.values())
    assert not [key for key in state if "table" in key]
    assert [key for key in state if "scale" in key]
    if before:
        # earlier versions saved the table too
        place = next(key for key in state if "scale" in key).replace("scale", "table")
        state[place] = torch.zeros(50)
    keys = list(state)
    assert not any(other.load_state_dict(state))
    assert list(state) == keys
    assert torch.equal(
        nn.utils.parameters_to_vector(first.parameters()),
        nn.utils.parameters_to_vector(other.parameters()),
    )
    (table,) = (value for key, value in other.named_buffers() if key.endswith("table"))
    assert torch.equal(table, torch.arange(7.0))
    both = nn.ModuleDict({"inner": first})
    assert not [key for key in both.state_dict() if "table" in key]
    both.load_state_dict(both.state_dict())


@every_kind
def test_functional_or_not_gives_the_same_loss_and_gradients(kind):
    module = make_loss(kind, functional=False)
    loss = make_loss(kind)
    assert set(dict(loss.named_parameters())) != set(dict(module.named_parameters()))
    total(module(make_data())).backward()
    total(loss(make_data())).backward()
    for ours, wanted in zip(loss.parameters(), module.parameters(), strict=True):
        assert torch.equal(ours.grad, wanted.grad)


@pytest.mark.parametrize("kind", ["sampled", "exact", "rce"])
def test_it_runs_under_vmap_over_stacked_parameters(kind):
    data = make_data()
    losses = [make_loss(kind, seed) for seed in (0, 1)]
    stacked = torch.stack([TensorDict.from_module(loss) for loss in losses])
    loss = losses[0]

    def loss_of(parameters):
        with parameters.to_module(loss):
            return total(loss(data.clone()))

    with torch.no_grad():
        wanted = torch.stack([total(each(data.clone())) for each in losses])
        torch.testing.assert_close(torch.vmap(loss_of)(stacked), wanted)


@every_kind
def test_the_input_is_left_and_all_parameters_get_a_gradient(kind):
    loss, data = make_loss(kind), make_data()
    total(loss(data)).backward()
    assert_same(data.flatten_keys(), make_data().flatten_keys())
    assert len(list(loss.parameters())) == 4
    assert all(p.grad.abs().sum() > 0 for p in loss.parameters())


@every_kind
def test_reductions_agree(kind):
    none, mean, added = (make_loss(kind, reduction=r)(make_data()) for r in ("none", "mean", "sum"))
    for name, value in mean.items():
        if name.startswith("loss_"):
            assert none[name].shape == (5,)
            torch.testing.assert_close(none[name].mean(), value)
            torch.testing.assert_close(none[name].sum(), added[name])
        else:
            assert torch.equal(none[name], value)
    assert_same(make_loss(kind, reduction=None)(make_data()), mean)
    assert make_loss(kind).reduction == make_loss(kind, reduction=None).reduction == "mean"


@every_kind
def test_contexts_marked_as_padding_do_not_count(kind):
    wanted = make_loss(kind)(make_data()[:3])
    padded = make_data().set(("collector", "mask"), torch.tensor([True] * 3 + [False] * 2))
    result = make_loss(kind)(padded)
    losses = [name for name in result.keys() if name.startswith("loss_")]  # noqa: SIM118 (not a dict)
    assert all(result[name].allclose(wanted[name]) for name in losses)


def keywords(loss, data):
    return {"_".join([key] if isinstance(key, str) else key): data[key] for key in loss.in_keys}


@every_kind
def test_it_can_be_called_without_a_tensordict(kind):
    loss, data = make_loss(kind), make_data()
    wanted = loss(data.clone())
    named = keywords(loss, data)
    for result in (loss(**named), loss(*named.values())):
        assert len(result) == len(loss.out_keys)
        assert all(
            torch.equal(value, wanted[name])
            for name, value in zip(loss.out_keys, result, strict=True)
        )


# -- torch.compile, as TorchRL's own losses allow it -----------------------------------------------


def gradients(loss, out):
    return list(torch.autograd.grad(total(out), [p for p in loss.parameters() if p.requires_grad]))


def in_one_graph(loss):
    torch.compiler.reset()
    return torch.compile(loss, fullgraph=True, backend="eager")


def assert_same_under_compile(compiled, loss, data):
    wanted = loss(data.clone())
    result = compiled(data.clone())
    assert set(result.keys()) == set(wanted.keys())
    for name, value in wanted.items():
        torch.testing.assert_close(result[name], value, equal_nan=True)
    torch.testing.assert_close(gradients(loss, result), gradients(loss, wanted), equal_nan=True)


@library_warning
@pytest.mark.parametrize(
    ("kind", "functional"),
    [("masked", False), ("rce", False), ("recorded", False), ("sampled", True)],
)
def test_it_compiles(kind, functional):
    """The others are compiled in the next test."""
    loss = make_loss(kind, functional=functional)
    assert_same_under_compile(in_one_graph(loss), loss, make_data())


@library_warning
@pytest.mark.parametrize("objective", ["sampled", "exact"])
def test_terms_that_are_switched_off_are_off_under_compile_too(objective):
    loss = {"sampled": GRPOLoss, "exact": ExactGRPOLoss}[objective](make_actor(), functional=False)
    data = make_data()
    compiled = in_one_graph(loss)
    far = data.clone()
    # e⁵⁰⁰ is infinite
    far["reference_log_prob"][0] = 500.0
    far["reference_log_probs"][0] = 500.0
    assert_same_under_compile(compiled, loss, far)
    # and on again
    loss.kl_to_ref_coeff = 0.1
    loss.entropy_coeff = 0.01
    assert_same_under_compile(compiled, loss, data)
    del data["reference_log_prob"], data["reference_log_probs"]
    with pytest.raises(RuntimeError, match="reference"):
        compiled(data)
    loss.kl_to_ref_coeff = 0.0
    assert_same_under_compile(compiled, loss, data)
