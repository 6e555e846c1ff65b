"""What a person may get wrong on the command line: one line that says what and where, and nothing
left behind. Help, and what is suggested."""

from __future__ import annotations

import errno
import gzip
import io
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from commands import SIMULATED, Capture, Patch, mistake, refused, write_table

from knobwise.__main__ import main
from knobwise.experiments.command_line import sweep_jobs
from knobwise.experiments.command_line.compose import CONF, read_settings, schema_options
from knobwise.experiments.command_line.help import COMMON
from knobwise.experiments.settings.options import VERBS


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: Patch) -> Path:
    """An empty folder; no key, none of the developer's own W&B variables."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["seeds=[-1]"], "seeds=-1: a seed is a whole number from 0"),
        (["seeds=[4294967296]"], "from 0 to 4294967295"),
        (["experiment=selector", "seeds=[-1]"], "seeds=-1"),
        (["-m", "seeds=[0],[-1]"], "seeds=-1"),
        (["split.seed=-1"], "split.seed=-1"),
        (["profile=simulated", "profile.seed=-1"], "profile.seed=-1"),
        (["seeds=[]"], "such as seeds=[0,1,2]"),
        (["seeds="], "seeds=[…]"),
        (["seeds=3"], "seeds=[3]"),
        (
            ["seeds=0,1"],
            "seeds=0,1: a list is seeds=[0,1]; -m makes a run for each: knobwise train -m "
            "seeds=0,1",
        ),
        (["policy.hidden=8,16"], "policy.hidden=8,16: takes one value; -m makes a run for each"),
        (["name='a','b'"], "quote a comma inside a text twice: 'name="),
        (["seeds=null"], "seeds=null: must have a value"),
        (["reward.miss=-1"], "reward.miss=-1.0: the cost of a missed budget must be 0"),
        (["reward.miss=inf"], "reward.miss=inf"),
        (
            ["experiment=mean_budget", "policy.members=1"],
            "policy.members=1: policy.teacher=true needs at least 2, ",
        ),
        (["policy.teacher=false"], "policy.experts (ridge, "),
        (
            ["policy=independent", "policy.teacher=true"],
            "policy.members=1: policy.teacher=true needs at least 2, ",
        ),
        (["policy.structure=independent"], "policy.structure=independent: there is no such option"),
        (
            ["measured.csv"],
            "measured.csv: options are key=value; did you mean profile=table profile.path=m",
        ),
        (["loss.baseline=loo"], "loss.baseline=loo: there is no such option; did you mean loss."),
        (["policy.hidden"], "'policy.hidden': is not of the form key=value"),
        (["policy hidden=3"], "'policy hidden=3': is not of the form key=value"),
        (
            ["policy.hidden=(1"],
            "'policy.hidden=(1': this value cannot be read; quote a value with blanks or "
            "brackets twice",
        ),
        (["-m", "policy.hidden=(1,2"], "'policy.hidden=(1,2': this value cannot be read"),
        (["=3"], "'=3': is not of the form key=value"),
        (
            ["hydra/launcher=joblib"],
            "hydra/launcher=joblib: launchers and Hydra's other options are for sweeps; add -m",
        ),
        (["hydra.launcher.n_jobs=2"], "add -m"),
        (["+hydra.verbose=true"], "add -m"),
        (["tracking=online"], "use tracking=offline"),
        (["tracking.mode=nonsense"], "tracking.mode=nonsense"),
        (["tracking.project=a/b"], "tracking.project=a/b: W&B says"),
        (["-m", "seeds=[0],[1]", "tracking.project=a/b"], "tracking.project=a/b"),
        (["train", "profile=table", "profile.path=none.csv"], "none.csv"),
        (
            [
                "train",
                "profile=exp5_exp6",
                "profile.exp5_dir=a",
                "profile.exp6_dir=b",
                "profile.dataset_name=c",
            ],
            "b",
        ),
        (["train", "profile=table", "profile.path=a (1).csv"], "quote a value with blanks"),
        (["train", *SIMULATED, "split.train=0.9"], "train=0.9"),
        (
            ["train", *SIMULATED, "budget=relative", "budget.factors=[-3]"],
            "at least one number, all positive",
        ),
        (["train", *SIMULATED, "budgets_ms=[-1.0]"], "budgets_ms"),
        (["profile", "model=gpt"], "elastic"),
        (["evaluate"], "runs/latest"),
        (["evaluate", "split.seed=-1"], "split.seed=-1"),
        (["evaluate", "stream.seed=-1"], "stream.seed=-1"),
        (["evaluate", "reward.miss=-1"], "reward.miss"),
        (
            ["evaluate", "beams=files", "beams.path=b.json", "beams.split_seed=-1"],
            "beams.split_seed=-1",
        ),
        (["evaluate", "judged_shots=1,2"], "judged_shots=1,2: a list is judged_shots=[1,2]"),
        (["inspect", "hydra/launcher=joblib"], "are for sweeps"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_a_mistake_in_the_settings(
    words: list[str], message: str, folder: Path, capsys: Capture
) -> None:
    """Of a training where no verb is named."""
    if words[0] not in VERBS:
        profile = [] if {"experiment=selector", "profile=simulated"} & set(words) else SIMULATED
        words = ["train", *profile, *words]
    line = refused(words, capsys)
    assert message in line
    assert "expecting" not in line
    assert "hydra.cc" not in line


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("WANDB_MODE", "nonsense", "WANDB_MODE=nonsense: unknown mode; use "),
        ("WANDB_MODE", "online", "WANDB_MODE=online: needs a key"),
        ("WANDB_PROJECT", "a:b", "WANDB_PROJECT=a:b"),
    ],
)
def test_a_mistake_in_the_environment_is_said_by_its_name(
    name: str, value: str, message: str, folder: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.setenv(name, value)
    assert message in refused(["train", *SIMULATED], capsys)


@pytest.mark.parametrize(
    "words",
    [
        ["train", *SIMULATED],
        ["train", "-m", "seeds=[0],[1]", *SIMULATED],
        ["train", "experiment=selector"],
        ["profile", "out=there"],
        ["evaluate", "json=there.json"],
        ["export", "out=there"],
        ["inspect", "html=there.html", *SIMULATED],
    ],
    ids=" ".join,
)
def test_a_folder_that_cannot_be_written_is_refused_first(
    words: list[str], folder: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.setattr(
        os, "access", lambda path, mode: not mode & os.W_OK
    )  # root may write everywhere
    assert "nothing can be written in .; choose another path" in refused(words, capsys)


@pytest.mark.parametrize(
    ("number", "status", "message"),
    [
        (
            errno.ENOSPC,
            1,
            "knobwise: last.pt: No space left on device; make room, then give the same command "
            "again\n",
        ),
        (
            errno.EROFS,
            2,
            "knobwise: last.pt: Read-only file system; choose a path that can be read and "
            "written\n",
        ),
        (
            errno.EACCES,
            2,
            "knobwise: last.pt: Permission denied; choose a path that can be read and written\n",
        ),
    ],
)
def test_what_the_system_refuses_later_is_one_line_too(
    number: int, status: int, message: str, folder: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.setattr(
        sweep_jobs, "train", Mock(side_effect=OSError(number, os.strerror(number), "last.pt"))
    )
    assert main(["train"]) == status
    assert capsys.readouterr().err == message


def test_an_error_of_the_program_is_not_hidden(folder: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(
        sweep_jobs, "train", Mock(side_effect=FileNotFoundError(errno.ENOENT, "gone"))
    )
    with pytest.raises(FileNotFoundError):
        main(["train"])


@pytest.mark.parametrize(
    ("words", "variants"),
    [
        (["experiment=group_size"], 4),
        (["experiment=reward_coefficients"], 6),
        (["experiment=reward_coefficients", "reward.beta=1"], 3),
        (["experiment=group_size", "loss.group_size=4"], None),
        (["experiment=lean"], None),
        (["experiment=selector"], None),
        ([], None),
    ],
)
def test_a_file_with_variants_says_that_one_run_is_not_all_of_them(
    words: list[str], variants: int | None, folder: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.setattr(sweep_jobs, "train", Mock())
    assert main(["train", *words]) == 0
    message = (
        f"{words[0]}: one run with the defaults of its file; -m runs its {variants} variants\n"
        if words
        else ""
    )
    assert capsys.readouterr().err == (message if variants else "")


def test_without_a_teacher_there_are_no_experts_and_one_member_is_enough() -> None:
    """What the message on experts advises."""
    policy = read_settings(
        "train", ["policy.teacher=false", "policy.experts=[]", "policy.members=1"]
    ).policy
    assert (policy.teacher, policy.members) == (False, 1)


def test_help_lists_the_experiments_and_how_to_sweep(capsys: Capture) -> None:
    assert main(["train", "--help"]) == 0
    printed = capsys.readouterr().out
    for path in (CONF / "experiment").glob("*.yaml"):
        assert f"experiment={path.stem} " in printed
    assert "How many draws does a context need?" in printed
    for words in (
        "train -m",
        "hydra/launcher=joblib",
        "hydra.launcher.n_jobs=",
        "hydra/launcher=ray",
    ):
        assert words in printed
    assert main(["inspect", "--help"]) == 0
    assert "Sweeps" not in capsys.readouterr().out


# -- help and suggestions: quickly, which is without torch -----------------------------------------

MISTAKES = [
    ("trian", "there is no verb 'trian'; did you mean knobwise train?"),
    ("fly", "there is no verb 'fly'; the verbs are train, evaluate, "),
    ("train experiment=leen", "experiment=leen: does not exist; did you mean experiment=lean?"),
    ("train experiment=none", "experiment=none: must be one of advantages, clip, "),
    ("train policy=utilty", "policy=utilty: does not exist; did you mean policy=utility?"),
    ("train --lr 0.01", "--lr: options are key=value, not --flags: try optimiser.lr=0.01"),
    (
        "train -m --lr=0.01 loss=exact,sampled",
        "--lr=0.01: options are key=value, not --flags: try optimiser.lr=0.01",
    ),
    ("train --optimiser.lr=0.01", "options are key=value, not --flags: try optimiser.lr=0.01"),
    ("evaluate --live", "--live: options are key=value, not --flags: try live=true"),
    ("compare a --html x.html", "--html: options are key=value, not --flags: try html=x.html"),
    ("evaluate -m", "-m: options are key=value, not --flags; only knobwise train has sweeps"),
    ("train lr=0.01", "lr=0.01: there is no such option; did you mean optimiser.lr=0.01?"),
    ("train experiment=selector lr=1", "did you mean sft.lr=1 or rce.lr=1 or grpo.lr=1?"),
    ("train seed=3", "did you mean seeds=3?"),
    (
        "train profile=measured.csv",
        "is a file; did you mean profile=table profile.path=measured.csv?",
    ),
    ("evaluate beams=/data/b.json", "is a file; did you mean beams=files beams.path=/data/b.json?"),
    (
        "train profile.path=a.csv",
        "profile.path=a.csv: is an option of profile=table; give that too",
    ),
    ("train split=3", "split=3: split is a section; its options are split.…"),
    ("train baselines=4.5", "baselines=4.5: must be true or false"),
    ("train profile=table", "profile.path must be given"),
    ("train reward.kind=nice", "reward.kind='nice': must be one of shaped, utility, priced"),
    ("train optimiser.schedule=linear", "optimiser.schedule='linear': must be one of "),
    ("train policy.layers=0", "policy.layers=0: must be at least 1"),
    ("train policy.budget_encoding=tree", "must be one of linear, sinusoidal"),
    (
        "train policy.hiden=1",
        "policy.hiden=1: there is no such option; did you mean policy.hidden=1?",
    ),
    ("train optimizer.iterations=3", "did you mean optimiser.iterations=3?"),
    ("train +foo=9", "+foo=9: options are key=value, not --flags"),
    ("profile knobs.samples=-1", "samples"),
    ("train threads=0", "threads=0: must be at least 1"),
    ("train device=tpu", "device=tpu: must be cpu or cuda"),
    ("train --cfg job", "--cfg: options are key=value, not --flags"),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES)
def test_a_mistake_is_a_line_that_says_what_is_probably_meant(
    words: str, message: str, capsys: Capture
) -> None:
    assert message in mistake(words.split(), capsys)


def test_help_and_mistakes_are_answered_without_torch() -> None:
    commands = [f"{verb} --help" for verb in VERBS if not verb.startswith("train_")] + [
        words for words, _ in MISTAKES
    ]
    script = f"""
import sys
from knobwise.__main__ import main
status = {{main(words.split()) for words in {commands!r}}}
sys.exit(0 if status == {{0, 2}} and "torch" not in sys.modules else 1)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]


@pytest.mark.parametrize("words", [[], ["--help"], ["--version"], ["profile", "-h"]])
def test_what_is_asked_for_is_printed(words: list[str], capsys: Capture) -> None:
    assert main(words) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize("verb", sorted(COMMON))
def test_help_shows_first_what_people_use(verb: str, capsys: Capture) -> None:
    common = COMMON[verb].split()
    assert set(common) <= schema_options(verb).keys()
    assert len(common) <= 16
    words = verb.replace("_", " experiment=").split()
    assert main([*words, "--help"]) == 0
    keys = [
        line.split()[0] for line in capsys.readouterr().out.splitlines()[2:] if line[:1].strip()
    ]
    assert keys[: len(common)] == common


# -- limits of the system, and names that lead elsewhere -------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ["inspect", f"profile={'a' * 5000}"],
        ["inspect", "profile=[1]"],
        ["inspect", "profile=table", f"profile.path={'a' * 5000}.csv"],
        ["train", f"experiment={'a' * 5000}"],
        ["compare", "a" * 5000],
        ["evaluate", f"checkpoint={'a' * 5000}"],
    ],
    ids=lambda words: f"{words[0]} {words[-1][:12]}",
)
@pytest.mark.usefixtures("folder")
def test_words_that_are_too_long_or_of_another_type_are_refused_in_a_line(
    words: list[str], capsys: Capture
) -> None:
    mistake(words, capsys)


def test_a_working_folder_that_was_removed_is_named(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert "the working folder was removed" in mistake(["inspect", "profile=builtin"], capsys)


@pytest.mark.usefixtures("folder")
def test_a_terminal_that_takes_ascii_alone_gets_all_that_is_printed(monkeypatch: Patch) -> None:
    write_table()
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="ascii"))
    assert main(["inspect", "profile=table", "profile.path=t.parquet"]) == 0
    assert rb"60 samples \xd7 12 configurations" in printed.getvalue()


@pytest.mark.parametrize("name", ["..", "../..", "a/b", "/tmp/x"])
@pytest.mark.usefixtures("folder")
def test_the_name_of_measured_data_leads_nowhere_else(name: str, capsys: Capture) -> None:
    words = ["profile", "model=elastic", "knobs.samples=2", f"knobs.name={name}", "out=p"]
    assert "must be the name of one folder" in refused(words, capsys)


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
@pytest.mark.usefixtures("folder")
def test_a_small_file_that_unpacks_to_much_is_refused_and_the_limit_can_be_set(
    suffix: str, monkeypatch: Patch, capsys: Capture
) -> None:
    rows = ["sample_id,size,accuracy,latency_ms"] if suffix == "csv" else []
    for i, size in itertools.product(range(30), range(2)):
        record = {
            "sample_id": f"{i}{'0' * 40_000}",
            "size": size,
            "accuracy": 1,
            "latency_ms": 1 + size,
        }
        rows.append(",".join(map(str, record.values())) if suffix == "csv" else json.dumps(record))
    Path(f"t.{suffix}.gz").write_bytes(gzip.compress("\n".join(rows).encode()))
    words = ["inspect", "profile=table", f"profile.path=t.{suffix}.gz"]
    monkeypatch.setenv("KNOBWISE_UNPACKED_MB", "2")
    more = "KNOBWISE_UNPACKED_MB=… in the environment allows more"
    assert mistake(words, capsys) == f"knobwise: t.{suffix}.gz: unpacks to more than 2 MB; {more}"
    monkeypatch.setenv("KNOBWISE_UNPACKED_MB", "3")
    assert main(words) == 0
    monkeypatch.setenv("KNOBWISE_UNPACKED_MB", "much")
    assert "must be a whole number of MB" in mistake(words, capsys)
