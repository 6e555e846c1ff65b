"""What a page holds: its charts, their data, the rows of its tables; and what is printed."""

import io
import json
import re

import altair as alt
import vl_convert
from rich.console import Console

from knobwise.experiments.evidence.results import write_results
from knobwise.experiments.report import page
from knobwise.experiments.report.report import write_report
from knobwise.experiments.report.sentences import Sentence
from knobwise.experiments.settings.config_file import to_yaml


def report_of(folder, results):
    """The report of a run with these results, in a folder where its other files may be."""
    write_results(folder, results)
    return write_report(folder).read_text()


def run_folder(folder, results, metrics, config):
    """The new folder with the files of a finished run."""
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text(metrics)
    (folder / "config.yaml").write_text(to_yaml(config))
    write_results(folder, results)
    return folder


def charts_of(text):
    """The charts of a page, each of which must be Vega-Lite."""
    found = [
        json.loads(spec)
        for spec in re.findall(r'<script type="application/json">(.*?)</script>', text, re.S)
    ]
    for spec in found:
        alt.Chart.from_dict(spec)
    return found


def specifications(figure):
    """The charts of a figure."""
    charts = figure.charts if isinstance(figure.charts, list) else [figure.charts]
    found = [page.specification(chart) for chart in charts]
    for each in found:
        alt.Chart.from_dict(each)  # raises SchemaValidationError where it is not Vega-Lite
    return found


def data_of(*specs):
    return [rows for spec in specs for rows in spec["datasets"].values()]


def points_of(*specs):
    """The points of all layers."""
    return [row for rows in data_of(*specs) for row in rows]


def svg_of(*specs):
    drawn = [vl_convert.vegalite_to_svg(spec, theme="dark") for spec in specs]
    assert all("<svg" in svg for svg in drawn)
    return "".join(drawn)


def titles_of(specs):
    return [spec.get("title", "") for spec in specs]


def rows_of(text):
    """The rows of each table."""
    return [
        re.findall(r"<tr.*?</tr>", table, re.S)
        for table in re.findall(r"<tbody>(.*?)</tbody>", text, re.S)
    ]


def said(sentences):
    """What is said: the name of each sentence, and of each of its parts → what is filled in."""
    by_name = {}
    for sentence in sentences:
        parts = [part for part in sentence.fields.values() if isinstance(part, Sentence)]
        by_name |= {sentence.name: sentence.fields} | said(parts)
    return by_name


def headings_of(text):
    """The headings of a page, in order."""
    return re.findall("<h2>(.*?)</h2>", text.replace(page._vega(), ""))


def folded_in(text):
    """The titles of what a page folds, in order."""
    return re.findall("<summary>(.*?)</summary>", text)


def printed(show, content, width=None):
    """What is printed on a terminal of some width, or where there is none; nothing is cut off."""
    console = Console(file=io.StringIO(), width=width, force_terminal=width is not None)
    show(content, console)
    text = console.file.getvalue()
    assert "…" not in text
    assert ("\x1b" in text) == (width is not None)
    return text
