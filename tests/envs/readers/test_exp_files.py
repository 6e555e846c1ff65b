"""Reading and writing exp5/exp6 and core_exp folders: round trips, both spellings, the traps known
from the field."""

import gc
import json
import re
import shutil
from contextlib import contextmanager

import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from knobwise.common.errors import InputError
from knobwise.envs.readers.exp_files import read_core_exp, read_exp5_exp6, write_exp5_exp6
from knobwise.envs.readers.long_table import long_frame, table_from_frame, write_features

SMALL, LARGE = (2, 4, 12), (10, 12, 16)
SHARES = {"total": 1, "prefill": 0.25, "decode": 0.5}


def put(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def named(setting):
    return dict(zip(("max_crops", "top_k", "num_active_blocks"), setting, strict=True))


def stem(setting, rank=None):
    crops, k, blocks = setting
    return (
        f"crops{crops}_topk{k}_blocks{blocks}" + ("" if rank is None else f"_rank{rank}") + ".json"
    )


def put_exp5(root, setting, scores, rank=None, dataset="text-vqa", **changes):
    """scores: id → score, or rows."""
    rows = (
        [{"sample_id": i, "score": s} for i, s in scores.items()]
        if isinstance(scores, dict)
        else scores
    )
    summary = {
        **named(setting),
        "num_total_blocks": 16,
        "active_block_indices": [0, 1],
        "num_samples": len(rows),
    }
    content = {
        "summary": [summary],
        "all_samples": rows,
        "config": {"split": "validation"},
    } | changes
    folder = root / "exp5" / (f"exp5_accuracy_{dataset}" if dataset else "")
    return put(folder / f"exp5_accuracy_results_{stem(setting, rank)}", content)


def put_exp6(root, setting, times, rank=None, dataset="text-vqa", **changes):
    """times: id → total ms, or rows, in the profiler's spelling."""
    rows = times
    if isinstance(times, dict):
        rows = [
            {"sample_id": i, **named(setting), "accuracy": 0.25}
            | {f"T_{k}_ms": t * v for k, v in SHARES.items()}
            for i, t in times.items()
        ]
    summary = {
        **named(setting),
        "num_samples": len(rows),
        "latency_total_ms": {"mean": 50.0, "P50": 1.0},
    }
    content = {
        "summary": [summary],
        "per_sample_latencies": rows,
        "config": {"batch_size": 1},
    } | changes
    folder = root / "exp6" / (f"exp6_latency_{dataset}" if dataset else "")
    return put(folder / f"exp6_latency_{stem(setting, rank)}", content)


def read(root, dataset="text_vqa", **choices):
    return read_exp5_exp6(root / "exp5", root / "exp6", dataset, **choices)


@pytest.fixture
def pair(tmp_path):
    """Two samples under two configurations, complete."""
    for setting, score, time in ((SMALL, 0.5, 100.0), (LARGE, 1.0, 300.0)):
        put_exp5(tmp_path, setting, {0: score, 1: 0.0})
        put_exp6(tmp_path, setting, {0: time, 1: time + 8})
    return tmp_path


def test_joins_scores_and_times(pair):
    table = read(pair)
    assert (table.name, table.sample_ids) == ("text_vqa", ("0", "1"))
    assert [table.configuration(c) for c in range(2)] == [named(SMALL), named(LARGE)]
    assert table.accuracy.tolist() == [[0.5, 1.0], [0.0, 0.0]]
    assert table.latency_ms.tolist() == [[100.0, 300.0], [108.0, 308.0]]
    assert table.notes == table.datasets == table.parts == ()
    table.features["language_features"] = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    write_features(table, pair / "f.npz")
    assert read(pair, features=pair / "f.npz").digest == table.digest


def test_latency_is_a_choice(pair):
    for stage, share in SHARES.items():
        assert read(pair, latency=stage).latency_ms[0, 0] == 100 * share
    with pytest.raises(InputError, match="total, prefill, decode"):
        read(pair, latency="vision")
    with pytest.raises(InputError, match="total, prefill, vision_prefill"):
        read_core_exp(pair, "text_vqa", latency="decode")


def test_older_spelling_reads_the_same(pair, tmp_path_factory):
    old = tmp_path_factory.mktemp("old")
    for setting, score, time in ((SMALL, 0.5, 100.0), (LARGE, 1.0, 300.0)):
        put_exp5(old, setting, {0: score, 1: 0.0})
        times = [
            {f"latency_{stage}": t * share for stage, share in SHARES.items()}
            for t in (time, time + 8)
        ]
        rows = [{"sample_id": i, "score": 0.25, **values} for i, values in enumerate(times)]
        content = {
            "summary": [{**named(setting), "latency_mean": time, "latency_p50": time}],
            "all_samples": rows,
        }
        put(old / "exp6" / "exp6_latency_text-vqa" / f"exp6_latency_{stem(setting)}", content)
    for stage in SHARES:
        assert read(old, latency=stage).digest == read(pair, latency=stage).digest


def test_exp5_is_the_truth_and_accuracy_a_choice(pair):
    assert read(pair).accuracy[0, 0] == 0.5
    for setting in (SMALL, LARGE):
        put_exp5(pair, setting, [{"sample_id": 0, "score": 1.0, "soft_score": 0.75}])
    assert read(pair, accuracy="soft_score").accuracy.tolist() == [[0.75, 0.75]]
    with pytest.raises(InputError, match=r"blocks\d\d\.json.*no fluency.*soft_score"):
        read(pair, accuracy="fluency")


def test_files_may_lie_in_the_directory_itself(tmp_path):
    put_exp5(tmp_path, SMALL, {0: 1.0}, dataset="", config={"dataset_name": "text_vqa"})
    put_exp5(tmp_path, LARGE, {0: 0.0}, dataset="", config={"dataset_name": "doc_qa"})
    put_exp6(tmp_path, SMALL, {0: 10.0}, dataset="")
    table = read(tmp_path)
    assert table.num_configurations == 1
    assert "1 files that name the data set doc_qa: not read" in table.notes[0]
    with pytest.raises(InputError, match=r"no files of 'ok_vqa'.*doc_qa, text_vqa"):
        read_exp5_exp6(tmp_path / "exp5", tmp_path / "exp6", "ok_vqa")


def test_several_data_sets_keep_their_ids_apart(pair):
    put_exp5(pair, SMALL, {0: 0.25, 7: 0.75}, dataset="doc-qa")
    put_exp6(pair, SMALL, {0: 30.0, 7: 40.0}, dataset="doc-qa")
    table = read(pair, ["text_vqa", "doc_qa"])
    assert table.name == "text_vqa+doc_qa"
    assert list(zip(table.datasets, table.sample_ids, strict=True)) == [
        ("doc_qa", "0"), ("doc_qa", "7"), ("text_vqa", "0"), ("text_vqa", "1")
    ]  # fmt: skip
    assert table.accuracy[:, 0].tolist() == [0.25, 0.75, 0.5, 0.0]


def test_summaries_of_the_whole_run_are_no_configuration(pair):
    folder = pair / "exp5" / "exp5_accuracy_text-vqa"
    put(folder / "exp5_accuracy_results.json", {"summary": [1, 2], "all_samples": []})
    put(pair / "exp6" / "exp6_latency_text-vqa" / "exp6_latency_results.json", "{")
    assert read(pair).notes == ()
    put(folder / "crops2.json", {})
    assert "1 JSON files not read" in read(pair).notes[0]


@pytest.mark.parametrize("name", ["text_vqa", "text-vqa"])
def test_a_folder_may_have_the_name_of_the_data_set(pair, name):
    """Also one for both kinds of files."""
    same = read(pair)
    for kind, long in (("exp5", "exp5_accuracy"), ("exp6", "exp6_latency")):
        (pair / kind / f"{long}_text-vqa").rename(pair / kind / name)
    assert (read(pair).digest, read(pair).notes) == (same.digest, ())
    for path in (pair / "exp6" / name).iterdir():
        path.rename(pair / "exp5" / name / path.name)
    both = read_exp5_exp6(pair / "exp5", pair / "exp5", "text_vqa")
    assert (both.digest, both.notes) == (same.digest, ())


def put_whole_run(root, knobs_in_rows=(False, True)):
    """The files that the profilers write at the end of a run: accuracies without knobs, latencies
    with them."""
    folders = (root / "exp5" / "exp5_accuracy_text-vqa", root / "exp6" / "exp6_latency_text-vqa")
    paths = []
    for folder, named_rows in zip(folders, knobs_in_rows, strict=True):
        parts = [
            json.loads(path.read_text()) for path in sorted(folder.glob("*_crops*"), reverse=True)
        ]
        rows = []
        for part in parts:
            (summary,) = part["summary"]
            knobs = {knob: summary[knob] for knob in named(SMALL)}
            for row in part.get("all_samples", part.get("per_sample_latencies")):
                rows.append(
                    {k: v for k, v in row.items() if k not in knobs} | (knobs if named_rows else {})
                )
        content = {"summary": [part["summary"][0] for part in parts], "all_samples": rows}
        content["config"] = {"dataset_name": "text_vqa"}
        shutil.rmtree(folder)
        paths.append(put(folder / f"{folder.name.removesuffix('_text-vqa')}_results.json", content))
    return paths


@pytest.mark.parametrize("knobs_in_rows", [(False, True), (True, True), (False, False)])
def test_one_file_of_a_whole_run_is_read_as_its_configurations_are(pair, knobs_in_rows):
    for setting, scores in ((SMALL, {0: 0.5, 1: 0.0}), (LARGE, {0: 1.0, 1: 0.0})):
        summary = {**named(setting), "num_samples": 2, "accuracy": sum(scores.values()) / 2}
        put_exp5(pair, setting, scores, summary=[summary])
    same = read(pair)
    paths = put_whole_run(pair, knobs_in_rows)
    notes = tuple(
        f"{path}: its rows name no knobs; these were taken in the order of its 2 summaries"
        for path, known in sorted(zip(paths, knobs_in_rows, strict=True), reverse=True)
        if not known
    )
    for table in (read(pair), read_exp5_exp6(*paths, "text_vqa")):
        assert (table.digest, table.notes) == (same.digest, notes)
    with pytest.raises(
        InputError, match=r"results\.json: no files of 'ok_vqa'; all 1 name the data set text_vqa"
    ):
        read_exp5_exp6(*paths, "ok_vqa")
    # files of single configurations come first
    put_exp6(pair, LARGE, {0: 7.0})
    assert read(pair).latency_ms.tolist() == [[7.0]]


def test_mean_latencies_of_a_whole_run_can_be_given_to_all_samples(pair):
    means = [
        {**named(setting), "latency_total_ms": {"mean": ms}}
        for setting, ms in ((SMALL, 40.0), (LARGE, 80.0))
    ]
    path = put(pair / "exp6.json", {"summary": means, "all_samples": []})
    table = read_exp5_exp6(pair / "exp5", path, "text_vqa", broadcast_latency=True)
    assert table.latency_ms.tolist() == [[40.0, 80.0]] * 2


ROW = {"sample_id": 0, "score": 1}
WHOLE = {"summary": [{**named(SMALL), "num_samples": 1}, {**named(LARGE), "num_samples": 1}]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {**WHOLE, "all_samples": [ROW]},
            "its 1 rows do not name max_crops, top_k, num_active_blocks, and num_samples or",
        ),
        ({"summary": [named(SMALL)], "all_samples": [ROW]}, "its 1 rows do not name max_crops"),
        (
            {
                "summary": [{**named(SMALL), "num_samples": 1, "accuracy": 0.9}],
                "all_samples": [ROW],
            },
            "num_samples or the accuracies of its 1 summaries do not fit their order. Give a "
            "folder with a file for",
        ),
        (
            {**WHOLE, "all_samples": [ROW | named(SMALL), ROW]},
            "a row or summary has (None, None, None) for max_crops, top_k, num_active_blocks; "
            "all must be whole",
        ),
        (
            {"summary": [{**named(SMALL), "top_k": "many"}]},
            "a row or summary has (2, 'many', 12) for max_crops",
        ),
    ],
)
def test_bad_files_of_a_whole_run_are_named(pair, content, message):
    path, _ = put_whole_run(pair)
    put(path, content)
    with pytest.raises(InputError, match=rf"exp5_accuracy_results\.json: .*{re.escape(message)}"):
        read(pair)


def test_a_merge_replaces_its_rank_files(pair):
    digest = read(pair).digest
    for rank in (0, 1):
        put_exp5(pair, SMALL, {rank: 0.125}, rank=rank)
        put_exp6(pair, SMALL, {rank: 1.0}, rank=rank)
    table = read(pair)
    assert table.digest == digest
    assert [note.split(": ")[1] for note in table.notes] == [
        "2 rank files not read, since files merged from them are there"
    ] * 2


def test_rank_files_without_a_merge_are_all_read(tmp_path):
    for rank, scores in enumerate(({0: 1.0, 2: 0.0}, {1: 0.5})):
        put_exp5(tmp_path, SMALL, scores, rank=rank)
        put_exp6(tmp_path, SMALL, {i: 10.0 + i for i in scores}, rank=rank)
    table = read(tmp_path)
    assert table.sample_ids == ("0", "1", "2")
    assert table.accuracy[:, 0].tolist() == [1.0, 0.5, 0.0]
    assert table.latency_ms[:, 0].tolist() == [10.0, 11.0, 12.0]
    # a merge may lack what a distributed sampler repeated
    put_exp5(tmp_path, SMALL, {1: 0.5, 0: 1.0}, rank=1)
    put_exp5(tmp_path, SMALL, dict.fromkeys(range(3), 1.0))
    assert read(tmp_path).num_samples == 3


@pytest.mark.parametrize("side", ["exp5", "exp6"])
def test_ids_that_restart_on_every_rank_are_refused(tmp_path, side):
    for rank in (0, 1):
        for name, write in (("exp5", put_exp5), ("exp6", put_exp6)):
            ids = range(3) if side == name else (2 * rank, 2 * rank + 1)
            write(tmp_path, SMALL, dict.fromkeys(ids, 1.0), rank=rank)
    message = (
        rf"{side}.*rank0\.json.*rank1\.json: in data set text_vqa, 3 "
        r".*pairs in 1 config.*2 × sample_id 0"
    )
    with pytest.raises(InputError, match=message):
        read(tmp_path)


@pytest.mark.parametrize("inside", [False, True])
def test_question_id_is_the_key_where_every_row_has_it(tmp_path, inside):
    """With it, ids that restart do no harm."""

    def row(number, **values):
        extra = {"question_id": 900 + number}
        return {"sample_id": number % 2, **values, **({"metadata": extra} if inside else extra)}

    put_exp5(tmp_path, SMALL, [row(i, score=i / 4) for i in range(4)])
    put_exp6(tmp_path, SMALL, [row(i, T_total_ms=float(i)) for i in reversed(range(4))])
    table = read(tmp_path)
    assert table.sample_ids == ("900", "901", "902", "903")
    assert table.accuracy[:, 0].tolist() == [0, 0.25, 0.5, 0.75]
    assert table.latency_ms[:, 0].tolist() == [0, 1, 2, 3]
    put_exp5(tmp_path, SMALL, [{"sample_id": 0, "question_id": 900, "score": 1.0}])
    put_exp6(tmp_path, SMALL, {0: 10.0})  # on one side only it is not the key
    table = read(tmp_path)
    assert table.sample_ids == ("0",)
    assert "not every row has a question_id" in table.notes[0]


def test_what_does_not_join_is_counted(pair):
    put_exp5(pair, (4, 4, 12), {0: 1.0, 1: 1.0})
    put_exp6(pair, (6, 4, 12), {0: 1.0, 1: 1.0})
    put_exp5(pair, SMALL, {0: 0.5, 1: 0.0, 5: 1.0, 6: 1.0})
    put_exp6(pair, LARGE, {0: 300.0, 1: 308.0, 8: 1.0})
    table = read(pair)
    assert (table.num_samples, table.num_configurations) == (2, 2)
    assert table.notes == (
        "text_vqa: 1 configurations are only in exp5 (4/4/12)",
        "text_vqa: 2 cells of 2 samples have no partner in exp6, so they count as not profiled",
        "text_vqa: 1 configurations are only in exp6 (6/4/12)",
        "text_vqa: 1 cells of 1 samples have no partner in exp5, so they count as not profiled",
    )


def test_mean_latency_of_a_configuration_is_given_to_its_samples_when_asked_for(pair):
    for rank, (mean, count) in enumerate(((40.0, 3), (80.0, 1))):
        summary = {**named(LARGE), "latency_total_ms": {"mean": mean}, "num_samples": count}
        path = put_exp6(pair, LARGE, [], rank=rank, summary=[summary])
        path.with_name(f"exp6_latency_{stem(LARGE)}").unlink(missing_ok=True)
    table = read(pair)
    assert table.num_configurations == 1
    assert "1 configurations have only a mean latency: they are left out" in table.notes[0]
    table = read(pair, broadcast_latency=True)
    assert table.latency_ms.tolist() == [[100.0, 50.0], [108.0, 50.0]]
    assert "it is given to all their samples" in table.notes[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda r: put_exp5(r, SMALL, {0: 1.5}),
            r"blocks12\.json: accuracy must be between 0 and 1, is 1\.5",
        ),
        (
            lambda r: put_exp5(r, SMALL, {0: float("nan")}),
            r"blocks12\.json: accuracy must .* is nan",
        ),
        (
            lambda r: put_exp6(r, SMALL, {0: float("nan")}),
            r"blocks12\.json: latency_ms must .* is nan",
        ),
        (lambda r: put_exp6(r, SMALL, {0: -1.0}), r"blocks12\.json: latency_ms must .* is -1"),
        (
            lambda r: put_exp6(r, SMALL, {0: float("inf")}),
            r"blocks12\.json: latency_ms must .* is inf",
        ),
        (lambda r: put_exp5(r, SMALL, {0: "good"}), r"blocks12\.json: score must be a number"),
        (
            lambda r: put_exp5(r, SMALL, [{"sample_id": [0], "score": 1}]),
            r"blocks12\.json: sample_id must be",
        ),
        (lambda r: put_exp5(r, SMALL, [{"score": 1}]), r"blocks12\.json: 1 rows without sample_id"),
        (
            lambda r: put_exp6(r, SMALL, [{"sample_id": 0}]),
            r"no T_total_ms or latency_total; they have sample_id",
        ),
        (
            lambda r: put_exp5(r, SMALL, {0: 1}, all_samples={"0": 1}),
            r"blocks12\.json: all_samples must hold objects",
        ),
        (
            lambda r: [
                put_exp5(r, SMALL, dict.fromkeys(range(10), 1.0), rank=rank)
                for rank in (0, 1, None)
            ],
            r"blocks12\.json: holds 10 of the 20 rows of its 2 rank files",
        ),
        (
            lambda r: put_exp5(r, SMALL, [{"sample_id": i % 2, "score": 1.0} for i in range(5)]),
            r"exp5.*blocks12\.json: .* 2 .*pairs in 1 configurations .* 3 × sample_id 0",
        ),
        (
            lambda r: put_exp5(r, SMALL, {0: 1.0}, summary=[named((2, 8, 12))]),
            r"crops2_topk4_blocks12\.json: summary says top_k=8, the file name says 4",
        ),
        (
            lambda r: put_exp6(r, SMALL, [{"sample_id": 0, "T_total_ms": 1.0, "top_k": 8}]),
            r"crops2_topk4_blocks12\.json: .* says top_k=8, the file name says 4",
        ),
        (lambda r: shutil.rmtree(r / "exp6"), "exp6: no such directory"),
        (
            lambda r: [put_exp6(r, s, {"q7": 1.0}) for s in (SMALL, LARGE)],
            r"text_vqa: .*no .*pair in common.*\['0', '1'\].*\['q7'\]",
        ),
        (lambda r: put(put_exp5(r, SMALL, {}), ""), r"blocks12\.json: not readable JSON"),
        (
            lambda r: put(put_exp5(r, SMALL, {}), '{"all_samples": ['),
            r"blocks12\.json: not readable JSON",
        ),
        (
            lambda r: put(put_exp5(r, SMALL, {}), "[]"),
            r"blocks12\.json: must hold a JSON object with all_samples",
        ),
        (
            lambda r: put(put_exp5(r, SMALL, {}), '{"rows": []}'),
            r"blocks12\.json: has none of all_samples; .* rows",
        ),
        (
            lambda r: put(put_exp5(r, SMALL, {}), '{"all_samples": [], "config": 3}'),
            r"config must hold objects",
        ),
    ],
)
def test_bad_files_are_named(pair, change, message):
    change(pair)
    with pytest.raises(InputError, match=message):
        read(pair)


def test_nothing_that_matches(pair):
    put(pair / "exp6" / "notes.txt", "")
    message = r"no exp6_latency files of 'ok_vqa'.*exp6_latency_ok-vqa.*holds: exp6_lat.*notes\.txt"
    with pytest.raises(InputError, match=message):
        read(pair, "ok_vqa")


SETTINGS = st.tuples(
    st.sampled_from([2, 6, 10]), st.sampled_from([4, 8]), st.sampled_from([12, 16])
)


@st.composite
def cells(draw):
    """A long frame with holes: any subset of the cells of a few samples and configurations."""
    ids = draw(st.one_of(
        st.lists(st.integers(0, 10**9), min_size=1, max_size=4, unique=True),
        st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=4, unique=True),
    ))  # fmt: skip
    pairs = st.tuples(st.sampled_from(ids), SETTINGS)
    keys = draw(st.lists(pairs, min_size=1, max_size=10, unique=True))
    share = st.floats(0, 1, width=32)
    time = st.floats(0, 1e6, width=32)
    rows = [
        {"sample_id": i, **named(s), "accuracy": draw(share), "soft_score": draw(share), "latency_ms": draw(time),
         "prefill_ms": draw(time), "decode_ms": draw(time)}
        for i, s in keys
    ]  # fmt: skip
    return pl.DataFrame(rows)


@given(frame=cells())
@settings(max_examples=15, deadline=None)
def test_reading_gives_back_what_was_written(tmp_path_factory, frame):
    root = tmp_path_factory.mktemp("exp")
    knobs = ["max_crops", "top_k", "num_active_blocks"]
    write_exp5_exp6(frame, root / "exp5", root / "exp6", "text_vqa", {"machine": "a lathe"})
    for latency, accuracy in (
        ("latency", "accuracy"),
        ("prefill", "soft_score"),
        ("decode", "accuracy"),
    ):
        columns = {"accuracy": accuracy, "latency": f"{latency}_ms"}
        wanted = table_from_frame(frame, name="text_vqa", knobs=knobs, **columns)
        names = {
            "latency": latency.replace("latency", "total"),
            "accuracy": accuracy.replace("accuracy", "score"),
        }
        assert read(root, **names).digest == wanted.digest
    again = root / "again"
    write_exp5_exp6(long_frame(wanted), again / "exp5", again / "exp6", "text_vqa")
    assert read(again).digest == wanted.digest


def test_written_files_follow_the_profilers_spelling(tmp_path):
    names = (
        "sample_id",
        "question_id",
        "question_type",
        "accuracy",
        "latency_ms",
        "prefill_ms",
        "num_vision_tokens",
    )
    values = [
        (0, 5, "number", 1.0, 100.0, 25.0, 400),
        (1, 6, "other", 0.0, 300.0, float("nan"), 300),
    ]
    values.append((2, 7, "other", None, 5.0, 1.0, 1))
    frame = pl.DataFrame([named(SMALL) | dict(zip(names, row, strict=True)) for row in values])
    write_exp5_exp6(
        frame, tmp_path / "exp5", tmp_path / "exp6", "text_vqa", {"machine": "x", "batch_size": 2}
    )
    folders = tmp_path / "exp5/exp5_accuracy_text-vqa", tmp_path / "exp6/exp6_latency_text-vqa"
    exp5 = json.loads((folders[0] / "exp5_accuracy_results_crops2_topk4_blocks12.json").read_text())
    exp6 = json.loads((folders[1] / "exp6_latency_crops2_topk4_blocks12.json").read_text())
    assert exp5 == {
        "summary": [{**named(SMALL), "accuracy": 0.5, "num_samples": 2}],
        "all_samples": [
            {"sample_id": 0, "question_id": 5, "question_type": "number", "score": 1.0},
            {"sample_id": 1, "question_id": 6, "question_type": "other", "score": 0.0},
        ],
        "config": {"machine": "x", "batch_size": 2, "dataset_name": "text_vqa"},
    }
    assert exp6["config"] == exp5["config"]
    assert exp6["per_sample_latencies"][1] == {
        "sample_id": 1, "question_id": 6, **named(SMALL), "T_total_ms": 300.0, "T_prefill_ms": None,
        "num_vision_tokens": 300, "accuracy": 0.0,
    }  # fmt: skip
    total = exp6["summary"][0]["latency_total_ms"]
    assert total == {
        "mean": 200.0,
        "std": 100.0,
        "P50": 200.0,
        "P95": pytest.approx(290),
        "P99": pytest.approx(298),
    }
    assert read(tmp_path).sample_ids == ("5", "6")
    assert read(tmp_path).question_types == ("number", "other")
    prefill = read(tmp_path, latency="prefill")
    assert prefill.sample_ids == ("5",)
    assert "1 rows without accuracy or latency" in prefill.notes[0]


@pytest.mark.parametrize(
    ("change", "metadata", "message"),
    [
        ({"latency_ms": -1.0}, {}, "latency_ms negative"),
        ({"max_crops": 2.5}, {}, "max_crops must be whole numbers"),
        ({"top_k": "many"}, {}, "top_k must be whole numbers"),
        ({"dataset": "doc_qa"}, {}, "holds 2 data sets"),
        ({}, {"when": object()}, "metadata that JSON cannot hold"),
        ({}, {"rate": float("nan")}, "metadata that JSON cannot hold"),
    ],
)
def test_what_cannot_be_written_leaves_nothing(tmp_path, change, metadata, message):
    row = {
        "sample_id": 0,
        "dataset": "text_vqa",
        **named(SMALL),
        "accuracy": 1.0,
        "latency_ms": 1.0,
    }
    frame = pl.DataFrame([row, {**row, **named(LARGE), **change}], strict=False)
    with pytest.raises(InputError, match=message):
        write_exp5_exp6(frame, tmp_path / "exp5", tmp_path / "exp6", "text_vqa", metadata)
    assert list(tmp_path.iterdir()) == []


def put_core(root, level, scores, rank="", folder="text-vqa", dataset="text_vqa", **changes):
    crops = {"low": 3, "medium": 8, "high": 15}[level]
    rows = [
        {"sample_id": i, "accuracy": s, "T_vision_total": 20.0, "T_LLM_prefill": 70.0 + i, "T_LLM_decode": 40.0,
         "T_total": 130.0 + i, "metadata": {"image_id": 5, "question_type": "number"}}
        for i, s in scores.items()
    ]  # fmt: skip
    content = {
        "tier": level, "max_crops": crops, "top_k": 8, "num_active_blocks": 16, "num_samples": len(rows),
        "tier_range": {"min_crops": 1, "max_crops": crops}, "active_block_indices": [0], "per_sample_results": rows,
    } | changes  # fmt: skip
    return put(
        root / folder / f"{dataset}_imgsizetier-{level}_crops{crops}_topk8_blocks16{rank}.json",
        content,
    )


def test_accuracies_in_per_cent_are_divided_by_100_on_request(tmp_path):
    put_exp5(tmp_path, SMALL, {0: 100.0, 1: 30.0})
    put_exp6(tmp_path, SMALL, {0: 9.0, 1: 8.0})
    put_core(tmp_path, "low", {0: 100.0, 1: 30.0})
    for read_one in (read, lambda root, **choices: read_core_exp(root, "text_vqa", **choices)):
        with pytest.raises(
            InputError,
            match=r"between 0 and 1, is 100\.0 \(accuracies in per cent need accuracy_unit",
        ):
            read_one(tmp_path)
        table = read_one(tmp_path, accuracy_unit="percent")
        assert table.accuracy.flatten().tolist() == pytest.approx([1, 0.3])
        assert table.notes == ("accuracy is in per cent: it is divided by 100",)
    put_core(tmp_path, "low", {0: 1.0, 1: 0.3})
    with pytest.raises(InputError, match="no accuracy is above 1"):
        read_core_exp(tmp_path, "text_vqa", accuracy_unit="percent")


@pytest.mark.parametrize("spelling", [{}, {"folder": ""}, {"dataset": "text-vqa"}])
def test_core_exp_tiers_go_from_low_to_high(tmp_path, spelling):
    for tier, score in (("high", 1.0), ("low", 0.0), ("medium", 0.5)):
        put_core(tmp_path, tier, {0: score, 1: score}, **spelling)
    table = read_core_exp(tmp_path, "text_vqa")
    assert [(k.name, k.values) for k in table.knobs] == [
        ("tier", ("low", "medium", "high")), ("top_k", (8,)), ("num_active_blocks", (16,))
    ]  # fmt: skip
    assert table.accuracy.tolist() == [[0, 0.5, 1]] * 2
    assert table.latency_ms.tolist() == [[130.0] * 3, [131.0] * 3]
    assert (table.image_ids, table.question_types, table.notes) == (
        ("5", "5"),
        ("number", "number"),
        (),
    )
    for stage, time in (("total", 130.0), ("prefill", 70.0), ("vision_prefill", 90.0)):
        assert (
            read_core_exp(tmp_path, "text_vqa", latency=stage).latency_ms[0].tolist() == [time] * 3
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda r: put_core(r, "low", {0: 1.0}, tier="high"),
            r"the file says tier=high, the file name says low",
        ),
        (
            lambda r: put_core(r, "low", {0: 1.0}, max_crops=2),
            r"the file says max_crops=2, the file name says 3",
        ),
        (
            lambda r: put_core(r, "low", {0: 3.0}),
            r"blocks16\.json: accuracy must be between 0 and 1, is 3",
        ),
        (
            lambda r: [put_core(r, "low", {0: 1.0}, rank=f"_rank{i}") for i in (0, 1)],
            r"rank0.*rank1.* 2 × sample_id 0",
        ),
        (
            lambda r: put(r / "text-vqa" / "x.json", {}),
            r"no core_exp files of 'text_vqa'.*text-vqa",
        ),
    ],
)
def test_bad_core_exp_files_are_named(tmp_path, change, message):
    change(tmp_path)
    with pytest.raises(InputError, match=re.compile(message, re.DOTALL)):
        read_core_exp(tmp_path, "text_vqa")


def test_ids_are_exact_or_refused(pair):
    for number in (2**64 - 1, 2**80 + 1):
        put_exp5(pair, SMALL, [{"sample_id": number, "score": 1.0}])
        put_exp6(pair, SMALL, {number: 1.0})
        assert str(number) in read(pair).sample_ids
    put_exp5(pair, SMALL, [{"sample_id": 2.0**64, "score": 1.0}])
    with pytest.raises(InputError, match=r"blocks12\.json: sample_id .* too large to be exact"):
        read(pair)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"all_samples": [{"sample_id": 1, "score": 0, "score": 1}]}',
            "key 'score' occurs twice in one object",
        ),
        ('{"all_samples": ' + "[" * 100_000, "nested too deeply"),
        ('{"all_samples": [{"sample_id": NaN, "score": 1}]}', "sample_id is NaN in a row"),
        (
            '{"all_samples": [{"sample_id": -Infinity, "score": 1}]}',
            "sample_id is NaN in a row, or infinite",
        ),
    ],
)
def test_damaged_json_is_refused(pair, text, message):
    put(
        pair / "exp5" / "exp5_accuracy_text-vqa" / f"exp5_accuracy_results_{stem((4, 4, 12))}", text
    )
    with pytest.raises(InputError, match=message):
        read(pair)


def test_true_is_a_score_and_no_time(pair):
    put_exp5(pair, SMALL, [{"sample_id": 7, "score": True}])
    put_exp6(pair, SMALL, {7: 2.0})
    assert read(pair).accuracy.nan_to_num().max() == 1
    put_exp6(pair, SMALL, [{"sample_id": 7, **named(SMALL), "T_total_ms": True}])
    with pytest.raises(InputError, match="T_total_ms must be a number in every row"):
        read(pair)


def test_reading_a_file_leaves_the_garbage_collector_as_it_was(pair):
    put(pair / "exp5" / "exp5_accuracy_text-vqa" / f"exp5_accuracy_results_{stem((4, 4, 12))}", "{")
    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        try:
            with pytest.raises(InputError, match="not readable JSON"):
                read(pair)
            assert gc.isenabled() == enabled
        finally:
            gc.enable()


def test_a_long_read_says_how_far_it_is_and_a_short_one_nothing(pair, capsys, monkeypatch):
    read(pair)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(
        "knobwise.common.progress.time.monotonic", iter(range(0, 1000, 20)).__next__
    )
    read(pair)
    assert re.search(r"reading exp6_latency_text-vqa: 1/2, \d+ s left\n", capsys.readouterr().err)


def test_a_progress_bar_ends_where_reading_fails(pair, monkeypatch):
    """Also while somebody holds on to the error, as a notebook does."""
    put_exp5(pair, LARGE, [{"sample_id": 0, "score": "good"}])
    open_bars = []

    @contextmanager
    def counted(*args, **more):
        open_bars.append(1)
        try:
            yield lambda done, note: None
        finally:
            open_bars.pop()

    monkeypatch.setattr("knobwise.envs.readers.configuration_files.progress", counted)
    with pytest.raises(InputError, match="score must be a number") as kept:
        read(pair)
    assert kept.value.__traceback__ is not None
    assert open_bars == []


def test_images_and_question_types_are_read_from_rows_or_their_metadata(pair):
    typed = [
        {"sample_id": 0, "score": 1.0, "question_type": "yes/no"},
        {"sample_id": 1, "score": 0.0},
    ]
    put_exp5(pair, SMALL, typed)
    assert read(pair).question_types == (
        "yes/no",
        "unknown",
    )  # of the other file nothing but the sample is known
    facts = [{"question_type": kind, "image_id": 70 + i} for i, kind in enumerate("ab")]
    rows = [{"sample_id": i, "score": 1.0, "metadata": fact} for i, fact in enumerate(facts)]
    for setting in (SMALL, LARGE):
        put_exp5(pair, setting, rows)
    table = read(pair)
    assert (table.question_types, table.image_ids) == (("a", "b"), ("70", "71"))
    facts[0]["question_type"] = "c"
    put_exp5(pair, LARGE, rows)
    with pytest.raises(InputError, match="question_type must be the same in all rows of a sample"):
        read(pair)


def test_images_may_be_known_of_one_data_set_only(pair):
    put_exp5(
        pair,
        SMALL,
        [{"sample_id": 7, "score": 1.0, "image_id": 3, "question_type": "a"}],
        dataset="okvqa",
    )
    put_exp6(pair, SMALL, {7: 5.0}, dataset="okvqa")
    both = read(pair, ["text_vqa", "okvqa"])
    assert both.dataset_names == ("okvqa", "text_vqa", "text_vqa")
    assert both.image_ids == ("3", "0", "1")
    assert both.question_types == ("a", "unknown", "unknown")
    assert read(pair).image_ids == read(pair).question_types == ()
