"""`knobwise compare` of two runs of different kinds: any pair of one kind of agent has a page."""

import itertools
from contextlib import chdir
from pathlib import Path

import pytest
from commands import launch, read_json, refused
from page_parts import points_of, specifications
from replayed import untrained
from run_folders import write_run, write_selector_run

from knobwise.agents import PolicyConfig
from knobwise.agents.training.checkpoint import save_checkpoint
from knobwise.experiments.evidence.results import write_results
from knobwise.experiments.report.comparison import read_comparison
from knobwise.experiments.report.figures import figures_of
from knobwise.testbeds import builtin_profile

GROUPS = [
    {"difficulty_ms": ms, "policy_ms": 1.2 * ms, "static_ms": 1.1 * ms, "ci95": [ms, 1.3 * ms]}
    for ms in (4.0, 8.0)
]
"""Easy samples and hard ones."""
SEVERAL = {"groups": GROUPS, "points": [[4.0, 4.8], [8.0, 9.6]]}
PROMISES = [
    {"policy": "controller", "budget_ms": ms, "promise": 0.5, "kept": True, "held_out": 0.9}
    for ms in (10.0, 20.0)
]
KINDS = {
    "several seeds": ({}, {}),
    "one seed": ({"seeds": [0]}, {}),
    "static only": ({}, {"budget_ms": None, "groups": [], "points": []}),
    "another budget": ({"budgets": (30.0,)}, {"budget_ms": 30.0}),
    "another profile": ({"digest": "sha256:z", "budgets": (1.0, 2.0)}, {"budget_ms": 2.0}),
    "another split": ({"samples": range(30, 90)}, {}),
    "promise": ({}, {}, {"promises": PROMISES}),
    "several splits": ({}, {}, {"split_seeds": [1, 2]}),
    "limited": ({}, {}, {"costs": {"usd": {"limit": 0.2}}}),
}
"""Kind → how a run of it is written, what its explanation says of difficulty, further results."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a run of each kind; one was served live, and one of a controller was judged
    again, so that it has neither settings, decisions nor an explanation."""
    folder = tmp_path_factory.mktemp("kinds")
    for kind, (written, difficulty, *more) in KINDS.items():
        run = write_run(folder / kind, **written)
        about = {"unanswered": 0, "budget_ms": 20.0} | SEVERAL | difficulty
        results = read_json(run / "results.json") | dict(*more)
        write_results(run, results | {"explanation": {"difficulty": about}})
    write_run(folder / "mean", constraint="mean")
    write_selector_run(folder / "selector")
    table = builtin_profile()
    rows = {f"{part}_rows": rows for part, rows in table.split()._asdict().items()}
    with chdir(folder):
        save_checkpoint("c.pt", untrained(table, PolicyConfig(hidden=8, layers=1)), table, rows)
        launch("evaluate live=true checkpoint=c.pt stream.requests=10 json=live.json")
        for kind, results in (("live", "live.json"), ("again", "one seed/results.json")):
            Path(kind).mkdir()
            content = read_json(results)
            content.pop("explanation", None)
            write_results(Path(kind), content)
    return folder


@pytest.fixture(autouse=True)
def _in_their_folder(runs, monkeypatch):
    monkeypatch.chdir(runs)


@pytest.mark.parametrize(
    ("kind", "others"),
    [
        ("static only", {*KINDS, "live", "again"} - {"static only"}),
        ("live", {"several seeds", "several splits", "again"}),
    ],
)
def test_it_and_a_run_of_any_kind_have_a_page_whichever_comes_first(kind, others, tmp_path):
    for other in others:
        for pair in ((kind, other), (other, kind)):
            page = tmp_path / f"{' and '.join(pair)}.html"
            launch(["compare", *pair, f"html={page}"])
            assert page.stat().st_size > 500_000


def test_runs_of_different_agents_are_refused_in_a_line(capsys):
    for pair in itertools.permutations(("several seeds", "mean", "selector"), 2):
        line = refused(["compare", *pair], capsys)
        assert pair[0] in line
        assert pair[1] in line


def test_what_is_known_of_easy_and_hard_samples_is_drawn_wherever_the_run_stands():
    """Static is that of the first run that has groups, and each run keeps its own."""
    for names in itertools.permutations(("several seeds", "static only", "again")):
        names = (*names, "another budget")
        figure = figures_of(read_comparison(names))["Easy and hard samples"]
        assert "20.0 ms" in figure.caption
        assert "30.0 ms" in figure.caption
        points = points_of(*specifications(figure))
        of_static = [row for row in points if row["low"] is None]
        static = [(row["difficulty_ms"], row["policy_ms"]) for row in of_static]
        assert static == [(row["difficulty_ms"], row["static_ms"]) for row in GROUPS]
        drawn = {row["policy"] for row in points} - {of_static[0]["policy"]}
        assert drawn == {"several seeds", "another budget"}
