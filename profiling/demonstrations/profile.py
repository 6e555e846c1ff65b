"""Record beam data: find demonstration sequences for every query, score them, write them; it can be interrupted.

profile_beams("out", task)  →  out/beams.safetensors   everything: a BeamTable with its embeddings
                               out/beams.json          the same as RL data, with
                               out/embeddings.safetensors, out/query_embeddings.safetensors
                               out/beams-info.json     figures, costs, the command that makes it again
                               out/state/…             what an interrupted run goes on from, and later rounds add to
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from knobwise.common.errors import InputError
from knobwise.common.files import written_whole
from knobwise.common.progress import progress
from knobwise.envs.demonstrations.beam_files import write_rl_data
from knobwise.envs.demonstrations.beam_table import METHODS, BeamTable
from knobwise.profiling.demonstrations.beam_search import Found, beam_search, drawn, joined, retrieved, score
from knobwise.profiling.demonstrations.pools import similarity
from knobwise.profiling.demonstrations.tasks import BeamTask, changed
from knobwise.profiling.elastic.measuring import claim
from knobwise.profiling.elastic.outputs import cpu_name

Draw = Callable[[Tensor, int], Tensor]
"""Queries, int64 [n], and how many sequences for each → int64 [n, count, T], places in their pools, −1 padded."""
_SEED_STEP = 1_000_003


@dataclass
class BeamProfileConfig:
    """Which sequences of demonstrations are recorded."""

    shots: int = 2
    """Demonstrations in a sequence."""
    width: int = 5
    """Sequences found by beam search on information gain; that looks at the answer."""
    every_length: bool = False
    """Record the sequences that beam search found at every length up to `shots`, not the longest alone."""
    retrieved: int = 3
    """Sequences of the most similar candidates: ranks 1 to `shots`, 2 to `shots` + 1, …"""
    sampled: int = 0
    """Sequences drawn in favour of similar candidates."""
    random: int = 4
    """Sequences drawn evenly."""
    seed: int = 0
    """Of what is drawn."""
    chunk: int = 50
    """Queries after which what was found is safe on disk; with a large model few are better."""
    json: bool = True
    """Whether to write RL data too, with its embeddings."""
    draws: int = 8
    """Sequences that each query gets from the policy of a checkpoint, as one more round."""
    draw_seed: int = 0
    """Of those draws. The same checkpoint with another one adds another round."""

    def __post_init__(self) -> None:
        least = {"shots": 1, "chunk": 1, "draws": 1} | dict.fromkeys(_COUNTS, 0)
        for name, minimum in least.items():
            if getattr(self, name) < minimum:
                raise InputError(f"beams.{name} must be {minimum} at least, not {getattr(self, name)}")
        if not any(getattr(self, name) for name in _COUNTS):
            raise InputError(f"beams: nothing to record: {', '.join(_COUNTS)} are all 0")


_COUNTS = ("width", "retrieved", "sampled", "random")
_OF_A_ROUND = ("json", "draws", "draw_seed")  # not what the recorded sequences are known by


# -- recording ---------------------------------------------------------------------------------------------------------


def profile_beams(
    out_dir: str | Path,
    task: BeamTask,
    config: BeamProfileConfig | None = None,
    draw: Draw | None = None,
    drawn_by: str = "",
) -> BeamTable:
    """Record the sequences that `config` names, add a round of a policy's draws if given one, write it all.

    Calling it again with the same arguments after an interruption goes on where it stopped: what was scored is not
    scored again, but for the queries of the chunk that was under way. Calling it with another policy adds a round; a
    sequence that was recorded before is recorded again as found by the policy, but not scored again.

    Args:
        out_dir: the folder.
        task: what is recorded of.
        config: which sequences.
        draw: the policy.
        drawn_by: what tells one policy from another, such as the digest of its checkpoint.

    Raises:
        InputError: `out_dir` holds another run, or a round of another policy that is not finished.
        ValueError: the same, from `claim`.
    """
    config = config or BeamProfileConfig()
    out, state = Path(out_dir), Path(out_dir) / "state"
    settings = {k: v for k, v in asdict(config).items() if k not in _OF_A_ROUND}
    claim(state / "beams.json", {"task": task.words, "table": task.table.digest, **task.sources, **settings})

    def search(rows: Tensor) -> tuple[Found, dict[str, Tensor]]:
        return _search(task, config, rows)

    base = _in_chunks(state / "search", task.table.num_queries, config.chunk, search)
    table, costs = task.table.with_beams(*base.found), [base.cpu_s]

    mine = {"policy": drawn_by, "draws": config.draws, "draw_seed": config.draw_seed}
    begun = state / "rounds.json"
    rounds: list[dict[str, Any]] = json.loads(begun.read_text()) if begun.exists() else []
    asked = [*rounds, mine] if draw is not None and mine not in rounds else rounds
    for number, about in enumerate(asked, 1):
        if number > len(rounds):
            with written_whole(begun) as temporary:
                temporary.write_text(json.dumps(asked))

        def ask(rows: Tensor, table: BeamTable = table) -> tuple[Found, dict[str, Tensor]]:
            assert draw is not None
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(config.draw_seed * _SEED_STEP + int(rows[0]))
                places = draw(rows, config.draws)
            known = Found(table.sequences[rows], {k: v[rows] for k, v in table.fields.items()}, table.found_by[rows])
            probability = base.zero_shot["vqa_gt_prob"][rows]
            return score(task.scorer, rows, table.pool[rows], places, "policy", probability, known), {}

        is_mine = draw is not None and about == mine
        added = _in_chunks(state / f"round-{number}", table.num_queries, config.chunk, ask if is_mine else None)
        table, costs = table.with_beams(*added.found, round=number), [*costs, added.cpu_s]
    print(describe_beams(_write(out, table, task, config, base.zero_shot, costs, asked)))
    return table


def _search(task: BeamTask, config: BeamProfileConfig, rows: Tensor) -> tuple[Found, dict[str, Tensor]]:
    """What is recorded of these queries at first, and their scores without demonstrations, [n] by name."""
    table, scorer = task.table, task.scorer
    pool, generator = table.pool[rows], torch.Generator().manual_seed(config.seed * _SEED_STEP + int(rows[0]))
    zero_shot = scorer(rows, torch.full((len(rows), 1), -1))
    probability = zero_shot["vqa_gt_prob"]
    alike = torch.zeros_like(pool, dtype=torch.float32)
    if config.retrieved or config.sampled:
        alike = similarity(table.queries[rows], table.candidates, pool, table.blocks)
    even = torch.zeros(pool.shape).masked_fill(pool < 0, -torch.inf)
    others = {
        "retrieval": retrieved(alike, config.shots, config.retrieved),
        "sample": drawn(alike, config.shots, config.sampled, generator),
        "random": drawn(even, config.shots, config.random, generator),
    }
    found, kept = None, []
    if config.width:
        found = beam_search(scorer, rows, pool, config.shots, config.width, probability)
        lengths = (found.sequences >= 0).sum(2, keepdim=True)
        longest = config.every_length | (lengths == lengths.amax(1, keepdim=True))
        kept.append(found._replace(sequences=found.sequences.where(longest, -1)))
    for method, sequences in others.items():
        if sequences.shape[1]:
            kept.append(score(scorer, rows, pool, sequences, method, probability, found))
            found = kept[-1] if found is None else joined([found, kept[-1]])
    return joined(kept), zero_shot


class _Chunks(NamedTuple):
    found: Found
    zero_shot: dict[str, Tensor]
    cpu_s: float


def _in_chunks(
    folder: Path, queries: int, chunk: int, find: Callable[[Tensor], tuple[Found, dict[str, Tensor]]] | None
) -> _Chunks:
    """What `find` finds for all queries, a chunk of them at a time; each is a file, and those that exist are read."""
    chunks = torch.arange(queries).split(chunk)
    paths = [folder / f"{int(rows[0])}.safetensors" for rows in chunks]
    done = sum(len(rows) for rows, path in zip(chunks, paths, strict=True) if path.exists())
    if done < queries and find is None:
        raise InputError(f"{folder}: is not finished; give the checkpoint that it was begun with again")
    if done < queries and find is not None:
        with progress(folder.name, queries, done) as tick:
            for rows, path in zip(chunks, paths, strict=True):
                if path.exists():
                    continue
                start = time.process_time()
                found, zero_shot = find(rows)
                tensors = {"sequences": found.sequences, "found_by": found.found_by}
                tensors |= {f"fields.{name}": field for name, field in found.fields.items()}
                tensors |= {f"zero_shot.{name}": field for name, field in zero_shot.items()}
                tensors["cpu_s"] = torch.tensor(time.process_time() - start, dtype=torch.float64)
                with written_whole(path) as temporary:
                    save_file({name: x.contiguous() for name, x in tensors.items()}, temporary)
                done += len(rows)
                tick(done, "")
    parts = [load_file(path) for path in paths]
    founds = [Found(part["sequences"], _under("fields.", part), part["found_by"]) for part in parts]
    names = _under("zero_shot.", parts[0])
    zero = {name: torch.cat([part[f"zero_shot.{name}"] for part in parts]) for name in names}
    return _Chunks(joined(founds, dim=0), zero, float(sum(part["cpu_s"] for part in parts)))


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}


# -- what a run leaves -------------------------------------------------------------------------------------------------


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
    words = ["knobwise profile", *task.words, "out=DIR", *changed("beams.", config, leave_out=_OF_A_ROUND)]
    if config.json:
        # in this format the id of a query is its row in the embeddings
        numbered = replace(table, query_ids=tuple(map(str, range(table.num_queries))))
        about = {"query_ids": table.query_ids, "command": " ".join(words)}
        write_rl_data(numbered, out / "beams.json", about)
        for name, embeddings in (("embeddings", table.candidates), ("query_embeddings", table.queries)):
            with written_whole(out / f"{name}.safetensors") as temporary:
                save_file({"embeddings": embeddings.contiguous()}, temporary)
        files += ["beams.json", "embeddings.safetensors", "query_embeddings.safetensors"]
    info = {
        "name": table.name,
        "digest": table.digest,
        "command": " ".join(words),
        "rounds": rounds,
        "figures": figures(table, zero_shot),
        "cost_cpu_s": {"search": round(costs[0], 2), "rounds": [round(cost, 2) for cost in costs[1:]]},
        "machine": {"cpu": cpu_name(), "torch": torch.__version__},
        "sha256": {name: hashlib.sha256((out / name).read_bytes()).hexdigest() for name in files},
    }
    with written_whole(out / "beams-info.json") as temporary:
        temporary.write_text(json.dumps(info, indent=1))
    return info


def figures(table: BeamTable, zero_shot: dict[str, Tensor]) -> dict[str, Any]:
    """Shares of right answers by how sequences were found and by their length.

    `correct` is over all sequences of a kind, `any_correct` over their queries (was one of the kind right?), `gain` the
    mean information gain.
    """
    rows: list[dict[str, Any]] = []
    correct, gain = table.fields["vqa_correct"], table.fields["beam_score"]
    rounds = int(table.round.max()) if table.round.numel() else 0
    kinds = [(method, 0) for method in METHODS[:-1]] + [(METHODS[-1], number + 1) for number in range(rounds)]
    for method, number in kinds:
        for shots in range(1, table.shots + 1):
            of = (table.found_by == METHODS.index(method)) & (table.round == number) & (table.lengths == shots)
            if of.any():
                right = of & (correct == 1)
                rows.append(
                    {
                        "found_by": method if not number else f"{method}-{number}",
                        "shots": shots,
                        "sequences": int(of.sum()),
                        "correct": _share(correct[of]),
                        "any_correct": _share(right.any(1)[of.any(1)]),
                        "gain": _share(gain[of]),
                    }
                )
    return {
        "queries": table.num_queries,
        "candidates": len(table.candidates),
        "pool": table.pool.shape[1],
        "zero_shot_correct": _share(zero_shot["vqa_correct"]),
        "found": rows,
    }


def _share(x: Tensor) -> float:
    return round(float(x.double().mean()), 6)


def describe_beams(info: dict[str, Any]) -> str:
    """The figures as lines for a terminal."""
    found = info["figures"]
    lines = [
        f"{found['queries']} queries with pools of {found['pool']} out of {found['candidates']} candidates; right "
        f"without demonstrations: {found['zero_shot_correct']:.1%}",
        f"{'found by':<12}{'shots':>6}{'sequences':>11}{'right':>8}{'any right':>11}{'gain':>8}",
    ]
    for row in found["found"]:
        lines.append(
            f"{row['found_by']:<12}{row['shots']:>6}{row['sequences']:>11}{row['correct']:>8.1%}"
            f"{row['any_correct']:>11.1%}{row['gain']:>8.3f}"
        )
    return "\n".join(lines)
