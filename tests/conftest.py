"""Warnings of libraries are not ours; neither is their chatter. One thread: the tests run side by
side."""

import gc
import io
import itertools
import logging
import multiprocessing
import os
import signal
from pathlib import Path

import hypothesis
import pytest
import torch
import yaml
from commands import VARIABLES
from hydra.core.config_store import ConfigStore
from PIL import Image

from knobwise.agents.teacher.regressors import FAMILIES
from knobwise.common import interruption

PRELOADED = [
    *(
        "pytest",
        "hydra.compose",
        "torch.utils.tensorboard",
        "torchrl.collectors",
        "torchrl.weight_update",
        "wandb",
    ),
    *(f"knobwise.experiments.train.{module}" for module in ("controller", "selector", "run")),
]
"""By the process that others are forked from: imported there once, and not for seconds in each."""
# the machine may be busy; only `make campaign` looks for other examples than last time
hypothesis.settings.register_profile("new-examples", deadline=None)
hypothesis.settings.register_profile("same-examples", deadline=None, derandomize=True)
hypothesis.settings.load_profile("same-examples")
LONG = ("test_docs.py", "test_layout.py", "test_everywhere.py")
LESS = {
    "agents.evaluation.own_cost.ROUNDS": (1, "serving", "evaluation"),
    "agents.evaluation.own_cost.CALLS": (4, "serving", "evaluation"),
    "agents.evaluation.own_cost.WARM_UP": (1, "serving", "evaluation"),
    # by this clock every decision takes 30 µs, so that nothing hangs on how busy the machine is
    "agents.evaluation.own_cost.clock_ns": (itertools.count(0, 30_000).__next__,),
    "agents.learning.adaptation.STEPS": (50, "learning", "serving"),
    "agents.learning.adaptation.LR": (4e-3, "learning", "serving"),
    "agents.learning.update.FOLDS": (2,),
}
"""Setting of the product → how little work is enough, but for the tests of these folders."""
LESS_OF_RUNS = {
    "agents.selector.evaluation.REPEATS": (2,),
    "experiments.deploy.live.WARM_UP": (1,),
    "experiments.deploy.live.CALIBRATION": (6,),
    "experiments.evidence.explanation.REPEATS": (1, "evidence", "deploy"),
    "experiments.evidence.explanation.TOP": (2, "evidence", "deploy"),
}
"""The same for tests that run commands; others need not import these modules."""
CURVES = 3
"""Panels of training curves in a report, of some thirty."""
gc.disable()  # until all tests are imported


def pytest_collection_finish():
    gc.enable()


def pytest_collection_modifyitems(items):
    """Long tests first, so that no worker is left alone with one at the end."""
    items.sort(key=lambda item: item.path.name not in LONG)


@pytest.fixture(autouse=True, scope="session")
def _quiet_and_single_threaded():
    torch.set_num_threads(1)
    os.environ |= VARIABLES
    # the settings of each command are composed from dozens of files: by libyaml in a third less time
    yaml.SafeLoader = yaml.CSafeLoader
    # Hydra copies all that it was told for each, and again what it takes of it
    ConfigStore.__deepcopy__ = lambda store, _: store
    multiprocessing.set_forkserver_preload(PRELOADED)
    logging.getLogger("torchrl").setLevel(logging.WARNING)


@pytest.fixture(scope="module", autouse=True)
def _collections_skip_what_stays():
    """Libraries and tests are half a million objects, which every full collection of garbage would
    search for cycles again, for a sixth of the time of tests that compose many settings."""
    if len(gc.get_objects()) > 50_000:
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _little_work(request):
    """Fewer boosted trees, timed decisions and shuffles, and next to no pictures, where tests are
    not about these."""
    part, *_ = request.path.relative_to(Path(__file__).parent).parts
    if part == "test_golden.py":
        yield  # the product as it is
        return
    folder = request.path.parent.name
    runs = part not in ("agents", "envs", "losses")
    with pytest.MonkeyPatch.context() as patch:
        boosting = FAMILIES["gradient_boosting"]
        trees = {"teacher": (50, 100), "evaluation": boosting.settings}
        settings = trees.get(folder, (10, 40))
        patch.setitem(FAMILIES, "gradient_boosting", boosting._replace(settings=settings))
        for name, (value, *about) in (LESS | LESS_OF_RUNS if runs else LESS).items():
            if folder not in about:
                patch.setattr(f"knobwise.{name}", value)
        if runs and folder != "report":
            _draw_little(patch)
        yield


def _draw_little(patch):
    from knobwise.experiments.report import charts, page

    curves = charts.curves
    picture = io.BytesIO()
    Image.new("RGB", (1, 1)).save(picture, "png")

    def few_curves(points, *arguments, **options):
        panels = points["panel"].unique(maintain_order=True).head(CURVES).to_list()
        return curves(points.filter(points["panel"].is_in(panels)), *arguments, **options)

    patch.setattr(charts, "curves", few_curves)
    patch.setattr(page, "png", lambda figure: picture.getvalue())


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


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The folder of the test, as the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
