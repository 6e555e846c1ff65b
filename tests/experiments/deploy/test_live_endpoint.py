"""`evaluate live=true` in front of models behind an endpoint, against a real server on this machine."""

import json
import shlex
import time
from pathlib import Path

import polars as pl
import pytest
from commands import OPTIMISER, launch, read_json, words_of
from scripted_endpoint import (
    DONE,
    HEAD,
    ROLE,
    USAGE,
    Reply,
    ScriptedEndpoint,
    chunk,
    event,
    profile_words,
)

import knobwise
from knobwise.__main__ import main
from knobwise.experiments.deploy import live
from knobwise.experiments.settings.measured_with import unlike_measuring
from knobwise.profiling.endpoint.model import EndpointModel
from knobwise.profiling.endpoint.settings import EndpointOptions
from knobwise.profiling.measuring.adaptive_model import Request
from knobwise.profiling.measuring.settings import VLMProfileConfig
from knobwise.serving import AdaptiveModel

TRAIN = words_of(
    "train name=r profile=table profile.path=out/table.parquet profile.features=[prompt]",
    OPTIMISER,
    "optimiser.iterations=4 policy=utility policy.fold_networks=2 baselines=false seeds=[0]",
)
LIVE = words_of("""
    evaluate live=true checkpoint=runs/controller/r model=openai data=q.jsonl profile=table
    profile.path=out/table.parquet profile.features=[prompt] json=live.json
""")
MEASURED = {
    "knobs.metric": "exact",
    "knobs.prompt": "Please: {question}",
    "knobs.max_new_tokens": 64,
    "extra_body": "{top_k: 1}",
    "messages": "polite:messages",
}
POLITE = """
def messages(question, knobs):
    return [{"role": "system", "content": "Be polite."}, {"role": "user", "content": question}]
"""


class Filtering(ScriptedEndpoint):
    """Both models are right; the answers of `small` end by a filter, and those of `large` later.

    Attributes:
        faults: what the next requests get instead of an answer.
    """

    def __init__(self):
        super().__init__()
        self.faults = []
        self.answer = self._answer

    def _answer(self, path, body):
        if path.endswith("/models"):
            return Reply({"data": [{"id": "small"}, {"id": "large"}]})
        if self.faults:
            return self.faults.pop()
        filtered = body["model"] == "small"
        number = body["messages"][-1]["content"].split()[-1].rstrip("?")
        finish = chunk({}, "content_filter" if filtered else "stop")
        count = event({**HEAD, "choices": [], "usage": USAGE})
        later = [] if filtered else [0.01]
        return Reply([ROLE, *later, chunk({"content": number}), finish, count, DONE])


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server, and in the current folder a controller for it."""
    with pytest.MonkeyPatch.context() as patch, Filtering() as server:
        patch.chdir(tmp_path_factory.mktemp("live"))
        Path("polite.py").write_text(POLITE)
        rows = [{"id": f"q{i}", "question": f"Is it {i}?", "answer": str(i)} for i in range(40)]
        pl.DataFrame(rows).write_ndjson("q.jsonl")
        launch(profile_words(server, "{model: [small, large]}", **MEASURED))
        launch(TRAIN)
        yield server


@pytest.mark.parametrize(
    "fault",
    [
        Reply({"error": {"message": "slow down"}}, 429, retry_after_ms="200"),
        Reply({"error": {"message": "busy"}}, 500),
        Reply(None),
    ],
    ids=["429", "500", "cut"],
)
def test_no_request_pays_for_a_rate_limit_or_for_attempts_that_failed(server, monkeypatch, fault):
    monkeypatch.setattr("knobwise.profiling.endpoint.pauses.FIRST_WAIT_S", 0.2)
    options = EndpointOptions(endpoint=server.url)
    endpoint = EndpointModel(options, {"model": ["small", "large"]}, 32)
    try:
        model = AdaptiveModel(endpoint, knobwise.load("runs/controller/r"))
        server.faults.append(fault)
        start = time.perf_counter()
        result = model.answer(Request(None, "Is it 7?"), 60_000.0)
        passed_ms = 1e3 * (time.perf_counter() - start)
    finally:
        endpoint.close()
    assert (result.answer.text, result.answer.extra["attempts"]) == ("7", 2)
    # it waited for 200 ms at least
    assert result.answer.uncounted_ms >= 200
    assert result.total_ms <= passed_ms - 200


def test_answers_that_a_filter_ended_are_wrong_live_as_in_the_profile(server, monkeypatch):
    monkeypatch.setattr(live, "WARM_UP", 1)
    words = [f"{name}={value}" for name, value in MEASURED.items()]
    launch(LIVE, f"endpoint={server.url}", words, "stream.requests=6")
    rows = {row["policy"]: row["accuracy"] for row in read_json("live.json")["rows"]}
    assert (rows["cheapest"], rows["most_accurate"]) == (0, 1)


def said_of_measuring(capsys, *words):
    """What is said of how the profile was measured, before nothing answers."""
    capsys.readouterr()
    assert main([*LIVE, "endpoint=http://127.0.0.1:1/v1", *words]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert "nothing answers" in lines[-1]
    return [line for line in lines if "was measured with" in line]


def test_what_is_asked_otherwise_than_in_measuring_is_said_before_anything_is_asked(server, capsys):
    lines = said_of_measuring(capsys)
    # each ends with what to give, as a shell takes it
    advice = [word for line in lines for word in shlex.split(line.rpartition("; give ")[2])]
    assert advice == [
        "knobs.metric=exact",
        "knobs.prompt=Please: {question}",
        "extra_body={top_k: 1, max_tokens: 64}",
        "messages=polite:messages",
    ]
    assert said_of_measuring(capsys, *advice) == []
    # the length is that of knobs.max_new_tokens, too
    (line,) = said_of_measuring(capsys, *advice[:2], "knobs.max_new_tokens=64", advice[3])
    assert line.endswith("'extra_body={top_k: 1}'")


def test_what_a_model_without_an_endpoint_is_asked_otherwise_is_said(tmp_path):
    path = str(tmp_path / "table.parquet")
    assert unlike_measuring(path, VLMProfileConfig(), None) == []
    config = {"max_new_tokens": 64, "metric": "anls", "prompt": "{question}{choices}"}
    (tmp_path / "profile.json").write_text(json.dumps({"model": "m", "config": config}))
    metric, length = unlike_measuring(path, VLMProfileConfig(), None)
    assert "knobs.metric=anls" in metric
    assert "knobs.max_new_tokens=64" in length
    same = VLMProfileConfig(max_new_tokens=64, metric="anls")
    assert unlike_measuring(path, same, None) == []
