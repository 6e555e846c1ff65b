"""Fewer trees: these tests are about weights, prices and guards, whatever the experts have learned."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from knobwise.agents.predictors.regressors import FAMILIES


@pytest.fixture(scope="module", autouse=True)
def few_trees() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, "gradient_boosting", FAMILIES["gradient_boosting"]._replace(settings=(10, 40)))
        yield
