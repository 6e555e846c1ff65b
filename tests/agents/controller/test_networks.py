import math

import pytest
import torch
from helpers import close
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from knobwise.agents.controller.networks import KnobHeads, UtilityHead
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.teacher.network import BINS, OutcomeNetwork
from knobwise.losses import dropping_out

NAN = math.nan


def network(features=2, networks=1, bins=True):
    torch.manual_seed(0)
    config = PolicyConfig(teacher_hidden=16, fold_networks=networks, teacher_dropout=0.3)
    return OutcomeNetwork(features, 3, config, bins).eval()


def stirred(net):
    for p in net.parameters():
        p.data += 0.2 * torch.randn_like(p)
    return net


# -- where a teacher's network starts --------------------------------------------------------------


def test_each_member_starts_at_the_means_of_its_own_samples_by_hand():
    net = network(networks=2)
    accuracy = torch.tensor([[1.0, 0.0, NAN], [0.5, 1.0, NAN]])
    log_latency = torch.tensor([[1.0, 2.0, NAN], [3.0, 2.0, NAN]])
    # the first has both samples, the second one of them
    mine = torch.tensor([[True, True], [True, False]])
    net.start_from(torch.randn(2, 2), accuracy, log_latency.exp(), mine)
    out = net(torch.randn(2, 1, 2))
    # one more cell, half right, at the mean of all cells, ln ms = 2 and 1.5; what was never
    # profiled is only that
    right = [[(1.5 + 0.5) / 3, (1 + 0.5) / 3, 0.5], [(1 + 0.5) / 2, (0 + 0.5) / 2, 0.5]]
    close(out.predicted().accuracy[:, 0], right)
    close(out.log_latency[:, 0], [[2.0, 2.0, 2.0], [2.5 / 2, 3.5 / 2, 1.5]])
    # squares 2, 0 and none: their mean over the cells is .5, which is one more cell of each; of the
    # second two times a sixteenth
    close(out.spread[:, 0].square(), [[2.5 / 3, 0.5 / 3, 0.5], [0.125 / 2, 0.125 / 2, 0.0625]])


# -- what the networks compute ---------------------------------------------------------------------


def linear(layer, x):
    return x @ layer.weight[0] + layer.bias[0]


def test_a_teachers_network_by_hand():
    net = stirred(network(features=2, bins=False))
    x = torch.randn(1, 4, 2)
    first, second = net.layers
    hidden = nn.functional.silu(linear(first, x[0]))
    hidden = hidden + nn.functional.silu(linear(second, hidden))
    logits, log_latency, log_spread = linear(net.outcome_head, hidden).chunk(3, -1)
    more_logits, more_latency = linear(net.skip, x[0]).chunk(2, -1)
    out = net(x)
    close(out.predicted().accuracy[0], (logits + more_logits).sigmoid())
    close(out.log_latency[0], log_latency + more_latency)
    close(out.spread[0], log_spread.clamp(-5, 1.5).exp())
    with dropping_out():
        assert not torch.equal(net(x).log_latency, out.log_latency)


def test_a_utility_head_by_hand():
    head = UtilityHead(networks=1, hidden=1, count=2, sharpness=10.0)
    # it begins with equal outcomes, half right and as slow as the average
    close(head(torch.ones(1, 1, 1), torch.zeros(1, 1)), [[[10 * 0.5 * 0.5] * 2]])
    # accuracies .5 and .75; ln latencies 0 and 1; slopes ln 3 and 2 · ln 3
    head.outcomes.bias.data[:] = torch.tensor([0.0, math.log(3), 0.0, 1.0])
    head.log_slope.data[:] = torch.tensor([math.log(3), 2 * math.log(3)]).log()
    # under z = 1 they are on time in .75 and .5 of the cases, under z = 0 in .5 and .1
    added = head(torch.ones(1, 2, 1), torch.tensor([[1.0, 0.0]]))
    wanted = [[10 * 0.5 * 0.75, 10 * 0.75 * 0.5], [10 * 0.5 * 0.5, 10 * 0.75 * 0.1]]
    close(added, [wanted])


# -- inputs ----------------------------------------------------------------------------------------


def test_without_its_bins_a_network_is_as_if_it_never_had_them():
    x, net = torch.randn(50, 4), network(features=4)
    net.start_from(x, torch.ones(50, 3), torch.ones(50, 3), torch.ones(1, 50) > 0)
    spread = 4**-0.5 / 3  # of inputs and bins: nine times as many
    assert net.layers[0].weight.abs().max() <= spread
    net.leave_out_bins()
    assert 0.9 * 4**-0.5 < net.layers[0].weight.abs().max() <= 4**-0.5
    stirred(net)
    plain = network(features=4, bins=False)
    state = net.state_dict() | {"edges": torch.zeros(BINS + 1, 0)}
    for name in ("layers.0.weight", "skip.weight"):
        state[name] = state[name][:, :4]
    plain.load_state_dict(state)
    for result, wanted in zip(net(x[None]), plain(x[None]), strict=True):
        close(result, wanted)


def test_features_are_cut_into_bins_piecewise_linearly():
    net, about = network(features=1), (torch.ones(9, 3), torch.ones(9, 3), torch.ones(1, 9) > 0)
    net.start_from(torch.arange(9.0).unsqueeze(1), *about)  # edges 0, 1 … 8
    assert net.edges[:, 0].tolist() == list(range(9))
    result = net._shares(torch.tensor([[[2.25], [-7.0], [8.5]]]))[0].tolist()
    assert result == [[1, 1, 0.25, 0, 0, 0, 0, 0], [0] * 8, [1] * 8]
    # a feature of two values is not spoiled by bins of no width
    net.start_from(torch.tensor([[0.0]] * 8 + [[1.0]]), *about)
    shares = net._shares(torch.tensor([[[0.0], [1.0]]]))[0]
    assert shares.isfinite().all()
    assert shares[1].sum() > shares[0].sum()


# -- heads -----------------------------------------------------------------------------------------


SQUARE = torch.cartesian_prod(torch.arange(2), torch.arange(2))
CORNER = torch.tensor([[0, 0], [0, 1], [1, 0]])  # (1, 1) does not exist
FEW = torch.tensor([[0, 0], [0, 1], [1, 2], [2, 0]])  # four of nine


@st.composite
def cases(draw):
    """Configurations with holes (every value occurs), hidden vectors [M, 6, 5], masks that leave
    something."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    networks = draw(st.integers(1, 3))
    torch.manual_seed(draw(st.integers(0, 10_000)))
    grid = torch.cartesian_prod(*map(torch.arange, sizes)).reshape(-1, len(sizes))
    count = draw(st.integers(1, len(grid)))
    kept = grid[torch.randperm(len(grid))[:count]]
    # value indices without gaps, as a table's are
    configurations = torch.stack([column.unique(return_inverse=True)[1] for column in kept.T], 1)
    mask = torch.rand(networks, 6, count) < draw(st.sampled_from([0.1, 0.5, 1.0]))
    mask.scatter_(2, torch.randint(count, (networks, 6, 1)), True)
    hidden = draw(st.sampled_from([0.1, 1.0, 30.0])) * torch.randn(networks, 6, 5)
    return configurations, hidden.double(), mask


@settings(max_examples=150, deadline=None)
@given(cases())
def test_a_head_is_a_distribution_over_what_the_mask_allows(case):
    configurations, hidden, mask = case
    head = KnobHeads(5, configurations, len(hidden)).double()
    hidden.requires_grad_()
    log_probs = head(hidden, mask)
    assert torch.equal(log_probs.isneginf(), ~mask)
    total = log_probs.exp().sum(-1)
    close(total, torch.ones_like(total))
    assert mask.gather(2, log_probs.argmax(-1, keepdim=True)).all()
    # gradients of one log-prob and of the entropy are finite, whatever is masked
    chosen = log_probs.gather(2, mask.long().argmax(2, keepdim=True)).sum()
    entropy = -(log_probs.exp() * log_probs.masked_fill(~mask, 0.0)).sum()
    gradients = torch.autograd.grad(chosen + entropy, [hidden, *head.parameters()])
    assert all(g.isfinite().all() for g in gradients)
    # a mask that allows everything is the same as none
    close(head(hidden), head(hidden, torch.ones_like(mask)))


KNOBS = [0.0, 0.0, 0.0, math.log(3)]  # of two knobs the first is ½ : ½, the second ¼ : ¾


@pytest.mark.parametrize(
    ("configurations", "logits", "mask", "wanted"),
    [
        # the softmax of the sums 1 + 3, 1 + 4 and 2 + 3
        (CORNER, [1.0, 2.0, 3.0, 4.0], [True] * 3, torch.tensor([4.0, 5, 5]).softmax(-1)),
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
    close(log_probs.exp()[0, 0], wanted)


def test_where_at_most_half_of_the_grid_exists_there_is_one_head_over_the_configurations():
    most = KnobHeads(5, torch.cat([FEW, torch.tensor([[2, 2]])]))  # five of nine
    assert most.by_knobs
    assert most.logits.weight.shape == (1, 5, 6)  # three and three values
    assert not KnobHeads(5, FEW).by_knobs
    # a grid of 63 knobs or more has more cells than int64 counts
    generator = torch.Generator().manual_seed(0)
    for knobs in (62, 63, 64, 70):
        drawn = torch.randint(2, (200, knobs), generator=generator)
        drawn[:2] = torch.tensor([[0], [1]])
        assert not KnobHeads(5, drawn).by_knobs
