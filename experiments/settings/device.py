"""The check of the option `device`."""

from __future__ import annotations

from knobwise.common.errors import InputError


def a_device(value: str | None, usable: bool = False) -> None:
    """Refuse a device that is neither cpu nor cuda; if it must be `usable`, also a GPU that torch
    does not find. None, which leaves the choice to the model, is fine."""
    # such as cuda:1
    kind, _, number = (value or "cpu").partition(":")
    if kind not in ("cpu", "cuda") or not (number or "0").isdecimal():
        raise InputError(f"device={value}: must be cpu or cuda")
    if usable and kind == "cuda":
        import torch

        if int(number or 0) >= torch.cuda.device_count():
            raise InputError(
                f"device={value}: torch finds no such GPU here; device=cpu works everywhere"
            )
