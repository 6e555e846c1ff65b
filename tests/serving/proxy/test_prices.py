"""By price instead of time: budgets in US dollars for each request, or for the mean of all; what
answers cost; and an update from that log."""

import json
import math
from collections import Counter
from contextlib import chdir
from unittest.mock import Mock

import pytest
from commands import words_of
from proxied import knobs_of, serving
from scripted_endpoint import DONE, STOP, WORD, Reply, chat, event
from scripted_endpoint import USAGE as COUNTED

from knobwise.__main__ import main
from knobwise.agents import NumpyController
from knobwise.agents.deployed.promise import Promised
from knobwise.serving.proxy import server
from knobwise.serving.proxy.knob_fields import KnobFields
from knobwise.serving.proxy.settings import ServeRun
from knobwise.serving.proxy.walk import Choice, Walk
from knobwise.serving.runtime import Runtime
from knobwise.testbeds.simulated_routing import PRICES, evaluations

TRAIN = words_of(
    "train profile=table profile.path=evaluations.csv profile.id=id profile.features=[prompt]",
    "profile.accuracy=score profile.latency=usd profile.unit=USD policy.hidden=16",
    "optimiser.teacher_iterations=60 optimiser.pretrain_iterations=60 optimiser.iterations=0",
    "policy.fold_networks=2 baselines=false seeds=[0] tracking=disabled",
)
KINDS = {
    "each": words_of("policy=utility budgets_ms=[0.00002,0.0003] name=each"),
    "mean": words_of("policy=utility budget=mean budgets_ms=[0.00002,0.0001] name=mean"),
}
USAGE = {"stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of two runs, one for each kind of budget, and their questions."""
    folder = tmp_path_factory.mktemp("prices")
    frame = evaluations(160)
    frame.write_csv(folder / "evaluations.csv")
    for factor in (1, 3):
        lines = []
        for model, (read, written) in PRICES.items():
            price = {"input": factor * read, "output": factor * written}
            lines.append(f"{model}: {json.dumps(price)}\n")
        (folder / f"prices{factor}.yaml").write_text("".join(lines))
    with chdir(folder):
        for words in KINDS.values():
            assert main([*TRAIN, *words]) == 0
    return folder, frame["prompt"].unique(maintain_order=True).to_list()


def controller_of(folder, kind):
    return NumpyController.load(folder / f"runs/controller/{kind}/controller.npz")


@pytest.fixture
def words(endpoint):
    return f"endpoint={endpoint.url}", "timeout_s=5"


def asked(client, question, **fields):
    return client.chat(messages=[{"role": "user", "content": question}], **fields)


def rows_in(log):
    lines = []
    for path in sorted(log.glob("requests-*.jsonl")):
        lines += path.read_text().splitlines()
    return [json.loads(line) for line in lines]


def price_by_hand(model, usage, factor=1):
    read, written = PRICES[model]
    cost = usage["prompt_tokens"] * read + usage["completion_tokens"] * written
    return factor * cost / 1e6


def test_a_mean_budget_is_served_at_its_price(trained, words, tmp_path):
    folder, questions = trained
    words = f"checkpoint={folder}/runs/controller/mean", "prices=prices1.yaml", *words
    spent = 0.0
    with serving(folder, *words, f"log={tmp_path}") as client:
        controller = controller_of(folder, "mean")
        chosen = []
        for question in questions[:12]:
            answer = asked(client, question, budget_usd=0.0001)
            chosen.append(knobs_of(answer))
            assert float(answer.headers["x-knobwise-budget-usd"]) == 0.0001
            spent += price_by_hand(chosen[-1]["model"], json.loads(answer.content)["usage"])
        # the static mix decides, whose turns begin anywhere, and keeps its shares from there on
        places = [controller.configuration(c) for c in range(len(controller.configurations))]
        counts = Counter(map(places.index, chosen))
        for index, count in counts.items():
            assert abs(count - 12 * controller.mean.share_of(0.0001, index)) < 2
        rows = rows_in(tmp_path)
        assert sum(row["usd"] for row in rows) == pytest.approx(spent)
        assert [row["total_ms"] for row in rows] == [row["usd"] for row in rows]
        assert {row["unit"] for row in rows} == {"USD"}
        assert client.metric("usd_total") == pytest.approx(spent)
        # the largest that was calibrated, where a request has none
        assert asked(client, questions[0]).headers["x-knobwise-budget-usd"] == "0.0001"
        # a budget of time is no budget here, and a mean one must have been calibrated
        for fields, name in (({"budget_ms": 800}, b"budget_usd"), ({"budget_usd": 1}, b"0.0001")):
            answer = asked(client, questions[0], **fields)
            assert answer.status == 400
            assert name in answer.content
        # in the unit and by the name that a client knows
        message = json.loads(answer.content)["error"]["message"]
        assert message.startswith("budget_usd: ")
        assert "2e-05, 0.0001 USD" in message
        assert b"budget_usd" in asked(client, questions[0], budget_usd="x").content
        assert client.json("/health")[1]["unit"] == "USD"


def test_what_an_answer_cost_is_known_where_its_tokens_are(trained, words, tmp_path):
    folder, questions = trained
    words = f"checkpoint={folder}/runs/controller/each", "prices=prices1.yaml", *words
    with serving(folder, *words, f"log={tmp_path}", "tracker=false") as client:
        answer = asked(client, questions[0], stream=True, **USAGE)
        asked(client, questions[0], stream=True)
        asked(client, questions[0], budget_usd=1e-9)
        known, unknown, dear = rows_in(tmp_path)
        last = answer.content.split(b"data: ")[-2]
        usage = json.loads(last)["usage"]
        assert known["usd"] == pytest.approx(price_by_hand(knobs_of(answer)["model"], usage))
        assert known["met"]
        assert (unknown["usd"], unknown["answer_ms"], unknown["total_ms"]) == (None, None, None)
        # nothing is so cheap
        assert not dear["met"]
        assert (client.metric("unpriced_total"), client.metric("late_total")) == (1, 1)


@pytest.mark.parametrize(("kind", "largest"), [("each", 0.0003), ("mean", 0.0001)])
def test_what_costs_exactly_the_default_budget_keeps_it(trained, kind, largest):
    controller = controller_of(trained[0], kind)
    # which float32 has as a little less, or more
    assert controller.trained_ms.max() != largest
    budget = server._default_budget(ServeRun(), controller)
    assert budget == largest
    assert controller.budgets.met(largest, budget)


@pytest.mark.parametrize("kind", ["each", "mean"])
def test_decisions_take_budgets_in_their_unit_alone(trained, kind, tmp_path):
    folder, questions = trained
    words = f"checkpoint={folder}/runs/controller/{kind}", f"log={tmp_path}"
    with serving(folder, *words) as client:
        about = {"prompt": questions[0]}
        status, knobs = client.json("/decide", {**about, "budget_usd": 0.00002})
        assert status == 200
        assert knobs["model"] in PRICES
        # 0.8 ms is not 0.8 dollars
        for fields in ({"budget_ms": 0.8}, {"budget_ms": 0.8, "budget_usd": 0.00002}):
            status, answer = client.json("/decide", {**about, **fields})
            assert status == 400
            assert "budget_ms" in answer["error"]["message"]
            assert "budget_usd" in answer["error"]["message"]


def test_what_passes_unchanged_is_paid_too(trained, scripted, tmp_path):
    folder, questions = trained
    words = f"checkpoint={folder}/runs/controller/each", "prices=prices1.yaml"
    with serving(folder, *words, f"endpoint={scripted.url}", f"log={tmp_path}") as client:

        def unchanged(reply, **fields):
            """An effort that was not measured, so that nothing is decided."""
            scripted.answer = lambda path, body: reply
            fields = {"model": "small", "reasoning_effort": "xhigh", **fields}
            answer = asked(client, questions[0], **fields)
            assert answer.headers["x-knobwise-unchanged"] == "true"
            return client.metric("usd_total"), client.metric("unpriced_total")

        # 10 tokens were read and 5 written
        price = price_by_hand("small", COUNTED)
        assert unchanged(Reply(chat())) == (pytest.approx(price), 0)
        events = [WORD, STOP, event({"choices": [], "usage": COUNTED}), DONE]
        assert unchanged(Reply(events), stream=True) == (pytest.approx(2 * price), 0)
        # without tokens, or the price of the model, nobody knows what an answer cost
        assert unchanged(Reply([WORD, STOP, DONE]), stream=True) == (pytest.approx(2 * price), 1)
        assert unchanged(Reply(chat()), model="huge") == (pytest.approx(2 * price), 2)
        # an error costs nothing
        assert unchanged(Reply({"error": {}}, 400)) == (pytest.approx(2 * price), 2)
    assert not rows_in(tmp_path)


def test_a_cost_that_is_not_known_neither_keeps_nor_breaks_a_promise(trained, monkeypatch):
    folder, questions = trained
    runtime = Runtime(controller_of(folder, "each"))
    monkeypatch.setattr(NumpyController, "promised", lambda *about: Promised(0.0003, 0.9))
    metrics = Mock()
    walk = Walk(runtime, KnobFields(runtime.configurations), None, metrics, budget=0.0003)
    request = runtime.begin(0.0003)
    decision = runtime.decide(request, questions[0])
    choice = Choice(decision, decision.configuration, {}, allowed=None, learns=True)
    for usd in (math.nan, 0.0002, 0.0004):
        walk.finish(choice, usd=usd)
    kept = [call.args[2] for call in metrics.watch_promise.call_args_list]
    assert kept == [True, False]
    # nothing is promised of what decides where features fail
    failed = runtime.fail(request)
    assert (decision.promised.share, failed.promised.share) == (0.9, 0.0)
    walk.finish(choice._replace(decision=failed), usd=0.0004)
    assert metrics.watch_promise.call_count == 2


def test_the_tracker_follows_prices_and_an_update_learns_from_them(
    trained, words, tmp_path, capsys
):
    folder, questions = trained
    log = tmp_path / "log"
    words = f"checkpoint={folder}/runs/controller/each", "prices=prices3.yaml", *words
    with serving(folder, *words, f"log={log}", "explore=0.3") as client:
        reasons = []
        for question in questions[:80]:
            answer = asked(client, question, budget_usd=0.0003)
            reasons.append(answer.headers["x-knobwise-reason"])
            body = {"request_id": answer.headers["x-knobwise-request-id"], "accuracy": 1}
            assert client.json("/v1/feedback", body)[0] == 200
        # a share of .3 of 80; the others are decided alike
        assert 8 <= reasons.count("explored") <= 42
        assert client.metric("explored_total") == reasons.count("explored")
        assert {*reasons} <= {"explored", "policy", "guard"}
        # three times the price in the profile
        assert client.metric("latency_level") == pytest.approx(3, rel=0.2)
    with chdir(folder):
        out = tmp_path / "updated"
        update = f"update checkpoint=runs/controller/each log={log} out={out}"
        assert main(update.split()) == 0
        assert main(["inspect", f"log={log}"]) == 0
    # of costs, which have no length
    printed = capsys.readouterr().out
    assert printed.count("as much as expected") >= 2
    assert "the new costs" in printed
    for words in ("as long as", "times", "latencies", "on time"):
        assert words not in printed
    facts = json.loads((out / "versions/0001/update.json").read_bytes())
    assert facts["requests"] == 80


@pytest.mark.parametrize(
    ("kind", "option", "field"),
    [
        ("mean", "explore=0.1", "explore"),
        ("mean", "budget_ms=0.5", "budget_ms"),
        ("mean", "prices=none.yaml", "none.yaml"),
        ("each", "prices=half.yaml", "large"),
        ("each", "budget_ms=0", "USD"),
    ],
)
def test_mistakes(trained, kind, option, field, words, capsys):
    folder, _ = trained
    (folder / "half.yaml").write_text("small: {input: 1, output: 1}\nmedium: {input: 1, output: 1}")
    with chdir(folder):
        assert main(["serve", f"checkpoint=runs/controller/{kind}", *words, option]) == 2
    assert field in capsys.readouterr().err
