"""Texts of a table as feature blocks: what is fitted, on which samples, and at which cost."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import input_error, small_table

from knobwise.agents.deployed.text import LONGEST, SURFACE, parts_of
from knobwise.agents.evaluation import own_cost
from knobwise.agents.evaluation.texts import encoded_by, fit_encoders, fitted_arrays
from knobwise.agents.teacher.beliefs import fit_beliefs
from knobwise.envs.tables.profile_table import Split

EASY = "please add the numbers {} and {}"
HARD = "write a poem of {} lines about the sea and {} ships"


def texts_of(samples, seed=0):
    draw = np.random.default_rng(seed)
    kinds = draw.random(samples) < 0.5
    numbers = draw.integers(100, size=(samples, 2))
    return [
        (HARD if kind else EASY).format(*pair) for kind, pair in zip(kinds, numbers, strict=True)
    ]


def text_table(samples=60, **changes):
    return replace(small_table(samples, **changes), texts={"prompt": texts_of(samples)})


def encoded(table):
    return encoded_by(table, fit_encoders(table, table.split()))


def test_a_table_without_texts_stays_the_same_object():
    table = small_table()
    assert fit_encoders(table, table.split()) == {}
    assert encoded(table) is table


def test_texts_become_a_block_of_their_name_and_the_digest_stays():
    table = text_table()
    encoders = fit_encoders(table, table.split())
    encoder = encoders["prompt"]
    read = encoded_by(table, encoders)
    assert [*read.features] == ["image_features", "language_features", "prompt"]
    block = read.features["prompt"]
    assert block.shape == (60, encoder.width)
    for text, row in zip(table.texts["prompt"], block.numpy(), strict=True):
        assert encoder(text).tobytes() == row.tobytes()
    # texts are texts
    assert read.texts == table.texts
    assert read.digest == table.digest
    # what a checkpoint holds gives the same numbers
    again = encoded_by(table, {"prompt": type(encoder)(encoder.arrays)})
    assert torch.equal(again.features["prompt"], block)


def test_holes_are_predicted_with_the_texts_as_features():
    table = text_table(60, holes=0.3)
    split = table.split()
    read = encoded(table)
    beliefs = fit_beliefs(read, split, folds=2)
    assert beliefs.filled.mask.all()
    assert "prompt" in beliefs.filled.features
    # the text tells something
    unread = fit_beliefs(table, split, folds=2)
    assert not torch.equal(beliefs.predicted.accuracy, unread.predicted.accuracy)
    assert beliefs.measured.digest == table.digest


def test_rare_parts_count_more_and_single_ones_not_at_all():
    table = small_table(8)
    texts = ["aa bb", "aa bb", "aa cc", "aa dd", "aa", "aa", "unique", ""]
    rows = torch.arange(6)
    arrays = fitted_arrays(texts, table, Split(rows, torch.tensor([6]), torch.tensor([7])))

    def weight(word):
        # the word itself comes after its runs
        part = parts_of(word).hashes[-1]
        return float(arrays["weights"][arrays["slots"][part]]) * bool(arrays["slots"][part])

    assert weight("bb") == pytest.approx(math.log(7 / 3))
    # in all six texts, and in one
    assert weight("aa") == weight("cc") == weight("unique") == 0.0
    # of the one validation text no run is known, of 4, and its one word is not; two of each count
    assert arrays["limits"].tolist() == pytest.approx([0.5 * 2 / 6, 0.5 * 2 / 3, 2 * len("unique")])


def test_nothing_is_fitted_on_samples_to_judge_on():
    table = text_table()
    split = table.split()
    first = fit_encoders(table, split)["prompt"].arrays
    texts = list(table.texts["prompt"])
    for row in split.test.tolist():
        texts[row] = "quite another text of zebras and xylophones " * 50
    table = replace(table, texts={"prompt": texts})
    encoders = fit_encoders(table, split)
    for name, values in encoders["prompt"].arrays.items():
        np.testing.assert_array_equal(values, first[name])
    other = encoded_by(table, encoders)
    # and such a text is unlike those of training
    assert other.features["prompt"][split.test].isnan().all()
    assert not other.features["prompt"][split.fitted].isnan().any()


@pytest.mark.parametrize("texts", [["", ""], ["a", "b"], ["x" * 100_000, "short"]])
def test_texts_that_tell_nothing_leave_only_their_surface(texts):
    table = small_table(20)
    table = replace(table, texts={"prompt": texts * 10})
    block = encoded(table).features["prompt"]
    assert block.shape[1] == len(SURFACE)
    assert block[:, 0].tolist() == pytest.approx([math.log1p(len(text)) for text in texts] * 10)


def test_several_texts_and_a_name_that_is_taken():
    table = text_table()
    both = replace(table, texts=table.texts | {"system": texts_of(60, 1)})
    assert fit_encoders(both, both.split()).keys() == {"prompt", "system"}
    taken = replace(table, texts={"image_features": texts_of(60)})
    with input_error("'image_features'"):
        encoded(taken)
    with input_error("chat='first'"):
        fit_encoders(table, table.split(), "first")


def test_a_text_costs_by_its_length():
    table = replace(text_table(4), texts={"prompt": ["", "ab", "a" * 10, "a" * 1_000_000]})
    lengths = [0, 2, 10, 2 * LONGEST]
    wanted = own_cost.TEXT_US + own_cost.CHARACTER_US * np.mean(lengths)
    plain = own_cost.expected_cost_ms(small_table(4))
    assert own_cost.expected_cost_ms(table) - plain == pytest.approx(wanted / 1e3)


def test_decisions_are_timed_on_texts_of_all_lengths(monkeypatch):
    """The mean over them counts, where a clock goes on by a µs for each character."""
    monkeypatch.setattr(own_cost, "_transformer", lambda: lambda x: x)
    now = [0]
    monkeypatch.setattr(own_cost, "clock_ns", lambda: now[0])
    texts = ["a" * (i + 1) for i in range(40)]
    table = replace(small_table(40), texts={"prompt": texts})
    seen = []

    class Reading:
        def decide_index(self, features, budget_ms):
            seen.append(features["prompt"])
            now[0] += 1000 * len(features["prompt"])

    rows = torch.arange(40)
    (micros,) = own_cost.decision_us([Reading()], table, rows, torch.tensor([5.0]))
    assert {len(text) for text in seen} == {*range(2, 41, 2)}
    # the first calls are not counted, so samples 6 to 20 and 1 to 5 are: all of them once
    assert micros.tolist() == [np.mean(range(2, 41, 2))]
