"""Warnings of libraries are not ours; neither is their chatter. One thread: the tests run side by side."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator

import pytest
import torch

from knobwise.agents.predictors.regressors import FAMILIES
from knobwise.common import interruption

LONG = ("test_tutorial.py", "test_docs.py", "test_layout.py", "test_everywhere.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests first, so that no worker is left alone with one at the end."""
    items.sort(key=lambda item: item.path.name not in LONG)


@pytest.fixture(autouse=True, scope="session")
def _quiet_and_single_threaded() -> None:
    torch.set_num_threads(1)
    logging.getLogger("torchrl").setLevel(logging.WARNING)


@pytest.fixture(scope="module", autouse=True)
def _few_trees(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fewer boosted trees where tests are not about what predictors have learned."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.parent.name not in ("predictors", "judging"):
            patch.setitem(FAMILIES, "gradient_boosting", FAMILIES["gradient_boosting"]._replace(settings=(10, 40)))
        yield


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Environments without a seed draw theirs from torch's generator."""
    torch.manual_seed(0)


@pytest.fixture
def _signals_arrive(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Also where the tests run in the background, where shells have Ctrl-C ignored."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in interruption.SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(interruption, "_latest_s", -10.0)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
