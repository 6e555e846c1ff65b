"""BeamTable: what it refuses, what it makes of itself, how it splits, what its digest depends on,
and the disk."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from knobwise.common.errors import InputError
from knobwise.envs.demonstrations.beam_table import BeamTable, shows_own_image
from knobwise.envs.demonstrations.settings import METHODS

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


def test_sizes_and_masks() -> None:
    table = TINY
    assert (table.num_queries, table.num_beams, table.shots) == (3, 2, 2)
    assert table.pool_mask.tolist() == [[True] * 3, [True, True, False], [False] * 3]
    assert table.beam_mask.tolist() == [[True, True], [True, False], [False, False]]
    assert table.lengths.tolist() == [[2, 1], [2, 0], [0, 0]]
    assert METHODS == ("beam", "sample", "retrieval", "random", "policy")
    assert repr(table) == (
        "BeamTable 'tiny': 3 queries, 3 beams of up to 2 out of 5 candidates (pools of up to 3); "
        "fields: beam_score, vqa_correct"
    )


@pytest.mark.parametrize("shape", [(0, 2), (2, 0), (0, 0)])
def test_a_table_without_any_beam_yet(shape: tuple[int, int]) -> None:
    none = torch.full((3, shape[0]), X)
    table = replace(
        TINY, sequences=torch.full((3, *shape), X), fields={}, found_by=none, round=0 * none
    )
    assert not table.beam_mask.any()
    none = torch.full((3, 0), X)
    assert (
        table.digest
        == replace(TINY, sequences=none[..., None], fields={}, found_by=none, round=none).digest
    )
    again = table.with_beams(TINY.sequences, TINY.fields, TINY.found_by, TINY.round)
    assert again.digest == TINY.digest


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pool": torch.zeros(3)}, r"pool has shape \(3,\), expected \[Q, N\]"),
        ({"sequences": torch.zeros(3, 2)}, r"sequences has shape \(3, 2\), expected \[Q, B, T\]"),
        ({"candidates": torch.zeros(5)}, r"candidates has shape \(5,\), expected \[M, d\]"),
        ({"candidates": torch.zeros(5, 3)}, r"candidates has shape \(5, 3\), expected \(5, 2\)"),
        ({"queries": torch.zeros(2, 2)}, r"queries has shape \(2, 2\), expected \(3, 2\)"),
        ({"query_ids": ("1",)}, r"query_ids has shape \(1,\), expected \(3,\)"),
        ({"query_ids": ("1", "1", "2")}, "query ids are not unique"),
        ({"round": torch.zeros(3, 1)}, r"round has shape \(3, 1\), expected \(3, 2\)"),
        ({"fields": {"beam_score": torch.zeros(3)}}, r"fields\[beam_score\] has shape \(3,\)"),
        ({"fields": {"beam_score": torch.zeros(3, 2).double()}}, r"fields\[beam_score\] holds " r"torch.float64"),
        ({"fields": {"luck": torch.full((3, 2), NAN)}}, "unknown fields luck; known " "are " "beam_score, logprob_score"),
        ({"round": torch.zeros(3, 2)}, "round holds torch.float32, expected torch.int64"),
        ({"query_images": ("a",)}, r"query_images has shape \(1,\), expected \(3,\)"),
        ({"blocks": {"image": (0, 3)}}, "block 'image' is columns 0 to " "3, but " "embeddings are 2 wide"),
        ({"blocks": {"image": (1, 1)}}, "block 'image' is columns 1 to 1"),
        ({"blocks": {"image": (-1, 1)}}, "block 'image' is columns -1 to 1"),
        ({"candidate_images": ("a",)}, r"candidate_images has shape \(1,\), expected \(5,\)"),
        ({"pool": torch.tensor([[4, 0, 5], [1, 3, X], [X, X, X]])}, "1 × pool entries beyond the 5 " "candidates"),
        ({"pool": torch.tensor([[4, 0, 4], [1, 3, X], [X, X, X]])}, "1 × candidates that occur " "twice in a pool"),
        ({"pool": torch.tensor([[4, 0, 2], [1, 3, -2], [X, X, X]])}, "1 × numbers below −1"),
        ({"pool": torch.tensor([[4, 0, 2], [1, X, 3], [X, X, X]])}, "1 × padding inside a pool"),
        ({"sequences": torch.tensor([[[2, 0], [X, 1]], [[1, 0], [X, X]], [[X, X], [X, X]]])}, "padding inside a " "seq"),
        ({"sequences": torch.tensor([[[2, 0], [1, X]], [[X, X], [1, 0]], [[X, X], [X, X]]])}, "padding between " "the"),
        ({"sequences": torch.tensor([[[2, 0], [1, X]], [[2, 0], [X, X]], [[X, X], [X, X]]])}, "indices outside " "the"),
        ({"sequences": torch.tensor([[[0, 0], [1, X]], [[1, 0], [X, X]], [[X, X], [X, X]]])}, "indices that occur " "tw"),
        ({"found_by": torch.tensor([[0, 5], [3, X], [X, X]])}, "1 × found_by that does not index"),
        ({"found_by": torch.tensor([[0, 4], [X, X], [X, X]])}, "1 × found_by that does not index"),
        ({"found_by": torch.tensor([[0, 4], [3, 3], [X, X]])}, "1 × outcomes, found_by or " "round where"),
        ({"round": torch.tensor([[0, 0], [0, 0], [0, 0]])}, "1 × rounds that do not fit found_by"),
        ({"round": torch.tensor([[1, 2], [0, 0], [0, 0]])}, "1 × rounds that do not fit found_by"),
        ({"round": torch.tensor([[0, 2], [0, 1], [0, 0]])}, "1 × outcomes, found_by or " "round where"),
        ({"fields": {"beam_score": torch.tensor([[1, 2], [3, 4], [NAN, NAN]])}}, "1 × outcomes, " "found_by"),
        ({"fields": {"beam_score": torch.tensor([[torch.inf, 2], [3, NAN], [NAN, NAN]])}}, r"1 × infinite " r"fields\[b"),
        ({"queries": torch.tensor([[NAN, 0], [0, 1], [NAN, NAN]])}, "2 × query embeddings that are " "NaN"),
        ({"candidates": torch.full((5, 2), torch.inf)}, "5 × candidate embeddings that " "are " "NaN or infinite"),
    ],
)  # fmt: skip
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"beam table 'tiny'.*{message}"):
        replace(TINY, **changes)


def test_a_candidate_that_shows_the_querys_own_image_is_refused() -> None:
    seen = ("x", "a", "b", "", "b")
    assert replace(TINY, query_images=("a", "b", ""), candidate_images=seen)
    with pytest.raises(InputError, match="2 × candidates that show their query's own image"):
        replace(TINY, query_images=("b", "b", ""), candidate_images=seen)
    own = shows_own_image(torch.tensor([[0, 1, 2], [2, 1, X]]), ("a", ""), ("a", "", "a"))
    assert own.tolist() == [[True, False, True], [False, False, False]]
    assert not shows_own_image(torch.tensor([[0]]), (), ("a",)).any()


def test_select_keeps_order_shape_and_candidates() -> None:
    table = replace(TINY, query_images=("a", "b", "c"))
    chosen = table.select(torch.tensor([2, 0]))
    assert chosen.query_ids == ("12", "10")
    assert chosen.query_images == ("c", "a")
    assert chosen.sequences.tolist() == [[[X, X], [X, X]], [[2, 0], [1, X]]]
    assert chosen.fields["beam_score"][1].tolist() == [0.5, 0.25]
    assert chosen.queries.tolist() == [[1, 1], [1, 0]]
    assert chosen.candidates is table.candidates
    assert table.select(torch.tensor([True, False, False])).query_ids == ("10",)
    with pytest.raises(InputError, match="is empty: it has no queries"):
        table.select(torch.tensor([], dtype=torch.int64))


def test_beams_are_added_and_closed_up() -> None:
    added = TINY.with_beams(
        torch.tensor([[[X, X, X], [0, 1, 2]], [[0, X, X], [1, X, X]], [[X, X, X], [X, X, X]]]),
        {
            "vqa_correct": torch.tensor([[9, 1], [0, 1], [9, 9]]),
            "vqa_rel_score": torch.full((3, 2), 0.5),
        },
        found_by=4,
        round=torch.tensor([[9, 3], [3, 3], [9, 9]]),
    )
    first, second = [[2, 0, X], [1, X, X], [0, 1, 2]], [[1, 0, X], [0, X, X], [1, X, X]]
    assert added.sequences.tolist() == [first, second, [[X, X, X]] * 3]
    assert added.found_by.tolist() == [[0, 4, 4], [3, 4, 4], [X, X, X]]
    assert added.round.tolist() == [[0, 2, 3], [0, 3, 3], [0, 0, 0]]
    assert added.fields["vqa_correct"].nan_to_num(-9).tolist() == [
        [1, 0, 1],
        [1, 0, 1],
        [-9, -9, -9],
    ]
    assert added.fields["beam_score"].nan_to_num(-9).tolist() == [
        [0.5, 0.25, -9],
        [-9, -9, -9],
        [-9, -9, -9],
    ]
    assert added.fields["vqa_rel_score"].nan_to_num(-9).tolist() == [
        [-9, -9, 0.5],
        [-9, 0.5, 0.5],
        [-9, -9, -9],
    ]


@pytest.mark.parametrize(
    ("sequences", "words", "message"),
    [
        (torch.zeros(2, 1, 1, dtype=torch.int64), {}, r"shape \(2, 1, 1\), expected \[3, B, T\]"),
        (torch.tensor([[[0]], [[0]], [[0]]]), {}, "indices outside the query's own pool"),
        (
            torch.tensor([[[0]], [[0]], [[X]]]),
            {"round": torch.zeros(3, 2)},
            r"have shape \(3, 2\), expected \(3, 1\)",
        ),
        (
            torch.tensor([[[0]], [[0]], [[X]]]),
            {"fields": {"luck": torch.zeros(3, 1)}},
            "unknown fields luck",
        ),
    ],
)
def test_beams_that_do_not_fit_are_not_added(
    sequences: torch.Tensor, words: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        TINY.with_beams(sequences, **({"fields": {}, "found_by": 1} | words))


def test_digest_tells_content_apart_and_nothing_else() -> None:
    table = TINY
    same = [
        replace(table, notes=("read on a Monday",), name="other"),
        replace(table, fields=dict(reversed(table.fields.items()))),
        replace(table, fields=table.fields | {"vqa_rel_score": torch.full((3, 2), NAN)}),
        replace(table, pool=torch.cat([table.pool, torch.full((3, 2), X)], 1)),
        replace(table, sequences=torch.cat([table.sequences, torch.full((3, 2, 1), X)], 2)),
        table.with_beams(torch.full((3, 4, 5), X), {}, 0),
    ]
    assert {other.digest for other in same} == {table.digest}
    changed = [
        replace(table, query_ids=("10", "11", "13")),
        replace(table, pool=torch.tensor([[4, 0, 1], [1, 3, X], [X, X, X]])),
        replace(
            table, sequences=torch.tensor([[[2, 0], [0, X]], [[1, 0], [X, X]], [[X, X], [X, X]]])
        ),
        replace(table, fields={"beam_score": table.fields["beam_score"]}),
        replace(
            table,
            fields={
                "beam_score": table.fields["beam_score"],
                "logprob_score": table.fields["vqa_correct"],
            },
        ),
        replace(table, found_by=torch.tensor([[1, 4], [3, X], [X, X]])),
        replace(table, round=torch.tensor([[0, 3], [0, 0], [0, 0]])),
        replace(table, queries=table.queries + 1),
        replace(table, candidates=table.candidates + 1),
        replace(table, query_images=("a", "b", "c")),
        replace(table, candidate_images=tuple("abcde")),
        replace(table, blocks={"image": (0, 1)}),
        replace(table, blocks={"image": (0, 2)}),
    ]
    assert len({table.digest, *(other.digest for other in changed)}) == 14
    orders = ({"image": (0, 1), "question": (1, 2)}, {"question": (1, 2), "image": (0, 1)})
    assert len({replace(table, blocks=blocks).digest for blocks in orders}) == 1
    assert table.digest.startswith("sha256:")


def test_a_saved_table_loads_the_same(tmp_path) -> None:
    images = {"query_images": ("a", "b", ""), "candidate_images": ("x", "", "", "", "")}
    table = replace(
        TINY, **images, blocks={"image": (0, 1), "question": (1, 2)}, notes=("2 rows dropped",)
    )
    table.save(tmp_path / "deep" / "t.safetensors")
    again = BeamTable.load(tmp_path / "deep" / "t.safetensors")
    assert again.digest == table.digest
    assert (again.name, again.notes, again.blocks) == (table.name, table.notes, table.blocks)
    assert again.select(torch.tensor([0])).blocks == table.blocks
    assert again.pool.dtype == torch.int64
    tensors = load_file(tmp_path / "deep" / "t.safetensors")
    assert {tensors[k].dtype for k in ("pool", "sequences", "found_by", "round")} == {torch.int8}
    table = replace(
        TINY,
        candidates=torch.zeros(40_000, 2),
        pool=torch.tensor([[39_999, 0, 2], [1, 3, X], [X, X, X]]),
    )
    table.save(tmp_path / "t.safetensors")
    assert load_file(tmp_path / "t.safetensors")["pool"].dtype == torch.int32
    assert BeamTable.load(tmp_path / "t.safetensors").pool[0, 0] == 39_999


def test_files_that_are_no_saved_beam_table(tmp_path) -> None:
    path = tmp_path / "t.safetensors"
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(InputError, match=r"t\.safetensors: not a beam table saved by knobwise"):
        BeamTable.load(path)
    TINY.save(path)
    tensors = load_file(path)
    save_file(tensors | {"pool": tensors["pool"] + 1}, path)
    with pytest.raises(
        InputError, match=r"t\.safetensors: not a beam table.*beyond the 5 candidates"
    ):
        BeamTable.load(path)
