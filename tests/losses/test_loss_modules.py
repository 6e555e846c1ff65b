"""What TorchRL asks of a loss module, for all of ours (as its own test suite asks it of the stock
ones)."""

import copy

import pytest
import torch
from actors import drawn, linear_actor, total
from helpers import close, identical
from tensordict.utils import unravel_key

from knobwise.losses import GRPOLoss, RCELoss

SAMPLED = {"objective": "sampled", "kl_to_ref_coeff": 0.1, "entropy_coeff": 0.01}
DRAWN = {"action", ("next", "reward")}
OLD = {"action_log_prob", "reference_log_prob"}
ALL = {"reward_per_configuration", "behaviour_log_probs", "reference_log_probs"}
KINDS = {
    "sampled": (GRPOLoss, SAMPLED, DRAWN | OLD),
    "exact": (GRPOLoss, SAMPLED | {"objective": "exact"}, ALL),
    "masked": (GRPOLoss, SAMPLED | {"masked": True}, DRAWN | OLD | {"group_mask"}),
    "rce": (RCELoss, {}, {"reward_per_configuration"}),
    "recorded": (RCELoss, {"recorded": True}, DRAWN | {"group_mask"}),
}
every_kind = pytest.mark.parametrize("kind", sorted(KINDS))


def make_loss(kind, **settings):
    loss, defaults, _ = KINDS[kind]
    return loss(linear_actor(4), **defaults, **settings)


def make_data():
    return drawn(5, 4)


@every_kind
def test_reading_and_writing_keys_are_told(kind):
    loss = make_loss(kind)
    assert set(loss.in_keys) == {"observation", *KINDS[kind][2]}
    out = loss(make_data().select(*loss.in_keys))
    assert set(out.keys()) == set(loss.out_keys)
    assert out.batch_size == torch.Size([])
    assert all(value.requires_grad == name.startswith("loss_") for name, value in out.items())


@every_kind
def test_every_key_can_be_renamed(kind):
    loss, other = make_loss(kind), ("other", "place")
    wanted = loss(make_data())
    for name in loss.default_keys.__dataclass_fields__:
        key = getattr(loss.default_keys(), name)
        changed = copy.deepcopy(loss)
        assert changed.tensor_keys == loss.default_keys()
        changed.set_keys(**{name: other})
        assert (other in changed.in_keys) == (unravel_key(key) in KINDS[kind][2])
        assert key not in changed.in_keys
        data = make_data()
        if name == "configuration":  # may stand in for the action
            data["configuration"] = data.pop("action") @ torch.tensor([2, 1])
        identical(changed(data.rename_key_(key, other)), wanted)
        changed.set_keys(**{name: None})  # back to what it was
        assert changed.in_keys == loss.in_keys
    with pytest.raises(ValueError, match="unknown"):
        loss.set_keys(unknown="key")


@every_kind
def test_the_input_is_left_and_all_parameters_get_a_gradient(kind):
    loss, data, before = make_loss(kind), make_data(), make_data()
    total(loss(data)).backward()
    identical(data.select(*before.keys()), before)
    weight, bias = loss.parameters()
    assert weight.grad.abs().sum() > 0
    assert bias.grad.abs().sum() > 0


@every_kind
def test_reductions_agree(kind):
    none, mean, added = (make_loss(kind, reduction=r)(make_data()) for r in ("none", "mean", "sum"))
    for name, value in mean.items():
        if name.startswith("loss_"):
            assert none[name].shape == (5,)
            close(none[name].mean(), value)
            close(none[name].sum(), added[name])
        else:
            assert torch.equal(none[name], value)
    identical(make_loss(kind, reduction=None)(make_data()), mean)


@every_kind
def test_contexts_marked_as_padding_do_not_count(kind):
    loss, data = make_loss(kind), make_data()
    wanted = loss(data[:3])
    result = loss(data.set(("collector", "mask"), torch.arange(5) < 3))
    for name, value in wanted.items():
        if name.startswith("loss_"):
            close(result[name], value)


@every_kind
def test_it_can_be_called_without_a_tensordict(kind):
    loss, data = make_loss(kind), make_data()
    wanted = loss(data.clone())
    # a nested key is joined by underscores
    named = {"_".join([key] if isinstance(key, str) else key): data[key] for key in loss.in_keys}
    for result in (loss(**named), loss(*named.values())):
        identical([*result], [wanted[name] for name in loss.out_keys])
