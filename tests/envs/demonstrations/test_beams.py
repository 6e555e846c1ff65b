"""BeamTable: what it refuses, what it makes of itself, how it splits, what its digest depends on,
and the disk."""

from dataclasses import replace

import pytest
import torch
from helpers import identical, input_error
from safetensors.torch import load_file, save_file
from torch.nn.functional import pad

from knobwise.envs import BeamTable

NAN = float("nan")
X = -1


TINY = BeamTable(
    name="tiny",
    query_ids=("10", "11", "12"),
    pool=torch.tensor([[4, 0, 2], [1, 3, X], [X, X, X]]),
    sequences=torch.tensor([[[2, 0], [1, X]], [[1, 0], [X, X]], [[X, X], [X, X]]]),
    fields={
        "beam_score": torch.tensor([[0.5, 0.25], [NAN, NAN], [NAN, NAN]]),
        "vqa_correct": torch.tensor([[1.0, 0.0], [1.0, NAN], [NAN, NAN]]),
    },
    found_by=torch.tensor([[0, 4], [3, X], [X, X]]),
    round=torch.tensor([[0, 2], [0, 0], [0, 0]]),
    queries=torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]),
    candidates=torch.arange(10.0).reshape(5, 2),
)
"""Three queries with two beams, one, and none; pools of three, two and no candidates out of
five."""


def changed(name, place, value, **others):
    """TINY with another value at a place of a field."""
    values = getattr(TINY, name).clone()
    values[place] = torch.tensor(value)
    return replace(TINY, **{name: values}, **others)


def test_sizes_and_masks():
    table = TINY
    assert (table.num_queries, table.num_beams, table.shots) == (3, 2, 2)
    identical(table.pool_mask, [[True] * 3, [True, True, False], [False] * 3])
    identical(table.beam_mask, [[True, True], [True, False], [False, False]])
    identical(table.lengths, [[2, 1], [2, 0], [0, 0]])
    assert "3 queries, 3 beams" in repr(table)


@pytest.mark.parametrize("shape", [(0, 2), (2, 0), (0, 0)])
def test_a_table_without_any_beam_yet(shape):
    sequences = torch.full((3, *shape), X)
    none = torch.full((3, shape[0]), X)
    table = replace(TINY, sequences=sequences, fields={}, found_by=none, round=0 * none)
    assert not table.beam_mask.any()
    again = table.with_beams(TINY.sequences, TINY.fields, TINY.found_by, TINY.round)
    assert again.digest == TINY.digest


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"pool": torch.zeros(7)}, "pool has shape"),
        ({"sequences": torch.zeros(1, 7)}, "sequences has shape"),
        ({"queries": torch.zeros(7)}, "queries has shape"),
        ({"candidates": torch.zeros(7)}, "candidates has shape"),
        ({"query_ids": ("1",)}, "query_ids has shape"),
        ({"query_ids": ("1", "1", "2")}, "not unique"),
        ({"round": torch.zeros(3, 1)}, "round has shape"),
        ({"fields": {"beam_score": torch.zeros(3)}}, "beam_score. has shape"),
        ({"fields": {"beam_score": torch.zeros(3, 2).double()}}, "float64"),
        ({"fields": {"luck": torch.full((3, 2), NAN)}}, "luck"),
        ({"round": torch.zeros(3, 2)}, "round holds"),
        ({"query_images": ("a",)}, "query_images has shape"),
        *[({"blocks": {"image": columns}}, "block") for columns in ((0, 3), (1, 1), (-1, 1))],
        ({"candidate_images": ("a",)}, "candidate_images has shape"),
        ({"fields": {"beam_score": TINY.fields["beam_score"] * torch.inf}}, "2 × inf"),
        ({"candidates": torch.full((5, 2), torch.inf)}, "5 × candidates"),
        ({"query_images": ("b", "b", ""), "candidate_images": tuple("xabcb")}, "2 × .*own image"),
    ],
)
def test_what_is_refused(changes, what):
    with input_error(f"'tiny'.*{what}"):
        replace(TINY, **changes)


@pytest.mark.parametrize(
    ("name", "place", "value", "what"),
    [
        ("pool", (0, 2), 5, "1 × pool entries beyond"),
        ("pool", (0, 2), 4, "1 × .*twice in a pool"),
        ("pool", (1, 0), X, "1 × padding inside a pool"),
        ("sequences", (0, 1), [X, 1], "1 × padding inside a seq"),
        ("sequences", 1, [[X, X], [1, 0]], "1 × padding between"),
        ("sequences", (1, 0), [2, 0], "1 × indices outside"),
        ("sequences", (0, 0), [0, 0], "1 × .*twice in a seq"),
        ("found_by", (0, 1), 5, "1 × found_by"),
        ("found_by", (1, 0), X, "1 × found_by"),
        ("round", (0, 1), 0, "1 × rounds"),
        ("round", (0, 0), 1, "1 × rounds"),
        ("queries", (0, 0), NAN, "1 × queries"),
    ],
)
def test_entries_that_are_refused(name, place, value, what):
    with input_error(f"'tiny'.*{what}"):
        changed(name, place, value)


def test_unknown_images_and_those_of_other_candidates_are_no_leak():
    images = {"query_images": ("a", "b", ""), "candidate_images": ("x", "a", "b", "", "")}
    assert replace(TINY, **images).query_images == images["query_images"]


def test_select_keeps_order_shape_and_candidates():
    table = replace(TINY, query_images=("a", "b", "c"))
    rows = torch.tensor([2, 0])
    chosen = table.select(rows)
    assert (chosen.query_ids, chosen.query_images) == (("12", "10"), ("c", "a"))
    for name in ("pool", "sequences", "found_by", "round", "queries"):
        identical(getattr(chosen, name), getattr(table, name)[rows])
    identical(chosen.fields["beam_score"][1], [0.5, 0.25])
    assert chosen.candidates is table.candidates
    with input_error("empty"):
        table.select(rows[:0])


def test_beams_are_added_and_closed_up():
    none = [X] * 3
    added = TINY.with_beams(
        torch.tensor([[none, [0, 1, 2]], [[0, X, X], [1, X, X]], [none] * 2]),
        {
            "vqa_correct": torch.tensor([[9, 1], [0, 1], [9, 9]]),
            "vqa_rel_score": torch.full((3, 2), 0.5),
        },
        found_by=4,
        round=torch.tensor([[9, 3], [3, 3], [9, 9]]),
    )
    first, second = [[2, 0, X], [1, X, X], [0, 1, 2]], [[1, 0, X], [0, X, X], [1, X, X]]
    identical(added.sequences, [first, second, [none] * 3])
    identical(added.found_by, [[0, 4, 4], [3, 4, 4], none])
    identical(added.round, [[0, 2, 3], [0, 3, 3], [0, 0, 0]])
    unknown = [NAN] * 3
    wanted = {
        "vqa_correct": [[1, 0, 1], [1, 0, 1], unknown],
        "beam_score": [[0.5, 0.25, NAN], unknown, unknown],
        "vqa_rel_score": [[NAN, NAN, 0.5], [NAN, 0.5, 0.5], unknown],
    }
    assert {*added.fields} == {*wanted}
    for name, values in wanted.items():
        identical(added.fields[name], values)


def test_digest_tells_content_apart_and_nothing_else():
    table = TINY
    score, right = table.fields.values()
    fields = table.fields | {"vqa_rel_score": torch.full((3, 2), NAN)}
    same = [
        replace(table, notes=("read on a Monday",), name="other"),
        replace(table, fields=dict(reversed(fields.items()))),
        replace(table, pool=pad(table.pool, (0, 1), value=X)),
        replace(table, sequences=pad(table.sequences, (0, 1), value=X)),
        table.with_beams(torch.full((3, 4, 5), X), {}, 0),
    ]
    assert {other.digest for other in same} == {table.digest}
    others = [
        changed("pool", (0, 2), 1),
        changed("sequences", (0, 0), [0, 2]),
        changed("found_by", (0, 0), 1),
        changed("round", (0, 1), 3),
        changed("queries", 0, 5.0),
        changed("candidates", 0, 5.0),
        replace(table, query_ids=("10", "11", "13")),
        replace(table, fields={"beam_score": score}),
        replace(table, fields={"beam_score": score, "logprob_score": right}),
        replace(table, query_images=("a", "b", "c")),
        replace(table, candidate_images=tuple("abcde")),
        replace(table, blocks={"image": (0, 1)}),
        replace(table, blocks={"image": (0, 2)}),
    ]
    assert len({table.digest, *(other.digest for other in others)}) == 14
    first, second = (("image", (0, 1)), ("question", (1, 2)))
    orders = dict([first, second]), dict([second, first])
    assert len({replace(table, blocks=blocks).digest for blocks in orders}) == 1


def test_a_saved_table_loads_the_same(tmp_path):
    path = tmp_path / "deep" / "t.safetensors"
    table = replace(
        TINY,
        query_images=("a", "b", ""),
        candidate_images=("x", "", "", "", ""),
        blocks={"image": (0, 1), "question": (1, 2)},
        notes=("2 rows dropped",),
    )
    table.save(path)
    again = BeamTable.load(path)
    for name in ("digest", "name", "notes", "blocks"):
        assert getattr(again, name) == getattr(table, name)
    assert load_file(path)["sequences"].dtype == torch.int8
    large = changed("pool", (0, 0), 39_999, candidates=torch.zeros(40_000, 2))
    large.save(path)
    assert load_file(path)["pool"].dtype == torch.int32
    identical(BeamTable.load(path).pool, large.pool)


def test_files_that_are_no_saved_beam_table(tmp_path):
    path = tmp_path / "t.safetensors"
    save_file({"x": torch.zeros(1)}, path)
    with input_error("not a beam table"):
        BeamTable.load(path)
    TINY.save(path)
    tensors = load_file(path)
    save_file(tensors | {"pool": tensors["pool"] + 1}, path)
    with input_error("beyond"):
        BeamTable.load(path)
