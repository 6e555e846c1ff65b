"""From a CSV with prompts to decisions: train, export, decide by text, serve, log."""

import copy
import json
import subprocess
import sys
from contextlib import chdir

import numpy as np
import polars as pl
import pytest
from commands import mistake, read_json, words_of

import knobwise
from knobwise.__main__ import main
from knobwise.agents import NumpyController
from knobwise.agents.deployed.promise import POLICY
from knobwise.agents.training.checkpoint import Loaded
from knobwise.experiments.inspection.logs import inspect_log
from knobwise.serving.knob_policy import KnobPolicy
from knobwise.serving.proxy.server import _default_budget
from knobwise.serving.proxy.settings import ServeRun

RUN = "runs/controller/texts"
ADD = "please add the numbers {} and {} for me"
POEM = "write a short poem about the sea with {} lines and {} ships"
FOREIGN = "Сколько будет два плюс два, и почему это так сложно?"
CHAT = [{"role": "system", "content": POEM}, {"role": "user", "content": ADD.format(3, 4)}]
TRAIN = words_of(
    "train profile=table profile.path=log.csv profile.features=auto policy=utility name=texts",
    "optimiser.teacher_iterations=150 optimiser.pretrain_iterations=150 optimiser.iterations=0",
    "policy.fold_networks=2 baselines=false seeds=[0] tracking=disabled budgets_ms=[20,40]",
)


def frame_of(samples=120):
    """A model that can add and one that writes poems; the prompt says which is needed."""
    draw = np.random.default_rng(0)
    rows = []
    for i in range(samples):
        poem = bool(draw.random() < 0.5)
        prompt = (POEM if poem else ADD).format(*draw.integers(100, size=2))
        for model in ("adder", "poet"):
            right = (model == "poet") == poem
            about = {"sample_id": i, "prompt": prompt, "tokens": int(draw.integers(9))}
            time = {"latency_ms": 10 + draw.random()}
            rows.append({**about, "model": model, "accuracy": float(right), **time})
    frame = pl.DataFrame(rows)
    return frame.with_columns(pl.col("tokens").first().over("sample_id"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    frame_of().write_csv(folder / "log.csv")
    with chdir(folder):
        assert main(TRAIN) == 0
    return folder


def test_a_trained_policy_decides_by_the_text(folder):
    controller = NumpyController.load(folder / RUN / "controller.npz")
    assert controller.guard.deployed.all()
    policy = knobwise.load(folder / RUN)
    wanted = {"adder": [ADD.format(3, 4), CHAT, json.dumps(CHAT)], "poet": [POEM.format(5, 6)]}
    for model, texts in wanted.items():
        for text in texts:
            request = {"prompt": text, "tokens": 3}
            assert controller.decide(request, 20.0) == {"model": model}
            assert policy.decide(request, 20.0) == {"model": model}
            # the numbers of the text, as a log has them
            block = controller.texts["prompt"](text)
            assert controller.decide(request | {"prompt": block}, 20.0) == {"model": model}
            assert controller.decide(request | {"prompt": block.tolist()}, 20.0) == {"model": model}


def test_a_text_unlike_training_gets_what_static_chooses(folder):
    controller = NumpyController.load(folder / RUN / "controller.npz")
    for text in (FOREIGN, ADD * 20):
        for budget_ms in (12.0, 20.0, 40.0):
            request = {"prompt": text, "tokens": 3}
            static = controller.static.single(budget_ms)
            assert controller.decide_index(request, budget_ms) == static
            blocks = {"features": np.array([3.0]), "prompt": controller.texts["prompt"](text)}
            drift = (np.zeros(2), 1.0)
            assert controller.decide_expected(blocks, budget_ms, drift)[0] == static
            many = {name: block[None] for name, block in blocks.items()}
            assert controller.choose(many, np.array([budget_ms])) == [static]
    reason = knobwise.load(folder / RUN).decide(request, 20.0, explain=True).reason
    assert "unlike" in reason


@pytest.mark.parametrize("value", [3, {"a": 1}, [{"role": "user"}], ["a", 1]])
def test_what_is_no_text_is_refused(folder, value):
    controller = NumpyController.load(folder / RUN / "controller.npz")
    with pytest.raises(ValueError, match="prompt"):
        controller.decide({"prompt": value, "tokens": 3}, 20.0)
    with pytest.raises(ValueError, match="prompt"):
        controller.decide({"tokens": 3}, 20.0)


ALONE = """
import sys
sys.path.insert(0, sys.argv[1])
from policy import NumpyController
controller = NumpyController.load(sys.argv[1] + "/controller.npz")
print(controller.decide({"prompt": sys.argv[2], "tokens": 3}, 20.0)["model"])
assert not {"torch", "sklearn", "scipy", "knobwise", "polars"} & set(sys.modules)
"""


def test_the_exported_policy_needs_numpy_alone(folder):
    words = [sys.executable, "-P", "-c", ALONE, str(folder / RUN), POEM.format(1, 2)]
    environment = {"PYTHONPATH": "", "PATH": ""}
    printed = subprocess.check_output(words, cwd=folder, env=environment, text=True)
    assert printed.split() == ["poet"]


def test_decide_and_evaluate_read_the_texts(folder, capsys):
    requests = pl.DataFrame(
        {"sample_id": ["a", "b", "c"], "prompt": [ADD, POEM, FOREIGN], "tokens": [1, 2, 3]}
    )
    requests.write_csv(folder / "requests.csv")
    with chdir(folder):
        words = ["checkpoint=" + RUN, "requests=requests.csv", "budget_ms=20", "out=d.csv"]
        assert main(["decide", *words]) == 0
        captured = capsys.readouterr()
        assert "1 request with a text unlike" in captured.err
        assert pl.read_csv("d.csv")["model"].to_list()[:2] == ["adder", "poet"]
        requests.drop("prompt").write_csv("without.csv")
        words[1] = "requests=without.csv"
        assert "prompt" in mistake(["decide", *words], capsys)
        # the run's own profile, read anew
        assert main(["evaluate", "checkpoint=" + RUN, "baselines=false"]) == 0
        assert "learned controller" in capsys.readouterr().out
        assert "no graph" in mistake(["export", "checkpoint=" + RUN, "onnx=true", "out=x"], capsys)


def promising(folder):
    """The policy of the run with a promise of .95: at 20 ms, which has 15 left for the answer, it
    decides itself, and at 40 a single model."""
    agent = copy.deepcopy(knobwise.load(folder / RUN).agent)
    rule = {"promise": 0.95, "kept": True, "probability": 0.0}
    agent.calibration.promise = [
        rule | {"budget_ms": 20.0, "planned_ms": 15.0, "configuration": POLICY},
        rule | {"budget_ms": 40.0, "planned_ms": 30.0, "configuration": 1},
    ]
    agent.calibration.guard = []
    return agent


def promised(folder, capsys, *requests, status=0):
    """What `decide` says is promised of requests, (prompt, budget) each."""
    promising(folder).export(folder / "promised.npz")
    frame = pl.DataFrame(requests, schema=["prompt", "budget_ms"], orient="row")
    frame.with_columns(tokens=3).write_csv(folder / "promised.csv")
    with chdir(folder):
        words = ["checkpoint=promised.npz", "requests=promised.csv", "out=d.csv"]
        assert main(["decide", *words]) == status
        said = capsys.readouterr().err
        assert ("and promised nothing" in said) == (FOREIGN in dict(requests))
        return pl.read_csv("d.csv")["promised"].to_list()


def test_at_whole_budgets_below_that_of_the_rule_nothing_is_promised(folder, capsys):
    budgets = (14.0, 16.0, 20.0, 35.0, 40.0)
    found = promised(folder, capsys, *((ADD, budget_ms) for budget_ms in budgets))
    assert found == [0, 0, 0.95, 0, 0.95]


def test_a_budget_that_another_ones_promise_goes_on_to_counts_as_tested(folder, capsys):
    """No rule passes at 40 ms: that of 20 goes on."""
    agent = promising(folder)
    agent.calibration.promise[1]["kept"] = False
    KnobPolicy(Loaded(agent, "texts", "", {})).save(folder / "goes_on.pt")
    controller = agent.export(folder / "goes_on.npz")
    assert controller.promise.budgets_ms.tolist() == [20.0]
    assert _default_budget(ServeRun(checkpoint="goes_on.npz"), controller) == 40.0
    frame = pl.DataFrame({"prompt": ADD, "tokens": 3, "budget_ms": [20.0, 40.0, 41.0]})
    frame.write_csv(folder / "r.csv")
    with chdir(folder):
        assert main(["decide", "checkpoint=goes_on.npz", "requests=r.csv", "out=d.csv"]) == 0
        assert "1 budget outside 20 to 40 ms" in capsys.readouterr().err
        assert pl.read_csv("d.csv")["promised"].to_list() == [0.95] * 3
        words = ["profile=table", "profile.path=log.csv", "profile.features=auto"]
        assert main(["export", "checkpoint=goes_on.pt", "out=goes_on", *words]) == 0
        assert read_json("goes_on/export.json")["compared_on"]["budgets_ms"] == [20.0, 40.0]


def test_a_calibrated_budget_is_not_outside_of_them_as_it_is_printed(folder, capsys):
    """float32 has 13.3 as 13.30000019, and 40.1 as 40.09999847."""
    agent = promising(folder)
    for row, budget in zip(agent.calibration.promise, (13.3, 40.1), strict=True):
        row["budget_ms"] = float(np.float32(budget))
    agent.export(folder / "printed.npz")
    for budgets, warning in (([13.3, 40.1], ""), ([13.29, 40.11], "2 budgets outside")):
        frame = pl.DataFrame({"prompt": ADD, "tokens": 3, "budget_ms": budgets})
        frame.write_csv(folder / "printed.csv")
        with chdir(folder):
            words = ["checkpoint=printed.npz", "requests=printed.csv", "out=d.csv"]
            assert main(["decide", *words]) == 0
        said = capsys.readouterr().err
        assert warning in said
        assert ("outside" in said) == bool(warning)


def test_nothing_is_promised_of_a_text_unlike_those_of_training(folder, capsys):
    requests = (FOREIGN, 20.0), (ADD, 20.0), (FOREIGN, 40.0), (POEM, -1.0), (ADD, 40.0)
    # the budget below zero is refused
    assert promised(folder, capsys, *requests, status=3) == [0, 0.95, 0, 0.95]
    policy = KnobPolicy(Loaded(promising(folder), "texts", "", {}))
    for text, said in ((FOREIGN, "a text is unlike"), (ADD, "at least 95%")):
        for budget_ms in (20.0, 40.0):
            request = {"prompt": text, "tokens": 3}
            assert policy.decide(request, budget_ms, explain=True).reason.startswith(said)


def test_requests_unlike_training_are_counted_and_logged(folder):
    policy = knobwise.load(folder / RUN)

    def call(request, model):
        return model

    serve = knobwise.wrap(
        call, policy, features=lambda text: {"prompt": text, "tokens": 3}, log=folder / "log"
    )
    for text in [ADD, POEM, FOREIGN, FOREIGN]:
        serve(text, budget_ms=1000.0)
    assert serve.unlike == 2
    assert inspect_log(str(folder / "log"))["unlike"] == 2
    # no text is in the log
    for path in (folder / "log").glob("*.jsonl"):
        assert "poem" not in path.read_text()


def test_a_policy_of_texts_alone_takes_a_request_as_it_is(folder):
    optimiser = {"teacher_iterations": 20, "pretrain_iterations": 20, "iterations": 0}
    options = {"policy": "utility", "optimiser": optimiser, "budgets_ms": [20.0]}
    policy = knobwise.fit(frame_of(60), ["prompt"], **options)
    serve = knobwise.wrap(lambda request, model: request, policy)
    assert serve(ADD, budget_ms=20.0) == ADD
    assert policy.decide(ADD, 20.0) == policy.decide({"prompt": ADD}, 20.0)
    path = folder / "alone.pt"
    policy.save(path)
    again = knobwise.load(path)
    assert again.agent.decider.digest == policy.agent.decider.digest


def test_numbers_outside_the_range_of_training_are_counted_and_named(folder, capsys):
    """An unseen word is none of them, nor what is missing."""
    agent = promising(folder)
    sizes = agent.decider.feature_sizes
    width = sum(sizes.values())
    low, high = np.full(width, -np.inf, np.float32), np.full(width, np.inf, np.float32)
    # the block of named columns holds nothing but this one
    assert sizes["features"] == 1
    place = 0 if next(iter(sizes)) == "features" else sizes["prompt"]
    low[place], high[place] = 0.5, 9.0
    agent.calibration.ranges = {"low": low, "high": high, "margin": np.array(0.1)}
    agent.export(folder / "ranged.npz")
    tokens = [3, 9000, 4, 0]
    frame = pl.DataFrame({"prompt": [ADD, ADD, FOREIGN, ADD], "tokens": tokens, "budget_ms": 20.0})
    frame.write_csv(folder / "ranged.csv")
    with chdir(folder):
        assert main(["decide", "checkpoint=ranged.npz", "requests=ranged.csv", "out=d.csv"]) == 0
        said = capsys.readouterr().err
        assert "2 requests outside" in said
        assert "tokens (2)" in said
        assert "1 request with a text unlike" in said
        assert pl.read_csv("d.csv")["promised"].to_list() == [0.95, 0, 0, 0]
