"""Recorded beams from files: both formats by hand, everything that is dropped or refused, and the
way back."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import Harmful, identical, input_error
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from knobwise.envs.demonstrations.beam_files import read_beam_data, read_embeddings, write_rl_data
from knobwise.envs.demonstrations.settings import METHODS

NAN = float("nan")
X = -1
BANK = torch.arange(40.0).reshape(20, 2)
ASKED = -torch.arange(1.0, 21.0).reshape(10, 2)
PAIR = {"id_list": [[1, 2]], "score_list": [0.5]}


def written(folder, content, name="beams.json"):
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def rl(*rows, **record):
    """RL data of one query, 3, with a pool of three."""
    return {"3": {"candidate_pool_ids": [7, 9, 5], "pointer_candidates": list(rows)} | record}


def row(pointer, **changes):
    return {"pointer": pointer, "gen_method": "beam", "beam_score": 0.5} | changes


def legacy(rows, scores, key="3"):
    return {key: {"id_list": rows, "score_list": scores}}


def read(folder, content, **options):
    """The table of a file with this content; queries are rows of ASKED, candidates of BANK."""
    return read_beam_data(written(folder, content), BANK, ASKED, **options)


def test_legacy_rows_with_and_without_the_querys_own_id(tmp_path):
    content = legacy([[7, 9, 3], ["5", 7]], [0.5, 0.25])
    content |= legacy([[8, 2, 4, 1]], [1e-7], "1") | legacy([], [], "0")
    table = read(tmp_path, content)
    assert (table.name, table.query_ids) == ("beams", ("3", "1", "0"))
    none = [X] * 3
    identical(table.pool, [[7, 9, 5], [8, 2, 4], none])
    identical(table.sequences, [[[0, 1, X], [2, 0, X]], [[0, 1, 2], none], [none] * 2])
    identical(table.found_by, [[0, 0], [0, X], [X, X]])
    identical(table.fields["beam_score"], [[0.5, 0.25], [1e-7, NAN], [NAN, NAN]])
    identical(table.queries, ASKED[[3, 1, 0]])
    assert [note.split()[0] for note in table.notes] == ["2", "3", "1", "1"]


def test_rl_data_by_hand(tmp_path):
    rows = (
        row([2, 0], pointer_global=[5, 7], logprob_score=-5.25, vqa_correct=1, vqa_gt_prob=0.0,
            vqa_rel_score=None, vqa_eval_mode="vqaEval", eval_failed=False),
        {"pointer": ["9"], "gen_method": "sample", "vqa_correct": False},
        {"pointer_pos": [9, 5], "gen_method": "retrieval"},
        {"pointer_global": [9], "gen_method": "random"},
    )  # fmt: skip
    draw = {"gen_method": "policy"}
    draws = [
        draw | {"pointer": [8, 2]},
        draw | {"pointer": [0], "pointer_global": [4], "round": 3},
        draw | {"pointer": [4, 8], "round": 2},
    ]
    content = {"_meta": {"vqa_model": "some"}} | rl(*rows, query={"image_id": 12, "question": "?"})
    content["0"] = {"query": {"image_id": "b.jpg"}, "pointer_candidates": draws}
    table = read(tmp_path, content)
    assert (table.query_ids, table.query_images) == (("3", "0"), ("12", "b.jpg"))
    identical(table.pool, [[7, 9, 5], [8, 2, 4]])
    first, second = [[2, 0], [1, X], [1, 2], [1, X]], [[0, 1], [2, X], [2, 0], [X, X]]
    identical(table.sequences, [first, second])
    identical(table.found_by, [[0, 1, 2, 3], [4, 4, 4, X]])
    identical(table.round, [[0, 0, 0, 0], [1, 3, 2, 0]])
    wanted = {
        "beam_score": [0.5, NAN, NAN, NAN],
        "logprob_score": [-5.25, NAN, NAN, NAN],
        "vqa_correct": [1, 0, NAN, NAN],
        "vqa_gt_prob": [0, NAN, NAN, NAN],
    }
    assert {*table.fields} == {*wanted}
    for name, values in wanted.items():
        identical(table.fields[name][0], values)
    # no pool, and candidates without images
    assert [note[0] for note in table.notes] == ["1", "2"]


def test_failed_and_fallback_rows_are_dropped_and_counted(tmp_path):
    """A query without a beam keeps its pool: it can be judged."""
    content = rl(
        row([7], eval_failed=True, gen_method=None, beam_score=None),
        row([9], vqa_eval_mode="error"),
        row([5], vqa_eval_mode="fallback"),
        row([], vqa_eval_mode="vqaEval"),
        row([7, 9], vqa_eval_mode="vqaEval", eval_failed=False),
    )
    content["4"] = {"pointer_candidates": [row([8], eval_failed=True)]}
    table = read(tmp_path, content)
    identical(table.sequences, [[[0, 1]], [[X, X]]])
    identical(table.pool, [[7, 9, 5], [8, X, X]])
    assert sorted(note.split()[0] for note in table.notes) == [*"1111112"]


def noting(images):
    """What our own file says of the images of the candidates."""
    return {"_meta": {"knobwise": {"candidate_images": images}}}


def test_in_one_bank_an_items_image_is_known_from_either_side(tmp_path):
    """Items 3 and 7 show one image: said of the queries in one file, of the candidates in the
    other."""
    beams = {"pointer_candidates": [row([7, 9]), row([3, 9]), row([9])]}
    shown = beams | {"query": {"image_id": "a"}}
    table = read_beam_data(written(tmp_path, {"3": shown, "7": shown, "5": beams}), BANK)
    identical(table.pool, [[9, X, X], [9, X, X], [7, 9, 3]])
    images = ["a" if i in (3, 7) else "" for i in range(20)]
    assert table.candidate_images == tuple(images)
    path = written(tmp_path, legacy([[7, 9, 3], [9, 3]], [2, 1]) | noting(images))
    table = read_beam_data(path, BANK)
    assert (table.pool.tolist(), table.query_images) == ([[9]], ("a",))


ROWS = st.lists(
    st.builds(
        row,
        st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True),
        beam_score=st.none() | st.floats(-(2.0**99), 2.0**99, width=32),
        vqa_correct=st.sampled_from([None, 0, 1]),
        gen_method=st.sampled_from(METHODS),
    ),
    max_size=4,
)


@given(
    rows=st.dictionaries(st.integers(0, 9), ROWS, min_size=1, max_size=4),
    shared=st.booleans(),
    images=st.none() | st.lists(st.sampled_from("abc"), min_size=10, max_size=10),
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_left_is_what_a_slow_reading_leaves_and_what_is_written_reads_the_same(
    tmp_path, rows, shared, images
):
    """Ids in, ids out: not the query itself, if it is an item of the bank, no candidate of its
    image, no beam that uses one, the rest in its order."""
    content, left, pools = noting(images or []), {}, {}
    for query, some in rows.items():
        content[str(query)] = {"pointer_candidates": some}
        leaks = {query} if shared else set()
        if images:
            content[str(query)]["query"] = {"image_id": images[query]}
            leaks |= {i for i in range(10) if images[i] == images[query]}
        left[query] = [one for one in some if leaks.isdisjoint(one["pointer"])]
        seen = dict.fromkeys(i for one in some for i in one["pointer"])
        pools[query] = [i for i in seen if i not in leaks]
    files = (written(tmp_path, content), ASKED, None if shared else BANK[:10])
    if not any(left.values()):
        with input_error("no beam"):
            read_beam_data(*files)
        return
    table = read_beam_data(*files)
    assert images is None or table.candidate_images == tuple(images)
    for q, query in enumerate(rows):
        assert table.pool[q][table.pool_mask[q]].tolist() == pools[query]
        assert int(table.beam_mask[q].sum()) == len(left[query])
        for b, wanted in enumerate(left[query]):
            places = table.sequences[q, b, : table.lengths[q, b]]
            assert table.pool[q, places].tolist() == wanted["pointer"]
            assert METHODS[table.found_by[q, b]] == wanted["gen_method"]
            for name, field in table.fields.items():
                assert float(field[q, b]) == wanted[name] or wanted[name] is None
    table = replace(table, name="t", blocks={"image": (0, 1)}, notes=("said",))
    write_rl_data(table, tmp_path / "t.json", {"vqa_model": "some"})
    again = read_beam_data(tmp_path / "t.json", *files[1:])
    assert (again.digest, again.name, again.notes[0]) == (table.digest, "t", "said")


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ('{"3": {"id_list": [[1, 2', "not JSON"),
        *[(content, "no queries") for content in ("[]", "[[1, 2]]", "7", {"_meta": {}})],
        ([PAIR | {"query_id": 3}, PAIR], "record 1"),
        ([{"id_list": [[7, 3], [5, 3]], "score_list": [2, 1]}, {"id_list": []}], "record 1"),
        ([PAIR | {"query_id": 3}, PAIR | {"query_id": "3"}], "2 records"),
        ({"3": PAIR, "03": PAIR}, "2 records"),
        ([PAIR | {"query_id": 2.5}], "query 2.5"),
        ({"x": PAIR}, "query x"),
        ({"3": [1]}, "query 3"),
        ({"3": {"id_list": [[1]]}}, "query 3"),
        (legacy([[1], [2]], [1]), "query 3"),
        *[(legacy([wrong], [1]), "row 0") for wrong in (7, [-1], [1.0], [True], ["x"], [10**19])],
        (legacy([[1, 2, 1]], [1]), "id 1"),
        (legacy([[1]], [None]), "score 0"),
        *[(legacy([[1]], [score]), "beam_score") for score in ("0.5", True, NAN, -1e999, 1e39)],
        ({"3": {"pointer_candidates": [[1, 2]]}}, "query 3"),
        *[(rl(query=query), "query 3") for query in ([1], {"image_id": 1.5})],
        *[(rl(candidate_pool_ids=ids), "candidate_pool_ids") for ids in ([1, 2, 1], {"1": 2})],
        (rl(row([7, 8])), "row 0: id 8"),
        (rl(row([7]), row([7, 9, 7])), "row 1: id 7"),
        *[(rl(row(place, pointer_global=[5])), "row 0: pointer") for place in ([3], [1])],
        (rl({"gen_method": "beam"}), "row 0: pointer"),
        (rl({"pointer": [7]}), "row 0: gen_method"),
        *[
            (rl(row([7], **{"gen_method": "policy", name: value})), f"row 0: .*{name}")
            for name, value in (
                ("gen_method", "magic"),
                ("gen_method", "policy-2"),
                ("round", 0),
                ("round", "x"),
                ("vqa_correct", 0.5),
                ("vqa_acc_score", "1"),
                ("eval_failed", "false"),
                ("vqa_eval_mode", 3),
            )
        ],
        (rl(row([7], round=1)), "row 0: .*round"),
        (rl(row([7], vqa_eval_mode="fallback")), "no beam .*fallback"),
        (rl(), "no beam"),
        (legacy([[1, 99], [20]], [1, 1]), "query 3: candidate id 99"),
        ({"10": PAIR}, "query 10: query id 10"),
        *[
            ({"_meta": {"knobwise": {"blocks": blocks}}} | rl(row([7])), "_meta")
            for blocks in ([0, 2], {"a": 2}, {"a": [0, "x"]}, {"a": [0]})
        ],
        (noting(["a"] * 19) | rl(row([7])), "19 candidates"),
    ],
)
def test_broken_files(tmp_path, content, place):
    with input_error(rf"beams\.json: .*{place}"):
        read(tmp_path, content)


LEGACY = legacy([[7, 9, 3], [5, 7, 3]], [0.5, 0.25]) | legacy([[8, 2, 1], [4, 8, 1]], [2, 1], "1")


def test_a_list_of_records_is_read_as_the_object_by_query(tmp_path):
    same = read(tmp_path, LEGACY)
    named = [{"query_id": key, **record} for key, record in LEGACY.items()]
    for records in ([*LEGACY.values()], named):
        table = read(tmp_path, records)
        assert (table.digest, table.notes) == (same.digest, same.notes)


@pytest.mark.parametrize(
    "records",
    [
        legacy([[7, 9], [5, 7]], [2, 1]) | legacy([[8, 2], [4, 8]], [2, 1], "1"),
        # a single row, whose last id proves nothing
        legacy([[7, 9]], [1]) | legacy([[8, 2]], [1], "1"),
        # the id of a question is no row
        dict.fromkeys("31", *rl(row([7]), query={"question_id": 9}).values()),
    ],
)
def test_records_that_name_no_query_are_taken_in_order_which_is_noted(tmp_path, records):
    table = read(tmp_path, [*records.values()])
    assert table.query_ids == ("0", "1")
    assert any("records name no query" in note for note in table.notes)


def test_paths_and_widths(tmp_path):
    """A folder stands for its only JSON file."""
    same = read(tmp_path, LEGACY)
    (tmp_path / "readme.txt").touch()
    table = read_beam_data(tmp_path, BANK, ASKED)
    assert (table.digest, table.name) == (same.digest, "beams")
    with input_error("candidates has shape"):
        read_beam_data(tmp_path, BANK, torch.ones(10, 3))
    with input_error(r"none\.json"):
        read_beam_data(tmp_path / "none.json", BANK)
    (tmp_path / "more.json").touch()
    with input_error("2 JSON files"):
        read_beam_data(tmp_path, BANK, ASKED)


def test_what_is_written_by_hand(tmp_path):
    draw = {"pointer": [9], "gen_method": "policy", "round": 2}
    record = rl(row([7, 5], vqa_correct=1), draw, query={"image_id": 12})
    table = read(tmp_path, record, name="okvqa")
    write_rl_data(table, tmp_path / "t.json", {"vqa_model": "some"})
    rows = [
        row([0, 2], pointer_global=[7, 5], vqa_correct=1),
        draw | {"pointer": [1], "pointer_global": [9]},
    ]
    noted = {"name": "okvqa", "notes": [*table.notes], "candidate_images": [], "blocks": {}}
    assert json.loads((tmp_path / "t.json").read_text()) == {
        "_meta": {"vqa_model": "some", "knobwise": noted}
    } | rl(*rows, query={"question_id": 3, "image_id": "12"})
    with input_error("'a7'"):
        write_rl_data(replace(table, query_ids=("a7",)), tmp_path / "u.json")
    with input_error("metadata"):
        write_rl_data(table, tmp_path / "u.json", {"when": NAN})
    assert not (tmp_path / "u.json").exists()


SAVED = {
    "e.safetensors": lambda path: save_file({"anything": BANK.half()}, path),
    "e.npz": lambda path: np.savez(path, embeddings=BANK, other=NAN, names=np.array(["a"])),
    "e.npy": lambda path: np.save(path, BANK.double()),
    "e.pt": lambda path: torch.save(BANK, path),
}


@pytest.mark.parametrize("name", SAVED)
def test_embeddings_of_every_kind(tmp_path, name):
    path = tmp_path / name
    SAVED[name](path)
    result = read_embeddings(path)
    assert result.dtype == torch.float32
    identical(result, BANK)
    beams = written(tmp_path, legacy([[7, 9], [3]], [1, 1]))
    identical(read_beam_data(beams, path, path).pool, [[7, 9]])


def pt(content):
    return "e.pt", lambda path: torch.save(content, path)


def text(name):
    return name, lambda path: path.write_text("hello")


OBJECTS = np.array([[Path("x")]], dtype=object)


@pytest.mark.parametrize(
    "file",
    [
        pt({}),
        pt({"a": BANK, "b": BANK}),
        pt(torch.zeros(3)),
        pt(torch.zeros(0, 3)),
        pt(torch.tensor([[NAN], [1.0], [torch.inf]])),
        pt(torch.tensor([[1e300]], dtype=torch.float64)),
        pt([1, 2]),
        pt(Path("x")),
        pt({"embeddings": BANK, "more": Harmful()}),
        ("e.npz", lambda path: np.savez(path, embeddings=OBJECTS)),
        text("e.safetensors"),
        text("e.csv"),
        ("none.pt", lambda path: None),
    ],
)
def test_embeddings_that_are_none(tmp_path, capsys, file):
    name, write = file
    write(tmp_path / name)
    with input_error(f"{name}: "):
        read_embeddings(tmp_path / name)
    assert not capsys.readouterr().out
