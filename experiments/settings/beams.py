"""What a selector learns from and what it is judged on: the config group `beams`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from knobwise.common.checks import at_least
from knobwise.common.errors import InputError
from knobwise.experiments.settings.selector_options import BeamFiles, BuiltinBeams

if TYPE_CHECKING:  # readers import torch, which the command line does without until there is something to read
    from torch import Tensor

    from knobwise.agents.checkpoint import Loaded
    from knobwise.agents.selector.selector import StoredEmbeddings
    from knobwise.envs.demonstrations.beam_table import BeamTable
    from knobwise.envs.tables.profile_table import Split
    from knobwise.profiling.demonstrations.scorers import Scorer


class SelectorData(NamedTuple):
    """What a selector learns from and what it is judged on."""

    table: BeamTable
    split: Split
    """Of `table`: training, validation, and the test part where `test` is the same table."""
    scorer: Scorer | None
    test: BeamTable
    test_rows: Tensor
    test_scorer: Scorer | None
    trusted: Tensor | None
    """bool [M], candidates of the test's bank whose annotator is careful; None where that is unknown."""
    judged_by: str
    """`scorer`; `recorded`: whether the answer after the recorded sequence that a policy prefers was right;
    `best_beam`: whether that sequence has the highest score, where right answers are not recorded."""


def read_data(config: BuiltinBeams | BeamFiles) -> SelectorData:
    """Read the beams that a config of group `beams` names. Raises InputError: see the readers."""
    if isinstance(config, BuiltinBeams):
        return _builtin(config)
    table = _read_files(config)
    split = table.split(config.train, config.validation, config.split_seed)
    if not len(split.test):
        raise InputError("beams: train and validation leave no queries to judge on; the sum of both must be below 1")
    if "vqa_correct" in table.fields:
        return SelectorData(table, split, None, table, split.test, None, None, "recorded")
    return SelectorData(table, split, None, _best_beam(table), split.test, None, None, "best_beam")


def _builtin(config: BuiltinBeams) -> SelectorData:
    import torch

    from knobwise.profiling.demonstrations.builtin import builtin_demonstrations, careful_candidates

    data = builtin_demonstrations(config.variant)
    rows, trusted = torch.arange(data.test.num_queries), careful_candidates(config.variant, "test")
    split = data.train.split(0.9, 0.1)
    return SelectorData(data.train, split, data.train_scorer, data.test, rows, data.test_scorer, trusted, "scorer")


def _read_files(config: BeamFiles) -> BeamTable:
    from knobwise.envs.demonstrations.beam_files import read_beam_data
    from knobwise.envs.demonstrations.beam_table import BeamTable

    if config.path.endswith(".safetensors"):
        return BeamTable.load(config.path)
    if config.embeddings is None:
        raise InputError("beams.embeddings: beams in JSON need the embeddings of their candidates")
    names = ("trailing_query", "candidate_images", "keep_fallback", "name")
    how: dict[str, Any] = {name: getattr(config, name) for name in names}
    return read_beam_data(config.path, config.embeddings, config.query_embeddings, **how)


def _best_beam(table: BeamTable) -> BeamTable:
    """The table in which the sequence with the highest score, per query and length, counts as the right answer."""
    from math import inf, nan

    score, lengths = table.fields["beam_score"], table.lengths
    same_length = lengths.unsqueeze(2) == lengths.unsqueeze(1)
    scores = score.unsqueeze(1).expand(same_length.shape).masked_fill(~same_length, -inf)
    best = (score == scores.nan_to_num(-inf).amax(2)).float().masked_fill(~table.beam_mask, nan)
    return replace(table, fields=table.fields | {"vqa_correct": best})


def hide(table: BeamTable, blocks: list[str]) -> BeamTable:
    """The table with columns of its embeddings set to 0. Raises InputError: the table has no such block."""
    queries, candidates = table.queries.clone(), table.candidates.clone()
    for name in blocks:
        if name not in table.blocks:
            raise InputError(f"hidden={name}: {table.name} has the blocks {', '.join(table.blocks) or 'unknown'}")
        start, end = table.blocks[name]
        queries[:, start:end] = 0
        candidates[:, start:end] = 0
    return replace(table, queries=queries, candidates=candidates)


def stored_embeddings(table: BeamTable, loaded: Loaded) -> StoredEmbeddings:
    """Queries and candidates of a table, as a selector reads them. Raises InputError: it was trained by an earlier
    version along with a CLIP model."""
    from knobwise.agents.selector.selector import StoredEmbeddings

    if "lora" in loaded.extra:
        raise InputError("the selector was trained along with CLIP (encoder=clip), which is gone; train it again")
    return StoredEmbeddings(table.queries, table.candidates)


def check_judged(data: SelectorData, judged_shots: list[int]) -> None:
    """Refuse numbers of shots that cannot be judged. Raises InputError: an empty list, a number twice, a number below
    1, or, without a scorer, no number that was recorded."""
    if not judged_shots or len(set(judged_shots)) < len(judged_shots):
        raise InputError(f"judged_shots={judged_shots}: give at least one number, and none twice")
    for shots in judged_shots:
        at_least("judged_shots", shots, 1)
    if data.test_scorer is None:
        test = data.test.select(data.test_rows)
        lengths = set(test.lengths[test.beam_mask].tolist())
        if not lengths & set(judged_shots):
            raise InputError(f"judged_shots={judged_shots}: recorded test sequences have {sorted(lengths)} shots only")
