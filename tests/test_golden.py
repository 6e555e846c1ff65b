"""What is read, computed, decided, trained and logged is what it was: `tests/golden/` says how the
files are written. A change on purpose writes its group anew, and its commit says why."""

import json
import math

import pytest
from golden.write import golden, values_of

WITHIN = {"losses": 1e-6, "runs": 0.03, "logs": 1e-4}
"""How far numbers may be from those that another processor computed, relative to 1 or to their size;
everything else is equal."""


@pytest.mark.parametrize("group", ["tables", "losses", "decisions", "runs", "logs"])
def test_nothing_has_changed(group):
    wanted, made = golden(group), values_of(group)
    assert made.keys() == wanted.keys()
    within = WITHIN.get(group, 0.0)
    different = [name for name in wanted if not alike(made[name], wanted[name], within)]
    first = "".join(
        f"\n{json.dumps(side[name])}" for name in different[:1] for side in (wanted, made)
    )
    assert not different, f"{group}: {len(different)} of {len(wanted)} differ; wanted, made:{first}"


def alike(made, wanted, within):
    """Whether two values are equal, numbers within a share of their size."""
    if isinstance(wanted, dict) and isinstance(made, dict):
        keys = made.keys() == wanted.keys()
        return keys and all(alike(made[key], wanted[key], within) for key in wanted)
    if isinstance(wanted, list) and isinstance(made, list):
        return len(made) == len(wanted) and all(map(alike, made, wanted, [within] * len(made)))
    if isinstance(wanted, float) and isinstance(made, (int, float)):
        return math.isclose(made, wanted, rel_tol=within, abs_tol=within)
    return bool(made == wanted)
