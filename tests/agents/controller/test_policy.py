import math

import pytest
import torch
from helpers import (
    arrays,
    close,
    driven_apart,
    input_error,
    network_alone,
    small_table,
    some_configurations,
)
from tensordict import TensorDict

from knobwise.agents.calibration.deployed_controller import DeployedController
from knobwise.agents.controller.actor import ConfigurationCategorical, make_actor
from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.settings import PolicyConfig

with_and_without_holes = pytest.mark.parametrize("holes", [0.0, 0.6])
every_head = pytest.mark.parametrize("by_knobs", [True, False])


def table_with(by_knobs, holes=0.0, features=True):
    """A full grid, or one in which at most half of the cells exist."""
    table = small_table(holes=holes, features=features)
    if by_knobs:
        return table
    # every sample has one of these
    table.mask[:, 0] = True
    for name in ("accuracy", "latency_ms"):
        cells = getattr(table, name)
        cells[:, 0] = cells[:, 0].nan_to_num(1.0)
    return some_configurations(table, [0, 3, 5, 6, 9, 10])


def small_controller(table, dropout=0.1):
    torch.manual_seed(0)
    return Controller.for_table(table, torch.arange(60), PolicyConfig(hidden=16, dropout=dropout))


def contexts(table, count=20):
    rows = torch.randint(60, (count,))
    requests = {"row": rows, "budget_ms": 5 + 20 * torch.rand(count), "mask": table.mask[rows]}
    return TensorDict(requests | table.blocks(rows), [count])


def chosen_by(controller, table, data):
    """What is deployed of a controller chooses for these contexts inside their mask."""
    request = arrays(table, data["row"]), data["budget_ms"].numpy(), data["mask"].numpy()
    return torch.from_numpy(DeployedController(controller).choose(*request))


def log_probs_of(controller, table, data, **options):
    """Of contexts that are rows of the table."""
    return make_actor(controller, table, **options).get_dist(data).log_probs


# -- the controller --------------------------------------------------------------------------------


@every_head
@pytest.mark.parametrize("features", [True, False])
def test_rows_of_a_table_and_feature_blocks_give_the_same(by_knobs, features):
    table = table_with(by_knobs, features=features)
    controller = small_controller(table).eval()
    data = contexts(table)
    by_row = make_actor(controller, table, 3)
    by_blocks = make_actor(controller, group_size=3)
    assert by_row.in_keys == ["row", "budget_ms"]
    assert by_blocks.in_keys == ["budget_ms", *table.features, "mask"]
    result, wanted = by_row(data.clone()), by_blocks(data.clone())
    close(result["log_probs"], wanted["log_probs"])
    assert torch.equal(result["action"], wanted["action"])


@pytest.mark.parametrize("key", ["row", "budget_ms"])
def test_a_context_that_lacks_something_is_refused(key):
    table = small_table()
    data = contexts(table).exclude(key)
    with input_error(key):
        make_actor(small_controller(table), table, 3).get_dist(data)


def test_statistics_come_from_the_rows_given_alone():
    table, rows = small_table(), torch.arange(10)
    controller = Controller.for_table(table, rows, PolicyConfig(hidden=8))
    close(controller.normaliser.mean[:4], table.features["image_features"][:10].mean(0))
    close(controller.network.encoding.mean, table.latency_ms[:10].log().mean())


# -- networks side by side -------------------------------------------------------------------------


def side_by_side(table):
    """Networks of two folds, and one of all samples."""
    return driven_apart(table, PolicyConfig(hidden=16, fold_networks=2), by=0.1)


@every_head
@with_and_without_holes
def test_the_last_network_is_the_one_that_decides(by_knobs, holes):
    table = table_with(by_knobs, holes)
    controller, data = side_by_side(table), contexts(table)
    first, _, last = (log_probs_of(network_alone(controller, i), table, data) for i in range(3))
    close(log_probs_of(controller, table, data), last)
    assert not torch.allclose(first.exp(), last.exp(), atol=1e-3)
    chosen = chosen_by(controller, table, data)
    assert torch.equal(chosen, chosen_by(network_alone(controller, 2), table, data))


@every_head
@with_and_without_holes
def test_in_training_contexts_belong_to_the_networks_in_turn(by_knobs, holes):
    table = table_with(by_knobs, holes)
    controller, data = side_by_side(table), contexts(table, 21)
    flat = log_probs_of(controller, table, data, all_networks=True)
    for number in range(3):
        wanted = log_probs_of(network_alone(controller, number), table, data)
        close(flat[number::3], wanted[number::3])
        assert not torch.allclose(flat.exp(), wanted.exp(), atol=1e-3)
    # [P, M], as the buffer holds them, is the same
    square = make_actor(controller, table, 4, all_networks=True).get_dist(data.reshape(7, 3))
    close(square.log_probs.reshape(21, -1), flat)
    assert square.sample().shape == (7, 3, 4, 3)


@every_head
def test_a_gradient_touches_its_own_network_alone(by_knobs):
    table = table_with(by_knobs, holes=0.5)
    controller, data = side_by_side(table), contexts(table, 21)
    actor = make_actor(controller, table, all_networks=True)
    actor.get_dist(data).entropy()[1::3].sum().backward()
    for name, p in controller.named_parameters():
        assert not p.grad[[0, 2]].any(), name
        assert p.grad[1].any(), name


# -- the distribution ------------------------------------------------------------------------------


SOME = torch.tensor([[0, 0], [0, 1], [2, 1]])  # (1, ·), (2, 0) and (0, 2) do not exist


def distribution(*shape, group_size=None, configurations=SOME):
    torch.manual_seed(0)
    return ConfigurationCategorical(torch.randn(*shape, 3), configurations, group_size)


@pytest.mark.parametrize("group_size", [None, 1, 5])
@pytest.mark.parametrize("batch", [(), (4,), (4, 2)])
@pytest.mark.parametrize("sample", [(), (3,), (3, 2)])
def test_shapes_and_log_probs_of_draws(group_size, batch, sample):
    dist = distribution(*batch, group_size=group_size)
    group = () if group_size is None else (group_size,)
    drawn = dist.sample(sample)
    assert drawn.shape == (*sample, *batch, *group, 2)
    result = dist.log_prob(drawn)
    assert result.shape == (*sample, *batch, *group)
    # what is drawn exists, and its log-prob is that of its own context
    log_probs = dist.log_probs.reshape(*batch, *[1] * len(group), 3).expand(*result.shape, 3)
    close(result, log_probs.gather(-1, dist.index(drawn).unsqueeze(-1)).squeeze(-1))
    assert dist.entropy().shape == batch
    assert dist.mode.shape == (*batch, *group, 2)


@pytest.mark.parametrize("group_size", [None, 4])
def test_draws_have_the_frequencies_of_their_context(group_size):
    dist = distribution(2, group_size=group_size)
    drawn = dist.index(dist.sample((20_000,)))  # [20000, 2, (4)]
    for of_context, log_probs in zip(drawn.unbind(1), dist.log_probs, strict=True):
        seen = of_context.flatten().bincount(minlength=3) / of_context.numel()
        close(seen, log_probs.exp(), 0.015)


def test_actions_that_do_not_exist_have_log_prob_minus_infinity_and_others_may_come_in_any_order():
    actions = torch.tensor([[1, 0], [2, 0], [0, 2], [-1, 0], [3, 1], [2, 1]])
    dist = distribution()
    for each in (dist, distribution(group_size=6)):
        assert each.log_prob(actions).tolist() == [-math.inf] * 5 + [float(dist.log_probs[2])]
    shuffled = distribution(configurations=SOME[[2, 0, 1]])
    assert torch.equal(shuffled.log_prob(SOME[[2, 0, 1]]), shuffled.log_probs)
