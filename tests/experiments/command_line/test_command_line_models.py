"""End to end, through the command line: exported files, live runs, real models, several data
sets."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from commands import OPTIMISER, Capture, Command, Patch, refused, stop_when
from helpers import arrays, small_table
from PIL import Image
from tiny_models import tiny_model

import knobwise
from knobwise.__main__ import main
from knobwise.agents.checkpoint import load_checkpoint
from knobwise.envs.readers.long_table import read_long_table, write_features, write_long_table
from knobwise.experiments.results.decisions import read_decisions

QUICK = [
    *OPTIMISER,
    "optimiser.iterations=4",
    "policy=utility",
    "policy.members=2",
    "seeds=[0]",
    "budgets_ms=[8,12]",
]
LIVE = ["evaluate", "live=true", "stream.requests=25", "stream.calibration=10", "stream.warm_up=2"]
KNOBS = [
    "knobs.top_k=[1,2]",
    "knobs.num_active_blocks=[2,4]",
    "knobs.max_new_tokens=2",
    "device=cpu",
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three long tables and their features, a tiny model and questions for it, and
    what is no good."""
    folder = tmp_path_factory.mktemp("files")
    for seed, name in enumerate(("first", "second", "third")):
        table = small_table(60, seed)
        write_long_table(table, folder / f"{name}.parquet")
        write_features(table, folder / f"{name}.npz")
    first = pl.read_parquet(folder / "first.parquet")
    first.rename({"top_k": "experts"}).write_parquet(folder / "experts.parquet")
    first.filter(pl.col("max_crops") < 10).write_parquet(folder / "fewer.parquet")
    for part in tiny_model("llava_next"):
        part.save_pretrained(folder / "model")
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 256, (64, 96, 3), dtype=np.uint8)).save(folder / "image.png")
    row = {"image": "image.png", "question": "What?", "answers": ["a", "a", "b"]}
    rows = [{"id": f"q{n}", **row, "question": f"What {n}?"} for n in range(4)]
    (folder / "questions.jsonl").write_text(
        "".join(json.dumps(question) + "\n" for question in rows)
    )
    (folder / "importance.json").write_text('{"first": 0.1}')
    (folder / "occupied").write_text("a file where a folder is wanted")
    return folder


@pytest.fixture(scope="module")
def train(files: Path) -> Callable[..., Path]:
    """Trains once for all tests that ask for the same; gives the folder of the run."""

    def trained(name: str, *words: str) -> Path:
        run = files / "runs" / "controller" / name
        if not run.exists():
            assert main(["train", *QUICK, *words, f"runs={files / 'runs'}", f"name={name}"]) == 0
        return run

    return trained


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: Patch, files: Path) -> Path:
    """An empty folder, where paths that begin with `files/` are those of `files`."""
    monkeypatch.chdir(tmp_path)
    Path("files").symlink_to(files)
    return tmp_path


FIRST = ["profile=table", "profile.path=files/first.parquet", "profile.features=files/first.npz"]
SECOND = ["profile=table", "profile.path=files/second.parquet", "profile.features=files/second.npz"]
JOINT = ["profile=joint", "profile.paths=[files/first.parquet,files/second.parquet]"]
JOINT += ["profile.features=[files/first.npz,files/second.npz]"]
SIMULATED = ["profile=simulated", "profile.samples=40", "profile.grid=27", "profile.image_width=6"]
SIMULATED += ["profile.language_width=6", "budgets_ms=[250]"]
BUILTIN = ["split.train=0.06", "split.validation=0.04", "budgets_ms=[2.0]"]
BEST = "checkpoints/best.pt"


TRAINED = {"FIRST": [*FIRST, "policy.experts=[ridge]", "own_cost=false"], "BUILTIN": BUILTIN}
"""What the runs are trained with whose best checkpoint other commands name."""


def best_of(name: str, train: Callable[..., Path]) -> str:
    return f"checkpoint={train(name, *TRAINED[name]) / BEST}"


# -- export ----------------------------------------------------------------------------------------

WITHOUT_TORCH = """
import json, sys
sys.modules["torch"] = None  # an import of it fails
import numpy as np
from policy import NumpyController
controller = NumpyController.load("controller.npz")
asked = np.load("asked.npz")
features = {name: asked[name] for name in controller.feature_sizes}
print(json.dumps([controller.configuration(int(i)) for i in controller.choose(features, asked["budgets_ms"])]))
"""


def decided(folder: Path, requests: dict[str, Any]) -> list[dict[str, Any]]:
    """What the files in a folder decide without torch: feature blocks and `budgets_ms` → knob
    values."""
    np.savez(folder / "asked.npz", **requests)
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    result: list[dict[str, Any]] = json.loads(ran.stdout)
    return result


def test_a_run_leaves_files_that_decide_as_what_it_deploys_was_judged(
    folder: Path, train: Callable[..., Path]
) -> None:
    run, table = (
        train("FIRST", *TRAINED["FIRST"]),
        read_long_table("files/first.parquet", features="files/first.npz"),
    )
    decisions = read_decisions(run).filter(pl.col("policy") == "controller")
    assert set(decisions["seed"]) == {0}
    rows = [table.sample_ids.index(sample) for sample in decisions["sample_id"]]
    requests = {name: block[rows].numpy() for name, block in table.features.items()}
    alone = decided(run, requests | {"budgets_ms": decisions["place"].to_numpy()})
    labels = {table.label(c): table.configuration(c) for c in range(table.num_configurations)}
    assert alone == [labels[choice] for choice in decisions["choice"]]
    means = {
        row["policy"]: row for row in json.loads((run / "results.json").read_text())["rows"][::3]
    }
    assert means["controller"]["utility"] == pytest.approx(decisions["score"].mean())
    assert means["controller"]["decision_us_p50"] > 0
    assert means["teacher"]["decision_us_p50"] is None
    assert "The controller learned from a teacher" in (run / "report.html").read_text()
    # the same is exported and loaded by default
    assert main(["export", *FIRST, f"checkpoint={run}"]) == 0
    assert (
        decided(Path("exported"), requests | {"budgets_ms": decisions["place"].to_numpy()}) == alone
    )
    policy = knobwise.load(run)
    assert policy.agent.teacher is not None
    assert len(policy.agent.teacher.experts) == 1
    assert policy.decide(table.features, 10.0, explain=True)[0].expected[0].keys() == {
        *("configuration", "probability", "accuracy", "latency_ms", "on_time", "utility")
    }


def test_an_exported_file_decides_alone_as_the_checkpoint(
    folder: Path, train: Callable[..., Path], capsys: Capture
) -> None:
    checkpoint, out = best_of("FIRST", train), Path("light")
    table = read_long_table("files/first.parquet", features="files/first.npz")
    budgets_ms = np.linspace(5, 20, table.num_samples)
    inputs = arrays(table) | {"budgets_ms": budgets_ms}
    chosen = load_checkpoint(checkpoint.removeprefix("checkpoint=")).controller.choose(
        arrays(table), budgets_ms
    )
    for profile, kept in (
        ([], set()),
        (FIRST, {"notes.txt"}),
    ):  # the second time there is a file of somebody else
        assert (
            main(["export", *profile, checkpoint, "out=light"]) == 0
        )  # without a profile it is that of the run
        printed = capsys.readouterr().out
        assert printed.count("exported: light") == 1
        names = {path.name for path in out.iterdir()}
        assert names == {"controller.npz", "policy", "export.json"} | kept
        facts = json.loads((out / "export.json").read_text())
        assert set(facts["files"]) == {"controller.npz"}
        assert facts["files"]["controller.npz"]["bytes"] == (out / "controller.npz").stat().st_size
        assert facts["trained_on"] == {"name": "first", "digest": table.digest}
        assert facts["compared_on"]["digest"] == table.digest
        assert facts["graphs"] == {}
        assert facts["decision_us_p50"] > 0
        assert decided(out, inputs) == [table.configuration(index) for index in chosen.tolist()]
        (out / "asked.npz").unlink()
        (out / "notes.txt").write_text("mine")


def test_export_compares_on_another_profile(folder: Path, train: Callable[..., Path]) -> None:
    checkpoint = best_of("FIRST", train)
    assert main(["export", *SECOND, checkpoint, "onnx=true"]) == 0
    facts = json.loads(Path("exported/export.json").read_text())
    assert (facts["trained_on"]["name"], facts["compared_on"]["name"]) == ("first", "second")
    counts = facts["graphs"]["controller.onnx"]
    contexts = 60 * len(facts["compared_on"]["budgets_ms"])
    assert counts["same"] + counts["rounding"] == counts["contexts"] == contexts


# -- live ------------------------------------------------------------------------------------------


def test_a_live_run_on_the_elastic_model(
    folder: Path, train: Callable[..., Path], capsys: Capture
) -> None:
    assert (
        main(
            [
                *LIVE,
                best_of("BUILTIN", train),
                "json=live.json",
                "stream.html=live.html",
                "budgets_ms=[2,4]",
            ]
        )
        == 0
    )
    results = json.loads(Path("live.json").read_text())
    policies = [
        "controller",
        "controller_frozen",
        "budget_aware_static",
        "best_static",
        "cheapest",
        "most_accurate",
    ]
    assert sorted(row["policy"] for row in results["rows"]) == sorted(policies)
    for row in results["rows"]:
        assert 0 <= row["utility"] <= row["accuracy"] <= 1
        assert row["latency_ms"] > 0
    assert results["overhead"]["share"] > 0
    speed = results["speed"]["before"]
    assert results["budgets_ms"] == pytest.approx([2 * speed, 4 * speed])
    accuracy = [row for row in results["agreement"] if row["what"] == "accuracy"]
    assert len(accuracy) == len(policies)
    for row in accuracy:  # every answer of the model that runs is that of the profile
        assert row["agrees"]
        assert row["live"] == row["replay"]
    assert "simulated request stream, served live" in Path("live.html").read_text()
    printed = capsys.readouterr().out
    assert "learned controller" in printed
    assert "to the model's mean inference" in printed


# -- several data sets -----------------------------------------------------------------------------


def test_two_files_as_one_profile(folder: Path, train: Callable[..., Path]) -> None:
    run = train("joint", *JOINT, "own_cost=false")
    results = json.loads((run / "results.json").read_text())
    assert results["profile"]["samples"] == 120
    assert {row["dataset"] for row in results["by_dataset"]} == {"first", "second"}
    assert "static_per_dataset" in {row["policy"] for row in results["rows"]}
    words = ["evaluate", *JOINT, f"checkpoint={run}", "budgets_ms=[8,12]"]
    assert main([*words, "baselines=false", "own_cost=false", "json=again.json"]) == 0
    again = json.loads(Path("again.json").read_text())
    rows_of_file = [
        [row for row in result["rows"] if row["policy"] == "controller"]
        for result in (results, again)
    ]
    assert [row["utility"] for row in rows_of_file[0]] == [
        row["utility"] for row in rows_of_file[1]
    ]


def test_a_data_set_is_left_out(folder: Path, train: Callable[..., Path]) -> None:
    run = train("left_out", *JOINT, "split.leave_out=second")
    results = json.loads((run / "results.json").read_text())
    assert results["test_samples"] == 60
    seen = load_checkpoint(run / BEST).extra
    assert (
        max(seen["train_rows"].max(), seen["validation_rows"].max()) < 60 <= seen["test_rows"].min()
    )


def test_the_simulated_profile(folder: Path, train: Callable[..., Path]) -> None:
    results = json.loads((train("simulated", *SIMULATED) / "results.json").read_text())
    assert results["profile"]["name"].startswith("simulated-")
    assert {row["dataset"] for row in results["by_dataset"]} == {"text_vqa", "coco_vqa", "okvqa"}


# -- models ----------------------------------------------------------------------------------------


def inspected(out: str, dataset: str, features: str) -> dict[str, Any]:
    """The facts of a profile that was measured into this folder."""
    read = ["profile=exp5_exp6", f"profile.exp5_dir={out}/exp5", f"profile.exp6_dir={out}/exp6"]
    read += [f"profile.dataset_name={dataset}", f"profile.features={out}/{features}"]
    assert main(["inspect", *read, "json=facts.json", "html=page.html"]) == 0
    facts: dict[str, Any] = json.loads(Path("facts.json").read_text())
    return facts


def test_the_elastic_model_is_profiled_and_read_back(folder: Path, capsys: Capture) -> None:
    words = ["knobs.samples=6", "knobs.repeats=1", "knobs.max_crops=[2,12]"]
    words += ["knobs.top_k=[1,4]", "knobs.num_active_blocks=[6]"]
    assert main(["profile", "model=elastic", "out=measured", *words]) == 0
    assert "profile: measured" in capsys.readouterr().out
    facts = inspected("measured", "elastic_scenes", "features.safetensors")
    assert (facts["samples"], facts["configurations"], facts["coverage"]) == (6, 4, 1)
    assert [facts["knobs"][name]["values"] for name in ("max_crops", "top_k")] == [[2, 12], [1, 4]]


PROFILE = ["profile", "model=files/model", "data=files/questions.jsonl"]


def measured(out: str) -> list[tuple[object, ...]]:
    """What each whole line of the logs names: sample, configuration, repeat."""
    lines = [
        line
        for path in Path(out, "state").glob("measured-*.jsonl")
        for line in path.read_text().splitlines()
    ]
    key = itemgetter("sample_id", "max_crops", "top_k", "num_active_blocks", "repeat")
    return [key(json.loads(line)) for line in lines]


def test_a_killed_profile_goes_on_and_measures_nothing_twice(folder: Path) -> None:
    words = [*KNOBS, "knobs.repeats=12", "out=out"]
    log = Path("out/state/measured-0.jsonl")
    stop_when(
        lambda: log.exists() and log.read_bytes().count(b"\n") >= 20, Command([*PROFILE, *words])
    )
    before = log.read_bytes()
    count = before.count(b"\n")
    assert 20 <= count < 192
    assert not Path("out/table.parquet").exists()
    assert main([*PROFILE, *words]) == 0
    assert log.read_bytes().startswith(before[: before.rfind(b"\n") + 1])
    result = measured("out")
    assert len(result) == len(set(result)) == 4 * 4 * 12
    assert read_long_table("out/table.parquet").repeats_ms.shape == (4, 4, 12)


def test_two_processes_share_a_profile(folder: Path) -> None:
    words = [*KNOBS, "knobs.repeats=1", "knobs.shards=2", "out=out"]
    both = [Command([*PROFILE, *words, f"knobs.shard={shard}"]) for shard in (0, 1)]
    facts = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], facts
    result = measured("out")
    assert len(result) == len(set(result)) == 4 * 4
    table = pl.read_parquet("out/table.parquet")
    assert len(table) == 16
    assert table.select("sample_id", "top_k", "num_active_blocks").is_unique().all()
    assert inspected("out", "questions", "features.safetensors")["coverage"] == 1


# -- mistakes --------------------------------------------------------------------------------------

WORDS = {
    **{"FIRST": FIRST, "JOINT": JOINT, "LIVE": LIVE, "TRAIN": ["train", *QUICK]},
    "ASKED": [*PROFILE, "device=cpu", "out=out"],
}
"""What stands for several words in the commands below; of_FIRST and of_BUILTIN are checkpoints."""
MISTAKES = {
    "export FIRST checkpoint=gone.pt": "gone.pt",
    "export profile=builtin of_FIRST": "'builtin'",
    "export profile=table profile.path=files/first.parquet of_FIRST": "features",
    "export profile=table profile.path=files/fewer.parquet of_FIRST": "'fewer'",
    "export FIRST of_FIRST out=files/occupied": "files/occupied",
    "export FIRST of_FIRST threads=0": "threads=0",
    "LIVE profile=builtin of_FIRST": "'builtin'",
    "LIVE FIRST of_FIRST": "'elastic'",
    "LIVE of_BUILTIN profile.accuracy=soft_score": "live",
    "LIVE of_BUILTIN stream.requests=0": "stream.requests=0",
    "LIVE of_BUILTIN stream.clock=sun": "stream.clock='sun'",
    "LIVE of_BUILTIN stream.fixed=4": "stream.fixed=4",
    "LIVE of_BUILTIN stream.budgets_ms=[]": "budgets_ms=[]",
    "LIVE of_BUILTIN stream.html=files/occupied/live.html": "files/occupied",
    "LIVE of_BUILTIN json=files": "json=files",
    "evaluate of_BUILTIN stream.requests=5": "stream: ",
    "profile model=files/model device=cpu out=out data=gone.jsonl": "gone.jsonl",
    "profile data=files/questions.jsonl out=out": "model=NAME_OR_FOLDER",
    "profile out=out model=learner knobs.top_k=[1]": "knobs: ",
    "profile out=out knobs.top_k=[5]": "top_k=5",
    "profile out=out importance=blocks.json": "importance: ",
    "ASKED importance=files/importance.json": "'first'",
    "ASKED device=tpu": "device=tpu",
    "ASKED knobs.top_k=[9]": "top_k=9",
    "ASKED knobs.count=-1": "knobs.count=-1",
    "TRAIN profile=joint": "profile.paths",
    "TRAIN profile=joint profile.paths=[files/first.parquet,files/experts.parquet]": "knobs",
    "TRAIN JOINT profile.features=[files/first.npz]": "1 files for 2 paths",
    "TRAIN JOINT profile.features=[files/first.npz,null]": "missing_blocks=true",
    "TRAIN JOINT split.leave_out=fourth": "split.leave_out='fourth'",
    "TRAIN FIRST split.leave_out=first": "leaving one out",
    "TRAIN profile=simulated profile.datasets=[gqa]": "text_vqa, coco_vqa, okvqa",
    "TRAIN profile=simulated profile.grid=99": "profile.grid='99'",
    "TRAIN profile=simulated profile.signal=2": "profile.signal=2.0",
    "TRAIN FIRST balance.by=dataset": "balance",
    "TRAIN FIRST balance.by=length": "balance.by='length'",
    "TRAIN FIRST policy.dataset_input=true": "policy.dataset_input=true",
    "TRAIN FIRST policy.project=99": "policy.project=99",
    "TRAIN FIRST policy.project=-1": "policy.project=-1",
    "TRAIN FIRST runs=files/occupied": "files/occupied",
}
"""Commands, and what the message about each names."""


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_clear_line_and_leaves_nothing(
    words: str, folder: Path, train: Callable[..., Path], capsys: Capture
) -> None:
    command = []
    for word in words.split():
        if word.startswith("of_"):
            command.append(best_of(word.removeprefix("of_"), train))
        else:
            command += WORDS.get(word, [word])
    assert MISTAKES[words] in refused(command, capsys)
