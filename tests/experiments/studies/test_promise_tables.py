"""The study of promises: what the policy that promises nothing is charged for."""

from types import SimpleNamespace

import numpy as np
import torch
from helpers import table_of

from knobwise.agents.problem import Problem
from knobwise.experiments.studies import promise_tables as study


class Guarded:
    """Takes the first configuration; below 3 ms static does, without features."""

    def choose(self, features, limits, mask=None):
        return np.zeros(len(limits), np.int64)

    def reads_features(self, limits):
        return limits >= 3


def test_where_static_decides_nothing_waits_for_features(monkeypatch):
    look = torch.full((20, 1), 3.0)
    table = table_of([[1.0]] * 20, [[4.0]] * 20, torch.zeros(20, 1), first_look_ms=look)
    setup = SimpleNamespace(problem=Problem.from_table(table, table.split()))
    deployed = SimpleNamespace(decider=Guarded())
    monkeypatch.setattr(study, "calibrate_controller", lambda *about: deployed)
    # an answer takes 1 ms, and by features 4
    rows = study.unpromised(setup, torch.tensor([0.5, 2.0, 3.0, 5.0]))
    assert [row["test"] for row in rows] == [0.0, 1.0, 0.0, 1.0]
