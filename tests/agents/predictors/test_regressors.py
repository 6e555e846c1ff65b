"""Every family against scikit-learn's own prediction, and against itself after a checkpoint."""

import itertools
import math

import numpy as np
import pytest
import torch
from helpers import table_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sklearn.ensemble import RandomForestRegressor
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import Ridge
from sklearn.neighbors import KNeighborsRegressor

from knobwise.agents.predictors.features import FeatureNormaliser
from knobwise.agents.predictors.regressors import (
    AT_ONCE,
    COMPONENTS,
    FAMILIES,
    Trees,
    _rounded_down,
    boosting,
    forest,
)
from knobwise.common.errors import InputError

NAN = math.nan
OUTPUTS = 12
every_family = pytest.mark.parametrize("name", FAMILIES)


def components_of(y):
    return np.linalg.svd(y - y.mean(0), full_matrices=False)[2]


def data(n=70, seed=0, outputs=OUTPUTS):
    """Features of float32, as they come, and outputs that depend on them, not linearly."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(n, 4)).astype(np.float32).astype(np.float64)
    traits = np.stack([x[:, 0], x[:, 1] * x[:, 0], np.abs(x[:, 2])], 1)
    return x, traits @ draw.normal(size=(3, outputs)) + 0.1 * draw.normal(size=(n, outputs)) + 2


def predict(regressor, x):
    return regressor(torch.from_numpy(x).float()).numpy().astype(np.float64)


NEW = data(40, seed=1)[0]


def stock_ridge(x, y, alpha):
    return Ridge(alpha=alpha * len(x)).fit(x, y).predict(NEW)


def stock_kernel(x, y, setting):
    multiple, alpha = setting
    squares = ((x[:, None] - x) ** 2).sum(-1)
    gamma = 1 / (2 * multiple * np.median(squares[~np.eye(len(x), dtype=bool)]))
    stock = KernelRidge(alpha=alpha, kernel="rbf", gamma=gamma).fit(x, y - y.mean(0))
    return stock.predict(NEW) + y.mean(0)


def stock_neighbours(x, y, setting):
    k, weighted = setting
    # a feature counts by the length of its weights; no more neighbours than there are
    ruler = np.linalg.norm(Ridge(alpha=0.1 * len(x)).fit(x, y).coef_, axis=0) ** weighted
    stock = KNeighborsRegressor(min(k, len(x)), algorithm="brute").fit(x * ruler, y)
    return stock.predict(NEW * ruler)


def stock_forest(x, y, leaf, new=NEW):
    components = components_of(y)[:COMPONENTS]
    stock = RandomForestRegressor(40, min_samples_leaf=leaf, max_features=1 / 3, random_state=3)
    return stock.fit(x, (y - y.mean(0)) @ components.T).predict(new) @ components + y.mean(0)


@pytest.mark.parametrize(
    ("family", "stock", "settings", "n"),
    [
        ("ridge", stock_ridge, (0.003, 0.1, 10.0), 70),
        ("ridge", stock_ridge, (0.1,), 3),  # more features than samples
        ("kernel_ridge", stock_kernel, ((0.25, 0.03), (0.25, 1.0), (4.0, 0.3)), 70),
        ("knn", stock_neighbours, ((1, False), (5, False), (5, True)), 70),
        ("knn", stock_neighbours, ((160, False),), 4),
        ("random_forest", stock_forest, (4, 12), 70),
    ],
)
def test_families_are_those_of_scikit_learn(family, stock, settings, n):
    x, y = data(n)
    if family == "ridge":
        x += 3  # the intercept is not penalised
        x[:, 1] = 7  # nor does a feature matter that never varies
    results = FAMILIES[family].fit(x, y, settings, 3)
    atol = 2e-3 if family == "kernel_ridge" else 1e-4
    for setting, result in zip(settings, results, strict=True):
        wanted = stock(x, y, setting)
        np.testing.assert_allclose(predict(result, NEW), wanted, rtol=1e-4, atol=atol)


def test_boosting_by_hand_with_one_tree():
    # one tree of the samples drawn, of depth 4 with at least 8 in a leaf: each leaf is a mean, .05
    # of which is taken
    x, y = data()
    (result,) = boosting(x, y, [1], 0)
    part = np.random.default_rng(0).permutation(70)[:42]
    step = predict(result, x) - y.mean(0)
    leaves, which = np.unique(step.round(5), axis=0, return_inverse=True)
    assert 2 <= len(leaves) <= 5  # 42 samples, 8 in each leaf
    components = components_of(y)[:COMPONENTS]
    residual = (y - y.mean(0)) @ components.T @ components
    for leaf in range(len(leaves)):
        inside = part[which.ravel()[part] == leaf]
        np.testing.assert_allclose(step[inside[0]], 0.05 * residual[inside].mean(0), atol=1e-4)


def test_boosting_goes_on_where_fewer_trees_stopped_and_fits_better():
    x, y = data(200)
    few, more, most = boosting(x, y, [5, 50, 200], 0)
    np.testing.assert_array_equal(predict(few, NEW), predict(boosting(x, y, [5], 0)[0], NEW))
    errors = [((predict(m, x) - y) ** 2).mean() for m in (few, more, most)]
    assert errors[0] > errors[1] > errors[2]


# -- trees together --------------------------------------------------------------------------------


def test_averaged_is_the_mean_of_what_each_says_also_of_some_outputs():
    x, y = data()
    # of other data, of another number of components, of other depths
    others = (forest(*data(50, seed=5), [12], 1), forest(*data(5, seed=6), [1], 2))
    each = [*forest(x, y, [4], 0), *itertools.chain(*others)]
    assert len({e.value.shape[1] for e in each}) > 1
    together = Trees.averaged(each)
    mean = np.mean([predict(e, NEW) for e in each], 0)
    np.testing.assert_allclose(predict(together, NEW), mean, rtol=1e-4, atol=1e-5)
    assert Trees.averaged(each[:1]).roots.tolist() == each[0].roots.tolist()
    np.testing.assert_allclose(
        predict(together.outputs(slice(3, 7)), NEW), predict(together, NEW)[:, 3:7], rtol=1e-5
    )


def test_a_sample_on_the_threshold_goes_where_scikit_learn_sends_it():
    x = np.array([[0.1], [0.2], [0.3], [0.4]]).astype(np.float32).astype(np.float64).repeat(4, 0)
    y = np.stack([x[:, 0], 1 - x[:, 0], x[:, 0] ** 2], 1)
    (result,) = forest(x, y, [1], 3)
    edges = result.threshold[result.feature.ne(result.left)].double().unique()[:, None].numpy()
    wanted = stock_forest(x, y, 1, edges)
    np.testing.assert_allclose(predict(result, edges), wanted, rtol=1e-4, atol=1e-6)


@settings(max_examples=50, deadline=None)
@given(threshold=st.floats(-1e6, 1e6), off=st.integers(-3, 3))
def test_a_threshold_rounded_down_divides_float32_as_before(threshold, off):
    x = np.float32(threshold)
    for _ in range(abs(off)):
        x = np.nextafter(x, np.float32(np.inf if off > 0 else -np.inf))
    rounded = float(_rounded_down(torch.tensor([threshold], dtype=torch.float64)))
    assert (x <= rounded) == (np.float64(x) <= threshold)


# -- edges -----------------------------------------------------------------------------------------


@every_family
def test_no_request_and_more_than_are_predicted_at_once(name):
    x, y = data(40, outputs=5)
    (result, *_) = FAMILIES[name].fit(x, y, FAMILIES[name].settings, 0)
    many = torch.from_numpy(data(2 * AT_ONCE + 1)[0]).float()
    alone = torch.cat([result(row.unsqueeze(0)) for row in many])
    torch.testing.assert_close(result(many), alone, rtol=1e-4, atol=1e-5)
    assert result(many[:0]).shape == (0, 5)


@every_family
@pytest.mark.parametrize(("n", "outputs"), [(1, 2), (1, 12), (2, 12), (9, 2)])
def test_few_samples_and_few_outputs(name, n, outputs):
    x, y = data(n, outputs=outputs)
    settings = FAMILIES[name].settings
    results = FAMILIES[name].fit(x, y, settings, 0)
    assert len(results) == len(settings)
    for result in results:
        assert np.isfinite(predict(result, NEW)).all()
        if n == 1:
            np.testing.assert_allclose(predict(result, x), y, rtol=1e-4)


@every_family
def test_outputs_that_never_vary_and_the_same_seed(name):
    fit, settings = FAMILIES[name]
    for result in fit(data(20)[0], np.full((20, 4), 3.0), settings[:2], 0):
        np.testing.assert_allclose(predict(result, NEW), 3.0, rtol=1e-5)
    first, again = (predict(fit(*data(), settings[:1], 0)[0], NEW) for _ in range(2))
    np.testing.assert_array_equal(first, again)


# -- the one vector that policies and baselines read, by hand --------------------------------------


def test_blocks_are_joined_standardised_and_clipped():
    blocks = {"a": torch.tensor([[1.0], [3.0]]), "b": torch.tensor([[10.0, 7.0], [30.0, 7.0]])}
    normaliser = FeatureNormaliser(blocks)
    assert normaliser.width == 3
    assert normaliser(blocks).tolist() == [[-1, -1, 0], [1, 1, 0]]
    # order of the fit, not of the request; mean 2 ± 1 and 20 ± 10; a column that never varied says
    # nothing
    far = {"b": torch.tensor([[40.0, 900.0]]), "a": torch.tensor([[-100.0]])}
    assert normaliser(far).tolist() == [[-5, 2, 0]]
    assert FeatureNormaliser(blocks, clip=0.5)(blocks).tolist() == [[-0.5, -0.5, 0], [0.5, 0.5, 0]]


def test_missing_values_become_the_median_and_an_indicator():
    blocks = {"a": torch.tensor([[0.0, 1.0], [0.0, NAN], [6.0, 5.0], [NAN, 3.0]])}
    normaliser = FeatureNormaliser({"a": blocks["a"][:3]})
    # the first column is 0, 0, 6 (2 ± √8), complete where fitted; the second 1, median 1 (the lower
    # of two), 5 (7/3)
    got = normaliser(blocks)
    assert normaliser.width == got.shape[1] == 3
    torch.testing.assert_close(got[:, 0], torch.tensor([-2.0, -2.0, 4.0, -2.0]) / math.sqrt(8))
    spread = math.sqrt((16 / 9 + 16 / 9 + 64 / 9) / 3)
    torch.testing.assert_close(got[:, 1], torch.tensor([-4 / 3, -4 / 3, 8 / 3, 2 / 3]) / spread)
    assert got[:, 2].tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("unit", [1e-9, 1e9])
def test_units_do_not_matter(unit):
    values = torch.stack([torch.randn(400), torch.randn(400).mul(2).exp()], 1)
    normaliser = FeatureNormaliser({"a": values * unit})
    assert normaliser.heavy.tolist() == [False, True]
    wanted = FeatureNormaliser({"a": values})({"a": values})
    torch.testing.assert_close(normaliser({"a": values * unit}), wanted)


def test_heavy_tails_are_drawn_in():
    # ±1 many times and one 1023: the unit is 1, and sign(x)·ln(1 + |x|) gives ±ln 2 and 10·ln 2
    values = torch.tensor([1.0, -1.0] * 10 + [1023.0]).unsqueeze(1)
    drawn_in = torch.tensor([1.0, -1.0] * 10 + [10.0]) * math.log(2)
    expected = (drawn_in - drawn_in.mean()) / drawn_in.std(correction=0)
    torch.testing.assert_close(FeatureNormaliser({"a": values})({"a": values}).squeeze(1), expected)


def test_a_column_that_is_constant_or_without_any_value_says_nothing():
    normaliser = FeatureNormaliser({"a": torch.full((3, 1), NAN)})
    assert normaliser({"a": torch.tensor([[4.0], [NAN]])}).tolist() == [[0, 0], [0, 1]]
    for value in (0.0, 0.1, 1e-12, 123456.789, -3e30):
        block = {"a": torch.full((7, 1), value)}
        assert not FeatureNormaliser(block)(block).any()


def test_other_blocks_are_not_read_and_a_missing_or_misshapen_one_is_named():
    normaliser = FeatureNormaliser({})
    assert normaliser.width == 0
    assert normaliser({}, 4).shape == normaliser({"unused": torch.ones(4, 2)}, 4).shape == (4, 0)
    normaliser = FeatureNormaliser({"image": torch.randn(5, 3)})
    for name, width in (("text", 3), ("image", 2)):
        with pytest.raises(InputError, match="'image'"):
            normaliser({name: torch.randn(5, width)})


def test_a_restored_one_takes_the_buffers_of_a_saved_one():
    blocks = {"a": torch.tensor([[1.0, NAN], [2.0, 5.0], [9.0, 5.0]]), "b": torch.randn(3, 1)}
    saved = FeatureNormaliser(blocks)
    state = {f"normaliser.{name}": buffer for name, buffer in saved.state_dict().items()}
    restored = FeatureNormaliser.restored({"features": saved.sizes, "state": state})
    restored.load_state_dict(saved.state_dict())
    assert restored.width == saved.width
    assert torch.equal(restored(blocks), saved(blocks))


def test_the_projection_is_onto_the_directions_of_most_variance_scaled_to_one():
    common, own = torch.randn(400, 1), torch.randn(400, 3)
    # the first three columns nearly agree: the first component is their mean
    x = torch.cat([common + 0.1 * own, torch.randn(400, 1)], 1)
    table = table_of(torch.ones(400, 2), torch.ones(400, 2), x)
    fitted = FeatureNormaliser.fit(table, torch.arange(400), 2)
    assert fitted.width == 2
    projected = fitted(table.features, 400)
    torch.testing.assert_close(projected.T.cov(), torch.eye(2), atol=1e-3, rtol=0)
    along = torch.corrcoef(torch.stack([projected[:, 0], common[:, 0]]))[0, 1]
    assert along.abs() > 0.99
    assert torch.corrcoef(torch.stack([projected[:, 1], x[:, 3]]))[0, 1].abs() > 0.99
    plain = FeatureNormaliser.fit(table, torch.arange(400))
    assert torch.equal(fitted.normal(table.features, 400), plain(table.features, 400))


@pytest.mark.parametrize("rows", [3, 50])
def test_more_components_than_samples_or_features_are_refused(rows):
    x = torch.cat([torch.randn(50, 2), torch.ones(50, 1)], 1)  # a column that does not vary is none
    table = table_of(torch.ones(50, 2), torch.ones(50, 2), x)
    with pytest.raises(InputError, match=r"policy.project=3.* 2 "):
        FeatureNormaliser.fit(table, torch.arange(rows), 3)
    assert FeatureNormaliser.fit(table, torch.arange(rows), 2).width == 2


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(width=32, allow_infinity=False), min_size=2, max_size=12))
@example([0.0, 1.401298464324817e-45, 0.0, 0.0])  # a spread that float32 does not hold
@example([6.285941624411889e37, -2.7742294053561477e38])  # and a difference
def test_what_comes_out_is_finite_and_within_the_clip(values):
    block = {"a": torch.tensor(values).unsqueeze(1)}
    normaliser = FeatureNormaliser({"a": block["a"][: len(values) // 2]})
    got = normaliser(block)
    assert got.dtype == torch.float32
    assert got.isfinite().all()
    assert got.abs().max() <= 5
