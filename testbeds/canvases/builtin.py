"""The built-in data of the selector: which demonstrations help the learner answer questions about
canvases.

Files hold pools, recorded sequences, and digests of canvases and learner.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from knobwise.common.errors import InputError
from knobwise.envs.demonstrations.beam_table import INTEGERS, BeamTable
from knobwise.envs.tables.tensor_file import tensors_and_metadata, with_prefix
from knobwise.profiling.demonstrations.scorers import Scorer
from knobwise.profiling.demonstrations.settings import LearnerTaskConfig
from knobwise.testbeds import DATA
from knobwise.testbeds.canvases.canvases import digest
from knobwise.testbeds.canvases.scorer import LearnerScorer
from knobwise.testbeds.canvases.task import (
    PARTS,
    builtin_learner,
    draw_part,
    part_table,
)


class BuiltinDemonstrations(NamedTuple):
    """The data that a selector is trained and evaluated on, with scorers for sequences that are not
    recorded."""

    train: BeamTable
    test: BeamTable
    train_scorer: Scorer
    test_scorer: Scorer


def builtin_demonstrations(variant: str = "careless") -> BuiltinDemonstrations:
    """Load the built-in data of "careless" (six of ten annotators are) or "careful" (none is).

    Raises InputError for no such variant, and where canvases drawn here, or the learner, are not
    those of the files.
    """
    loaded = {}
    for part in PARTS:
        config = LearnerTaskConfig(variant, part)
        loaded[part] = load_demonstrations(demonstrations_path(config), config)
    train, train_scorer = loaded["train"]
    test, test_scorer = loaded["test"]
    return BuiltinDemonstrations(
        train=train, test=test, train_scorer=train_scorer, test_scorer=test_scorer
    )


def demonstrations_path(config: LearnerTaskConfig) -> Path:
    """Return the path of the file of a part of the built-in data."""
    return DATA / f"demonstrations-{config.variant}-{config.part}.safetensors"


def load_demonstrations(path: Path, config: LearnerTaskConfig) -> tuple[BeamTable, LearnerScorer]:
    """Read a file of the built-in data. Raises InputError where canvases or the learner here are
    not its own.

    Outcomes are in half precision. `vqa_gt_prob`, exp(`logprob_score`), and `vqa_correct`, whether
    `vqa_acc_score` is 1, are computed here; embeddings are drawn.
    """
    # drawn again here, and compared with what the file was made from
    learner = builtin_learner()
    tensors, metadata = tensors_and_metadata(path)
    recorded = replace(
        config,
        queries=int(metadata["queries"]),
        candidates=int(metadata["candidates"]),
        seed=int(metadata["seed"]),
    )
    queries, bank = draw_part(recorded)
    drawn = {"canvases": digest(queries, bank), "learner": learner.digest}
    for what, digest_now in drawn.items():
        if digest_now != metadata[what]:
            raise InputError(
                f"{path}: was recorded with other {what} than are here (NumPy {np.__version__}). "
                "Install the versions in constraints.txt, or record other beams with `knobwise "
                "profile model=learner`"
            )
    # outcomes, then those that follow from others
    fields = {name: field.float() for name, field in with_prefix(tensors, "fields.").items()}
    fields["vqa_gt_prob"] = fields["logprob_score"].exp()
    fields["vqa_correct"] = fields["vqa_acc_score"].floor()
    beams = {name: tensors[name].long() for name in INTEGERS}
    table = part_table(config, queries, bank, fields=fields, **beams)
    return table, LearnerScorer(learner, queries, bank)
