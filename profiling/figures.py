"""How much a profile has to offer: what each knob moves, how often the choice matters, what a policy could gain."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating]
BUDGET_QUANTILES = (0.10, 0.25, 0.50, 0.75, 0.90)


def utility(accuracy: Array, latency_ms: Array, budgets: Array) -> Array:
    """accuracy·1[latency ≤ budget]: [B, N, C] from [N, C], [N, C] and [B] or, per sample, [B, N]."""
    limits = budgets.reshape(len(budgets), -1, 1)
    return np.asarray(accuracy * (latency_ms <= limits))


def headroom(accuracy: Array, latency_ms: Array) -> dict[str, Any]:
    """Oracle and budget-aware static at the 10/25/50/75/90 % quantiles of all latencies, in utility."""
    budgets = np.quantile(latency_ms, BUDGET_QUANTILES)
    worth = utility(accuracy, latency_ms, budgets)
    static, oracle = worth.mean(1).max(1), worth.max(2).mean(1)
    return {
        "budgets_ms": budgets.round(3).tolist(),
        "budget_aware_static": static.round(4).tolist(),
        "oracle": oracle.round(4).tolist(),
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


def learned_gap(
    accuracy: Array, latency_ms: Array, features: Array, *, forest: bool = False, seed: int = 0
) -> dict[str, float]:
    """Gap closed on held-out samples by a plain regression on ``features`` [N, d]: is there anything to learn?

    Predicts accuracy Â and log-latency μ of every configuration, takes argmax Â·Φ((ln b − μ)/σ), and compares with the
    oracle and with the budget-aware static configuration of the training samples. Also a policy that predicts latency
    only, with each configuration's mean accuracy for Â. Features are standardised; seven tenths are for training.
    """
    from scipy.special import ndtr  # type: ignore[import-untyped]
    from sklearn.ensemble import RandomForestRegressor
    from sklearn.linear_model import RidgeCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    order = np.random.default_rng(seed).permutation(len(accuracy))
    train, test = np.split(order, [int(0.7 * len(order))])
    logs = np.log(latency_ms)

    def fitted(target: Array) -> tuple[Array, Array]:
        """Prediction for the test samples [n, C], residual spread [C] on an inner validation part."""

        def model() -> Any:
            if forest:
                return RandomForestRegressor(80, min_samples_leaf=5, max_features=0.3, random_state=seed)
            return make_pipeline(StandardScaler(), RidgeCV(np.logspace(0, 5, 11)))

        fit, inner = np.split(train, [int(0.8 * len(train))])
        spread = (target[inner] - model().fit(features[fit], target[fit]).predict(features[inner])).std(0)
        return model().fit(features[train], target[train]).predict(features[test]), spread

    accuracy_hat, _ = fitted(accuracy)
    mu, sigma = fitted(logs)
    budgets = np.quantile(latency_ms, BUDGET_QUANTILES)
    feasible = ndtr((np.log(budgets)[:, None, None] - mu) / sigma)
    worth = utility(accuracy[test], latency_ms[test], budgets)
    choices = {
        "learned": (accuracy_hat.clip(1e-3, 1) * feasible).argmax(2),
        "latency_only": (accuracy[train].mean(0) * feasible).argmax(2),
        "static": np.broadcast_to(
            utility(accuracy[train], latency_ms[train], budgets).mean(1).argmax(1)[:, None], worth.shape[:2]
        ),
    }
    mean = {name: float(np.take_along_axis(worth, c[..., None], 2).mean()) for name, c in choices.items()}
    mean["oracle"] = float(worth.max(2).mean())
    gap = mean["oracle"] - mean["static"]
    return {
        **{name: round(value, 4) for name, value in mean.items()},
        "gap_closed": round((mean["learned"] - mean["static"]) / gap, 4),
        "gap_closed_latency_only": round((mean["latency_only"] - mean["static"]) / gap, 4),
    }
