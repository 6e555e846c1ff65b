"""Flags of the original scripts: a word with dashes is answered by our words for it."""

import shlex
from pathlib import Path

import pytest
from commands import mistake, words_of

from knobwise.experiments.command_line.compose import compose_config
from knobwise.experiments.command_line.flags import CONTROLLERS, SELECTORS, in_our_words
from knobwise.experiments.command_line.registry import schema_of

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
            "experiment=selector_seeds init_from=a/x.ckpt beams=files beams.path=b.json "
            "beams.embeddings=FILE rce.epochs=1 grpo.epochs=3",
        ),
        (
            "train --exp5_dir a --model_path c --num_epochs 100",
            "experiment=seeds profile=exp5_exp6 profile.exp5_dir=a profile.features=FILE "
            "optimiser.iterations=100",
        ),
        ("train --train_split 0.8 experiment=controller", "split.train=0.8 split.validation=0.1"),
        ("train --experiment seeds --lr 1e-3", "experiment=seeds optimiser.lr=1e-3"),
        ("train --use_rank_advantage", "experiment=selector_seeds loss.advantage=rank"),
        ("train --use_rank_advantage False", "experiment=selector_seeds loss.advantage=zscore"),
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


def test_a_pasted_answer_is_understood(capsys):
    """With files in place of FILE."""
    for words in ("--beam_data b.json --kl_beta 0.1", "--dataset_name okvqa --train_split 0.8"):
        pasted = ours(mistake(["train", *words.split()], capsys))
        compose_config(schema_of("train", pasted), pasted)


@pytest.mark.parametrize("schema", ["train", "train_selector"])
def test_our_words_are_options_and_stand_in_the_docs(schema):
    docs = (ROOT / "docs/experiments.md").read_text()
    words = ["profile=exp5_exp6"]
    table = CONTROLLERS
    if schema == "train_selector":
        words = ["experiment=selector_seeds", "beams=files"]
        table = SELECTORS
    for name in table:
        assert f"`--{name}`" in docs
        assert in_our_words(schema, name, "").replace("'", "") in docs
        words += shlex.split(in_our_words(schema, name, VALUES.get(name, "1")))
    compose_config(schema, words)
