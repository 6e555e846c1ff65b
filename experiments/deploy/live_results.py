"""What a stream that was served live came to, beside a replay of the same decisions from the profile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from knobwise.agents.judging.evaluation import mean_ci95
from knobwise.agents.serving.numpy_controller import NumpyController
from knobwise.envs.configurations.budgets import LEAST_LATENCY_MS
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.report.verdict import LEARNED, STATIC
from knobwise.profiling.elastic.outputs import cpu_name

if TYPE_CHECKING:
    from knobwise.experiments.deploy.live import Record, Stream


def live_results(
    table: ProfileTable,
    stream: Stream,
    record: Record,
    controller: NumpyController,
    speed: float,
) -> dict[str, Any]:
    """What is printed and written: a row for each policy, what a replay of the same decisions says, and the overhead.

    Live and replay agree where what is replayed lies in the interval of what was served, accuracy where every answer is
    the same; differences and their own intervals are paired. What is replayed is the model's part: overhead and waiting
    are as they were. All intervals are 95 % bootstrap intervals over requests; under `rate` they take no notice that
    requests which wait for one another are no independent draws.
    """
    served = {name: torch.from_numpy(values) for name, values in record.served.items()}
    choice, rows = served["choice"].long(), torch.from_numpy(stream.rows)
    budgets = torch.from_numpy(stream.budgets_ms)[:, None]
    at = rows[:, None].expand(choice.shape), choice
    cells = torch.tensor(record.cells, dtype=torch.float64)
    on_table = table.latency_ms[cells[:, 0].long(), cells[:, 1].long()].double()
    # medians, since a single stall of the machine is longer than many answers; the standard error of one is
    # 1.25·IQR/(1.35·√n) (McGill, Tukey and Larsen 1978, "Variations of Box Plots"), and 1.96 of them make 95 %
    ratios = cells[:, 2] / on_table.clamp_min(LEAST_LATENCY_MS)
    low, during, high = ratios.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist()
    off = 1.96 * 1.25 / 1.35 * (high - low) / len(ratios) ** 0.5

    waited, overhead = served["waited_ms"], served["overhead_ms"]
    live = _outcomes(served["score"], served["inference_ms"], overhead, waited, budgets)
    again = _outcomes(table.accuracy[at].double(), during * table.latency_ms[at].double(), overhead, waited, budgets)
    feasible = during * table.latency_ms[rows].nan_to_num(nan=torch.inf).amin(1) <= budgets[:, 0]

    policies, agreement = [], []
    for p, name in enumerate(record.policies):
        of = {what: values[p].mean(-1) for what, values in live.items()}
        replayed = {what: values[p].mean(-1) for what, values in again.items()}
        row: dict[str, Any] = {"policy": name}
        for what, values in of.items():
            row |= {what: float(values.mean()), f"{what}_ci95": _interval(values)}
        few = of["satisfaction"][feasible]
        row |= {
            "latency_ms_p95": float(live["latency_ms"][p].quantile(0.95)),
            "satisfaction_feasible": float(few.mean()) if len(few) else None,
            "satisfaction_feasible_ci95": _interval(few) if len(few) else None,
            "waited_ms": float(waited[p].mean()),
        }
        policies.append(row)
        for what, values in of.items():
            gap, mean = values - replayed[what], float(replayed[what].mean())
            low, high = _interval(gap)
            centre = float(gap.mean())
            # the speed of this machine is known as well as its cells say, and no better
            unsure = off * float(table.latency_ms[at][p].mean()) if what == "latency_ms" else 0.0
            low, high = centre - float(np.hypot(centre - low, unsure)), centre + float(np.hypot(high - centre, unsure))
            exactly = torch.equal(live[what][p], again[what][p])
            inside = row[f"{what}_ci95"][0] <= mean <= row[f"{what}_ci95"][1]
            agreement.append(
                {"policy": name, "what": what, "live": float(values.mean()), "replay": mean}
                | {"agrees": exactly if what == "accuracy" else inside, "difference": centre, "ci95": [low, high]}
            )
    own = record.policies.index(LEARNED)
    for p, row in enumerate(policies):  # by how much it is behind the controller, request by request
        behind = (live["utility"][own] - live["utility"][p]).mean(-1)
        row |= {"behind": float(behind.mean()), "behind_ci95": _interval(behind)}
    limits = served["limit_ms"][own].float().numpy()
    blocks = {name: block[rows].numpy() for name, block in table.features.items()}
    whole = controller.choose(blocks, (budgets[:, 0] / speed).float().numpy())
    same_limit = [controller.choose(blocks, limits[:, r]) == choice[own, :, r].numpy() for r in range(limits.shape[1])]
    inference = float(served["inference_ms"][own].mean())
    # of the parts medians: the clock of a decision is always the wall's, and a stall would count in one of them only
    decision_us, overhead_us = (float(part.median()) for part in (served["decision_us"][own], overhead[own] * 1e3))
    return {
        "kind": "simulated request stream, served live",
        "profile": {"name": table.name, "digest": table.digest},
        "machine": {"cpu": cpu_name(), "torch": torch.__version__, "threads": 1},
        "requests": len(rows),
        "budgets_ms": sorted(set(stream.budgets_ms.tolist())),
        "infeasible": float((~feasible).double().mean()),
        "speed": {"before": speed, "during": during, "during_ci95": [during - off, during + off]},
        "rows": policies,
        "agreement": agreement,
        "overhead": {
            "inference_ms": inference,
            "overhead_us": float(overhead[own].mean()) * 1e3,
            "overhead_us_p50": overhead_us,
            "decision_us_p50": decision_us,
            "features_and_knobs_us_p50": overhead_us - decision_us,
            "share": float(overhead[own].mean()) / inference,
            "share_p50": float(overhead[own].median()) / inference,
        },
        "decisions": {
            "as_replayed_at_the_same_limit": float(np.mean(same_limit)),
            "as_replayed_at_the_whole_budget": float((whole[:, None] == choice[own].numpy()).mean()),
        },
        "configurations": {
            name: table.configuration(int(choice[p, 0, 0]))
            for p, name in enumerate(record.policies)
            if name not in (LEARNED, STATIC)
        },
    }


def _outcomes(
    accuracy: Tensor, inference_ms: Tensor, overhead_ms: Tensor, waited_ms: Tensor, budgets_ms: Tensor
) -> dict[str, Tensor]:
    """What is judged, [P, n, R] each."""
    total = inference_ms + overhead_ms + waited_ms
    met = (total <= budgets_ms).double()
    return {"accuracy": accuracy, "latency_ms": total, "satisfaction": met, "utility": accuracy * met}


def _interval(values: Tensor) -> list[float]:
    low, high = mean_ci95(values[None]).tolist()
    return [low, high]
