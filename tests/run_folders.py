"""Folders of finished runs, written without training: what came of every decision is known."""

import numpy as np
import polars as pl
from omegaconf import OmegaConf

from knobwise.common.files import sha256_of
from knobwise.experiments.evidence.decisions import write_decisions
from knobwise.experiments.evidence.results import METRICS, read_results, write_results
from knobwise.experiments.settings.config_file import to_yaml

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
CONFIGURATIONS = [
    {"label": f"crops={k}", "knobs": {"crops": k}, "accuracy": 0.3 + k / 10, "latency_ms": 4.0 * k}
    for k in (1, 2, 4)
]


def interval(name, value, half_width):
    """A value of a row, and its interval."""
    return {name: value, f"{name}_ci95": [value - half_width, value + half_width]}


def frame_of(policy, seed, condition, ids, score, **columns):
    """The decisions of a policy under a condition."""
    columns |= {"policy": policy, "seed": seed, "condition": float(condition)}
    return pl.DataFrame({"sample": ids, "accuracy": score, "utility": score, **columns})


def write_run(
    folder,
    *,
    gain=0.0,
    seeds=(0, 1),
    samples=range(60),
    budgets=BUDGETS,
    digest="sha256:a",
    constraint="deadline",
    spent=0.0,
    settings=None,
    decisions=True,
):
    """A run of a controller. On every sample it gets what a run with no gain gets, and on the share
    `gain` of them 1 where that one gets 0. Under mean budgets it spends `spent` ms more."""
    draws = np.random.default_rng(0)
    luck, order = (draws.random(shape)[list(samples)] for shape in ((1000, len(budgets)), 1000))
    ids = [f"s{i}" for i in samples]
    rows, frames = [], []
    static = "budget_aware_static" if constraint == "deadline" else "static_mix"
    for policy, share in {"controller": 0.5, "oracle": 0.95, static: 0.4}.items():
        cubes, learned = [], policy == "controller"
        latency = np.array(budgets) * 0.8 + spent * learned
        for seed in seeds if learned else [None]:
            right = luck < share
            if learned:
                right = right ^ (luck * 1000 % 1 < 0.02 * (1 + seed)) | (order < gain)[:, None]
            cubes.append(right.astype(float))
            for budget, ms, score in zip(budgets, latency, cubes[-1].T, strict=True):
                spending = {"latency_ms": float(ms), "on_time": True, "feasible": True}
                frame = frame_of(policy, seed, budget, ids, score, choice="crops=2", **spending)
                frames.append(frame)
        cube = np.stack(cubes)
        for budget, place in zip(
            (None, *budgets), (slice(None), *range(len(budgets))), strict=True
        ):
            mean = float(cube[..., place].mean())
            row = {"policy": policy, "budget_ms": budget, "satisfaction": 0.9}
            row |= {"latency_ms_mean": float(latency[place].mean()), "decision_us_p50": 12.0}
            row |= interval("accuracy", mean, 0.05) | interval("utility", mean, 0.05)
            row |= interval("gap_closed", 0.5, 0.1) | {"satisfaction_feasible": 0.95}
            if constraint == "mean":
                row |= interval("over_static_mix", mean - 0.4, 0.05)
            rows.append(row)
    usage = {"policy": "controller", "knob": "crops", "share": 0.5}
    results = {
        "test_samples": len(samples),
        "seeds": list(seeds),
        "unit": "ms",
        "budgets_ms": list(budgets),
        "rows": rows,
        "command": "knobwise train <script>",
        "profile": {"name": "small", "digest": digest, "samples": 300, "configurations": 2},
        "configurations": CONFIGURATIONS,
        "knob_usage": [usage | {"budget_ms": b, "value": v} for b in budgets for v in (1, 2)],
    }
    if constraint == "mean":
        results |= {"sense": "mean", "static_hull": HULL}
    csv = "seed,step,Val/Utility,Val/Latency_Mean,Train/Loss\n"
    for s in seeds:
        for i in range(0, 30, 10):
            csv += f"{s},{i},{0.5 + 0.01 * i + 0.02 * s},{3.0 - 0.1 * i},\n{s},{i},,,0.4\n"
    values = OmegaConf.merge(SETTINGS, {"seeds": list(seeds)}, settings or {})
    return _write(folder, results, values, csv, frames if decisions else [])


def _write(folder, results, settings, csv, frames):
    folder.mkdir(parents=True)
    # `default` and names made of settings are nobody's choice
    name = None if folder.name == "default" or "-" in folder.name else folder.name
    content = OmegaConf.to_container(OmegaConf.merge({"name": name}, settings))
    (folder / "config.yaml").write_text(to_yaml(content))
    (folder / "metrics.csv").write_text(csv)
    if frames:
        write_decisions(folder, pl.concat(frames, how="vertical_relaxed"))
    write_results(folder, results)
    return folder


def note_metrics(folder):
    """Note the checksum of what the run logged, as a training does."""
    noted = {"started": "2026-11-22", "seconds": 1.0, "commit": None}
    noted["metrics_sha256"] = sha256_of(folder / METRICS)
    write_results(folder, read_results(folder) | {"run": noted})


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
    ids = [f"q{first + i}" for i in range(queries)]
    rows, frames = [], []
    for policy, share in {"sft": 0.8, form: wrong, "random": 0.9}.items():
        right = (order >= share).astype(float)
        for count in shots:
            known = right.tolist()
            if count == shots[-1]:
                known[:unknown] = [None] * unknown
            row = {"policy": policy, "shots": count, "queries": queries}
            rows.append(row | interval("accuracy", float(right.mean()), 0.1))
            frames.append(frame_of(policy, None if policy == "random" else 0, count, ids, known))
    results = {
        "system": "selector",
        "test_digest": digest,
        "test_queries": queries,
        "seeds": [0],
        "shots": list(shots),
        "trained_shots": 2,
        "judged_by": "scorer",
        "hidden": [],
        "profile": {"name": "beams", "digest": "sha256:b", "samples": 300, "candidates": 40},
        "rows": rows,
        "differences": [],
        "controls": [],
        "command": "knobwise train experiment=selector",
    }
    settings = {"experiment": "selector", "shots": 2, "variants": {form: {"epochs": 4}}}
    csv = "seed,step,Val/sft/Accuracy_Mean\n"
    csv += "".join(f"0,{i},{0.5 + 0.01 * i}\n" for i in range(0, 30, 10))
    return _write(folder, results, OmegaConf.create(settings), csv, frames)
