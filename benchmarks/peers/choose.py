"""Let another library choose configurations, for benchmarks/peers.py, which starts this in an
environment of the libraries alone:

    python benchmarks/peers/choose.py NAME DATA OUT

DATA is an .npz of what `Data` holds. A library learns from the fitted samples, all of whose
outcomes it sees, and chooses for each test sample at each budget. Into OUT go its choices, the CPU
seconds of learning, µs of CPU for one request at a time with features ready, and the MB that it
takes on disk and in memory beyond NumPy.
"""

from __future__ import annotations

import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Choose = Callable[[Array, int], Any]
"""Features [n, d] of n requests, the number of a budget → configurations [n]."""
DECISIONS = 200
"""Single decisions that are timed."""
CPU_SECONDS = 600
"""More of learning and choosing ends a library on a table."""


class Data:
    """What a library may learn from, and what it chooses for.

    Args:
        path: an .npz of `x` and `test_x`, features [n, d] and [m, d], standardised; `held_out`,
            bool [n], the samples to choose settings by; `utility` [n, C, B], at each budget;
            `knobs` [C, K], the number of each knob's value; `budgets_ms` [B].
    """

    def __init__(self, path: str) -> None:
        arrays = np.load(path, allow_pickle=False)
        self.x: Array = arrays["x"]
        self.test_x: Array = arrays["test_x"]
        self.utility: Array = arrays["utility"]
        self.knobs: Array = arrays["knobs"]
        self.budgets_ms: Array = arrays["budgets_ms"]
        self.all: Array = np.random.default_rng(0).permutation(len(self.x))
        held_out = arrays["held_out"][self.all]
        self.held_out: Array = self.all[held_out]
        self.rest: Array = self.all[~held_out]

    def worth(self, choose: Choose) -> float:
        """Return the mean utility of choices for the held-out part of the fitted samples."""
        rows = self.held_out
        budgets = range(len(self.budgets_ms))
        columns = [self.utility[rows, choose(self.x[rows], b), b] for b in budgets]
        return float(np.mean(columns))

    def best(self, settings: list[Any], learn: Callable[[Array, Any], Choose]) -> Choose:
        """Learn from all fitted samples with the setting that is best for the held-out ones."""
        return learn(
            self.all, max(settings, key=lambda setting: self.worth(learn(self.rest, setting)))
        )


# -- the libraries ---------------------------------------------------------------------------------


def extra_trees(data: Data) -> Choose:
    """One forest that predicts the utility of each configuration at each budget.

    Tuned: the size of a leaf.
    """
    from sklearn.ensemble import ExtraTreesRegressor

    def learn(rows: Array, leaf: int) -> Choose:
        forest = ExtraTreesRegressor(100, min_samples_leaf=leaf, random_state=0)
        forest.fit(data.x[rows], data.utility[rows].reshape(len(rows), -1))

        def choose(x: Array, b: int) -> Array:
            return forest.predict(x).reshape(-1, *data.utility.shape[1:])[..., b].argmax(1)

        return choose

    return data.best([1, 3, 10], learn)


def lightgbm(data: Data) -> Choose:
    """Boosted trees that predict utility from the features of the sample, the knobs of the
    configuration and the budget.

    Tuned: the number of trees, by early stopping on held-out samples.
    """
    import lightgbm as library

    _, count, budgets = data.utility.shape

    def inputs(x: Array, numbers: list[int]) -> Array:
        """Return a row for each sample, configuration and budget, in this order."""
        each = np.log(data.budgets_ms[numbers])
        cells = np.column_stack([np.repeat(data.knobs, len(each), 0), np.tile(each, count)]).astype(
            np.float32
        )
        return np.hstack([np.repeat(x, len(cells), 0), np.tile(cells, (len(x), 1))])

    def dataset(rows: Array, reference: Any = None) -> Any:
        return library.Dataset(
            inputs(data.x[rows], [*range(budgets)]),
            data.utility[rows].ravel(),
            reference=reference,
            params={"max_bin": 63, "verbose": -1},
        )

    settings = {
        "objective": "l2", "learning_rate": 0.1, "num_leaves": 31,
        "bagging_fraction": 0.5, "bagging_freq": 1, "num_threads": 1, "verbose": -1, "seed": 0,
    }  # fmt: skip
    part = dataset(data.rest)
    stopped = library.train(
        settings,
        part,
        400,
        [dataset(data.held_out, part)],
        callbacks=[library.early_stopping(20, verbose=False)],
    )
    model = library.train(settings, dataset(data.all), max(stopped.best_iteration, 1))

    def choose(x: Array, b: int) -> Array:
        return model.predict(inputs(x, [b]), num_threads=1).reshape(-1, count).argmax(1)

    return choose


def vowpal_wabbit(data: Data) -> Choose:
    """A linear model of the cost of each configuration (`--csoaa`), with weights of each feature
    for each budget.

    Tuned: the learning rate, and the number of passes up to 8.
    """
    import vowpalwabbit

    _, count, budgets = data.utility.shape
    options = f"--csoaa {count} -q bf --ignore_linear f -b 21 --quiet --random_seed 0"

    def line(x: Array, b: int, costs: Array | None = None) -> str:
        label = ""
        if costs is not None:
            label = " ".join(f"{c}:{cost:.4g}" for c, cost in enumerate(costs, 1))
        return f"{label} |b b{b} |f " + " ".join(f"{i}:{value:.4g}" for i, value in enumerate(x))

    def passes(rows: Array, rate: float) -> Iterator[Choose]:
        """Return what is learned after each pass."""
        learner = vowpalwabbit.Workspace(f"{options} -l {rate}")
        lines = [
            line(data.x[i], b, 1 - data.utility[i, :, b]) for i in rows for b in range(budgets)
        ]
        examples = [learner.parse(text) for text in lines]
        order = np.random.default_rng(0)

        def choose(x: Array, b: int) -> Array:
            return np.array([learner.predict(line(each, b)) - 1 for each in x])

        while True:
            for number in order.permutation(len(examples)):
                learner.learn(examples[number])
            yield choose

    def learn(rows: Array, setting: tuple[float, int]) -> Choose:
        rate, number = setting
        *_, choose = islice(passes(rows, rate), number)
        return choose

    worths = {}
    for rate in (0.03, 0.3):
        for number, choose in enumerate(islice(passes(data.rest, rate), 8), 1):
            worths[rate, number] = data.worth(choose)
    return learn(data.all, max(worths, key=worths.__getitem__))


def pareto_bandit(data: Data) -> Choose:
    """A router for each budget, told the utility of each configuration for each sample, in random
    order; it has a budget for money, but none for time.

    Its features are principal components of variance 1, as those that it makes of prompts. Tuned:
    how many.
    """
    import logging

    from pareto_bandit import BanditRouter, FeatureService

    logging.disable(logging.WARNING)
    _, count, budgets = data.utility.shape
    arms = [str(c) for c in range(count)]
    free = {arm: {"input_cost_per_m": 1.0, "output_cost_per_m": 1.0} for arm in arms}
    mean = data.x.mean(0)
    _, scale, axes = np.linalg.svd(data.x - mean, full_matrices=False)

    def learn(rows: Array, size: int) -> Choose:
        whiten = (axes[:size].T / scale[:size]) * np.sqrt(len(data.x))

        def context(x: Array) -> Array:
            return np.append((x - mean) @ whiten, 1.0)

        routers = []
        for b in range(budgets):
            router = BanditRouter.create(
                free,
                priors="none",
                feature_service=FeatureService.for_precomputed(whiten.shape[1] + 1),
                forgetting_factor=1.0,
                cost_penalty=0.0,
                bandit_seed=0,
            )
            for i in rows:
                known = context(data.x[i])
                for arm, utility in zip(arms, data.utility[i, :, b], strict=True):
                    router.update(arm, known, float(utility))
            routers.append(router)

        def choose(x: Array, b: int) -> Array:
            with routers[b].exploit():
                return np.array([int(routers[b].route(context(each))[0]) for each in x])

        return choose

    rank = int((scale > 1e-6 * scale[0]).sum())
    return data.best(sorted({min(10, rank), min(25, rank)}), learn)


def asf(data: Data) -> Choose:
    """A performance model for each budget, a forest that predicts the utility of all
    configurations.

    Nothing is tuned; a third of the features is tried at each node. Its pairwise selectors would
    need a forest for each of 2,016 pairs of configurations.
    """
    import pandas as pd
    from asf.predictors import SklearnWrapper
    from asf.selectors import PerformanceModel
    from sklearn.ensemble import RandomForestRegressor

    settings = {"n_estimators": 100, "max_features": 0.3, "min_samples_leaf": 5, "random_state": 0}
    forest = partial(SklearnWrapper, RandomForestRegressor, settings)
    names = [f"f{i}" for i in range(data.x.shape[1])]
    selectors = []
    for b in range(len(data.budgets_ms)):
        selector = PerformanceModel(forest, use_multi_target=True, normalize=None, maximize=True)
        selector.fit(pd.DataFrame(data.x, columns=names), pd.DataFrame(data.utility[..., b]))
        selectors.append(selector)

    def choose(x: Array, b: int) -> Array:
        chosen = selectors[b].predict(pd.DataFrame(x, columns=names))
        return np.array([chosen[i][0][0] for i in range(len(x))])

    return choose


LIBRARIES: dict[str, tuple[Callable[[Data], Choose], str, tuple[str, ...]]] = {
    "extra-trees": (extra_trees, "sklearn.ensemble", ("scikit-learn",)),
    "LightGBM": (lightgbm, "lightgbm", ("lightgbm",)),
    "VW": (vowpal_wabbit, "vowpalwabbit", ("vowpalwabbit",)),
    "ParetoBandit": (pareto_bandit, "pareto_bandit", ("paretobandit",)),
    # its selectors import what its metadata calls optional
    "asf": (asf, "asf.selectors", ("asf-lib", "scikit-survival", "clingo")),
}
"""How it learns, what it imports, and what is installed for it."""


# -- what it takes ---------------------------------------------------------------------------------


def needed(names: tuple[str, ...]) -> set[str]:
    """Return what is installed for packages, with what they need, without NumPy."""
    known: set[str] = set()
    waiting = list(names)
    while waiting:
        name = re.sub("[-_.]+", "-", waiting.pop()).lower()
        if name in known or name == "numpy":
            continue
        try:
            requirements = distribution(name).requires or []
        except PackageNotFoundError:  # for another system
            continue
        known.add(name)
        plain = [each for each in requirements if "extra ==" not in each]
        waiting += [re.split(r"[^\w.-]", each, maxsplit=1)[0] for each in plain]
    return known


def installed_mb(names: tuple[str, ...]) -> float:
    """Return the MB of the files of packages and of what they need beyond NumPy."""
    total = 0
    for name in needed(names):
        for file in distribution(name).files or []:
            path = Path(str(file.locate()))
            if path.suffix != ".pyc" and path.is_file():
                total += path.stat().st_size
    return total / 1e6


def imported_mb(module: str, folder: str = ".") -> float:
    """Return the MB of memory that importing a module takes in a process that has NumPy (Linux)."""
    code = f"""
import numpy
def used():
    return int(open("/proc/self/status").read().split("VmRSS:")[1].split()[0])
before = used()
import {module}
print(used() - before)
"""
    printed = subprocess.check_output([sys.executable, "-c", code], cwd=folder, text=True)
    return int(printed) / 1e3


def decision_us(decide: Callable[[Array, int], Any], x: Array, budgets: int) -> float:
    """Return the median CPU time in µs of deciding for one request, of features [m, d]."""
    # that of the process is exact only where its CPU time is not limited
    clock = time.thread_time_ns
    times = []
    for number in range(10 + DECISIONS):
        request = x[number % len(x)]
        began = clock()
        decide(request, number % budgets)
        times.append((clock() - began) / 1e3)
    return statistics.median(times[10:])


def main(name: str, source: str, target: str) -> None:
    """Let a library learn and choose, see the top."""
    soft = CPU_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (soft, soft + 5))
    data = Data(source)
    library, module, packages = LIBRARIES[name]
    began = time.process_time()
    choose = library(data)
    seconds = time.process_time() - began
    budgets = range(len(data.budgets_ms))
    chosen = np.stack([choose(data.test_x, b) for b in budgets], 1).astype(np.int64)
    micros = decision_us(lambda x, b: choose(x[None], b), data.test_x, len(budgets))
    np.savez(
        target,
        chosen=chosen,
        seconds=seconds,
        micros=micros,
        installed_mb=installed_mb(packages),
        imported_mb=imported_mb(module),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
