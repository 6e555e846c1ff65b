"""Logs and data frames of inspect-ai."""

import gzip
import io
import json
import shutil
import zipfile
import zlib
from pathlib import Path
from unittest.mock import patch

import polars as pl
import pytest
from helpers import identical, input_error

import knobwise
from knobwise.envs.readers import inspect_logs

DATA = Path(__file__).parents[2] / "data"
LOGS = DATA / "inspect_logs"
RETRIED = DATA / "inspect_retried"
LOG_NAMES = [f"{number}.eval" for number in range(4)]


def frame_of(name):
    return pl.read_csv(io.BytesIO(gzip.decompress((DATA / f"inspect_{name}.csv.gz").read_bytes())))


def by_label(made, values):
    return {made.label(k): round(float(values[k]), 3) for k in range(made.num_configurations)}


def archive(path, members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as written:
        for name, content in members.items():
            written.writestr(name, json.dumps(content))
    return path


def log(model="m/a", effort=None, samples=(), **about):
    header = {
        "version": 2,
        "status": "success",
        "eval": {"eval_id": f"{model} {effort}", "task": "sums", "model": model, "config": {}}
        | about,
        "plan": {"steps": [{"solver": "generate"}], "config": {"reasoning_effort": effort}},
    }
    own = [each | {"uuid": f"{model} {effort} {each['uuid']}"} for each in samples]
    return header | {"samples": own}


def sample(number, epoch=1, score="C", time=1.0, **more):
    scores = {"match": {"value": score}} if score is not None else {}
    return {
        "id": number,
        "epoch": epoch,
        "uuid": f"{number} {epoch} {time}",
        "input": f"question {number}",
        "scores": scores,
        "total_time": time,
    } | more


# -- real files ------------------------------------------------------------------------------------


def test_right_reading_of_real_logs():
    made = knobwise.read(LOGS, accuracy="score_match", features="auto")
    assert (made.num_samples, made.num_repeats) == (6, 2)
    assert by_label(made, made.accuracy.mean(0)) == {
        "model=mockllm/large reasoning_effort=low": 0.75,
        "model=mockllm/large reasoning_effort=high": 0.75,
        "model=mockllm/small reasoning_effort=low": 0.5,
        "model=mockllm/small reasoning_effort=high": 0.5,
    }
    assert list(made.texts) == ["input"]
    # q2 of large ran into its time limit of a second, and keeps its times
    large = [k for k in range(4) if "large" in made.label(k)]
    late = made.measurements_ms[made.sample_ids.index("q2"), large]
    assert ((late > 1000) & (late < 1100)).all()
    # q4 of large failed once: wrong, and as slow as the slowest answer
    failed = made.measurements_ms[made.sample_ids.index("q4"), large]
    identical(failed.max(-1).values, [made.measurements_ms.max()] * 2)
    identical(made.accuracy[made.sample_ids.index("q4"), large], [0.5, 0.5])
    assert any("2 of 48 answers failed" in note for note in made.notes)


def test_a_sample_that_was_retried_is_no_failure():
    made = knobwise.read(RETRIED, accuracy="score_match")
    assert (made.num_samples, made.num_repeats) == (3, 2)
    accuracies = by_label(made, made.accuracy.mean(0))
    assert accuracies == {"model=mockllm/small": 0.333, "model=mockllm/large": 1.0}
    # q2 of large took 136 ms to fail, and 106 ms when it was retried
    large = int(made.accuracy.mean(0).argmax())
    times = made.measurements_ms[made.sample_ids.index("q2"), large]
    identical(times.sort().values, [106.0, 169.0])
    assert any("1 attempts failed and were retried" in note for note in made.notes)
    assert not any("answers failed" in note for note in made.notes)


@pytest.mark.parametrize("order", ["abc", "cba"])
def test_of_several_attempts_the_last_counts_whatever_the_files_are_called(tmp_path, order):
    errors = {"error": "bad gateway", "score": None}
    attempts = [sample(1, time=1.0, **errors), sample(1, time=2.0, **errors), sample(1, time=3.0)]
    for number, (name, attempt) in enumerate(zip(order, attempts, strict=True)):
        about = {"task_id": "t", "created": f"2026-11-30T02:0{number}:00+00:00"}
        content = log(samples=[attempt, sample(2, time=1.5)], **about)
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    # another task with the same samples is none of these attempts
    other = log("m/b", samples=[sample(1, time=4.0, **errors), sample(2)], task_id="u")
    (tmp_path / "d.json").write_text(json.dumps(other))
    made = knobwise.read(tmp_path)
    assert (made.num_samples, made.num_repeats) == (2, 1)
    assert made.accuracy.tolist() == [[1, 0], [1, 1]]
    assert made.measurements_ms[0, 0].tolist() == [3000]


@pytest.mark.parametrize(
    ("name", "samples", "repeats", "accuracy"),
    [
        ("big_model", 20, 1, {"small": 0.5, "large": 1.0}),
        ("ep_model", 20, 2, {"small": 0.5, "large": 1.0}),
    ],
)
def test_right_reading_of_real_data_frames(name, samples, repeats, accuracy):
    made = knobwise.read(DATA / f"inspect_{name}.csv.gz", accuracy="score_match")
    assert (made.num_samples, made.num_configurations, made.num_repeats) == (samples, 4, repeats)
    for label, share in by_label(made, made.accuracy.mean(0)).items():
        assert share == accuracy["large" if "large" in label else "small"], label
    rows = frame_of(name)
    first = rows.filter(pl.col("id") == "q0")["total_time"].sort() * 1000
    times = made.measurements_ms[made.sample_ids.index("q0")].flatten().sort().values
    assert times.tolist() == pytest.approx(first.to_list())
    assert any("4 runs (eval_id) have 2 settings" in note for note in made.notes)
    # in memory it is the same
    again = knobwise.read(rows, accuracy="score_match")
    identical(again.latency_ms, made.latency_ms)


def test_right_reading_of_a_real_data_frame_that_does_not_name_its_models():
    """Its default columns hold no settings at all: each run is one."""
    made = knobwise.read(DATA / "inspect_big_default.csv.gz", accuracy="score_match")
    assert (made.num_samples, made.num_configurations, made.num_repeats) == (20, 4, 1)
    assert [knob.name for knob in made.knobs] == ["eval_id"]
    assert sorted(by_label(made, made.accuracy.mean(0)).values()) == [0.5, 0.5, 1.0, 1.0]
    named = knobwise.read(DATA / "inspect_big_model.csv.gz", accuracy="score_match")
    times = [sorted(each.latency_ms.flatten().tolist()) for each in (made, named)]
    assert times[0] == times[1]


def test_runs_of_a_model_are_repeats_on_request():
    path = DATA / "inspect_ep_model.csv.gz"
    made = knobwise.read(path, accuracy="score_match", knobs=["model"])
    assert (made.num_configurations, made.num_repeats) == (2, 4)
    assert not made.measurements_ms.isnan().any()


def test_right_reading_of_a_real_data_frame_with_failures():
    made = knobwise.read(DATA / "inspect_samples.csv.gz", accuracy="score_match")
    assert (made.num_samples, made.num_configurations, made.num_repeats) == (6, 2, 2)
    assert sorted(by_label(made, made.accuracy.mean(0)).values()) == [0.667, 0.75]
    large = int(made.accuracy.mean(0).argmax())
    row = made.sample_ids.index("4")
    assert made.accuracy[row, large] == 0.5
    row = made.sample_ids.index("2")
    identical(made.measurements_ms[row, large], [2016.0, 2025.0])
    identical(made.accuracy[row, large], 0.0)


# -- which scorer ----------------------------------------------------------------------------------


def test_of_two_scorers_one_is_chosen():
    for path in (LOGS, DATA / "inspect_big_model.csv.gz"):
        with input_error("score_match.*score_includes|score_includes.*score_match"):
            knobwise.read(path)


@pytest.mark.parametrize(
    ("value", "number"),
    [("C", 1), ("I", 0), ("P", 0.5), ("N", 0), (True, 1), (0.25, 0.25), ("0.5", 0.5), ("Yes", 1)],
)
def test_scores_are_numbers_as_in_inspect(tmp_path, value, number):
    for model in "ab":
        samples = [sample(1, score=value), sample(2)]
        (tmp_path / f"{model}.json").write_text(json.dumps(log(f"m/{model}", samples=samples)))
    made = knobwise.read(tmp_path)
    assert made.accuracy[0].tolist() == [number] * 2


def test_parts_of_a_score_have_names_of_their_own(tmp_path):
    samples = [sample(1, score={"right": "C", "style": 0.5}), sample(2, score={"right": "I"})]
    for model in "ab":
        (tmp_path / f"{model}.json").write_text(json.dumps(log(f"m/{model}", samples=samples)))
    with input_error("score_match.right"):
        knobwise.read(tmp_path)
    made = knobwise.read(tmp_path, accuracy="score_match.right")
    assert made.accuracy.tolist() == [[1, 1], [0, 0]]


# -- logs of other shapes --------------------------------------------------------------------------


def test_settings_that_differ_are_knobs(tmp_path):
    for effort in (None, "high"):
        for temperature in (0, 1):
            header = log("m/a", effort, [sample(1, time=temperature), sample(2)])
            header["plan"]["config"]["temperature"] = temperature
            header["eval"]["task_args"] = {"shots": 3}
            (tmp_path / f"{effort}{temperature}.json").write_text(json.dumps(header))
    made = knobwise.read(tmp_path)
    values = {knob.name: knob.values for knob in made.knobs}
    assert values == {"reasoning_effort": ("high", "unset"), "temperature": (0, 1)}


def test_several_tasks_are_several_data_sets(tmp_path):
    for task in ("sums", "team/words"):
        for model in "ab":
            content = log(f"m/{model}", samples=[sample(1), sample(2)], task=task)
            for each in content["samples"]:
                each["uuid"] += task
            path = tmp_path / f"{task[:4]}{model}.json".replace("/", "")
            path.write_text(json.dumps(content))
    made = knobwise.read(tmp_path)
    assert made.num_samples == 4
    assert set(made.datasets) == {"sums", "words"}


def test_log_that_was_continued_counts_its_samples_once(tmp_path):
    first = [sample(1), sample(2)]
    (tmp_path / "a.json").write_text(json.dumps(log(samples=first) | {"status": "error"}))
    (tmp_path / "b.json").write_text(json.dumps(log(samples=[*first, sample(3)])))
    (tmp_path / "c.json").write_text(
        json.dumps(log("m/b", samples=[sample(n, time=2.0) for n in (1, 2, 3)]))
    )
    made = knobwise.read(tmp_path)
    assert (made.num_samples, made.num_configurations, made.num_repeats) == (3, 2, 1)
    assert any("2 samples stand in an earlier log" in note for note in made.notes)
    assert any("a.json: its status is error" in note for note in made.notes)


def test_answers_in_metadata_are_no_features(tmp_path):
    for model in "ab":
        samples = [
            sample(n, metadata={"answer": f"{n}", "kind": f"k{n % 2}"}, time=ord(model) + n)
            for n in range(6)
        ]
        (tmp_path / f"{model}.json").write_text(json.dumps(log(f"m/{model}", samples=samples)))
    made = knobwise.read(tmp_path, features="auto")
    names = [column.name for column in made.columns]
    assert "metadata_kind" in names
    assert "metadata_answer" not in names
    assert any("metadata_answer" in note for note in made.notes)


def test_cut_off_and_cut_short(tmp_path):
    """A run that was killed has no header, but parts of its summaries; these cut long texts."""
    content = log(samples=())
    start = {name: content[name] for name in ("version", "eval", "plan")}
    text = 5120 * "x" + inspect_logs.CUT
    members = {
        "_journal/start.json": start,
        "_journal/summaries/1.json": [sample(1), sample(2, input=text)],
        "_journal/summaries/2.json": [sample(3)],
    }
    archive(tmp_path / "a.eval", members)
    archive(tmp_path / "b.eval", {"header.json": log("m/b"), "summaries.json": [sample(1, time=3)]})
    made = knobwise.read(tmp_path)
    assert (made.num_samples, int(made.mask.sum())) == (3, 4)
    assert any("1 inputs" in note and "cut" in note for note in made.notes)


@pytest.mark.parametrize("form", ["json", "eval", "frame"])
def test_waits_and_retries_are_noted(tmp_path, form):
    """A rate limit held 3 of 6 samples of one model for a minute; 2 were retried."""
    rows = []
    for model in "ab":
        samples = []
        for n in range(6):
            waited = 60.0 if model == "b" and n % 2 else 0.0
            each = sample(n, time=1.0 + n + waited, working_time=1.0 + n)
            if model == "b" and n < 2:
                errors = [{"message": "bad gateway"}, {"message": "bad gateway"}]
                each |= {"error_retries": errors} if form == "json" else {"retries": 2}
            samples.append(each)
        content = log(f"m/{model}", samples=samples)
        if form == "json":
            (tmp_path / f"{model}.json").write_text(json.dumps(content))
        else:
            summaries = content.pop("samples")
            members = {"header.json": content, "summaries.json": summaries}
            archive(tmp_path / f"{model}.eval", members)
        rows += [
            {
                "sample_id": each["uuid"],
                "eval_id": model,
                "log": model,
                "model": f"m/{model}",
                "score_match": each["scores"]["match"]["value"],
                **{name: each.get(name) for name in ("id", "epoch", "total_time")},
                **{name: each.get(name) for name in ("working_time", "retries")},
            }
            for each in samples
        ]
    read = pl.DataFrame(rows) if form == "frame" else tmp_path
    made = knobwise.read(read)
    (waits,) = [note for note in made.notes if "working_time" in note]
    assert waits.startswith("3 samples took more than 1.5 times their working_time (model=m/b: 3)")
    assert "profile.latency=working_time" in waits
    (retries,) = [note for note in made.notes if "retried" in note]
    assert retries.startswith("2 samples failed and were retried within their run (model=m/b: 2)")
    working = knobwise.read(read, latency="working_time")
    identical(working.latency_ms, [[1000.0 * (1 + n)] * 2 for n in range(6)])


def test_short_waits_are_not_noted(tmp_path):
    """In the real logs, 21 of 48 samples waited for a connection."""
    made = knobwise.read(LOGS, accuracy="score_match")
    (note,) = [note for note in made.notes if "holds waits" in note]
    assert note.startswith("21 samples")
    assert not any("within their run" in note for note in made.notes)
    for model in "ab":
        samples = [sample(n, time=1.4, working_time=1.0) for n in range(6)]
        (tmp_path / f"{model}.json").write_text(json.dumps(log(f"m/{model}", samples=samples)))
    assert not any("holds waits" in note for note in knobwise.read(tmp_path).notes)


# -- what cannot be read ---------------------------------------------------------------------------


def answer(number, read, time):
    """A sample with its events; another model call was written to the cache."""
    kinds = ["write", "read" if read else None]
    events = [{"event": "model", "cache": kind} for kind in kinds]
    return sample(number, time=time, events=[{"event": "state"}, *events])


def test_samples_read_from_the_cache_are_left_out(tmp_path):
    fresh = [answer(n, False, 2.0) for n in range(3)]
    reread = [answer(n, n > 0, 0.01 if n else 1.0) for n in range(3)]
    for name, samples in (("m/a", fresh), ("m/b", reread)):
        (tmp_path / f"{name[-1]}.json").write_text(json.dumps(log(name, samples=samples)))
    made = knobwise.read(tmp_path)
    assert made.mask.tolist() == [[True, True], [True, False], [True, False]]
    assert made.latency_ms[0].tolist() == [2000.0, 1000.0]
    (note,) = [note for note in made.notes if "cache" in note]
    assert note.startswith("2 answers came from inspect-ai's cache (model=m/b: 2): copies")
    (tmp_path / "a.json").unlink()
    (tmp_path / "b.json").write_text(json.dumps(log("m/b", samples=reread[1:])))
    with input_error("all 2 answers came from inspect-ai's cache"):
        knobwise.read(tmp_path)


@pytest.mark.parametrize(
    ("config", "step", "noted"),
    [
        ({"cache": True}, {}, True),
        ({"cache": {"expiry": "1W"}}, {}, True),
        ({}, {"cache": True}, True),
        ({"cache": False}, {}, False),
        ({}, {}, False),
    ],
)
def test_summaries_of_a_run_with_a_cache_are_noted(tmp_path, config, step, noted):
    for name in ("m/a", "m/b"):
        header = log(name, samples=[sample(1), sample(2)])
        samples = header.pop("samples")
        steps = [{"solver": "generate", "params_passed": step}]
        header["plan"] = {"steps": steps, "config": config}
        archive(tmp_path / f"{name[-1]}.eval", {"header.json": header, "summaries.json": samples})
    notes = [note for note in knobwise.read(tmp_path).notes if "cache" in note]
    assert len(notes) == 2 * noted
    assert all(note.startswith(f"{n}.eval: ") for n, note in zip("ab", notes, strict=False))


def test_damaged_logs_are_refused(tmp_path):
    for name in LOG_NAMES:
        shutil.copy(LOGS / name, tmp_path)
    whole = (tmp_path / "2.eval").read_bytes()
    with zipfile.ZipFile(tmp_path / "2.eval") as opened:
        place = opened.getinfo("summaries.json").header_offset
    for content in (
        whole[:-30],
        whole[: place + 200] + b"\0\0\0" + whole[place + 203 :],
        b"no zip",
    ):
        (tmp_path / "2.eval").write_bytes(content)
        with input_error("2.eval.*damaged"):
            knobwise.read(tmp_path, accuracy="score_match")


def test_archive_that_unpacks_to_more_than_the_limit_is_refused(monkeypatch):
    monkeypatch.setenv("KNOBWISE_UNPACKED_MB", "0")
    with input_error("unpacks to more than 0 MB"):
        knobwise.read(LOGS / "2.eval", accuracy="score_match")


def text_of_lines(count):
    return "\n".join(f"line {n} of a text" for n in range(count))


@pytest.mark.parametrize("zstandard", [False, True])
def test_no_more_is_unpacked_than_the_limit_whatever_the_archive_names(
    tmp_path, monkeypatch, zstandard
):
    """What the archive names is checked before; here that is left out."""
    monkeypatch.setenv("KNOBWISE_UNPACKED_MB", "1")
    path = tmp_path / "t.eval"
    for count, fits in ((40_000, True), (150_000, False)):
        text = text_of_lines(count)
        assert (len(text) < 1_000_000) == fits
        content = text.encode()
        if zstandard:
            packed = io.BytesIO()
            lines = pl.DataFrame({"text": text.split("\n")})
            lines.write_csv(packed, include_header=False, quote_style="never", compression="zstd")
            content = packed.getvalue()
        method = zipfile.ZIP_STORED if zstandard else zipfile.ZIP_DEFLATED
        with zipfile.ZipFile(path, "w", method) as written:
            written.writestr("summaries.json", content)
        with zipfile.ZipFile(path) as opened:
            member = opened.getinfo("summaries.json")
            if zstandard:
                # Python cannot write such a member
                member.compress_type = inspect_logs.ZSTD
                member.file_size = len(text) + 1
                member.CRC = zlib.crc32(f"{text}\n".encode())
            if fits:
                unpacked = inspect_logs.unpack_member(opened, member, path)
                assert unpacked.decode().rstrip("\n") == text
                # several members share the limit
                with input_error("t.eval: unpacks to more than 1 MB"):
                    inspect_logs.unpack_member(opened, member, path, 500_000)
                continue
            with (
                patch.object(inspect_logs.pl, "read_lines", side_effect=AssertionError),
                input_error("t.eval: unpacks to more than 1 MB"),
            ):
                inspect_logs.unpack_member(opened, member, path)


def test_log_without_samples_is_refused(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(log()))
    with input_error("no samples"):
        knobwise.read(tmp_path / "a.json")
