"""Draws docs/results.svg, a forest plot of every difference that the sentences of the reference
results give.

python docs/forest.py
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

PAGES = [Path(__file__).with_name(name) for name in ("results.md", "results_demonstrations.md")]
DRAWN = PAGES[0].with_suffix(".svg")
KINDS = {"Built-in": "built-in profile", "OCR": "RapidOCR", "Calibrated": "calibrated profile"}
KINDS |= {"Small": "small tables", "Beams": "demonstrations"}
SMALL = ("Python files", "Digits", "Breast cancer", "Diabetes")
SENTENCE = re.compile(
    rf"- (?:({'|'.join([*KINDS, *SMALL])}): )?(?:(`.+?`) )?([Aa]gainst .+?: (?=better|worse|no "
    r"diff)|is )(.+)"
)
UNCLEAR = "no difference shown"
CLAUSE = re.compile(rf"(better|worse|{UNCLEAR})(?:: | than )(.+)")
DIFFERENCE = re.compile(r"(.+?) \((\S+) \[(\S+), (\S+)\]\)(?:, )?")
WIDTH, LABELS, ROW, MARGIN, TOP = 860, 340, 14, 20, 74
TICKS = (-30, -10, -3, -1, 0, 1, 3, 10, 30)
STYLE = """
text { font: 11px system-ui, sans-serif; fill: #333 } .title { font-weight: 600; fill: #111 }
.back { fill: #fff } .grid { stroke: #e3e3e3 } .zero { stroke: #888 }
.a { stroke: #1f64ad; --c: #1f64ad } .b { stroke: #c05215; --c: #c05215 }
.c { stroke: #2b7a3d; --c: #2b7a3d }
.d { stroke: #7a3d9e; --c: #7a3d9e } .e { stroke: #8a6d00; --c: #8a6d00 }
.open { fill: #fff } .full { fill: var(--c) } .line { stroke-width: 1.5 }
@media (prefers-color-scheme: dark) {
  text { fill: #ccc } .title { fill: #fff } .back, .open { fill: #1e2129 }
  .grid { stroke: #363a45 } .zero { stroke: #999 }
  .a { stroke: #7db8f5; --c: #7db8f5 } .b { stroke: #f3a26d; --c: #f3a26d }
  .c { stroke: #7fcf92; --c: #7fcf92 }
  .d { stroke: #c79be8; --c: #c79be8 } .e { stroke: #d9c36a; --c: #d9c36a }
}
"""


class Difference(NamedTuple):
    section: str
    label: str
    kind: str
    """A key of `KINDS`."""
    shown: bool
    """Better or worse, after the correction for several comparisons."""
    points: tuple[float, float, float]
    """The difference and its interval."""


def differences(page: str) -> list[Difference]:
    """Every difference in a sentence of these pages that names what it is held against, once."""
    every: dict[Difference, None] = {}
    for part in page.split("\n### ")[1:]:
        title, _, text = part.partition("\n")
        for line in text.splitlines():
            if sentence := SENTENCE.match(line):
                profile, subject, verb, rest = sentence.groups()
                base = re.sub(r"^[Aa]gainst |, by data set|: $", "", verb)
                for word, clause in (
                    m.groups() for c in rest.split("; ") if (m := CLAUSE.match(c))
                ):
                    for name, *points in DIFFERENCE.findall(clause):
                        label = f"{subject} − {name}" if verb == "is " else f"{name} − {base}"
                        label = f"{subject}, {label}" if subject and verb != "is " else label
                        label = re.sub(r"\b[a-z]+\.(?=[a-z])", "", label.replace("`", ""))
                        label, kind = (
                            (f"{label}, {profile}", "Small")
                            if profile in SMALL
                            else (label, profile)
                        )
                        middle, low, high = map(float, points)
                        each = Difference(
                            title, label, kind or "Beams", word != UNCLEAR, (middle, low, high)
                        )
                        every[each] = None
    return drop_repeated(list(every))


def drop_repeated(every: list[Difference]) -> list[Difference]:
    """Selectors of several sections start from the same run: its differences stand in the first
    section."""
    first: dict[tuple[str, tuple[float, float, float]], Difference] = {}
    return [
        each
        for each in every
        if first.setdefault((each.label + each.kind, each.points), each) is each
    ]


def across(points: float) -> float:
    """The place on the axis, which is linear near 0 and logarithmic far from it."""
    half = (WIDTH - LABELS - MARGIN) / 2
    return LABELS + half * (1 + math.asinh(points) / math.asinh(45))


def drawing(every: list[Difference]) -> str:
    """The plot as SVG, with colours for light and dark pages."""
    rows: dict[tuple[str, str], list[Difference]] = {}
    for each in every:
        rows.setdefault((each.section, each.label), []).append(each)
    parts, y, section = list[str](), TOP, ""
    for (title, label), shared in rows.items():
        if title != section:
            y, section = y + ROW + 6, title
            parts.append(f'<text class="title" x="8" y="{y}">{escape(title)}</text>')
        y += ROW
        parts.append(f'<text x="18" y="{y}">{escape(label)}</text>')
        parts += [
            marker(each, y - 4 + 4 * index - 2 * (len(shared) - 1))
            for index, each in enumerate(shared)
        ]
    height = y + 34
    for tick in TICKS:
        x, line = across(tick), "grid" if tick else "zero"
        parts.insert(
            0, f'<line class="{line}" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{height - 26}"/>'
        )
        number = f"{tick:+d}".replace("-", "−") if tick else "0"
        parts += [
            f'<text x="{x:.1f}" y="{at}" text-anchor="middle">{number}</text>'
            for at in (TOP - 6, height - 12)
        ]
    for index, words in enumerate(KINDS.values()):
        x = 18 + 130 * index
        parts.append(
            f'<circle class="{"adbec"[index]} full" cx="{x}" cy="40" r="3.5"/><text x="{x + 8}" '
            f'y="44">{words}</text>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" '
        'role="img"><title>Differences in points, with 95 % '
        f"intervals</title><style>{STYLE}</style>"
        f'<rect class="back" width="{WIDTH}" height="{height}"/>'
        '<text class="title" x="8" y="20">Differences in points, with 95 % intervals; filled: '
        "better or worse after "
        "correction, open: no difference shown</text>" + "\n".join(parts) + "</svg>\n"
    )


def marker(each: Difference, y: float) -> str:
    """A dot with its interval."""
    (x, low, high), kind = (
        (across(number) for number in each.points),
        "adbec"[list(KINDS).index(each.kind)],
    )
    return (
        f'<line class="line {kind}" x1="{low:.1f}" x2="{high:.1f}" y1="{y}" y2="{y}"/>'
        f'<circle class="{kind} {"full" if each.shown else "open"}" cx="{x:.1f}" cy="{y}" r="3"/>'
    )


if __name__ == "__main__":
    pages = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    DRAWN.write_text(drawing(differences(pages)), encoding="utf-8")
    print(f"drawn: {DRAWN}")
