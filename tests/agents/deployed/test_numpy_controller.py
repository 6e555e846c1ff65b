"""A deployed controller in NumPy: it decides as the torch modules do, and refuses the rest."""

import copy
import functools
import itertools
import json
import math
import random
import re
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import arrays, gappy_table, portfolio, small_table, some_configurations
from hypothesis import given, settings
from hypothesis import strategies as st
from replayed import untrained

from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.deployed import controller as policy
from knobwise.agents.deployed.arrays import digest_of
from knobwise.agents.deployed.controller import FORMAT, NumpyController
from knobwise.envs.bandit.budgets import default_budgets
from knobwise.serving.exploration import near_best

ROUNDING = 1e-4
"""Of log-probabilities in single precision."""
SHARPER = 10
"""Factor on it with a utility head, whose expectations count forty times in log-probabilities."""


GAPPY = gappy_table()
FAR = small_table(90)
FAR.features["image_features"][:, 1] += 1e4  # which single precision hardly tells apart
TABLES = {
    "far from 0": FAR,
    "gappy": GAPPY,
    # so few that there is one head over them
    "five of twelve": some_configurations(small_table(90), [0, 3, 5, 6, 11]),
    "holes": small_table(90, holes=0.4),
    "no features": small_table(90, features=False),
    "portfolio": portfolio(90),
}
DEPLOY = [True, False, True, True, False]
GAP = "image_features", 2
COLUMNS = [*itertools.product(("image_features", "language_features"), range(4))]


def budgets_of(table):
    """From hopeless to generous, and the judged ones: 90 of them, in ms."""
    ends = table.latency_ms[table.mask].aminmax()
    more = torch.stack([ends.min / 3, ends.min, ends.max, 3 * ends.max])
    budgets = torch.cat([default_budgets(table), more, torch.tensor([1e-12, 1e-3, 1e9])])
    return budgets.repeat(18)[:90].double().numpy()


def request_of(blocks, row=0):
    return {name: block[row] for name, block in blocks.items()}


def one_by_one(light, blocks, limits, drift=None):
    """The decisions of n requests, each alone."""
    pairs = enumerate(limits.tolist())
    return [light.decide_index(request_of(blocks, row), limit, drift) for row, limit in pairs]


# -- it decides as the policy does -----------------------------------------------------------------


CONFIGS = st.builds(
    PolicyConfig,
    fold_networks=st.sampled_from([1, 3]),
    layers=st.integers(1, 3),
    hidden=st.just(12),
    project=st.sampled_from([0, 3]),
    budget_width=st.sampled_from([1, 4, 9, 32]),
    drift=st.sampled_from([0.0, 0.3]),
    utility_head=st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from([*TABLES]),
    config=CONFIGS,
    masked=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_it_decides_as_the_torch_modules_alone_and_as_one_of_many(name, config, masked, seed):
    table = TABLES[name]
    rounding = ROUNDING * (SHARPER if config.utility_head else 1)
    if not table.features:
        config = replace(config, project=0)
    agent = untrained(table, config)
    light = agent.decider
    # requests miss features, or are far out
    table = replace(table, features={n: block.clone() for n, block in table.features.items()})
    for block in table.features.values():
        block[::5, 0] = torch.nan
        block[3] = torch.nan
        block[1::5, 1] = 1e6
    blocks = arrays(table)
    generator = np.random.default_rng(seed)
    limits = generator.permutation(budgets_of(table)) * generator.uniform(0.9, 1.1, 90)
    mask = table.mask if masked else None
    allowed = table.mask.numpy() if masked else None
    drift = offsets = None
    planned = limits
    if config.drift:
        offset = generator.normal(0.1, 0.3, table.num_configurations).astype(np.float32)
        drift, offsets = (offset, 1.0), torch.from_numpy(offset).expand(90, -1)
        planned = planned * math.exp(-offset.mean())
    # by the torch modules
    x = agent.controller.normaliser(table.features, 90)
    with torch.no_grad():
        wanted = agent.controller(x, torch.from_numpy(planned).float(), mask, offsets).numpy()
    log_probs = light.log_probs(blocks, limits, allowed, drift)
    np.testing.assert_allclose(log_probs, wanted, atol=rounding, rtol=rounding)
    rows, chosen = np.arange(90), light.choose(blocks, limits, allowed, drift)
    assert (wanted[rows, chosen] >= wanted.max(1) - rounding).all()
    # alone it is decided alike, up to rounding
    if not masked:
        alone = np.array(one_by_one(light, blocks, limits, drift))
        assert (np.abs(log_probs[rows, alone] - log_probs[rows, chosen]) < rounding).all()
        assert (alone == chosen).mean() > 0.99


@functools.cache
def guarded():
    return untrained(GAPPY, None, DEPLOY)


def test_what_a_block_lacks_but_no_training_sample_is_left_to_static():
    """Only the third number of the images was missing in some of them."""
    light = guarded().decider
    budgets = light.guard.budgets_ms.tolist()
    others = {False: 0, True: 0}
    for row, (name, column) in itertools.product(range(4), COLUMNS):
        request = request_of(arrays(GAPPY), row)
        block = request[name] = request[name].copy()
        block[column] = np.nan
        unlike = (name, column) != GAP
        assert light.is_unlike(request) == unlike
        many = {each: values[None] for each, values in request.items()}
        assert light.unlike(many, 1).tolist() == [unlike]
        for budget, deployed in zip(budgets, DEPLOY, strict=True):
            chosen = light.decide_index(request, budget)
            assert light.choose(many, np.array([budget])).tolist() == [chosen]
            assert light.decides_by_static(request, budget) == (unlike or not deployed)
            static = light.static.single(budget)
            if unlike or not deployed:
                assert light.decide_expected(request, budget) == light.static.expected(static)
                assert chosen == static
            others[unlike] += chosen != static
    assert others[False] > 0 == others[True]
    # without static a medium value stands for it, as before
    alone = untrained(GAPPY, None).decider
    assert alone.static is None
    assert alone.is_unlike(request)
    assert not alone.decides_by_static(request, budgets[0])


def test_more_requests_than_are_decided_at_once(monkeypatch):
    light, blocks, limits = guarded().decider, arrays(GAPPY), np.linspace(5, 40, 90)
    together = light.choose(blocks, limits).tolist()
    monkeypatch.setattr(policy, "AT_ONCE", 7)
    for mask in (None, np.ones((90, 12), bool)):
        assert light.choose(blocks, limits, mask).tolist() == together
    assert light.choose(arrays(GAPPY, []), limits[:0]).shape == (0,)


def test_threads_share_a_controller_and_what_is_given_is_left_as_it_was():
    light = untrained(GAPPY).decider
    # so that what is expected depends on features
    light.latency.slopes = np.ones((12, 9), np.float32)
    blocks, limits = arrays(GAPPY), np.linspace(5, 40, 90)
    given_before = copy.deepcopy((blocks, limits))

    def expected(seed):
        decided = [None] * 90
        for row in np.random.default_rng(seed).permutation(90).tolist():
            decided[row] = light.decide_expected(request_of(blocks, row), limits[row])
        return decided

    alone = expected(0)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert all(result == alone for result in pool.map(expected, range(16)))
    finally:
        sys.setswitchinterval(before)
    light.choose(blocks, limits, np.ones((90, 12), bool))
    np.testing.assert_equal((blocks, limits), given_before)


# -- a machine that is not as fast as the profile's ------------------------------------------------


def arrays_by_hand(**header):
    """Two configurations: the second has the logit silu(z) under a budget that is z doublings above
    20 ms, the first has 0. So the second is chosen above 20 ms. The one feature moves its expected
    latency."""
    about = {
        "format": FORMAT,
        "knobs": [["size", ["small", "large"]]],
        "features": {"x": 1},
        "clip": 5.0,
        "layers": 1,
        "heads": "knobs",
        "budget_width": 1,
        "drift_values": 0,
        "sharpness": 40.0,
        "datasets": [],
        "limit": "budget_ms",
        "unit": "ms",
        "guard": False,
        **header,
    }
    zero = np.zeros(1, np.float32)
    return {
        "configurations": np.array([[0], [1]]),
        "normaliser.mean": zero,
        "normaliser.scale": zero + 1,
        "normaliser.median": zero,
        "normaliser.unit": zero + 1,
        "normaliser.heavy": zero > 0,
        "normaliser.has_missing": zero > 0,
        "network.layers.0.weight": np.array([[0.0], [1.0]], np.float32),
        "network.layers.0.bias": zero[None],
        "network.layers.1.weight": np.array([[0.0, 1.0]], np.float32),
        "network.layers.1.bias": np.array([[0.0, 0.0]], np.float32),
        "network.encoding.mean": np.array(math.log(20)),
        "network.encoding.scale": np.array(math.log(2)),
        "network.encoding.frequencies": np.zeros(0),
        "latency.bias": np.array([2.0, 3.0], np.float32),
        "latency.spread": np.array([0.125, 0.25], np.float32),
        "latency.weight": np.array([[0.0, 0.5]], np.float32),
        "header": np.frombuffer(json.dumps(about).encode(), np.uint8),
    }


def signed(columns):
    """The arrays of a file with the digest that they have."""
    return columns | {"digest": np.frombuffer(digest_of(columns), np.uint8)}


def with_arrays(columns, **header):
    """A controller with these in addition."""
    more = {name: np.array(values) for name, values in columns.items()}
    return NumpyController(signed(arrays_by_hand(**header) | more))


GUARDED = {
    "guard.budgets_ms": [40.0, 160.0, 10.0],
    "guard.deploy": [True, False, True],
    "static.latency_ms": [10.0, 30.0],
    "static.sorted_ms": [[5.0, 20.0], [10.0, 90.0]],
    "static.running": [[0.0, 0.2, 0.4], [0.0, 0.1, 0.9]],
}
X = {"x": np.array([2.0], np.float32)}
MANY = {"x": np.full((5, 1), 2.0)}


def test_drift_by_hand():
    light = with_arrays({})
    assert light.decide(X, 22.0) == {"size": "large"}
    assert light.decide_expected(X, 22.0) == light.expected_of(X, 22.0, None, 1) == (1, 4.0, 0.25)
    assert light.decide_expected(X, 18.0) == (0, 2.0, 0.125)
    # slower by 1.2 it is as if there were 18.3 ms; what is expected stays that of the profile
    by = math.log(1.2)
    assert light.decide_expected(X, 22.0, (by, 1.0)) == (0, 2.0, 0.125)
    assert light.decide_index(X, 18.0, (-by, 1.0)) == 1
    # of offsets by configuration the mean counts, and the spread does not
    assert light.decide_index(X, 22.0, (np.array([0.0, 2 * by]), 1.0)) == 0
    assert light.decide_index(X, 22.0, (np.array([-1.0, 1.0]), 3.0)) == 1
    # 22·e^−0.1 = 19.9
    drift = np.array([0.3, -0.1]), 0.5
    assert light.choose(MANY, np.full(5, 22.0), None, drift).tolist() == [0] * 5
    # whatever the offset, budgets stay finite
    assert light.decide_index(X, 22.0, (-1e300, 1.0)) == 1
    assert light.decide_index(X, 22.0, (1e300, 1.0)) == 0


FALLEN = pytest.approx((0, math.log(10), math.log(2)))
"""What static chooses at 81 ms, and expects of it."""
SLOWER = math.log(4), 1.0
ONLY = np.array([[False, True]] * 5)


def test_fall_backs_by_hand():
    """10 and 40 ms meet at 20 ms, 40 and 160 ms at 80 ms."""
    light = with_arrays(GUARDED, guard=True)
    # 19 ms are too little for the large one; above 80 ms static decides: 0.4 and 0.1 at 81 ms, 0.9
    # at 90 ms
    limits = np.array([19.0, 19.5, 41.0, 81.0, 90.0])
    assert one_by_one(light, MANY, limits) == light.choose(MANY, limits).tolist() == [0, 0, 1, 0, 1]
    assert light.choose(MANY, limits, ONLY).tolist() == [1] * 5
    assert light.reads_features(limits).tolist() == [True, True, True, False, False]
    assert light.fall_back(79.0) is None
    # a drift moves both, the guard's budgets and static's: 79/4 < 20 < 81/4, and 360/4 = 90
    chosen = [light.decide_index(X, budget, SLOWER) for budget in (79.0, 81.0, 361.0)]
    assert chosen == [0, 1, 1]
    # where static decides no network runs
    light._heads = None
    assert light.fall_back(330.0, SLOWER) == light.fall_back(81.0) == FALLEN
    assert light.decide_expected(X, 81.0) == FALLEN


def test_a_guard_is_asked_with_whole_budgets():
    """Static decides from 80 ms on, at which the policy may have less left."""
    light = with_arrays(GUARDED, guard=True)
    settled = light.settled(90.0)
    assert [each.decide_index(X, 41.0) for each in (light, settled)] == [1, 0]
    assert settled.fall_back(41.0) == light.fall_back(81.0) == FALLEN
    assert settled.choose(MANY, np.full(5, 41.0)).tolist() == [0] * 5
    assert near_best(settled, {}, 41.0, None, 0.29) == [0]
    settled = light.settled(79.0)
    assert settled.fall_back(90.0) is None
    assert settled.reads_features(np.array([90.0])).tolist() == [True]
    # with a drift a whole budget is another: 330 / 4 > 80
    assert light.settled(330.0, SLOWER).fall_back(41.0) == FALLEN
    plain = with_arrays({})
    assert plain.settled(90.0) is plain
    with pytest.raises(ValueError, match="budget"):
        light.settled(0.0)


@pytest.mark.parametrize(
    ("limit_ms", "drift", "loss", "wanted"),
    [
        (20.0, None, 1e-9, [0, 1]),  # where both are equal
        # the large one is at silu(log₂ 1.975) = 0.7169 logits, or 0.01792 of utility, above
        (39.5, None, 0.0178, [1]),
        (39.5, None, 0.0181, [0, 1]),
        (79.0, (math.log(2), 1.0), 0.0178, [1]),
        # where the guard falls back by the mean utility of static: 0.4 and 0.1 at 81 ms
        (81.0, None, 0.29, [0]),
        (81.0, None, 0.31, [0, 1]),
        (324.0, SLOWER, 0.29, [0]),
    ],
)
def test_the_configurations_that_lose_little_by_hand(limit_ms, drift, loss, wanted):
    light = with_arrays(GUARDED, guard=True)
    assert near_best(light, X, limit_ms, drift, loss) == wanted
    expected = light.expected_of(X, 81.0, None, 1)
    assert expected == pytest.approx((1, math.log(30), math.log(3)))


def test_mean_budgets_decide_at_their_prices_and_the_mix_where_they_fell_back():
    """The second configuration is chosen at a value above 20 ms."""
    mean = {
        "mean.budgets_ms": [9.0, 12.0, 16.0],
        "mean.worths": [19.0, 50.0, 21.0],
        "mean.deployed": [True, False, True],
        "mean.mix.first": [0, 0, 0],
        "mean.mix.second": [1, 1, 1],
        "mean.mix.share": [0.5, 0.25, 0.5],
        "mean.mix.mean_accuracy": [0.2, 0.4],
        "mean.mix.mean_cost": [5.0, 10.0],
    }
    light = with_arrays(mean, limit="mean")
    begun = {next(with_arrays(mean, limit="mean").mean.turns) for _ in range(3)}
    assert len({next(light.mean.turns), *begun}) > 1
    light.budgets.start_over(1)
    # at 12 ms the mix takes turns between its sides, one by one and together alike
    limits = np.array([9.0, 16.0, 12.0, 12.0, 12.0])
    assert one_by_one(light, MANY, limits) == [0, 1, 0, 1, 0]
    light.budgets.start_over(1)
    assert light.choose(MANY, limits).tolist() == [0, 1, 0, 1, 0]
    assert light.reads_features(limits).tolist() == [True, True, False, False, False]
    assert light.fall_back(9.0) is None
    assert np.isnan(light.fall_back(12.0)[1:]).all()
    assert light.choose(MANY, limits, ONLY).tolist() == [1] * 5
    with pytest.raises(ValueError, match="drift"):
        light.decide_index(X, 9.0, (0.1, 1.0))
    # nothing is expected of the mix, which takes its turns also where it does not decide
    light.budgets.start_over(1)
    assert [light.decide_expected(X, 12.0)[0] for _ in range(3)] == [0, 1, 0]
    light.budgets.start_over(1)
    assert [light.static_expected(X, 9.0)[0] for _ in range(3)] == [0, 1, 0]


# -- what it says, and what it refuses -------------------------------------------------------------


BLOCKS = {name: np.zeros((1, 4)) for name in ("image_features", "language_features")}
FEW = np.full(1, 10.0)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"features": {"image_features": np.zeros((1, 4))}}, "language_features"),
        ({"features": dict.fromkeys(BLOCKS, np.zeros((1, 4, 1)))}, "image_features"),
        *(({"limits": np.full(1, budget)}, "budget") for budget in (0.0, np.nan, 1e300)),
        ({"limits": np.array(10.0)}, "budgets"),
        ({"limits": FEW.repeat(2)}, "image_features"),
        ({"mask": np.ones(12, bool)}, "mask"),
        ({"mask": np.zeros((1, 12), bool)}, "mask"),
        *(({"drift": (o, 1.0)}, "drift") for o in (math.nan, np.zeros(3), np.full(12, np.nan))),
        ({"drift": (0.0, 0.0)}, "drift"),
    ],
)
def test_wrong_features_budgets_masks_and_drifts_are_refused_by_name(changes, named):
    light = untrained(small_table(30)).decider
    call = {"features": BLOCKS, "limits": FEW} | changes
    with pytest.raises(ValueError, match=named):
        light.choose(**call)
    if "mask" not in changes and call["limits"].shape == (1,):
        limit = float(call["limits"][0])
        with pytest.raises(ValueError, match=named):
            light.decide(request_of(call["features"]), limit, call.get("drift"))


def test_other_files_are_refused(tmp_path):
    (tmp_path / "text.npz").write_text("no archive")
    np.savez(tmp_path / "other.npz", header=np.zeros(3, np.uint8))
    np.savez(tmp_path / "pickled.npz", header=np.array([{}], object))
    np.savez(
        tmp_path / "another_version.npz", **arrays_by_hand(format="knobwise.NumpyController/2")
    )
    incomplete = arrays_by_hand()
    del incomplete["network.layers.1.weight"]
    np.savez(tmp_path / "incomplete.npz", **signed(incomplete))
    for path in tmp_path.iterdir():
        with pytest.raises(ValueError, match=path.name):
            NumpyController.load(path)
    with pytest.raises(FileNotFoundError):
        NumpyController.load(tmp_path / "nothing.npz")


def test_a_file_that_unpacks_to_much_is_refused(tmp_path, monkeypatch):
    """As any zip archive, a small one may."""
    np.savez_compressed(tmp_path / "large.npz", **arrays_by_hand(), more=np.zeros(10_000))
    monkeypatch.setattr("knobwise.agents.deployed.arrays.MAX_BYTES", 50_000)
    with pytest.raises(ValueError, match=r"large\.npz.*unpacks"):
        NumpyController.load(tmp_path / "large.npz")


def test_a_file_that_holds_an_array_twice_is_refused(tmp_path):
    path = tmp_path / "twice.npz"
    np.savez(path, **arrays_by_hand())
    with pytest.warns(UserWarning, match="header"), zipfile.ZipFile(path, "a") as archive:
        archive.writestr("header.npy", archive.read("header.npy"))
    with pytest.raises(ValueError, match=r"twice\.npz: .*header"):
        NumpyController.load(path)


def spoilt(array):
    """The array with one NaN."""
    return np.where(np.arange(array.size).reshape(array.shape) == array.size // 2, np.nan, array)


MUTATIONS = [
    lambda array: array[: len(array) // 2],
    lambda array: array[::-1],
    spoilt,
    np.ravel,
    lambda array: np.concatenate([array, array[-1:]]),
    lambda array: array.astype(np.float16 if array.dtype.kind == "f" else np.int8),
]


def loaded(path):
    """The controller in a file; None if it is refused by a line that names the file."""
    try:
        return NumpyController.load(path)
    except ValueError as error:
        message = str(error)
    assert re.fullmatch(rf"{re.escape(str(path))}: .*", message)
    return None


@pytest.mark.parametrize("again", [False, True])
def test_damaged_arrays_are_refused_on_loading_or_with_a_digest_made_again_decide(tmp_path, again):
    whole, path = guarded().arrays(), tmp_path / "c.npz"
    assert bytes(whole["digest"]) == digest_of(whole)
    np.savez(path, **{name: array for name, array in whole.items() if name != "digest"})
    assert loaded(path) is None
    np.savez(path, **whole)
    blocks, limits = arrays(GAPPY), np.full(90, 15.0)
    assert NumpyController.load(path).choose(blocks, limits).shape == (90,)
    refused = 0
    for name, mutation in itertools.product(sorted(set(whole) - {"digest"}), MUTATIONS):
        array = whole[name]
        mutated = mutation(array) if array.ndim and array.size else array
        alike = (mutated.dtype, mutated.shape) == (array.dtype, array.shape)
        if alike and mutated.tobytes() == array.tobytes():
            continue
        changed = {**whole, name: mutated}
        np.savez(path, **(signed(changed) if again else changed))
        controller = loaded(path)
        refused += controller is None
        if controller is not None:
            assert again, name
            assert controller.choose(blocks, limits).max() < 12
    assert refused > (30 if again else 100)


def test_a_file_that_is_cut_or_has_a_flipped_bit_is_noticed(tmp_path):
    path, draw, refused = tmp_path / "c.npz", random.Random(0), 0
    light = untrained(GAPPY, PolicyConfig(hidden=64), DEPLOY).export(path)
    whole = path.read_bytes()
    for length in range(0, len(whole), len(whole) // 150):
        path.write_bytes(whole[:length])
        assert loaded(path) is None
    for position in draw.sample(range(len(whole)), 150):
        flipped = bytes([whole[position] ^ 1 << draw.randrange(8)])
        path.write_bytes(whole[:position] + flipped + whole[position + 1 :])
        controller = loaded(path)
        # where nobody reads, nothing changes
        assert controller is None or controller.digest == light.digest
        refused += controller is None
    assert refused > 130
