"""The scripts that people copy, each run as it stands there."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

import polars as pl
import pytest
import torch
from helpers import small_table
from PIL import Image

import knobwise
from knobwise.agents.learning.logged import read_log
from knobwise.envs import builtin_profile

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SMALL = {
    "policy": "utility",
    "policy.hidden": 16,
    "policy.members": 2,
    "optimiser": {"teacher_iterations": 5, "warmup_iterations": 5, "iterations": 5},
}


def example(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_here():
    names = {
        "step_by_hand",
        "torchrl_loop",
        "own_table",
        "own_model",
        "train_with_torchrl_trainer",
        "deploy",
        "rewards",
        "advantages",
        "ppo",
        "serve_http",
    }
    assert {path.stem for path in EXAMPLES} == names


def test_step_by_hand(capsys, tmp_path):
    reward = example("step_by_hand").main()
    printed = capsys.readouterr().out
    assert f"reward {reward:+.2f}" in printed
    assert "budget 40.0 ms" in printed
    assert example("step_by_hand").main(str(tmp_path / "picture.png")) == reward
    picture = Image.open(tmp_path / "picture.png")
    assert min(picture.size) > 300
    assert len(picture.getcolors(1 << 24) or []) > 50  # a drawing, not a blank
    rewards = re.findall(r"ms, reward ([+-][\d.]+)", printed)
    assert rewards == ["+1.00", "-0.20", "+1.00"]  # the second is late
    example("step_by_hand").main(str(tmp_path / "film.gif"))
    with Image.open(tmp_path / "film.gif") as film:
        assert film.n_frames == 6


def test_the_loop_fits_on_a_page_and_learns():
    # lines with code: what explains is free
    source = (ROOT / "examples" / "torchrl_loop.py").read_text()
    code = source.split('"""', 2)[2]
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 60
    torch.manual_seed(1)
    assert example("torchrl_loop").main(warm_up=60, iterations=20) > 0.4


@pytest.mark.campaign
def test_the_loop_is_as_good_as_the_heads_of_the_experiments():
    """`knobwise train experiment=heads policy=independent seeds=[0] own_cost=false` gives 0.478;
    this is held to within a point of it, by half of its iterations."""
    torch.manual_seed(1)
    assert example("torchrl_loop").main(warm_up=300, iterations=150) > 0.468


def test_torchrls_trainer_learns():
    torch.manual_seed(0)
    before, after = example("train_with_torchrl_trainer").main(iterations=100)
    assert after > before + 0.1


def test_ppo_by_torchrl_alone_learns():
    assert len((ROOT / "examples" / "ppo.py").read_text().splitlines()) <= 60
    torch.manual_seed(0)
    before, after = example("ppo").main(iterations=15, contexts=512)
    assert after > before + 0.1


def test_own_table(tmp_path, capsys, monkeypatch):
    module = example("own_table")
    monkeypatch.setattr(module, "builtin_profile", small_table)
    decisions = module.main(*module.builtin_files(tmp_path), **SMALL)
    printed = capsys.readouterr().out
    assert len(decisions) == 3
    assert all(f"ms: {decision}" in printed for decision in decisions)


def test_deploy(tmp_path, capsys):
    knobwise.fit(builtin_profile(), **SMALL).save(tmp_path / "policy.pt")
    on_time = example("deploy").main(str(tmp_path / "policy.pt"), requests=3)
    printed = capsys.readouterr().out
    assert len(on_time) == printed.count(" ms (") == 3
    assert printed.count("(late)") == 3 - sum(on_time)


@pytest.fixture
def served(tmp_path):
    """A server with a controller that reads a text and a number, in processes of its own: a function
    that asks it, the controller, and the folder of the log."""
    samples = pl.DataFrame(
        {"sample_id": range(30), "kind": ["ocr", "form"] * 15, "tokens": range(30)}
    )
    knobs = pl.DataFrame({"crops": [1, 4], "accuracy": [0, 1], "latency_ms": [2.0, 9.0]})
    frame = samples.join(knobs, how="cross")
    options = {name: value for name, value in SMALL.items() if name != "policy"}
    policy = knobwise.fit(frame, "auto", policy="independent", **options)
    controller = policy.agent.export(tmp_path / "controller.npz")
    command = [sys.executable, "examples/serve_http.py", str(tmp_path / "controller.npz")]
    command += ["0", "2", str(tmp_path / "log")]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=pipe, text=True)
    try:
        # the first line says where it listens
        lines = iter(process.stderr.readline, "")
        (address,) = next(filter(None, (re.findall(r"http://[\d.:]+", line) for line in lines)))
        opener = build_opener(ProxyHandler({}))

        def ask(path, body=None):
            try:
                with opener.open(Request(address + path, body), timeout=30) as answer:
                    return answer.status, json.load(answer)
            except HTTPError as error:
                with error:
                    return error.code, json.load(error)

        yield ask, controller, tmp_path / "log"
    finally:
        process.send_signal(signal.SIGINT)
        # the pipe is closed once the workers have ended too
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")


def test_serve_http(served):
    ask, controller, _ = served
    status, health = ask("/health")
    assert (status, health["controller"]) == (200, controller.digest)
    assert [column[0] for column in health["columns"]] == ["kind", "tokens"]
    for tokens in (0, 29):
        features = {"kind": "form", "tokens": tokens}
        body = json.dumps({**features, "budget_ms": 5}).encode()
        assert ask("/decide", body) == (200, controller.decide(features, 5))
    block = json.dumps({"features": [1, 0, 0, 3], "budget_ms": 5}).encode()
    assert ask("/decide", block)[0] == 200
    for body, field in (
        ({"kind": "form", "tokens": 3}, "budget_ms"),
        ({"kind": "form", "budget_ms": 5}, "tokens"),
        ({"kind": "form", "tokens": "x", "budget_ms": 5}, "tokens"),
        ({"kind": "form", "tokens": 3, "budget_ms": -5}, "-5"),
        ({"kind": "form", "tokens": 3, "budget_ms": "soon"}, "str"),
        ({"features": [1], "budget_ms": 5}, "features"),
        ([1], ""),
        (None, ""),
    ):
        status, answer = ask("/decide", json.dumps(body).encode())
        assert status == 400
        assert field in answer["error"]
    assert ask("/decide", b"{")[0] == 400
    assert ask("/decide", b"[" * 100_000)[0] == 400


def test_serve_http_answers_and_takes_labels(served):
    ask, controller, log = served
    ids = []
    for tokens in range(6):
        body = {"kind": "form", "tokens": tokens, "question": f"number {tokens}", "budget_ms": 50}
        status, answer = ask("/answer", json.dumps(body).encode())
        assert (status, answer["answer"]) == (200, f"the answer to number {tokens}")
        assert answer["on_time"] is True
        ids.append(answer["id"])
        label = json.dumps({"id": answer["id"], "accuracy": tokens / 10}).encode()
        assert ask("/label", label) == (200, {})
    for path, body, field in (
        ("/answer", {"kind": "form", "budget_ms": 5}, "tokens"),
        ("/answer", {"kind": "form", "tokens": 3}, "budget_ms"),
        ("/answer", {"kind": "form", "tokens": 3, "budget_ms": 1e31}, "1e+31"),
        ("/answer", {"kind": "form", "tokens": 3, "budget_ms": 10**400}, "large"),
        ("/label", {"id": ids[0], "accuracy": 100}, "100"),
        ("/label", {"id": ids[0]}, "accuracy"),
        ("/label", {"accuracy": 1}, "id"),
        ("/label", [], "accuracy"),
    ):
        status, answer = ask(path, json.dumps(body).encode())
        assert status == 400
        assert field in answer["error"]
    read = read_log(log, controller)
    assert not read.aside
    assert {row["id"]: row["accuracy"] for row in read.rows} == {
        name: tokens / 10 for tokens, name in enumerate(ids)
    }


def test_serve_http_needs_no_torch():
    code = "import sys; sys.path.insert(0, 'examples'); import serve_http; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "uvicorn" in done.stdout.split()
    assert "torch" not in done.stdout.split()
