"""What a person may get wrong on the command line: one line that names it, and nothing left behind.
Help, and what is suggested."""

import errno
import gzip
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import polars as pl
import pytest
from commands import SIMULATED, launch, mistake, refused, words_of, write_table
from helpers import small_table
from wandb_stub import forget_wandb

from knobwise.__main__ import main
from knobwise.envs.readers.feature_files import write_features
from knobwise.experiments.command_line import profile, train
from knobwise.experiments.command_line.verbs import VERBS


@pytest.fixture(autouse=True)
def _folder(home, monkeypatch):
    """An empty folder; no key, none of the developer's own W&B variables."""
    forget_wandb(monkeypatch, home)


WITH_TORCH = {
    "tracking=online": "tracking=offline",
    "profile=table profile.path=none.csv": "none.csv",
    "profile=exp5_exp6 profile.exp5_dir=a profile.exp6_dir=b profile.dataset_name=c": "b",
    "split.train=0.9": "train=0.9",
    "split.train=0.8": "train and validation as 0.8 and 0.1",
    "budget=fixed budget.values_ms=[-3]": "values_ms",
    "budgets_ms=[-1.0]": "budgets_ms",
    "profile model=gpt": "elastic",
    "profile model=smolm2": "smollm2",
    "profile model=smollm2 data=q.jsonl pool.size=8": "vlm.data",
    "evaluate": "runs/latest",
}
"""Words of a training, and what the message names."""


@pytest.mark.parametrize("words", WITH_TORCH)
def test_a_mistake_that_shows_when_data_are_read(words, capsys):
    command = words.split()
    if command[0] not in VERBS:
        data = [] if "profile=" in words else SIMULATED
        command = ["train", *command, *data]
    assert WITH_TORCH[words] in refused(command, capsys)


@pytest.mark.parametrize("word", ["WANDB_MODE=nonsense", "WANDB_MODE=online", "WANDB_PROJECT=a:b"])
def test_a_mistake_in_the_environment_is_said_by_its_name(word, monkeypatch, capsys):
    monkeypatch.setenv(*word.split("="))
    assert word in refused(["train", *SIMULATED], capsys).replace("'", "")


@pytest.mark.parametrize(
    "words", ["train", "train experiment=selector", "profile out=there", "evaluate json=there.json"]
)
def test_a_folder_that_cannot_be_written_is_refused_first(words, monkeypatch, capsys):
    # root may write everywhere
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    assert "written in ." in refused(words.split(), capsys)


@pytest.mark.parametrize(
    ("number", "status"), [(errno.ENOSPC, 1), (errno.EROFS, 2), (errno.EACCES, 2)]
)
def test_what_the_system_refuses_later_is_one_line_too(number, status, monkeypatch, capsys):
    error = OSError(number, os.strerror(number), "last.pt")
    monkeypatch.setattr(train, "train", Mock(side_effect=error))
    assert main(["train"]) == status
    assert capsys.readouterr().err.startswith(f"knobwise: last.pt: {error.strerror}; ")


def test_an_error_of_the_program_is_not_hidden(monkeypatch):
    error = FileNotFoundError(errno.ENOENT, "gone")
    monkeypatch.setattr(train, "train", Mock(side_effect=error))
    with pytest.raises(FileNotFoundError):
        main(["train"])


CALLBACK = "hydra.callbacks.x={_target_:shutil.copyfile,src:t.parquet,dst:copy}"


@pytest.mark.parametrize(
    "word",
    [
        f"++{CALLBACK}",
        f"+{CALLBACK}",
        "++hydra={callbacks:{x:{_target_:shutil.copyfile}}}",
        "hydra.sweeper._target_=shutil.copyfile",
        "hydra.sweeper.params={hydra.job_logging.root:1}",
        "hydra.launcher._target_=shutil.copyfile",
        "+hydra.launcher.x={_target_:shutil.copyfile}",
        "+hydra.launcher.x=${oc.create:'{_target_:os.abort}'}",
        "+hydra.launcher.ray.init.runtime_env.worker_process_setup_hook=os.abort",
        "hydra/job_logging=default",
        "+hydra.job_logging.handlers.x.()=shutil.copyfile",
        "hydra.job.env_set.PATH=here",
        "hydra.searchpath=[conf]",
        "experiment@hydra.callbacks.x=lean",
        "--config-dir=conf",
        "--experimental-rerun=x.pickle",
        "-cn=other",
    ],
)
def test_what_can_run_code_in_hydra_is_refused(word, capsys):
    assert word in refused(["train", "-m", "policy.hidden=8,16", word], capsys)


# -- help and suggestions: quickly, which is without torch -----------------------------------------

MISTAKES = {
    "trian": "knobwise train?",
    "fly": "the verbs are train, evaluate, ",
    "train experiment=leen": "did you mean experiment=lean?",
    "train experiment=none": "rce_only",
    "train policy=utilty": "did you mean policy=utility?",
    "-sc install=bash": "'-sc'",
    "train --lr 0.01": "optimiser.lr=",
    "train lr=0.01": "did you mean optimiser.lr=0.01",
    "train policy.hiden=1": "did you mean policy.hidden=1",
    "train seed=3": "seeds=[3]",
    "evaluate --live": "live=",
    "evaluate -m": "-m",
    "train +foo=9": "foo",
    "train --cfg job": "--cfg",
    "train policy.hidden": "policy.hidden",
    "train policy.hidden=(1": "policy.hidden=(1",
    "train -m policy.hidden=(1,2": "policy.hidden=(1,2",
    "train =3": "override",
    "train seeds=": "seeds=",
    "train seeds=3": "seeds=3",
    "train policy.hidden=8,16": "policy.hidden=8,16",
    "train split=3": "split",
    "train optimiser.iterations=ten": "optimiser.iterations=ten: ",
    "export onnx=maybe": "onnx=maybe: ",
    "train budgets_ms=[a]": "budgets_ms=[a]: ",
    "train policy=nope": "policy=nope: ",
    "inspect profile=simulated html=": "html=: ",
    "train baselines=4.5": "baselines=4.5",
    "train profile=measured.csv": "did you mean profile=table profile.path=measured.csv?",
    "train measured.csv": "did you mean profile=table profile.path=measured.csv?",
    "train m.arff.gz": "did you mean profile=table profile.path=m.arff.gz?",
    "train profile=.": "did you mean profile=table profile.path=.?",
    "inspect builtin": "did you mean profile=builtin?",
    "train lean": "did you mean experiment=lean?",
    "inspect .": "did you mean profile=table profile.path=.?",
    "evaluate beams=/data/b.json": "did you mean beams=files beams.path=/data/b.json?",
    "train profile.path=a.csv": "did you mean profile=table profile.path=a.csv?",
    "train experiment=selector_seeds beams.path=b": "did you mean beams=files beams.path=b?",
    "train experiment=selector_seeds use_rank_advantage=false": "loss.advantage=zscore?",
    "train model_path=checkpoints": "profile.features=FILE",
    "train profile=exp5_exp6 profile.features=[a.pt,b.pt]": "features=[a.pt,b.pt]: must be one",
    "train profile=table": "profile.path",
    "train seeds=[]": "seeds=[]",
    "train seeds=[-1]": "seeds=-1",
    "train seeds=[4294967296]": "4294967295",
    "train experiment=selector seeds=[-1]": "seeds=-1",
    "train split.seed=-1": "split.seed=-1",
    "train reward.miss=-1": "reward.miss=-1",
    "train reward.miss=inf": "reward.miss=inf",
    "train reward.gamma=-3": "reward.gamma=-3",
    "train reward=shaped reward.alpha=nan": "reward.alpha=nan",
    "train reward.delta=inf": "reward.delta=inf",
    "train reward.kind=nice": "reward.kind='nice'",
    "train experiment=mean_budget policy.fold_networks=1": "policy.fold_networks=1",
    "train policy=independent policy.teacher=true": "policy.fold_networks=1",
    "train policy.teacher=false": "policy.experts",
    "train policy.layers=0": "policy.layers=0",
    "train loss.settings.most=2": "did you mean 'loss.settings={most:2}'?",
    "train loss.settings.most=2 loss.settings.least=1": "'loss.settings={most:2,least:1}'",
    "train loss.settings={most:2} loss.settings.least.of=1": "'loss.settings={most:2,least.of:1}'",
    "train -m +loss.settings.most=2,3": "did you mean 'loss.settings={most:2},{most:3}'?",
    "train policy.budget_encoding=tree": "linear, sinusoidal",
    "train optimiser.schedule=linear": "optimiser.schedule='linear'",
    "train threads=0": "threads=0",
    "train device=tpu": "device=tpu",
    "profile knobs.samples=-1": "samples",
    "evaluate split.seed=-1": "split.seed=-1",
    "evaluate stream.seed=-1": "stream.seed=-1",
    "evaluate stream.requests=0": "stream.requests=0",
    "evaluate stream.skip=5": "stream.skip=5",
    "evaluate beams=files beams.path=b.json beams.split_seed=-1": "beams.split_seed=-1",
    "evaluate judged_shots=1,2": "judged_shots=1,2",
}


HELP = [f"{verb} --help" for verb in VERBS if not verb.startswith("train_")]
ANSWER = """
import contextlib, io, json, sys
from knobwise.__main__ import main
answers = {}
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as err:
        answers[words] = main(words.split()), err.getvalue()
print(json.dumps([answers, "torch" in sys.modules]))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """The exit status and what is printed on stderr, by words, from a process without torch."""
    words = json.dumps([*HELP, *MISTAKES])
    folder = tmp_path_factory.mktemp("empty")
    command = [sys.executable, "-c", ANSWER, words]
    printed, has_torch = json.loads(subprocess.check_output(command, cwd=folder))
    assert not has_torch
    assert not list(folder.iterdir())
    return printed


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_a_line_that_names_it_and_needs_no_torch(words, answers):
    status, printed = answers[words]
    assert status == 2
    assert MISTAKES[words] in printed
    # no names of classes
    assert not re.search("TrainRun|ExportRun|Integer|Float|[a-z]Config", printed)
    assert printed.startswith("knobwise: ")
    assert printed.count("\n") == 1


def test_help_needs_no_torch(answers):
    assert all(answers[words] == [0, ""] for words in HELP)


@pytest.mark.parametrize("words", [[], ["--help"], ["--version"], ["profile", "-h"]])
def test_what_is_asked_for_is_printed(words, capsys):
    launch(words)
    assert capsys.readouterr().out


# -- limits of the system, and names that lead elsewhere -------------------------------------------


LONG = "a" * 5000


@pytest.mark.parametrize(
    "words",
    [
        f"inspect profile={LONG}",
        "inspect profile=[1]",
        f"inspect profile=table profile.path={LONG}.csv",
        f"train experiment={LONG}",
        f"compare {LONG}",
        f"evaluate checkpoint={LONG}",
    ],
    ids=lambda words: words[:40],
)
def test_words_that_are_too_long_or_of_another_type_are_refused_in_a_line(words, capsys):
    mistake(words.split(), capsys)


def test_a_working_folder_that_was_removed_is_named(monkeypatch, capsys):
    Path("gone").mkdir()
    monkeypatch.chdir("gone")
    Path.cwd().rmdir()
    assert "working folder" in mistake(["inspect", "profile=builtin"], capsys)


def test_a_terminal_that_takes_ascii_alone_gets_all_that_is_printed(monkeypatch):
    write_table()
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="ascii"))
    launch("inspect profile=table profile.path=t.parquet")
    assert rb"60 samples \xd7 12 configurations" in printed.getvalue()


@pytest.mark.parametrize("name", ["..", "../..", "a/b", "/tmp/x"])
def test_the_name_of_measured_data_leads_nowhere_else(name, capsys):
    words = f"profile model=elastic knobs.samples=2 knobs.name={name} out=p"
    assert name in refused(words.split(), capsys)


def test_a_measured_profile_in_a_folder_with_brackets_is_read(capsys):
    write_table()
    folder = Path("m[1]")
    folder.mkdir()
    Path("t.parquet").rename(folder / "table.parquet")
    write_features(small_table(60), folder / "features.safetensors")
    profile._summary(folder)
    assert str(folder / "table.parquet") in capsys.readouterr().out


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_a_small_file_that_unpacks_to_much_is_refused_and_the_limit_can_be_set(
    suffix, monkeypatch, capsys
):
    ids = [f"{i}{'0' * 40_000}" for i in range(30)]
    cells = {"sample_id": 2 * ids, "size": 30 * [1] + 30 * [2], "accuracy": 1}
    frame = pl.DataFrame(cells).with_columns(latency_ms="size")
    text = frame.write_csv() if suffix == "csv" else frame.write_ndjson()
    Path(f"t.{suffix}.gz").write_bytes(gzip.compress(text.encode()))
    words = words_of(f"inspect profile=table profile.path=t.{suffix}.gz")
    for limit in ("2", "much"):
        monkeypatch.setenv("KNOBWISE_UNPACKED_MB", limit)
        assert "KNOBWISE_UNPACKED_MB" in mistake(words, capsys)
    monkeypatch.setenv("KNOBWISE_UNPACKED_MB", "3")
    launch(words)
