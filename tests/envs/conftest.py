"""Nothing that these tests write has to survive a power cut, and no property has to be quick."""

import pytest
from hypothesis import settings

from knobwise.common import files

settings.register_profile("without deadlines", deadline=None)
settings.load_profile("without deadlines")


@pytest.fixture(autouse=True, scope="module")
def _without_waiting_for_disks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "sync", lambda path: None)
        yield
