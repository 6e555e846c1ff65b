"""Settings that give no answer, of which an update learns nothing."""

import json
from collections import Counter

import pytest
import torch

from knobwise.agents.learning.faults import faults_by_setting, objections_to_faults
from knobwise.agents.learning.logged import read_log
from knobwise.agents.learning.request_log import RequestLog

SMALL, LARGE, MIDDLE = ({"model": name} for name in ("small", "large", "middle"))
NAMES = [SMALL, LARGE, MIDDLE]
ATTEMPTS = {
    "model=small": Counter({False: 90}),
    "model=large": Counter({False: 60, True: 40}),
}


def test_settings_that_failed_are_listed_by_their_share():
    attempts = ATTEMPTS | {"model=middle": Counter({False: 9, True: 1})}
    large, middle = faults_by_setting(attempts)
    assert large == ("model=large", 100, 40)
    assert (middle.setting, middle.share) == ("model=middle", 0.1)


def test_choices_that_would_fail_more_often_are_doubtful():
    """40 of 190 requests failed: with ten more of each setting that fail as often, a share of
    (40 + 2.105) / 110 with the large one, and 2.105 / 100 with the small one."""
    old = torch.zeros(10, dtype=torch.int64)
    new = old.clone()
    new[:5] = 1
    points = 100 * (42.105 / 110 - 2.105 / 100) / 2
    lines = objections_to_faults(NAMES, ATTEMPTS, old, new)
    assert f"{points:.1f} %" in lines[0]
    assert lines[1:] == ["model=large: no answer to 40 of 100 requests"]
    assert objections_to_faults(NAMES, ATTEMPTS, new, old) == []
    assert objections_to_faults(NAMES, ATTEMPTS, new, new) == []
    # nothing is known of a setting, or of any
    assert objections_to_faults(NAMES, {}, old, new) == []
    new[:5] = 2
    assert "9.5 %" in objections_to_faults(NAMES, ATTEMPTS, old, new)[0]


def test_few_more_faults_are_no_objection():
    attempts = {
        "model=small": Counter({False: 1000}),
        "model=large": Counter({False: 996, True: 4}),
    }
    old, new = torch.zeros(2, 8, dtype=torch.int64)
    new[:] = 1
    assert objections_to_faults(NAMES, attempts, old, new) == []


def test_a_log_counts_what_failed_and_what_was_tried_before(tmp_path):
    log = RequestLog(tmp_path)
    log.add({"knobs": SMALL, "failed": True})
    log.add({"knobs": LARGE, "failed": True, "fault": "an error"})
    log.add({"knobs": SMALL, "failed": True, "tried": [LARGE, MIDDLE]})
    log.close()
    assert read_log(tmp_path).attempts == {
        "model=small": Counter({False: 2}),
        "model=large": Counter({True: 2}),
        "model=middle": Counter({True: 1}),
    }


@pytest.mark.parametrize("tried", [7, [7], ["large"], None, {"model": "large"}])
def test_what_is_no_setting_counts_as_damage(tmp_path, tried):
    RequestLog(tmp_path).add({"knobs": SMALL, "tried": tried, "fault": "an error"})
    log = read_log(tmp_path)
    assert log.rows == []
    assert "model=large" not in json.dumps(log.attempts)
