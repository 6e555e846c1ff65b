"""Checks of settings. Each raises an InputError that names the key if its value cannot be used."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path

from knobwise.common.errors import InputError


def one_of(key: str, value: str, known: Collection[str]) -> None:
    """Refuse a word that is not among the known ones."""
    if value not in known:
        raise InputError(f"{key}={value!r}: must be one of {', '.join(known)}")


def folder_name(key: str, name: str) -> None:
    """Refuse what is not the name of one folder, and would lead elsewhere."""
    if name in ("", ".", "..") or Path(name).name != name or "\0" in name:
        raise InputError(f"{key}={name!r}: must be the name of one folder")


def positive(key: str, value: float) -> None:
    """Refuse a number that is not above 0, or infinite."""
    if not 0 < value < math.inf:
        raise InputError(f"{key}={value}: must be positive and finite")


def at_least(key: str, value: float, least: float) -> None:
    """Refuse a number that is too small, or infinite."""
    if not least <= value < math.inf:
        raise InputError(f"{key}={value}: must be at least {least}, and finite")


def share(key: str, value: float) -> None:
    """Refuse what is not a share of a whole."""
    if not 0 <= value <= 1:
        raise InputError(f"{key}={value}: must be from 0 to 1")


def band(key: str, value: tuple[float, float] | None) -> None:
    """Refuse ends of a band that are not in order; None is no band."""
    if value is not None and not 0 <= value[0] <= value[1]:
        raise InputError(f"{key}={[*value]}: must be [lowest, highest], both at least 0")


def distinct(key: str, values: list[int]) -> None:
    """Refuse a list that is empty, or holds a number twice."""
    if not values or len(set(values)) < len(values):
        raise InputError(f"{key}={values}: give at least one number, and none twice")


def a_seed(key: str, value: int) -> None:
    """Refuse a seed that not all of NumPy, torch and scikit-learn take: from 0 to 2³² − 1."""
    if not 0 <= value < 2**32:
        raise InputError(f"{key}={value}: a seed is a whole number from 0 to {2**32 - 1}")


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
