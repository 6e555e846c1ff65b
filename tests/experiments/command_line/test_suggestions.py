"""Help, completion, and what is suggested after a mistake: quickly, which is without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from commands import Capture, mistake

from knobwise.__main__ import main
from knobwise.experiments.command_line.compose import GROUPS, schema_options
from knobwise.experiments.command_line.help import COMMON, SCRIPTS, completions
from knobwise.experiments.settings.options import VERBS

MISTAKES = [
    ("trian", "there is no verb 'trian'; did you mean knobwise train?"),
    ("fly", "there is no verb 'fly'; the verbs are train, evaluate, "),
    ("train experiment=leen", "experiment=leen: does not exist; did you mean experiment=lean?"),
    ("train experiment=none", "experiment=none: must be one of advantages, balanced, "),
    ("train policy=utilty", "policy=utilty: does not exist; did you mean policy=utility?"),
    ("train --lr 0.01", "--lr: options are key=value, not --flags: try optimiser.lr=0.01"),
    ("train -m --lr=0.01 loss=exact,sampled", "--lr=0.01: options are key=value, not --flags: try optimiser.lr=0.01"),
    ("train --optimiser.lr=0.01", "options are key=value, not --flags: try optimiser.lr=0.01"),
    ("evaluate --live", "--live: options are key=value, not --flags: try live=true"),
    ("compare a --html x.html", "--html: options are key=value, not --flags: try html=x.html"),
    ("evaluate -m", "-m: options are key=value, not --flags; only knobwise train has sweeps"),
    ("train lr=0.01", "lr=0.01: there is no such option; did you mean optimiser.lr=0.01?"),
    ("train experiment=selector lr=1", "did you mean sft.lr=1 or rce.lr=1 or grpo.lr=1?"),
    ("train seed=3", "did you mean seeds=3?"),
    ("train profile=measured.csv", "is a file; did you mean profile=table profile.path=measured.csv?"),
    ("evaluate beams=/data/b.json", "is a file; did you mean beams=files beams.path=/data/b.json?"),
    ("train profile.path=a.csv", "profile.path=a.csv: is an option of profile=table; give that too"),
    ("train split=3", "split=3: split is a section; its options are split.…"),
    ("train baselines=4.5", "baselines=4.5: must be true or false"),
    ("train profile=table", "profile.path must be given"),
    ("train reward.kind=nice", "reward.kind='nice': must be one of shaped, utility, priced"),
    ("train optimiser.schedule=linear", "optimiser.schedule='linear': must be one of "),
    ("train policy.layers=0", "policy.layers=0: must be at least 1"),
    ("train policy.structure=tree", "additive"),
    ("train policy.hiden=1", "policy.hiden=1: there is no such option; did you mean policy.hidden=1?"),
    ("train optimizer.iterations=3", "did you mean optimiser.iterations=3?"),
    ("train +foo=9", "+foo=9: options are key=value, not --flags"),
    ("profile elastic.samples=-1", "samples"),
    ("train threads=0", "threads=0: must be at least 1"),
    ("train device=tpu", "device=tpu: must be cpu or cuda"),
    ("completion tcsh", "give one of bash, zsh, fish"),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES)
def test_a_mistake_is_a_line_that_says_what_is_probably_meant(words: str, message: str, capsys: Capture) -> None:
    assert message in mistake(words.split(), capsys)


def test_help_and_mistakes_are_answered_without_torch() -> None:
    commands = [f"{verb} --help" for verb in VERBS if verb != "train_selector"] + [words for words, _ in MISTAKES]
    script = f"""
import sys
from knobwise.__main__ import main
status = {{main(words.split()) for words in {commands!r}}}
sys.exit(0 if status == {{0, 2}} and "torch" not in sys.modules else 1)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]


@pytest.mark.parametrize("words", [[], ["--help"], ["--version"], ["profile", "-h"], ["completion", "fish"]])
def test_what_is_asked_for_is_printed(words: list[str], capsys: Capture) -> None:
    assert main(words) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize("verb", sorted(COMMON))
def test_help_shows_first_what_people_use(verb: str, capsys: Capture) -> None:
    common = COMMON[verb].split()
    assert set(common) <= schema_options(verb).keys()
    assert len(common) <= 16
    words = ["train", "experiment=selector"] if verb == "train_selector" else [verb]
    assert main([*words, "--help"]) == 0
    keys = [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:] if line[:1].strip()]
    assert keys[: len(common)] == common


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("knobwise tra", ["train "]),
        ("knobwise train opt", ["optimiser=", "optimiser."]),
        ("knobwise train seeds=[0] optimiser.warmup_", ["optimiser.warmup_iterations=", "optimiser.warmup_lr="]),
        ("knobwise train spl", ["split."]),
        ("knobwise train profile=", [f"profile={name} " for name in GROUPS["profile"]]),
        ("knobwise train experiment=lea", ["experiment=lean ", "experiment=leave_one_out "]),
        ("knobwise train experiment=selector sf", ["sft."]),
        ("knobwise train baselines=", ["baselines=true ", "baselines=false "]),
        ("knobwise compare runs/", []),
        ("knobwise fly ", []),
        ("knobwise completion z", ["zsh"]),
    ],
)
def test_completion(line: str, words: list[str]) -> None:
    assert completions(line) == words


@pytest.mark.parametrize(
    ("line", "words"), [("knobwise train pol", "policy= policy."), ("knobwise train loss=ex", "exact")]
)
def test_completion_in_bash(line: str, words: str, tmp_path: Path) -> None:
    """bash cuts words at `=`, and is given what comes after it."""
    (tmp_path / "completion").write_text(SCRIPTS["bash"])
    script = f"""
knobwise() {{ {sys.executable} -m knobwise "$@"; }}
source {tmp_path}/completion
COMP_LINE="{line}" COMP_POINT={len(line)}
_knobwise
echo "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert done.stdout.split() == words.split(), done.stderr
