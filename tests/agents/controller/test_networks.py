from __future__ import annotations

import math

import pytest
import torch
from helpers import small_table
from torch import Tensor

from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.heads import HEADS
from knobwise.agents.controller.networks import BINS, KnobNetwork, UtilityNetwork
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.judging.baselines import BudgetAwareStatic
from knobwise.envs.configurations.budgets import BudgetEncoding

NAN = math.nan
CONFIGURATIONS = torch.arange(3).unsqueeze(1)


def network(features: int = 2, members: int = 1, priced: bool = False, hidden: int = 16) -> UtilityNetwork:
    torch.manual_seed(0)
    config = PolicyConfig(structure="utility", hidden=hidden, members=members, dropout=0.3)
    encoding = BudgetEncoding(torch.tensor([1.0, 10.0, 100.0]))
    return UtilityNetwork(features, CONFIGURATIONS, encoding, config, priced).eval()


def stirred(net: UtilityNetwork) -> UtilityNetwork:
    for p in net.parameters():
        p.data += 0.2 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    return net


def members_inputs(net: UtilityNetwork, n: int = 7) -> tuple[Tensor, Tensor]:
    members = net.skip.weight.shape[0]
    generator = torch.Generator().manual_seed(1)
    return torch.randn(members, n, 2, generator=generator), 1 + 50 * torch.rand(members, n, generator=generator)


# -- where it starts ---------------------------------------------------------------------------------------------------


def test_it_starts_at_the_means_of_the_table_by_hand() -> None:
    net = network(members=2)
    accuracy = torch.tensor([[1.0, 0.0, NAN], [0.5, 1.0, NAN]])
    log_latency = torch.tensor([[1.0, 2.0, NAN], [3.0, 2.0, NAN]])
    x = torch.randn(2, 2)
    net.start_from(x, accuracy, log_latency.exp())
    out = net.outcomes(x.expand(2, -1, -1))
    # one more cell, half right, at the mean of all cells, ln ms = 2; what was never profiled is only that
    wanted = torch.tensor([(1.5 + 0.5) / 3, (1 + 0.5) / 3, 0.5])
    torch.testing.assert_close(out.accuracy, wanted.expand(2, 2, 3))
    torch.testing.assert_close(out.log_latency, torch.tensor([2.0, 2.0, 2.0]).expand(2, 2, 3))
    # squares 2, 0 and none: their mean over the cells is .5, which is one more cell of each
    spread = torch.tensor([2.5 / 3, 0.5 / 3, 0.5]).sqrt()
    torch.testing.assert_close(out.spread, spread.expand(2, 2, 3))


def test_certain_outcomes_stay_finite() -> None:
    net = network()
    net.start_from(torch.randn(2000, 2), torch.ones(2000, 3), torch.full((2000, 3), 5.0))
    out = net.outcomes(torch.randn(1, 4, 2))
    torch.testing.assert_close(out.accuracy, torch.full((1, 4, 3), 0.98))
    torch.testing.assert_close(out.spread, torch.full((1, 4, 3), 0.02))


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("holes", [0.0, 0.5])
def test_the_first_greedy_choice_is_the_best_static_one(members: int, holes: float) -> None:
    # better means slower: .2 at 4 ms, .5 at 8 ms, .9 at 16 ms, give or take one percent
    table = small_table(300, holes=holes)
    generator = torch.Generator().manual_seed(0)
    level, mean = torch.tensor([0.2, 0.5, 0.9]).repeat_interleave(4), torch.tensor([4.0, 8.0, 16.0])
    jitter = 1 + 0.01 * torch.randn(300, 12, generator=generator)
    accuracy = (torch.rand(300, 12, generator=generator) < level).float().masked_fill(~table.mask, NAN)
    table.accuracy.copy_(accuracy)
    table.latency_ms.copy_((mean.repeat_interleave(4) * jitter).masked_fill(~table.mask, NAN))
    config = PolicyConfig(structure="utility", hidden=16, members=members)
    controller = Controller.for_table(table, torch.arange(300), config).eval()
    static = BudgetAwareStatic(table, torch.arange(300))
    everything = torch.ones_like(table.mask)
    for budget in (5.0, 10.0, 20.0):
        limits = torch.full((300,), budget)
        chosen = controller.choose(table.features, limits, everything)
        assert len(chosen.unique()) == 1
        # among the four that are equal but for noise both take one
        assert chosen[0] // 4 == static.choose({}, limits, everything)[0] // 4


def test_without_features_it_sees_the_limit_alone() -> None:
    net = stirred(network(features=0))
    net.start_from(torch.zeros(4, 0), torch.ones(4, 3), torch.ones(4, 3))
    log_probs = net(torch.zeros(1, 5, 0), torch.tensor([[1.0, 1.0, 9.0, 9.0, 50.0]]))
    assert torch.equal(log_probs[0, 0], log_probs[0, 1])
    assert not torch.equal(log_probs[0, 1], log_probs[0, 2])


# -- what it computes --------------------------------------------------------------------------------------------------


def test_scores_under_a_deadline_by_hand() -> None:
    net = network()
    net.start_from(torch.randn(9, 2), torch.full((9, 3), 0.5), torch.tensor([4.0, 8.0, 16.0]).expand(9, 3))
    x = torch.randn(1, 1, 2)
    out = net.outcomes(x)
    mean, spread = out.log_latency[0, 0], out.spread[0, 0]
    normal = torch.distributions.Normal(mean, spread)
    wanted = 0.5 * normal.cdf(torch.tensor(8.0).log())
    torch.testing.assert_close(net.scores(out, torch.tensor([[8.0]]))[0, 0], wanted)
    torch.testing.assert_close(net(x, torch.tensor([[8.0]]))[0, 0], (20 * wanted).log_softmax(-1))
    mask = torch.tensor([[[True, False, True]]])
    result = net(x, torch.tensor([[8.0]]), mask)[0, 0]
    torch.testing.assert_close(result[[0, 2]], (20 * wanted[[0, 2]]).log_softmax(-1))
    assert result[1] == -torch.inf


def test_scores_under_a_price_by_hand() -> None:
    net = network(priced=True)
    net.start_from(torch.randn(9, 2), torch.full((9, 3), 0.5), torch.tensor([4.0, 8.0, 16.0]).expand(9, 3))
    out = net.outcomes(torch.randn(1, 1, 2))
    mean = torch.distributions.LogNormal(out.log_latency[0, 0], out.spread[0, 0]).mean
    torch.testing.assert_close(net.scores(out, torch.tensor([[100.0]]))[0, 0], 0.5 - mean / 100)


def test_the_residual_depends_on_the_limit() -> None:
    net = stirred(network())
    x, _ = members_inputs(net, 1)
    out = net.outcomes(x)
    residual = [
        net.scores(out, torch.tensor([[b]])) - out.accuracy * net.meets(out, torch.tensor([[b]])) for b in (2, 40)
    ]
    assert (residual[0] - residual[1]).abs().max() > 1e-3


def test_it_sharpens_from_20_to_60() -> None:
    net = network()
    for share, wanted in ((0.0, 20.0), (0.5, 20 * math.sqrt(3)), (1.0, 60.0)):
        net.sharpen(share)
        assert net.sharpness.item() == pytest.approx(wanted)


# -- inputs ------------------------------------------------------------------------------------------------------------


def test_features_are_cut_into_bins_piecewise_linearly() -> None:
    net = network(features=1)
    net.start_from(torch.arange(9.0).unsqueeze(1), torch.ones(9, 3), torch.ones(9, 3))  # edges 0, 1 … 8
    assert net.edges[:, 0].tolist() == list(range(9))
    result = net._in_bins(torch.tensor([[[2.25], [-7.0], [8.5]]]))[0].tolist()
    assert result == [[1, 1, 0.25, 0, 0, 0, 0, 0], [0] * 8, [1] * 8]


def test_a_feature_of_two_values_is_not_spoiled_by_bins_of_no_width() -> None:
    net = network(features=1)
    net.start_from(torch.tensor([[0.0]] * 8 + [[1.0]]), torch.ones(9, 3), torch.ones(9, 3))
    result = net._in_bins(torch.tensor([[[0.0], [1.0]]]))[0]
    assert result.isfinite().all()
    assert result[1].sum() > result[0].sum()


def test_wide_features_are_not_cut_into_bins() -> None:
    widest = 260 // BINS
    assert network(features=widest).layers[0].weight.shape[1] == widest * (1 + BINS)
    assert network(features=widest + 1).layers[0].weight.shape[1] == widest + 1


# -- members -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", sorted(HEADS))
def test_a_network_of_heads_is_an_mlp_by_hand(structure: str) -> None:
    torch.manual_seed(0)
    config = PolicyConfig(structure=structure, hidden=8, layers=2, dropout=0.5)
    encoding = BudgetEncoding(torch.tensor([1.0, 10.0]), "linear")
    net = KnobNetwork(2, CONFIGURATIONS, encoding, config).eval()
    x, limits = torch.randn(1, 4, 2), torch.tensor([[1.0, 2.0, 5.0, 50.0]])
    hidden = torch.cat([x[0], encoding(limits[0])], -1)
    for layer in net.layers:
        pre = hidden @ layer.weight[0] + layer.bias[0]
        hidden = pre * torch.sigmoid(pre)
    torch.testing.assert_close(net(x, limits), net.head(hidden[None]))
    assert not torch.equal(net.train()(x, limits), net(x, limits))
