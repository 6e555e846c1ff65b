"""The profiles that come with knobwise: an elastic vision-language model, RapidOCR, and SmolLM2
with demonstrations before each question.

All were really measured; see their `profile.json`.
"""

from __future__ import annotations

import copy
import functools
import json
from dataclasses import replace

from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.testbeds import DATA

BUILTIN = DATA / "builtin" / "table.parquet"


def builtin_profile(accuracy: str = "accuracy") -> ProfileTable:
    """Read the built-in profile.

    Its accuracy is `accuracy` (exact match) or `soft_score` (share of right tokens).
    """
    # whoever changes the table in place changes a copy
    return copy.deepcopy(_read_once(accuracy))


@functools.cache
def _read_once(accuracy: str) -> ProfileTable:
    from knobwise.envs.readers.long_table import read_long_table

    features_ms = json.loads(BUILTIN.with_name("profile.json").read_text())["features_ms"]
    features = BUILTIN.with_name("features.npz")
    table = read_long_table(BUILTIN, features=features, name="builtin", accuracy=accuracy)
    return replace(table, features_ms=features_ms)


def ocr_profile() -> ProfileTable:
    """Read the profile of RapidOCR, which needs none of its packages."""
    return ProfileTable.load(DATA / "ocr" / "table.safetensors")


def smollm_profile() -> ProfileTable:
    """Read the profile of SmolLM2 with demonstrations, which needs none of its packages."""
    return ProfileTable.load(DATA / "smollm" / "table.safetensors")
