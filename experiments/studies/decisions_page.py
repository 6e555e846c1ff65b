"""docs/decisions.md: what `experiments/studies/decisions.py` measured, in tables and sentences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Found = Sequence[Mapping[str, Any]]
AUTO, STATIC, ORACLE = "auto", "budget_aware_static", "oracle"
LEARNED = ("ridge", "kernel_ridge", "knn", "random_forest", "gradient_boosting", "latency_only")
BASELINES = (STATIC, "best_static", "lookup_table", *LEARNED, "random")
LEAST_HEADROOM = 0.05
"""Shares of less headroom than this say nothing; such tables count in utility only."""


class Mean(NamedTuple):
    """A mean over seeds and half the width of its 95 % interval (Student's t)."""

    value: float
    half: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Mean:
        from scipy.stats import t

        numbers = np.array(list(values), dtype=float)
        if len(numbers) < 2:
            return cls(float(numbers.mean()), float("nan"))
        error = numbers.std(ddof=1) / np.sqrt(len(numbers))
        return cls(float(numbers.mean()), float(t.ppf(0.975, len(numbers) - 1) * error))

    def words(self, how: str = ".3f") -> str:
        return f"{self.value:z{how}} ± {self.half:{how}}"

    @property
    def below(self) -> bool:
        """Whether it is below 0 by more than its interval."""
        return self.value + self.half < 0


def page_of(found: Found) -> str:
    """The page, from one entry for each table and seed."""
    names = list(dict.fromkeys(one["table"] for one in found))
    tables = {name: _Table([one for one in found if one["table"] == name]) for name in names}
    seeds = len({one["seed"] for one in found})
    compared = [name for name in names if tables[name].found[0]["objectives"]]
    parts = [
        "# Which policy decides best",
        f"Made by `python experiments/studies/decisions.py`: {len(names)} tables × {seeds} seeds; all but the built-in "
        "profile "
        "are simulated (`knobwise.envs.simulated.kinds`). Every policy chooses all it has to choose on samples outside "
        "the "
        "test part. A simulated table is drawn anew for each seed and judged on 2,000 samples more than it is fitted "
        "on; the built-in profile is split anew (400 test samples). *Gap closed* is (policy − budget-aware static)/"
        "(oracle − budget-aware static) in mean utility over the five default budgets; ± is half a 95 % interval over "
        "seeds. CPU seconds are for one fit on one thread; those of every baseline are for all baselines together. "
        "Deadlines only; the simulated kind `wide_knobs` (240 configurations) is left out for its cost.",
        "## All tables",
        _overview(tables),
        *_sentences(tables),
        "## Table by table",
        *(part for name, table in tables.items() for part in table.section(name)),
        "## Where the guard stands",
        _guards(tables),
        "## Objectives",
        "60 iterations of GRPO, none stopped early, from where the regression was best on held-out samples, on "
        f"{', '.join(compared)}: what utility on the test part gains. ± is over tables and seeds.",
        _objectives(tables),
    ]
    return "\n\n".join(parts) + "\n"


class _Table:
    """All seeds of one table."""

    def __init__(self, found: Found) -> None:
        self.found = found
        self.policies = [row["policy"] for row in found[0]["policies"]]
        self.seconds = {p: float(np.mean(self._values(p, "cpu_seconds"))) for p in self.policies}
        self.utility = {p: self._values(p, "utility") for p in self.policies}
        self.kept = {p: float(np.nanmean(self._values(p, "satisfaction_feasible"))) for p in self.policies}
        self.headroom = float(np.mean(self.utility[ORACLE] - self.utility[STATIC]))

    def _values(self, policy: str, key: str) -> NDArray[np.float64]:
        rows = [next(row for row in one["policies"] if row["policy"] == policy) for one in self.found]
        return np.array([np.nan if row[key] is None else row[key] for row in rows], dtype=float)

    def gap(self, policy: str) -> Mean:
        between = self.utility[ORACLE] - self.utility[STATIC]
        return Mean.of((self.utility[policy] - self.utility[STATIC]) / between)

    def ahead(self, policy: str, other: str) -> Mean:
        """The paired difference in utility."""
        return Mean.of(self.utility[policy] - self.utility[other])

    @property
    def best_baseline(self) -> str:
        return max(BASELINES, key=lambda p: float(self.utility[p].mean()))

    def rank(self, policy: str) -> int:
        """Among the baselines and `auto`, 1 is best."""
        own = float(self.utility[policy].mean())
        return 1 + sum(float(self.utility[p].mean()) > own for p in (AUTO, *BASELINES) if p != policy)

    def section(self, name: str) -> list[str]:
        one = self.found[0]
        size = f"{one['samples']:,} samples × {one['configurations']} configurations, {one['features']} features"
        rows = []
        for policy in sorted(self.policies, key=lambda p: -float(self.utility[p].mean())):
            gap = self.gap(policy).words(".2f") if self.headroom >= LEAST_HEADROOM else "–"
            rows.append(
                [
                    f"**{policy}**" if policy == AUTO else policy,
                    f"{self.utility[policy].mean():.3f}",
                    gap,
                    "" if policy in (AUTO, ORACLE) else self.ahead(policy, AUTO).words(),
                    f"{self.kept[policy]:.1%}",
                    f"{self.seconds[policy]:.1f}",
                ]
            )
        head = ["policy", "utility", "gap closed", "difference to auto", "in time where possible", "CPU s"]
        return [f"### {name}", f"{size}; oracle − static {self.headroom:.3f}.", _markdown(head, rows)]


def _overview(tables: Mapping[str, _Table]) -> str:
    policies = list(dict.fromkeys(p for table in tables.values() for p in table.policies if p != ORACLE))
    roomy = [table for table in tables.values() if table.headroom >= LEAST_HEADROOM]
    rows = []
    for policy in policies:
        having = [table for table in tables.values() if policy in table.policies]
        gaps = [table.gap(policy).value for table in roomy if policy in table.policies]
        ranked = policy in (AUTO, *BASELINES)
        rows.append(
            [
                f"**{policy}**" if policy == AUTO else policy,
                f"{np.mean(gaps):.3f}" if gaps else "–",
                f"{np.mean([t.utility[policy].mean() - t.utility[STATIC].mean() for t in having]):+.3f}",
                f"{np.mean([t.rank(policy) for t in having]):.1f}" if ranked else "",
                f"{np.mean([t.kept[policy] for t in having]):.1%}",
                f"{np.mean([t.seconds[policy] for t in having]):.1f}",
            ]
        )
    rows.sort(key=lambda row: -float(row[2]))
    head = ["policy", "gap closed", "utility over static", "rank among baselines", "in time where possible", "CPU s"]
    return _markdown(head, rows)


def _sentences(tables: Mapping[str, _Table]) -> list[str]:
    first = [name for name, table in tables.items() if table.rank(AUTO) == 1]
    lines = [f"`auto` is first on {len(first)} of {len(tables)} tables ({', '.join(first) or 'none'})."]
    for name, table in tables.items():
        best = table.best_baseline
        difference = table.ahead(AUTO, best)
        if difference.value < 0:
            sure = "by more than the interval" if difference.below else "by less than the interval"
            lines.append(
                f"On {name} {best} is ahead of it by {Mean(-difference.value, difference.half).words()}, {sure}."
            )
        if best != STATIC and table.ahead(AUTO, STATIC).below:
            lines.append(f"On {name} it is below budget-aware static by more than the interval.")
    pairs = {
        "GRPO after the regression, without experts": ("utility network", "utility network, regression only"),
        "experts beside the network": ("auto, no guard", "utility network"),
        "weights learned out of fold, against equal ones": ("auto, no guard", "auto, no guard, equal weights"),
        "the guard": (AUTO, "auto, no guard"),
    }
    lines.append(
        "What each part is worth in utility, mean over tables (and on how many it is above 0 / below 0 by more "
    )
    lines[-1] += "than the interval):"
    bullets = []
    for words, (one, other) in pairs.items():
        having = [t for t in tables.values() if one in t.policies and other in t.policies]
        if not having:
            continue
        differences = [t.ahead(one, other) for t in having]
        above, below = sum(d.value - d.half > 0 for d in differences), sum(d.below for d in differences)
        mean = np.mean([d.value for d in differences])
        bullets.append(f"- {words}: {mean:+.4f} ({above} / {below} of {len(having)})")
    return [" ".join(lines[:-1]), lines[-1], "\n".join(bullets)]


def _guards(tables: Mapping[str, _Table]) -> str:
    rows = []
    for name, table in tables.items():
        guards = [
            group
            for one in table.found
            for row in one["policies"]
            if row["policy"] == AUTO
            for group in row["guard"] or []
        ]
        if not guards:
            continue
        count = len(guards)
        rows.append(
            [
                name,
                f"{sum(g['deployed'] for g in guards)}/{count}",
                f"{sum(g['unattainable'] for g in guards)}/{count}",
                f"{sum(g['too_dear'] for g in guards)}/{count}",
                f"{table.kept['auto, no guard']:.1%}",
                f"{table.kept[AUTO]:.1%}",
                table.ahead(AUTO, "auto, no guard").words(),
            ]
        )
    head = ["table", "deployed", "95 % unattainable", "95 % too dear", "in time, no guard", "in time, guarded"]
    return _markdown([*head, "utility over no guard"], rows)


def _objectives(tables: Mapping[str, _Table]) -> str:
    """Gains in utility on the test part after equal updates and after equal CPU time, mean over tables and seeds."""
    cells = [one["objectives"] for table in tables.values() for one in table.found if one["objectives"]]
    rows = []
    for number, name in enumerate(row["objective"] for row in (cells[0] if cells else ())):
        own = [cell[number] for cell in cells]
        # the time that the cheapest objective of the same table and seed takes
        limits = [min(row["seconds"][-1] for row in cell) for cell in cells]
        last = [
            int(np.searchsorted(row["seconds"], limit, side="right")) - 1
            for row, limit in zip(own, limits, strict=True)
        ]
        updates = Mean.of(row["utility"][-1] - row["utility"][0] for row in own)
        time = Mean.of(row["utility"][at] - row["utility"][0] for row, at in zip(own, last, strict=True))
        seconds = float(np.mean([row["seconds"][-1] for row in own]))
        gained = f"{1e3 * updates.value / seconds:+.2f}"
        rows.append([name, updates.words(".4f"), time.words(".4f"), f"{seconds:.1f}", gained])
    head = ["objective", "gain after equal updates", "after equal CPU time", "CPU s"]
    return _markdown([*head, "gain · 1000 per CPU s"], rows)


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])
