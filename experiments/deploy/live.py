"""A controller in front of the real model: a stream of requests served live, compared with a replay from the profile.

Every request is served by the controller (`knobwise.agents.serving.adaptive_model`), by budget-aware static and by
fixed configurations. The controller is charged everything that it takes beyond the model's own time, the
others nothing. Then the same decisions are looked up in the profile: a replay that disagrees with the real model would
be worth nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from threadpoolctl import threadpool_limits
from torch import Tensor

from knobwise.agents.checkpoint import load_checkpoint
from knobwise.agents.judging.baselines import BestStatic, BudgetAwareStatic, averages
from knobwise.agents.serving.adaptive_model import AdaptiveModel
from knobwise.agents.serving.distillation import student_of
from knobwise.agents.serving.export import to_numpy
from knobwise.agents.serving.numpy_controller import NumpyController
from knobwise.agents.stack.priced_policy import PricedChooser
from knobwise.agents.stack.stacked_controller import StackedController
from knobwise.common.errors import InputError
from knobwise.common.files import written_whole
from knobwise.envs.configurations.budgets import LEAST_LATENCY_MS, judged_budgets
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.deploy.live_stream import Record, Stream, check_features, draw_stream, serve
from knobwise.experiments.report.live import print_live, write_live_page
from knobwise.experiments.report.words import LEARNED as CONTROLLER
from knobwise.experiments.report.words import STATIC
from knobwise.experiments.results.statistics import mean_interval
from knobwise.experiments.settings.options import LiveConfig
from knobwise.profiling.elastic.adapter import ElasticAdaptive, request_of
from knobwise.profiling.measuring.machine import cpu_name, one_thread
from knobwise.profiling.measuring.measuring import collected_between


def run_live(checkpoint: str | Path, table: ProfileTable, config: LiveConfig | None = None) -> dict[str, Any]:
    """Serve a simulated stream by the built-in elastic model, print the results and return them.

    Args:
        checkpoint: a controller for deadlines, trained on `table`.
        table: the built-in profile.
        config: the stream; also which files to write.

    Raises:
        InputError: the checkpoint is no controller for deadlines or of another profile, or the profile is of another
            model.
    """
    config = config or LiveConfig()
    loaded = load_checkpoint(checkpoint)
    controller = loaded.controller
    if isinstance(controller, PricedChooser) or controller.priced:
        raise InputError(f"{checkpoint}: keeps a mean over requests; live, every request has a deadline")
    if loaded.profile_digest != table.digest or "test_rows" not in loaded.extra:
        raise InputError(f"{checkpoint}: live needs the best.pt of a training on profile {table.name!r} as it is now")
    test, fitted = loaded.extra["test_rows"], torch.cat([loaded.extra[f"{p}_rows"] for p in ("train", "validation")])
    vlm = ElasticAdaptive()
    budgets_ms = judged_budgets(table, config.budgets_ms)
    stream = draw_stream(table, test, fitted, budgets_ms, config)
    check_features(vlm, table, stream)
    by_student = False
    if config.student and isinstance(controller, StackedController) and controller.experts:
        print("fitting a light student to the controller …", file=sys.stderr, flush=True)
        with one_thread():
            controller, by_student = student_of(controller, table, fitted, seed=0), True
    exported = to_numpy(controller)
    with one_thread(), threadpool_limits(1), collected_between():
        model = AdaptiveModel(vlm, exported)
        others = set(stream.scenes) - set(stream.rows.tolist())
        model.calibrate(table, {row: request_of(stream.scenes[row]) for row in others}, config.calibration)
        if config.clock == "cpu":
            model.speed = _cpu_speed(vlm, table, stream, sorted(others), config)
        speed = model.speed
        stream = Stream(stream.rows, stream.budgets_ms * speed, stream.arrivals_s, stream.scenes)
        fixed = fixed_configurations(table, fitted, budgets_ms, config.fixed)
        record = serve(model, table, BudgetAwareStatic(table, fitted), fixed, stream, config)
    results = live_results(table, stream, record, exported, speed)
    results |= {"student": by_student, "repeats": config.repeats, "rate": config.rate, "clock": config.clock}
    print_live(results, Console())
    if config.json is not None:
        with written_whole(Path(config.json)) as temporary:
            temporary.write_text(json.dumps(results, indent=1))
    if config.html is not None:
        write_live_page(config.html, results)
    return results


def fixed_configurations(table: ProfileTable, fitted: Tensor, budgets_ms: Tensor, count: int) -> dict[str, int]:
    """Name → configuration, by what they did on the rows fitted on (int64 [n])."""
    accuracy, latency = averages(table, fitted)
    everything = torch.ones(1, table.num_configurations, dtype=torch.bool)
    chosen = {
        "best_static": int(BestStatic(table, fitted, budgets_ms).choose({}, budgets_ms[:1], everything)),
        "cheapest": int(latency.argmin()),
        "most_accurate": int(accuracy.argmax()),
    }
    return dict(list(chosen.items())[:count])


def _cpu_speed(
    vlm: ElasticAdaptive, table: ProfileTable, stream: Stream, rows: Sequence[int], config: LiveConfig
) -> float:
    """CPU time here / latency in the profile, the median over random cells."""
    rng, ratios = np.random.default_rng((config.seed, 2)), []
    for _ in range(config.calibration):
        row, column = int(rng.choice(rows)), int(rng.integers(table.num_configurations))
        stage = vlm.first_stage(request_of(stream.scenes[row]))
        (answer,) = vlm.answer([stage], table.configuration(column))  # type: ignore[arg-type]
        ratios.append(answer.extra["cpu_ms"] / float(table.latency_ms[row, column]))
    return float(np.median(ratios))


# -- the results -------------------------------------------------------------------------------------------------------

METRICS = ("accuracy", "latency_ms", "satisfaction", "utility")


def live_results(
    table: ProfileTable, stream: Stream, record: Record, controller: NumpyController, speed: float
) -> dict[str, Any]:
    """What is printed and written: a row for each policy, the replay of the same decisions, and the overhead.

    Live and replay agree if the replay lies in the interval of what was served, and for accuracy if every answer is the
    same; differences and their intervals are paired. Only the model's part is replayed: overhead and waiting stay as
    they were. All intervals are 95 % bootstrap intervals over requests; with a `rate` they ignore that requests which
    wait for one another are not independent.
    """
    served = {name: torch.from_numpy(values) for name, values in record.served.items()}
    choice, rows = served["choice"].long(), torch.from_numpy(stream.rows)
    budgets = torch.from_numpy(stream.budgets_ms)[:, None]
    at = rows[:, None].expand(choice.shape), choice
    during, half_width = _speed(table, record)
    costs = served["overhead_ms"] + served["waited_ms"]
    live = _outcomes(served["score"], served["inference_ms"] + costs, budgets)
    replay = _outcomes(table.accuracy[at].double(), during * table.latency_ms[at].double() + costs, budgets)
    feasible = during * table.latency_ms[rows].nan_to_num(nan=torch.inf).amin(1) <= budgets[:, 0]
    # the speed of this machine is known only as well as its cells allow
    unsure = half_width * table.latency_ms[at].double().mean((1, 2))
    learned = record.policies.index(CONTROLLER)
    limits = served["limit_ms"][learned]
    policies, agreement = [], []
    for p, name in enumerate(record.policies):
        row = {"policy": name, **_policy_row(live, p, feasible), "waited_ms": float(served["waited_ms"][p].mean())}
        behind = (live["utility"][learned] - live["utility"][p]).mean(-1)
        policies.append(row | {"behind": float(behind.mean()), "behind_ci95": _interval(behind)})
        agreement += [
            {"policy": name, "what": what, **_agreement(live[what][p], replay[what][p], row[f"{what}_ci95"], what, off)}
            for what, off in zip(METRICS, (0.0, float(unsure[p]), 0.0, 0.0), strict=True)
        ]
    return {
        "kind": "simulated request stream, served live",
        "profile": {"name": table.name, "digest": table.digest},
        "machine": {"cpu": cpu_name(), "torch": torch.__version__, "threads": 1},
        "requests": len(rows),
        "budgets_ms": sorted(set(stream.budgets_ms.tolist())),
        "infeasible": float((~feasible).double().mean()),
        "speed": {"before": speed, "during": during, "during_ci95": [during - half_width, during + half_width]},
        "rows": policies,
        "agreement": agreement,
        "overhead": _overhead({name: values[learned] for name, values in served.items()}),
        "decisions": _replayed_decisions(table, stream, controller, speed, choice[learned], limits),
        "configurations": {
            name: table.configuration(int(choice[p, 0, 0]))
            for p, name in enumerate(record.policies)
            if name not in (CONTROLLER, STATIC)
        },
    }


def _speed(table: ProfileTable, record: Record) -> tuple[float, float]:
    """Latency here / latency in the profile, and half the width of its 95 % interval.

    Medians, since a single stall of the machine is longer than many answers. The standard error of a median is
    1.25·IQR/(1.35·√n) (McGill, Tukey and Larsen 1978, "Variations of Box Plots").
    """
    cells = torch.tensor(record.cells, dtype=torch.float64)
    profiled = table.latency_ms[cells[:, 0].long(), cells[:, 1].long()].double()
    ratios = cells[:, 2] / profiled.clamp_min(LEAST_LATENCY_MS)
    low, median, high = ratios.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist()
    return median, 1.96 * 1.25 / 1.35 * (high - low) / len(ratios) ** 0.5


def _outcomes(accuracy: Tensor, latency_ms: Tensor, budgets_ms: Tensor) -> dict[str, Tensor]:
    """`METRICS` of every request, [P, n, R] each."""
    met = (latency_ms <= budgets_ms).double()
    return dict(zip(METRICS, (accuracy, latency_ms, met, accuracy * met), strict=True))


def _policy_row(live: Mapping[str, Tensor], p: int, feasible: Tensor) -> dict[str, Any]:
    """The means of one policy over the requests, with intervals."""
    row: dict[str, Any] = {}
    means = {what: values[p].mean(-1) for what, values in live.items()}
    for what, values in means.items():
        row |= {what: float(values.mean()), f"{what}_ci95": _interval(values)}
    few = means["satisfaction"][feasible]
    return row | {
        "latency_ms_p95": float(live["latency_ms"][p].quantile(0.95)),
        "satisfaction_feasible": float(few.mean()) if len(few) else None,
        "satisfaction_feasible_ci95": _interval(few) if len(few) else None,
    }


def _agreement(live: Tensor, replay: Tensor, ci95: Sequence[float], what: str, unsure: float) -> dict[str, Any]:
    """One metric of one policy, float [n, R], live and replayed; `unsure` widens the interval of their difference."""
    gap, mean = (live - replay).mean(-1), float(replay.mean(-1).mean())
    (low, high), centre = _interval(gap), float(gap.mean())
    agrees = torch.equal(live, replay) if what == "accuracy" else ci95[0] <= mean <= ci95[1]
    interval = [centre - float(np.hypot(centre - low, unsure)), centre + float(np.hypot(high - centre, unsure))]
    live_mean = float(live.mean(-1).mean())
    return {"live": live_mean, "replay": mean, "agrees": agrees, "difference": centre, "ci95": interval}


def _overhead(served: Mapping[str, Tensor]) -> dict[str, float]:
    """What the controller adds to the model's time. Of the parts medians: the clock of a decision is always the wall's,
    and a stall would count in one of them only."""
    inference, overhead = float(served["inference_ms"].mean()), served["overhead_ms"]
    decision_us, overhead_us = float(served["decision_us"].median()), float((overhead * 1e3).median())
    return {
        "inference_ms": inference,
        "overhead_us": float(overhead.mean()) * 1e3,
        "overhead_us_p50": overhead_us,
        "decision_us_p50": decision_us,
        "features_and_knobs_us_p50": overhead_us - decision_us,
        "share": float(overhead.mean()) / inference,
        "share_p50": float(overhead.median()) / inference,
    }


def _replayed_decisions(
    table: ProfileTable, stream: Stream, controller: NumpyController, speed: float, choice: Tensor, limits_ms: Tensor
) -> dict[str, float]:
    """How often a replay decides as the controller did, int64 and float [n, R]: at its limits, at whole budgets."""
    blocks = {name: block[stream.rows].numpy() for name, block in table.features.items()}
    limits, chosen = limits_ms.float().numpy(), choice.numpy()
    whole = controller.choose(blocks, (stream.budgets_ms / speed).astype(np.float32))
    same = [controller.choose(blocks, limits[:, r]) == chosen[:, r] for r in range(limits.shape[1])]
    return {
        "as_replayed_at_the_same_limit": float(np.mean(same)),
        "as_replayed_at_the_whole_budget": float((whole[:, None] == chosen).mean()),
    }


def _interval(values: Tensor) -> list[float]:
    """Of the mean; without the rounding that would make a share greater than 1."""
    return [round(end, 12) for end in mean_interval(values)]
