"""What the answers of each setting took beside what was expected: factors and changes by hand."""

import json
import math

import numpy as np
import pytest

from knobwise.agents.learning.times import KNOWN, NORMAL, times_by_setting
from knobwise.experiments.inspection.logs import facts_of_times
from knobwise.experiments.report.inspection import said_of_times


def rows_of(model, factors, expected_ms=100.0, start=0.0):
    """Rows of answers that took so many times as long as expected, a second apart."""
    return [
        {
            "knobs": {"model": model},
            "answer_ms": factor * expected_ms,
            "log_latency": math.log(expected_ms),
            "time": start + second,
        }
        for second, factor in enumerate(factors)
    ]


def noisy(count, factor=1.0, spread=0.1, seed=0):
    return factor * np.exp(np.random.default_rng(seed).normal(0, spread, count))


def test_a_setting_that_became_slower_is_named_with_its_factor_and_the_moment():
    slower = [*noisy(120), *noisy(80, 3.1, seed=1)]
    rows = [*rows_of("pro", slower), *rows_of("mini", noisy(300, seed=2), 20.0)]
    mini, pro = times_by_setting(rows)
    assert (mini.setting, mini.answers, mini.since) == ("model=mini", 300, None)
    assert not mini.changed
    assert mini.took == pytest.approx(20, rel=0.03)
    assert pro.setting == "model=pro"
    assert pro.since == pytest.approx(120, abs=2)
    assert pro.answers == pytest.approx(80, abs=2)
    assert pro.factor == pytest.approx(3.1, rel=0.05)
    assert pro.took == pytest.approx(310, rel=0.05)
    assert pro.changed
    assert pro.far


def test_one_that_was_slower_all_along_has_no_moment():
    (pro,) = times_by_setting(rows_of("pro", noisy(100, 1.5)))
    assert pro.since is None
    assert pro.changed
    assert not pro.far


def test_chance_and_a_stall_are_no_change():
    for seed in range(20):
        values = noisy(100, spread=0.4, seed=seed)
        values[50] = 100.0
        (pro,) = times_by_setting(rows_of("pro", values))
        assert (pro.since, pro.changed) == (None, False)


def rows_left(model, factors, left):
    """Rows of which the clients left some when so many times the expected time was over."""
    rows = rows_of(model, factors)
    return [
        row | {"abandoned": True} if leaves else row for row, leaves in zip(rows, left, strict=True)
    ]


def test_of_answers_that_clients_left_the_time_is_only_known_to_be_no_less():
    # 0.5, then whoever left after 1.2: the medians of 15 by hand, with 6, 7 and 8 of them
    for count, factor in ((6, 0.5), (7, 0.5), (8, 1.2)):
        left = [n % 2 == 0 and n // 2 < count for n in range(15)]
        rows = rows_left("pro", [1.2 if leaves else 0.5 for leaves in left], left)
        (pro,) = times_by_setting(rows)
        assert (pro.answers, pro.left, pro.at_least) == (15, count, count == 8)
        assert pro.factor == pytest.approx(factor)
        assert pro.took == pytest.approx(100 * factor)
    assert pro.more == 0
    # of an even number, half is enough: the upper of the two in the middle has no end
    (pro,) = times_by_setting(rows_left("pro", [0.5, 1.2] * 6, [False, True] * 6))
    assert (pro.at_least, pro.left) == (True, 6)
    # by facts of JSON alone
    assert all(map(math.isfinite, (pro.factor, pro.error, pro.took)))


def test_what_clients_left_before_it_was_expected_is_no_shorter_time():
    (pro,) = times_by_setting(rows_left("pro", noisy(40, 0.3), [True] * 40))
    assert pro.at_least
    assert pro.factor == pytest.approx(0.3, rel=0.1)
    assert (pro.off, pro.changed, pro.far) == (False, False, False)
    # three times as long, at least, is a change
    (pro,) = times_by_setting(rows_left("pro", noisy(40, 3.0), [True] * 40))
    assert (pro.changed, pro.far) == (True, True)


def test_how_long_an_answer_takes_at_least_is_said_so():
    rows = rows_left("pro", noisy(40, 3.0), [True] * 30 + [False] * 10)
    facts = json.loads(json.dumps(facts_of_times(rows)))
    (sentence, *_) = said_of_times(facts, "ms", "served")
    assert sentence.name == "times_at_least"
    fields = sentence.fields
    assert (fields["left"], fields["answers"]) == ("30", "40 answers")
    assert fields["factor"] in str(sentence)


def test_how_many_answers_more_would_tell():
    # pairs that differ by d: the median of |differences| is d, so σ = 1.4826·d/√2
    values = np.exp(np.tile([0.2, -0.2], 8))
    (pro,) = times_by_setting(rows_of("pro", values))
    spread = 1.4826 * 0.4 / math.sqrt(2)
    assert pro.error == pytest.approx(NORMAL * spread / 4)
    needed = (1.96 * NORMAL * spread / math.log(KNOWN)) ** 2
    assert pro.more == math.ceil(needed) - 16
    assert times_by_setting(rows_of("pro", values[:9])) == []
