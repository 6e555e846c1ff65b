"""The built-in data of the selector: drawn, stored without what can be drawn again, and checked when loaded."""

from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from knobwise.common.errors import InputError
from knobwise.profiling.demonstrations import builtin as module
from knobwise.profiling.demonstrations import tasks
from knobwise.profiling.demonstrations.builtin import (
    builtin_demonstrations,
    demonstrations_path,
    load_demonstrations,
    save_demonstrations,
)
from knobwise.profiling.demonstrations.canvases import VARIANTS
from knobwise.profiling.demonstrations.learner import LearnerConfig
from knobwise.profiling.demonstrations.tasks import BLOCKS, SIZES, builtin_learner, task_table

SMALL = {"queries": 30, "candidates": 400}


def recorded(variant="careless", part="test", **more):
    """A small table with up to three recorded sequences a query, and its scorer."""
    table, scorer = task_table(variant, part, **SMALL, **more)
    sequences = torch.rand(30, 3, 48, generator=torch.Generator().manual_seed(0)).argsort(-1)[..., :2]
    sequences[::4, 2] = -1
    sequences[1::4, 0, 1] = -1
    rows = torch.arange(30)
    shown = table.pool[rows[:, None, None], sequences.clamp_min(0)].where(sequences >= 0, -1)
    found = scorer(rows.repeat_interleave(3), shown.view(-1, 2))
    found["beam_score"] = found["vqa_gt_prob"] - 0.1
    return table.with_beams(sequences, {k: v.view(30, 3) for k, v in found.items()}, 3), scorer


def test_a_task_is_drawn_without_beams():
    table, scorer = task_table("careless", "train", **SMALL)
    assert (table.num_queries, table.num_beams, len(table.candidates)) == (30, 0, 400)
    assert table.pool.shape == (30, 48)
    assert table.blocks == BLOCKS
    scores = scorer(torch.arange(30), table.pool[:, :2])
    assert 0 < scores["vqa_acc_score"].mean() < 1
    again, _ = task_table("careless", "train", **SMALL)
    assert again.digest == table.digest
    for other in ({"part": "test"}, {"variant": "careful"}, {"seed": 1}):
        assert task_table(**{"variant": "careless", "part": "train"} | other, **SMALL)[0].digest != table.digest


def test_embeddings_hold_image_question_and_annotator():
    table, scorer = task_table("careless", "test", **SMALL)
    image, question, annotator = (slice(*BLOCKS[name]) for name in ("image", "question", "annotator"))
    asked = torch.stack([(scorer.questions == i).any(1) for i in range(3)], 1)
    assert torch.equal(table.queries[:, question], asked.float())
    assert torch.equal(table.candidates[:, question], torch.nn.functional.one_hot(scorer.question, 3).float())
    assert (table.queries[:, annotator] == 0).all()
    assert torch.equal(table.candidates[:, annotator].sum(1), torch.ones(400))
    assert annotator.stop == table.queries.shape[1]
    queries, _ = tasks.draw_part("careless", "test", 30, 400, 0)
    seen = builtin_learner().tower(torch.from_numpy(queries.images)) * 0.2
    torch.testing.assert_close(table.queries[:, image], seen, rtol=0, atol=2e-4)  # multiples of 1/4096
    assert (table.queries * 4096 % 1 == 0).all()


def test_what_was_saved_is_loaded(tmp_path):
    table, scorer = recorded()
    path = tmp_path / "x.safetensors"
    save_demonstrations(table, "careless", "test", path)
    assert path.stat().st_size < 6000  # no embeddings
    loaded, other = load_demonstrations(path, "careless", "test")
    for name in ("pool", "sequences", "found_by", "round", "queries", "candidates"):
        assert torch.equal(getattr(loaded, name), getattr(table, name)), name
    assert (loaded.name, loaded.query_ids, loaded.blocks) == (table.name, table.query_ids, table.blocks)
    assert set(loaded.fields) == set(table.fields)
    for name, field in table.fields.items():  # half precision
        exact = name in ("vqa_correct", "vqa_acc_score")
        rtol, atol = (0, 0) if exact else (5e-3, 1e-3)
        torch.testing.assert_close(loaded.fields[name], field, rtol=rtol, atol=atol, equal_nan=True)
    rows = torch.arange(30), table.pool[:, :2]
    assert torch.equal(scorer(*rows)["logprob_score"], other(*rows)["logprob_score"])


def test_what_could_not_be_loaded_again_is_not_saved(tmp_path):
    path = tmp_path / "x.safetensors"
    table, _ = recorded()
    other = replace(table, candidates=table.candidates * 2)
    for wrong, part, seed in ((table, "train", 0), (table, "test", 1), (other, "test", 0)):
        with pytest.raises(InputError, match="could not be loaded again"):
            save_demonstrations(wrong, "careless", part, path, seed=seed)
    assert not path.exists()


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"canvases": "sha256:0"}, r"x.safetensors: was recorded with other canvases than NumPy"),
        ({"learner": "sha256:0"}, "was recorded with another learner"),
        ({"seed": "1"}, "other canvases"),
        ({"format": "other"}, "not demonstrations that knobwise saved"),
    ],
)
def test_files_of_other_canvases_or_learners_are_refused(tmp_path, about, message):
    path = tmp_path / "x.safetensors"
    save_demonstrations(recorded()[0], "careless", "test", path)
    with safe_open(path, "pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    save_file(tensors, path, metadata | about)
    with pytest.raises(InputError, match=message):
        load_demonstrations(path, "careless", "test")


def test_other_files_are_refused(tmp_path):
    save_demonstrations(recorded()[0], "careless", "test", tmp_path / "x.safetensors")
    (tmp_path / "text.safetensors").write_text("what?")
    for name, variant, message in (
        ("x", "careful", "other canvases"), ("y", "careless", "no such file"), ("text", "careless", "cannot be read"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            load_demonstrations(tmp_path / f"{name}.safetensors", variant, "test")


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_data_that_come_with_knobwise(variant):
    found = builtin_demonstrations(variant)
    for part, table, scorer in (("train", found.train, found.train_scorer), ("test", found.test, found.test_scorer)):
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


def test_the_built_in_data_can_be_made_again(tmp_path, monkeypatch):
    for place in (module, tasks):
        monkeypatch.setattr(place, "DATA", tmp_path)
    monkeypatch.setattr(tasks, "SIZES", {"train": (5, 120), "test": (4, 100)})
    monkeypatch.setattr(module, "LearnerConfig", lambda: LearnerConfig(steps=2, batch_size=4))
    try:
        module.make_builtin(tmp_path / "runs")
        found = builtin_demonstrations("careful")
        assert builtin_learner().training_s < 30
    finally:
        builtin_learner.cache_clear()
    assert (found.train.num_queries, found.train.shots, found.test.num_queries, found.test.shots) == (5, 2, 4, 4)
    # five found by looking at the answer, three by similarity, four at random; some of these may be the same
    assert found.train.num_beams in (11, 12)
    assert found.test.num_beams == 4 * 5


def test_the_files_are_small():
    files = [demonstrations_path(variant, part) for variant in VARIANTS for part in SIZES]
    files.append(files[0].with_name("learner.safetensors"))
    assert sum(file.stat().st_size for file in files) < 3_000_000
