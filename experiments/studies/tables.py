"""Measured tables for the studies, of programs that come with the packages that knobwise needs.

    python experiments/studies/tables.py [NAME …]

measures them anew (or the named ones) and writes `measured/NAME.safetensors` beside this file, in two minutes on one
core. What the programs answer is the same in every run of the same versions. Their CPU times, the less of two calls,
are those of one machine.

- `python_files`: modules of Python's standard library, compressed by zlib, bz2 and lzma. Accuracy is 0 for the largest
  and 1 for the smallest result.
- `digits`, `breast_cancer`, `diabetes`: data sets of scikit-learn (the first two of UCI, CC BY 4.0; the last of Efron
  et al., 2004, with progression above the median as the class), classified by models fitted on the next of five folds.
"""

from __future__ import annotations

import bz2
import functools
import lzma
import sys
import sysconfig
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from knobwise.envs.readers.builtin import builtin_profile
from knobwise.envs.readers.feature_files import features_from
from knobwise.envs.readers.long_table import table_from_frame
from knobwise.envs.tables.profile_table import ProfileTable

FOLDER = Path(__file__).with_name("measured")
CALLS, FILES, ROWS = 2, 400, 400
COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    **{f"zlib {level}": functools.partial(zlib.compress, level=level) for level in (1, 6, 9)},
    **{f"bz2 {level}": functools.partial(bz2.compress, compresslevel=level) for level in (1, 9)},
    **{f"lzma {level}": functools.partial(lzma.compress, preset=level) for level in (0, 6)},
}
Measured = Iterator[tuple[str, list[float], dict[str, tuple[float, float]]]]
"""Of each sample its id, its features, and accuracy and CPU time in ms of each program."""


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """What a call gives, and its least CPU time in ms."""
    times = []
    for _ in range(CALLS):
        start = time.process_time_ns()
        answer = call()
        times.append(time.process_time_ns() - start)
    return answer, min(times) / 1e6


def python_files() -> Measured:
    """The features are the size and the shares of 32 ranges of bytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path for path in folder.rglob("*.py") if not {"site-packages", "test"} & set(path.parts))
    paths = [path for path in paths if 4_000 <= path.stat().st_size <= 200_000]
    for path in paths[:: max(1, len(paths) // FILES)][:FILES]:
        content = path.read_bytes()
        answers = {name: timed(functools.partial(compress, content)) for name, compress in COMPRESSORS.items()}
        sizes = [len(smaller) for smaller, _ in answers.values()]
        high, span = max(sizes), max(sizes) - min(sizes)
        cells = {name: ((high - len(smaller)) / span, ms) for name, (smaller, ms) in answers.items()}
        ranges = np.bincount(np.frombuffer(content, np.uint8) // 8, minlength=32) / len(content)
        yield str(path.relative_to(folder)), [np.log2(len(content)), *ranges], cells


def classified(name: str) -> Measured:
    """The features are those that the models read."""
    from sklearn import datasets, ensemble, linear_model, naive_bayes, neighbors, pipeline, preprocessing

    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    rows = np.random.default_rng(0).permutation(len(x))[:ROWS]
    x, y = x[rows], y[rows] > np.median(y) if name == "diabetes" else y[rows]
    linear = pipeline.make_pipeline(preprocessing.StandardScaler(), linear_model.LogisticRegression())
    models = {"Bayes": naive_bayes.GaussianNB(), "linear": linear, "neighbours": neighbors.KNeighborsClassifier()}
    for trees in (10, 30, 100):
        models[f"forest {trees}"] = ensemble.RandomForestClassifier(trees, random_state=0)
        models[f"extra trees {trees}"] = ensemble.ExtraTreesClassifier(trees, random_state=0)
    fold = np.arange(len(x)) % 5
    for number in range(5):
        known = fold == (number + 1) % 5
        fitted = {each: model.fit(x[known], y[known]) for each, model in models.items()}
        for row in np.flatnonzero(fold == number):
            answers = {each: timed(functools.partial(model.predict, x[row, None])) for each, model in fitted.items()}
            cells = {each: (float(answer[0] == y[row]), ms) for each, (answer, ms) in answers.items()}
            yield str(rows[row]), x[row].tolist(), cells


MAKERS: dict[str, Callable[[], Measured]] = {
    "python_files": python_files,
    **{name: functools.partial(classified, name) for name in ("digits", "breast_cancer", "diabetes")},
}
MEASURED: dict[str, Callable[[], ProfileTable]] = {
    "builtin": builtin_profile,
    **{name: functools.partial(ProfileTable.load, FOLDER / f"{name}.safetensors") for name in MAKERS},
}
"""How each measured table is read."""


def measure(name: str) -> ProfileTable:
    """Measure a table of `MAKERS`."""
    samples = list(MAKERS[name]())
    rows = [
        {"sample_id": sample, "program": program, "accuracy": accuracy, "latency_ms": ms}
        for sample, _, cells in samples
        for program, (accuracy, ms) in cells.items()
    ]
    blocks: dict[str, Any] = {
        "sample_id": [sample for sample, *_ in samples],
        "features": [block for _, block, _ in samples],
    }
    features = features_from(blocks, name)
    return table_from_frame(pl.DataFrame(rows), name=name, knobs=["program"], features=features)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for chosen in sys.argv[1:] or MAKERS:
        measure(chosen).save(FOLDER / f"{chosen}.safetensors")
        print(chosen)
