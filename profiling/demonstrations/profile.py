"""Record beam data: find demonstration sequences for every query, score and write them.

It can be interrupted. `profile_beams("out", task)` writes:

    out/beams.safetensors               everything: a BeamTable with its embeddings
    out/beams.json                      RL data, with the two files that follow
    out/embeddings.safetensors
    out/query_embeddings.safetensors
    out/beams-info.json                 figures, the settings that make it again
    out/state/…                         what an interrupted run resumes from; later rounds add
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import torch
from torch import Tensor

from knobwise.common.errors import InputError
from knobwise.common.progress import progress
from knobwise.envs.demonstrations.beam_files import write_rl_data
from knobwise.envs.demonstrations.beam_table import BeamTable
from knobwise.envs.demonstrations.settings import METHODS
from knobwise.envs.tables.tensor_file import (
    joined_by_name,
    save_tensors,
    tensors_if_whole,
    with_prefix,
)
from knobwise.profiling.demonstrations import beam_search
from knobwise.profiling.demonstrations.pools import similarity
from knobwise.profiling.demonstrations.scorers import CachedScorer, Fields, recorded_scores
from knobwise.profiling.demonstrations.settings import BeamProfileConfig
from knobwise.profiling.demonstrations.tasks import BeamTask
from knobwise.profiling.measuring.machine import (
    claim_machine,
    digests,
    read_note,
    write_readable_json,
)

Draw = Callable[[Tensor, int], Tensor]
"""Queries, int64 [n], and how many sequences for each → int64 [n, count, T], places in their pools,
−1 padded."""
Find = Callable[[BeamTask, Tensor], Fields]
"""A task and queries, int64 [n] → the `sequences` found, int64 [n, B, T], how (`found_by`),
their scores (`fields.…`), and those without demonstrations (`zero_shot.…`, [n])."""
Do = Callable[[Find, Iterable[Tensor]], Iterator[tuple[Tensor, Fields]]]
"""Finds sequences for each chunk of queries; yields them as they end."""
_SEED_STEP = 1_000_003
_OF_A_ROUND = ("json", "draws", "draw_seed")  # settings that do not change what the search records


def profile_beams(
    out_dir: str | Path,
    task: BeamTask,
    config: BeamProfileConfig,
    draw: Draw | None = None,
    drawn_by: str = "",
    do: Do | None = None,
) -> BeamTable:
    """Record the sequences that `config` names, and write them; a policy adds a round of draws.

    Repeat the call to resume it: only the queries of the interrupted chunk are scored again. A call
    with another policy adds a round; a sequence that was recorded before is recorded again as found
    by the policy, but not scored again.

    `draw` is the policy, and `drawn_by` identifies it, such as the digest of its checkpoint. `do`
    works where the scorer of the task is; None works here. Raises InputError if `out_dir` holds
    another run, or an unfinished round of another policy.
    """
    out = Path(out_dir)
    state = out / "state"
    if config.same_kind and task.kinds is None:
        raise InputError(
            f"beams.same_kind={config.same_kind}: needs items that name their question_type"
        )
    settings = {k: v for k, v in asdict(config).items() if k not in _OF_A_ROUND}
    claim_machine(
        state / "beams.json",
        {"task": task.options, "table": task.table.digest, **task.sources, **settings},
    )

    # what was paid for is kept as it comes
    if hasattr(task.scorer, "keep"):
        task.scorer.keep(state)

    # the search, by methods that need no policy
    in_chunks = partial(_in_chunks, chunk=config.chunk, do=do or partial(_one_by_one, task))
    beams = in_chunks(state / "search", table=task.table, find=partial(_search, config))
    table = _with_found(task.table, beams)
    zero_shot = with_prefix(beams, "zero_shot.")

    # a round of draws for each policy and seed
    this_round = {"policy": drawn_by, "draws": config.draws, "draw_seed": config.draw_seed}
    begun = state / "rounds.json"
    rounds = []
    if begun.exists():
        rounds = read_note(begun, list)
    num_begun = len(rounds)
    if draw is not None and this_round not in rounds:
        rounds.append(this_round)
    for index, beginning in enumerate(rounds, 1):
        if index > num_begun:  # only now, since an earlier round may turn out to be unfinished
            write_readable_json(begun, rounds)
        find = None  # earlier rounds are only read
        if draw is not None and beginning == this_round:
            find = partial(_draw_round, config, draw, table, zero_shot)
        beams = in_chunks(state / f"round-{index}", table=table, find=find)
        table = _with_found(table, beams, index)
    info = _write(out, table, task, config)
    shares = figures(table, zero_shot)
    write_readable_json(out / "beams-info.json", info | {"rounds": rounds, "figures": shares})
    print_figures(shares)
    return table


def _one_by_one(
    task: BeamTask, find: Find, chunks: Iterable[Tensor]
) -> Iterator[tuple[Tensor, Fields]]:
    """Find sequences for one chunk of queries after the other, here."""
    for rows in chunks:
        yield rows, find(task, rows)


def _with_found(table: BeamTable, beams: Fields, index: int = 0) -> BeamTable:
    fields = with_prefix(beams, "fields.")
    return table.with_beams(beams["sequences"], fields, beams["found_by"], index)


def _draw_round(
    config: BeamProfileConfig,
    draw: Draw,
    table: BeamTable,
    zero_shot: Fields,
    task: BeamTask,
    rows: Tensor,
) -> Fields:
    """Draw sequences for the queries `rows` and score those that the table lacks."""
    # the same draws whichever chunks an earlier session finished
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.draw_seed * _SEED_STEP + int(rows[0]))
        sequences = draw(rows, config.draws)
    # what is recorded is known
    scorer = CachedScorer(task.scorer)
    pool = table.pool[rows]
    queries, demonstrations, scores = recorded_scores(table, rows, zero_shot)
    scorer.remember(queries, demonstrations, scores)
    nothing = torch.full((len(rows), 1), -1)
    scorer.remember(rows, nothing, {name: field[rows] for name, field in zero_shot.items()})
    return _scored(scorer, rows, pool, {"policy": sequences})


def _search(config: BeamProfileConfig, task: BeamTask, rows: Tensor) -> Fields:
    """Find sequences of the queries `rows` by all methods that need no policy."""
    table = task.table
    scorer = CachedScorer(task.scorer)
    pool = table.pool[rows]
    # a chunk has its own seed, so that chunks can be done in any order
    generator = torch.Generator().manual_seed(int(rows[0]))
    zero_shot = scorer(rows, torch.full((len(rows), 1), -1))
    similarities = similarity(table.queries[rows], table.candidates, pool, table.blocks)
    shots = config.shots
    sequences = {
        "beam": beam_search.beam_search(scorer, rows, pool, shots, config.width),
        "retrieval": beam_search.retrieve_sequences(similarities, shots, config.retrieved),
        "random": beam_search.draw_sequences(pool, shots, config.random, generator),
    }
    if task.kinds is not None:
        kinds = task.kinds
        same = kinds.queries[rows].unsqueeze(1) == kinds.candidates[pool.clamp_min(0)]
        alike = pool.masked_fill(~same, -1)
        sequences["sample"] = beam_search.draw_sequences(alike, shots, config.same_kind, generator)
    beams = _scored(scorer, rows, pool, sequences)
    return beams | {f"zero_shot.{name}": field for name, field in zero_shot.items()}


def _scored(
    scorer: CachedScorer, rows: Tensor, pool: Tensor, sequences: dict[str, Tensor]
) -> Fields:
    """Return the sequences of each method side by side, with their scores."""
    joined = torch.cat(list(sequences.values()), 1)
    methods = [torch.full(s.shape[:2], METHODS.index(name)) for name, s in sequences.items()]
    fields = beam_search.score(scorer, rows, pool, joined)
    beams = {"sequences": joined, "found_by": torch.cat(methods, 1)}
    return beams | {f"fields.{name}": field for name, field in fields.items()}


def _in_chunks(folder: Path, *, chunk: int, table: BeamTable, find: Find | None, do: Do) -> Fields:
    """Find the sequences of all queries of a table, a chunk at a time.

    Each chunk is a file, and files that exist are read.
    """
    # by the first query of each chunk
    parts: dict[int, Fields] = {}
    missing = []
    for rows in torch.arange(table.num_queries).split(chunk):
        # a finished chunk is read, unless it is damaged
        part = tensors_if_whole(folder / f"{int(rows[0])}.safetensors")
        if part is None:
            missing.append(rows)
        else:
            parts[int(rows[0])] = part
    count = table.num_queries - sum(map(len, missing))
    with progress(folder.name, table.num_queries, count) as tick:
        if missing and find is None:
            raise InputError(
                f"{folder}: is not finished; give the checkpoint that it was begun with"
            )
        if find is not None:
            for rows, part in do(find, missing):
                save_tensors(folder / f"{int(rows[0])}.safetensors", part)
                parts[int(rows[0])] = part
                count += len(rows)
                tick(count)
    return joined_by_name([parts[first] for first in sorted(parts)])


def _write(
    out: Path, table: BeamTable, task: BeamTask, config: BeamProfileConfig
) -> dict[str, object]:
    """Write the table; return what is known of its files."""
    table.save(out / "beams.safetensors")
    files = ["beams.safetensors"]
    if config.json:
        # in this format the id of a query is its row in the embeddings
        numbered = replace(table, query_ids=tuple(map(str, range(table.num_queries))))
        write_rl_data(numbered, out / "beams.json", {"query_ids": table.query_ids})
        files += ["beams.json", "embeddings.safetensors", "query_embeddings.safetensors"]
        for name, embeddings in zip(files[2:], (table.candidates, table.queries), strict=True):
            save_tensors(out / name, {"embeddings": embeddings})
    return {
        "name": table.name,
        "digest": table.digest,
        "task": task.options,
        "beams": asdict(config),
        "torch": torch.__version__,
        "sha256": digests(out, files),
    }


def figures(table: BeamTable, zero_shot: Fields) -> dict[str, object]:
    """Compute the shares of right answers, by how sequences were found and by their length.

    `correct` is the share of a kind's sequences, `any_correct` the share of queries with at least
    one right, `gain` the mean information gain.
    """
    # one row for each recorded sequence
    query, beam = table.beam_mask.nonzero(as_tuple=True)
    columns = {
        "method": table.found_by,
        "round": table.round,
        "shots": table.lengths,
        "correct": table.fields["vqa_correct"].double(),
        "gain": table.fields["beam_score"].double(),
    }
    values = {name: column[query, beam].numpy() for name, column in columns.items()}
    right = pl.col("query").filter(pl.col("correct") == 1)
    rows = (
        pl.DataFrame({"query": query.numpy(), **values})
        .group_by("method", "round", "shots")
        .agg(
            sequences=pl.len(),
            correct=pl.col("correct").mean().round(6),
            any_correct=(right.n_unique() / pl.col("query").n_unique()).round(6),
            gain=pl.col("gain").mean().round(6),
        )
        .sort("method", "round", "shots")
        .to_dicts()
    )
    for row in rows:
        row["found_by"] = METHODS[row.pop("method")]
        if index := row.pop("round"):
            row["found_by"] += f"-{index}"
    return {
        "queries": table.num_queries,
        "candidates": len(table.candidates),
        "pool": table.pool.shape[1],
        "zero_shot_correct": round(float(zero_shot["vqa_correct"].double().mean()), 6),
        "found": rows,
    }


def print_figures(figures: Mapping[str, Any]) -> None:
    """Print `figures` in words; gain is that of the right answer's probability."""
    print(
        f"{figures['queries']} queries with pools of {figures['pool']} out of "
        f"{figures['candidates']} candidates; right without demonstrations: "
        f"{figures['zero_shot_correct']:.1%}"
    )
    for row in figures["found"]:
        print(
            f"{row['found_by']}, {row['shots']} shots: {row['sequences']} sequences, "
            f"{row['correct']:.1%} right, gain {row['gain']:.3f}; {row['any_correct']:.1%} of the "
            "queries with one that is right"
        )
