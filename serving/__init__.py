"""Serving: a deployed policy in front of a model, or of other people's servers (`proxy`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from knobwise.common.lazy import lazy

if TYPE_CHECKING:
    from knobwise.serving.adaptive_model import AdaptiveModel as AdaptiveModel
    from knobwise.serving.knob_policy import KnobPolicy as KnobPolicy
    from knobwise.serving.wrapper import wrap as wrap

MODULES = {
    "AdaptiveModel": "adaptive_model",
    "KnobPolicy": "knob_policy",
    "wrap": "wrapper",
}
__getattr__ = lazy(__name__, MODULES)
__all__ = list(MODULES)
