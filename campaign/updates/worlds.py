"""A small simulated table, a lean controller for it, and logs of what it served."""

import functools
from dataclasses import dataclass, replace

import numpy as np
import torch
from helpers import arrays, small_table
from tensordict import TensorDict

import knobwise
from knobwise.agents.learning.logged import Logged
from knobwise.envs import default_budgets
from knobwise.serving.exploration import Exploration, near_best

TRAINED, SERVED = 500, 800
"""Samples that the controller was trained on, and others that requests are drawn from."""
REQUESTS = 1500
"""Requests in a log."""
EXPLORE = 0.2
EXPLORE_LOSS = 0.25
LEAN = {"teacher_iterations": 200, "pretrain_iterations": 200, "iterations": 0}
LEAN |= {"evaluate_every": 100, "contexts": 128, "minibatch": 128}


@dataclass
class World:
    """What every request would get: accuracy and ms of every configuration [N, C] each."""

    accuracy: torch.Tensor
    latency_ms: torch.Tensor

    def utility(self, choices, budgets):
        """The mean utility of choices [N, B] under budgets [B]."""
        met = self.latency_ms.gather(1, choices) <= budgets
        return float((self.accuracy.gather(1, choices) * met).double().mean())


class Served:
    """The controller, and what it decides for every sample and budget."""

    def __init__(self):
        known = small_table(TRAINED)
        options = {
            "policy.hidden": 16,
            "policy.fold_networks": 2,
            "optimiser": LEAN,
            "own_cost": False,
        }
        self.agent = knobwise.fit(known, policy="utility", **options).agent
        self.table = small_table(SERVED, seed=1)
        self.budgets = default_budgets(known).double()
        self.world = World(self.table.accuracy, self.table.latency_ms)
        self.best = self.decided(self.agent)
        # the chances of every draw
        exploration = Exploration(EXPLORE, EXPLORE_LOSS)
        shape = (SERVED, len(self.budgets), self.table.num_configurations)
        self.propensity = torch.zeros(shape).double()
        for row in range(SERVED):
            features = arrays(self.table, row)
            for b, budget in enumerate(self.budgets.tolist()):
                close = near_best(self.agent.decider, features, budget, None, EXPLORE_LOSS)
                chances = exploration.chances(int(self.best[row, b]), close)
                for choice, chance in chances.items():
                    self.propensity[row, b, choice] = chance

    def decided(self, agent):
        """The choices of a controller for all samples and budgets, int64 [N, B]."""
        limits = np.full((len(self.budgets), SERVED), self.budgets.numpy()[:, None])
        choices = [agent.decider.choose(arrays(self.table), each) for each in limits]
        return torch.from_numpy(np.stack(choices, 1))


@functools.cache
def served():
    """Everything that all replays share; training takes seconds."""
    return Served()


class Log:
    """A sound log of n requests to the served controller, in a world that some function has
    changed; it can be tampered with.

    Attributes:
        rows: the sample of each request, as all else a tensor [n].
        best: what the controller chose before anything was drawn.
        propensity: [n, C].
        label: NaN for none.
    """

    def __init__(self, seed, change=None):
        base = served()
        self.world = world = replace(base.world)
        if change is not None:
            change(world, np.random.default_rng(seed))
        torch.manual_seed(seed)
        self.rows = rows = torch.randint(SERVED, (REQUESTS,))
        budget = torch.randint(len(base.budgets), (REQUESTS,))
        self.best = base.best[rows, budget]
        self.propensity = base.propensity[rows, budget]
        self.choice = choice = self.propensity.multinomial(1).squeeze(1)
        self.limit_ms = base.budgets[budget]
        self.features = TensorDict(base.table.features, [SERVED])[rows]
        self.answer_ms = world.latency_ms[rows, choice].double()
        self.met = self.answer_ms <= self.limit_ms
        self.label = world.accuracy[rows, choice].double()

    @property
    def explored(self):
        """Requests whose draw was not the best."""
        return self.choice != self.best

    def draw(self, share):
        """A random part of the requests, bool [n]."""
        return torch.rand(len(self.rows)) < share

    def order(self):
        """A random order of the requests, int64 [n]."""
        return torch.randperm(len(self.rows))

    def take(self, kept):
        """Only these requests, by a mask or by indices."""
        for name, values in vars(self).items():
            if isinstance(values, torch.Tensor | TensorDict):
                setattr(self, name, values[kept])

    def logged(self):
        """The log as `update` reads it."""
        n = len(self.rows)
        return Logged(
            self.features,
            seen=torch.ones(n, dtype=torch.bool),
            offset=torch.zeros(n, self.propensity.shape[1]),
            scale=torch.ones(n).double(),
            propensity=self.propensity,
            choice=self.choice,
            guard_ms=self.limit_ms,
            limit_ms=self.limit_ms,
            answer_ms=self.answer_ms,
            met=self.met,
            abandoned=torch.zeros(n, dtype=torch.bool),
            accuracy=self.label,
            batch_size=[n],
        )
