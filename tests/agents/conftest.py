from __future__ import annotations

from collections.abc import Iterator

import pytest

from knobwise.agents.predictors.regressors import FAMILIES


@pytest.fixture(scope="module", autouse=True)
def few_trees(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fewer trees where tests are not about what the experts have learned."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.parent.name in ("serving", "stack"):
            patch.setitem(FAMILIES, "gradient_boosting", FAMILIES["gradient_boosting"]._replace(settings=(10, 40)))
        yield
