"""Draws docs/utility.svg, the README's picture, from a run: utility against budget of three
policies.

make run && python docs/utility.py runs/latest
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

DRAWN = Path(__file__).with_name("utility.svg")
LINES = {
    "oracle": ("c", "oracle"),
    "controller": ("a", "controller"),
    "budget_aware_static": ("b", "best static"),
}
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 320, 56, 96, 20, 48
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #333 } .back { fill: #fff } .grid { stroke: #e3e3e3 }
.a { --c: #1f64ad } .b { --c: #c05215 } .c { --c: #2b7a3d } .band { fill: var(--c); opacity: .13 }
.line { fill: none; stroke: var(--c); stroke-width: 2 } .dot { fill: var(--c) }
.name { fill: var(--c); font-weight: 600 }
@media (prefers-color-scheme: dark) {
  text { fill: #ccc } .back { fill: #1e2129 } .grid { stroke: #363a45 }
  .a { --c: #7db8f5 } .b { --c: #f3a26d } .c { --c: #7fcf92 } .name { fill: var(--c) }
}
"""


def drawing(results: dict[str, Any]) -> str:
    """The picture as SVG, with colours for light and dark pages; bands are 95 % intervals."""
    rows = {
        name: [row for row in results["rows"] if row["policy"] == name and row["budget_ms"]]
        for name in LINES
    }
    budgets = sorted(row["budget_ms"] for row in rows["oracle"])
    low, high = budgets[0], budgets[-1]
    top = max(row["utility_ci95"][1] for row in rows["oracle"])

    def x(budget: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (budget - low) / (high - low)

    def y(utility: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * utility / top

    parts = [f'<rect class="back" width="{WIDTH}" height="{HEIGHT}"/>']
    for tenth in range(0, int(top * 10) + 1, 2):
        at = y(tenth / 10)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        )
        parts.append(
            f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{tenth / 10:.1f}</text>'
        )
    for budget in budgets:
        parts.append(
            f'<text x="{x(budget):.1f}" y="{HEIGHT - 26}" text-anchor="middle">{budget:.3g}</text>'
        )
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">budget in '
        "ms</text>"
    )
    parts.append(f'<text x="{LEFT - 40}" y="{TOP - 6}">utility</text>')
    for name, (kind, words) in LINES.items():
        line = sorted(rows[name], key=lambda row: row["budget_ms"])
        middle = [(x(row["budget_ms"]), y(row["utility"])) for row in line]
        ends = [
            [(x(row["budget_ms"]), y(row["utility_ci95"][end])) for row in line] for end in (0, 1)
        ]
        parts.append(
            f'<polygon class="band {kind}" points="{_points([*ends[0], *reversed(ends[1])])}"/>'
        )
        parts.append(f'<polyline class="line {kind}" points="{_points(middle)}"/>')
        parts += [
            f'<circle class="dot {kind}" cx="{a:.1f}" cy="{b:.1f}" r="3.5"/>' for a, b in middle
        ]
        end_x, end_y = middle[-1]
        parts.append(
            f'<text class="name {kind}" x="{end_x + 10:.1f}" y="{end_y + 4:.1f}">{words}</text>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" '
        f'role="img"><title>Utility against budget</title><style>{STYLE}</style>'
        + "\n".join(parts)
        + "</svg>\n"
    )


def _points(places: list[tuple[float, float]]) -> str:
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in places)


if __name__ == "__main__":
    DRAWN.write_text(
        drawing(json.loads((Path(sys.argv[1]) / "results.json").read_text())), encoding="utf-8"
    )
    print(f"drawn: {DRAWN}")
