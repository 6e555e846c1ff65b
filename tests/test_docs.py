"""The guides: their snippets run as they stand, and docs/metrics.md explains every name that small
runs log."""

import functools
import itertools
import os
import re
import shlex
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from types import UnionType
from typing import get_args, get_origin, get_type_hints, is_typeddict

import numpy as np
import polars as pl
import pytest
from commands import jobs_of, launch, words_of
from helpers import few_demonstrations, small_beams, small_table
from PIL import Image
from tiny_models import tiny_model
from wandb_stub import forget_wandb, offline_runs

import knobwise
from campaign.clients.__main__ import CLIENTS
from knobwise.__main__ import main
from knobwise.agents.calibration.guard import GuardRow
from knobwise.envs.demonstrations.beam_files import write_rl_data
from knobwise.envs.readers.exp_files import write_exp5_exp6
from knobwise.envs.readers.feature_files import write_features
from knobwise.envs.readers.long_table import long_frame, write_long_table
from knobwise.experiments.command_line.compose import read_settings
from knobwise.experiments.evidence.results import read_results
from knobwise.experiments.evidence.schema import DatasetRow, PolicyRow, RunResults
from knobwise.experiments.settings.comparison_options import WorkspaceRun
from knobwise.experiments.settings.unread import unread_options
from knobwise.experiments.tracking.tracker import THROUGHPUT
from knobwise.experiments.tracking.workspace import view_of
from knobwise.testbeds.simulated_endpoint import SimulatedEndpoint
from knobwise.testbeds.simulated_routing import evaluations

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/metrics.md").read_text()
LINE = re.compile(r"^\| (`[^`]+`(?:, `[^`]+`)*) \|", re.MULTILINE)
ROWS_TOO = ("controls", "votes", "by_dataset")
"""Lists whose rows have the columns of `rows`."""
UNTAUGHT = words_of("""
    optimiser.pretrain_iterations=2 optimiser.iterations=2
    optimiser.contexts=32 optimiser.minibatch=16 optimiser.evaluate_every=2 policy.hidden=16
    policy.fold_networks=2 seeds=[0] tracking=offline
""")
SHORT = words_of("optimiser.teacher_iterations=2", UNTAUGHT)
LIVE = """
    experiment=selector seeds=[0] judged_shots=[1,2] variants.hidden_live.epochs=1
    sft.queries=1024 rce.queries=1024 grpo.queries=1024 variants.grpo_recorded=null
    variants.grpo_rounds=null variants.shuffled_recorded=null variants.shuffled_live=null
    variants.grpo_live.epochs=1 variants={learned:{reward_model:{calls:20,epochs:1},epochs:1}}
"""


REPLAY = """
    experiment=selector_replay beams.path=beams.safetensors seeds=[0,1]
    variants.grpo_recorded.epochs=1 variants.shuffled_recorded.epochs=1
"""


ALONE = "policy=independent policy.fold_networks=1 loss=sampled baselines=false split.repeats=2"


JOINT = "profile=joint profile.paths=[one.safetensors,two.safetensors]"
MEASURED = words_of("profile=table profile.path=measured.csv profile.features=features.npz")
PRICED = words_of("profile.costs=[usd] budget.limits={usd:0.01}")


SELECTOR = words_of("""
    selector.width=16 selector.heads=2 sft.epochs=1 rce.epochs=1 grpo.epochs=1 tracking=offline
    sft.queries=64 jobs=1
""")
RUNS = {
    "guarded": words_of(SHORT, MEASURED, PRICED, "policy=utility seeds=[0,1]"),
    "sampled": words_of(UNTAUGHT, MEASURED, ALONE),
    "ppo": words_of(UNTAUGHT, MEASURED, "experiment=ppo policy.fold_networks=1 baselines=false"),
    "data_sets": words_of(SHORT, JOINT, "policy=utility"),
    "mean": words_of(SHORT, MEASURED, "policy=utility budget=mean"),
    "promised": words_of(SHORT, MEASURED, "policy=utility policy.promise=0.5 split.repeats=2"),
    "live": words_of(SELECTOR, LIVE),
    "replay": words_of(SELECTOR, REPLAY),
}


def write_log(path, requests):
    """Write one wide CSV, with a sharpness that is missing in some samples, and requests."""
    samples = pl.DataFrame(
        {
            "sample_id": [f"q{i}" for i in range(80)],
            "kind": ["ocr", "chart"] * 40,
            "prompt_tokens": [5 + 37 * i % 120 for i in range(80)],
            "sharpness": [i / 80 if i % 5 else None for i in range(80)],
        }
    )
    settings = pl.DataFrame({"mode": ["fast", "full"], "accuracy": [0, 1], "cost": [10.0, 40.0]})
    rows = samples.join(settings, how="cross")
    rows = rows.with_columns(latency_ms=pl.col("cost") * (1 + pl.col("prompt_tokens") / 200))
    rows.drop("cost").write_csv(path)
    samples.write_csv(requests)


def write_prompts(path):
    """Write a table of a text and two settings for each sample."""
    kinds = ("What is {} plus {}?", "Prove that {} divides {} to the power of six.")
    rows = []
    for i in range(80):
        prompt = kinds[i % 2].format(i, 7 * i % 90)
        for model, factor in (("small", 1), ("large", 4)):
            right = int(model == "large" or not i % 2)
            rows.append((f"q{i}", prompt, model, right, factor * (200 + 3 * i)))
    names = ["sample_id", "prompt", "model", "accuracy", "latency_ms"]
    pl.DataFrame(rows, names, orient="row").write_csv(path)


def write_scores_and_times():
    """Write a table of scores, and one of times for the same ids and models."""
    rows = pl.DataFrame({"doc_id": range(60)}).join(
        pl.DataFrame({"model": ["small", "large"], "seconds": [0.2, 0.9]}), how="cross"
    )
    right = (pl.col("model") == "large") | (pl.col("doc_id") % 3 > 0)
    rows.select("doc_id", "model", score=right.cast(int)).write_ndjson("scores.jsonl")
    rows.with_columns(pl.col("seconds") + pl.col("doc_id") / 100).write_csv("times.csv")


def write_wide_and_arff():
    """Write a table with a column for each configuration, and a scenario of ASlib."""
    small = [i % 3 > 0 for i in range(60)]
    ids = {"prompt_id": [f"q{i}" for i in range(60)]}
    wide = pl.DataFrame({**ids, "small": small, "large": True}).cast({"small": int, "large": int})
    wide.with_columns(large_ms=50 + pl.int_range(60)).write_csv("answers.csv")
    runs = ["instance_id string", "repetition numeric", "algorithm string", "runtime numeric"]
    runs = [f"@attribute {name}" for name in (*runs, "runstatus {ok,timeout}")]
    values = [*runs[:2], "@attribute size numeric", "@data"]
    runs.append("@data")
    for i in range(60):
        runs.append(f"a{i},1,fast,{'100,timeout' if i % 3 else f'{1 + i / 60},ok'}")
        runs.append(f"a{i},1,slow,{40 + i % 7},ok")
        values.append(f"a{i},1,{'?' if i % 11 == 5 else i % 3}")
    Path("algorithm_runs.arff").write_text("\n".join(runs))
    Path("feature_values.arff").write_text("\n".join(values))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Small runs of every kind, logged offline, by name."""
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("metrics")
        patch.chdir(home)
        few_demonstrations(patch, 240, 80)
        forget_wandb(patch, home)
        table = small_table(80)
        write_long_table(replace(table, costs={"usd": 0.001 * table.latency_ms}), "measured.csv")
        write_features(table, "features.npz")
        table.save("one.safetensors")
        small_table(80, seed=1, name="other").save("two.safetensors")
        small_beams(60)[0].save("beams.safetensors")
        for name, words in RUNS.items():
            launch("train", words, f"name={name}")
        yield {name: next((home / "runs").glob(f"*/{name}")) for name in RUNS}


def section(title):
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def names_in(text):
    """The names in the first column of tables; a line may be about several."""
    return [name for cell in LINE.findall(text) for name in re.findall("`([^`]+)`", cell)]


def explains_each(explained, logged):
    """Check that every logged name is explained by exactly one line, where `<…>` stands for any
    word, and that every line is about a name that is logged."""
    used = set()
    for name in logged:
        (line,) = (line for line in explained if re.fullmatch(pattern_of(line), name))
        used.add(line)
    assert sorted(used) == sorted(explained)


def short(key):
    """The name that a table, a picture or a page was logged under; W&B notes several values of
    each."""
    named = r"^(Test/\w+?|Knobs/[^.]+?|Charts/[^/.]+|report|Val/Advantages)(_table)?\.\w+$"
    return re.sub(named, r"\1", key)


def pattern_of(line):
    """The regular expression for the names that a line explains."""
    return "[^/]+".join(map(re.escape, re.split(r"<\w+>", line)))


@functools.cache
def logged_to_wandb(run):
    """Names in history and summary of every W&B run of a folder, by stage and seed; seed None for
    the results."""
    names = {}
    for offline in offline_runs(run):
        keys = set(map(short, set().union(*offline.history)))
        assert len(keys) <= 40
        keys |= set(map(short, offline.summary))
        keys = {key for key in keys if key[0] != "_" and key != "step"}
        names.setdefault(
            (offline.config.get("stage", ""), offline.config.get("seed")), set()
        ).update(keys)
    return names


@pytest.fixture(scope="module")
def names(runs):
    """Every name that is logged to W&B: by runs that trained a controller or prices, by those of a
    selector's stages, as test scores of either, and with the results."""
    logged = {"controller": set(), "selector": set(), "scores": set(), "results": set()}
    for run in runs.values():
        results = read_results(run)
        by_run = logged_to_wandb(run)
        trained = itertools.product(results.get("validation", [""]), results["seeds"])
        assert {("", None), *trained} <= by_run.keys()
        for (stage, seed), keys in by_run.items():
            if seed is None:
                logged["results"] |= keys
                continue
            scores = {key for key in keys if key.startswith("Test/")}
            logged["scores"] |= scores
            logged["selector" if stage else "controller"] |= keys - scores
    return logged


@pytest.mark.campaign
def test_every_logged_name_is_explained_and_no_other(names):
    controller, selector = section("Training").split("For each stage of a selector")
    scores, results = section("Results").split("\nThe run with")
    parts = {
        "controller": controller,
        "selector": selector,
        "scores": scores,
        "results": results.split("| policy |")[0],
    }
    explained = {kind: names_in(part) for kind, part in parts.items()}
    assert {"Train/Loss", "Val/Loss"} <= set(explained["controller"]) & set(explained["selector"])
    # a selector's offline runs are logged again at the end, without the speed
    names["selector"].add(THROUGHPUT)
    for kind in names:
        explains_each(explained[kind], names[kind])
    columns = {name.removeprefix("rows.") for name in names_in(section("results.json"))}
    for name in names["results"]:
        if name.startswith("Test/") and name.count("/") == 2:
            column = re.sub(r"_(low|high)$", "", name.split("/")[2])
            assert any(re.fullmatch(pattern_of(line), column) for line in columns), name


@pytest.mark.campaign
def test_the_workspace_shows_every_logged_curve_and_no_name_that_is_not_logged(runs, names):
    view = asdict(view_of(WorkspaceRun()))
    wanted = set(re.findall(r"'([A-Z]\w+/[^']+?)(?:_table)?'", repr(view)))
    assert len(wanted) > 30
    # of the built-in profile, and of beams without right answers, which are not used here
    others = {f"Knobs/{knob}" for knob in WorkspaceRun().knobs} | {"Val/Beam_Score_Mean"}
    assert wanted - others <= set().union(*names.values())
    assert names["controller"] | names["selector"] <= wanted
    rows = set().union(*(columns_of(read_results(run)["rows"]) for run in runs.values()))
    for panel in [panel for section in view["sections"] for panel in section["panels"]]:
        if "chart_fields" in panel:
            of_test = "'Test/" in repr(panel)
            columns = rows if of_test else {"budget_ms", "share", "value"}
            assert set(panel["chart_fields"].values()) <= columns


@pytest.mark.campaign
def test_metrics_csv_holds_the_training_names(runs, names):
    headers = [pl.read_csv(run / "metrics.csv", n_rows=0).columns for run in runs.values()]
    columns = set().union(*headers)
    of_stages = {name for name in columns if name.count("/") == 2}
    elsewhere = {THROUGHPUT, "Val/Advantages", "Train/step", "Val/step"}
    assert {re.sub("/.+/", "/", name) for name in of_stages} == names["selector"] - elsewhere
    assert columns - of_stages == {"seed", "step", *names["controller"]} - elsewhere


def columns_of(value):
    """Names of the columns of a list of rows, also where there is such a list for each seed."""
    columns = set()
    if isinstance(value, list):
        for item in value:
            columns |= item.keys() if isinstance(item, dict) else columns_of(item)
    return columns


@pytest.mark.campaign
def test_every_policy_and_every_name_of_results_json_is_explained_and_no_other(runs):
    names, policies, variants = set(), set(), set()
    results = [read_results(run) for run in runs.values()]
    of_rows = set().union(*(columns_of(result["rows"]) for result in results))
    for result in results:
        policies |= {row["policy"] for row in [*result["rows"], *result.get("controls", [])]}
        variants |= set(result.get("variants", []))
        names |= result.keys() - {"profile"}
        for name, value in result.items():
            columns = value.keys() if name == "profile" else columns_of(value)
            columns = columns - of_rows if name in ROWS_TOO else columns
            names |= {f"{name}.{column}" for column in columns}
    explains_each(names_in(section("Results").split("| policy |")[1]), policies - variants)
    explains_each(names_in(section("results.json")), names)


NAMES = {"GuardRow": GuardRow}
"""A type that is imported for type checkers alone."""


def check_type(value, hint, where):
    """Check that a value read from JSON is of this type; all keys of a `TypedDict` are known."""
    if hint is float:
        hint = int | float
    if is_typeddict(hint):
        hints = get_type_hints(hint, localns=NAMES)
        if hint in (PolicyRow, DatasetRow):
            # named after columns of the profile
            costs = [key for key in value if re.fullmatch(r"cost_\w+_(mean|over)", key)]
            hints |= dict.fromkeys(costs, float | None)
        assert value.keys() <= hints.keys(), where
        for key, part in value.items():
            check_type(part, hints[key], f"{where}.{key}")
    elif get_origin(hint) is list:
        for part in value:
            check_type(part, get_args(hint)[0], where)
    elif get_origin(hint) is tuple:
        for part, kind in zip(value, get_args(hint), strict=True):
            check_type(part, kind, where)
    elif get_origin(hint) is dict:
        for key, part in value.items():
            check_type(part, get_args(hint)[1], f"{where}[{key}]")
    elif get_origin(hint) is UnionType and value is not None:
        kinds = [kind for kind in get_args(hint) if kind is not type(None)]
        if len(kinds) == 1:
            check_type(value, kinds[0], where)
        else:
            assert isinstance(value, tuple(kinds)), where
    elif hint is not object:
        assert isinstance(value, hint), where


@pytest.mark.campaign
def test_results_json_is_of_its_type(runs):
    for kind, run in runs.items():
        check_type(read_results(run), RunResults, kind)


@pytest.mark.campaign
def test_every_column_of_decisions_is_explained_and_no_other(runs):
    columns = [pl.read_parquet_schema(run / "decisions.parquet") for run in runs.values()]
    explains_each(names_in(section("decisions.parquet")), set().union(*columns))


@pytest.mark.campaign
def test_the_run_of_the_results_holds_the_validation_score(runs):
    """Settings are chosen by it."""
    scores = {"guarded": "Utility", "sampled": "Utility", "mean": "Reward_Mean"}
    scores |= {"live": "hidden_live/Accuracy_Mean", "replay": "grpo_recorded/Accuracy_Mean"}
    for name, metric in scores.items():
        assert f"Val/{metric}" in logged_to_wandb(runs[name])["", None]


# pages of figures and of words, without anything to type
RESULTS = {"results.md", "speed.md", "compatibility.md"}
GUIDES = [
    "README.md",
    *(f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("*.md")) if p.name not in RESULTS),
]
SHORTER = words_of("""
    optimiser.teacher_iterations=4 optimiser.pretrain_iterations=4 optimiser.iterations=4
    optimiser.contexts=32 optimiser.evaluate_every=4 tracking=disabled seeds=[0]
    policy.hidden=16 policy.fold_networks=2 policy.experts=[] baselines=false
""")
SHORTER_SELECTOR = words_of("""
    sft.epochs=1 sft.queries=1024 rce.epochs=1 rce.queries=1024 grpo.epochs=1 grpo.queries=1024
    judged_shots=[2] tracking=disabled seeds=[0] selector.width=16 selector.heads=2
""")


SHORTER_VARIANTS = words_of("""
    variants.grpo_rounds.rounds=2 variants.grpo_rounds.epochs=1 variants.grpo_live.epochs=1
    variants.shuffled_live=null variants.hidden_live=null
""")


SHOWS = re.compile(
    r"findings/(?P<script>\w+)\.sh|tests/(?P<file>[\w/]+)\.py::(?P<test>test_\w+)"
    r"|python -m campaign\.(?P<module>[\w.]+)(?P<clients>( \w+)*)"
)
"""What shows a row of docs/compatibility.md."""


def test_what_shows_each_behaviour_of_another_tool_exists_in_the_version_that_is_named():
    page = (ROOT / "docs/compatibility.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    rows = [row for row in rows if row[0] != "tool, version"]
    assert len(rows) > 30
    assert all(os.access(script, os.X_OK) for script in (ROOT / "findings").glob("*.sh"))
    pins = [ROOT / "constraints.txt", ROOT / "tests/data/README.md"]
    pins += [path for path in (ROOT / "campaign").rglob("requirements*/*") if path.is_file()]
    pins += [*(ROOT / "campaign").rglob("requirements.txt"), *(ROOT / "findings").glob("*.sh")]
    pinned = "\n".join(path.read_text() for path in pins)
    for tool, _, _, shown in rows:
        for version in re.findall(r"\d+(?:\.\d+)+", tool):
            assert re.search(rf"(?<![\d.]){re.escape(version)}(?![\d.])", pinned), tool
        for words in re.findall("`([^`]+)`", shown):
            match = SHOWS.fullmatch(words)
            assert match, words
            if match["script"]:
                assert (ROOT / f"findings/{match['script']}.sh").exists(), words
            elif match["test"]:
                source = (ROOT / f"tests/{match['file']}.py").read_text()
                assert f"\ndef {match['test']}(" in source, words
            else:
                assert find_spec(f"campaign.{match['module']}"), words
                assert set(match["clients"].split()) <= CLIENTS.keys(), words


@pytest.fixture
def folder(home, monkeypatch):
    """An empty folder with a profile in every form that the guides speak of."""
    few_demonstrations(monkeypatch, 240, 80)
    write_exp5_exp6(long_frame(small_table(80)), "exp5", "exp6", "text_vqa")
    for seed, path, features in ((0, "measured", "features"), (1, "other", "other")):
        write_long_table(small_table(80, seed), f"{path}.csv")
        write_features(small_table(80, seed), f"{features}.npz")
    write_log("log.csv", "requests.csv")
    write_wide_and_arff()
    write_scores_and_times()
    evaluations(60).write_csv("evaluations.csv")
    write_prompts("prompts.csv")
    # two samples of each user
    number = pl.col("sample_id").str.slice(1).cast(pl.Int64)
    log = pl.read_csv("log.csv")
    log.with_columns(user=number // 2).write_csv("visits.csv")
    log.with_columns(usd=pl.col("latency_ms") / 1e5).write_csv("priced.csv")
    beams, _ = small_beams(30)
    write_rl_data(beams, "beams.json")
    np.savez("embeddings.npz", embeddings=beams.candidates.numpy())
    for part in tiny_model("llava_next"):
        part.save_pretrained("model")
    Image.effect_noise((64, 40), 50).save("image.png")
    questions = {"id": [0, 1], "question": ["What 0?", "What 1?"], "answers": [["a"], ["a"]]}
    pl.DataFrame(questions | {"image": "image.png"}).write_ndjson("questions.jsonl")
    Path("prices.yaml").write_text("small: {input: 1, output: 1}\nlarge: {input: 1, output: 1}")
    Path("examples").symlink_to(ROOT / "examples")


@pytest.fixture(scope="module")
def endpoint():
    """What the guides say is at port 8000."""
    with SimulatedEndpoint(delay=0) as server:
        yield server.url


def shortened(words):
    if words[0] == "evaluate" and "live=true" in words:
        return [*words, "stream.requests=6"]
    if words[0] == "profile" and "model=examples.own_model:DigitForest" in words:
        return [*words, "knobs.samples=20"]
    if words[0] != "train" or any(word.startswith("-") for word in words):
        return words
    if "experiment=selector" in words:
        return words + SHORTER_SELECTOR + SHORTER_VARIANTS
    if any(word.startswith("experiment=selector") for word in words):
        return words + SHORTER_SELECTOR
    # other settings that a guide is about stay
    words = [word for word in words if not word.startswith(("seeds=", "tracking="))]
    stated = {word.partition("=")[0] for word in words}
    # no word that nothing reads
    stated |= {*unread_options(read_settings("train", words[1:]))}
    return words + [word for word in SHORTER if word.partition("=")[0] not in stated]


# those of the README on each run, of all other pages by `make campaign`
@pytest.mark.parametrize(
    "guide",
    [pytest.param(guide, marks=pytest.mark.campaign if "/" in guide else ()) for guide in GUIDES],
)
def test_every_command_of_a_guide_and_then_every_snippet(
    guide, folder, endpoint, monkeypatch, capsys
):
    blocks = {"bash": [], "python": []}
    text = (ROOT / guide).read_text()
    for language, block in re.findall(r"```(bash|python)\n(.*?)```", text, re.DOTALL):
        # a backslash continues a line
        blocks[language].append(block.replace("\\\n", " ") if language == "bash" else block)
    lines = re.findall(r"^knobwise .*", "".join(blocks["bash"]), re.MULTILINE)
    assert lines
    swept = []
    for line in lines:
        line = line.replace("http://127.0.0.1:8000/v1", endpoint)
        words = shlex.split(line, comments=True)[1:]
        if "-m" in words:
            # every combination trained would take minutes: that all of them are understood is
            # enough, once for all launchers
            sweep = [word for word in words[1:] if not word.startswith(("-m", "hydra", "+hydra"))]
            assert sweep in swept or jobs_of(sweep)
            swept.append(sweep)
            continue
        # README commands on the built-in profile stand in for themselves elsewhere; here a small
        # table is enough
        has_data = any(word.startswith(("profile=", "experiment=selector")) for word in words)
        if words[0] == "train" and not has_data and "--help" not in words:
            words += MEASURED[:2]
        if "learning_curve=true" in words:
            # of the built-in profile it takes minutes
            words = ["inspect", *MEASURED, "learning_curve=true"]
        assert main(shortened(words)) == 0, line
    small = {"policy.hidden": 16, "policy.fold_networks": 2, "policy.experts": []}
    iterations = {"teacher_iterations": 4, "pretrain_iterations": 4, "iterations": 4}
    optimiser = iterations | {"contexts": 32, "evaluate_every": 4}
    short_fit = functools.partial(knobwise.fit, optimiser=optimiser, **small)
    monkeypatch.setattr(knobwise, "fit", short_fit)
    capsys.readouterr()
    names = {}
    for snippet in blocks["python"]:
        exec(compile(snippet, guide, "exec"), names)
    assert capsys.readouterr().out or not blocks["python"]
