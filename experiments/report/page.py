"""The self-contained page around charts and tables: for the report of a run and for the look into a profile.

A chart is built once and drawn in the colours of the reader's theme: whatever differs between light and dark stands in
`THEMES` (category colours, text, grid, the style "quiet"), never in a mark. Nothing on a page comes from a network.
"""

from __future__ import annotations

import functools
import html
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import altair as alt

from knobwise.common.files import written_whole


def _theme(categories: list[str], text: str, grid: str, quiet: str) -> dict[str, Any]:
    words = {"labelColor": text, "titleColor": text, "titleFontWeight": "normal", "titleFontSize": 12}
    return {
        "background": "transparent",
        "font": "system-ui, sans-serif",
        "view": {"stroke": "transparent"},
        "range": {"category": categories, "ordinal": {"scheme": "viridis"}, "heatmap": {"scheme": "viridis"}},
        "mark": {"color": categories[0]},
        "axis": {**words, "gridColor": grid, "domainColor": quiet, "tickColor": quiet, "labelFontSize": 11},
        "legend": {**words, "labelFontSize": 12},
        "header": {**words, "labelFontSize": 12, "labelFontWeight": 600},
        "title": {"color": text, "fontSize": 13, "anchor": "start"},
        "style": {
            "quiet": {"color": quiet},
        },
    }


THEMES = {
    "light": _theme(["#1d4ed8", "#d97706", "#15803d", "#7c3aed", "#b4b4b4"], "#333333", "#e6e6e6", "#8a8a8a"),
    "dark": _theme(["#7aa7ff", "#f0a94a", "#5fcf8a", "#c4a1ff", "#666a73"], "#d6d6d6", "#34373d", "#8d9199"),
}


def specification(chart: alt.TopLevelMixin) -> dict[str, Any]:
    """The chart as Vega-Lite, without Altair's own theme and without its limit on the number of rows."""
    with alt.data_transformers.enable("default", max_rows=None), alt.theme.enable("none"):
        return chart.to_dict()


def png(chart: alt.TopLevelMixin, theme: str = "light") -> bytes:
    """The chart as a picture, twice as fine as on screen, on white or black."""
    import vl_convert

    config = THEMES[theme] | {"background": "white" if theme == "light" else "black"}
    return vl_convert.vegalite_to_png(specification(chart), scale=2, config=config)


def quantity(value: float | None, unit: str = "ms") -> str:
    """Three figures, more for large numbers, and the unit."""
    if value is None or not math.isfinite(value):
        return "–"
    if abs(value) >= 100:
        return f"{value:,.0f} {unit}"
    # from six figures, as a budget is kept in some places, so that 2.185 is rounded one way
    return f"{float(f'{value:.6g}'):#.3g}".rstrip(".") + f" {unit}"


def figure(chart: alt.TopLevelMixin, caption: str) -> str:
    """A chart with a sentence under it."""
    text = json.dumps(specification(chart), separators=(",", ":"), ensure_ascii=False).replace("</", "<\\/")
    words = html.escape(caption)
    return (
        f'<figure><div class="chart" role="img" aria-label="{words}"></div>'
        f'<script type="application/json">{text}</script><figcaption>{words}</figcaption></figure>'
    )


def table(
    header: Sequence[str], rows: Iterable[Sequence[str]], strong: Sequence[int] = (), words: Sequence[int] = ()
) -> str:
    """An HTML table: names in the first column, numbers in the others. What follows a line break is small print.

    Args:
        header, rows: the cells.
        strong: numbers of rows that stand out.
        words: numbers of columns with sentences instead of numbers.
    """

    def cell(place: int, text: str) -> str:
        first, *rest = map(html.escape, text.split("\n"))
        kind = " class=words" if place in words else ""
        return f"<td{kind}>{first}{''.join(f'<small>{line}</small>' for line in rest)}</td>"

    head = "".join(
        f"<th{' class=words' if i in words else ''}>{html.escape(name)}</th>" for i, name in enumerate(header)
    )
    body = "".join(
        f"<tr{' class=strong' if i in strong else ''}>{''.join(cell(*one) for one in enumerate(row))}</tr>"
        for i, row in enumerate(rows)
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def folded(title: str, inside: str) -> str:
    """Something to open with a click."""
    return f"<details><summary>{html.escape(title)}</summary>{inside}</details>"


def write_page(path: str | Path, title: str, parts: Sequence[str]) -> Path:
    """Write an HTML page that opens without a network: Vega, the charts' data and the styles are all inside."""
    policy = (
        "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:"
    )
    text = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<style>{STYLE}</style></head><body><main>{''.join(parts)}</main>"
        f"<script>{_vega()}</script><script>const themes={json.dumps(THEMES)};{SCRIPT}</script></body></html>"
    )
    with written_whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return Path(path)


@functools.cache
def _vega() -> str:
    import vl_convert

    version = ".".join(alt.SCHEMA_VERSION.split(".")[:2])
    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", version).replace("</script", "<\\/script")


STYLE = """
:root{--text:#222;--soft:#666;--back:#fff;--line:#ddd;--tint:#f5f7fb}
@media (prefers-color-scheme:dark){:root{--text:#e3e3e3;--soft:#a2a6ad;--back:#16181c;--line:#363a41;--tint:#1f232a}}
body{margin:0;background:var(--back);color:var(--text);font:16px/1.5 system-ui,sans-serif}
main{max-width:940px;margin:0 auto;padding:24px 20px 80px}
h1{font-size:26px;margin:8px 0}h2{font-size:20px;margin:44px 0 8px}
.verdict{background:var(--tint);border-left:4px solid var(--soft);padding:12px 18px;font-size:17px}
.verdict p{margin:6px 0}
.soft,figcaption,small{color:var(--soft)}figcaption{font-size:14px;margin-top:-8px}
figure{margin:16px 0;overflow-x:auto}
.chart .vega-embed{max-width:100%}.chart svg{max-width:100%;height:auto}.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:14px;font-variant-numeric:tabular-nums;width:100%}
th,td{padding:5px 10px;text-align:right;border-bottom:1px solid var(--line);vertical-align:top;white-space:nowrap}
th{font-weight:600;vertical-align:bottom;white-space:normal}th:first-child,td:first-child{text-align:left}
td:first-child{white-space:normal;min-width:130px}
.words{text-align:left;white-space:normal;min-width:240px}
td small{display:block;font-size:12px}.strong td{font-weight:600;background:var(--tint)}.strong small{font-weight:400}
details{margin:14px 0}summary{cursor:pointer}
pre{background:var(--tint);padding:12px;overflow-x:auto;font-size:13px}
code{overflow-wrap:anywhere}dt{font-weight:600}dd{margin:0 0 8px 20px}
"""

SCRIPT = """
const dark=matchMedia('(prefers-color-scheme: dark)');
function draw(){for(const f of document.querySelectorAll('figure')){
const spec=JSON.parse(f.querySelector('script').textContent);
vegaEmbed(f.querySelector('.chart'),spec,{config:themes[dark.matches?'dark':'light'],renderer:'svg',
actions:{export:true,source:false,compiled:false,editor:false},tooltip:{theme:dark.matches?'dark':'light'}});}}
dark.addEventListener('change',draw);draw();
"""
