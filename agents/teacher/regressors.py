"""Regressors that predict many outputs from the features; fitted by libraries, kept as tensors.

As tensors they can be stored in a checkpoint that loads without executing code, and predict in
microseconds. Each family is a function `fit(x [n, d], y [n, o], settings, seed)` of float64 arrays.
It returns a module for each setting, which maps float32 [n, d] to [n, o].
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve, eigh
from torch import Tensor, nn
from torch.nn import functional

Array = NDArray[np.float64]
OUTPUTS = {"weight", "coefficients", "components", "values", "bias"}
"""The buffers whose last axis is the outputs."""
MOVED = ("left", "right", "roots")
"""The buffers of trees that hold positions of nodes; joining trees moves these."""
JOINED = (*MOVED, "feature", "threshold", "value", "fit", "components")
"""The buffers of trees that hold one tree, or one ensemble, after the other."""
MAX_POINTS = 2000
"""Kernel ridge regression is fitted on at most this many samples."""
AT_ONCE = 256
"""Predictions are made for so many requests at a time, so that what lies between stays in the
processor's cache."""
COMPONENTS = 8
"""Trees predict this many principal components of the outputs. That is as accurate as predicting
the outputs themselves, at a cost that does not grow with C."""


class Regressor(nn.Module):
    """It holds only buffers: `type(r)(**r.state_dict())` is a copy of a regressor r."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Tensor: ...

    def __init__(self, **buffers: Any) -> None:
        """Register tensors, arrays and single values: int64 as they are, others in float32."""
        super().__init__()
        for name, values in buffers.items():
            tensor = torch.as_tensor(values)
            self.register_buffer(name, tensor if tensor.dtype == torch.int64 else tensor.float())

    def rescaled(self, scale: Tensor, offset: Tensor) -> Any:
        """Return a regressor with outputs · scale + offset; both factors are [o]."""
        state = self.state_dict()
        for name in state.keys() & OUTPUTS:
            shift = offset if name in ("bias", "values") else 0
            state[name] = state[name] * scale + shift
        return type(self)(**state)

    def outputs(self, columns: slice) -> Any:
        """Copy the regressor with some of its o outputs alone."""
        state = self.state_dict()
        for name in state.keys() & OUTPUTS:
            state[name] = state[name][..., columns]
        return type(self)(**state)


class Linear(Regressor):
    """x·weight + bias; without any weight, a constant."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Kernel(Regressor):
    """Σ_i exp(−‖x − points_i‖²/(2·width²))·coefficients_i + bias."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self._predicted(part) for part in x.split(AT_ONCE)])

    def _predicted(self, x: Tensor) -> Tensor:
        distance = squared_distances(x, self.points, self.squares)
        similarity = distance.div_(-2 * self.width**2).exp_()
        return torch.addmm(self.bias, similarity, self.coefficients)


class Neighbours(Regressor):
    """The mean of the k nearest points.

    The points [n, d] are already multiplied by the feature weights.
    """

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self._predicted(part) for part in x.split(AT_ONCE)])

    def _predicted(self, x: Tensor) -> Tensor:
        distance = squared_distances(x * self.weights, self.points, self.squares)
        nearest = distance.topk(int(self.k), largest=False, sorted=False).indices
        return functional.embedding_bag(nearest, self.values, mode="mean")


class Trees(Regressor):
    """Several fits of trees: Σ_fit (Σ of the leaves of its trees) · components of the fit + bias.

    Both children of a leaf are the leaf itself, so that every path can be followed to the full
    depth.
    """

    def __init__(self, *, threshold: Tensor, **buffers: Any) -> None:
        super().__init__(threshold=_rounded_down(threshold), **buffers)

    def forward(self, x: Tensor) -> Tensor:
        trees = len(self.roots)
        fits = len(self.components)
        # `index_select` with int32 is several times as fast as indexing with int64
        feature = self.feature.int()
        children = torch.stack([self.right, self.left], 1).int().flatten()
        # the trees of a fit stand side by side; where each fit begins
        first = torch.searchsorted(self.fit, torch.arange(fits, device=x.device)).int()
        sums = []
        for part in x.split(AT_ONCE):
            rows = torch.arange(len(part), dtype=torch.int32, device=x.device).unsqueeze(1)
            starts = rows * x.shape[1]
            values = part.flatten()
            # all trees go down a level at a time; `node` is flat, [n · trees]
            node = self.roots.int().repeat(len(part))
            for _ in range(int(self.depth)):
                column = feature.index_select(0, node).view(-1, trees)
                value = values.index_select(0, column.add_(starts).view(-1))
                goes_left = value <= self.threshold.index_select(0, node)
                node = children.index_select(0, 2 * node + goes_left)
            # a bag is the leaves of a row in the trees of one fit
            bags = (trees * rows + first).view(-1)
            sums.append(functional.embedding_bag(node, self.value, bags, mode="sum"))
        by_fit = torch.cat(sums).view(len(x), fits, self.value.shape[1])
        return torch.einsum("nfk,fko->no", by_fit, self.components) + self.bias

    @staticmethod
    def averaged(ensembles: Sequence[Trees]) -> Trees:
        """Return trees that predict the mean of several ensembles, each with a fit of its own."""
        most = max(e.value.shape[1] for e in ensembles)
        states = []
        for index, ensemble in enumerate(ensembles):
            state = ensemble.state_dict()
            # an ensemble of few samples may have fewer components
            lacking = most - ensemble.value.shape[1]
            state["value"] = functional.pad(ensemble.value, (0, lacking))
            components = functional.pad(ensemble.components, (0, 0, 0, lacking))
            state["components"] = components / len(ensembles)
            state["fit"] = torch.full_like(ensemble.fit, index)
            states.append(state)
        return Trees(
            **_joined(states),
            bias=torch.stack([e.bias for e in ensembles]).mean(0),
            depth=max(int(e.depth) for e in ensembles),
        )


def squared_distances(x: Tensor, points: Tensor, squares: Tensor) -> Tensor:
    """Return squared distances [n, m] of x [n, d] from points [m, d] with squared lengths [m]."""
    products = torch.addmm(squares, x, points.T, alpha=-2)
    return products.add_(x.square().sum(1, keepdim=True)).clamp_min_(0)


def _rounded_down(threshold: Tensor) -> Tensor:
    """Round thresholds from float64 down to float32.

    A float32 x is then on the same side of a threshold as before.
    """
    nearest = threshold.float()
    below = nearest.nextafter(torch.full_like(nearest, -torch.inf))
    return nearest.where(nearest <= threshold, below)


# -- the families ----------------------------------------------------------------------------------


def constant(y: Array, features: int) -> Linear:
    """Fit the mean of y [n, o], which ignores its `features` inputs; it is the setting to beat."""
    return Linear(weight=np.zeros((features, y.shape[1])), bias=y.mean(0))


def ridge(x: Array, y: Array, settings: Sequence[float], seed: int) -> list[Linear]:
    """Fit ridge regressions (Hoerl & Kennard 1970), all from one decomposition.

    A setting is α as a share of n.
    """
    centre = x.mean(0)
    bias = y.mean(0)
    # one decomposition serves every α
    u, s, vt = np.linalg.svd(x - centre, full_matrices=False)
    projected = u.T @ (y - bias)
    models: list[Linear] = []
    for alpha in settings:
        weight = vt.T @ ((s / (s**2 + alpha * len(x)))[:, None] * projected)
        models.append(Linear(weight=weight, bias=bias - centre @ weight))
    return models


def kernel_ridge(
    x: Array, y: Array, settings: Sequence[tuple[float, float]], seed: int
) -> list[Kernel]:
    """Fit kernel ridge regressions with a Gaussian kernel (Saunders et al. 1998).

    A setting is (width² as a multiple of the median squared distance, α). The cost grows with n³,
    so at most `MAX_POINTS` samples are drawn.
    """
    points = _Points.drawn(x, y, seed)
    residual = points.y - points.bias
    models: list[Kernel] = []
    for multiple, settings_of_width in itertools.groupby(settings, key=lambda pair: pair[0]):
        kernel = points.kernel(multiple)
        for _, alpha in settings_of_width:
            # Cholesky for each setting takes less than one decomposition into eigenvectors for all
            system = kernel.copy()
            system.flat[:: len(system) + 1] += alpha
            factor = cho_factor(system, overwrite_a=True, check_finite=False)
            coefficients = cho_solve(factor, residual, check_finite=False)
            models.append(points.model(multiple, coefficients))
    return models


def gaussian_process(
    x: Array, y: Array, settings: Sequence[tuple[float, float]], seed: int
) -> list[Kernel]:
    """Fit Gaussian processes whose outputs are correlated, each with equal noise (Bonilla et al.
    2008, "Multi-task Gaussian Process Prediction", with the covariance of y between outputs).

    It is kernel ridge regression of the principal components of y, with an α that is larger for a
    component of less variance. Settings and samples are as in `kernel_ridge`, and α is that of the
    first component.
    """
    points = _Points.drawn(x, y, seed)
    residual = points.y - points.bias
    singular, components = np.linalg.svd(residual, full_matrices=False)[1:]
    projected = residual @ components.T
    # the variance of each component, in that of the first
    variance = np.maximum(singular / max(singular[0], 1e-12), 1e-3) ** 2
    models: list[Kernel] = []
    for multiple, settings_of_width in itertools.groupby(settings, key=lambda pair: pair[0]):
        # one decomposition serves every α and component
        values, vectors = eigh(points.kernel(multiple), overwrite_a=True, check_finite=False)
        rotated = vectors.T @ projected
        for _, alpha in settings_of_width:
            weights = rotated / (values.clip(0)[:, None] + alpha / variance)
            models.append(points.model(multiple, vectors @ weights @ components))
    return models


class _Points(NamedTuple):
    """The samples that a kernel is fitted on.

    Attributes:
        x, y: features [n, d] and outputs [n, o].
        norms: squared lengths, [n].
        squares: squared distances between all pairs, [n, n].
        median: of the distances that are not 0.
        bias: mean outputs, [o].
    """

    x: Array
    y: Array
    norms: Array
    squares: Array
    median: float
    bias: Array

    @classmethod
    def drawn(cls, x: Array, y: Array, seed: int) -> _Points:
        """Draw at most `MAX_POINTS` samples."""
        if len(x) > MAX_POINTS:
            part = np.random.default_rng(seed).permutation(len(x))[:MAX_POINTS]
            x = x[part]
            y = y[part]
        norms = (x**2).sum(1)
        squares = (norms[:, None] + norms - 2 * x @ x.T).clip(0)
        positive = squares[squares > 0]
        median = float(np.median(positive)) if len(positive) else 1.0
        return cls(x, y, norms, squares, median, y.mean(0))

    def kernel(self, multiple: float) -> Array:
        """Compute the Gaussian kernel between all pairs, [n, n], of width² = multiple · median."""
        similarity: Array = np.exp(self.squares / (-2 * self.median * multiple))
        return similarity

    def model(self, multiple: float, coefficients: Array) -> Kernel:
        """Return the regressor with these coefficients, [n, o]."""
        width = float(np.sqrt(self.median * multiple))
        return Kernel(
            points=self.x,
            squares=self.norms,
            bias=self.bias,
            coefficients=coefficients,
            width=width,
        )


def neighbours(
    x: Array, y: Array, settings: Sequence[tuple[int, bool]], seed: int
) -> list[Neighbours]:
    """Return k nearest neighbours; a setting is (k, weighted).

    If weighted, a feature's weight is the norm of its coefficients in a ridge regression.
    """
    # features that matter to a linear fit count more in distances
    norms = ridge(x, y, [0.1], seed)[0].weight.norm(dim=1)
    models = []
    for k, weighted in settings:
        weights = norms if weighted else torch.ones_like(norms)
        points = torch.from_numpy(x).float() * weights
        models.append(
            Neighbours(
                points=points,
                squares=points.square().sum(1),
                weights=weights,
                values=y,
                k=min(k, len(x)),
            )
        )
    return models


def forest(x: Array, y: Array, settings: Sequence[int], seed: int) -> list[Trees]:
    """Fit random forests (Breiman 2001); a setting is the smallest leaf."""
    from sklearn.ensemble import RandomForestRegressor

    bias, components, projected = _principal(y)
    models: list[Trees] = []
    for leaf in settings:
        model = RandomForestRegressor(
            40, min_samples_leaf=leaf, max_features=1 / 3, random_state=seed
        )
        # a single sample has a single component, which scikit-learn expects flat
        model.fit(x, projected if projected.shape[1] > 1 else projected.ravel())
        models.append(_trees([tree.tree_ for tree in model.estimators_], 1 / 40, components, bias))
    return models


def boosting(
    x: Array, y: Array, settings: Sequence[int], seed: int, rate: float = 0.05
) -> list[Trees]:
    """Fit stochastic gradient boosting for squared loss (Friedman 2002).

    Each tree predicts all outputs. A setting is the number of trees; the learning rate shrinks
    each.
    """
    from sklearn.tree import DecisionTreeRegressor

    draws = np.random.default_rng(seed)
    features_per_split = min(x.shape[1], max(8, x.shape[1] // 10))
    bias, components, residual = _principal(y)
    trees = []
    # as scikit-learn has them, which need not check them for each tree
    inputs = np.ascontiguousarray(x, np.float32)
    # a fit of 50 trees is the first 50 of a fit of 300: one fit serves all settings
    for _ in range(max(settings)):
        # each tree sees 60 % of the samples
        part = draws.permutation(len(x))[: max(2, round(0.6 * len(x)))]
        tree = DecisionTreeRegressor(
            max_depth=4,
            min_samples_leaf=8,
            max_features=features_per_split,
            random_state=int(draws.integers(1 << 31)),
        ).fit(inputs[part], residual[part], check_input=False)
        predicted = tree.predict(inputs, check_input=False)
        residual = residual - rate * predicted.reshape(residual.shape)
        trees.append(tree.tree_)
    return [_trees(trees[:rounds], rate, components, bias) for rounds in settings]


def _principal(y: Array) -> tuple[Array, Array, Array]:
    """Return the mean of the outputs, their principal components, and y − mean in components."""
    bias = y.mean(0)
    components = np.linalg.svd(y - bias, full_matrices=False)[2][:COMPONENTS]
    return bias, components, (y - bias) @ components.T


def _trees(trees: Sequence[Any], factor: float, components: Array, bias: Array) -> Trees:
    """Put scikit-learn's trees one after another into flat arrays."""
    parts = []
    for tree in trees:
        part = {
            "roots": torch.zeros(1, dtype=torch.int64),
            "value": torch.from_numpy(factor * tree.value[..., 0]),
        }
        # scikit-learn marks a leaf by children of −1
        itself = torch.arange(tree.node_count)
        for side in ("left", "right"):
            child = torch.from_numpy(getattr(tree, f"children_{side}"))
            part[side] = child.where(child >= 0, itself)
        part["feature"] = torch.from_numpy(tree.feature).clamp_min(0)
        parts.append(part | {"threshold": torch.from_numpy(tree.threshold)})
    return Trees(
        **_joined(parts),
        fit=np.zeros(len(trees), np.int64),
        components=components[None],
        bias=bias,
        depth=max(tree.max_depth for tree in trees),
    )


def _joined(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Join the buffers of trees one after another; positions of nodes are moved accordingly."""
    first = 0
    moved = []
    for part in parts:
        moved.append(part | {name: part[name] + first for name in MOVED})
        first += len(part["feature"])
    names = [name for name in JOINED if name in parts[0]]
    return {name: torch.cat([part[name] for part in moved]) for name in names}


class Family(NamedTuple):
    """A way of fitting and the settings to try."""

    fit: Callable[[Array, Array, Any, int], Sequence[Regressor]]
    settings: tuple[Any, ...]


WIDTHS_AND_ALPHAS = tuple(itertools.product((0.25, 1.0, 4.0), (0.03, 0.1, 0.3, 1.0, 3.0)))
NEIGHBOURS = (5, 10, 20, 40, 80, 160)
FAMILIES = {
    "ridge": Family(ridge, (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)),
    "kernel_ridge": Family(kernel_ridge, WIDTHS_AND_ALPHAS),
    "gaussian_process": Family(gaussian_process, WIDTHS_AND_ALPHAS),
    "knn": Family(neighbours, tuple((k, w) for w in (False, True) for k in NEIGHBOURS)),
    "random_forest": Family(forest, (4,)),
    "gradient_boosting": Family(boosting, (50, 100, 200, 300)),
}
KINDS = {kind.__name__: kind for kind in (Linear, Kernel, Neighbours, Trees)}
"""The kinds of regressors by name, for checkpoints."""
