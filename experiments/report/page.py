"""The self-contained page around charts and tables, from the templates beside this file.

A chart is built once and drawn in the colours of the reader's theme: whatever differs between light and dark stands in
`THEMES` (the palette, text, grid, the style "quiet"), never in a mark. Nothing on a page comes from a network.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import altair as alt
from jinja2 import Environment
from markupsafe import Markup

from knobwise.common.files import written_whole
from knobwise.experiments.report.colours import palette
from knobwise.experiments.report.words import environment


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
        "style": {"quiet": {"color": quiet}},
    }


THEMES = {
    "light": _theme(palette(), "#333333", "#e6e6e6", "#8a8a8a"),
    "dark": _theme(palette(dark=True), "#d6d6d6", "#34373d", "#8d9199"),
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


@functools.cache
def templates() -> Environment:
    """The templates of all pages. What they print is escaped; in embedded JSON every `<` is written `\\u003c`."""
    pages = environment(autoescape=True)
    pages.filters["specification"] = specification
    pages.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":")}
    return pages


def render_page(path: str | Path, template: str, **content: Any) -> Path:
    """Write the page that a template makes of `content`; it opens without a network: everything is inside the file."""
    text = templates().get_template(template).render(vega=Markup(_vega()), themes=THEMES, **content)
    with written_whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return Path(path)


@functools.cache
def _vega() -> str:
    import vl_convert

    version = ".".join(alt.SCHEMA_VERSION.split(".")[:2])
    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", version).replace("</script", "<\\/script")
