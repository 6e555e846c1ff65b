"""Nothing that these tests write has to survive a power cut."""

import pytest

from knobwise.common import files


@pytest.fixture(autouse=True, scope="module")
def _without_waiting_for_disks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "sync", lambda path: None)
        yield
