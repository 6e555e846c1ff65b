"""What the cells of a profile that nobody measured would hold, predicted from features and knobs.

Two models that all configurations share, and their mean:

1. A Gaussian process whose kernel is a product, of similar samples and similar configurations
   (Bonilla, Chai and Williams 2008, "Multi-task Gaussian Process Prediction"). Configurations are
   similar if their knobs are; and, once the process has been fitted, if its predictions are, which
   is all that a table without knobs can go by.
2. Extremely randomised trees (Geurts, Ernst and Wehenkel 2006) over the features, the knobs, and
   vectors of the configurations that the first model has learned.

With 4 of 64 cells a sample each configuration has been measured for a sixteenth of the samples;
what is known of its neighbours makes up for the rest.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator, cg
from torch import Tensor

from knobwise.envs.tables.profile_table import ProfileTable

Array = NDArray[np.float64]
# the settings are the best of some twenty on four tables of other systems; all were close
WIDTH = 0.5
"""The width of both kernels: of knobs in units of their range; squared, of features in units of
their median squared distance."""
SHARED = 0.8
"""How similar two configurations are, for each knob, however different their values of it."""
UNSHARED = 0.1
"""The part of the variance of a configuration that it shares with no other."""
MAIN = 3.0
"""The variance of what is the same for all samples, in units of what the features explain."""
OF_SAMPLE = 0.3
"""The variance of what a sample has beyond its features, likewise."""
NOISE = 0.3
"""The variance of a single measurement, likewise."""
MAX_SAMPLES = 2000
"""The process is fitted to the measurements of at most this many samples."""
TREES = 50
"""How many trees; they take most of the time."""
PREDICTED = 1 << 14
"""Trees predict at most about so many cells in one call."""
MAX_CELLS = 10_000
"""The trees are fitted to at most this many measurements."""
AT_ONCE = 1024
"""So many samples are predicted together."""
VECTOR = 4
"""The length of the vector of a configuration."""
WIDEST = 128
"""With more features trees read this many principal components of them: their time grows with the
width, to minutes for the embeddings of a language model."""


class Completion:
    """Completes measurements of the samples with features x.

    Args:
        table: whose configurations were measured.
        x: normalised features, float64 [n, d].
        seed: of the trees, and of the samples and cells that are used where there are many.
    """

    def __init__(self, table: ProfileTable, x: Array, seed: int = 0) -> None:
        self.x = x
        self.seed = seed
        self.knobs = scaled_knobs(table)
        self.similarity = knob_similarity(table)
        draws = np.random.default_rng(seed)
        self.points = np.sort(draws.permutation(len(x))[:MAX_SAMPLES])
        squares = _squared_distances(x[self.points], x[self.points])
        positive = squares[squares > 0]
        self.scale = np.median(positive) if len(positive) else 1.0
        self.kernel = self._kernel(squares)
        self.read_by_trees = x
        if x.shape[1] > WIDEST:
            centred = x - x[self.points].mean(0)
            directions = np.linalg.svd(centred[self.points], full_matrices=False)[2]
            self.read_by_trees = centred @ directions[:WIDEST].T

    def complete(self, measured: Tensor) -> Tensor:
        """Return measurements [n, C] with predictions in the place of NaN, float64."""
        values = measured.double().numpy()
        known = ~np.isnan(values)
        centre = values[known].mean()
        deviation = np.where(known, values - centre, 0.0)
        scale = max(float(np.sqrt((deviation**2).sum() / known.sum())), 1e-9)
        standard = deviation / scale
        # the second fit knows from the first which configurations fare alike
        surface = self._process(standard, known, self.similarity)
        covariance = surface.T @ surface / len(surface)
        learned = covariance / max(float(covariance.diagonal().mean()), 1e-9)
        surface = self._process(standard, known, (self.similarity + learned) / 2)
        trees = self._trees(standard, known, surface)
        predicted = centre + scale * (surface + trees) / 2
        return torch.from_numpy(np.where(known, values, predicted))

    def _process(self, values: Array, known: Array, similarity: Array) -> Array:
        """Return the mean of the process given the known values, [n, C].

        The equations (K_samples ⊗ K_configurations + noise)·v = y have an unknown for each
        measurement. Conjugate gradients solve them without the matrix, which is a product.
        """
        values = values[self.points]
        known = known[self.points]
        square = self.kernel + OF_SAMPLE * np.eye(len(self.points))

        def applied(v: Array) -> Array:
            weights = v.reshape(values.shape)
            smoothed = square @ weights @ similarity
            return (np.where(known, smoothed, 0.0) + NOISE * weights).ravel()

        equations = LinearOperator((values.size, values.size), matvec=applied, dtype=np.float64)
        weights, _ = cg(equations, values.ravel(), rtol=1e-3, maxiter=100)
        smoothed = weights.reshape(values.shape) @ similarity
        # a part at a time, so that no kernel of all samples lies in memory
        parts = []
        for first in range(0, len(self.x), AT_ONCE):
            squares = _squared_distances(self.x[first : first + AT_ONCE], self.x[self.points])
            parts.append(self._kernel(squares) @ smoothed)
        surface = np.concatenate(parts)
        surface[self.points] += OF_SAMPLE * smoothed
        return surface

    def _kernel(self, squares: Array) -> Array:
        """Compute how similar samples are from their squared distances."""
        similar: Array = np.exp(squares / (-2 * WIDTH * self.scale)) + MAIN
        return similar

    def _trees(self, values: Array, known: Array, surface: Array) -> Array:
        """Return what trees predict, [n, C]."""
        from sklearn.ensemble import ExtraTreesRegressor

        x = self.read_by_trees
        _, lengths, directions = np.linalg.svd(surface - surface.mean(), full_matrices=False)
        vectors = (directions.T * lengths)[:, :VECTOR] / len(surface) ** 0.5
        configurations = np.concatenate([self.knobs, vectors], 1)
        rows, columns = np.nonzero(known)
        if len(rows) > MAX_CELLS:
            drawn = np.random.default_rng(self.seed).permutation(len(rows))[:MAX_CELLS]
            rows = rows[drawn]
            columns = columns[drawn]
        model = ExtraTreesRegressor(
            TREES, min_samples_leaf=5, max_features=0.6, random_state=self.seed
        )
        inputs = np.concatenate([x[rows], configurations[columns]], 1)
        model.fit(inputs, values[rows, columns])
        predicted = np.empty_like(surface)
        # few configurations at a time, so that no n·C rows of features lie in memory
        samples = len(x)
        count = max(1, PREDICTED // samples)
        for first in range(0, len(configurations), count):
            part = configurations[first : first + count]
            repeated = np.repeat(part, samples, axis=0)
            cells = np.concatenate([np.tile(x, (len(part), 1)), repeated], 1)
            predicted[:, first : first + count] = model.predict(cells).reshape(-1, samples).T
        return predicted


def scaled_knobs(table: ProfileTable) -> Array:
    """Return the place of each knob's value among its values, from 0 to 1, [C, K]."""
    most = [max(size - 1, 1) for size in table.knob_sizes]
    return table.configurations.double().numpy() / most


def knob_similarity(table: ProfileTable) -> Array:
    """Return how similar configurations are by their knobs, [C, C], 1 on the diagonal.

    Values that are numbers are the more similar the nearer they are in the order of the values;
    names, and true and false, are the same or not.
    """
    count = table.num_configurations
    similarity = np.ones((count, count))
    for knob, scaled in zip(table.knobs, scaled_knobs(table).T, strict=True):
        distance = scaled[:, None] - scaled
        alike = np.exp(distance**2 / (-2 * WIDTH**2))
        if isinstance(knob.values[0], str | bool):
            alike = (distance == 0).astype(float)
        similarity *= SHARED + (1 - SHARED) * alike
    return (1 - UNSHARED) * similarity + UNSHARED * np.eye(count)


def _squared_distances(x: Array, points: Array) -> Array:
    squares = (x**2).sum(1)[:, None] + (points**2).sum(1)
    distances: Array = (squares - 2 * x @ points.T).clip(0)
    return distances
