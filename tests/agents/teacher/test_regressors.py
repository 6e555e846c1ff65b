"""Every family against scikit-learn's own prediction, and against itself after a checkpoint."""

import math

import numpy as np
import pytest
import torch
from helpers import close, input_error, table_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.ensemble import RandomForestRegressor
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import Ridge
from sklearn.neighbors import KNeighborsRegressor

from knobwise.agents.controller.features import FeatureNormaliser
from knobwise.agents.teacher.regressors import (
    AT_ONCE,
    COMPONENTS,
    FAMILIES,
    Trees,
    _rounded_down,
    boosting,
    forest,
)

NAN = math.nan
OUTPUTS = 12
every_family = pytest.mark.parametrize("name", FAMILIES)


def data(n=70, seed=0, outputs=OUTPUTS):
    """Features of float32, as they come, and outputs that depend on them, not linearly."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(n, 4)).astype(np.float32).astype(np.float64)
    traits = np.stack([x[:, 0], x[:, 1] * x[:, 0], np.abs(x[:, 2])], 1)
    return x, traits @ draw.normal(size=(3, outputs)) + 0.1 * draw.normal(size=(n, outputs)) + 2


NEW = data(40, seed=1)[0]


def predict(regressor, x=NEW):
    return regressor(torch.from_numpy(x).float()).numpy()


def reduced(y):
    """Return the main components of outputs, and the matrix that makes outputs of them."""
    centred = y - y.mean(0)
    back = np.linalg.svd(centred, full_matrices=False)[2][:COMPONENTS]
    return centred @ back.T, back


def stock_ridge(x, y, alpha):
    return Ridge(alpha=alpha * len(x)).fit(x, y).predict(NEW)


def stock_kernel(x, y, setting):
    multiple, alpha = setting
    squares = ((x[:, None] - x) ** 2).sum(-1)
    gamma = 1 / (2 * multiple * np.median(squares[~np.eye(len(x), dtype=bool)]))
    stock = KernelRidge(alpha=alpha, kernel="rbf", gamma=gamma).fit(x, y - y.mean(0))
    return stock.predict(NEW) + y.mean(0)


def stock_process(x, y, setting):
    """A process for each principal component, whose noise counts in its share of the variance."""
    multiple, alpha = setting
    squares = ((x[:, None] - x) ** 2).sum(-1)
    width = np.sqrt(multiple * np.median(squares[~np.eye(len(x), dtype=bool)]))
    _, singular, back = np.linalg.svd(y - y.mean(0), full_matrices=False)
    variances = (singular / singular[0]) ** 2
    predicted = np.zeros((len(NEW), y.shape[1]))
    for component, variance in zip(back, variances, strict=True):
        stock = GaussianProcessRegressor(RBF(width), alpha=alpha / variance, optimizer=None)
        values = stock.fit(x, (y - y.mean(0)) @ component).predict(NEW)
        predicted += np.outer(values, component)
    return predicted + y.mean(0)


def stock_neighbours(x, y, setting):
    k, weighted = setting
    # a feature counts by the length of its weights; no more neighbours than there are
    ruler = np.linalg.norm(Ridge(alpha=0.1 * len(x)).fit(x, y).coef_, axis=0) ** weighted
    stock = KNeighborsRegressor(min(k, len(x)), algorithm="brute").fit(x * ruler, y)
    return stock.predict(NEW * ruler)


def stock_forest(x, y, leaf, new=NEW):
    components, back = reduced(y)
    stock = RandomForestRegressor(40, min_samples_leaf=leaf, max_features=1 / 3, random_state=3)
    return stock.fit(x, components).predict(new) @ back + y.mean(0)


@pytest.mark.parametrize(
    ("family", "stock", "settings", "n"),
    [
        ("ridge", stock_ridge, (0.003, 0.1, 10.0), 70),
        ("ridge", stock_ridge, (0.1,), 3),  # more features than samples
        ("kernel_ridge", stock_kernel, ((0.25, 0.03), (0.25, 1.0), (4.0, 0.3)), 70),
        ("gaussian_process", stock_process, ((0.25, 0.03), (0.25, 1.0), (4.0, 0.3)), 70),
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
    atol = 2e-3 if family in ("kernel_ridge", "gaussian_process") else 1e-4
    for setting, result in zip(settings, results, strict=True):
        assert_allclose(predict(result), stock(x, y, setting), rtol=1e-4, atol=atol)


def test_boosting_by_hand_with_one_tree():
    # one tree of the samples drawn, of depth 4 with at least 8 in a leaf: each leaf is a mean, .05
    # of which is taken
    x, y = data()
    (result,) = boosting(x, y, [1], 0)
    part = np.random.default_rng(0).permutation(70)[:42]
    step = predict(result, x) - y.mean(0)
    leaves, which = np.unique(step.round(5), axis=0, return_inverse=True)
    assert 2 <= len(leaves) <= 5  # 42 samples, 8 in each leaf
    components, back = reduced(y)
    residual = components @ back
    for leaf in range(len(leaves)):
        inside = part[which.ravel()[part] == leaf]
        assert_allclose(step[inside[0]], 0.05 * residual[inside].mean(0), atol=1e-4)


def test_boosting_goes_on_where_fewer_trees_stopped_and_fits_better():
    x, y = data(200)
    fitted = boosting(x, y, [5, 50, 200], 0)
    assert_array_equal(predict(fitted[0]), predict(boosting(x, y, [5], 0)[0]))
    few, more, most = (((predict(each, x) - y) ** 2).mean() for each in fitted)
    assert few > more > most


# -- trees together --------------------------------------------------------------------------------


def test_averaged_is_the_mean_of_what_each_says_also_of_some_outputs():
    # of other data, of another number of components, of other depths
    (first,) = forest(*data(), [4], 0)
    each = [first, *forest(*data(50, seed=5), [12], 1), *forest(*data(5, seed=6), [1], 2)]
    assert len({e.value.shape[1] for e in each}) > 1
    together = Trees.averaged(each)
    predicted = predict(together)
    assert_allclose(predicted, np.mean([predict(e) for e in each], 0), rtol=1e-4, atol=1e-5)
    assert Trees.averaged([first]).roots.tolist() == first.roots.tolist()
    assert_allclose(predict(together.outputs(slice(3, 7))), predicted[:, 3:7], rtol=1e-5)


def test_a_sample_on_the_threshold_goes_where_scikit_learn_sends_it():
    x = np.float32([[0.1], [0.2], [0.3], [0.4]]).astype(np.float64).repeat(4, 0)
    y = np.concatenate([x, 1 - x, x**2], 1)
    (result,) = forest(x, y, [1], 3)
    edges = result.threshold[result.feature.ne(result.left)].double().unique()[:, None].numpy()
    wanted = stock_forest(x, y, 1, edges)
    assert_allclose(predict(result, edges), wanted, rtol=1e-4, atol=1e-6)


@settings(max_examples=50, deadline=None)
@given(st.floats(-1e6, 1e6), st.integers(0, 3), st.sampled_from([-np.inf, np.inf]))
def test_a_threshold_rounded_down_divides_float32_as_before(threshold, steps, towards):
    x = np.float32(threshold)
    for _ in range(steps):
        x = np.nextafter(x, np.float32(towards))
    rounded = float(_rounded_down(torch.tensor([threshold], dtype=torch.float64)))
    assert (x <= rounded) == (np.float64(x) <= threshold)


# -- edges -----------------------------------------------------------------------------------------


@every_family
def test_no_request_and_more_than_are_predicted_at_once(name):
    fit, settings = FAMILIES[name]
    result = fit(*data(40, outputs=5), settings[:1], 0)[0]
    many, _ = data(2 * AT_ONCE + 1)
    alone = [predict(result, row[None])[0] for row in many]
    assert_allclose(predict(result, many), alone, rtol=1e-4, atol=1e-5)
    assert predict(result, many[:0]).shape == (0, 5)


@every_family
def test_of_one_sample_its_outputs_are_known(name):
    """Of few samples see the experts, which are fitted with every family."""
    fit, settings = FAMILIES[name]
    x, y = data(1)
    for result, _ in zip(fit(x, y, settings, 0), settings, strict=True):
        assert_allclose(predict(result, x), y, rtol=1e-4)


@every_family
def test_outputs_that_never_vary_and_the_same_seed(name):
    fit, settings = FAMILIES[name]
    for result in fit(data(20)[0], np.full((20, 4), 3.0), settings[:2], 0):
        assert_allclose(predict(result), 3.0, rtol=1e-5)
    first, again = (predict(fit(*data(), settings[:1], 0)[0]) for _ in range(2))
    assert_array_equal(first, again)


# -- the one vector that policies and baselines read, by hand --------------------------------------


def normalised(values, fitted=None):
    """Return what becomes of a block of features, whose statistics are its own or those of another
    one."""
    return FeatureNormaliser({"a": values if fitted is None else fitted})({"a": values})


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
    values = torch.tensor([[0.0, 1.0], [0.0, NAN], [6.0, 5.0], [NAN, 3.0]])
    first, second, missing = normalised(values, values[:3]).T
    # the first column is 0, 0, 6 (2 ± √8), complete where fitted; the second 1, median 1 (the lower
    # of two), 5 (7/3)
    close(first * 8**0.5, [-2.0, -2.0, 4.0, -2.0])
    spread = math.sqrt((16 / 9 + 16 / 9 + 64 / 9) / 3)
    close(second * spread, [-4 / 3, -4 / 3, 8 / 3, 2 / 3])
    assert missing.tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("unit", [1e-9, 1e9])
def test_units_do_not_matter(unit):
    values = torch.stack([torch.randn(400), torch.randn(400).mul(2).exp()], 1)
    assert FeatureNormaliser({"a": values * unit}).heavy.tolist() == [False, True]
    close(normalised(values * unit), normalised(values))


def test_heavy_tails_are_drawn_in():
    # ±1 many times and one 1023: the unit is 1, and sign(x)·ln(1 + |x|) gives ±ln 2 and 10·ln 2
    values = torch.tensor([1.0, -1.0] * 10 + [1023.0]).unsqueeze(1)
    drawn_in = torch.tensor([1.0, -1.0] * 10 + [10.0]) * math.log(2)
    expected = (drawn_in - drawn_in.mean()) / drawn_in.std(correction=0)
    close(normalised(values).squeeze(1), expected)


def test_a_column_that_is_constant_or_without_any_value_says_nothing():
    unknown = torch.full((3, 1), NAN)
    assert normalised(torch.tensor([[4.0], [NAN]]), unknown).tolist() == [[0, 0], [0, 1]]
    for value in (0.0, 0.1, 1e-12, 123456.789, -3e30):
        assert not normalised(torch.full((7, 1), value)).any()


def test_other_blocks_are_not_read_and_a_missing_or_misshapen_one_is_named():
    nothing = FeatureNormaliser({})
    assert nothing.width == 0
    for blocks in ({}, {"unused": torch.ones(4, 2)}):
        assert nothing(blocks, 4).shape == (4, 0)
    normaliser = FeatureNormaliser({"image": torch.randn(5, 3)})
    for blocks in ({"text": torch.ones(5, 3)}, {"image": torch.ones(5, 2)}):
        with input_error("'image'"):
            normaliser(blocks)


def test_the_projection_is_onto_the_directions_of_most_variance_scaled_to_one():
    common, alone = torch.randn(2, 400, 1)
    # the first three columns nearly agree: the first component is their mean
    x = torch.cat([common + 0.1 * torch.randn(400, 3), alone], 1)
    ones, rows = torch.ones(400, 2), torch.arange(400)
    table = table_of(ones, ones, x)
    fitted = FeatureNormaliser.fit(table, rows, 2)
    assert fitted.width == 2
    projected = fitted(table.features, 400)
    close(projected.T.cov(), torch.eye(2), within=1e-3)
    for component, column in zip(projected.T, (common, alone), strict=True):
        assert torch.corrcoef(torch.stack([component, column[:, 0]]))[0, 1].abs() > 0.99
    plain = FeatureNormaliser.fit(table, rows)(table.features, 400)
    assert torch.equal(fitted.normal(table.features, 400), plain)


@pytest.mark.parametrize("rows", [3, 50])
def test_more_components_than_samples_or_features_are_refused(rows):
    x = torch.cat([torch.randn(50, 2), torch.ones(50, 1)], 1)  # a column that does not vary is none
    table, rows = table_of(x[:, 2:], x[:, 2:], x), torch.arange(rows)
    with input_error(r"policy.project=3.* 2 "):
        FeatureNormaliser.fit(table, rows, 3)
    assert FeatureNormaliser.fit(table, rows, 2).width == 2


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(width=32, allow_infinity=False), min_size=2, max_size=12))
@example([0.0, 1.401298464324817e-45, 0.0, 0.0])  # a spread that float32 does not hold
@example([6.285941624411889e37, -2.7742294053561477e38])  # and a difference
def test_what_comes_out_is_finite_and_within_the_clip(values):
    block = torch.tensor(values).unsqueeze(1)
    got = normalised(block, block[: len(values) // 2])
    assert got.dtype == torch.float32
    assert got.isfinite().all()
    assert got.abs().max() <= 5
