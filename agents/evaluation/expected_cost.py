"""The cost of a controller's decisions by rule of thumb, which training charges."""

from __future__ import annotations

from knobwise.agents.deployed.text import LONGEST
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.envs.tables.units import MS

EXPECTED_US = 30.0
"""The time of a decision, by rule of thumb. Training charges this, so that it is repeatable;
results are charged what was measured."""
TEXT_US = 70.0
"""What a text adds to that."""
CHARACTER_US = 0.1
"""What each character of a text adds."""


def expected_cost_ms(table: ProfileTable) -> float:
    """Return the expected cost of a decision with its features, in ms."""
    if table.unit != MS:
        return 0.0
    cost_us = EXPECTED_US
    for values in table.texts.values():
        # of a long one both ends
        read = [min(len(value), 2 * LONGEST) for value in values]
        cost_us += TEXT_US + CHARACTER_US * sum(read) / len(read)
    return cost_us / 1e3 + table.features_ms
