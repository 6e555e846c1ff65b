"""Recorded beams from files: both formats by hand, everything that is dropped or refused, and the
way back."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from helpers import Harmful
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from knobwise.common.errors import InputError
from knobwise.envs.demonstrations.beam_files import read_beam_data, read_embeddings, write_rl_data
from knobwise.envs.demonstrations.beam_table import BeamTable
from knobwise.envs.demonstrations.settings import FIELDS

NAN = float("nan")
X = -1
BANK = torch.arange(40.0).reshape(20, 2)
ASKED = -torch.arange(1.0, 21.0).reshape(10, 2)
PAIR = {"id_list": [[1, 2]], "score_list": [0.5]}


def written(folder: Path, content: Any, name: str = "beams.json") -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def rl(*rows: dict[str, Any], **record: Any) -> dict[str, Any]:
    """RL data of one query, 3, with a pool of three."""
    return {"3": {"candidate_pool_ids": [7, 9, 5], "pointer_candidates": list(rows)} | record}


def read(folder: Path, content: Any, **words: Any) -> BeamTable:
    """The table of a file with this content; queries are rows of ASKED, candidates of BANK."""
    return read_beam_data(written(folder, content), BANK, ASKED, **words)


def row(pointer: list[int], **changes: Any) -> dict[str, Any]:
    return {"pointer": pointer, "gen_method": "beam", "beam_score": 0.5} | changes


def test_legacy_rows_with_and_without_the_querys_own_id(tmp_path) -> None:
    content = {
        "3": {"id_list": [[7, 9, 3], ["5", 7]], "score_list": [0.5, 0.25]},
        "1": {"id_list": [[8, 2, 4, 1]], "score_list": [1e-7]},
        "0": {"id_list": [], "score_list": []},
    }
    table = read(tmp_path, content)
    assert (table.name, table.query_ids) == ("beams", ("3", "1", "0"))
    assert table.pool.tolist() == [[7, 9, 5], [8, 2, 4], [X, X, X]]
    assert table.sequences.tolist() == [
        [[0, 1, X], [2, 0, X]],
        [[0, 1, 2], [X, X, X]],
        [[X, X, X], [X, X, X]],
    ]
    assert table.found_by.tolist() == [[0, 0], [0, X], [X, X]]
    assert list(table.fields) == ["beam_score"]
    assert table.fields["beam_score"].nan_to_num(-9).tolist() == [
        [0.5, 0.25],
        [np.float32(1e-7), -9],
        [-9, -9],
    ]
    assert table.queries.tolist() == ASKED[[3, 1, 0]].tolist()
    assert torch.equal(table.candidates, BANK)
    assert table.notes == (
        "2 rows end with the query's own id, which is no demonstration",
        "3 queries without a pool: the ids in their rows are taken as the pool",
        "1 queries without any beam",
        "1 queries with only one beam, which can be compared with no other",
    )
    rows = torch.randperm(300, generator=torch.Generator().manual_seed(0)).reshape(100, 3).tolist()
    path = written(tmp_path, {"0": {"id_list": rows, "score_list": [0.0] * 100}})
    large = read_beam_data(path, torch.zeros(300, 2), ASKED)
    assert large.pool[0][large.sequences[0]].tolist() == rows


def test_a_trailing_id_may_be_a_candidate_of_another_bank(tmp_path) -> None:
    path = written(tmp_path, {"3": {"id_list": [[7, 3], [3]], "score_list": [1, 2]}})
    table = read_beam_data(path, BANK, ASKED, trailing_query="never")
    assert table.pool.tolist() == [[7, 3]]
    assert table.sequences.tolist() == [[[0, 1], [1, X]]]
    auto = read_beam_data(path, BANK, ASKED)
    assert auto.sequences.tolist() == [[[0]]]
    assert "1 rows dropped: without demonstrations" in auto.notes
    with pytest.raises(InputError, match="trailing_query='often': must be one of auto, never"):
        read_beam_data(path, BANK, ASKED, trailing_query="often")  # type: ignore[arg-type]


def test_a_query_is_no_candidate_of_its_own(tmp_path) -> None:
    """One bank for both: beams that use the query drop out, and places in the pool move up."""
    path = written(tmp_path, {"3": {"id_list": [[7, 9], [3, 9], [5, 9]], "score_list": [3, 2, 1]}})
    for table in (read_beam_data(path, BANK), read_beam_data(path, BANK, BANK.clone())):
        assert table.pool.tolist() == [[7, 9, 5]]
        assert table.sequences.tolist() == [[[0, 1], [2, 1]]]
        assert table.fields["beam_score"].tolist() == [[3, 1]]
        assert table.notes[1:] == (
            "1 candidates dropped from pools: they are the query itself or show its image",
            "1 rows dropped: they use such candidates",
        )
    assert read_beam_data(path, BANK, ASKED).pool.tolist() == [[7, 9, 3, 5]]


def test_rl_data_by_hand(tmp_path) -> None:
    content = {
        "_meta": {"created_at": "2025-01-01", "vqa_model": "some"},
        "3": {
            "query": {"question_id": 77, "image_id": 12, "question": "?", "gt_answers_raw": ["a"]},
            "candidate_pool_ids": [7, 9, 5],
            "pointer_candidates": [
                {"pointer": [2, 0], "pointer_global": [5, 7], "gen_method": "beam", "beam_score": 0.5,
                 "logprob_score": -5.25, "vqa_correct": 1, "vqa_acc_score": 1, "vqa_gt_prob": 0.0,
                 "vqa_rel_score": None, "vqa_eval_mode": "vqaEval", "eval_failed": False},
                {"pointer": ["9"], "gen_method": "sample", "vqa_correct": False},
                {"pointer_pos": [9, 5], "gen_method": "retrieval"},
                {"pointer_global": [9], "gen_method": "random"},
            ],
        },
        "0": {
            "query": {"image_id": "b.jpg"},
            "pointer_candidates": [
                {"pointer": [8, 2], "gen_method": "policy"},
                {"pointer": [0], "pointer_global": [4], "gen_method": "policy-3"},
                {"pointer": [4, 8], "gen_method": "policy", "round": 2},
            ],
        },
    }  # fmt: skip
    table = read(tmp_path, content)
    assert table.query_ids == ("3", "0")
    assert table.query_images == ("12", "b.jpg")
    assert table.pool.tolist() == [[7, 9, 5], [8, 2, 4]]
    assert table.sequences.tolist() == [
        [[2, 0], [1, X], [1, 2], [1, X]],
        [[0, 1], [2, X], [2, 0], [X, X]],
    ]
    assert table.found_by.tolist() == [[0, 1, 2, 3], [4, 4, 4, X]]
    assert table.round.tolist() == [[0, 0, 0, 0], [1, 3, 2, 0]]
    assert list(table.fields) == [
        "beam_score",
        "logprob_score",
        "vqa_correct",
        "vqa_acc_score",
        "vqa_gt_prob",
    ]
    assert table.fields["vqa_correct"][0].nan_to_num(-9).tolist() == [1, 0, -9, -9]
    assert table.fields["logprob_score"][0].nan_to_num(-9).tolist() == [-5.25, -9, -9, -9]
    assert table.fields["vqa_gt_prob"].isnan().sum() == 7
    assert table.notes[0] == "1 queries without a pool: the ids in their rows are taken as the pool"
    assert table.notes[1].startswith("2 queries name their image, candidates do not")


def test_failed_and_fallback_rows_are_dropped_and_counted(tmp_path) -> None:
    rows = [
        row([7], eval_failed=True, gen_method=None, beam_score=None),
        row([9], vqa_eval_mode="error"),
        row([5], vqa_eval_mode="fallback"),
        row([], vqa_eval_mode="vqaEval"),
        row([7, 9], vqa_eval_mode="vqaEval", eval_failed=False),
    ]
    path = written(
        tmp_path, rl(*rows) | {"4": {"pointer_candidates": [row([8], eval_failed=True)]}}
    )
    table = read_beam_data(path, BANK, ASKED)
    assert table.sequences.tolist() == [[[0, 1]], [[X, X]]]
    assert table.pool.tolist() == [
        [7, 9, 5],
        [8, X, X],
    ]  # a query without a beam keeps its pool: it can be judged
    assert table.notes == (
        "2 rows dropped: eval_failed",
        "1 rows dropped: vqa_eval_mode error",
        "1 rows dropped: vqa_eval_mode fallback (see keep_fallback)",
        "1 rows dropped: without demonstrations",
        "1 queries without a pool: the ids in their rows are taken as the pool",
        "1 queries without any beam",
        "1 queries with only one beam, which can be compared with no other",
    )
    assert read_beam_data(path, BANK, ASKED, keep_fallback=True).sequences.tolist() == [
        [[2, X], [0, 1]], [[X, X], [X, X]],
    ]  # fmt: skip


def test_nothing_left_says_why(tmp_path) -> None:
    with pytest.raises(
        InputError,
        match=r"beams\.json: no beam is left. 1 rows dropped: vqa_eval_mode fallback \(see",
    ):
        read(tmp_path, rl(row([7], vqa_eval_mode="fallback")))
    with pytest.raises(InputError, match=r"no beam is left. 1 queries without any beam"):
        read(tmp_path, rl(candidate_pool_ids=[]))


IMAGES = ["same" if i == 9 else f"i{i}" for i in range(20)]


@pytest.mark.parametrize(
    "form", ["sequence", "list.json", "object.json", "table.csv", "table.parquet"]
)
def test_candidates_that_show_the_querys_image_are_dropped(tmp_path, form: str) -> None:
    given: Any = tmp_path / form
    if form == "sequence":
        given = IMAGES
    elif form.endswith("json"):
        written(tmp_path, IMAGES if form == "list.json" else {"9": "same", "4": None}, form)
    else:
        frame = pl.DataFrame({"id": range(20), "image_id": IMAGES}).sample(
            fraction=1, shuffle=True, seed=0
        )
        frame.write_csv(given) if form.endswith("csv") else frame.write_parquet(given)
    rows = (
        row([7, 5]),
        row([9, 5], gen_method="sample"),
        row([5, 7], gen_method="policy-2", beam_score=0.25),
    )
    table = read(tmp_path, rl(*rows, query={"image_id": "same"}), candidate_images=given)
    assert table.pool.tolist() == [[7, 5]]
    assert table.sequences.tolist() == [[[0, 1], [1, 0]]]
    assert (table.found_by.tolist(), table.round.tolist()) == ([[0, 4]], [[0, 2]])
    assert table.fields["beam_score"].tolist() == [[0.5, 0.25]]
    assert table.notes == (
        "1 candidates dropped from pools: they are the query itself or show its image",
        "1 rows dropped: they use such candidates",
    )
    assert table.candidate_images[9] == "same"


def test_in_one_bank_an_items_image_is_known_from_either_side(tmp_path) -> None:
    """Items 3 and 7 show one image: said of the queries in one file, of the candidates in the
    other."""
    content = {
        key: {
            "query": {"image_id": image},
            "pointer_candidates": [row([7, 9]), row([3, 9]), row([9])],
        }
        for key, image in (("3", "a"), ("7", "a"), ("5", None))
    }
    table = read_beam_data(written(tmp_path, content), BANK)
    assert table.pool.tolist() == [[9, X, X], [9, X, X], [7, 9, 3]]
    assert table.candidate_images == tuple("a" if i in (3, 7) else "" for i in range(20))
    assert "1 queries of unknown image" in table.notes
    legacy = {"3": {"id_list": [[7, 9, 3], [9, 3]], "score_list": [2, 1]}}
    images = ["a" if i in (3, 7) else "b" for i in range(20)]
    table = read_beam_data(written(tmp_path, legacy), BANK, candidate_images=images)
    assert table.pool.tolist() == [[9]]
    assert table.query_images == ("a",)


@pytest.mark.parametrize(
    ("suffix", "images", "message"),
    [
        ("json", ["a"] * 19, "names the images of 19 candidates, but there are 20 embeddings"),
        ("json", {"20": "a"}, "names the image of candidate 20, but there are 20"),
        ("json", {"x": "a"}, "id holds 'x'"),
        ("json", [1.5] * 20, "expected the image of each candidate"),
        ("csv", "id,image_id\n1,a\n1,b\n", "expected the image of each candidate: columns id"),
        ("csv", "id,picture\n1,a\n", "expected the image of each candidate"),
    ],
)
def test_images_that_do_not_fit(tmp_path, suffix: str, images: Any, message: str) -> None:
    with pytest.raises(InputError, match=rf"i\.{suffix}: {message}"):
        read(tmp_path, rl(row([7])), candidate_images=written(tmp_path, images, f"i.{suffix}"))


@given(
    data=st.data(),
    shared=st.booleans(),
    images=st.lists(st.sampled_from("abc"), min_size=20, max_size=20),
)
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_what_is_left_is_what_a_slow_reading_leaves(
    tmp_path, data: Any, shared: bool, images: list[str]
) -> None:
    """Ids in, ids out: no candidate of a query's own image, no beam that uses one, the rest in its
    order."""
    ids = st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True)
    asked = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True))
    beams = {str(q): data.draw(st.lists(ids, max_size=4)) for q in asked}
    left = {
        q: [beam for beam in beams[q] if all(images[i] != images[int(q)] for i in beam)]
        for q in beams
    }
    about = {q: {"image_id": images[int(q)]} for q in beams}
    content = {
        q: {"query": about[q], "pointer_candidates": [row(beam) for beam in beams[q]]}
        for q in beams
    }
    files: Any = (written(tmp_path, content), ASKED, None if shared else BANK[:10])
    if not any(left.values()):
        with pytest.raises(InputError, match="no beam is left"):
            read_beam_data(*files, candidate_images=images[:10])
        return
    table = read_beam_data(*files, candidate_images=images[:10])
    for q, (query, pool) in enumerate(zip(table.query_ids, table.pool.tolist(), strict=True)):
        result = [
            [pool[place] for place in beam if place >= 0] for beam in table.sequences[q].tolist()
        ]
        assert [beam for beam in result if beam] == left[query]
        seen = dict.fromkeys(i for beam in beams[query] for i in beam)
        assert [i for i in pool if i >= 0] == [i for i in seen if images[i] != images[int(query)]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ('{"3": {"id_list": [[1, 2', r"not JSON, or cut off \(.*write the file again"),
        ("[" * 100_000, "not JSON, or cut off"),
        ("[]", "holds no queries; expected a list of objects with query_id"),
        ("[[1, 2]]", "holds no queries; expected a list of objects with query_id"),
        (
            [PAIR | {"query_id": 3}, PAIR],
            "record 1 of the list names no query, but others do; add query_id",
        ),
        (
            [PAIR | {"query_id": 3}, PAIR | {"query_id": "3"}],
            "2 records of the list are of query 3; keep only one",
        ),
        ([PAIR | {"query_id": 2.5}], "query 2.5: its key holds '2.5', expected a list of ids"),
        (
            [PAIR | {"query_id": 3, "score_list": []}],
            "query 3: expected id_list and score_list, two lists",
        ),
        (
            [{"id_list": 7, "score_list": [1]}],
            "query 0: expected id_list and score_list, two lists",
        ),
        (
            [{"id_list": [[7, 3], [5, 3]], "score_list": [2, 1]}, {"id_list": []}],
            "record 1 of the list names no query",
        ),
        (
            [*rl(row([7])).values(), *rl(row([8])).values()],
            "query 1, row 0: id 8 is not in candidate_pool_ids",
        ),
        ({"_meta": {}}, "holds no queries"),
        ('{"3": {}, "3": {}}', "the key '3' occurs twice"),
        ({"3": PAIR, "03": PAIR}, "query 3 occurs 2 times"),
        (
            {"3": {"id_list": [[1, 2]], "score_list": [0.5, 0.25]}},
            "query 3: expected id_list and score_list, two",
        ),
        ({"3": {"id_list": [[1, 2]]}}, "query 3: expected id_list and score_list"),
        ({"4": PAIR, "3": []}, "query 3: expected id_list"),
        ({"x7": PAIR}, "query x7: its key holds 'x7', expected a list of ids, whole numbers"),
        ({"-1": PAIR}, "query -1: its key holds '-1'"),
        (
            {"3": {"id_list": [[1, 2.0]], "score_list": [1]}},
            "query 3: row 0 of id_list holds 2.0, expected",
        ),
        ({"3": {"id_list": [[1, True]], "score_list": [1]}}, "row 0 of id_list holds True"),
        ({"3": {"id_list": [[1], [-1]], "score_list": [1, 1]}}, "row 1 of id_list holds -1"),
        (
            {"3": {"id_list": [[10**19]], "score_list": [1]}},
            "row 0 of id_list holds 10000000000000000000",
        ),
        ({"3": {"id_list": [7], "score_list": [1]}}, "row 0 of id_list holds 7"),
        (
            {"3": {"id_list": [[1, 2, 1]], "score_list": [1]}},
            "query 3, row 0: id 1 occurs twice in the sequence",
        ),
        ({"3": {"id_list": [[1]], "score_list": [None]}}, "score 0 of score_list is null"),
        (
            {"3": {"id_list": [[1]], "score_list": ["0.5"]}},
            "query 3: beam_score is '0.5', expected a finite number",
        ),
        (
            {"3": {"id_list": [[1]], "score_list": [True]}},
            "query 3: beam_score is True, expected a finite number",
        ),
        (
            '{"3": {"id_list": [[1]], "score_list": [NaN]}}',
            "holds NaN, which is not JSON; write null",
        ),
        (
            '{"3": {"id_list": [[1]], "score_list": [-Infinity]}}',
            "holds -Infinity, which is not JSON",
        ),
        (
            '{"3": {"id_list": [[1]], "score_list": [1e999]}}',
            "query 3: beam_score is inf, expected a finite number",
        ),
        (
            '{"3": {"id_list": [[1]], "score_list": [1e39]}}',
            r"query 3: beam_score is 1e\+39, expected a finite number",
        ),
        (
            {"3": {"pointer_candidates": [[1, 2]]}},
            "query 3: expected an object with pointer_candidates",
        ),
        (rl(query=[1]), "query 3: expected an object with pointer_candidates"),
        (rl(query={"image_id": 1.5}), r"query 3: image_id is 1\.5"),
        (rl(candidate_pool_ids=[1, 2, 1]), "query 3: an id occurs twice in candidate_pool_ids"),
        (
            rl(candidate_pool_ids={"1": 2}),
            "query 3: candidate_pool_ids holds {'1': 2}, expected a list of ids",
        ),
        (
            rl(row([7, 8])),
            "query 3, row 0: id 8 is not in candidate_pool_ids; fix or remove the row",
        ),
        (rl(row([7]), row([7, 9, 7])), "query 3, row 1: id 7 occurs twice"),
        (
            rl(row([3], pointer_global=[5])),
            "query 3, row 0: pointer 3 is outside the pool of 3 candidates",
        ),
        (
            rl(row([1], pointer_global=[5])),
            r"query 3, row 0: pointer \[1\] and pointer_global \[5\] name different",
        ),
        (rl({"gen_method": "beam"}), "query 3, row 0: pointer holds None, expected a list of ids"),
        (
            rl({"pointer": [7]}),
            "query 3, row 0: gen_method is None; known are beam, sample, retrieval, random, policy",
        ),
        (rl(row([7], gen_method="magic")), "row 0: gen_method is 'magic'; known are"),
        (rl(row([7], gen_method="beam-2")), "row 0: gen_method is 'beam-2'; known are"),
        (rl(row([7], gen_method="policy-x")), "row 0: round holds 'x', expected"),
        (
            rl(row([7], gen_method="policy-0")),
            "row 0: gen_method 'policy-0' with round None; draws of a policy count",
        ),
        (rl(row([7], gen_method="policy-2", round=3)), "row 0: gen_method 'policy-2' with round 3"),
        (rl(row([7], round=1)), "row 0: gen_method 'beam' with round 1"),
        (
            rl(row([7], vqa_correct=0.5)),
            r"query 3: vqa_correct is 0.5, expected 0 or 1 \(soft scores are vqa_acc",
        ),
        (
            rl(row([7], vqa_acc_score="1")),
            "query 3: vqa_acc_score is '1', expected a finite number",
        ),
        (rl(row([7], eval_failed="false")), "row 0: eval_failed is 'false'"),
        (rl(row([7], vqa_eval_mode=3)), "row 0: .*vqa_eval_mode 3; expected"),
        (
            {"3": {"id_list": [[1, 99], [98, 20]], "score_list": [1, 1]}},
            "3 candidate ids are beyond the 20 rows of the candidate embeddings, such as 99 of "
            "query 3; an id is a row",
        ),
        (
            {"10": PAIR},
            "1 query ids are beyond the 10 rows of the query embeddings, such as 10 of query 10",
        ),
        (
            {"_meta": {"knobwise": {"blocks": [0, 2]}}} | rl(row([7])),
            r"blocks holds \[0, 2\], expected columns",
        ),
        (
            {"_meta": {"knobwise": {"blocks": {"a": 2}}}} | rl(row([7])),
            "blocks holds {'a': 2}, expected columns",
        ),
        (
            {"_meta": {"knobwise": {"blocks": {"a": [0, "x"]}}}} | rl(row([7])),
            "block 'a' holds 'x', expected",
        ),
    ],
)
def test_broken_files(tmp_path, content: Any, message: str) -> None:
    with pytest.raises(InputError, match=rf"beams\.json: (query 3[:,] )?{message}"):
        read(tmp_path, content)


LEGACY = {
    "3": {"id_list": [[7, 9, 3], [5, 7, 3]], "score_list": [0.5, 0.25]},
    "1": {"id_list": [[8, 2, 1], [4, 8, 1]], "score_list": [0.25, 0.125]},
}


def test_a_list_of_records_is_read_as_the_object_by_query(tmp_path) -> None:
    same = read(tmp_path, LEGACY)
    for records in (
        [*LEGACY.values()],
        [{"query_id": key, **record} for key, record in LEGACY.items()],
    ):
        table = read(tmp_path, records)
        assert (table.digest, table.notes, table.query_ids) == (same.digest, same.notes, ("3", "1"))


def test_records_that_name_no_query_are_taken_in_order_which_is_noted(tmp_path) -> None:
    """Also where each has one row, whose last id then proves nothing."""
    plain = [
        {"id_list": [[7, 9], [5, 7]], "score_list": [2, 1]},
        {"id_list": [[8, 2], [4, 8]], "score_list": [2, 1]},
    ]
    for records in (plain, [{"id_list": r["id_list"][:1], "score_list": [1]} for r in plain]):
        table = read(tmp_path, records)
        assert table.query_ids == ("0", "1")
        assert table.pool[1].tolist()[:2] == [8, 2]
        assert (
            "2 records name no query: their positions in the list, from 0, are taken as rows"
            in table.notes
        )
    # the id of a question is no row
    numbered = {
        "query": {"question_id": 9},
        "candidate_pool_ids": [7, 9],
        "pointer_candidates": [row([7]), row([9])],
    }
    assert read(tmp_path, [numbered] * 2).query_ids == ("0", "1")
    never = read(tmp_path, [*LEGACY.values()], trailing_query="never")
    assert (never.query_ids, never.pool[0].tolist()) == (("0", "1"), [7, 9, 3, 5])


def test_a_folder_stands_for_its_only_json_file(tmp_path) -> None:
    path = written(tmp_path, LEGACY)
    (tmp_path / "readme.txt").touch()
    table, same = read_beam_data(tmp_path, BANK, ASKED), read_beam_data(path, BANK, ASKED)
    assert (table.digest, table.name) == (same.digest, "beams")
    written(tmp_path, LEGACY, "more.json")
    with pytest.raises(
        InputError,
        match=r"a folder with 2 JSON files \(beams\.json, more\.json\); give the path of one",
    ):
        read_beam_data(tmp_path, BANK, ASKED)


def test_what_is_around_the_json(tmp_path) -> None:
    with pytest.raises(
        InputError, match="query embeddings are 3 wide, candidates 2; both must come from the same"
    ):
        read_beam_data(written(tmp_path, rl(row([7]))), BANK, torch.ones(10, 3))
    with pytest.raises(
        InputError, match=r"none\.json: cannot be read \(No such file or directory\)"
    ):
        read_beam_data(tmp_path / "none.json", BANK)
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"bytes\.json: not JSON"):
        read_beam_data(tmp_path / "bytes.json", BANK)
    # a byte order mark is no part of the text
    (tmp_path / "mark.json").write_text(json.dumps({"3": PAIR}), encoding="utf-8-sig")
    assert read_beam_data(tmp_path / "mark.json", BANK).num_queries == 1


@st.composite
def tables(draw: st.DrawFn) -> BeamTable:
    """Any table with at least one beam, whose queries are rows of ASKED and candidates rows of
    BANK."""
    images = draw(st.booleans())
    records = []
    for _ in range(draw(st.integers(1, 4))):
        pool = draw(st.lists(st.integers(0, 19), min_size=1, max_size=6, unique=True))
        places = st.lists(st.integers(0, len(pool) - 1), min_size=1, max_size=3, unique=True)
        outcome = st.none() | st.floats(width=32, allow_nan=False, allow_infinity=False).filter(
            lambda x: abs(x) < 3e38
        )
        outcomes = st.tuples(
            outcome, outcome, st.sampled_from([None, 0.0, 1.0]), outcome, outcome, outcome
        )
        beam = st.tuples(places, outcomes, st.integers(0, 6))
        records.append((pool, draw(st.lists(beam, min_size=not records, max_size=3))))
    ids = draw(st.permutations(range(10)))[: len(records)]
    b, n = max(len(beams) for _, beams in records), max(len(pool) for pool, _ in records)
    t, q = max(len(beam[0]) for _, beams in records for beam in beams), len(records)
    pools, sequences = torch.full((q, n), X), torch.full((q, b, t), X)
    fields = {name: torch.full((q, b), NAN) for name in FIELDS}
    found_by, rounds = torch.full((q, b), X), torch.zeros(q, b, dtype=torch.int64)
    for i, (pool, beams) in enumerate(records):
        pools[i, : len(pool)] = torch.tensor(pool)
        for j, (places, outcomes, method) in enumerate(beams):
            sequences[i, j, : len(places)] = torch.tensor(places)
            for name, value in zip(FIELDS, outcomes, strict=True):
                fields[name][i, j] = NAN if value is None else value
            found_by[i, j], rounds[i, j] = min(method, 4), max(method - 3, 0)
    return BeamTable(
        name=draw(st.text(max_size=5)) or "t",
        query_ids=tuple(map(str, ids)),
        pool=pools,
        sequences=sequences,
        fields=fields,
        found_by=found_by,
        round=rounds,
        queries=ASKED[list(ids)],
        candidates=BANK,
        query_images=tuple(draw(st.text(max_size=3)) and f"q{i}" for i in range(q))
        if images
        else (),
        candidate_images=tuple(f"c{i % 7}" for i in range(20)) if images else (),
        blocks={"image": (0, 1), "question": (1, 2)} if images else {},
        notes=tuple(draw(st.lists(st.text(max_size=5), max_size=2))),
    )


@given(table=tables())
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_what_was_written_reads_the_same(tmp_path, table: BeamTable) -> None:
    write_rl_data(table, tmp_path / "t.json", {"vqa_model": "some"})
    again = read_beam_data(tmp_path / "t.json", BANK, ASKED)
    assert again.digest == table.digest
    assert again.name == table.name
    assert again.notes[: len(table.notes)] == table.notes
    write_rl_data(again, tmp_path / "u.json", {"vqa_model": "some"})
    assert read_beam_data(tmp_path / "u.json", BANK, ASKED).digest == table.digest


def test_what_is_written_by_hand(tmp_path) -> None:
    record = rl(
        row([7, 5], vqa_correct=1),
        {"pointer": [9], "gen_method": "policy-2"},
        query={"image_id": 12},
    )
    table = read(tmp_path, record, name="okvqa")
    write_rl_data(table, tmp_path / "t.json", {"vqa_model": "some"})
    first = {
        "pointer": [0, 2],
        "pointer_global": [7, 5],
        "gen_method": "beam",
        "beam_score": 0.5,
        "vqa_correct": 1,
    }
    second = {"pointer": [1], "pointer_global": [9], "gen_method": "policy", "round": 2}
    noted = {"name": "okvqa", "notes": list(table.notes), "candidate_images": []}
    assert json.loads((tmp_path / "t.json").read_text()) == {
        "_meta": {"vqa_model": "some", "knobwise": noted},
        "3": {
            "query": {"question_id": 3, "image_id": "12"},
            "candidate_pool_ids": [7, 9, 5],
            "pointer_candidates": [first, second],
        },
    }


def test_what_cannot_be_written(tmp_path) -> None:
    table = read(tmp_path, rl(row([7])))
    with pytest.raises(
        InputError, match=r"1 query ids of beam table 'beams' are not row numbers \('a7'\)"
    ):
        write_rl_data(replace(table, query_ids=("a7",)), tmp_path / "t.json")
    with pytest.raises(InputError, match=r"t\.json: metadata that JSON cannot hold"):
        write_rl_data(table, tmp_path / "t.json", {"when": NAN})
    assert not (tmp_path / "t.json").exists()


@pytest.mark.parametrize("suffix", [".safetensors", ".npz", ".npy", ".pt"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_embeddings_of_every_kind(tmp_path, suffix: str, dtype: torch.dtype) -> None:
    path, matrix = tmp_path / f"e{suffix}", BANK.to(dtype)
    if suffix == ".safetensors":
        save_file({"anything": matrix}, path)
    elif suffix == ".npz":
        np.savez(path, embeddings=matrix.numpy(), other=np.zeros(3), names=np.array(["a"]))
    elif suffix == ".npy":
        np.save(path, matrix.numpy())
    else:
        torch.save(matrix, path)
    read = read_embeddings(path)
    assert read.dtype == torch.float32
    assert torch.equal(read, BANK)
    beams = written(tmp_path, {"3": {"id_list": [[7, 9], [3]], "score_list": [1, 1]}})
    assert torch.equal(read_beam_data(beams, path, path).pool, torch.tensor([[7, 9]]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "expected one matrix, or one named embeddings; it holds none"),
        (
            {"a": BANK, "b": BANK},
            r"expected one matrix, or one named embeddings; it holds \['a', 'b'\]",
        ),
        (torch.zeros(3), r"embeddings have shape \(3,\) of torch.float32"),
        (torch.zeros(0, 3), r"embeddings have shape \(0, 3\)"),
        (torch.ones(3, 2) > 0, r"embeddings have shape \(3, 2\) of torch.bool"),
        (torch.tensor([[NAN], [1.0], [torch.inf]]), "2 of 3 embeddings hold NaN or infinite"),
        (torch.tensor([[1e300]], dtype=torch.float64), "1 of 1 embeddings hold NaN or infinite"),
        ([1, 2], "expected one matrix, or one named embeddings; it holds none"),
        (Path("x"), "cannot be read as embeddings without executing code"),
    ],
)
def test_embeddings_that_are_none(tmp_path, content: Any, message: str) -> None:
    torch.save(content, tmp_path / "e.pt")
    with pytest.raises(InputError, match=rf"e\.pt: {message}"):
        read_embeddings(tmp_path / "e.pt")


def test_embeddings_with_code_in_them_or_of_an_unknown_kind(tmp_path, capsys) -> None:
    torch.save({"embeddings": BANK, "more": Harmful()}, tmp_path / "e.pt")
    with pytest.raises(
        InputError, match=r"e\.pt: cannot be read as embeddings without executing code"
    ):
        read_embeddings(tmp_path / "e.pt")
    assert "must not run" not in capsys.readouterr().out
    np.savez(tmp_path / "e.npz", embeddings=np.array([[Path("x")]], dtype=object))
    (tmp_path / "e.safetensors").write_text("hello")
    for name in ("e.npz", "e.safetensors"):
        with pytest.raises(
            InputError, match=f"{name}: cannot be read as embeddings without executing code"
        ):
            read_embeddings(tmp_path / name)
    for name in ("e.csv", "none.pt"):
        with pytest.raises(InputError, match="no such file, or not a"):
            read_embeddings(tmp_path / name)
