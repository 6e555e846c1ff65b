"""What a selector learns from and what it is judged on: the config group `beams`."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, cast

import torch
from torch import Tensor

from knobwise.agents.training.settings import at_least
from knobwise.common.errors import InputError
from knobwise.envs.demonstrations.beam_files import TrailingQuery, read_beam_data
from knobwise.envs.demonstrations.beam_table import BeamTable
from knobwise.envs.tables.profile_table import Split
from knobwise.experiments.settings.selector_options import BeamFiles, BuiltinBeams
from knobwise.profiling.demonstrations.builtin import builtin_demonstrations, careful_candidates
from knobwise.profiling.demonstrations.scorers import Scorer


class SelectorData(NamedTuple):
    """What is learned from and what is judged on."""

    table: BeamTable
    split: Split
    """Of `table`: fit, choose; its third part is judged on where `test` is the same table."""
    scorer: Scorer | None
    test: BeamTable
    test_rows: Tensor
    test_scorer: Scorer | None
    trusted: Tensor | None
    """bool [M], candidates of the test's bank whose annotator is known to be careful; None where nobody knows."""
    judged_by: str
    """`scorer`; `recorded`: whether the answer was right after the recorded sequence that a policy prefers;
    `best_beam`: whether that sequence is the one with the highest score, where nothing says which answers were
    right."""


def read_data(config: BuiltinBeams | BeamFiles) -> SelectorData:
    """Read the beams that a config of group `beams` names.

    Raises:
        InputError: see the readers.
    """
    if isinstance(config, BuiltinBeams):
        found = builtin_demonstrations(config.variant)
        train, test = found.train, found.test
        split = train.split(0.9, 0.1)
        trusted = careful_candidates(config.variant, "test")
        return SelectorData(
            train, split, found.train_scorer, test, torch.arange(test.num_queries), found.test_scorer, trusted, "scorer"
        )
    if config.path.endswith(".safetensors"):
        table = BeamTable.load(config.path)
    elif config.embeddings is None:
        raise InputError("beams.embeddings: beams in JSON need the embeddings of their candidates")
    else:
        table = read_beam_data(
            config.path,
            config.embeddings,
            config.query_embeddings,
            trailing_query=cast(TrailingQuery, config.trailing_query),
            candidate_images=config.candidate_images,
            keep_fallback=config.keep_fallback,
            name=config.name,
        )
    split = table.split(config.train, config.validation, config.split_seed)
    if not len(split.test):
        raise InputError("beams: train and validation leave no queries to judge on; their shares must be below 1")
    if "vqa_correct" in table.fields:
        return SelectorData(table, split, None, table, split.test, None, None, "recorded")
    return SelectorData(table, split, None, _best_beam(table), split.test, None, None, "best_beam")


def _best_beam(table: BeamTable) -> BeamTable:
    """The table with the highest score of each query and length in the place of right answers."""
    score, lengths = table.fields["beam_score"], table.lengths
    alike = lengths.unsqueeze(2) == lengths.unsqueeze(1)
    highest = score.unsqueeze(1).expand(alike.shape).masked_fill(~alike, -torch.inf).nan_to_num(-torch.inf).amax(2)
    best = (score == highest).float().masked_fill(~table.beam_mask, torch.nan)
    return replace(table, fields=table.fields | {"vqa_correct": best})


def hide(table: BeamTable, blocks: list[str]) -> BeamTable:
    """The table with columns of its embeddings set to 0.

    Raises:
        InputError: the table has no such block.
    """
    queries, candidates = table.queries.clone(), table.candidates.clone()
    for name in blocks:
        if name not in table.blocks:
            raise InputError(f"hidden={name}: {table.name} has the blocks {', '.join(table.blocks) or 'unknown'}")
        start, end = table.blocks[name]
        queries[:, start:end] = 0
        candidates[:, start:end] = 0
    return replace(table, queries=queries, candidates=candidates)


def check_judged(data: SelectorData, judged_shots: list[int]) -> None:
    """Refuse numbers of shots that cannot be judged.

    Raises:
        InputError: none, one twice, one below 1, or none of which anything is recorded, without a scorer.
    """
    if not judged_shots or len(set(judged_shots)) < len(judged_shots):
        raise InputError(f"judged_shots={judged_shots}: at least one number is needed, and none twice")
    for shots in judged_shots:
        at_least("judged_shots", shots, 1)
    if data.test_scorer is None:
        test = data.test.select(data.test_rows)
        lengths = set(test.lengths[test.beam_mask].tolist())
        if not lengths & set(judged_shots):
            raise InputError(f"judged_shots={judged_shots}: recorded test sequences have {sorted(lengths)} shots only")
