"""Environments are known to gymnasium, whenever it is imported, and importing knobwise imports it
not."""

import subprocess
import sys

import pytest

ID = "knobwise/ConfigBandit-v0"
LOADED = "gymnasium.__spec__.loader.get_filename('gymnasium') == gymnasium.__file__"


@pytest.mark.parametrize(
    "imports",
    [
        "import knobwise, gymnasium",
        "import gymnasium, knobwise",
        "import knobwise.envs, gymnasium",
        "import knobwise; from gymnasium.envs.registration import registry; import gymnasium",
        # libraries ask so whether there is one
        "import importlib.util, knobwise; importlib.util.find_spec('gymnasium'); import gymnasium",
    ],
)
def test_environments_are_known_whatever_is_imported_first(imports):
    script = f"{imports}\nassert {ID!r} in gymnasium.registry\nassert {LOADED}"
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)


def test_an_import_of_gymnasium_that_fails_may_be_tried_again():
    script = f"""
import sys
import knobwise
sys.modules["gymnasium.core"] = None
try:
    import gymnasium
except ImportError:
    del sys.modules["gymnasium.core"]
import gymnasium
assert {ID!r} in gymnasium.registry
"""
    subprocess.run([sys.executable, "-c", script], check=True)
