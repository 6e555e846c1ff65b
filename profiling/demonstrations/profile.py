"""Record beam data: find demonstration sequences for every query, score and write them.

It can be interrupted. `profile_beams("out", task)` writes:

    out/beams.safetensors               everything: a BeamTable with its embeddings
    out/beams.json                      RL data, with the two files that follow
    out/embeddings.safetensors
    out/query_embeddings.safetensors
    out/beams-info.json                 figures, costs, the command that makes it again
    out/state/…                         what an interrupted run resumes from; later rounds add
"""

from __future__ import annotations

import time
from collections.abc import Callable
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
from knobwise.envs.tables.tensor_file import save_tensors, tensors_if_whole, with_prefix
from knobwise.profiling.demonstrations.beam_search import (
    Fields,
    Sequences,
    beam_search,
    drawn,
    joined,
    retrieved,
    rows_of,
    score,
)
from knobwise.profiling.demonstrations.pools import similarity
from knobwise.profiling.demonstrations.settings import BeamProfileConfig
from knobwise.profiling.demonstrations.tasks import BeamTask
from knobwise.profiling.measuring.machine import (
    claim,
    cpu_name,
    digests,
    read_note,
    rendered,
    write_json,
)
from knobwise.profiling.measuring.settings import changed_settings

Draw = Callable[[Tensor, int], Tensor]
"""Queries, int64 [n], and how many sequences for each → int64 [n, count, T], places in their pools,
−1 padded."""
Search = Callable[[Tensor], tuple[Sequences, Fields]]
"""Queries, int64 [n] → their sequences, and their scores without demonstrations, [n] by name."""
_SEED_STEP = 1_000_003
_OF_A_ROUND = ("json", "draws", "draw_seed")  # settings that do not change what the search records


def profile_beams(
    out_dir: str | Path,
    task: BeamTask,
    config: BeamProfileConfig,
    draw: Draw | None = None,
    drawn_by: str = "",
) -> BeamTable:
    """Record the sequences that `config` names, and write them; a policy adds a round of draws.

    Repeat the call to resume it: only the queries of the interrupted chunk are scored again. A call
    with another policy adds a round; a sequence that was recorded before is recorded again as found
    by the policy, but not scored again.

    `draw` is the policy, and `drawn_by` identifies it, such as the digest of its checkpoint. Raises
    InputError if `out_dir` holds another run, or an unfinished round of another policy.
    """
    out = Path(out_dir)
    state = out / "state"
    settings = {k: v for k, v in asdict(config).items() if k not in _OF_A_ROUND}
    claim(
        state / "beams.json",
        {"task": task.options, "table": task.table.digest, **task.sources, **settings},
    )

    # the search, by methods that need no policy
    search = partial(_search, task, config)
    sequences, zero_shot, cpu_s = _in_chunks(
        state / "search", task.table.num_queries, config.chunk, search
    )
    table = task.table.with_beams(*sequences)
    costs = [cpu_s]

    # a round of draws for each policy and seed
    this_round = {"policy": drawn_by, "draws": config.draws, "draw_seed": config.draw_seed}
    begun = state / "rounds.json"
    rounds: list[dict[str, Any]] = []
    if begun.exists():
        rounds = read_note(begun, list)
    num_begun = len(rounds)
    if draw is not None and this_round not in rounds:
        rounds.append(this_round)
    for index, beginning in enumerate(rounds, 1):
        if index > num_begun:  # only now, since an earlier round may turn out to be unfinished
            write_json(begun, rounds)
        find = None  # earlier rounds are only read
        if draw is not None and beginning == this_round:
            find = partial(_draw_round, task, config, draw, table, zero_shot["vqa_gt_prob"])
        added, _, cpu_s = _in_chunks(
            state / f"round-{index}", table.num_queries, config.chunk, find
        )
        table = table.with_beams(*added, round=index)
        costs.append(cpu_s)
    info = _write(out, table, task, config, zero_shot, costs, rounds)
    print(rendered("beams", **info["figures"]))
    return table


def _draw_round(
    task: BeamTask,
    config: BeamProfileConfig,
    draw: Draw,
    table: BeamTable,
    zero_shot: Tensor,
    rows: Tensor,
) -> tuple[Sequences, Fields]:
    """Draw sequences for the queries `rows` and score those that the table lacks."""
    # the same draws whichever chunks an earlier session finished
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.draw_seed * _SEED_STEP + int(rows[0]))
        sequences = draw(rows, config.draws)
    fields = {name: field[rows] for name, field in table.fields.items()}
    known = Sequences(table.sequences[rows], fields, table.found_by[rows])
    pool = table.pool[rows]
    return score(task.scorer, rows, pool, sequences, "policy", zero_shot[rows], [known]), {}


def _search(task: BeamTask, config: BeamProfileConfig, rows: Tensor) -> tuple[Sequences, Fields]:
    table = task.table
    scorer = task.scorer
    pool = table.pool[rows]
    # a chunk has its own seed, so that chunks can be done in any order
    generator = torch.Generator().manual_seed(config.seed * _SEED_STEP + int(rows[0]))
    zero_shot = scorer(rows, torch.full((len(rows), 1), -1))
    probability = zero_shot["vqa_gt_prob"]
    similarities = torch.zeros_like(pool, dtype=torch.float32)
    if config.retrieved:
        similarities = similarity(table.queries[rows], table.candidates, pool, table.blocks)
    others = {
        "retrieval": retrieved(similarities, config.shots, config.retrieved),
        "random": drawn(pool, config.shots, config.random, generator),
    }
    known = []
    kept = []
    if config.width:
        beams = beam_search(scorer, rows, pool, config.shots, config.width, probability)
        lengths = (beams.sequences >= 0).sum(2, keepdim=True)
        longest = lengths == lengths.amax(1, keepdim=True)
        known.append(beams)
        kept.append(beams._replace(sequences=beams.sequences.where(longest, -1)))
    for method, sequences in others.items():
        if sequences.shape[1]:
            kept.append(score(scorer, rows, pool, sequences, method, probability, known))
            known.append(kept[-1])
    return joined(kept), zero_shot


def _in_chunks(
    folder: Path, queries: int, chunk: int, find: Search | None
) -> tuple[Sequences, Fields, float]:
    """Find the sequences of all queries, a chunk at a time.

    Each chunk is a file, and files that exist are read. Return the sequences, the scores without
    demonstrations, and the CPU seconds of both.
    """
    # finished chunks are read, unless they are damaged
    chunks = torch.arange(queries).split(chunk)
    paths = [folder / f"{int(rows[0])}.safetensors" for rows in chunks]
    parts = {path: part for path in paths if (part := tensors_if_whole(path)) is not None}
    missing = [(rows, path) for rows, path in zip(chunks, paths, strict=True) if path not in parts]
    if missing:
        if find is None:
            raise InputError(
                f"{folder}: is not finished; give the checkpoint that it was begun with"
            )
        done = queries - sum(len(rows) for rows, _ in missing)
        with progress(folder.name, queries, done) as tick:
            for rows, path in missing:
                start = time.process_time()
                new, zero_shot = find(rows)
                tensors = {"sequences": new.sequences, "found_by": new.found_by}
                tensors |= {f"fields.{name}": field for name, field in new.fields.items()}
                tensors |= {f"zero_shot.{name}": field for name, field in zero_shot.items()}
                tensors["cpu_s"] = torch.tensor(time.process_time() - start, dtype=torch.float64)
                save_tensors(path, tensors)
                parts[path] = tensors
                done += len(rows)
                tick(done, "")
    # all chunks in the order of the queries
    whole = [parts[path] for path in paths]
    sequences = [
        Sequences(part["sequences"], with_prefix(part, "fields."), part["found_by"])
        for part in whole
    ]
    zero_shot = rows_of([with_prefix(part, "zero_shot.") for part in whole])
    return joined(sequences, dim=0), zero_shot, float(sum(part["cpu_s"] for part in whole))


def _write(
    out: Path,
    table: BeamTable,
    task: BeamTask,
    config: BeamProfileConfig,
    zero_shot: Fields,
    costs: list[float],
    rounds: list[dict[str, Any]],
) -> dict[str, Any]:
    table.save(out / "beams.safetensors")
    files = ["beams.safetensors"]
    settings = changed_settings("beams.", config, leave_out=_OF_A_ROUND)
    command = " ".join(["knobwise profile", *task.options, "out=DIR", *settings])
    tensors = {"embeddings": table.candidates, "query_embeddings": table.queries}
    if config.json:
        # in this format the id of a query is its row in the embeddings
        numbered = replace(table, query_ids=tuple(map(str, range(table.num_queries))))
        metadata = {"query_ids": table.query_ids, "command": command}
        write_rl_data(numbered, out / "beams.json", metadata)
        files.append("beams.json")
        for name, embeddings in tensors.items():
            files.append(f"{name}.safetensors")
            save_tensors(out / files[-1], {"embeddings": embeddings})
    info = {
        "name": table.name,
        "digest": table.digest,
        "command": command,
        "rounds": rounds,
        "figures": figures(table, zero_shot),
        "cost_cpu_s": {
            "search": round(costs[0], 2),
            "rounds": [round(cost, 2) for cost in costs[1:]],
        },
        "machine": {"cpu": cpu_name(), "torch": torch.__version__},
        "sha256": digests(out, files),
    }
    write_json(out / "beams-info.json", info)
    return info


def figures(table: BeamTable, zero_shot: Fields) -> dict[str, Any]:
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
