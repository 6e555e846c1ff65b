"""The self-contained page around charts and tables, from the templates beside this file.

Colours: `hues.json` lists the hues, `policies.json` says which policy has which,
`templates/style.css` colours the page around the charts. A chart is built once and drawn in the
reader's theme: whatever differs between light and dark stands in `THEMES`, never in a mark; hues
are named by their position in the palette (`domain`). Nothing comes from a network.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import altair as alt
from jinja2 import Environment
from markupsafe import Markup

from knobwise.common.files import write_text
from knobwise.experiments.report.words import POLICIES, environment

OTHERS = "others"
HUES: dict[str, list[str]] = json.loads(
    Path(__file__).with_name("hues.json").read_text(encoding="utf-8")
)
"""Name → the colour on white and on black. The first are the easiest to distinguish; policies that
are never drawn together may share a hue."""
HUE_OF = {words["name"]: words["colour"] for words in POLICIES.values()}
"""The name of a policy → its hue."""


def domain(labels: Sequence[str]) -> list[str]:
    """The domain of a colour scale over the whole palette.

    The label of a policy stands at the position of its hue, a run at the first free one that no
    reference has; blanks fill the remaining positions.
    """
    hues: dict[str, str] = {}
    for label in labels:
        if label in HUE_OF:
            hues.setdefault(HUE_OF[label], label)
    free = [hue for hue in HUES if hue not in hues and hue not in ("orange", "purple", "grey")]
    others = [label for label in labels if label not in hues.values()]
    return by_hue(hues | dict(zip(free, others, strict=False))) + others[len(free) :]


def by_hue(labels: Mapping[str, str]) -> list[str]:
    """The domain of a colour scale that gives each hue its label: hue → label."""
    return [labels.get(hue, " " * place) for place, hue in enumerate(HUES, 1)]


def _theme(dark: bool, **greys: str) -> dict[str, Any]:
    template = environment().get_template("theme.json.j2")
    palette = [pair[dark] for pair in HUES.values()]
    theme: dict[str, Any] = json.loads(template.render(palette=palette, **greys))
    return theme


THEMES = {
    "light": _theme(False, text="#333333", grid="#e6e6e6", quiet="#8a8a8a"),
    "dark": _theme(True, text="#d6d6d6", grid="#34373d", quiet="#8d9199"),
}


def specification(chart: alt.TopLevelMixin) -> dict[str, Any]:
    """The chart as Vega-Lite, without Altair's own theme and without its limit on the number of
    rows.

    The tests check it against the schema, which takes most of a page's time.
    """
    with alt.data_transformers.enable("default", max_rows=None), alt.theme.enable("none"):
        return chart.to_dict(validate=False)


def png(figure: Any) -> bytes:
    """A chart, or several below one another, as a picture, twice as fine as on screen, on white."""
    import vl_convert

    config = THEMES["light"] | {
        "background": "white",
        "view": {"stroke": "transparent", "continuousWidth": 640},
    }
    if isinstance(figure, list):
        chart = alt.vconcat(*figure).resolve_scale(color="independent")
    else:
        chart = figure
    return vl_convert.vegalite_to_png(specification(chart), scale=2, config=config)


@functools.cache
def templates() -> Environment:
    """The templates of all pages. What they print is escaped; in embedded JSON every `<` is written
    `\\u003c`."""
    pages = environment(autoescape=True)
    pages.filters["specification"] = specification
    pages.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":")}
    return pages


def render_page(path: str | Path, template: str, **content: Any) -> Path:
    """Write the page that a template makes of `content`; it opens without a network: everything is
    inside the file."""
    text = templates().get_template(template).render(vega=Markup(_vega()), themes=THEMES, **content)
    write_text(path, text)
    return Path(path)


@functools.cache
def _vega() -> str:
    import vl_convert

    version = ".".join(alt.SCHEMA_VERSION.split(".")[:2])
    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", version).replace(
        "</script", "<\\/script"
    )
