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
from knobwise.common.json_text import decoded
from knobwise.common.progress import progress
from knobwise.envs.demonstrations.beam_files import write_rl_data
from knobwise.envs.demonstrations.beam_table import BeamTable
from knobwise.envs.demonstrations.settings import METHODS
from knobwise.envs.tables.tensor_file import save_tensors, tensors_if_whole, with_prefix
from knobwise.profiling.demonstrations.beam_search import (
    Sequences,
    beam_search,
    drawn,
    joined,
    retrieved,
    score,
)
from knobwise.profiling.demonstrations.pools import similarity
from knobwise.profiling.demonstrations.settings import BeamProfileConfig
from knobwise.profiling.demonstrations.tasks import BeamTask
from knobwise.profiling.measuring.machine import claim, cpu_name, digests, rendered, write_json
from knobwise.profiling.measuring.settings import changed_settings

Draw = Callable[[Tensor, int], Tensor]
"""Queries, int64 [n], and how many sequences for each → int64 [n, count, T], places in their pools,
−1 padded."""
Search = Callable[[Tensor], tuple[Sequences, dict[str, Tensor]]]
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
    state = Path(out_dir) / "state"
    settings = {k: v for k, v in asdict(config).items() if k not in _OF_A_ROUND}
    claim(
        state / "beams.json",
        {"task": task.words, "table": task.table.digest, **task.sources, **settings},
    )

    search = partial(_search, task, config)
    sequences, zero_shot, cpu_s = _in_chunks(
        state / "search", task.table.num_queries, config.chunk, search
    )
    table = task.table.with_beams(*sequences)
    costs = [cpu_s]

    this_round = {"policy": drawn_by, "draws": config.draws, "draw_seed": config.draw_seed}
    begun = state / "rounds.json"
    rounds = _read_rounds(begun)
    num_begun = len(rounds)
    if draw is not None and this_round not in rounds:
        rounds.append(this_round)
    for number, about in enumerate(rounds, 1):
        if number > num_begun:  # only now, since an earlier round may turn out to be unfinished
            write_json(begun, rounds)
        find = None  # earlier rounds are only read
        if draw is not None and about == this_round:
            find = partial(_draw_round, task, config, draw, table, zero_shot["vqa_gt_prob"])
        added, _, cpu_s = _in_chunks(
            state / f"round-{number}", table.num_queries, config.chunk, find
        )
        table = table.with_beams(*added, round=number)
        costs.append(cpu_s)
    info = _write(out, table, task, config, zero_shot, costs, rounds)
    print(rendered("beams", **info["figures"]))
    return table


def _read_rounds(path: Path) -> list[dict[str, Any]]:
    """Read the rounds begun so far; none where there is no file."""
    if not path.exists():
        return []
    try:
        return list[dict[str, Any]](decoded(path.read_bytes()))
    except (TypeError, ValueError) as error:
        raise InputError(f"{path}: is damaged ({error}); choose another out folder") from error


def _draw_round(
    task: BeamTask,
    config: BeamProfileConfig,
    draw: Draw,
    table: BeamTable,
    zero_shot: Tensor,
    rows: Tensor,
) -> tuple[Sequences, dict[str, Tensor]]:
    """Draw sequences for the queries `rows` and score those that the table lacks."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.draw_seed * _SEED_STEP + int(rows[0]))
        sequences = draw(rows, config.draws)
    fields = {name: field[rows] for name, field in table.fields.items()}
    known = Sequences(table.sequences[rows], fields, table.found_by[rows])
    pool = table.pool[rows]
    return score(task.scorer, rows, pool, sequences, "policy", zero_shot[rows], known), {}


def _search(
    task: BeamTask, config: BeamProfileConfig, rows: Tensor
) -> tuple[Sequences, dict[str, Tensor]]:
    table = task.table
    scorer = task.scorer
    pool = table.pool[rows]
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
    scored = None
    kept = []
    if config.width:
        scored = beam_search(scorer, rows, pool, config.shots, config.width, probability)
        lengths = (scored.sequences >= 0).sum(2, keepdim=True)
        longest = lengths == lengths.amax(1, keepdim=True)
        kept.append(scored._replace(sequences=scored.sequences.where(longest, -1)))
    for method, sequences in others.items():
        if sequences.shape[1]:
            kept.append(score(scorer, rows, pool, sequences, method, probability, scored))
            if scored is None:
                scored = kept[-1]
            else:
                scored = joined([scored, kept[-1]])
    return joined(kept), zero_shot


def _in_chunks(
    folder: Path, queries: int, chunk: int, find: Search | None
) -> tuple[Sequences, dict[str, Tensor], float]:
    """Find the sequences of all queries, a chunk at a time.

    Each chunk is a file, and files that exist are read. Return the sequences, the scores without
    demonstrations, and the CPU seconds of both.
    """
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
    zero_shots = [with_prefix(part, "zero_shot.") for part in whole]
    zero_shot = {}
    for name in zero_shots[0]:
        zero_shot[name] = torch.cat([part[name] for part in zero_shots])
    return joined(sequences, dim=0), zero_shot, float(sum(part["cpu_s"] for part in whole))


def _write(
    out: Path,
    table: BeamTable,
    task: BeamTask,
    config: BeamProfileConfig,
    zero_shot: dict[str, Tensor],
    costs: list[float],
    rounds: list[dict[str, Any]],
) -> dict[str, Any]:
    table.save(out / "beams.safetensors")
    files = ["beams.safetensors"]
    words = [
        "knobwise profile",
        *task.words,
        "out=DIR",
        *changed_settings("beams.", config, leave_out=_OF_A_ROUND),
    ]
    if config.json:
        # in this format the id of a query is its row in the embeddings
        numbered = replace(table, query_ids=tuple(map(str, range(table.num_queries))))
        about = {"query_ids": table.query_ids, "command": " ".join(words)}
        write_rl_data(numbered, out / "beams.json", about)
        for name, embeddings in (
            ("embeddings", table.candidates),
            ("query_embeddings", table.queries),
        ):
            save_tensors(out / f"{name}.safetensors", {"embeddings": embeddings})
        files += ["beams.json", "embeddings.safetensors", "query_embeddings.safetensors"]
    info = {
        "name": table.name,
        "digest": table.digest,
        "command": " ".join(words),
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


def figures(table: BeamTable, zero_shot: dict[str, Tensor]) -> dict[str, Any]:
    """Compute the shares of right answers, by how sequences were found and by their length.

    `correct` is the share of a kind's sequences, `any_correct` the share of queries with at least
    one right, `gain` the mean information gain.
    """
    query, beam = table.beam_mask.nonzero(as_tuple=True)
    columns = {"method": table.found_by, "round": table.round, "shots": table.lengths}
    columns |= {"correct": table.fields["vqa_correct"], "gain": table.fields["beam_score"]}
    frame = pl.DataFrame(
        {"query": query.numpy(), **{name: x[query, beam].numpy() for name, x in columns.items()}}
    )
    right = pl.col("query").filter(pl.col("correct") == 1)
    kinds = frame.group_by("method", "round", "shots").agg(
        sequences=pl.len(),
        correct=pl.col("correct").cast(pl.Float64).mean().round(6),
        any_correct=(right.n_unique() / pl.col("query").n_unique()).round(6),
        gain=pl.col("gain").cast(pl.Float64).mean().round(6),
    )
    method = pl.col("method").replace_strict(dict(enumerate(METHODS)))
    found_by = (
        pl.when(pl.col("round") > 0).then(pl.format("{}-{}", method, "round")).otherwise(method)
    )
    rows = kinds.sort("method", "round", "shots").select(
        found_by.alias("found_by"), pl.exclude("method", "round")
    )
    return {
        "queries": table.num_queries,
        "candidates": len(table.candidates),
        "pool": table.pool.shape[1],
        "zero_shot_correct": round(float(zero_shot["vqa_correct"].double().mean()), 6),
        "found": rows.to_dicts(),
    }
