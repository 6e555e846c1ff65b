"""A promise that the samples cannot carry is refused before anything is trained."""

import re
from dataclasses import replace

import numpy as np
import pytest
from commands import TABLE, refused, words_of, write_table
from helpers import input_error, small_table

from knobwise.agents.calibration.promise import largest_promise, requests_needed
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.common.errors import InputError
from knobwise.experiments.settings.options import RepeatedSplitConfig, TrainRun
from knobwise.experiments.train.problems import problem_of_run


def run_of(promise=0.95, **split):
    """The settings of a run with a promise."""
    return TrainRun(policy=PolicyConfig(promise=promise), split=RepeatedSplitConfig(**split))


def refusal(config, table):
    """What is said of a promise that these samples cannot carry; None where they can."""
    try:
        problem_of_run(config, table)
    except InputError as error:
        return str(error)
    return None


def samples_said(said):
    """The number of samples that a refusal asks for."""
    return int(re.search(r"measure ([\d,]+) samples", said)[1].replace(",", ""))


def table_with(count, clusters=0, datasets=1):
    """A table of so many samples; in clusters of 1, 2, … `clusters` samples, if any."""
    changes = {}
    if clusters:
        sizes = np.resize(np.arange(1, clusters + 1), count)
        names = np.repeat(np.arange(count), sizes)[:count]
        changes["clusters"] = tuple(map(str, names))
    if datasets > 1:
        changes["datasets"] = tuple(f"d{i % datasets}" for i in range(count))
    return small_table(count, **changes)


@pytest.mark.parametrize(
    ("promise", "split", "samples"),
    [
        # .2·n > 58.5 for n = 293 on, which are .8·366 and .7·418 when rounded
        (0.95, {}, 366),
        (0.95, {"validation": 0.1}, 418),
        (0.9, {"folds": 5}, 0),
        # .2·1493 > 298.5, and .8·1866 is 1493 when rounded
        (0.99, {"seed": 3}, 1866),
    ],
)
def test_the_number_of_samples_is_the_first_that_passes(promise, split, samples):
    config = run_of(promise, **split)
    said = refusal(config, table_with(300 if promise > 0.9 else 100))
    assert f"policy.promise={promise:g}" in said
    needed = samples_said(said)
    assert needed == (samples or needed)
    assert refusal(config, table_with(needed - 1)) is not None
    assert refusal(config, table_with(needed)) is None
    held = len(problem_of_run(config, table_with(needed)).calibration)
    assert held == requests_needed(promise)


def test_the_largest_promise_and_the_split_that_are_named_pass():
    table = table_with(300)
    said = refusal(run_of(), table)
    promise = float(re.search(r"at most policy.promise=(\S+),", said)[1])
    assert refusal(run_of(promise), table) is None
    assert refusal(run_of(promise + 0.001), table) is not None
    train = float(re.search(r"split.train=(\S+),", said)[1])
    assert refusal(run_of(train=train), table) is None
    assert refusal(run_of(train=train - 0.01), table) is not None
    # where no split of these samples carries it, or the test part is fixed, none is named
    assert "split.train" not in refusal(run_of(0.99), table)
    assert "split.train" not in refusal(run_of(folds=5), table)
    assert "split.train" not in refusal(run_of(leave_out="d0"), table_with(300, datasets=3))


@pytest.mark.parametrize("count", [1, 2, 13, 48, 59, 298, 299])
def test_the_largest_promise_of_some_requests_takes_no_more(count):
    largest = largest_promise(count)
    assert requests_needed(largest) <= count < requests_needed(largest + 0.001)


def test_of_a_cluster_one_request_counts():
    """Of 600 samples in clusters of 1, 2 and 3, 96 are held back, in about 48 clusters, of which
    two thirds are drawn."""
    table = table_with(600, clusters=3)
    needed = samples_said(refusal(run_of(), table))
    assert needed == pytest.approx(600 * 59 / 32, rel=0.2)
    assert refusal(run_of(), table_with(600)) is None
    datasets = refusal(run_of(), table_with(300, datasets=4))
    assert 340 < samples_said(datasets) < 400


def test_each_split_has_to_carry_it_and_the_command_trains_nothing(home, capsys):
    write_table(300)
    words = words_of("policy.promise=0.95 split.repeats=2 tracking=disabled")
    assert "policy.promise=0.95" in refused(["train", *TABLE, *words], capsys)
    with input_error("policy.promise=0.95"):
        problem_of_run(run_of(repeats=2), table_with(300), number=1)


def test_what_no_promise_asks_for_is_not_counted():
    assert problem_of_run(replace(run_of(), policy=PolicyConfig()), table_with(30)).split
