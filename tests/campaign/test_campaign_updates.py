"""A slice of the campaign on logs, with fixed seeds."""

import pytest

from campaign.updates.kinds import POISONED, SOUND
from campaign.updates.replays import GAIN, WORSE, replay
from campaign.updates.worlds import served

TAKEN_BEFORE = [
    "the smallest configuration always right",
    "the most chosen configuration flipped",
]
"""Kinds of poisoned logs that earlier updates took, as they took the last two of `DOUBTED`, and
lost 4 to 31 points by."""
DOUBTED = [
    "the second most chosen configuration always right",
    "few experts always right",
    "many crops always wrong",
    "explored answers always right",
    "a tenth of the time for the largest configuration, as if from a cache",
]
"""Kinds that make a change look better which loses points."""


def test_there_are_at_least_thirty_kinds_of_poisoned_logs_and_their_names_are_unlike():
    assert len(POISONED) >= 30
    assert not {*POISONED} & {*SOUND}


@pytest.mark.parametrize(
    "kind",
    [
        DOUBTED[0],
        *(pytest.param(kind, marks=pytest.mark.campaign) for kind in TAKEN_BEFORE),
        *(pytest.param(kind, marks=pytest.mark.campaign) for kind in DOUBTED[1:]),
    ],
)
def test_a_poisoned_log_changes_nothing_and_what_looks_better_by_it_is_doubted(kind):
    result = replay(kind, 0)
    assert not result.better
    assert result.change == 0
    if kind in DOUBTED:
        assert any(result.result.objections.values())
        assert result.possible < WORSE


@pytest.mark.parametrize("kind", ["more crops 1.8 times as slow, no labels", "twice as fast"])
def test_a_sound_log_with_something_to_gain_is_taken(kind):
    result = replay(kind, 0)
    assert result.better
    assert result.change > GAIN
    assert served().agent.decider.digest != result.result.agent.decider.digest
