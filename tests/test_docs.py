"""The guides: their snippets run as they stand, and docs/metrics.md explains every name that small
runs log."""

import functools
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from commands import jobs_of
from helpers import few_demonstrations, small_beams, small_table
from PIL import Image
from tiny_models import tiny_model
from wandb_stub import offline_runs

import knobwise
from knobwise.__main__ import main
from knobwise.envs.demonstrations.beam_files import write_rl_data
from knobwise.envs.readers.exp_files import write_exp5_exp6
from knobwise.envs.readers.feature_files import write_features
from knobwise.envs.readers.long_table import long_frame, write_long_table
from knobwise.experiments.report.words import read_results
from knobwise.experiments.settings.options import WorkspaceRun
from knobwise.experiments.tracking.workspace import view_of

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "metrics.md").read_text()
LINE = re.compile(r"^\| (`[^`]+`(?:, `[^`]+`)*) \|", re.MULTILINE)
ROWS_TOO = ("controls", "votes", "by_dataset")
"""Lists whose rows have the columns of `rows`."""
SHORT = [
    *("optimiser.teacher_iterations=2", "optimiser.warmup_iterations=2", "optimiser.iterations=2"),
    *("optimiser.contexts=32", "optimiser.minibatch=16"),
    *("optimiser.evaluate_every=2", "policy.hidden=16", "seeds=[0,1]", "tracking=offline"),
]
TABLE = ["profile=table", "profile.path=measured.csv", "profile.features=features.npz"]
JOINT = ["profile=joint", "profile.paths=[one.safetensors,two.safetensors]"]
SELECTOR = [
    *(
        "selector.width=16",
        "selector.heads=2",
        "sft.epochs=1",
        "rce.epochs=1",
        "grpo.epochs=1",
        "tracking=offline",
    ),
    *("sft.queries=64", "jobs=1"),
]
SPLITS = ["split.repeats=2", "seeds=[0]"]
RUNS = {
    "guarded": ["policy=utility", "policy.members=2", *TABLE, *SHORT],
    "sampled": ["policy=independent", "loss=sampled", "baselines=false", *TABLE, *SHORT, *SPLITS],
    "ppo": ["experiment=ppo", "baselines=false", *TABLE, *SHORT, "seeds=[0]"],
    "data_sets": ["policy=utility", "policy.members=2", *JOINT, *SHORT, "seeds=[0]"],
    "mean": ["budget=mean", "policy=utility", "policy.members=2", *TABLE, *SHORT, "seeds=[0]"],
    "live": [
        *(
            "experiment=selector",
            *SELECTOR,
            "seeds=[0]",
            "judged_shots=[1,2]",
            "variants.hidden_live.epochs=1",
        ),
        *(f"{stage}.queries=1024" for stage in ("sft", "rce", "grpo")),
        *(
            f"variants.{name}=null"
            for name in ("grpo_recorded", "grpo_rounds", "shuffled_recorded", "shuffled_live")
        ),
        "variants.grpo_live.epochs=1",
        "variants={learned:{reward_model:{calls:20,epochs:1},epochs:1}}",
    ],
    "replay": [
        "experiment=selector_replay",
        "beams.path=beams.safetensors",
        *SELECTOR,
        "seeds=[0,1]",
    ]
    + [f"variants.{name}.epochs=1" for name in ("grpo_recorded", "shuffled_recorded")],
}


def write_measured(table, path, features):
    write_long_table(table, path)
    write_features(table, features)


def write_log(path, requests):
    """Write one wide CSV, with a sharpness that is missing in some samples, and requests."""
    n = 80
    samples = pl.DataFrame(
        {
            "sample_id": [f"q{i}" for i in range(n)],
            "kind": ["ocr", "chart"] * (n // 2),
            "prompt_tokens": [5 + 37 * i % 120 for i in range(n)],
            "sharpness": [i / n if i % 5 else None for i in range(n)],
        }
    )
    settings = pl.DataFrame({"mode": ["fast", "full"], "accuracy": [0, 1], "cost": [10.0, 40.0]})
    rows = samples.join(settings, how="cross")
    rows = rows.with_columns(latency_ms=pl.col("cost") * (1 + pl.col("prompt_tokens") / 200))
    rows.drop("cost").write_csv(path)
    samples.write_csv(requests)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Small runs of every kind, logged offline, by name."""
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("metrics")
        patch.chdir(home)
        few_demonstrations(patch, 240, 80)
        patch.delenv("WANDB_API_KEY", raising=False)
        patch.setenv("NETRC", str(home / "netrc"))
        write_measured(small_table(80), "measured.csv", "features.npz")
        small_table(80).save("one.safetensors")
        replace(small_table(80, seed=1), name="other").save("two.safetensors")
        small_beams(60)[0].save("beams.safetensors")
        for name, words in RUNS.items():
            assert main(["train", *words, f"name={name}"]) == 0, name
        yield {name: next((home / "runs").glob(f"*/{name}")) for name in RUNS}


def section(title):
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def names_in(text):
    """The names in the first column of tables; a line may be about several."""
    return [name for cell in LINE.findall(text) for name in re.findall("`([^`]+)`", cell)]


def explains_each(explained, logged):
    """Every logged name is explained by exactly one line, where `<…>` stands for any word, and
    every line is about a name that is logged."""
    lines = {
        name: re.compile("[^/]+".join(map(re.escape, re.split(r"<\w+>", name))))
        for name in explained
    }
    assert len(lines) == len(explained), "a name is explained twice"
    by_name = {
        name: [line for line, form in lines.items() if form.fullmatch(name)] for name in logged
    }
    assert {name for name, matching in by_name.items() if len(matching) != 1} == set()
    assert set(explained) == {line for matching in by_name.values() for line in matching}


def short(key):
    """The name that a table, a picture or a page was logged under; W&B notes several values of
    each."""
    return re.sub(r"^(Test/\w+?|Knobs/[^.]+?|Charts/[^/.]+|report)(_table)?\.\w+$", r"\1", key)


@functools.cache
def logged_to_wandb(run):
    """Names in history and summary of every W&B run of a folder, by stage and seed; seed None for
    the results."""
    names = {}
    for offline in offline_runs(run):
        keys = {short(key) for row in offline.history for key in row}
        assert len(keys) <= 40
        keys |= {short(key) for key in offline.summary}
        of_run = names.setdefault(
            (offline.config.get("stage", ""), offline.config.get("seed")), set()
        )
        of_run |= {key for key in keys if key[0] != "_" and key != "step"}
    return names


@pytest.fixture(scope="module")
def names(runs):
    """Every name that is logged to W&B: by runs that trained a controller or prices, by those of a
    selector's stages, as test scores of either, and with the results."""
    logged = {kind: set() for kind in ("controller", "selector", "scores", "results")}
    for run in runs.values():
        results = read_results(run)
        by_run = logged_to_wandb(run)
        stages = results.get("validation", [""])
        assert {
            ("", None),
            *((stage, seed) for stage in stages for seed in results["seeds"]),
        } <= set(by_run)
        for (stage, seed), keys in by_run.items():
            scores = {key for key in keys if seed is not None and key.startswith("Test/")}
            logged["results" if seed is None else "selector" if stage else "controller"] |= (
                keys - scores
            )
            logged["scores"] |= scores
    return logged


def test_every_logged_name_is_explained_and_no_other(names):
    training, results = (
        section("Training").split("For each stage of a selector"),
        section("Results").split("\nThe run with"),
    )
    parts = dict(
        zip(names, [*training, results[0], results[1].split("| policy |")[0]], strict=True)
    )
    explained = {kind: names_in(part) for kind, part in parts.items()}
    assert {"Train/Loss", "Val/Loss"} <= set(explained["controller"]) & set(explained["selector"])
    for kind in names:
        explains_each(explained[kind], names[kind])
    columns = {name.removeprefix("rows.") for name in names_in(section("results.json"))}
    for name in names["results"]:
        if name.startswith("Test/") and name.count("/") == 2:
            assert re.sub(r"_(low|high)$", "", name.split("/")[2]) in columns, name


def test_every_name_in_the_workspace_is_logged(runs, names):
    spec = view_of(WorkspaceRun())._to_model().spec.model_dump(by_alias=True, exclude_none=True)
    rows = {column for run in runs.values() for column in columns_of(read_results(run)["rows"])}
    wanted = set()
    for part in spec["section"]["panelBankConfig"]["sections"]:
        for panel in part["panels"]:
            config = panel["config"]
            wanted |= {*config.get("metrics", []), *config.get("mediaKeys", [])}
            axes = [
                config.get("yAxis", ""),
                *(column["accessor"] for column in config.get("columns", [])),
            ]
            axes += [config["xAxis"]] if config.get("xAxis") not in ("step", None) else []
            wanted |= {
                axis.removeprefix("summary:") for axis in axes if axis.startswith("summary:")
            }
            if panel["viewType"] == "Weave":
                (table,) = re.findall(r"Test/\w+", json.dumps(config))
                wanted.add(table)
            if panel["viewType"] == "Vega2":
                (table,) = re.findall(r'"((?:Test|Knobs)/\w+)_table"', json.dumps(config))
                wanted.add(table)
                fields = set(config["fieldSettings"].values())
                assert fields <= (
                    rows if table.startswith("Test/") else {"budget_ms", "share", "value"}
                )
    pinned = spec["section"]["runSets"][0]["runFeed"]["columnPinned"]
    wanted |= {
        column.removeprefix("summary:") for column in pinned if column.startswith("summary:")
    }
    assert len(wanted) > 30
    knobs = {
        f"Knobs/{knob}" for knob in WorkspaceRun().knobs
    }  # of the built-in profile, which is not used here
    assert wanted - knobs - set().union(*names.values()) == set()


def test_metrics_csv_holds_the_training_names(runs, names):
    columns = {
        name for run in runs.values() for name in pl.read_csv(run / "metrics.csv", n_rows=0).columns
    }
    of_stages = {name for name in columns if name.count("/") == 2}
    assert {re.sub("/.+/", "/", name) for name in of_stages} == names["selector"]
    assert columns - of_stages == {"seed", "step", *names["controller"]}


def columns_of(value):
    """Names of the columns of a list of rows, also where there is such a list for each seed."""
    if isinstance(value, list):
        return {
            name
            for item in value
            for name in (item if isinstance(item, dict) else columns_of(item))
        }
    return set()


def test_every_policy_and_every_name_of_results_json_is_explained_and_no_other(
    runs,
):
    results = [read_results(run) for run in runs.values()]
    policies = {
        row["policy"] for result in results for row in result["rows"] + result.get("controls", [])
    }
    variants = {name for result in results for name in result.get("variants", [])}
    explains_each(names_in(section("Results").split("| policy |")[1]), policies - variants)
    names = set()
    of_rows = {column for result in results for column in columns_of(result["rows"])}
    for name, value in [item for result in results for item in result.items()]:
        columns = set(value) if name == "profile" else columns_of(value)
        columns -= of_rows if name in ROWS_TOO else set()
        names |= {f"{name}.{column}" for column in columns} | (
            {name} if name != "profile" else set()
        )
    explains_each(names_in(section("results.json")), names)


def test_every_column_of_decisions_is_explained_and_no_other(runs):
    columns = {
        column
        for run in runs.values()
        for column in pl.read_parquet_schema(run / "decisions.parquet")
    }
    explains_each(names_in(section("decisions.parquet")), columns)


def test_the_run_of_the_results_holds_the_validation_score(runs):
    """Settings are chosen by it."""
    scores = {"guarded": "Utility", "sampled": "Utility", "mean": "Reward_Mean"}
    scores |= {"live": "hidden_live/Accuracy_Mean", "replay": "grpo_recorded/Accuracy_Mean"}
    for name, metric in scores.items():
        assert f"Val/{metric}" in logged_to_wandb(runs[name])["", None]


# pages of figures and of words, without anything to type
RESULTS = {"results.md", "speed.md"}
GUIDES = [
    "README.md",
    *(f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("*.md")) if p.name not in RESULTS),
]
SHORTER = [
    *("optimiser.teacher_iterations=4", "optimiser.warmup_iterations=4", "optimiser.iterations=4"),
    *("optimiser.contexts=32", "optimiser.evaluate_every=4", "tracking=disabled", "seeds=[0]"),
    *("policy.hidden=16", "policy.members=2", "policy.experts=[]", "baselines=false"),
]
SHORTER_SELECTOR = [
    *(
        f"{stage}.{short}"
        for stage in ("sft", "rce", "grpo")
        for short in ("epochs=1", "queries=1024")
    ),
    *(
        "judged_shots=[2]",
        "tracking=disabled",
        "seeds=[0]",
        "selector.width=16",
        "selector.heads=2",
    ),
    *(
        "variants.grpo_rounds.rounds=2",
        "variants.grpo_rounds.epochs=1",
        "variants.grpo_live.epochs=1",
    ),
    *(f"variants.{name}=null" for name in ("shuffled_live", "hidden_live")),
]


def blocks(guide, language):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / guide).read_text(), re.DOTALL)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder with a profile in every form that the guides speak of."""
    monkeypatch.chdir(tmp_path)
    few_demonstrations(monkeypatch, 240, 80)
    write_exp5_exp6(long_frame(small_table(80)), "exp5", "exp6", "text_vqa")
    write_measured(small_table(80), "measured.csv", "features.npz")
    write_measured(small_table(80, seed=1), "other.csv", "other.npz")
    write_log("log.csv", "requests.csv")
    # two samples of each user
    number = pl.col("sample_id").str.slice(1).cast(pl.Int64)
    pl.read_csv("log.csv").with_columns(user=number // 2).write_csv("visits.csv")
    beams, _ = small_beams(30)
    write_rl_data(beams, "beams.json")
    np.savez("embeddings.npz", embeddings=beams.candidates.numpy())
    for part in tiny_model("llava_next"):
        part.save_pretrained("model")
    Image.effect_noise((64, 40), 50).save("image.png")
    questions = [
        {"id": n, "image": "image.png", "question": f"What {n}?", "answers": ["a"]}
        for n in range(2)
    ]
    Path("questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    Path("examples").symlink_to(ROOT / "examples")
    return tmp_path


def shortened(words):
    if words[0] == "evaluate" and "live=true" in words:
        return [*words, "stream.requests=6"]
    if words[0] == "profile" and "model=examples.own_model:DigitForest" in words:
        return [*words, "knobs.samples=20"]
    if words[0] != "train" or any(word.startswith("-") for word in words):
        return words
    if any(word.startswith("experiment=selector") for word in words):
        return words + [
            word
            for word in SHORTER_SELECTOR
            if "experiment=selector" in words or "variants" not in word
        ]
    # other settings that a guide is about stay
    words = [word for word in words if not word.startswith(("seeds=", "tracking="))]
    stated = {word.partition("=")[0] for word in words}
    return words + [word for word in SHORTER if word.partition("=")[0] not in stated]


@pytest.mark.parametrize("guide", GUIDES)
def test_every_command_of_a_guide_and_then_every_snippet(guide, folder, monkeypatch, capsys):
    lines = [
        line
        for block in blocks(guide, "bash")
        for line in block.splitlines()
        if line.startswith("knobwise ")
    ]
    assert lines
    swept = []
    for line in lines:
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
            words += ["profile=table", "profile.path=measured.csv"]
        assert main(shortened(words)) == 0, line
    shorter = dict(
        word.removeprefix("optimiser.").split("=")
        for word in SHORTER
        if word.startswith("optimiser.")
    )
    small = {"policy.hidden": 16, "policy.members": 2, "policy.experts": []}
    monkeypatch.setattr(
        knobwise, "fit", functools.partial(knobwise.fit, optimiser=shorter, **small)
    )
    capsys.readouterr()
    names = {}
    for snippet in blocks(guide, "python"):
        exec(compile(snippet, guide, "exec"), names)
    assert capsys.readouterr().out or not blocks(guide, "python")
