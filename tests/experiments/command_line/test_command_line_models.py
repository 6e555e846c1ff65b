"""End to end, through the command line: exported files, live runs, real models, several data
sets."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from commands import OPTIMISER, launch, read_json, refused, words_of
from helpers import arrays, small_table
from tiny_models import picture, tiny_model

import knobwise
from knobwise.envs.readers.feature_files import write_features
from knobwise.envs.readers.long_table import read_long_table, write_long_table
from knobwise.experiments.evidence.decisions import read_decisions

QUICK = words_of(
    OPTIMISER,
    "optimiser.iterations=4 policy=utility policy.fold_networks=2 seeds=[0] budgets_ms=[8,12]",
)
LIVE = words_of("evaluate live=true stream.requests=25")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
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
    picture(0, 64, 96).save(folder / "image.png")
    questions = pl.DataFrame({"id": ["q0", "q1"], "image": "image.png", "question": "What?"})
    questions = questions.with_columns(answers=pl.lit(["a", "a", "b"]))
    questions.write_ndjson(folder / "questions.jsonl")
    (folder / "importance.json").write_text('{"first": 0.1}')
    (folder / "occupied").write_text("a file where a folder is wanted")
    return folder


@pytest.fixture(scope="module")
def train(files):
    """Trains once for all tests that ask for the same; gives the folder of the run."""

    @functools.cache
    def trained(name):
        launch("train", QUICK, TRAINED[name], f"runs={files}/runs name={name}")
        return files / "runs/controller" / name

    return trained


@pytest.fixture
def folder(home, files):
    """An empty folder, where paths that begin with `files/` are those of `files`."""
    Path("files").symlink_to(files)


FIRST = words_of("profile=table profile.path=files/first.parquet profile.features=files/first.npz")
SECOND = words_of(
    "profile=table profile.path=files/second.parquet profile.features=files/second.npz"
)
JOINT = words_of("""
    profile=joint profile.paths=[files/first.parquet,files/second.parquet]
    profile.features=[files/first.npz,files/second.npz]
""")


TRAINED = {
    "FIRST": words_of(FIRST, "policy.experts=[ridge] own_cost=false"),
    "BUILTIN": words_of("split.train=0.06 split.validation=0.04 budgets_ms=[2.0]"),
    "JOINT": words_of(JOINT, "own_cost=false"),
}
"""What the runs are trained with that other commands name."""


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


def decided(folder, requests):
    """What the files in a folder decide without torch: feature blocks and `budgets_ms` → knob
    values."""
    np.savez(folder / "asked.npz", **requests)
    command = [sys.executable, "-c", WITHOUT_TORCH]
    return json.loads(subprocess.check_output(command, cwd=folder))


def test_a_run_leaves_files_that_decide_as_what_it_deploys_was_judged(folder, train):
    run = train("FIRST")
    table = read_long_table("files/first.parquet", features="files/first.npz")
    decisions = read_decisions(run).filter(policy="controller")
    assert set(decisions["seed"]) == {0}
    rows = torch.tensor([table.sample_ids.index(sample) for sample in decisions["sample"]])
    requests = arrays(table, rows) | {"budgets_ms": decisions["condition"].to_numpy()}
    labels = {table.label(c): table.configuration(c) for c in range(table.num_configurations)}
    alone = [labels[choice] for choice in decisions["choice"]]
    assert decided(run, requests) == alone
    means = {row["policy"]: row for row in read_json(run / "results.json")["rows"][::3]}
    assert means["controller"]["utility"] == pytest.approx(decisions["utility"].mean())
    assert means["controller"]["decision_us_p50"] > 0
    assert means["teacher"]["decision_us_p50"] is None
    # the same is loaded and exported by default
    assert len(knobwise.load(run).agent.teacher.experts) == 1
    # without a profile it is that of the run; the second time there is a file of somebody else
    out = Path("light")
    names = {"controller.npz", "policy", "export.json"}
    for profile, compared_on in (([], "first"), (FIRST, "first"), (SECOND, "second")):
        launch("export", profile, f"checkpoint={run} out=light")
        assert {path.name for path in out.iterdir()} == names
        names.add("notes.txt")
        (out / "notes.txt").write_text("mine")
        facts = read_json(out / "export.json")
        size = (out / "controller.npz").stat().st_size
        assert {name: file["bytes"] for name, file in facts["files"].items()} == {
            "controller.npz": size
        }
        assert facts["trained_on"] == {"name": "first", "digest": table.digest}
        assert facts["compared_on"]["name"] == compared_on
        assert (facts["compared_on"]["digest"] == table.digest) == (compared_on == "first")
        assert facts["graphs"] == {}
        # as the results of a run have it: the clock of tests gives 30 µs to every decision
        assert facts["decisions_us_p50"]["controller.npz"] == pytest.approx(30)
        assert decided(out, requests) == alone
        (out / "asked.npz").unlink()


# -- several data sets -----------------------------------------------------------------------------


def test_two_files_as_one_profile(folder, train):
    run = train("JOINT")
    results = read_json(run / "results.json")
    assert results["profile"]["samples"] == 120
    assert {row["dataset"] for row in results["by_dataset"]} == {"first", "second"}
    assert "static_per_dataset" in {row["policy"] for row in results["rows"]}
    words = f"checkpoint={run} budgets_ms=[8,12] baselines=false own_cost=false json=again.json"
    launch("evaluate", JOINT, words)
    rows = read_json("again.json")["rows"]
    before, after = (
        [row["utility"] for row in each if row["policy"] == "controller"]
        for each in (results["rows"], rows)
    )
    assert before == after


# -- mistakes --------------------------------------------------------------------------------------

WORDS = {
    "FIRST": FIRST,
    "JOINT": JOINT,
    "LIVE": LIVE,
    "TRAIN": ["train", *QUICK],
    "ASKED": words_of("profile model=files/model data=files/questions.jsonl device=cpu out=out"),
}
"""What stands for several words in the commands below; of_FIRST and of_BUILTIN are checkpoints."""
MISTAKES = {
    "export FIRST checkpoint=gone.pt": "gone.pt",
    "export profile=builtin of_FIRST": "'builtin'",
    "export profile=table profile.path=files/first.parquet of_FIRST": "features",
    "export profile=table profile.path=files/fewer.parquet of_FIRST": "'fewer'",
    "export FIRST of_FIRST out=files/occupied": "files/occupied",
    "LIVE profile=builtin of_FIRST": "'builtin'",
    "LIVE FIRST of_FIRST": "'elastic'",
    "LIVE of_BUILTIN profile.accuracy=soft_score": "live",
    "LIVE of_BUILTIN stream.requests=0": "stream.requests=0",
    "LIVE of_BUILTIN stream.clock=sun": "stream.clock='sun'",
    "LIVE of_BUILTIN budgets_ms=[]": "budgets_ms=[]",
    "LIVE of_BUILTIN html=files/occupied/live.html": "files/occupied",
    "LIVE of_BUILTIN json=files": "json=files",
    "evaluate of_BUILTIN stream.requests=5": "stream: ",
    "evaluate data=a.jsonl": "data: is for live=true",
    "evaluate dtype=float32": "dtype: is for live=true",
    "evaluate device=cpu": "device: is for live=true",
    "evaluate importance=a.json": "importance: is for live=true",
    "evaluate model=models_of_a_test:Echo": "model: is for live=true",
    "profile data=files/questions.jsonl out=out": "data: ",
    "profile out=out model=learner knobs.top_k=[1]": "knobs: ",
    "profile out=out knobs.top_k=[5]": "top_k=5",
    "profile out=out importance=blocks.json": "importance: ",
    "ASKED importance=files/importance.json": "'first'",
    "ASKED device=tpu": "device=tpu",
    "ASKED knobs.top_k=[9]": "top_k=9",
    "TRAIN profile=joint": "profile.paths",
    "TRAIN profile=joint profile.paths=[files/first.parquet,files/experts.parquet]": "knobs",
    "TRAIN JOINT profile.features=[files/first.npz]": "1 files for 2 paths",
    "TRAIN JOINT profile.features=[files/first.npz,null]": "missing_blocks=true",
    "TRAIN JOINT split.leave_out=fourth": "split.leave_out='fourth'",
    "TRAIN FIRST split.leave_out=first": "several data sets",
    "TRAIN profile=simulated profile.datasets=[gqa]": "text_vqa, coco_vqa, okvqa",
    "TRAIN FIRST balance.by=dataset": "balance",
    "TRAIN FIRST balance.by=length": "balance.by='length'",
    "TRAIN FIRST policy.dataset_input=true": "policy.dataset_input=true",
    "TRAIN FIRST policy.project=99": "policy.project=99",
    "TRAIN FIRST policy.project=-1": "policy.project=-1",
}
"""Commands, and what the message about each names."""


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_clear_line_and_leaves_nothing(words, folder, train, capsys):
    command = []
    for word in words.split():
        if word.startswith("of_"):
            best = train(word.removeprefix("of_")) / "checkpoints/best.pt"
            command.append(f"checkpoint={best}")
        else:
            command += WORDS.get(word, [word])
    assert MISTAKES[words] in refused(command, capsys)
