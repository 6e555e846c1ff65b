import math

import pytest
import torch
from helpers import close, input_error
from torch import nn

from knobwise.agents.selector.networks import (
    NETWORKS,
    BiEncoder,
    CrossAttention,
    PointerNetwork,
    StateUpdate,
)
from knobwise.agents.selector.selector import Selector
from knobwise.agents.selector.settings import SelectorConfig

KINDS = [{"update": "additive"}, {"update": "convex"}]
KINDS += [{"version": version} for version in ("v0", "v1", "v3")]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind.values()))


RANDOM = torch.Generator().manual_seed(0)
SCALE = torch.tensor([1.0, 100.0, 1e-3, 0.0])
"""Of the columns of embeddings, the last of which never varies."""
BOTH = 3 + SCALE * torch.randn(26, 4, generator=RANDOM)
QUERIES, CANDIDATES = BOTH.split([6, 20])
POOL = torch.rand(6, 20, generator=RANDOM).argsort(1)[:, :5]
# of the queries one has a short pool, and one an empty one
MASK = torch.arange(5) < torch.tensor([5, 2, 0, 5, 5, 5]).unsqueeze(1)
BATCH = QUERIES, CANDIDATES[POOL] * MASK.unsqueeze(-1), MASK


def selector(**settings):
    torch.manual_seed(0)
    return Selector.fitted(SelectorConfig(**{"width": 8} | settings), QUERIES, CANDIDATES)


# -- the selector ----------------------------------------------------------------------------------


def test_embeddings_are_standardised_by_queries_and_candidates_together():
    made = selector()
    normal = (BOTH - made.mean) / made.scale
    close(normal.mean(0), [0.0, 0.0, 0.0, 0.0], 1e-4)
    close(normal.std(0, correction=0), [1.0, 1.0, 1.0, 0.0], 1e-3)


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"query": torch.zeros(6, 3)}, "query"),
        ({"pool": torch.zeros(6, 5, 3)}, "candidate"),
        ({"shots": 0}, "shots"),
    ],
)
def test_mistakes_are_told(changed, field):
    call = dict(zip(("query", "pool", "mask"), BATCH, strict=True), shots=2)
    with input_error(field):
        selector().choose(**call | changed)


# -- saved and restored ----------------------------------------------------------------------------


@every_kind
def test_restored_is_the_same_selector(kind, tmp_path):
    made = selector(**kind)
    made.stage = "grpo"
    torch.save(made.plain(), tmp_path / "selector.pt")
    restored = Selector.restored(torch.load(tmp_path / "selector.pt", weights_only=True))
    assert (restored.config, restored.stage) == (made.config, "grpo")
    assert not restored.training
    wanted, result = (s.eval().distribution(*BATCH, 3) for s in (made, restored))
    assert torch.equal(result.mode, wanted.mode)
    greedy = wanted.mode.unsqueeze(1)
    assert torch.equal(result.log_prob(greedy), wanted.log_prob(greedy))


PLAIN = selector().plain()


@pytest.mark.parametrize(
    "changed",
    [
        {"state": PLAIN["state"] | {"other": torch.ones(1)}},
        {"state": dict([*PLAIN["state"].items()][1:])},
        {"features": 5},
    ],
)
def test_weights_of_another_network_are_refused(changed):
    with pytest.raises(RuntimeError):
        Selector.restored(PLAIN | changed)


# -- the networks behind it ------------------------------------------------------------------------


def network(features=6, **settings):
    layers = {} if settings.get("version") == "v1" else {"layers": 2}
    config = SelectorConfig(**{"width": 16} | layers | settings)
    return NETWORKS[config.version](config, features).eval()


def encodable(queries=3, features=6):
    """Queries with pools of five."""
    query, *pool = torch.randn(6, queries, features)
    return query, torch.stack(pool, 1), torch.ones(queries, 5, dtype=torch.bool)


def size_of(module):
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("projection", {"projection": "cnn"}),
        ("update", {"update": "gru"}),
        ("layers", {"layers": -1}),
        ("width", {"width": 0}),
        ("heads", {"heads": 0}),
        ("heads", {"width": 10, "heads": 4}),
        ("temperature", {"temperature": 0.0}),
        ("dropout", {"dropout": 1.0}),
        ("version", {"version": "v4"}),
        *[("layers", {"version": version, "layers": 0}) for version in ("v0", "v1", "v3")],
        ("heads", {"version": "v1", "heads": 2}),
        ("update", {"version": "v0", "update": "convex"}),
    ],
)
def test_settings_that_cannot_be_are_refused(name, settings):
    with input_error(f"selector.{name}"):
        SelectorConfig(**settings)


def test_the_network_has_the_originals_number_of_parameters_and_the_default_is_small():
    second = PointerNetwork(SelectorConfig(width=256, projection="linear", update="convex"), 512)
    assert size_of(second) == 657_152
    gates = sum(size_of(module) for module in second.modules() if isinstance(module, StateUpdate))
    assert size_of(second) - gates == 525_824
    # two linear layers and two norms for the query, the same for the candidates, and the gate
    assert size_of(BiEncoder(SelectorConfig(version="v1", width=512), 512)) == 1_054_721
    # input 137·128; attention 4·128·129 + 256; projections 2·(128·256 + 256 + 512 + 256·128); gate
    # and U 2·257·128
    assert size_of(PointerNetwork(SelectorConfig(), 137)) == 17_536 + 66_304 + 132_608 + 65_792


# -- the network -----------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("projection", ["mlp", "linear"])
def test_logits_are_cosines_over_the_temperature(projection, kind):
    projected = {} if kind.get("version") == "v1" else {"projection": projection}
    net = network(**projected, **kind, temperature=0.25)
    encoded = net.encode(*encodable())
    close(encoded.keys.norm(dim=-1), torch.ones(3, 5))
    chosen = encoded.keys[:, torch.tensor([[0, 1]] * 4)]
    directions = net.states(encoded, chosen)  # [3, 4, 3, 16]
    close(directions.norm(dim=-1), torch.ones(3, 4, 3))
    wanted = torch.einsum("pjth,pnh->pjtn", directions, encoded.keys) / 0.25
    close(net.logits(directions, encoded), wanted)


def test_queries_do_not_see_each_other_nor_what_fills_a_shorter_pool():
    net = network()
    query, pool, mask = encodable()
    mask[1, 3:] = False
    encoded = net.encode(query, pool, mask)
    pool[1, 3:] = 100.0
    pool[2] = -pool[2]
    other = net.encode(query, pool, mask)
    mask[2] = False
    close(other.state[:2], encoded.state[:2])
    close(other.keys[mask], encoded.keys[mask])
    alone = net.encode(query[1:2], pool[1:2, [2, 0, 1]], mask[1:2, :3])
    close(alone.state, encoded.state[1:2])
    close(alone.keys, encoded.keys[1:2, [2, 0, 1]])


@every_kind
def test_every_weight_learns(kind):
    net = network(**kind)
    encoded = net.encode(*encodable())
    directions = net.states(encoded, encoded.keys[:, torch.tensor([[0, 1], [4, 2]])])
    (net.logits(directions, encoded) * torch.randn(3, 2, 3, 5)).sum().backward()
    for name, parameter in net.named_parameters():
        if not name.endswith("key.bias"):  # cancels in the softmax
            assert parameter.grad.isfinite().all(), name
            assert parameter.grad.any(), name


# -- the parts -------------------------------------------------------------------------------------


def test_cross_attention_is_that_of_torch():
    layer = CrossAttention(SelectorConfig(width=16, heads=4))
    stock = nn.MultiheadAttention(16, 4, batch_first=True)
    inner = (layer.query, layer.key, layer.value)
    stock.in_proj_weight.data = torch.cat([linear.weight for linear in inner])
    stock.in_proj_bias.data = torch.cat([linear.bias for linear in inner])
    stock.out_proj = layer.outer
    state, items = torch.randn(3, 16), torch.randn(3, 7, 16)
    mask = torch.rand(3, 7) < 0.6
    mask[:, 0] = True
    read, _ = stock(state.unsqueeze(1), items, items, key_padding_mask=~mask)
    close(layer(state, items, mask), layer.norm(state + read.squeeze(1)))


# U₁ reads c₁, g₀ reads c₁: turned away from what was chosen, as no convex update can
GATE = 1 / (1 + math.exp(-1))


@pytest.mark.parametrize(
    ("update", "weights", "wanted"),
    [
        ("convex", {(0, 2): 1.0}, [0.5, 0.5]),  # g₀ reads c₀ = 0
        ("additive", {(0, 3): 1.0, (3, 3): -2.0}, [GATE, 0.5 * math.tanh(-2)]),
    ],
)
@torch.no_grad()
def test_updates_by_hand(update, weights, wanted):
    layer = StateUpdate(SelectorConfig(width=2, heads=1, update=update))
    for parameter in layer.parameters():
        parameter.zero_()
    for place, weight in weights.items():
        layer.linear.weight[place] = weight
    result = layer(torch.tensor([1.0, 0]), torch.tensor([0, 1.0]))
    close(result, torch.tensor(wanted) / math.hypot(*wanted))


def test_linear_projections_point_at_what_is_alike_before_any_training():
    net = network(features=32, width=64, layers=0, projection="linear")
    query, pool, mask = encodable(20, 32)
    pool[:, 2] = query + 0.1 * pool[:, 2]
    encoded = net.encode(query, pool, mask)
    assert net.logits(net.start(encoded, 1), encoded).argmax(-1).flatten().tolist() == [2] * 20


def test_the_bi_encoder_moves_on_by_a_learned_share():
    net = BiEncoder(SelectorConfig(version="v1", width=2), 3)
    moved = net.advance(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])).detach()
    close(moved, torch.tensor([0.6, 0.4]) / math.hypot(0.6, 0.4))


def test_a_causal_transformer_reads_more_steps_than_it_has_positions_for():
    net = network(version="v0")
    encoded = net.encode(*encodable())
    chosen = encoded.keys[:, torch.arange(40).remainder(5)].unsqueeze(1)
    directions = net.states(encoded, chosen)
    assert directions.shape == (3, 1, 41, 16)
    chosen[:, :, 35] = -chosen[:, :, 35]
    changed = (net.states(encoded, chosen) - directions).norm(dim=-1).amax((0, 1))
    assert changed[:36].max() < 1e-5, "what is chosen later is not read before"
    assert changed[36:].min() > 1e-3


@pytest.mark.parametrize(("version", "reads"), [("v0", False), ("v3", True)])
def test_v3_sees_its_pool_and_v0_does_not(version, reads):
    query, pool, mask = encodable()
    net = network(version=version)
    first, other = (net.encode(query, some, mask).state for some in (pool, -pool))
    assert torch.equal(first, other) is not reads
