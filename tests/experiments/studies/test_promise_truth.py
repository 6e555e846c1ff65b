"""How often a promise is wrong, in a world by hand."""

import pytest
import torch
from helpers import table_of

from knobwise.agents.problem import Problem
from knobwise.envs.tables.profile_table import Split
from knobwise.experiments.studies.promise_truth import World, broken_in


def test_a_wrong_promise_that_goes_on_is_counted_where_it_is_said():
    """Of 4,000 others each configuration is late for 6 % and 5.2 %, by itself: 10 ms are enough for
    the first, 20 for the second. The fitted samples take the first for safest at 10 ms, and the
    second at 20."""
    fitted, others = torch.arange(4100).split([100, 4000])
    latency = torch.tensor([[5.0, 15.0]] * 4100)
    generator = torch.Generator().manual_seed(0)
    for configuration, misses in enumerate((240, 208)):
        late = others[torch.randperm(4000, generator=generator)[:misses]]
        latency[late, configuration] = 1000.0
    latency[:2, 0] = 1000.0
    # as accurate, so that the safest is the only candidate
    table = table_of(torch.full((4100, 2), 0.5), latency)
    problem = Problem.from_table(table, Split(fitted, fitted[:0], others))
    nothing = torch.zeros(4100, dtype=torch.int64)
    world = World(problem, torch.tensor([10.0, 20.0]), lambda limit_ms, quantile: nothing)
    broken, _, wrong, promised = broken_in(world, 200, 300)[0.95]
    # both rules are below .95 on time: whatever passes is wrong, and at 20 ms either may be
    assert 0 < broken <= 0.05 + 2 * (0.05 * 0.95 / 300) ** 0.5
    assert broken < wrong <= 2 * promised + 1e-9
    assert wrong == pytest.approx(2 * promised, abs=0.01)
