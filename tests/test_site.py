"""The documentation site is built without a warning, loads nothing from elsewhere, and has every
setting."""

import json
import os
import re
import runpy
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest
from commands import words_of

import knobwise
from knobwise import agents, envs, losses
from knobwise.experiments.command_line.help import help_lines
from knobwise.experiments.command_line.verbs import VERBS

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The pages by name. A broken link, a page outside the navigation, or a parameter that is
    documented and does not exist fails the build."""
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.html")}


def test_pages_load_nothing_from_elsewhere(site):
    for name, page in site.items():
        loaded = re.findall(r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="([^"]+)"', page)
        assert not [address for address in loaded if "//" in address], name


def test_lists_are_lists(site):
    """On GitHub they need no blank line before them."""
    for name, page in site.items():
        assert not re.search(r"<p>[^<]*(?:<(?!/p>)[^<]*)*\n(?:[-*]|1\.) ", page), name
    assert site["changelog.html"].count("<li>") > 30


def test_the_tutorial_has_its_pictures_and_outputs(site):
    assert site["tutorial.html"].count('<img alt="what this cell draws"') == 4
    assert "1,500 samples × 64 configurations" in site["tutorial.html"]


@pytest.mark.parametrize("verb", VERBS)
def test_every_setting_is_on_the_page_of_its_verb(site, verb):
    page = unescape(site[f"commands/{verb}.html"])
    for line in help_lines(verb):
        assert not line.default or f"<code>{line.key}</code>" in page, line.key


@pytest.mark.parametrize("module", [knobwise, envs, agents, losses])
def test_every_public_name_is_on_its_page(site, module):
    page = site[f"api/{module.__name__.rpartition('.')[2]}.html"]
    for public in set(module.__all__) - {"__version__"}:
        assert f'id="{module.__name__}.{public}"' in page, public


def test_guides_are_linked_from_the_first_page(site):
    guides = words_of("""
        tutorial profiles real_models deploy experiments demonstrations environments concepts
        metrics results trust
    """)
    for guide in guides:
        assert f'<a href="{guide}.html">' in site["index.html"]


def test_links_work_on_github_too():
    """There they lead to files, and not to the pages that the site makes of them."""
    links = []
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")):
        links += [page.parent / link for link in re.findall(r"\]\(([^)#\s]+)", page.read_text())]
    files = [link for link in links if ":/" not in str(link)]
    assert len(links) > 50
    assert not [link for link in files if not link.exists()]


# -- docs/results.md -------------------------------------------------------------------------------

RESULTS = (ROOT / "docs/results.md").read_text()


@pytest.mark.parametrize("last", ["grpo_recorded", "grpo_live"])
def test_the_stages_of_a_selector_are_collected_at_each_number_of_shots(last, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    shots_of = runpy.run_path(str(ROOT / "docs/collect.py"))["shots_of"]
    stages = ["nearest", "sft", "rce", "grpo_recorded"]
    pairs = [*zip(stages[1:], stages, strict=False), ("grpo_live", "rce")]
    pairs += [
        (policy, other) for policy in [*stages[2:], "grpo_live"] for other in ("nearest", "random")
    ]
    content = {
        "run": {"commit": "0123456789"},
        "shots": [1, 2],
        "variants": ["grpo_recorded"] + ["grpo_live"] * (last == "grpo_live"),
        "rows": [
            {"policy": name, "accuracy": share}
            for name in ("random", "rce", "farthest", "nearest")
            for share in (0.1, 0.2004)
        ],
        "differences": [
            {"policy": policy, "against": other, "difference": 0.1, "ci95": [0.05, 0.125 * shots]}
            for shots in (1, 2)
            for policy, other in pairs
        ],
    }
    collected = shots_of(content, ["farthest", "nearest"])
    assert collected["commit"] == "01234567"
    assert collected["share"] == {name: [0.1, 0.2] for name in ("random", "farthest", "nearest")}
    assert list(collected["gains"])[-2:] == [f"{last} − nearest", f"{last} − random"]
    assert all(cells == [[10, 5, 12.5], [10, 5, 25]] for cells in collected["gains"].values())
    # one that was not judged at both
    content["differences"].pop()
    with pytest.raises(AssertionError):
        shots_of(content | {"variants": ["grpo_live"]}, ["nearest"])


def test_what_training_adds_is_collected_uncorrected(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "docs")
    ablation_of = runpy.run_path(str(ROOT / "docs/collect.py"))["ablation_of"]
    row = {"difference": 0.02, "ci95": [0.01, 0.03], "p": 0.01, "p_holm": 0.02, "shown": "better"}
    path = tmp_path / "ppo_builtin.json"
    path.write_text(json.dumps({"differences": [row | {"p": 0.5}, row]}))
    about = {"section": "ppo", "profile": "builtin"}
    assert ablation_of(path, **about) == about | {"points": [2, 1, 3], "p": 0.01}


def test_what_training_adds_is_corrected_for_all_rows():
    names = runpy.run_path(str(ROOT / "docs/results.py"))
    # 1.96 standard errors from 0, and twice as many
    assert names["p_of_interval"]([1.0, 0.0, 2.0]) == pytest.approx(0.05, abs=1e-6)
    assert names["p_of_interval"]([-2.0, -3.0, -1.0]) == pytest.approx(8.9e-5, rel=0.01)
    assert [names["p_of_interval"]([x, x, x]) for x in (0.0, 1.0)] == [1, 0]
    clear = {"points": [1.0, 0.5, 1.5]}
    rows = [clear | {"p": p} for p in (0.012, 0.03, 0.001)] + [{"points": [0.0, -1.0, 1.0]}]
    # times 3, 2 and 4
    assert names["significant"](rows) == [True, False, True, False]
    assert names["significant"](rows[1:2]) == [True]
    # both must say so
    assert names["significant"]([{"points": [1.0, -0.1, 2.1], "p": 0.001}]) == [False]


def test_tables_and_chart_are_made_from_the_numbers_that_are_kept():
    """`python docs/results.py` after a change of the script or of docs/results.json."""
    names = runpy.run_path(str(ROOT / "docs/results.py"))
    numbers = json.loads((ROOT / "docs/results.json").read_text())
    written, rest = RESULTS.split(names["BEGIN"])
    tables, _ = rest.split(names["END"])
    assert tables == f"\n{names['tables'](numbers)}\n"
    shown = names["differences"](numbers)
    assert (ROOT / "docs/results.svg").read_text() == names["drawing"](shown)
    # the axis has the same scale on both sides
    assert names["across"](0) - names["across"](-10) == pytest.approx(
        names["across"](10) - names["across"](0)
    )
    # every difference of the written part stands in a table too
    prose = re.sub(r"\s+", " ", written.split("\n## Profiles")[0])
    figures = re.findall(r"[+−][\d.]+ \[[−\d.]+, [−\d.]+\]", prose)
    assert len(figures) > 7
    assert not [figure for figure in figures if figure not in tables]
