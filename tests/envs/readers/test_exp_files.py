"""Reading and writing exp5/exp6 and core_exp folders: round trips, both spellings, the traps known
from the field."""

import gc
import json
import math
import re
import shutil
from pathlib import Path

import polars as pl
import pytest
import torch
from helpers import identical, input_error
from hypothesis import given, settings
from hypothesis import strategies as st

from knobwise.envs.readers.exp_files import read_core_exp, read_exp5_exp6, write_exp5_exp6
from knobwise.envs.readers.feature_files import write_features
from knobwise.envs.readers.long_table import long_frame, table_from_frame

ROOT = Path(__file__).resolve().parents[3]
SMALL, LARGE = (2, 4, 12), (10, 12, 16)
KNOBS = ["max_crops", "top_k", "num_active_blocks"]
ROW = {"sample_id": 0, "score": 1}
SHARES = {"total": 1, "prefill": 0.25, "decode": 0.5}


def test_image_and_question_types_are_read_from_metadata_and_agree(pair):
    facts = [{"question_type": "a", "image_id": 70}, {"question_type": "b", "image_id": 71}]
    rows = [ROW | {"sample_id": i, "metadata": fact} for i, fact in enumerate(facts)]
    # of the other file nothing but the samples is known
    put_exp5(pair, SMALL, rows)
    table = read(pair)
    assert (table.question_types, table.image_ids) == (("a", "b"), ("70", "71"))
    facts[0]["question_type"] = "c"
    put_exp5(pair, LARGE, rows)
    with input_error("question_type"):
        read(pair)


def test_latency_is_a_choice(pair):
    for stage, share in SHARES.items():
        assert read(pair, latency=stage).latency_ms[0, 0] == 100 * share


def write(root, frame, metadata=None):
    write_exp5_exp6(frame, root / "exp5", root / "exp6", "text_vqa", metadata)


def put(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def named(setting):
    return dict(zip(KNOBS, setting, strict=True))


def stem(setting, rank=""):
    return "crops{}_topk{}_blocks{}{}.json".format(*setting, rank)


def put_rows(root, kind, key, setting, rows, rank="", dataset="text-vqa", **changes):
    """Write the file of one configuration."""
    summary = {**named(setting), "num_samples": len(rows), "latency_total_ms": {"mean": 50.0}}
    content = {"summary": [summary], key: rows, **changes}
    folder = f"{kind}_{dataset}" if dataset else ""
    return put(root / kind[:4] / folder / f"{kind}_{stem(setting, rank)}", content)


def put_exp5(root, setting, scores, **options):
    """Write an accuracy file; scores: id → score, or rows."""
    if isinstance(scores, dict):
        scores = [{"sample_id": i, "score": score} for i, score in scores.items()]
    return put_rows(root, "exp5_accuracy", "all_samples", setting, scores, **options)


def put_exp6(root, setting, times, **options):
    """Write a latency file; times: id → total ms, or rows, in the profiler's spelling."""
    if isinstance(times, dict):
        knobs = named(setting)
        times = [
            {**knobs, "sample_id": i, "T_total_ms": t, "T_prefill_ms": t / 4, "T_decode_ms": t / 2}
            for i, t in times.items()
        ]
    return put_rows(root, "exp6_latency", "per_sample_latencies", setting, times, **options)


def read(root, dataset="text_vqa", **choices):
    return read_exp5_exp6(root / "exp5", root / "exp6", dataset, **choices)


def read_core(root, **choices):
    return read_core_exp(root, "text_vqa", **choices)


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
    identical(table.accuracy, [[0.5, 1.0], [0.0, 0.0]])
    identical(table.latency_ms, [[100.0, 300.0], [108.0, 308.0]])
    assert table.notes == table.datasets == table.parts == table.image_ids == ()
    table.features["language_features"] = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    write_features(table, pair / "f.npz")
    assert read(pair, features=pair / "f.npz").digest == table.digest


def test_older_spelling_reads_the_same(pair):
    same = {stage: read(pair, latency=stage).digest for stage in SHARES}
    for path in (pair / "exp6").glob("*/*"):
        rows = json.loads(path.read_text())["per_sample_latencies"]
        for row in rows:
            for stage in SHARES:
                row[f"latency_{stage}"] = row.pop(f"T_{stage}_ms")
        put(path, {"summary": [{"latency_mean": 1}], "all_samples": rows})
    assert {stage: read(pair, latency=stage).digest for stage in SHARES} == same


def test_files_may_lie_in_the_directory_itself(tmp_path):
    put_exp5(tmp_path, SMALL, {0: 1.0}, dataset="", config={"dataset_name": "text_vqa"})
    put_exp5(tmp_path, LARGE, {0: 0.0}, dataset="", config={"dataset_name": "doc_qa"})
    put_exp6(tmp_path, SMALL, {0: 10.0}, dataset="")
    table = read(tmp_path)
    assert table.num_configurations == 1
    assert "1 files that name another data set (doc_qa): not read" in table.notes[0]
    with input_error("ok_vqa"):
        read(tmp_path, "ok_vqa")


def test_files_that_name_another_data_set_or_lost_rows_are_counted(pair):
    """Their folder says what they hold; rows that a summary counts may have been lost."""
    config = {"dataset_name": "doc_qa"}
    summary = [named(SMALL) | {"num_samples": 3}]
    put_exp5(pair, SMALL, {0: 0.5, 1: 0.0}, config=config, summary=summary)
    table = read(pair)
    assert table.num_samples == 2
    folder = pair / "exp5" / "exp5_accuracy_text-vqa"
    assert table.notes == (
        f"{folder}: 1 files that name another data set (doc_qa)",
        f"{folder}: 1 files with fewer rows than num_samples in their summary "
        "(exp5_accuracy_crops2_topk4_blocks12.json)",
    )


def test_times_of_batches_are_noted(pair):
    for size, noted in ((1, 0), (8, 1), (None, 0)):
        put_exp6(pair, LARGE, {0: 300.0, 1: 308.0}, config={"batch_size": size})
        # scores may come in batches of any size
        put_exp5(pair, SMALL, {0: 0.5, 1: 0.0}, config={"batch_size": 8})
        notes = read(pair).notes
        assert len(notes) == noted
        assert all("1 files were measured in batches" in note for note in notes)


def test_several_data_sets_keep_their_ids_and_images_apart(pair):
    put_exp5(pair, SMALL, [ROW | {"image_id": 3, "question_type": "a"}], dataset="doc-qa")
    put_exp6(pair, SMALL, {0: 30.0}, dataset="doc-qa")
    table = read(pair, ["text_vqa", "doc_qa"])
    assert table.name == "text_vqa+doc_qa"
    assert table.datasets == ("doc_qa", "text_vqa", "text_vqa")
    assert table.sample_ids == ("0", "0", "1")
    identical(table.accuracy[:, 0], [1, 0.5, 0.0])
    # images and types may be known of one data set only
    assert table.image_ids == ("3", "0", "1")
    assert table.question_types == ("a", "unknown", "unknown")


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
    for kind in ("exp5_accuracy", "exp6_latency"):
        (pair / kind[:4] / f"{kind}_text-vqa").rename(pair / kind[:4] / name)
    tables = [read(pair)]
    for path in (pair / "exp6" / name).iterdir():
        path.rename(pair / "exp5" / name / path.name)
    tables.append(read_exp5_exp6(pair / "exp5", pair / "exp5", "text_vqa"))
    assert [(table.digest, table.notes) for table in tables] == [(same.digest, ())] * 2


def put_whole_run(root, knobs_in_scores=False, knobs_in_times=True):
    """Write the files of a whole run in place of those of its configurations; return the paths."""
    paths = []
    for kind, key, with_knobs in (
        ("exp5_accuracy", "all_samples", knobs_in_scores),
        ("exp6_latency", "per_sample_latencies", knobs_in_times),
    ):
        folder = root / kind[:4] / f"{kind}_text-vqa"
        whole = {"summary": [], "all_samples": [], "config": {"dataset_name": "text_vqa"}}
        for path in sorted(folder.glob("*_crops*"), reverse=True):
            part = json.loads(path.read_text())
            path.unlink()
            whole["summary"] += part["summary"]
            knobs = {knob: part["summary"][0][knob] for knob in KNOBS}
            for row in part[key]:
                bare = {name: value for name, value in row.items() if name not in KNOBS}
                whole["all_samples"].append(bare | knobs if with_knobs else bare)
        paths.append(put(folder / f"{kind}_results.json", whole))
    return paths


@pytest.mark.parametrize("knobs_in_rows", [(False, True), (True, True), (False, False)])
def test_one_file_of_a_whole_run_is_read_as_its_configurations_are(pair, knobs_in_rows):
    for setting, score in ((SMALL, 0.5), (LARGE, 1.0)):
        summary = named(setting) | {"num_samples": 2, "accuracy": score / 2}
        put_exp5(pair, setting, {0: score, 1: 0.0}, summary=[summary])
    same = read(pair)
    paths = put_whole_run(pair, *knobs_in_rows)
    for table in (read(pair), read_exp5_exp6(*paths, "text_vqa")):
        assert table.digest == same.digest
        assert len(table.notes) == knobs_in_rows.count(False)
    with input_error(r"results\.json: .*ok_vqa"):
        read_exp5_exp6(*paths, "ok_vqa")
    # files of single configurations come first
    put_exp6(pair, LARGE, {0: 7.0})
    identical(read(pair).latency_ms, [[7.0]])


def test_mean_latencies_of_a_whole_run_can_be_given_to_all_samples(pair):
    means = [named(SMALL) | {"latency_total_ms": {"mean": 40.0}}]
    means.append(named(LARGE) | {"latency_total_ms": {"mean": 80.0}})
    path = put(pair / "exp6.json", {"summary": means, "all_samples": []})
    table = read_exp5_exp6(pair / "exp5", path, "text_vqa", broadcast_latency=True)
    identical(table.latency_ms, [[40.0, 80.0]] * 2)


def test_a_merge_replaces_its_rank_files(pair):
    digest = read(pair).digest
    for rank in (0, 1):
        put_exp5(pair, SMALL, {rank: 0.125}, rank=f"_rank{rank}")
        put_exp6(pair, SMALL, {rank: 1.0}, rank=f"_rank{rank}")
    table = read(pair)
    assert table.digest == digest
    assert [": 2 rank files" in note for note in table.notes] == [True, True]


def test_rank_files_without_a_merge_are_all_read(tmp_path):
    for rank, scores in (("_rank0", {0: 1.0, 2: 0.0}), ("_rank1", {1: 0.5})):
        put_exp5(tmp_path, SMALL, scores, rank=rank)
        put_exp6(tmp_path, SMALL, {i: 10.0 + i for i in scores}, rank=rank)
    # each counts the samples of all
    put_exp5(tmp_path, SMALL, {1: 0.5}, rank="_rank1", summary=[named(SMALL) | {"num_samples": 3}])
    table = read(tmp_path)
    assert table.notes == ()
    assert table.sample_ids == ("0", "1", "2")
    identical(table.accuracy[:, 0], [1.0, 0.5, 0.0])
    identical(table.latency_ms[:, 0], [10.0, 11.0, 12.0])
    # a merge may lack what a distributed sampler repeated
    merged = dict.fromkeys(range(3), 1.0)
    put_exp5(tmp_path, SMALL, {1: 0.5, 0: 1.0}, rank="_rank1")
    put_exp5(tmp_path, SMALL, merged)
    assert read(tmp_path).num_samples == 3
    # but no more than that
    for rank in ("_rank0", "_rank1"):
        put_exp5(tmp_path, SMALL, merged, rank=rank)
    with input_error(r"blocks12\.json: .* 3 of the 6 rows"):
        read(tmp_path)


@pytest.mark.parametrize("side", [put_exp5, put_exp6])
def test_ids_that_restart_on_every_rank_are_refused(tmp_path, side):
    for rank in (0, 1):
        for put_side in (put_exp5, put_exp6):
            ids = range(3) if put_side is side else (2 * rank, 2 * rank + 1)
            put_side(tmp_path, SMALL, dict.fromkeys(ids, rank + 0.0), rank=f"_rank{rank}")
    with input_error(rf"{side.__name__[4:]}.*rank0\.json.*rank1\.json: .* 3 .*pairs"):
        read(tmp_path)


@pytest.mark.parametrize("inside", [False, True])
def test_question_id_is_the_key_where_every_row_has_it(tmp_path, inside):
    """With it, ids that restart do no harm."""
    scores = []
    times = []
    for number in range(4):
        key = {"question_id": 900 + number}
        row = {"sample_id": number % 2, **({"metadata": key} if inside else key)}
        scores.append(row | {"score": number / 4})
        times.insert(0, row | {"T_total_ms": float(number)})
    put_exp5(tmp_path, SMALL, scores)
    put_exp6(tmp_path, SMALL, times)
    table = read(tmp_path)
    assert table.sample_ids == ("900", "901", "902", "903")
    identical(table.accuracy[:, 0], [0, 0.25, 0.5, 0.75])
    identical(table.latency_ms[:, 0], [0, 1, 2, 3])
    put_exp5(tmp_path, SMALL, scores[:1])
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
    identical(table.mask, [[True] * 2] * 2)
    assert re.search("4 cells of 2 .*only in exp5.* 3 cells of 2 .*only in exp6", str(table.notes))


def test_mean_latency_of_a_configuration_is_given_to_its_samples_when_asked_for(pair):
    put_exp6(pair, LARGE, []).unlink()
    for rank, mean, count in (("_rank0", 40.0, 3), ("_rank1", 80.0, 1)):
        summary = named(LARGE) | {"latency_total_ms": {"mean": mean}, "num_samples": count}
        put_exp6(pair, LARGE, [], rank=rank, summary=[summary])
    table = read(pair)
    assert table.num_configurations == 1
    assert "1 configurations have only a mean latency" in table.notes[0]
    identical(read(pair, broadcast_latency=True).latency_ms, [[100.0, 50.0], [108.0, 50.0]])


def small(write, content):
    """Put this file in the place of that of the small configuration."""

    def change(root):
        if isinstance(content, str):
            put(write(root, SMALL, {}), content)
        else:
            write(root, SMALL, content)

    return change


def small_is(write, content, field):
    return small(write, content), {}, rf"topk4_blocks12\.json: .*{field}"


ONE = named(SMALL) | {"num_samples": 1}


def whole_is(summary, rows=(ROW,)):
    """A file of a whole run, which must be named with the knobs that are not known."""

    def change(root):
        put(put_whole_run(root)[0], {"summary": summary, "all_samples": [*rows]})

    return change, {}, r"exp5_accuracy_results\.json: .*max_crops"


def other_ids(root):
    for setting in (SMALL, LARGE):
        put_exp6(root, setting, {"q7": 1.0})


def several_images(root):
    one, other = times((0, 1.0), (0, 2.0))
    put_exp6(root, SMALL, [one | {"image_id": 1}, other | {"image_id": 2}])


def times(*pairs):
    return [named(SMALL) | {"sample_id": sample, "T_total_ms": ms} for sample, ms in pairs]


@pytest.mark.parametrize(
    ("change", "choices", "named"),
    [
        small_is(put_exp5, {0: 1.5}, "accuracy"),
        small_is(put_exp6, {0: math.nan}, "latency_ms"),
        small_is(put_exp6, {0: -1.0}, "latency_ms"),
        small_is(put_exp5, {0: "good"}, "score"),
        small_is(put_exp6, [{"sample_id": 0, "T_total_ms": True}], "T_total_ms"),
        small_is(put_exp6, [{"sample_id": 0}], "T_total_ms or latency_total"),
        small_is(put_exp6, [{"sample_id": 0, "T_total_ms": 1.0, "top_k": 8}], "top_k=8"),
        small_is(put_exp5, [{"score": 1}], "sample_id"),
        small_is(put_exp5, [{"sample_id": [0], "score": 1}], "sample_id"),
        small_is(put_exp5, [{"sample_id": 2.0**64, "score": 1}], "sample_id"),
        small_is(put_exp5, [{"sample_id": 2.0**53, "score": 1}], "sample_id"),
        small_is(put_exp6, [{"sample_id": "1.2E+11", "T_total_ms": 1.0}], "sample_id"),
        small_is(put_exp5, [{"sample_id": math.nan, "score": 1}], "sample_id"),
        small_is(put_exp5, [ROW, ROW], "2 × sample_id 0"),
        small_is(put_exp5, '{"summary": [{"top_k": 8}]}', "top_k=8"),
        small_is(put_exp5, '{"all_samples": [', "JSON"),
        small_is(put_exp5, '{"all_samples": ' + "[" * 100_000, "nested"),
        small_is(put_exp5, '{"all_samples": [{"score": 0, "score": 1}]}', "'score'"),
        small_is(put_exp5, "[]", "all_samples"),
        small_is(put_exp5, '{"rows": []}', "all_samples"),
        small_is(put_exp5, '{"all_samples": {"0": 1}}', "all_samples"),
        small_is(put_exp5, '{"all_samples": [], "config": 3}', "config"),
        (several_images, {}, r"exp6_latency_crops2.*2 × sample_id 0"),
        whole_is([ONE, ONE]),
        whole_is([named(SMALL)]),
        whole_is([ONE | {"accuracy": 0.9}]),
        whole_is([ONE, ONE], [ROW | named(SMALL), ROW]),
        whole_is([ONE | {"top_k": "many"}], []),
        (None, {"latency": "vision"}, "latency"),
        (None, {"accuracy": "fluency"}, r"\.json.*fluency"),
        (None, {"dataset": "ok_vqa"}, r"exp6: .*exp6_latency_ok-vqa .*text-vqa"),
        (other_ids, {}, r"text_vqa: .*\['0', '1'\].*\['q7'\]"),
        (lambda root: shutil.rmtree(root / "exp6"), {}, "exp6: no such folder"),
    ],
)
def test_what_is_wrong_with_a_folder_is_named(pair, change, choices, named):
    if change:
        change(pair)
    collecting = gc.isenabled()
    with input_error(named):
        read(pair, **choices)
    assert gc.isenabled() == collecting


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
         "prefill_ms": draw(time)}
        for i, s in keys
    ]  # fmt: skip
    return pl.DataFrame(rows)


@given(frame=cells())
@settings(max_examples=15, deadline=None)
def test_reading_gives_back_what_was_written(tmp_path_factory, frame):
    root = tmp_path_factory.mktemp("exp")
    knobs = ["max_crops", "top_k", "num_active_blocks"]
    write_exp5_exp6(frame, root / "exp5", root / "exp6", "text_vqa", {"machine": "a lathe"})
    for time, score, latency, accuracy in (
        ("prefill_ms", "soft_score", "prefill", "soft_score"),
        ("latency_ms", "accuracy", "total", "score"),
    ):
        wanted = table_from_frame(frame, name="text_vqa", knobs=knobs, accuracy=score, latency=time)
        assert read(root, latency=latency, accuracy=accuracy).digest == wanted.digest
    again = root / "again"
    write_exp5_exp6(long_frame(wanted), again / "exp5", again / "exp6", "text_vqa")
    assert read(again).digest == wanted.digest


def test_written_files_follow_the_profilers_spelling(tmp_path):
    columns = {
        "sample_id": [0, 1, 2],
        "question_id": [5, 6, 7],
        "question_type": ["number", "other", "other"],
        **named(SMALL),
        "accuracy": [1.0, 0.0, None],
        "latency_ms": [100.0, 300.0, 5.0],
        "prefill_ms": [25.0, math.nan, 1.0],
        "num_vision_tokens": [400, 300, 1],
    }
    metadata = {"machine": "x", "batch_size": 2}
    write(tmp_path, pl.DataFrame(columns), metadata)
    exp5, exp6 = (
        json.loads((tmp_path / kind[:4] / f"{kind}_text-vqa" / (name + stem(SMALL))).read_text())
        for kind, name in (
            ("exp5_accuracy", "exp5_accuracy_results_"),
            ("exp6_latency", "exp6_latency_"),
        )
    )
    assert exp5 == {
        "summary": [{**named(SMALL), "accuracy": 0.5, "num_samples": 2}],
        "all_samples": [
            {"sample_id": 0, "question_id": 5, "question_type": "number", "score": 1.0},
            {"sample_id": 1, "question_id": 6, "question_type": "other", "score": 0.0},
        ],
        "config": {**metadata, "dataset_name": "text_vqa"},
    }
    assert exp6["config"] == exp5["config"]
    assert exp6["per_sample_latencies"][1] == {
        "sample_id": 1, "question_id": 6, **named(SMALL), "T_total_ms": 300.0, "T_prefill_ms": None,
        "num_vision_tokens": 300, "accuracy": 0.0,
    }  # fmt: skip
    wanted = {"mean": 200, "std": 100, "P50": 200, "P95": 290, "P99": 298}
    assert exp6["summary"][0]["latency_total_ms"] == pytest.approx(wanted)
    table = read(tmp_path)
    assert (table.sample_ids, table.question_types) == (("5", "6"), ("number", "other"))
    assert read(tmp_path, latency="prefill").sample_ids == ("5",)


@pytest.mark.parametrize(
    ("change", "metadata", "field"),
    [
        ({"latency_ms": -1.0}, {}, "latency_ms"),
        ({"max_crops": 2.5}, {}, "max_crops"),
        ({"top_k": "many"}, {}, "top_k"),
        ({"dataset": "doc_qa"}, {}, "data sets .*doc_qa"),
        ({}, {"when": object()}, "metadata"),
        ({}, {"rate": math.nan}, "metadata"),
    ],
)
def test_what_cannot_be_written_leaves_nothing(tmp_path, change, metadata, field):
    row = {"sample_id": 0, "dataset": "text_vqa", "accuracy": 1.0, "latency_ms": 1.0}
    frame = pl.DataFrame([row | named(SMALL), row | named(LARGE) | change], strict=False)
    with input_error(field):
        write(tmp_path, frame, metadata)
    assert list(tmp_path.iterdir()) == []


def put_core(root, level, scores, rank="", folder="text-vqa", dataset="text_vqa", **changes):
    """Write a core_exp file; scores: id → accuracy."""
    crops = {"low": 3, "medium": 8, "high": 15}[level]
    rows = [
        {"sample_id": i, "accuracy": score, "T_vision_total": 20.0, "T_LLM_prefill": 70.0,
         "T_total": 130.0 + i, "metadata": {"image_id": 5, "question_type": "number"}}
        for i, score in scores.items()
    ]  # fmt: skip
    content = {"tier": level, "max_crops": crops, "top_k": 8, "per_sample_results": rows, **changes}
    name = f"{dataset}_imgsizetier-{level}_crops{crops}_topk8_blocks16{rank}.json"
    return put(root / folder / name, content)


def test_accuracies_in_per_cent_are_divided_by_100_on_request(tmp_path):
    put_exp5(tmp_path, SMALL, {0: 100.0, 1: 30.0})
    put_exp6(tmp_path, SMALL, {0: 9.0, 1: 8.0})
    put_core(tmp_path, "low", {0: 100.0, 1: 30.0})
    for reader in (read, read_core):
        with input_error("accuracy_unit=percent"):
            reader(tmp_path)
        table = reader(tmp_path, accuracy_unit="percent")
        assert table.accuracy.flatten().tolist() == pytest.approx([1, 0.3])
        assert len(table.notes) == 1
    put_core(tmp_path, "low", {0: 1.0, 1: 0.3})
    with input_error("accuracy_unit=percent"):
        read_core(tmp_path, accuracy_unit="percent")


@pytest.mark.parametrize("spelling", [{}, {"folder": ""}, {"dataset": "text-vqa"}])
def test_core_exp_tiers_go_from_low_to_high(tmp_path, spelling):
    for tier, score in (("high", 1.0), ("low", 0.0), ("medium", 0.5)):
        put_core(tmp_path, tier, {0: score, 1: score}, **spelling)
    table = read_core(tmp_path)
    assert table.knobs[0].values == ("low", "medium", "high")
    assert table.label(1) == "tier=medium top_k=8 num_active_blocks=16"
    identical(table.accuracy, [[0, 0.5, 1]] * 2)
    identical(table.latency_ms, [[130.0] * 3, [131.0] * 3])
    assert table.image_ids == ("5", "5")
    assert table.question_types == ("number", "number")
    assert table.notes == ()
    for stage, time in (("prefill", 70.0), ("vision_prefill", 90.0)):
        identical(read_core(tmp_path, latency=stage).latency_ms, [[time] * 3] * 2)


@pytest.mark.parametrize(
    ("changes", "choices", "field"),
    [
        ({"tier": "high"}, {}, "tier=high"),
        ({"max_crops": 2}, {}, "max_crops=2"),
        ({"scores": {0: 3.0}}, {}, "accuracy"),
        ({"rank": "_rank1"}, {}, "2 × sample_id 0"),
        ({"dataset": "doc_qa"}, {}, "text_vqa"),
        ({}, {"latency": "vision"}, "latency"),
    ],
)
def test_bad_core_exp_files_are_named(tmp_path, changes, choices, field):
    if "rank" in changes:
        put_core(tmp_path, "low", {0: 1.0}, rank="_rank0")
    put_core(tmp_path, "low", **{"scores": {0: 1.0}, **changes})
    with input_error(field):
        read_core(tmp_path, **choices)


def test_ids_are_exact(pair):
    for number in (2**64 - 1, 2**80 + 1):
        put_exp5(pair, SMALL, {number: True})  # true is a score
        put_exp6(pair, SMALL, {number: 1.0})
        assert str(number) in read(pair).sample_ids


def test_a_long_read_says_how_far_it_is(pair, capsys, monkeypatch):
    # as long as no time passes, nothing is said
    monkeypatch.setattr("knobwise.common.progress.time.monotonic", lambda: 0.0)
    read(pair)
    assert capsys.readouterr().err == ""
    clock = iter(range(0, 1000, 20))
    monkeypatch.setattr("knobwise.common.progress.time.monotonic", clock.__next__)
    read(pair)
    assert "exp6_latency_text-vqa: 1/2" in capsys.readouterr().err


def test_repeated_rows_of_a_latency_file_are_measurements(tmp_path):
    put_exp5(tmp_path, SMALL, {0: 0.5, 1: 0.5})
    put_exp6(tmp_path, SMALL, times((0, 9.0), (0, 8.0), (1, 5.0), (0, 6.0), (7, 1.0), (7, 2.0)))
    made = read(tmp_path)
    identical(made.repeats_ms, [[[6.0, 8.0, 9.0]], [[5.0, math.nan, math.nan]]])
    identical(made.accuracy, [[0.5], [0.5]])
    assert re.search("1 cells of 1 .*'1 cells occur up to 3 ", str(made.notes))


def test_core_exp_files_may_repeat_a_sample(tmp_path):
    rows = [
        {"sample_id": 0, "accuracy": accuracy, "T_total": ms, "repeat": repeat}
        for repeat, (accuracy, ms) in enumerate([(1.0, 4.0), (0.0, 3.0), (1.0, 3.0)])
    ]
    put_core(tmp_path, "high", {}, per_sample_results=rows)
    made = read_core(tmp_path)
    assert made.repeats_ms.tolist() == [[[4.0, 3.0, 3.0]]]
    assert made.accuracy.item() == pytest.approx(2 / 3)


def test_the_files_that_the_guide_shows_are_read(tmp_path):
    guide = (ROOT / "docs/profiles.md").read_text()
    exp5, exp6 = re.findall(r"```json\n(.*?)```", guide, re.DOTALL)[:2]
    setting = "crops12_topk32_blocks12.json"
    put(tmp_path / "exp5/exp5_accuracy_text-vqa" / f"exp5_accuracy_results_{setting}", exp5)
    put(tmp_path / "exp6/exp6_latency_text-vqa" / f"exp6_latency_{setting}", exp6)
    table = read(tmp_path)
    assert table.accuracy.tolist() == [[1.0], [0.0]]
    assert table.latency_ms.tolist() == [[300.0], [280.0]]
    assert table.label(0) == "max_crops=12 top_k=32 num_active_blocks=12"
    assert read(tmp_path, latency="prefill").latency_ms.tolist() == [[90.0], [90.0]]
