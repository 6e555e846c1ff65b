"""The self-contained page around charts, tables and sentences: `templates/page.html.j2`, which
loads nothing from a network.

A page is a dict of sections, heading → blocks. A block is a paragraph (str, or `Markup` as it is),
a list of sentences, a dict of terms and their meanings, a `Table`, a `Figure` or a `Folded`; empty
blocks and sections are left out.

Colours: `hues.json` lists the hues, `policies.json` gives each policy its hue,
`templates/style.css` colours the page around the charts. A chart is built once and drawn in the
reader's theme. So everything that differs between light and dark is in `THEMES`, never in a mark,
and a chart names a hue by its position in the palette (`domain`).
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import altair as alt
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from platformdirs import user_cache_path

from knobwise.common.errors import InputError
from knobwise.common.files import write_text
from knobwise.experiments.report.words import POLICIES

OTHERS = "others"
"""The label of all policies that have no colour of their own."""
HUES: dict[str, list[str]] = json.loads(
    Path(__file__).with_name("hues.json").read_text(encoding="utf-8")
)
"""Name → the colour on white and on black. The first are the easiest to distinguish; policies that
are never drawn together may share a hue."""
HUE_OF = {words["name"]: words["colour"] for words in POLICIES.values()}
"""The name of a policy → its hue."""


class Figure(NamedTuple):
    """A chart, or several side by side, with a sentence below."""

    charts: alt.LayerChart | list[alt.LayerChart]
    caption: str
    columns: int = 0
    """How many charts stand side by side; 0 for all, up to three."""


# -- colours ---------------------------------------------------------------------------------------


def domain(labels: Sequence[str]) -> list[str]:
    """Return the domain of a colour scale over the whole palette.

    The label of a policy stands at the position of its hue. A run stands at the first free position
    whose hue no reference policy has. Blanks fill the remaining positions.
    """
    hues: dict[str, str] = {}
    for label in labels:
        if label in HUE_OF:
            hues.setdefault(HUE_OF[label], label)
    free = [hue for hue in HUES if hue not in hues and hue not in ("orange", "purple", "grey")]
    others = [label for label in labels if label not in hues.values()]
    return by_hue(hues | dict(zip(free, others, strict=False))) + others[len(free) :]


def by_hue(labels: Mapping[str, str]) -> list[str]:
    """Return the domain of a colour scale that gives each hue its label: hue → label."""
    # blanks of different length, because a domain holds every value once
    return [labels.get(hue, " " * length) for length, hue in enumerate(HUES, 1)]


def _theme(dark: bool, text: str, grid: str, quiet: str) -> dict[str, Any]:
    """Return a Vega-Lite configuration with the palette for light or dark."""
    palette = [pair[dark] for pair in HUES.values()]
    title = {"titleColor": text, "titleFontWeight": "normal", "titleFontSize": 12}
    # legends and axes differ in the size of their labels only
    label = title | {"labelColor": text, "labelFontSize": 12}
    lines = {"gridColor": grid, "domainColor": quiet, "tickColor": quiet, "labelFontSize": 11}
    return {
        "background": "transparent",
        "font": "system-ui, sans-serif",
        "view": {"stroke": "transparent"},
        "range": {
            "category": palette,
            "ordinal": {"scheme": "viridis"},
            "heatmap": {"scheme": "viridis"},
        },
        "mark": {"color": palette[0]},
        "text": {"color": text},
        "rule": {"color": palette[0]},
        "axis": label | lines,
        "legend": label,
        "title": {"color": text, "fontSize": 13, "anchor": "start"},
        "style": {"quiet": {"color": quiet}},
    }


THEMES = {
    "light": _theme(False, text="#333333", grid="#e6e6e6", quiet="#8a8a8a"),
    "dark": _theme(True, text="#d6d6d6", grid="#34373d", quiet="#8d9199"),
}

# -- drawing ---------------------------------------------------------------------------------------

unchecked = alt.utils.schemapi.debug_mode(False)
"""Decorates what builds charts. Altair would check each part of a chart as it is built, which takes
a quarter of a page's time; the tests check the charts of whole pages."""


def specification(chart: alt.TopLevelMixin) -> dict[str, Any]:
    """Return a chart as Vega-Lite, without Altair's own theme and its limit on the number of
    rows, unchecked."""
    with alt.data_transformers.enable("default", max_rows=None), alt.theme.enable("none"):
        return chart.to_dict(validate=False)


def png(figure: Figure) -> bytes:
    """Draw charts below one another as a picture on white, at twice the resolution of a screen."""
    import vl_convert

    config = THEMES["light"] | {
        "background": "white",
        "view": {"stroke": "transparent", "continuousWidth": 640},
    }
    # a picture cannot wrap: charts stand below one another
    chart = figure.charts
    if isinstance(chart, list):
        chart = alt.vconcat(*chart).resolve_scale(color="independent")
    return vl_convert.vegalite_to_png(specification(chart), scale=2, config=config)


@functools.cache
def templates() -> Environment:
    """Return the environment of the page template. It escapes everything that it prints; in
    embedded JSON every `<` is written `\\u003c`."""
    pages = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.filters["specification"] = specification
    pages.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":")}
    return pages


def render_page(
    path: str | Path,
    kind: str,
    name: str,
    sections: Mapping[str, Any],
    *,
    facts: Sequence[str] = (),
    tiles: Sequence[tuple[str, str, str]] = (),
    lead: str = "",
) -> Path:
    """Write a page, with all scripts and styles inside the file, and return its path.

    Args:
        path: of the file.
        kind: what the page is, such as "run report".
        name: of what it is about.
        sections: heading → blocks, in order; see this module.
        facts: in small print under the name, a line each.
        tiles: the numbers to be seen first: the number, what it is, and another one beside it.
        lead: the first sentence.
    """
    content = {"kind": kind, "name": name, "sections": sections, "facts": facts, "tiles": tiles}
    page = templates().get_template("page.html.j2")
    text = page.render(content, lead=lead, vega=Markup(_vega()), themes=THEMES)
    write_text(path, text)
    return Path(path)


@functools.cache
def _vega() -> str:
    """Return the JavaScript that draws the charts, safe inside a script element.

    It takes two seconds to put together, so it is kept in the user's cache.
    """
    import vl_convert

    version = ".".join(alt.SCHEMA_VERSION.split(".")[:2])
    bundler = metadata.version("vl-convert-python")
    kept = user_cache_path("knobwise") / f"vega-{bundler}-{version}.js"
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return kept.read_text("utf-8")
    script = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", version)
    script = script.replace("</script", "<\\/script")
    # a home that cannot be written to is no reason to fail
    with contextlib.suppress(OSError, InputError):
        write_text(kept, script)
    return script
