"""The built-in task's world, the same everywhere; its data are stored without what can be drawn
again, and checked."""

import dataclasses

import numpy as np
import pytest
import torch
from numpy.random import RandomState
from safetensors.torch import save_file

from knobwise.common.errors import InputError
from knobwise.envs.tables.tensor_file import tensors_and_metadata
from knobwise.profiling.demonstrations import canvases
from knobwise.profiling.demonstrations.builtin import (
    builtin_demonstrations,
    demonstrations_path,
    load_demonstrations,
)
from knobwise.profiling.demonstrations.canvases import (
    VARIANTS,
    Bank,
    Queries,
    paint,
)
from knobwise.profiling.demonstrations.settings import LearnerTaskConfig, PoolConfig
from knobwise.profiling.demonstrations.tasks import (
    BLOCKS,
    DATA,
    SIZES,
    builtin_learner,
    draw_part,
    learner_task,
)

SMALL = {"queries": 30, "candidates": 400}
INSIDE = np.pad(np.ones((8, 8), bool), 1)
"""Of a canvas, without its frame."""


def small(**settings):
    return learner_task(LearnerTaskConfig(**SMALL | settings), PoolConfig())[:2]


def test_a_task_is_drawn_without_beams():
    table, scorer = small()
    assert (table.num_queries, table.num_beams, len(table.candidates)) == (30, 0, 400)
    assert table.pool.shape == (30, 48)
    assert table.blocks == BLOCKS
    scores = scorer(torch.arange(30), table.pool[:, :2])
    assert 0 < scores["vqa_acc_score"].mean() < 1
    assert small()[0].digest == table.digest
    for other in ({"part": "test"}, {"variant": "careful"}):
        assert small(**other)[0].digest != table.digest


def test_embeddings_hold_image_question_and_annotator():
    table, scorer = small(part="test")
    image, question, annotator = (
        slice(*BLOCKS[name]) for name in ("image", "question", "annotator")
    )
    questions = torch.stack([(scorer.questions == i).any(1) for i in range(3)], 1)
    assert torch.equal(table.queries[:, question], questions.float())
    answered = torch.nn.functional.one_hot(scorer.question, 3).float()
    assert torch.equal(table.candidates[:, question], answered)
    assert (table.queries[:, annotator] == 0).all()
    assert torch.equal(table.candidates[:, annotator].sum(1), torch.ones(400))
    assert annotator.stop == table.queries.shape[1]
    queries, _ = draw_part(LearnerTaskConfig(part="test", **SMALL))
    seen = builtin_learner().tower(torch.from_numpy(queries.images)) * 0.2
    # multiples of 1/4096
    torch.testing.assert_close(table.queries[:, image], seen, rtol=0, atol=2e-4)
    assert (table.queries * 4096 % 1 == 0).all()


@pytest.mark.parametrize(
    ("changed", "variant"), [({"canvases": "sha256:0"}, "careless"), ({}, "careful")]
)
def test_files_of_other_canvases_are_refused(tmp_path, changed, variant):
    config = LearnerTaskConfig(part="test")
    tensors, metadata = tensors_and_metadata(demonstrations_path(config))
    save_file(tensors, tmp_path / "x.safetensors", metadata | changed)
    with pytest.raises(InputError, match=r"x\.safetensors: was recorded with"):
        load_demonstrations(
            tmp_path / "x.safetensors", dataclasses.replace(config, variant=variant)
        )


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_data_that_come_with_knobwise(variant):
    found = builtin_demonstrations(variant)
    for part, table, scorer in (
        ("train", found.train, found.train_scorer),
        ("test", found.test, found.test_scorer),
    ):
        assert (table.num_queries, len(table.candidates)) == SIZES[part]
        assert table.pool_mask.all()
        assert table.beam_mask.any(1).all()
        # what is recorded is what the scorer says
        rows = torch.arange(0, table.num_queries, 97)
        places = table.sequences[rows, 0]
        shown = table.pool[rows].gather(1, places.clamp_min(0)).where(places >= 0, -1)
        scores = scorer(rows, shown)
        for name, values in scores.items():
            torch.testing.assert_close(table.fields[name][rows, 0], values, rtol=5e-3, atol=1e-3)
    lengths = found.test.lengths
    for shots in (1, 2, 3, 4):
        assert (lengths == shots).any(1).all()


def test_the_files_are_small():
    assert sum(path.stat().st_size for path in DATA.glob("[dl]e*.safetensors")) < 3_000_000


# -- the world -------------------------------------------------------------------------------------


def world(queries=20, items=600, variant="careless", held_out=False, seed=0):
    rng = RandomState(seed)
    bank = canvases.draw_bank(rng, items, held_out, VARIANTS[variant])
    return canvases.draw_queries(rng, queries, held_out), bank


def test_what_is_drawn_is_the_same_everywhere():
    assert (
        canvases.digest(*world())
        == "sha256:9a1d19ec407adc338317699d18b03ebc6221376d78b702991df2c16acdab8851"
    )
    other = canvases.digest(*world(held_out=True, variant="careful", seed=1))
    assert other == "sha256:c90e1892941d8bd282ce60180800b989b0caf60931b6ccbb454092b1c4477786"


@pytest.mark.parametrize("part", [Queries, Bank])
def test_the_digest_is_of_all_that_is_drawn(part):
    queries, bank = world(3, 5)
    for field in dataclasses.fields(part):
        mine = bank if part is Bank else queries
        array = getattr(mine, field.name).copy()
        array.flat[-1] = ~array.flat[-1] if array.dtype == bool else array.flat[-1] + 1
        changed = dataclasses.replace(mine, **{field.name: array})
        other = (queries, changed) if part is Bank else (changed, bank)
        assert canvases.digest(*other) != canvases.digest(queries, bank), field.name


def test_a_canvas_shows_its_digit_its_frame_and_its_texture():
    values = np.array([[3, 1, 2], [3, 1, 4], [3, 5, 2], [8, 1, 2]])
    same, texture, frame, digit = paint(values, np.zeros(4, int), False).reshape(4, 10, 10)
    for other, alike in ((texture, ~INSIDE), (frame, INSIDE)):
        assert (same == other)[alike].all()
        assert (same != other)[~alike].any()
    assert (same == digit)[~INSIDE].all()
    assert set(np.unique(same[~INSIDE])) <= {0, np.float32(0.6)}
    ink = same[INSIDE] > 0.35  # what is darker than the texture is the digit's, and there in both
    np.testing.assert_array_equal(same[INSIDE][ink], texture[INSIDE][ink])
    assert ink.sum() > 10
