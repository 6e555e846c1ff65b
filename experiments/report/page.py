"""The self-contained page around charts, tables and sentences: `templates/page.html.j2`, which
loads nothing from a network.

A block of a page is a paragraph (str, or `Markup` as it is), a list of sentences, a dict of terms
and their meanings, a `Table`, a `Figure` or a `Folded`; empty blocks are left out.

Colours: `hues.json` lists the hues, which are clear on white and on black, `policies.json` gives
each policy its hue, `templates/style.css` colours the page around the charts.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import altair as alt
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from knobwise.common.files import write_text
from knobwise.envs.tables.cost_words import in_words
from knobwise.experiments.report.sentences import TEMPLATES
from knobwise.experiments.report.tables import Block, Content
from knobwise.experiments.report.words import POLICIES

HUES: dict[str, str] = json.loads(Path(__file__).with_name("hues.json").read_text(encoding="utf-8"))
"""Name → the colour. The first are the easiest to distinguish; policies that are never drawn
together may share a hue."""
HUE_OF = {
    label: words["colour"]
    for policy, words in POLICIES.items()
    for label in (policy, words["name"], in_words(words["name"], ""))
}
"""A policy, or its name → its hue."""


class Figure(NamedTuple):
    """A chart, or several in a grid, with a sentence below."""

    charts: alt.LayerChart | list[alt.LayerChart]
    caption: str
    columns: int = 0
    """How many charts stand side by side; 0 for all, up to three."""


def colours_of(labels: Sequence[str]) -> dict[str, str]:
    """Return label → colour. That of a policy is the same on every page; a run gets the next one
    that no policy beside it and no reference policy has."""
    hues = {label: HUE_OF[label] for label in labels if label in HUE_OF}
    taken = {*hues.values(), "orange", "purple", "grey"}
    free = itertools.cycle([hue for hue in HUES if hue not in taken] or ["grey"])
    return {label: HUES[hues.get(label) or next(free)] for label in labels}


# -- drawing ---------------------------------------------------------------------------------------

unchecked = alt.utils.schemapi.debug_mode(False)
"""Decorates what builds charts. Altair would check each part of a chart as it is built, which takes
a quarter of a page's time; the tests check the charts of whole pages."""


CONFIG = {
    "background": "transparent",
    "font": "system-ui, sans-serif",
    "numberFormat": ".5~g",
    "mark": {"tooltip": True},
    "view": {"stroke": None, "continuousWidth": 640},
    "axis": {"gridColor": "#8883", "labelOverlap": True, "labelSeparation": 4},
    "axisX": {"labelAngle": 0},
    "legend": {"orient": "top", "columns": 2, "labelLimit": 340, "title": None, "symbolOpacity": 1},
}
"""What all charts share, in light and dark; the width is that of a picture."""


def specification(chart: alt.TopLevelMixin) -> dict[str, object]:
    """Return a chart as Vega-Lite, without Altair's own theme and its limit on the number of
    rows, unchecked."""
    with alt.data_transformers.enable("default", max_rows=None), alt.theme.enable("none"):
        return chart.to_dict(validate=False) | {"config": CONFIG}


def png(figure: Figure) -> bytes:
    """Draw charts below one another as a picture on white, at twice the resolution of a screen."""
    import vl_convert

    # a picture cannot wrap: charts stand below one another
    chart = figure.charts
    if isinstance(chart, list):
        chart = alt.vconcat(*chart).resolve_scale(color="independent")
    return vl_convert.vegalite_to_png(specification(chart) | {"background": "white"}, scale=2)


@functools.cache
def templates() -> Environment:
    """Return the environment of the page template. It escapes everything that it prints; in
    embedded JSON every `<` is written `\\u003c`."""
    pages = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.filters["specification"] = specification
    pages.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":")}
    return pages


def render_page(
    path: str | Path, content: Content, sections: Mapping[str, Sequence[Block | None]]
) -> Path:
    """Write a page, with all scripts and styles inside the file, and return its path.

    Args:
        path: of the file.
        content: the answer first; its details come last.
        sections: what stands between them, heading → blocks, in order.
    """
    page = templates().get_template("page.html.j2")
    write_text(path, page.render(content._asdict(), sections=sections, vega=Markup(_vega())))
    return Path(path)


@functools.cache
def _vega() -> str:
    """Return the JavaScript that draws the charts, safe inside a script element.

    It takes two seconds to put together, once in a process; no file of the user is touched.
    """
    import vl_convert

    version = ".".join(alt.SCHEMA_VERSION.split(".")[:2])
    script = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", version)
    return script.replace("</script", "<\\/script")
