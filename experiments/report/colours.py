"""One colour for each policy, the same on every page, in light and in dark. `policies.json` says which.

Charts name hues only by their position in the palette (`domain`); the page holds the palette of the reader's theme.
Text and background are in `templates/style.css`, the greys of axes in `page.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from knobwise.experiments.report.words import POLICIES, policy_of

OTHERS = "others"
HUES = {
    "blue": ("#1d4ed8", "#7aa7ff"),
    "orange": ("#d97706", "#f0a94a"),
    "green": ("#15803d", "#5fcf8a"),
    "purple": ("#7c3aed", "#c4a1ff"),
    "pink": ("#db2777", "#f48fb1"),
    "cyan": ("#0891b2", "#5fd3e8"),
    "brown": ("#92400e", "#c89b7b"),
    "lime": ("#65a30d", "#b5d96b"),
    "red": ("#dc2626", "#ff8a80"),
    "teal": ("#0f766e", "#3fb8a6"),
    "gold": ("#a16207", "#e6d06a"),
    "indigo": ("#312e81", "#9fa8f5"),
    "violet": ("#c084fc", "#e3c8ff"),
    "slate": ("#475569", "#a3aebd"),
    "grey": ("#b4b4b4", "#666a73"),
}
"""Name → the colour on white and on black. The first are the easiest to distinguish; policies that are never drawn
together may share a hue."""


def palette(dark: bool = False) -> list[str]:
    """The hues in their fixed order, for the theme of a page."""
    return [pair[dark] for pair in HUES.values()]


def colour(policy: str, dark: bool = False) -> str:
    """The colour of a policy; grey if it has none."""
    return HUES[POLICIES[policy]["colour"] if policy in POLICIES else "grey"][dark]


def domain(labels: Sequence[str]) -> list[str]:
    """The domain of a colour scale over the whole palette.

    The label of a policy stands at the position of its hue, any other (a run, say) at the first free one; blanks fill
    the remaining positions.
    """
    hues: dict[str, str] = {}
    for label in labels:
        policy = policy_of(label)
        if policy in POLICIES:
            hues.setdefault(POLICIES[policy]["colour"], label)
    free = [hue for hue in HUES if hue not in hues and hue != "grey"]
    others = [label for label in labels if label not in hues.values()]
    return by_hue(hues | dict(zip(free, others, strict=False))) + others[len(free) :]


def by_hue(labels: Mapping[str, str]) -> list[str]:
    """The domain of a colour scale that gives each hue its label: hue → label."""
    return [labels.get(hue, " " * place) for place, hue in enumerate(HUES, 1)]
