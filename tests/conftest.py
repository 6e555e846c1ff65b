"""Warnings of libraries are not ours; neither is their chatter. One thread: the tests run side by
side."""

import logging
import multiprocessing
import os
import signal

import pytest
import torch
from commands import VARIABLES

from knobwise.agents.predictors.regressors import FAMILIES
from knobwise.agents.serving import own_cost
from knobwise.common import interruption

PRELOADED = [
    *(
        "pytest",
        "hydra.compose",
        "torch.utils.tensorboard",
        "torchrl.collectors",
        "torchrl.weight_update",
    ),
    *(f"knobwise.experiments.train.{module}" for module in ("controller", "selector", "run")),
]
"""By the process that others are forked from: imported there once, and not for seconds in each."""
LONG = ("test_tutorial.py", "test_docs.py", "test_layout.py", "test_everywhere.py")


def pytest_collection_modifyitems(items):
    """Long tests first, so that no worker is left alone with one at the end."""
    items.sort(key=lambda item: item.path.name not in LONG)


@pytest.fixture(autouse=True, scope="session")
def _quiet_and_single_threaded():
    torch.set_num_threads(1)
    os.environ |= VARIABLES
    multiprocessing.set_forkserver_preload(PRELOADED)
    logging.getLogger("torchrl").setLevel(logging.WARNING)


@pytest.fixture(scope="module", autouse=True)
def _little_work(request):
    """Fewer boosted trees where tests are not about what predictors have learned, and fewer
    decisions timed where they are not about time."""
    with pytest.MonkeyPatch.context() as patch:
        boosting = FAMILIES["gradient_boosting"]
        trees = {"predictors": (50, 100), "judging": boosting.settings}
        settings = trees.get(request.path.parent.name, (10, 40))
        patch.setitem(FAMILIES, "gradient_boosting", boosting._replace(settings=settings))
        if request.path.parent.name != "serving":
            patch.setattr(own_cost, "ROUNDS", 1)
            patch.setattr(own_cost, "CALLS", 4)
            patch.setattr(own_cost, "WARM_UP", 1)
        yield


@pytest.fixture(autouse=True)
def _seeded():
    """Environments without a seed draw theirs from torch's generator."""
    torch.manual_seed(0)


@pytest.fixture
def _signals_arrive(monkeypatch):
    """Also where the tests run in the background, where shells have Ctrl-C ignored."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in interruption.SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(interruption, "_latest_s", -10.0)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def _forked():
    """Processes are forked from the one that has imported everything."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("forkserver", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)
