"""A slice of the campaign with a fixed seed: all of its zeroes hold. `make campaign` makes the
rest."""

import warnings
from random import Random

import pytest

from campaign.formats import FORMATS, trials
from campaign.hostile.trials import load as hostile_load
from campaign.hostile.trials import odd
from campaign.kills import BY_NAME, kill_trial, reference_of
from campaign.limits import limit_trial
from campaign.server import load

SEED = 3


@pytest.mark.parametrize("name", FORMATS)
def test_changed_files_are_read_rightly_or_refused_in_a_line(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries, about what they were given
        made = list(trials(name, tmp_path / "files", SEED, range(8)))
    assert len(made) == 8
    assert not [trial for trial in made if trial[1] not in ("fine", "refused")]


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("name", "torn"),
    [
        ("request log", False),
        ("export", True),
        ("request log", True),
    ],
)
def test_what_was_killed_ends_like_what_was_not(name, torn, tmp_path):
    reference = reference_of(BY_NAME[name], tmp_path / "reference")
    outcome, note = kill_trial(BY_NAME[name], reference, tmp_path / "killed", Random(SEED), torn)
    assert outcome in ("fine", "refused"), note


@pytest.mark.campaign
@pytest.mark.parametrize("name", ["profile=0", "ASCII output"])
def test_limits_are_met_in_a_line(name, tmp_path):
    outcome, note = limit_trial(name, tmp_path / "limited")
    assert outcome in ("fine", "refused"), note


@pytest.mark.campaign
def test_no_answer_is_lost_and_no_label_mixed_up_when_workers_are_killed(tmp_path):
    seen, faults, wrong = load(tmp_path, seconds=4, seed=SEED, workers=2, clients=8)
    assert not faults, wrong
    assert seen["workers killed"] > 1
    assert seen["labels taken"] > 0


@pytest.mark.campaign
def test_no_answer_of_a_hostile_endpoint_is_lost_or_taken_for_what_it_is_not(tmp_path):
    seen, faults, examples, _ = hostile_load(tmp_path, 6, SEED, workers=2, clients=8)
    assert not faults, examples
    assert seen["workers killed"] > 1


@pytest.mark.campaign
def test_odd_names_leave_nothing_in_a_server(tmp_path):
    seen, faults = odd(tmp_path, 500)
    assert not faults, seen
