"""From a table of evaluations with prompts and prices to a proxy: which model is asked follows from
the text of a request, its deadline, and what it may cost."""

import json
import warnings
from contextlib import chdir

import pytest
from commands import words_of
from proxied import knobs_of, serving
from scripted_endpoint import Reply, chat

from knobwise.__main__ import main
from knobwise.agents import NumpyController
from knobwise.testbeds.simulated_routing import PRICES, evaluations

TRAIN = words_of(
    "train profile=table profile.path=evaluations.csv profile.id=id profile.features=[prompt]",
    "profile.accuracy=score profile.latency=seconds profile.unit=s profile.costs=[usd]",
    "budget.limits={usd:0.0003} budgets_ms=[400,2000] policy=utility policy.hidden=16",
    "optimiser.teacher_iterations=100 optimiser.pretrain_iterations=150 optimiser.iterations=0",
    "policy.fold_networks=2 baselines=false seeds=[0] tracking=disabled name=routing",
)
UNLIKE = "Сколько будет два плюс два, и почему это так сложно?"


@pytest.fixture(scope="module")
def routing(tmp_path_factory):
    """The folder of a run on simulated evaluations, and their questions."""
    folder = tmp_path_factory.mktemp("routing")
    frame = evaluations(200)
    frame.write_csv(folder / "evaluations.csv")
    with chdir(folder):
        assert main(TRAIN) == 0
    return folder, frame["prompt"].unique(maintain_order=True).to_list()


@pytest.fixture
def controller(routing):
    return NumpyController.load(routing[0] / "runs/controller/routing/controller.npz")


def within(controller, text, limit):
    """The configurations whose price is expected to keep a limit."""
    blocks = {"prompt": controller.texts["prompt"](text)[None]}
    allowed = controller.allowed(blocks, 1, {"usd": limit})[0][0]
    return [controller.configuration(index) for index in allowed.nonzero()[0]]


@pytest.mark.parametrize("limit", [3e-4, 3e-5, 1e-9])
def test_decisions_by_text_keep_limits(routing, controller, limit):
    with warnings.catch_warnings():
        # a limit that was not declared, or that nothing keeps, is said
        warnings.simplefilter("ignore", UserWarning)
        for text in (*routing[1][:20], UNLIKE):
            for budget_ms in (300.0, 400.0, 2000.0):
                about = {"prompt": text}, budget_ms, None, {"usd": limit}
                chosen = controller.decide(*about)
                assert chosen in within(controller, text, limit)
                assert controller.configuration(controller.decide_expected(*about)[0]) == chosen
                assert controller.decide_index(*about) == controller.choose(
                    {"prompt": controller.texts["prompt"](text)[None]},
                    [budget_ms],
                    cost_limits={"usd": limit},
                )


def test_a_text_unlike_training_gets_static_within_the_limit(controller):
    (index,) = {controller.decide_index({"prompt": UNLIKE}, 2000.0)}
    static = controller.static_expected(
        {"prompt": controller.texts["prompt"](UNLIKE)}, 2000.0, None, None
    )
    assert index == static[0]


def test_the_proxy_asks_the_model_for_the_text_and_the_price(routing, controller, endpoint):
    folder, questions = routing
    words = "checkpoint=runs/controller/routing", f"endpoint={endpoint.url}", "tracker=false"
    with serving(folder, *words, "timeout_s=5") as client:
        for question in questions[:10]:
            # what a system says is not the user's question
            system = {"role": "system", "content": "Be brief."}
            chat = [system, {"role": "user", "content": question}]
            answer = client.chat(model="knobwise", messages=chat, budget_ms=2000)
            assert answer.status == 200
            knobs = controller.decide({"prompt": question}, 2000)
            assert knobs_of(answer) == knobs
            sent = endpoint.state.requests[-1]
            assert {name: sent[name] for name in knobs} == knobs
            cheap = client.chat({"x-limits": '{"usd": 3e-5}'}, messages=chat, budget_ms=2000)
            assert knobs_of(cheap) in within(controller, question, 3e-5)
            assert "x-knobwise-limits-note" in cheap.headers
            # a client's own model is kept, the effort within the limit
            own = client.chat(model="medium", messages=chat, budget_ms=2000, limits={"usd": 3e-5})
            assert knobs_of(own)["model"] == "medium"
            assert knobs_of(own) in within(controller, question, 3e-5)
        assert client.chat(budget_ms=800, limits={"joule": 1}).status == 400
        # nobody knows here what is over the limit
        assert any("prices" in line and "usd" in line for line in client.said())
        body = {"prompt": questions[0], "budget_ms": 2000, "limits": {"usd": 3e-5}}
        decided = client.ask("/decide", body)
        assert json.loads(decided.content) in within(controller, questions[0], 3e-5)
        assert "x-knobwise-limits-note" in decided.headers


def test_an_answer_that_costs_more_than_a_limit_is_said_and_counted(routing, endpoint, tmp_path):
    folder, questions = routing
    dear = "".join(f"{model}: {{input: 10000, output: 10000}}\n" for model in PRICES)
    (tmp_path / "dear.yaml").write_text(dear)
    words = f"checkpoint={folder}/runs/controller/routing", f"endpoint={endpoint.url}"
    words = *words, "tracker=false", "prices=dear.yaml", f"log={tmp_path}/log"
    with serving(tmp_path, *words) as client:
        chat = [{"role": "user", "content": questions[0]}]
        # above the limit that was declared, within the request's own, and not known
        client.chat(messages=chat)
        client.chat(messages=chat, limits={"usd": 1e6})
        client.chat(messages=chat, stream=True)
        assert client.metric("over_limit_total") == 1
    files = (tmp_path / "log").glob("requests-*.jsonl")
    rows = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    assert [row.get("over_limit") for row in rows] == [True, False, None]
    assert rows[0]["usd"] > 0.0003


def test_a_length_of_the_clients_own_teaches_no_times(routing, scripted, tmp_path):
    folder, questions = routing
    words = f"checkpoint={folder}/runs/controller/routing", f"endpoint={scripted.url}"
    words = *words, "extra_body={max_tokens: 256}", f"log={tmp_path}/log"
    with serving(tmp_path, *words) as client:
        asked = {"messages": [{"role": "user", "content": questions[0]}]}
        for cap, tokens, teaches in (
            (None, 256, True),
            (4096, 256, True),
            (4096, 900, False),
            (16, 16, False),
        ):
            usage = {"prompt_tokens": 9, "completion_tokens": tokens}
            scripted.answer = lambda path, body, usage=usage: Reply(chat(usage=usage))
            before = client.metric("latency_level")
            for _ in range(3):
                client.chat(**asked, **({} if cap is None else {"max_tokens": cap}))
            assert scripted.asked[-1][2]["max_tokens"] == (cap or 256)
            assert (client.metric("latency_level") != before) == teaches
    files = (tmp_path / "log").glob("requests-*.jsonl")
    rows = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    assert [bool(row.get("failed")) for row in rows] == [False] * 6 + [True] * 6
