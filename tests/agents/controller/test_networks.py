import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from knobwise.agents.controller.networks import (
    BINS,
    KnobHeads,
    KnobNetwork,
    OutcomeNetwork,
    UtilityHead,
)
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.envs.configurations.budgets import BudgetEncoding

NAN = math.nan
CONFIGURATIONS = torch.arange(3).unsqueeze(1)


def network(features=2, members=1, bins=True):
    torch.manual_seed(0)
    config = PolicyConfig(teacher_hidden=16, members=members, teacher_dropout=0.3)
    return OutcomeNetwork(features, 3, config, bins).eval()


def stirred(net):
    for p in net.parameters():
        p.data += 0.2 * torch.randn_like(p)
    return net


# -- where a teacher's network starts --------------------------------------------------------------


def everyone(members, samples):
    """Each member is fitted on all samples."""
    return torch.ones(members, samples, dtype=torch.bool)


def test_it_starts_at_the_means_of_the_table_by_hand():
    net = network(members=2)
    accuracy = torch.tensor([[1.0, 0.0, NAN], [0.5, 1.0, NAN]])
    log_latency = torch.tensor([[1.0, 2.0, NAN], [3.0, 2.0, NAN]])
    x = torch.randn(2, 2)
    net.start_from(x, accuracy, log_latency.exp(), everyone(2, 2))
    out = net(x.expand(2, -1, -1))
    # one more cell, half right, at the mean of all cells, ln ms = 2; what was never profiled is
    # only that
    wanted = torch.tensor([(1.5 + 0.5) / 3, (1 + 0.5) / 3, 0.5])
    torch.testing.assert_close(out.predicted().accuracy, wanted.expand(2, 2, 3))
    torch.testing.assert_close(out.log_latency, torch.tensor([2.0, 2.0, 2.0]).expand(2, 2, 3))
    # squares 2, 0 and none: their mean over the cells is .5, which is one more cell of each
    spread = torch.tensor([2.5 / 3, 0.5 / 3, 0.5]).sqrt()
    torch.testing.assert_close(out.spread, spread.expand(2, 2, 3))


def test_a_member_starts_at_the_means_of_its_own_samples():
    net = network(members=2)
    accuracy = torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
    latency_ms = torch.tensor([[4.0, 4.0, 4.0], [9.0, 9.0, 9.0]])
    mine = torch.tensor([[True, False], [False, True]])
    net.start_from(torch.randn(2, 2), accuracy, latency_ms, mine)
    out = net(torch.randn(2, 1, 2))
    # of one cell: half of 1 + .5, and of 0 + .5
    torch.testing.assert_close(out.predicted().accuracy[:, 0, 0], torch.tensor([0.75, 0.25]))
    torch.testing.assert_close(out.log_latency[:, 0, 0], torch.tensor([4.0, 9.0]).log())


# -- what the networks compute ---------------------------------------------------------------------


def test_a_teachers_network_by_hand():
    net = stirred(network(features=2, bins=False))
    x = torch.randn(1, 4, 2)
    first, second = net.layers
    hidden = nn.functional.silu(x[0] @ first.weight[0] + first.bias[0])
    hidden = hidden + nn.functional.silu(hidden @ second.weight[0] + second.bias[0])
    outputs = hidden @ net.outcome_head.weight[0] + net.outcome_head.bias[0]
    logits, log_latency, log_spread = outputs.chunk(3, -1)
    skipped = x[0] @ net.skip.weight[0] + net.skip.bias[0]
    out = net(x)
    torch.testing.assert_close(out.predicted().accuracy[0], (logits + skipped[:, :3]).sigmoid())
    torch.testing.assert_close(out.log_latency[0], log_latency + skipped[:, 3:])
    torch.testing.assert_close(out.spread[0], log_spread.clamp(-5, 1.5).exp())
    assert not torch.equal(net.train()(x).log_latency, out.log_latency)


def test_a_network_of_heads_is_an_mlp_by_hand():
    torch.manual_seed(0)
    config = PolicyConfig(hidden=8, layers=2, dropout=0.5)
    encoding = BudgetEncoding(torch.tensor([1.0, 10.0]), 1)
    net = KnobNetwork(2, CONFIGURATIONS, encoding, config).eval()
    x, limits = torch.randn(1, 4, 2), torch.tensor([[1.0, 2.0, 5.0, 50.0]])
    hidden = torch.cat([x[0], encoding(limits[0])], -1)
    for layer in net.layers:
        pre = hidden @ layer.weight[0] + layer.bias[0]
        hidden = pre * torch.sigmoid(pre)
    torch.testing.assert_close(net(x, limits), net.head(hidden[None]))
    assert not torch.equal(net.train()(x, limits), net(x, limits))


def test_a_utility_head_by_hand():
    head = UtilityHead(members=1, hidden=1, count=2, sharpness=10.0)
    # it begins with equal outcomes, half right and as slow as the average
    untrained = head(torch.ones(1, 1, 1), torch.zeros(1, 1))
    torch.testing.assert_close(untrained, torch.full((1, 1, 2), 10 * 0.5 * 0.5))
    # accuracies .5 and .75; ln latencies 0 and 1; slopes ln 3 and 2 · ln 3
    bias = torch.tensor([0.0, math.log(3), 0.0, 1.0])
    head.outcomes.bias.data.copy_(bias.expand_as(head.outcomes.bias))
    head.log_slope.data.copy_(torch.tensor([math.log(3), 2 * math.log(3)]).log())
    # under z = 1 they are on time in .75 and .5 of the cases, under z = 0 in .5 and .1
    added = head(torch.ones(1, 2, 1), torch.tensor([[1.0, 0.0]]))
    wanted = [[10 * 0.5 * 0.75, 10 * 0.75 * 0.5], [10 * 0.5 * 0.5, 10 * 0.75 * 0.1]]
    torch.testing.assert_close(added, torch.tensor([wanted]))


def test_what_a_utility_head_adds_to_the_heads_of_the_knobs():
    torch.manual_seed(0)
    config = PolicyConfig(hidden=8, utility_head=True)
    net = stirred(KnobNetwork(2, CONFIGURATIONS, BudgetEncoding(torch.ones(2)), config)).eval()
    x, limits = torch.randn(1, 4, 2), torch.tensor([[1.0, 2.0, 5.0, 50.0]])
    log_probs = net(x, limits)
    plain = copy.deepcopy(net)
    plain.utility = None
    # log-odds between configurations differ by what is added
    difference = log_probs - plain(x, limits)
    hidden = {}
    net.head.register_forward_pre_hook(lambda _, inputs: hidden.update(last=inputs[0]))
    net(x, limits)
    added = net.utility(hidden["last"], net.encoding.standardised(limits))
    assert added.std() > 0.1
    torch.testing.assert_close(difference.diff(dim=-1), added.diff(dim=-1), atol=1e-4, rtol=1e-4)


# -- inputs ----------------------------------------------------------------------------------------


def test_without_its_bins_a_network_is_as_if_it_never_had_them():
    x = torch.randn(50, 4, generator=torch.Generator().manual_seed(1))
    net = network(features=4)
    net.start_from(x, torch.ones(50, 3), torch.ones(50, 3), everyone(1, 50))
    spread = 4**-0.5 / 3  # of inputs and bins: nine times as many
    assert net.layers[0].weight.abs().max() <= spread
    net.leave_out_bins()
    first = net.layers[0]
    assert first.weight.abs().max() <= 4**-0.5
    assert first.weight.abs().max() > 0.9 * 4**-0.5
    stirred(net)
    plain = network(features=4, bins=False)
    state = net.state_dict() | {"edges": torch.zeros(BINS + 1, 0)}
    for name in ("layers.0.weight", "skip.weight"):
        state[name] = state[name][:, :4]
    plain.load_state_dict(state)
    torch.testing.assert_close(
        net(x[None]).predicted().accuracy, plain(x[None]).predicted().accuracy
    )
    torch.testing.assert_close(net(x[None]).log_latency, plain(x[None]).log_latency)


def test_features_are_cut_into_bins_piecewise_linearly():
    net = network(features=1)
    cells = torch.ones(9, 3)
    net.start_from(torch.arange(9.0).unsqueeze(1), cells, cells, everyone(1, 9))  # edges 0, 1 … 8
    assert net.edges[:, 0].tolist() == list(range(9))
    result = net._shares(torch.tensor([[[2.25], [-7.0], [8.5]]]))[0].tolist()
    assert result == [[1, 1, 0.25, 0, 0, 0, 0, 0], [0] * 8, [1] * 8]
    # a feature of two values is not spoiled by bins of no width
    net.start_from(torch.tensor([[0.0]] * 8 + [[1.0]]), cells, cells, everyone(1, 9))
    low, high = net._shares(torch.tensor([[[0.0], [1.0]]]))[0]
    assert low.isfinite().all()
    assert high.isfinite().all()
    assert high.sum() > low.sum()


# -- heads -----------------------------------------------------------------------------------------


SQUARE = torch.cartesian_prod(torch.arange(2), torch.arange(2))
CORNER = torch.tensor([[0, 0], [0, 1], [1, 0]])  # (1, 1) does not exist
FEW = torch.tensor([[0, 0], [0, 1], [1, 2], [2, 0]])  # four of nine


@st.composite
def cases(draw):
    """Configurations with holes (every value occurs), hidden vectors [M, 6, 5], masks that leave
    something."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    members = draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    grid = torch.cartesian_prod(*[torch.arange(s) for s in sizes]).reshape(-1, len(sizes))
    order = torch.randperm(len(grid), generator=generator)
    count = draw(st.integers(1, len(grid)))
    kept = grid[order[:count]]
    # value indices without gaps, as a table's are
    configurations = torch.stack([column.unique(return_inverse=True)[1] for column in kept.T], 1)
    mask = torch.rand(members, 6, count, generator=generator) < draw(
        st.sampled_from([0.1, 0.5, 1.0])
    )
    mask.scatter_(2, torch.randint(count, (members, 6, 1), generator=generator), True)
    hidden = draw(st.sampled_from([0.1, 1.0, 30.0])) * torch.randn(
        members, 6, 5, generator=generator
    )
    return configurations, hidden, mask


@settings(max_examples=150, deadline=None)
@given(cases())
def test_a_head_is_a_distribution_over_what_the_mask_allows(
    case,
):
    configurations, hidden, mask = case
    torch.manual_seed(0)
    head = KnobHeads(5, configurations, len(hidden)).double()
    hidden = hidden.double().requires_grad_()
    log_probs = head(hidden, mask)
    assert log_probs.shape == mask.shape
    assert ((log_probs == -torch.inf) == ~mask).all()
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(len(hidden), 6).double())
    assert mask.gather(2, log_probs.argmax(-1, keepdim=True)).all()
    # gradients of one log-prob and of the entropy are finite, whatever is masked
    chosen = log_probs.gather(2, mask.long().argmax(2, keepdim=True)).sum()
    entropy = -(log_probs.exp() * log_probs.masked_fill(~mask, 0.0)).sum()
    gradients = torch.autograd.grad(chosen + entropy, [hidden, *head.parameters()])
    assert all(g.isfinite().all() for g in gradients)
    # a mask that allows everything is the same as none
    torch.testing.assert_close(head(hidden), head(hidden, torch.ones_like(mask)))


KNOBS = [0.0, 0.0, 0.0, math.log(3)]  # of two knobs the first is ½ : ½, the second ¼ : ¾


@pytest.mark.parametrize(
    ("configurations", "logits", "mask", "wanted"),
    [
        (
            CORNER,
            [1.0, 2.0, 3.0, 4.0],
            [True] * 3,
            torch.tensor([1.0 + 3, 1 + 4, 2 + 3]).softmax(-1),
        ),
        # ½·¼, ½·¾ and ½·¼ of draws that are repeated while they are (1, 1)
        (CORNER, KNOBS, [True] * 3, [0.2, 0.6, 0.2]),
        (SQUARE, KNOBS, [True, False, True, True], [0.2, 0.0, 0.2, 0.6]),
        (SQUARE, KNOBS, [False, False, True, True], [0.0, 0.0, 0.25, 0.75]),  # 1 is sure
        # a logit for each configuration
        (FEW, [0.0, 0.0, math.log(2), 9.0], [True, True, True, False], [0.25, 0.25, 0.5, 0.0]),
    ],
)
def test_a_head_by_hand(configurations, logits, mask, wanted):
    head = KnobHeads(5, configurations)
    nn.init.zeros_(head.logits.weight)
    head.logits.bias.data = torch.tensor(logits).reshape(1, 1, -1)  # whatever its input
    log_probs = head(torch.randn(1, 1, 5), torch.tensor(mask)[None, None])
    torch.testing.assert_close(log_probs.exp()[0, 0], torch.as_tensor(wanted))


def test_where_at_most_half_of_the_grid_exists_there_is_one_head_over_the_configurations():
    most = KnobHeads(5, torch.cat([FEW, torch.tensor([[2, 2]])]))  # five of nine
    assert most.by_knobs
    assert most.logits.weight.shape == (1, 5, 6)  # three and three values
    assert not KnobHeads(5, FEW).by_knobs
