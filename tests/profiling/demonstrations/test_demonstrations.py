"""The built-in task's world, the same everywhere; its data are stored without what can be drawn
again, and checked."""

import dataclasses
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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
    draw_covering_pools,
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
CARELESS = VARIANTS["careless"]
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
    for other in ({"part": "test"}, {"variant": "careful"}, {"seed": 1}):
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
    ("changed", "variant"),
    [
        ({"canvases": "sha256:0"}, "careless"),
        ({"learner": "sha256:0"}, "careless"),
        ({"seed": "1"}, "careless"),
        ({}, "careful"),
    ],
)
def test_files_of_other_canvases_or_learners_are_refused(tmp_path, changed, variant):
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


def covers(queries, bank):
    """[Q, 2, M]: which items cover which question."""
    right = np.take_along_axis(queries.values, queries.questions.clip(0), 1)[..., None]
    return (bank.question == queries.questions[..., None]) & (bank.true_value == right)


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


@pytest.mark.parametrize("variant", ["careless", "careful"])
def test_a_pool_holds_covers_look_alikes_and_others(variant):
    queries, bank = world(12, 900, variant)
    how = VARIANTS[variant]
    pools = draw_covering_pools(RandomState(1), queries, bank, how)
    assert pools.shape == (12, 48)
    covering = covers(queries, bank)
    for q, pool in enumerate(pools):
        assert len(set(pool)) == 48
        careless = bank.careless[pool]
        for part in range(2):
            found = covering[q, part][pool]
            asked = queries.questions[q, part] >= 0
            assert (found & ~careless).sum() == asked * how.careful_covers
            assert (found & careless).sum() == asked * how.careless_covers
        distance = ((bank.images - queries.images[q]) ** 2).sum(1)
        for kind, count in ((False, how.careful_look_alikes), (True, how.careless_look_alikes)):
            others = np.flatnonzero(~covering[q].any(0) & (bank.careless == kind))
            assert set(others[distance[others].argsort()[:count]]) <= set(pool)


def test_the_places_of_a_pool_tell_nothing():
    queries, bank = world(400, 600)
    pools = draw_covering_pools(RandomState(1), queries, bank, CARELESS)
    right = queries.values[np.arange(400), queries.questions[:, 0]]
    found = (bank.question[pools] == queries.questions[:, :1]) & (
        bank.true_value[pools] == right[:, None]
    )
    # 10 of 48 places; the standard error of a place's share is .02
    np.testing.assert_allclose(found.mean(0), 10 / 48, atol=0.08)


@settings(max_examples=10, deadline=None)
@given(
    queries=st.integers(1, 7),
    items=st.integers(1, 90),
    chunk=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_small_banks_and_chunks(queries, items, chunk, seed):
    drawn = world(queries, items, seed=seed)
    pools = draw_covering_pools(RandomState(seed), *drawn, CARELESS)
    with patch.object(canvases, "_CHUNK", chunk):
        chunked = draw_covering_pools(RandomState(seed), *drawn, CARELESS)
    np.testing.assert_array_equal(pools, chunked)
    covering = covers(*drawn).any(1)
    for pool, cover in zip(pools, covering, strict=True):
        real = pool[pool >= 0]
        assert (pool[: len(real)] >= 0).all()
        assert (real < items).all()
        assert len(set(real)) == len(real)
        if len(real) < 48:  # all that there are, but for covers beyond their number
            assert cover[np.setdiff1d(np.arange(items), real)].all()
