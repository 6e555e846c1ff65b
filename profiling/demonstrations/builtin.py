"""The built-in data of the selector: which demonstrations help the learner answer questions about canvases.

Canvases are drawn again at load and embeddings computed from them. The files hold pools and recorded sequences, with
digests of the canvases and of the learner that they belong to. What makes all of it anew, some two CPU-minutes:

    python -m knobwise.profiling.demonstrations.builtin FOLDER
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.random import RandomState
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from knobwise.common.errors import InputError
from knobwise.common.files import written_whole
from knobwise.envs.demonstrations.beam_table import BeamTable
from knobwise.profiling.demonstrations.canvases import (
    ANNOTATORS,
    QUESTIONS,
    VARIANTS,
    Bank,
    Queries,
    digest,
    draw_bank,
    draw_pools,
    draw_queries,
)
from knobwise.profiling.demonstrations.learner import WIDTH, Learner, LearnerConfig, train_learner
from knobwise.profiling.demonstrations.scorers import LearnerScorer, Scorer

SIZES = {"train": (3300, 12000), "test": (1500, 4000)}
"""Queries and items of the bank, by part. The digits of the test part were held out when the learner was trained."""
PARTS = tuple(SIZES)
BLOCKS = {
    "image": (0, WIDTH),
    "question": (WIDTH, WIDTH + len(QUESTIONS)),
    "annotator": (WIDTH + len(QUESTIONS), WIDTH + len(QUESTIONS) + ANNOTATORS),
}
"""Columns of the embeddings: what the learner's tower makes of the canvas; which questions are asked (queries) or
answered (candidates), one-hot; who annotated, one-hot (queries: 0)."""
_IMAGE_SCALE = 0.2  # the image's columns then weigh about as much as the others together
_STEPS = 4096  # embeddings are multiples of 1/4096: the same on every machine, and so is the table's digest
_DATA = Path(str(resources.files("knobwise.profiling") / "data"))
_COMMAND = "python -m knobwise.profiling.demonstrations.builtin FOLDER"
_FORMAT = "knobwise.Demonstrations/1"
# what follows from another field is not stored; NaN stays NaN
_DERIVED = {"vqa_gt_prob": ("logprob_score", torch.exp), "vqa_correct": ("vqa_acc_score", torch.floor)}
_INTEGERS = {"pool": torch.int16, "sequences": torch.int8, "found_by": torch.int8, "round": torch.int8}

Task = tuple[Queries, Bank]


@dataclass(frozen=True)
class Demonstrations:
    """What a selector learns from and is judged on, with the scorers of sequences that are not recorded."""

    train: BeamTable
    test: BeamTable
    train_scorer: Scorer
    test_scorer: Scorer


def builtin_demonstrations(variant: str = "careless", hidden: Collection[str] = ()) -> Demonstrations:
    """Load the built-in data.

    Args:
        variant: "careless" (six of ten annotators are) or "careful" (none is).
        hidden: names of `BLOCKS` whose columns are set to 0 in the embeddings, so that the selector cannot use them.

    Raises:
        InputError: no such variant or block; canvases drawn here, or the learner, are not those of the files.
    """
    (train, train_scorer), (test, test_scorer) = (
        load_demonstrations(demonstrations_path(variant, part), variant, part, hidden=hidden) for part in PARTS
    )
    return Demonstrations(train, test, train_scorer, test_scorer)


def task_table(
    variant: str,
    part: str,
    *,
    queries: int | None = None,
    candidates: int | None = None,
    seed: int = 0,
    learner: Learner | None = None,
    hidden: Collection[str] = (),
) -> tuple[BeamTable, LearnerScorer]:
    """Draw a part of the task: its table, as yet without beams, and the scorer to find some with.

    Args:
        variant: "careless" or "careful".
        part: "train" or "test".
        queries: how many; None for `SIZES`.
        candidates: how many items the bank has; likewise.
        seed: of everything drawn; the built-in data have 0.
        learner: None for the one that comes with knobwise.
        hidden: as for `builtin_demonstrations`.

    Raises:
        InputError: no such variant, part or block; sizes below 1.
    """
    learner = learner or builtin_learner()
    task = _draw(variant, part, queries, candidates, seed)
    pool = torch.from_numpy(draw_pools(RandomState([seed, PARTS.index(part), 1]), *task, VARIANTS[variant]))
    none = torch.zeros(len(pool), 0, dtype=torch.int64)
    beams = {"pool": pool, "sequences": none[:, :, None].expand(-1, -1, 1), "found_by": none, "round": none}
    return _table(variant, part, task, learner, hidden, fields={}, **beams), LearnerScorer(learner, *task)


def careful_candidates(variant: str, part: str) -> Tensor:
    """Which candidates of a built-in bank are by careful annotators, bool [M]: what a rule could be told."""
    _check(variant, part)
    _, bank = _draw(variant, part, None, None, 0)
    return torch.from_numpy(~bank.careless)


@cache
def builtin_learner() -> Learner:
    """The learner that comes with knobwise."""
    return Learner.load(_DATA / "learner.safetensors")


def demonstrations_path(variant: str, part: str) -> Path:
    """Where the file of a part of the built-in data is."""
    _check(variant, part)
    return _DATA / f"demonstrations-{variant}-{part}.safetensors"


def save_demonstrations(
    table: BeamTable, variant: str, part: str, path: str | Path, *, seed: int = 0, learner: Learner | None = None
) -> None:
    """Write pools and beams of a table of `task_table`, without what is drawn and computed again at load.

    Outcomes are rounded to half precision; `vqa_gt_prob`, exp(`logprob_score`), and `vqa_correct`, whether
    `vqa_acc_score` is 1, are left out and computed at load.

    Raises:
        InputError: the table is not of this variant, part, seed and learner, or has hidden columns.
    """
    learner = learner or builtin_learner()
    task = _draw(variant, part, table.num_queries, len(table.candidates), seed)
    for mine, drawn in zip((table.queries, table.candidates), _embed(*task, learner), strict=True):
        if not torch.equal(mine, drawn):
            raise InputError(
                f"{path}: beam table {table.name!r} is not what task_table({variant!r}, {part!r}, seed={seed}) draws; "
                "it could not be loaded again"
            )
    tensors = {name: getattr(table, name).to(kind).contiguous() for name, kind in _INTEGERS.items()}
    derived = {name for name, (origin, _) in _DERIVED.items() if origin in table.fields}
    fields = {name: field for name, field in table.fields.items() if name not in derived}
    tensors |= {f"fields.{name}": field.half().contiguous() for name, field in fields.items()}
    sizes = {"queries": str(len(task[0])), "candidates": str(len(task[1])), "seed": str(seed)}
    about = {"format": _FORMAT, **sizes, "canvases": digest(*task), "learner": learner.digest}
    with written_whole(path) as temporary:
        save_file(tensors, temporary, about)


def load_demonstrations(
    path: str | Path, variant: str, part: str, *, learner: Learner | None = None, hidden: Collection[str] = ()
) -> tuple[BeamTable, LearnerScorer]:
    """Read what `save_demonstrations` wrote.

    Raises:
        InputError: no such file, or another kind of file; canvases drawn here, or the learner, are not those of the
            file.
    """
    learner = learner or builtin_learner()
    try:
        with safe_open(str(path), "pt") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; make it with `{_COMMAND}`") from None
    except Exception as error:
        raise InputError(f"{path}: cannot be read as safetensors ({error})") from error
    if about.get("format") != _FORMAT:
        raise InputError(f"{path}: not demonstrations that knobwise saved")
    task = _draw(variant, part, *(int(about[key]) for key in ("queries", "candidates", "seed")))
    if digest(*task) != about["canvases"]:
        raise InputError(
            f"{path}: was recorded with other canvases than NumPy {np.__version__} and scikit-learn draw here for "
            f"{variant!r}, {part!r}; its sequences would point at the wrong items. Make it again with `{_COMMAND}`"
        )
    if learner.digest != about["learner"]:
        raise InputError(
            f"{path}: was recorded with another learner, so its outcomes are not this one's. Make it again with "
            f"`{_COMMAND}`"
        )
    fields = {k.removeprefix("fields."): v.float() for k, v in tensors.items() if k.startswith("fields.")}
    fields |= {name: derive(fields[origin]) for name, (origin, derive) in _DERIVED.items() if origin in fields}
    beams = {name: tensors[name].long() for name in _INTEGERS}
    return _table(variant, part, task, learner, hidden, fields=fields, **beams), LearnerScorer(learner, *task)


def make_builtin(folder: str | Path) -> None:
    """Train the learner, record the built-in data, and put both where they are loaded from.

    An interrupted run goes on from what it left in `folder`.
    """
    from knobwise.profiling.demonstrations.profile import BeamProfileConfig, profile_beams
    from knobwise.profiling.demonstrations.tasks import LearnerTaskConfig, PoolConfig, learner_task

    learner = train_learner(LearnerConfig(), Path(folder) / "learner.pt")
    learner.save(_DATA / "learner.safetensors")
    builtin_learner.cache_clear()
    configs = {
        "train": BeamProfileConfig(json=False),
        "test": BeamProfileConfig(shots=4, every_length=True, retrieved=0, random=0, json=False),
    }
    for variant in VARIANTS:
        for part in PARTS:
            task = learner_task(LearnerTaskConfig(variant=variant, part=part), PoolConfig())
            table = profile_beams(Path(folder) / f"{variant}-{part}", task, configs[part])
            save_demonstrations(table, variant, part, demonstrations_path(variant, part))


def _check(variant: str, part: str) -> None:
    for what, name, known in (("variant", variant, tuple(VARIANTS)), ("part", part, PARTS)):
        if name not in known:
            raise InputError(f"built-in demonstrations: no {what} {name!r}; there are {', '.join(known)}")


def _draw(variant: str, part: str, queries: int | None, candidates: int | None, seed: int) -> Task:
    _check(variant, part)
    sizes = (queries, candidates)
    q, m = (usual if size is None else size for size, usual in zip(sizes, SIZES[part], strict=True))
    if q < 1 or m < 1:
        raise InputError(f"built-in demonstrations: at least one query and one candidate, not {q} and {m}")
    rng, held_out = RandomState([seed, PARTS.index(part)]), part == "test"
    bank = draw_bank(rng, m, held_out, VARIANTS[variant])
    return draw_queries(rng, q, held_out), bank


def _table(variant: str, part: str, task: Task, learner: Learner, hidden: Collection[str], **beams: Any) -> BeamTable:
    if unknown := sorted(set(hidden) - set(BLOCKS)):
        raise InputError(
            f"built-in demonstrations: nothing called {', '.join(unknown)} to hide; the embeddings' blocks are "
            f"{', '.join(BLOCKS)}"
        )
    queries, candidates = _embed(*task, learner)
    for name in hidden:
        for embeddings in (queries, candidates):
            embeddings[:, slice(*BLOCKS[name])] = 0
    return BeamTable(
        name=f"canvases, {variant} annotators, {part}" + (f", {', '.join(sorted(hidden))} hidden" if hidden else ""),
        query_ids=tuple(f"{part}-{i}" for i in range(len(queries))),
        queries=queries,
        candidates=candidates,
        blocks=BLOCKS,
        **beams,
    )


def _embed(queries: Queries, bank: Bank, learner: Learner) -> tuple[Tensor, Tensor]:
    """Embeddings of queries [Q, 77] and of the bank's items [M, 77], float32."""
    questions, annotators = np.arange(len(QUESTIONS)), np.arange(ANNOTATORS)
    asked = (queries.asked[:, :, None] == questions).any(1)
    nobody = np.zeros((len(queries), ANNOTATORS))
    answered, annotator = bank.question[:, None] == questions, bank.annotator[:, None] == annotators
    return (
        _columns(_see(queries.images, learner), asked, nobody),
        _columns(_see(bank.images, learner), answered, annotator),
    )


def _columns(image: Tensor, *others: NDArray[Any]) -> Tensor:
    return torch.cat([image, *(torch.from_numpy(x) for x in others)], 1).float()


@torch.no_grad()
def _see(images: NDArray[np.float32], learner: Learner) -> Tensor:
    # in double precision and then rounded, so that no machine's way of adding up shows
    tower = copy.deepcopy(learner.tower).double()
    seen: Tensor = tower(torch.from_numpy(images).double()) * (_IMAGE_SCALE * _STEPS)
    return seen.round() / _STEPS


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {_COMMAND}")
    make_builtin(sys.argv[1])
