"""The data that a selector learns from and is judged on: the config group `beams`."""

from __future__ import annotations

import weakref
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from knobwise.agents.selector.clip_encoder import ClipItems, as_read
from knobwise.agents.training.checkpoint import Loaded
from knobwise.common.checks import at_least, distinct
from knobwise.common.errors import InputError
from knobwise.envs.demonstrations.beam_files import read_beam_data
from knobwise.envs.demonstrations.beam_table import BeamTable
from knobwise.envs.tables.profile_table import Split
from knobwise.experiments.settings.selector_options import (
    BeamFiles,
    BuiltinBeams,
    ClipLora,
    SmollmBeams,
    StoredEncoder,
)
from knobwise.profiling.demonstrations.pools import Kinds
from knobwise.profiling.demonstrations.scorers import (
    SCORES,
    CachedScorer,
    Scorer,
    recorded_scores,
)
from knobwise.profiling.demonstrations.tasks import kinds_of_questions, read_answerer
from knobwise.profiling.measuring.questions import VQAData, folded, read_vqa_data
from knobwise.testbeds import DATA
from knobwise.testbeds.canvases.builtin import builtin_demonstrations
from knobwise.testbeds.canvases.canvases import VARIANTS
from knobwise.testbeds.canvases.task import BLOCKS

SMOLLM_BEAMS = DATA / "smollm2-beams.safetensors"
"""`knobwise profile model=smollm2 vlm.chats=false vlm.dtype=float32 vlm.batch_size=16
pool.sampler=random pool.size=64 beams.width=0 beams.retrieved=4 beams.random=14 beams.same_kind=6
beams.chunk=20 out=DIR` makes them, in about an hour on one core."""
CHECKED = 16
"""Queries of which a model is asked a recorded sequence again, to see that model and answers are
those that were recorded."""
TOLERANCE = 0.3
"""How far their log-probabilities may be from those recorded, in nats."""


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

    @property
    def has_own_test(self) -> bool:
        """True if `test` has queries and a bank of its own, which no selector was trained on."""
        # sequences with the highest score are marked in a copy with the same bank
        return self.test.candidates is not self.table.candidates


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
    scorer = None
    kinds = None
    test = table
    judged_by = "recorded"
    if config.model is not None:
        scorer, kinds = _answering(config, table)
        judged_by = "scorer"
    elif "vqa_correct" not in table.fields:
        test = _best_beam(table)
        judged_by = "best_beam"
    return SelectorData(
        table=table,
        split=split,
        scorer=scorer,
        test=test,
        test_rows=split.test,
        test_scorer=scorer,
        trusted=None,
        judged_by=judged_by,
        kinds=kinds,
        items=items,
    )


def _answering(config: BeamFiles, table: BeamTable) -> tuple[Scorer, Kinds | None]:
    """Load the model that answers new sequences, and return the kinds of questions of its items.

    What the records know is not asked again.

    Raises:
        InputError: its items are not those of the table, or it gives other answers than those that
            were recorded.
    """
    assert config.model is not None
    answerer = read_answerer(config.model, config.vlm, "beams.", config.served)
    data = answerer.data
    _check_items(data, table)
    answering = answerer.load()
    scorer = CachedScorer(answering)
    # connections last as long as anybody may ask
    if hasattr(answering, "close"):
        weakref.finalize(scorer, answering.close)
    _remember(scorer, table)
    return scorer, kinds_of_questions(data)


def _check_items(data: VQAData, table: BeamTable) -> None:
    """Raise InputError unless these are the queries and the bank of a table, in order."""
    queries = data.queries
    bank = data.bank
    # beams may have been recorded when a question was its image as it is spelled
    of_queries, of_bank = (
        [folded(image) for image in names] for names in (table.query_images, table.candidate_images)
    )
    parts = {
        "queries": ([item.id for item in queries], table.query_ids),
        "images of the queries": ([folded(item.image_id) for item in queries], of_queries),
        "candidates": ([folded(item.image_id) for item in bank], of_bank),
        "number of candidates": ([len(bank)], [len(table.candidates)]),
    }
    for what, (names, recorded) in parts.items():
        # beams in JSON do not name all of them
        if recorded and names != list(recorded):
            raise InputError(
                f"beams.vlm.data: has other {what} than {table.name!r}; give the items that were "
                "recorded, and beams.safetensors"
            )


def _remember(scorer: CachedScorer, table: BeamTable) -> None:
    """Tell a scorer what was recorded, as far as it is whole; raise InputError if the scorer gives
    other answers."""

    if not set(SCORES) <= set(table.fields):
        return
    rows = torch.arange(table.num_queries)
    query, demonstrations, recorded = recorded_scores(table, rows, SCORES)
    # the first sequence of each query; of many queries some from the first to the last
    first = torch.ones_like(query, dtype=torch.bool)
    first[1:] = query[1:] != query[:-1]
    firsts = first.nonzero().squeeze(1)
    few = firsts[torch.linspace(0, len(firsts) - 1, min(CHECKED, len(firsts))).long()]
    again = scorer(query[few], demonstrations[few])["logprob_score"]
    if (again - recorded["logprob_score"][few]).abs().amax() > TOLERANCE:
        raise InputError(
            f"beams.model: gives other answers than those recorded in {table.name!r}; give the "
            "same model, the same answers in beams.vlm.data, and the same beams.vlm.chats and "
            "beams.vlm.dtype"
        )
    scorer.remember(query, demonstrations, recorded)


def _builtin(config: BuiltinBeams) -> SelectorData:
    """Read the built-in beams, whose test part has queries and candidates of its own."""
    data = builtin_demonstrations(config.variant)
    # all queries of the test part are judged
    rows = torch.arange(data.test.num_queries)
    # each candidate names its annotator in these columns
    annotator = data.test.candidates[:, slice(*BLOCKS["annotator"])].argmax(1)
    trusted = annotator >= VARIANTS[config.variant].careless_annotators
    split = data.train.split(0.9, 0.1)
    return SelectorData(
        table=data.train,
        split=split,
        scorer=data.train_scorer,
        test=data.test,
        test_rows=rows,
        test_scorer=data.test_scorer,
        trusted=trusted,
        judged_by="scorer",
    )


def _read_files(config: BeamFiles) -> BeamTable:
    """Read recorded beams of another system."""

    if isinstance(config, SmollmBeams):
        return BeamTable.load(SMOLLM_BEAMS)
    if (tensors := _tensors_at(config.path)) is not None:
        return BeamTable.load(tensors)
    if config.embeddings is None:
        raise InputError("beams.embeddings: beams in JSON need the embeddings of their candidates")
    return read_beam_data(config.path, config.embeddings, config.query_embeddings)


def _tensors_at(path: str) -> Path | None:
    """Return the `.safetensors` at a path, or in the folder that `knobwise profile` wrote; None for
    beams in JSON."""
    if path.endswith(".safetensors"):
        return Path(path)
    recorded = Path(path, "beams.safetensors")
    return recorded if recorded.is_file() else None


def _read_items(config: ClipLora, beams: BeamFiles, table: BeamTable) -> ClipItems:
    """Read pictures and questions of the queries and candidates of a table."""

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
    by_id = _tensors_at(beams.path) is not None
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
        columns = slice(*table.blocks[name])
        queries[:, columns] = 0
        candidates[:, columns] = 0
    return replace(table, queries=queries, candidates=candidates)


def table_for(table: BeamTable, loaded: Loaded, items: ClipItems | None = None) -> BeamTable:
    """Return a table as the selector of a checkpoint reads it.

    If the selector has an encoder, the encoder gets the items.

    Raises:
        InputError: the selector was trained with another encoder.
    """
    encoder = loaded.selector.encoder
    if (encoder is None) != (items is None):
        known = "stored" if encoder is None else "clip and its options"
        raise InputError(f"the selector was trained with encoder={known}; give the same")
    if encoder is not None:
        encoder.items = items
    return as_read(table, items)


def trained_on(loaded: Loaded, table: BeamTable, items: ClipItems | None = None) -> Tensor:
    """Return which queries of a table the selector of a checkpoint was trained on, bool [Q].

    Where all of them are in the table under their ids, these tell. Elsewhere the same query may
    have another id, so that its fingerprint counts as well. A checkpoint from before there were
    fingerprints knows the ids of the beams of its training alone.

    Args:
        loaded: the checkpoint, with the ids of its queries.
        table: with its embeddings, not as a selector reads items.
        items: those that the selector reads.
    """
    ids = set(loaded.extra["fitted"])
    by_id = torch.tensor([query in ids for query in table.query_ids])
    if "seen" not in loaded.extra:
        # beams that draws of a policy were added to have another digest, and the same name
        digest = as_read(table, items).digest
        return by_id & (table.name == loaded.profile_name or digest == loaded.profile_digest)
    seen = set(loaded.extra["seen"])
    by_fingerprint = torch.tensor([fingerprint in seen for fingerprint in table.fingerprints])
    # other queries of the beams of the training may have the same embedding
    if ids.issubset(table.query_ids) and by_fingerprint[by_id].all():
        return by_id
    return by_id | by_fingerprint


def check_judged(data: SelectorData, judged_shots: list[int]) -> None:
    """Refuse numbers of shots that cannot be judged.

    Raises:
        InputError: the list is empty, a number comes twice or is below 1; or there is no scorer,
            and no sequence of any of these lengths was recorded.
    """
    distinct("judged_shots", judged_shots)
    at_least("judged_shots", min(judged_shots), 1)
    if data.test_scorer is None:
        lengths = data.test.select(data.test_rows).recorded_lengths
        if not set(lengths) & set(judged_shots):
            raise InputError(
                f"judged_shots={judged_shots}: recorded test sequences have {lengths} shots only"
            )
