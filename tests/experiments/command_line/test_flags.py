"""Flags of the original scripts: a word with dashes is answered by our words for it."""

import shlex
from pathlib import Path

import pytest
from commands import mistake, words_of

from knobwise.experiments.command_line.compose import composed
from knobwise.experiments.command_line.flags import CONTROLLERS, SELECTORS

ROOT = Path(__file__).resolve().parents[3]
VALUES = {
    "dataset_name": "text_vqa",
    "train_split": "0.7",
    "reward_mode": "hybrid",
    "min_positive_ratio": "0.2",
}


def ours(line):
    """The words that an answer says to write."""
    words = line.partition("write ")[2].partition(";")[0].partition(" (")[0]
    return shlex.split(words)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("train --batch_size 64", "optimiser.contexts=64 optimiser.minibatch=64"),
        ("train --lr=1e-4", "optimiser.lr=1e-4"),
        ("train --num-epochs 100", "optimiser.iterations=100"),
        ("train —lr 1e-4", "optimiser.lr=1e-4"),
        ("train -lr 1e-4 experiment=seeds", "optimiser.lr=1e-4"),
        ("train -m --lr 1e-4,1e-3", "optimiser.lr=1e-4,1e-3"),
        ("train --policy.hidden 32", "policy.hidden=32"),
        ("train --seeds 0 1", "seeds=[0,1]"),
        ("train experiment=selector --lr 1e-3", "grpo.lr=1e-3"),
        ("evaluate --checkpoint runs/x", "checkpoint=runs/x"),
        (
            "train --sft_ckpt a/x.ckpt --beam_data b.json --rce_epochs 1 --grpo_epochs 3",
            "experiment=selector_seeds init_from=a/x.ckpt beams.path=b.json rce.epochs=1 "
            "grpo.epochs=3",
        ),
    ],
)
def test_a_word_with_dashes_is_answered_by_our_words(words, wanted, capsys):
    assert ours(mistake(words_of(words), capsys)) == wanted.split()


@pytest.mark.parametrize(
    "words", ["train --cfg job", "train -x", "evaluate -m", "train --force_recompute"]
)
def test_other_words_with_dashes_are_refused_in_a_line(words, capsys):
    assert "hydra.cc" not in mistake(words_of(words), capsys)


@pytest.mark.parametrize("word", ["num_epochs=100", "epochs=100", "NUM_EPOCHS=100"])
def test_epochs_are_iterations_not_passes_over_a_batch(word, capsys):
    line = mistake(["train", word], capsys)
    assert "optimiser.iterations=100" in line
    assert "optimiser.epochs" not in line


@pytest.mark.parametrize("schema", ["train", "train_selector"])
def test_our_words_are_options_and_stand_in_the_docs(schema):
    docs = (ROOT / "docs/experiments.md").read_text()
    words = ["profile=exp5_exp6"]
    table = CONTROLLERS
    if schema == "train_selector":
        words = ["experiment=selector_seeds", "beams=files"]
        table = SELECTORS
    for name, ours in table.items():
        assert f"`--{name}`" in docs
        assert ours.replace("{}", "…") in docs
        words += ours.replace("{}", VALUES.get(name, "1")).split()
    composed(schema, words)
