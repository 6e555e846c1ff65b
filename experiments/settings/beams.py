"""The data that a selector learns from and is judged on: the config group `beams`."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from typing import TYPE_CHECKING, NamedTuple

from knobwise.common.checks import at_least
from knobwise.common.errors import InputError
from knobwise.experiments.settings.selector_options import (
    BeamFiles,
    BuiltinBeams,
    ClipLora,
    StoredEncoder,
    recorded_lengths,
)

# readers import torch, which the command line does without until there is something to read
if TYPE_CHECKING:
    from torch import Tensor

    from knobwise.agents.checkpoint import Loaded
    from knobwise.agents.selector.baselines import Kinds
    from knobwise.agents.selector.clip_encoder import ClipItems
    from knobwise.agents.selector.selector import StoredEmbeddings
    from knobwise.envs.demonstrations.beam_table import BeamTable
    from knobwise.envs.tables.profile_table import Split
    from knobwise.profiling.demonstrations.scorers import Scorer


class SelectorData(NamedTuple):
    """The data that a selector learns from and is judged on."""

    table: BeamTable
    """The queries that it learns from, with recorded sequences."""
    split: Split
    """The parts of `table`: training, validation, and the test part where `test` is the same
    table."""
    scorer: Scorer | None
    """Answers any sequence for queries of `table`; None for recorded answers only."""
    test: BeamTable
    """The queries that it is judged on."""
    test_rows: Tensor
    """int64 [n], the rows of `test` to judge on."""
    test_scorer: Scorer | None
    """Answers any sequence for queries of `test`; None for recorded answers only."""
    trusted: Tensor | None
    """bool [M], True for the candidates of `test` whose annotator is careful; None where that is
    unknown."""
    judged_by: str
    """The measure of success.

    - `scorer`: the answer after the chosen sequence is right.
    - `recorded`: a policy prefers a recorded sequence whose answer was right.
    - `best_beam`: it prefers the recorded sequence with the highest score. This one is for beams
      without recorded answers.
    """
    kinds: Kinds | None = None
    """The kinds of questions of `test` and of its bank, where the items name them."""
    items: ClipItems | None = None
    """Pictures and texts of the queries and candidates, for encoder=clip."""


def read_data(
    config: BuiltinBeams | BeamFiles, encoder: StoredEncoder | ClipLora | None = None
) -> SelectorData:
    """Read the beams that a config of group `beams` names, and the items that the encoder reads.

    Raises:
        InputError: see the readers.
    """
    if isinstance(config, BuiltinBeams):
        if isinstance(encoder, ClipLora):
            raise InputError("encoder=clip: the built-in beams have no pictures; give beams=files")
        return _builtin(config)
    table = _read_files(config)
    items = _read_items(encoder, config, table) if isinstance(encoder, ClipLora) else None
    # by query, since the sequences of one query are alike
    split = table.split(config.train, config.validation, config.split_seed)
    if not len(split.test):
        raise InputError(
            "beams: train and validation leave no queries to judge on; the sum of both must be "
            "below 1"
        )
    if config.model is not None:
        scorer, kinds = _answering(config, table)
        return SelectorData(
            table, split, scorer, table, split.test, scorer, None, "scorer", kinds, items
        )
    test = table
    judged_by = "recorded"
    if "vqa_correct" not in table.fields:
        test = _best_beam(table)
        judged_by = "best_beam"
    return SelectorData(table, split, None, test, split.test, None, None, judged_by, items=items)


def _answering(config: BeamFiles, table: BeamTable) -> tuple[Scorer, Kinds | None]:
    """Load the model that answers new sequences, and return the kinds of questions of its items.

    What the records know is not asked again.

    Raises:
        InputError: its items are not those of the table.
    """
    import torch

    from knobwise.agents.selector.baselines import Kinds
    from knobwise.envs.demonstrations.beam_table import bank_rows
    from knobwise.profiling.demonstrations.scorers import Remembering
    from knobwise.profiling.demonstrations.tasks import load_scorer, read_asked

    assert config.model is not None
    asked = read_asked(config.model, config.vlm)
    data = asked.data
    ids = tuple(item.id for item in data.queries)
    if ids != table.query_ids or len(data.bank) != len(table.candidates):
        raise InputError(
            f"beams.vlm.data: {len(ids)} queries and {len(data.bank)} candidates are not those of "
            f"{table.name!r}, which has {table.num_queries} and {len(table.candidates)}"
        )
    # every recorded sequence, as rows of the bank
    remembering = Remembering(load_scorer(asked, config.vlm))
    query, beam = table.beam_mask.nonzero(as_tuple=True)
    shown = bank_rows(table.pool[query], table.sequences[query, beam])
    fields = {name: field[query, beam] for name, field in table.fields.items()}
    del fields["beam_score"]
    remembering.remember(query, shown, fields)
    names = sorted({item.question_type for item in (*data.queries, *data.bank)})
    if names == [""]:
        return remembering, None
    queries, candidates = (
        torch.tensor([names.index(item.question_type) for item in part])
        for part in (data.queries, data.bank)
    )
    return remembering, Kinds(queries, candidates)


def _builtin(config: BuiltinBeams) -> SelectorData:
    """Read the built-in beams, whose test part has queries and candidates of its own."""
    import torch

    from knobwise.profiling.demonstrations.builtin import builtin_demonstrations, careful_candidates

    data = builtin_demonstrations(config.variant)
    # all queries of the test part are judged
    rows = torch.arange(data.test.num_queries)
    trusted = careful_candidates(config.variant, "test")
    split = data.train.split(0.9, 0.1)
    return SelectorData(
        data.train, split, data.train_scorer, data.test, rows, data.test_scorer, trusted, "scorer"
    )


def _read_files(config: BeamFiles) -> BeamTable:
    """Read recorded beams of another system."""
    from knobwise.envs.demonstrations.beam_files import read_beam_data
    from knobwise.envs.demonstrations.beam_table import BeamTable

    if config.path.endswith(".safetensors"):
        return BeamTable.load(config.path)
    if config.embeddings is None:
        raise InputError("beams.embeddings: beams in JSON need the embeddings of their candidates")
    options = {"candidate_images": config.candidate_images, "name": config.name}
    return read_beam_data(config.path, config.embeddings, config.query_embeddings, **options)


def _read_items(config: ClipLora, beams: BeamFiles, table: BeamTable) -> ClipItems:
    """Read pictures and questions of the queries and candidates of a table."""
    from knobwise.agents.selector.clip_encoder import ClipItems
    from knobwise.profiling.measuring.questions import read_vqa_data

    if config.model is None or config.data is None:
        raise InputError(
            "encoder=clip needs encoder.model (a CLIP model) and encoder.data (pictures and "
            "questions)"
        )
    data = read_vqa_data(config.data, config.bank)
    if len(data.bank) != len(table.candidates):
        raise InputError(
            f"{config.bank or config.data}: has {len(data.bank)} items, but {table.name!r} has "
            f"{len(table.candidates)} candidates; give an item for each, in order, as encoder.bank"
        )
    # safetensors name a query by the id of its item, beams in JSON by its row number
    by_id = beams.path.endswith(".safetensors")
    known = {item.id if by_id else str(row): item for row, item in enumerate(data.queries)}
    missing = [query for query in table.query_ids if query not in known]
    if missing:
        raise InputError(f"{config.data}: has no item for query {missing[0]!r} of {table.name!r}")
    return ClipItems.read(config.model, [known[query] for query in table.query_ids], data.bank)


def _best_beam(table: BeamTable) -> BeamTable:
    """Return the table with a field `vqa_correct` that marks the best sequences.

    It is 1 for the sequence with the highest score among those of its query and length, 0 for the
    others, and NaN where there is no sequence.
    """
    score = table.fields["beam_score"]
    lengths = table.lengths
    # which sequences of a query have the same length, bool [queries, beams, beams]
    same_length = lengths.unsqueeze(2) == lengths.unsqueeze(1)
    scores = score.unsqueeze(1).where(same_length, -inf)
    highest = scores.nan_to_num(-inf).amax(2)
    best = (score == highest).float().masked_fill(~table.beam_mask, nan)
    return replace(table, fields=table.fields | {"vqa_correct": best})


def hide(table: BeamTable, blocks: list[str]) -> BeamTable:
    """Return the table with some blocks of its embeddings set to 0.

    Raises:
        InputError: the table has no such block.
    """
    # copies, so that the table stays as it is
    queries = table.queries.clone()
    candidates = table.candidates.clone()
    for name in blocks:
        if name not in table.blocks:
            raise InputError(
                f"hidden={name}: {table.name} has the blocks {', '.join(table.blocks) or 'unknown'}"
            )
        start, end = table.blocks[name]
        queries[:, start:end] = 0
        candidates[:, start:end] = 0
    return replace(table, queries=queries, candidates=candidates)


def stored_embeddings(
    table: BeamTable, loaded: Loaded, items: ClipItems | None = None
) -> StoredEmbeddings:
    """Return queries and candidates of a table as the selector of a checkpoint reads them.

    If the selector has an encoder, the encoder gets the items.

    Raises:
        InputError: the selector was trained with another encoder.
    """
    from knobwise.agents.selector.clip_encoder import as_read
    from knobwise.agents.selector.selector import StoredEmbeddings

    encoder = loaded.selector.encoder
    if (encoder is None) != (items is None):
        known = "stored" if encoder is None else "clip and its options"
        raise InputError(f"the selector was trained with encoder={known}; give the same")
    if encoder is not None:
        encoder.items = items
    # CLIP reads the rows of items in place of stored embeddings
    table = as_read(table, items)
    return StoredEmbeddings(table.queries, table.candidates)


def check_judged(data: SelectorData, judged_shots: list[int]) -> None:
    """Refuse numbers of shots that cannot be judged.

    Raises:
        InputError: the list is empty, a number comes twice or is below 1; or there is no scorer,
            and no sequence of any of these lengths was recorded.
    """
    if not judged_shots or len(set(judged_shots)) < len(judged_shots):
        raise InputError(f"judged_shots={judged_shots}: give at least one number, and none twice")
    for shots in judged_shots:
        at_least("judged_shots", shots, 1)
    if data.test_scorer is None:
        lengths = recorded_lengths(data.test.select(data.test_rows))
        if not set(lengths) & set(judged_shots):
            raise InputError(
                f"judged_shots={judged_shots}: recorded test sequences have {lengths} shots only"
            )
