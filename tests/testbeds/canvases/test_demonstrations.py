"""The built-in task's world, the same everywhere; its data are stored without what can be drawn
again, and checked."""

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from helpers import close, input_error
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import RandomState
from safetensors.torch import save_file

from knobwise.envs.demonstrations.beam_table import bank_rows
from knobwise.envs.tables.tensor_file import tensors_and_metadata
from knobwise.profiling.demonstrations.settings import LearnerTaskConfig, PoolConfig
from knobwise.testbeds.canvases import canvases
from knobwise.testbeds.canvases.builtin import (
    builtin_demonstrations,
    demonstrations_path,
    load_demonstrations,
)
from knobwise.testbeds.canvases.canvases import VARIANTS, draw_covering_pools, paint
from knobwise.testbeds.canvases.task import (
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
    sizes = [end - start for start, end in BLOCKS.values()]
    image, asked, nobody = table.queries.split(sizes, 1)
    _, answered, annotator = table.candidates.split(sizes, 1)
    numbers = torch.arange(3)
    close(asked, (scorer.questions[..., None] == numbers).any(1).float())
    close(answered, (scorer.question[:, None] == numbers).float())
    assert not nobody.any()
    close(annotator.sum(1), torch.ones(400))
    queries, _ = draw_part(LearnerTaskConfig(part="test", **SMALL))
    # multiples of 1/4096
    close(image, builtin_learner().tower(torch.from_numpy(queries.images)) * 0.2, 2e-4)
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
    with input_error("x.safetensors"):
        load_demonstrations(tmp_path / "x.safetensors", replace(config, variant=variant))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_data_that_come_with_knobwise(variant):
    found = builtin_demonstrations(variant)
    for size, table, scorer in zip(SIZES.values(), found[:2], found[2:], strict=True):
        assert (table.num_queries, len(table.candidates)) == size
        assert table.pool_mask.all()
        assert table.beam_mask.any(1).all()
        # what is recorded is what the scorer says
        rows = torch.arange(0, table.num_queries, 97)
        shown = bank_rows(table.pool[rows], table.sequences[rows, 0])
        for name, values in scorer(rows, shown).items():
            torch.testing.assert_close(table.fields[name][rows, 0], values, rtol=5e-3, atol=1e-3)
    for shots in (1, 2, 3, 4):
        assert (found.test.lengths == shots).any(1).all()


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
    digest = canvases.digest(*world())
    assert digest == "sha256:9a1d19ec407adc338317699d18b03ebc6221376d78b702991df2c16acdab8851"
    digest = canvases.digest(*world(held_out=True, variant="careful", seed=1))
    assert digest == "sha256:c90e1892941d8bd282ce60180800b989b0caf60931b6ccbb454092b1c4477786"


@pytest.mark.parametrize("part", [0, 1], ids=["queries", "bank"])
def test_the_digest_is_of_all_that_is_drawn(part):
    drawn = world(3, 5)
    for name, array in vars(drawn[part]).items():
        before = canvases.digest(*drawn)
        array.flat[-1] = not array.flat[-1]
        assert canvases.digest(*drawn) != before, name


def test_a_canvas_shows_its_digit_its_frame_and_its_texture():
    values = np.array([[3, 1, 2], [3, 1, 4], [3, 5, 2], [8, 1, 2]])
    same, texture, frame, digit = paint(values, np.zeros(4, int), False).reshape(4, 10, 10)
    for other, alike in ((texture, ~INSIDE), (frame, INSIDE), (digit, ~INSIDE)):
        assert (same == other)[alike].all()
        assert (same != other)[~alike].any()
    assert set(same[~INSIDE]) <= {0, np.float32(0.6)}
    ink = same[INSIDE] > 0.35  # what is darker than the texture is the digit's, and there in both
    assert (same == texture)[INSIDE][ink].all()
    assert ink.sum() > 10


@pytest.mark.parametrize("variant", ["careless", "careful"])
def test_a_pool_holds_covers_look_alikes_and_others(variant):
    queries, bank = world(12, 900, variant)
    how = VARIANTS[variant]
    pools = draw_covering_pools(RandomState(1), queries, bank, how)
    assert pools.shape == (12, 48)
    for q, (pool, covering) in enumerate(zip(pools, covers(queries, bank), strict=True)):
        assert len(set(pool)) == 48
        distance = ((bank.images - queries.images[q]) ** 2).sum(1)
        for careless, covering_count, look_alikes in (
            (False, how.careful_covers, how.careful_look_alikes),
            (True, how.careless_covers, how.careless_look_alikes),
        ):
            kind = bank.careless == careless
            counts = (covering & kind)[:, pool].sum(1)
            assert (counts == covering_count * (queries.questions[q] >= 0)).all()
            others = np.flatnonzero(~covering.any(0) & kind)
            assert set(others[distance[others].argsort()[:look_alikes]]) <= set(pool)


def test_the_places_of_a_pool_tell_nothing():
    drawn = world(400, 600)
    pools = draw_covering_pools(RandomState(1), *drawn, CARELESS)
    found = np.take_along_axis(covers(*drawn)[:, 0], pools, 1)
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
