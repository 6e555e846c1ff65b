"""Warnings of libraries are not ours; neither is their chatter. One thread: the tests run side by side."""

from __future__ import annotations

import logging

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _quiet_and_single_threaded() -> None:
    torch.set_num_threads(1)
    logging.getLogger("torchrl").setLevel(logging.WARNING)
