"""What each part of GRPO alone is worth (`policy=grpo`), one left out at a time; and how fast it
learns beside a controller with a teacher.

Each is trained on all samples but those of the test part of three splits, one seed, and judged
unguarded on these at the default budgets, decisions for free. Printed is the share of the gap from
budget-aware static (0) to the oracle (100); the line below each is the difference from the first,
in points of utility, with a 95 % interval over splits and samples. A sample that several splits
test is drawn with all of its results.

    python experiments/studies/grpo_parts.py parts TABLE …
    python experiments/studies/grpo_parts.py curves TABLE … FILE.svg

The curves are those of one split: utility on held-out samples, on which networks are judged that
were not fitted on them, over CPU seconds since the profile was read. What `policy=auto` takes for
its teacher counts; until its heads imitate it, the teacher's network is judged in their place.

Tables are named as for `grpo_alone.py`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from knobwise.agents.calibration.training import distillation_trainer
from knobwise.agents.controller.encoders import TableEncoder
from knobwise.agents.controller.features import FeatureNormaliser
from knobwise.agents.controller.settings import regularised
from knobwise.agents.evaluation.baselines import Oracle, fit_static
from knobwise.agents.evaluation.evaluation import evaluate_policy
from knobwise.agents.problem import Problem
from knobwise.agents.training.controllers import controller_trainer
from knobwise.envs.bandit.outcomes import Decisions
from knobwise.envs.bandit.settings import BudgetConfig
from knobwise.envs.tables.profile_table import Split
from knobwise.experiments.evidence.statistics import ends_of_means, resampled_means
from knobwise.experiments.settings.choices import (
    AUTO,
    COLD_OPTIMISER,
    DISTILLED_OPTIMISER,
    GRPO,
    SAMPLED,
)
from knobwise.experiments.studies.grpo_alone import SHARES, SPLITS, table_named
from knobwise.experiments.train.controller import width_for

Array = NDArray[np.float64]
SINGLE = replace(GRPO, fold_networks=1)
"""Without the networks of the folds, which the guard needs."""
WHOLE: dict[str, Any] = {"policy": SINGLE, "loss": SAMPLED, "optimiser": COLD_OPTIMISER}
PARTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "without the utility head": {"policy": replace(SINGLE, utility_head=False)},
    "without entropy": {"loss": replace(SAMPLED, entropy_coeff=0.0)},
    "without dropout and noise": {"loss": replace(SAMPLED, dropout=False)},
    "more of both (.3, .3)": {"policy": replace(SINGLE, dropout=0.3, augment=0.3)},
    "less of both (.1, 0)": {"policy": replace(SINGLE, dropout=0.1, augment=0.0)},
    "without a whole schedule": {"optimiser": replace(COLD_OPTIMISER, schedule="constant")},
    "budgets by quantiles": {"budget": BudgetConfig(strategy="quantiles")},
    "exact, no draws": {"loss": replace(SAMPLED, objective="exact")},
    "half as long": {"optimiser": replace(COLD_OPTIMISER, iterations=500)},
    "with features in 8 bins": {"bins": 8},
    "with features in 16 bins": {"bins": 16},
}
"""What differs, by its name; `bins` is the number for `in_bins`."""


def in_bins(problem: Problem, bins: int) -> Problem:
    """Return the problem with a further block of features: each feature in piecewise-linear bins
    between its quantiles (Gorishniy et al. 2022, “On Embeddings for Numerical Features in Tabular
    Deep Learning”), 0 below a bin, 1 above it and linear within; quantiles are of fitted samples.
    """
    table, fitted = problem.facts, problem.split.fitted
    normaliser = FeatureNormaliser({name: block[fitted] for name, block in table.features.items()})
    values = normaliser(dict(table.features))
    edges = values[fitted].quantile(torch.linspace(0, 1, bins + 1), dim=0)  # [bins + 1, d]
    low, width = edges[:-1], edges[1:] - edges[:-1]
    shares = ((values.unsqueeze(1) - low) / width.clamp_min(1e-9)).clamp(0, 1)
    block = shares.flatten(1)[:, (width > 1e-6).flatten()]
    facts = replace(table, features={**table.features, "bins": block})
    return replace(problem, facts=facts)


def utilities(problem: Problem, budgets_ms: Tensor, settings: Mapping[str, Any]) -> Array:
    """Train on all but the test samples, and return the utility of each of these, [n]."""
    bins, settings = settings.get("bins"), {k: v for k, v in settings.items() if k != "bins"}
    if bins:
        # regularised as without them: what is compared is the encoding
        width = sum(block.shape[-1] for block in problem.facts.features.values())
        settings = {"policy": regularised(SINGLE, width), **settings}
        problem = in_bins(problem, bins)
    # what it is validated on is fitted too: nothing is chosen by it
    split = Split(problem.split.fitted, problem.split.validation, problem.split.test)
    trainer = controller_trainer(
        problem.facts, split, budgets_ms=budgets_ms, **{**WHOLE, **settings}
    )
    trainer.run()
    rows = problem.split.test
    encoder = TableEncoder(trainer.setup.controller, problem.facts, problem.mask)
    with torch.no_grad():
        policies = [encoder(rows, torch.full((len(rows),), float(b))) for b in budgets_ms]
    chosen = torch.stack([log_probs.argmax(-1) for log_probs in policies], 1)
    outcomes = problem.outcomes(Decisions(rows, chosen, budgets_ms))
    return outcomes.utility.mean(1).double().numpy()


def splits_of(tested: Sequence[Tensor]) -> NDArray[np.int64]:
    """Return the split and a number of each test sample, [2, n], of the test samples of each split,
    int64 [n] each. A sample that several splits test has one number in all."""
    numbers = [np.full(len(rows), number) for number, rows in enumerate(tested)]
    samples = np.unique(np.concatenate(tested), return_inverse=True)[1]
    return np.stack([np.concatenate(numbers), samples])


def with_interval(differences: Array, splits: NDArray[np.int64]) -> str:
    """Write the mean of differences [n] in points, with its 95 % interval.

    Args:
        splits: [2, n], see `splits_of`.
    """
    drawn = resampled_means([differences], splits=splits)
    (interval,) = ends_of_means([differences], drawn)
    middle, low, high = (100 * value for value in (differences.mean(), *interval))
    return f"{middle:+.1f} [{low:+.1f}, {high:+.1f}]".replace("-", "−")


def print_parts(names: Sequence[str]) -> None:
    """Print a row for each part, a column for each table."""
    heads = [Path(name).stem.replace("_", " ") for name in names]
    results: dict[str, list[tuple[float, str]]] = {part: [] for part in PARTS}
    for name in names:
        table = table_named(name)
        problems = [
            Problem.from_table(table, table.split(*SHARES, number)) for number in range(SPLITS)
        ]
        budgets = [problem.budgets(None) for problem in problems]
        splits = splits_of([problem.split.test for problem in problems])
        bounds = []
        for problem, budgets_ms in zip(problems, budgets, strict=True):
            rows = problem.split.test
            for policy in (
                fit_static(problem.cells, problem.split.fitted),
                Oracle(problem.cells, rows, problem.rule),
            ):
                outcomes = evaluate_policy(policy, problem, rows, budgets_ms)
                bounds.append(float(outcomes.utility.mean()))
        static, oracle = np.mean(bounds[::2]), np.mean(bounds[1::2])
        first = None
        for part, settings in PARTS.items():
            each = [
                utilities(problem, budgets_ms, settings)
                for problem, budgets_ms in zip(problems, budgets, strict=True)
            ]
            judged = np.concatenate(each)
            first = judged if first is None else first
            share = 100 * (judged.mean() - static) / (oracle - static)
            off = judged - first
            results[part].append((float(share), with_interval(off, splits) if off.any() else ""))
            print(f"{name}: {part}: {share:.1f}", file=sys.stderr, flush=True)
    print(f"| | {' | '.join(heads)} |")
    print("|---" * (len(heads) + 1) + "|")
    for part, row in results.items():
        cells = [f"{share:.0f}" + (f" ({gain})" if gain else "") for share, gain in row]
        print(f"| {part} | {' | '.join(cells)} |")


# -- curves ----------------------------------------------------------------------------------------


STATIC = "budget-aware static"


class Curve:
    """A log that notes each validation: its iteration, the CPU seconds until then, the utility."""

    def __init__(self) -> None:
        self.began = time.process_time()
        self.points: list[tuple[int, float, float]] = []

    def log(self, metrics: Mapping[str, float | Tensor], step: int) -> None:
        """Note the utility on held-out samples, if it is logged."""
        if "Val/Utility" in metrics:
            seconds = time.process_time() - self.began
            self.points.append((step, seconds, float(metrics["Val/Utility"])))


def points_of(name: str) -> list[tuple[str, float, float]]:
    """Return the points of the curves of a table: what is judged, CPU seconds and utility; the last
    two are of static, at 0 and at the end."""
    table = table_named(name)
    problem = Problem.from_table(table, table.split(*SHARES, 0))
    budgets_ms = problem.budgets(None)
    taught = replace(AUTO, hidden=width_for(problem, budgets_ms, AUTO))
    ways: dict[str, dict[str, Any]] = {
        "policy=auto": {"policy": taught, "optimiser": DISTILLED_OPTIMISER, "loss": SAMPLED},
        "policy=grpo": {"policy": GRPO, "optimiser": COLD_OPTIMISER, "loss": SAMPLED},
    }
    points = []
    for way, settings in ways.items():
        curve = Curve()
        trainer = distillation_trainer(problem, budgets_ms=budgets_ms, log=curve, **settings)
        trainer.run()
        heads_from = next(
            (stage.first for stage in trainer.stages if stage.name == "imitation"), -1
        )
        for step, seconds, utility in curve.points:
            judged = way if step > heads_from else f"{way}, its teacher"
            points.append((judged, seconds, utility))
        print(f"{name}: {way}: {curve.points[-1][1]:.1f} s", file=sys.stderr, flush=True)
    judged_static = []
    for fit, hold in zip(*trainer.setup.folds, strict=True):
        static = fit_static(problem.cells, fit)
        judged_static.append(evaluate_policy(static, problem, hold, budgets_ms).utility)
    utility = float(torch.cat(judged_static).mean())
    end = max(seconds for _, seconds, _ in points)
    return [*points, (STATIC, 0.0, utility), (STATIC, end, utility)]


def draw_curves(names: Sequence[str], file: str) -> None:
    """Draw held-out utility over CPU seconds, with a teacher and without, tables side by side."""
    head = ["policy", "CPU seconds", "utility on held-out samples"]
    order = ["policy=grpo", "policy=auto", "policy=auto, its teacher", STATIC]
    colours = ["#d6604d", "#2166ac", "#92c5de", "#888888"]
    charts = []
    for name in names:
        points = points_of(name)
        static = points[-1][2]
        gain = max(utility for *_, utility in points) - static
        # what nothing has been learned for is far below
        limits = [static - 0.5 * gain, static + 1.1 * gain]
        chart = alt.Chart(pl.DataFrame(points, head, orient="row")).mark_line(clip=True)
        chart = chart.encode(
            x=alt.X(f"{head[1]}:Q"),
            y=alt.Y(f"{head[2]}:Q").scale(domain=limits, nice=False),
            color=alt.Color(f"{head[0]}:N", title=None).scale(domain=order, range=colours),
        )
        title = Path(name).stem.replace("_", " ")
        charts.append(chart.properties(width=330, height=240, title=title))
    alt.hconcat(*charts).save(file)


def main(words: list[str]) -> None:
    """Run a command, see the top."""
    torch.set_num_threads(1)
    match words:
        case ["parts", *names] if names:
            print_parts(names)
        case ["curves", *names, file] if names:
            draw_curves(names, file)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
