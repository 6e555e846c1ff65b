"""What ships to be tried on: an elastic vision-language model, OCR, SmolLM2
with demonstrations, canvases for the selector, a simulated table, and the profiles of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from knobwise.common.lazy import lazy

if TYPE_CHECKING:
    from knobwise.testbeds.profiles import builtin_profile as builtin_profile
    from knobwise.testbeds.simulated.calibrated import simulate as simulate
    from knobwise.testbeds.simulated.settings import SimulatedConfig as SimulatedConfig

DATA = Path(__file__).with_name("data")
"""The files that come with knobwise."""

MODULES = {
    "builtin_profile": "profiles",
    "simulate": "simulated.calibrated",
    "SimulatedConfig": "simulated.settings",
}
__getattr__ = lazy(__name__, MODULES)
__all__ = ["DATA", *MODULES]
