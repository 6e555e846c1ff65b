"""What runs note of the data that they were trained on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.evidence.schema import ProfileFacts

if TYPE_CHECKING:
    from knobwise.envs.demonstrations.beam_table import BeamTable


def profile_of(table: ProfileTable | BeamTable) -> ProfileFacts:
    """Return name, digest and sizes of a profile or of beams."""
    facts: ProfileFacts = {"name": table.name, "digest": table.digest}
    if isinstance(table, ProfileTable):
        return facts | {"samples": table.num_samples, "configurations": table.num_configurations}
    return facts | {"samples": table.num_queries, "candidates": len(table.candidates)}
