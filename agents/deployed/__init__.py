"""Deployed decisions: a trained policy without gradients, in NumPy alone.

This folder needs only NumPy: `knobwise export` copies it next to `controller.npz`. The data flow of
a decision is: feature blocks → `Normaliser` → `Heads` → guard → a configuration.

    from policy import NumpyController

    controller = NumpyController.load("controller.npz")
    controller.decide({"image_features": image, "language_features": language}, budget_ms=25.0)
    controller.decide({"kind": "ocr", "prompt_tokens": 33}, budget_ms=60.0)  # named columns
"""

from .controller import NumpyController

__all__ = ["NumpyController"]
