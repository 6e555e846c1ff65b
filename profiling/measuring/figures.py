"""How much a profile has to offer: what each knob moves, how often the choice matters, what a policy could gain."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from knobwise.envs.configurations.budgets import quantile_budgets
from knobwise.envs.configurations.reward import utility

Array = NDArray[np.floating]


def headroom(accuracy: Array, latency_ms: Array) -> dict[str, Any]:
    """Oracle and budget-aware static at the five default budgets, in utility, over the samples themselves."""
    times = torch.from_numpy(latency_ms)
    budgets = quantile_budgets(times, torch.ones_like(times, dtype=torch.bool))
    worth = utility(torch.from_numpy(accuracy), times, budgets[:, None, None])  # [B, N, C]
    static, oracle = worth.mean(1).amax(1), worth.amax(2).mean(1)
    return {
        "budgets_ms": [round(budget, 3) for budget in budgets.tolist()],
        "budget_aware_static": [round(mean, 4) for mean in static.tolist()],
        "oracle": [round(mean, 4) for mean in oracle.tolist()],
        "oracle_minus_static": round(float((oracle - static).mean()), 4),
    }


def profile_figures(
    accuracy: Array, latency_ms: Array, configurations: NDArray[np.integer], knobs: tuple[str, ...]
) -> dict[str, Any]:
    """The figures of a full table: accuracy and latency [N, C], knob values [C, K].

    Knob effects are marginal: the mean over the samples and over the values of the other knobs. Ranges are the largest
    minus the smallest of these means (accuracy), and their ratio minus one (latency).
    """
    accuracy, latency_ms = accuracy.astype(np.float64), latency_ms.astype(np.float64)
    effects = {}
    for k, knob in enumerate(knobs):
        values = np.unique(configurations[:, k])
        by_accuracy = np.array([accuracy[:, configurations[:, k] == v].mean() for v in values])
        by_latency = np.array([latency_ms[:, configurations[:, k] == v].mean() for v in values])
        effects[knob] = {
            "values": values.tolist(),
            "accuracy": by_accuracy.round(4).tolist(),
            "latency_ms": by_latency.round(3).tolist(),
            "accuracy_range": round(float(np.ptp(by_accuracy)), 4),
            "latency_range": round(float(by_latency.max() / by_latency.min() - 1), 4),
        }
    means = accuracy.mean(0)
    return {
        "knobs": effects,
        "accuracy_by_configuration": [round(float(means.min()), 4), round(float(means.max()), 4)],
        "config_dependent_share": round(float((np.ptp(accuracy, axis=1) > 0).mean()), 4),
        "latency_cv_within_configuration": round(float((latency_ms.std(0) / latency_ms.mean(0)).mean()), 4),
        "headroom": headroom(accuracy, latency_ms),
    }


def describe(figures: dict[str, Any]) -> str:
    """What :func:`profile_figures` found, in a few lines for people."""
    low, high = figures["accuracy_by_configuration"]
    lines = [f"accuracy of a configuration {low:.3f} to {high:.3f}"]
    for knob, effect in figures["knobs"].items():
        accuracy = " ".join(f"{a:.3f}" for a in effect["accuracy"])
        latency = " ".join(f"{t:.2f}" for t in effect["latency_ms"])
        grows = f"+{100 * effect['latency_range']:.0f} %"
        lines.append(
            f"{knob}: accuracy {accuracy} (range {effect['accuracy_range']:.3f}), latency {latency} ms ({grows})"
        )
    lines += [
        f"samples whose correctness depends on the configuration: {100 * figures['config_dependent_share']:.0f} %",
        f"coefficient of variation of latency in a configuration: {figures['latency_cv_within_configuration']:.2f}",
    ]
    room = figures["headroom"]
    static, oracle = np.mean(room["budget_aware_static"]), np.mean(room["oracle"])
    gain = f"{100 * room['oracle_minus_static']:.1f} points to gain"
    lines.append(f"utility over five budgets: budget-aware static {static:.3f}, oracle {oracle:.3f}, {gain}")
    return "\n".join(lines)
