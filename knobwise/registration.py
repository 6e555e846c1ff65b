"""What `import knobwise` makes known: environments by their ids, and names by their former places.

The environments themselves know no profile that comes with knobwise. Only this file says where the
bandit gets one when it is made without a table.

gymnasium takes longer to import than NumPy alone, and commands and servers make no environment. So
the ids are registered once somebody imports gymnasium, or at once if that was before.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from knobwise import envs

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType

LIBRARY = "gymnasium"
MOVED = dict.fromkeys(("builtin_profile", "SimulatedConfig", "simulate"), "knobwise.testbeds")
"""Names that were once in `knobwise.envs`; programs that look there still find them."""


def register() -> None:
    """Make everything known, without importing it."""
    envs.MODULES.update(MOVED)
    if LIBRARY in sys.modules:
        register_environments()
    else:
        sys.meta_path.insert(0, AtImport())


def register_environments() -> None:
    """Make the ids of environments known to gymnasium."""
    import gymnasium

    gymnasium.register(
        id="knobwise/ConfigBandit-v0",
        entry_point="knobwise.testbeds.bandit:config_bandit",
        vector_entry_point="knobwise.testbeds.bandit:config_bandit_vector",
    )
    gymnasium.register(
        id="knobwise/DemonstrationBandit-v0",
        entry_point="knobwise.envs.demonstrations.gymnasium_env:DemonstrationBanditEnv",
    )


class AtImport:
    """Finds gymnasium as the finders behind it do, and registers the environments once it is
    loaded (a finder of Python's `sys.meta_path`, and a loader)."""

    _loader: Loader

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return what is to be loaded; None for another module than gymnasium, or without it."""
        if name != LIBRARY:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        spec = next(filter(None, (each.find_spec(name, path, target) for each in others)), None)
        if spec is not None and spec.loader is not None:
            self._loader = spec.loader
            spec.loader = self  # type: ignore[assignment]
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return the module as its own loader makes it."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Load gymnasium by its own loader, which others find in it, and register."""
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        sys.meta_path.remove(self)
        register_environments()
