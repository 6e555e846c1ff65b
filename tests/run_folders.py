"""Folders of finished runs, written without training: what came of every decision is known."""

import json

import numpy as np
import polars as pl
from omegaconf import OmegaConf

from knobwise.experiments.results.decisions import write_decisions

BUDGETS = (10.0, 20.0)
SETTINGS = {
    "experiment": "lean",
    "policy": {"teacher": True, "hidden": 96},
    "loss": {"group_size": 8, "objective": "exact"},
    "optimiser": {"lr": 0.001},
    "tracking": {"mode": "disabled"},
    "seeds": [0, 1],
    "baselines": True,
    "runs": "runs",
}
HULL = [
    {"label": "a", "accuracy": 0.2, "latency_ms": 0.0},
    {"label": "b", "accuracy": 1.0, "latency_ms": 40.0},
]


def write_run(
    folder,
    *,
    gain=0.0,
    seeds=(0, 1),
    samples=range(60),
    budgets=BUDGETS,
    digest="sha256:a",
    sense="deadline",
    spent=0.0,
    settings=None,
    decisions=True,
):
    """A run of a controller. On every sample it gets what a run with no gain gets, and on the share
    `gain` of them 1 where that one gets 0. Under mean budgets it spends `spent` ms more."""
    draws = np.random.default_rng(0)
    luck, order = (draws.random(shape)[list(samples)] for shape in ((1000, len(budgets)), 1000))
    rows, frames = [], []
    for policy in (
        "controller",
        "oracle",
        "budget_aware_static" if sense == "deadline" else "static_mix",
    ):
        cubes, learned = [], policy == "controller"
        latency = np.array(budgets) * 0.8 + spent * learned
        for seed in seeds if learned else [None]:
            right = luck < {"controller": 0.5, "oracle": 0.95}.get(policy, 0.4)
            if learned:
                right = right ^ (luck * 1000 % 1 < 0.02 * (1 + seed)) | (order < gain)[:, None]
            cubes.append(right.astype(float))
            for b, budget in enumerate(budgets):
                columns = {
                    "sample_id": [f"s{i}" for i in samples],
                    "accuracy": cubes[-1][:, b],
                }
                columns |= {"policy": policy, "seed": seed, "place": budget, "choice": "crops=2"}
                columns |= {"latency_ms": float(latency[b]), "in_time": True, "feasible": True}
                frames.append(pl.DataFrame(columns | {"score": columns["accuracy"]}))
        cube = np.stack(cubes)
        for budget, place in [
            (None, slice(None)),
            *((budget, b) for b, budget in enumerate(budgets)),
        ]:
            mean, latency_ms = float(cube[..., place].mean()), float(latency[place].mean())
            row = {"policy": policy, "budget_ms": budget, "latency_ms_mean": latency_ms}
            row |= {"accuracy": mean, "utility": mean, "gap_closed": 0.5, "satisfaction": 0.9}
            row |= {
                f"{name}_ci95": [row[name] - 0.05, row[name] + 0.05]
                for name in ("utility", "accuracy")
            }
            row |= {
                "gap_closed_ci95": [0.4, 0.6],
                "satisfaction_feasible": 0.95,
                "decision_us_p50": 12.0,
            }
            if sense == "mean":
                row |= {
                    "over_static_mix": mean - 0.4,
                    "over_static_mix_ci95": [mean - 0.45, mean - 0.35],
                }
            rows.append(row)
    results = {"sense": "mean", "static_hull": HULL} if sense == "mean" else {}
    results |= {
        "test_samples": len(samples),
        "seeds": list(seeds),
        "unit": "ms",
        "budgets_ms": list(budgets),
    }
    results |= {"rows": rows, "command": "knobwise train <script>"}
    results |= {
        "profile": {"name": "small", "digest": digest, "samples": 300, "configurations": 2},
        "configurations": [
            {
                "label": f"crops={k}",
                "knobs": {"crops": k},
                "accuracy": 0.3 + 0.1 * k,
                "latency_ms": 4.0 * k,
            }
            for k in (1, 2, 4)
        ],
        "knob_usage": [
            {"policy": "controller", "budget_ms": b, "knob": "crops", "value": v, "share": 0.5}
            for b in budgets
            for v in (1, 2)
        ],
    }
    steps = [(s, i) for s in seeds for i in range(0, 30, 10)]
    lines = [
        f"{s},{i},{0.5 + 0.01 * i + 0.02 * s},{3.0 - 0.1 * i},\n{s},{i},,,0.4\n" for s, i in steps
    ]
    csv = "seed,step,Val/Utility,Val/Latency_Mean,Train/Loss\n" + "".join(lines)
    values = OmegaConf.merge(SETTINGS, {"seeds": list(seeds)}, settings or {})
    return _write(folder, results, values, csv, frames if decisions else [])


def _write(folder, results, settings, csv, frames):
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps(results))
    # `default` and names made of settings are nobody's choice
    name = None if folder.name == "default" or "-" in folder.name else folder.name
    OmegaConf.save(OmegaConf.merge({"name": name}, settings), folder / "config.yaml")
    (folder / "metrics.csv").write_text(csv)
    if frames:
        write_decisions(folder, pl.concat(frames, how="vertical_relaxed"))
    return folder


def write_selector_run(
    folder,
    *,
    wrong=0.5,
    form="grpo_recorded",
    shots=(1, 2),
    queries=60,
    digest="sha256:t",
    unknown=0,
    first=0,
):
    """A run of a selector that gets the share `wrong` of the queries wrong, the same ones at any
    number of shots; of the first `unknown` queries nothing is known at the last number of shots.
    Queries are counted from `first`."""
    order = np.random.default_rng(1).random(queries)
    policies = {"sft": 0.8, form: wrong, "random": 0.9}
    rows, frames = [], []
    for policy, share in policies.items():
        right = (order >= share).astype(float)
        for count in shots:
            known = [
                None if i < unknown and count == shots[-1] else one
                for i, one in enumerate(right.tolist())
            ]
            row = {
                "policy": policy,
                "shots": count,
                "accuracy": float(right.mean()),
                "queries": queries,
            }
            rows.append(
                row | {"accuracy_ci95": [float(right.mean()) - 0.1, float(right.mean()) + 0.1]}
            )
            columns = {
                "sample_id": [f"q{first + i}" for i in range(queries)],
                "accuracy": known,
                "score": known,
            }
            columns |= {
                "policy": policy,
                "seed": None if policy == "random" else 0,
                "place": float(count),
            }
            frames.append(pl.DataFrame(columns))
    results = {
        "system": "selector",
        "test_digest": digest,
        "test_queries": queries,
        "seeds": [0],
    }
    results |= {"shots": list(shots), "trained_shots": 2, "judged_by": "scorer", "hidden": []}
    results |= {
        "profile": {"name": "beams", "digest": "sha256:b", "samples": 300, "candidates": 40}
    }
    results |= {
        "rows": rows,
        "differences": [],
        "controls": [],
        "command": "knobwise train experiment=selector",
    }
    values = OmegaConf.create(
        {"experiment": "selector", "shots": 2, "variants": {form: {"epochs": 4}}}
    )
    lines = [f"0,{i},{0.5 + 0.01 * i}\n" for i in range(0, 30, 10)]
    return _write(
        folder, results, values, "seed,step,Val/sft/Accuracy_Mean\n" + "".join(lines), frames
    )
