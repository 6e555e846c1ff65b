"""One promised budget, on a machine that becomes a third slower, and well again."""

from dataclasses import replace

import pytest
import torch
from helpers import WITH_TEACHER, deployed, table_of

from knobwise.agents.calibration.promise import HELD_BACK
from knobwise.agents.problem import Problem
from knobwise.envs.tables.divisions import hold_back
from knobwise.serving.runtime import Runtime

BUDGET_MS = 2000.0
RIGHT = torch.tensor([0.81, 0.76, 0.70, 0.60])
"""The chance of a right answer of each of four models, the slowest first."""


def world(count, seed):
    """Features, times in ms and accuracies of requests: a feature says part of what they take."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 1, generator=generator).clamp(-2.5, 2.5)
    noise = (0.04 * torch.randn(count, 4, generator=generator)).exp()
    times = torch.tensor([1350.0, 950.0, 600.0, 250.0]) * (0.12 * x).exp() * noise
    right = (torch.rand(count, 4, generator=generator) < RIGHT).float()
    return x, times, right


@pytest.fixture(scope="module")
def agent():
    """A controller that promises .95 at one budget."""
    x, times, right = world(1000, seed=0)
    table = table_of(right, times, x)
    split, held = hold_back(table, table.split(), HELD_BACK, 0)
    problem = replace(Problem.from_table(table, split), calibration=held)
    return deployed(problem, replace(WITH_TEACHER, promise=0.95), torch.tensor([BUDGET_MS]))


class Replay:
    """Serves requests one after the other, at a clock of its own.

    Args:
        agent: decides.
    """

    def __init__(self, agent):
        self.runtime = Runtime(agent)
        self.seconds = 0.0
        self.runtime.now = lambda: self.seconds

    def serve(self, count, slower, seed):
        """Answer so many requests on a machine that takes `slower` times as long; whether each was
        on time, whether that was promised, and the chance that it was right, float [count, 3]."""
        rows = []
        x, times, _ = world(count, seed)
        (name,) = self.runtime.controller.feature_sizes
        for block, taken in zip(x.numpy(), times.tolist(), strict=True):
            request = self.runtime.begin(BUDGET_MS)
            decision = self.runtime.decide(request, {name: block})
            self.seconds += slower * taken[decision.choice] / 1e3
            result = self.runtime.finish(decision)
            promised = decision.promised.share > 0
            rows.append([result.met, promised, float(RIGHT[decision.choice])])
        return torch.tensor(rows, dtype=torch.float64)


def test_a_slower_machine_finds_the_next_rule_and_the_way_back(agent):
    replay = Replay(agent)
    well = replay.serve(200, 1.0, seed=1)
    slower = replay.serve(200, 4 / 3, seed=2)
    again = replay.serve(200, 1.0, seed=3)
    assert torch.cat([well, slower, again])[:, 1].all()
    # until the tracker has noticed, some come late
    for phase in (well, slower[50:], again):
        assert phase[:, 0].mean() >= 0.95
    # the largest as profiled, the next one on the slower machine
    assert well[:, 2].mean() == pytest.approx(0.81, abs=0.005)
    assert slower[:, 2].mean() >= 0.755
    assert again[-50:, 2].mean() >= 0.8


def test_a_machine_too_slow_for_any_rule_promises_nothing_and_finds_the_way_back(agent):
    replay = Replay(agent)
    replay.serve(50, 1.0, seed=1)
    stalled = replay.serve(200, 6.0, seed=2)
    assert not stalled[50:, 1].any()
    again = replay.serve(200, 1.0, seed=3)
    assert again[-50:, 1].all()
    assert again[-50:, 2].mean() >= 0.76
