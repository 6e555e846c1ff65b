"""Demonstrations recorded through an endpoint, from end to end, against a server that simulates one
and its faults."""

import json
import math
from pathlib import Path

import polars as pl
import pytest
from commands import BEAMS, Command, launch, mistake, read_json, refused, stop_when
from helpers import close, input_error
from starlette.responses import JSONResponse

from knobwise.envs.demonstrations.beam_table import BeamTable, bank_rows
from knobwise.envs.demonstrations.settings import METHODS
from knobwise.profiling.endpoint.client import ATTEMPTS
from knobwise.profiling.endpoint.logprobs import next_tokens, prompt_tokens, token_chance
from knobwise.profiling.endpoint.paid import PaidClient
from knobwise.profiling.endpoint.replies import Replies
from knobwise.profiling.endpoint.settings import EndpointOptions
from knobwise.testbeds.simulated_endpoint import EndpointState, SimulatedEndpoint, problem
from knobwise.testbeds.simulated_models import chance_right
from knobwise.testbeds.simulated_tokens import END

INSTRUCTION = "\nAnswer with a single word or a short phrase."
SUMS = {f"s{i}": (f"What is {10 + 7 * i % 90} + {i}?", str(10 + 7 * i % 90 + i)) for i in range(10)}
WORDS = {
    "w1": ("What is the plural of wolf?", "wolves"),
    "w2": ("What is the plural of fox?", "foxes"),
    "w3": ("What is 12 + 30?", "42"),
    "w4": ("What is 99999 + 5?", "100004"),
    "w5": ("What is 8 + 90?", "98"),
    "w6": ("What is 123 + 4?", "127"),
}
FEW = """
    pool.sampler=random pool.size=4 beams.shots=2 beams.width=1 beams.retrieved=1 beams.random=2
    beams.chunk=3
"""


@pytest.fixture
def endpoint():
    with SimulatedEndpoint(delay=0) as server:
        yield server


@pytest.fixture(autouse=True)
def _in_a_folder(home, monkeypatch):
    """Questions and prices in this folder, and short waits."""
    monkeypatch.setattr("knobwise.profiling.endpoint.pauses.FIRST_WAIT_S", 0.01)
    write_questions(SUMS)
    Path("prices.yaml").write_text("small: {input: 10, output: 40}\n")


def write_questions(questions):
    rows = [
        {"id": name, "question": text, "answer": right} for name, (text, right) in questions.items()
    ]
    pl.DataFrame(rows).write_ndjson("questions.jsonl")


def words(server, model="small", out="out", **options):
    given = {"model": "openai", "endpoint": server.url, "vlm.data": "questions.jsonl"}
    given |= {"vlm.model": model, "out": out, **options}
    return ["profile", *FEW.split(), *(f"{name}={value}" for name, value in given.items())]


def table_of(out="out"):
    return BeamTable.load(f"{out}/beams.safetensors")


def asked(server):
    """How many requests came since the last call, each counted once, and how many in all."""
    bodies = [json.dumps(body, sort_keys=True) for body in server.state.requests]
    server.state.requests.clear()
    return len({*bodies}), len(bodies)


def chances(table, questions, plain=False):
    """The right answer and the probability of each of its tokens after every recorded sequence, in
    the order of `table.beam_mask`."""
    items = list(questions.values())
    query, beam = table.beam_mask.nonzero(as_tuple=True)
    rows = bank_rows(table.pool[query], table.sequences[query, beam])
    for number, shots in zip(query.tolist(), rows.tolist(), strict=True):
        texts = [items[row][0] for row in [*shots, number] if row >= 0]
        messages = [{"role": "user", "content": t + INSTRUCTION * (not plain)} for t in texts]
        yield items[number][1], chance_right(messages, "small")


# -- what servers say ------------------------------------------------------------------------------

OF_PROMPT = [
    None,
    {"785": {"logprob": -0.25, "rank": 1, "decoded_token": "The"}},
    {"12": {"logprob": -2.0, "rank": 5, "decoded_token": " wolf"},
     "9": {"logprob": -0.5, "rank": 1, "decoded_token": " dog"}},
    {"9": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
     "3": {"logprob": -9999.0, "rank": 40000, "decoded_token": "b"}},
]  # fmt: skip


def test_the_tokens_of_a_prompt_as_vllm_tells_them():
    wanted = [(-1, 0, 0), (785, -0.25, -0.25), (12, -2, -0.5), (3, -9999, -0.5)]
    choice = {"index": 0, "text": "", "prompt_logprobs": None}
    assert prompt_tokens({"choices": [choice], "prompt_logprobs": OF_PROMPT}) == wanted
    plain = {"choices": [choice | {"prompt_logprobs": OF_PROMPT}]}
    assert prompt_tokens(plain) == wanted
    assert prompt_tokens({"choices": [choice]}) is None


@pytest.mark.parametrize("wrong", [[3], [{}], [{"x": {"logprob": 1}}], [{"1": {"rank": 1}}]])
def test_tokens_of_another_form_are_refused(wrong):
    with pytest.raises(ValueError, match="prompt_logprobs"):
        prompt_tokens({"choices": [{}], "prompt_logprobs": wrong})
    with pytest.raises(ValueError, match="top_logprobs"):
        next_tokens({"choices": [{"logprobs": {"content": wrong}}]})


def test_the_likeliest_tokens_tell_of_an_answer():
    halves = [("42", math.log(0.5)), (" 42", math.log(0.25)), ("x", math.log(0.125))]
    entries = [{"token": token, "logprob": log_prob, "bytes": None} for token, log_prob in halves]
    content = {"choices": [{"logprobs": {"content": [{"top_logprobs": entries}]}}]}
    assert next_tokens(content) == halves
    assert next_tokens({"choices": [{"logprobs": None}]}) is None
    # white space aside, both spell it
    right = token_chance("42", halves)
    assert right.log_prob == pytest.approx(math.log(0.75))
    assert (right.likeliest, right.listed) == (math.log(0.5), True)
    # at most as likely as the least likely, and at most what is left
    assert token_chance("7", halves[:2]).log_prob == pytest.approx(math.log(0.25))
    nearly_all = [("a", math.log(0.6)), ("b", math.log(0.3))]
    other = token_chance("7", nearly_all)
    assert (round(math.exp(other.log_prob), 6), other.listed) == (0.1, False)


# -- recorded beams --------------------------------------------------------------------------------


@pytest.mark.parametrize("plain", [False, True])
def test_every_sequence_has_the_log_probability_of_its_answer_and_its_end(endpoint, plain):
    write_questions(WORDS)
    launch(words(endpoint, **{"vlm.chats": "false" if plain else "null"}))
    table = table_of()
    mask = table.beam_mask
    assert {*table.found_by[mask].tolist()} >= {0, 2, 3}
    # tokens of up to four characters
    wanted = []
    correct = []
    relative = []
    for answer, chance in chances(table, WORDS, plain):
        tokens = -(-len(answer) // 4)
        wanted.append(tokens * math.log(chance) + math.log(END))
        correct.append(float(chance >= 0.5))
        relative.append(1.0 if chance >= 0.5 else (chance / (1 - chance)) ** tokens)
    assert {*correct} == {0, 1}
    close(table.fields["logprob_score"][mask], wanted, 1e-5)
    close(table.fields["vqa_gt_prob"][mask], [math.exp(x) for x in wanted], 1e-5)
    close(table.fields["vqa_correct"][mask], correct)
    close(table.fields["vqa_rel_score"][mask], relative, 1e-5)
    # a token for each answer, and nothing is streamed
    sent = list(endpoint.state.requests)
    assert {body.get("stream", False) for body in sent} == {False}
    assert {("prompt" in body) for body in sent} == {plain}


def test_an_answer_is_as_right_as_people_agree(endpoint):
    people = ["pair", "2", "2", "pair", "pair"]
    rows = [{"id": "a", "question": "What is 1 + 1?", "answers": people}]
    rows.append({"id": "b", "question": "What is 1 + 2?", "answers": ["3"]})
    pl.DataFrame(rows).write_ndjson("questions.jsonl")
    launch(words(endpoint))
    table = table_of()
    sums = {"a": ("What is 1 + 1?", "2"), "b": ("What is 1 + 2?", "3")}
    (of_a, *_, of_b) = [chance for _, chance in chances(table, sums)]
    assert min(of_a, of_b) > 0.5
    # the model gives "2", as two of five did; most said "pair", which it does not
    close(table.fields["vqa_acc_score"][table.beam_mask].unique(), [2 / 3, 1])
    close(table.fields["vqa_correct"][table.beam_mask].unique(), [1.0])
    close(table.fields["logprob_score"][0, :1], [math.log((1 - of_a) / 2 * END)], 1e-5)


def test_answers_of_one_token_by_the_protocol_alone(endpoint, capsys):
    launch(words(endpoint, "small?logprobs=openai"))
    table = table_of()
    unlisted = 0
    wanted = []
    for _, chance in chances(table, SUMS):
        least = 0.4 * (1 - chance) / 20
        unlisted += chance < least
        wanted.append(math.log(max(chance, least)))
    close(table.fields["logprob_score"][table.beam_mask], wanted, 1e-4)
    assert read_json("out/beams-info.json")["task"]["log_probabilities"] == "top_logprobs"
    assert unlisted == 0 or "likeliest tokens" in capsys.readouterr().out
    assert all("top_logprobs" in b or b["max_tokens"] == 1 for b in endpoint.state.requests)


def test_longer_answers_need_the_tokens_of_prompts(endpoint, capsys):
    write_questions(WORDS)
    line = refused(words(endpoint, "small?logprobs=openai"), capsys)
    assert "'w1'" in line
    assert "2 tokens" in line
    assert "prompt_logprobs" in line


@pytest.mark.parametrize("gives", ["none", "refused"])
@pytest.mark.parametrize("chats", ["null", "false"])
def test_a_server_without_log_probabilities_is_refused(endpoint, gives, chats, capsys):
    line = refused(words(endpoint, f"small?logprobs={gives}", **{"vlm.chats": chats}), capsys)
    assert line.startswith(f"knobwise: endpoint={endpoint.url}: gives no log-probabilities")
    assert "prompt_logprobs" in line


@pytest.mark.parametrize("fault", ["429", "500", "cut", "json"])
def test_what_the_server_fails_is_asked_again(endpoint, fault):
    launch(words(endpoint, out="whole"))
    endpoint.state.requests.clear()
    launch(words(endpoint, f"small?fault={fault}&times=1"))
    different, every = asked(endpoint)
    assert every == 2 * different
    failed, whole = table_of(), table_of("whole")
    assert failed.sequences.equal(whole.sequences)
    for name, field in whole.fields.items():
        close(failed.fields[name], field)


@pytest.mark.parametrize("model", ["small?fault=500", "small?fault=cut", "small?first_ms=30000"])
def test_a_server_that_keeps_failing_ends_it(endpoint, model, capsys):
    assert "5 times" in refused(words(endpoint, model, timeout_s=0.2), capsys)


class Loading(EndpointState):
    """Is not ready for the first chats."""

    left = ATTEMPTS

    async def complete(self, request):
        if self.left:
            self.left -= 1
            return problem(503, "loading the model")
        return await super().complete(request)


def test_a_server_that_is_still_loading_is_not_asked_another_way(capsys):
    with SimulatedEndpoint(state=Loading(delay=0)) as server:
        assert "5 times" in refused(words(server), capsys)
        assert not server.state.requests
        launch(words(server))
    assert read_json("out/beams-info.json")["task"]["log_probabilities"] == "prompt_logprobs"


class Stumbling(EndpointState):
    """Fails at a field that it does not know."""

    async def complete(self, request):
        if b"prompt_logprobs" in await request.body():
            return problem(500, "internal error")
        return await super().complete(request)


def test_a_server_that_stumbles_over_a_field_is_asked_another_way():
    with SimulatedEndpoint(state=Stumbling(delay=0)) as server:
        launch(words(server))
    assert read_json("out/beams-info.json")["task"]["log_probabilities"] == "top_logprobs"


class Cutting(EndpointState):
    """Reads at most so many tokens of a prompt, and does not say so."""

    async def complete(self, request):
        response = await super().complete(request)
        if response.status_code != 200:
            return response
        content = json.loads(b"".join([part async for part in response.body_iterator]))
        if "usage" in content:
            content["usage"]["prompt_tokens"] = min(content["usage"]["prompt_tokens"], self.most)
        return JSONResponse(content)


@pytest.mark.parametrize("most", [40, 10_000])
def test_a_server_that_cuts_prompts_is_named(most, capsys):
    # some questions are ten times as long as others
    sums = {name: (text + " Please." * (7 * i), answer) for i, (name, (text, answer)) in
            enumerate(SUMS.items())}  # fmt: skip
    write_questions(sums)
    state = Cutting(delay=0)
    state.most = most
    with SimulatedEndpoint(state=state) as server:
        launch(words(server, "small?logprobs=openai"))
    assert ("have 40 tokens for the server" in capsys.readouterr().out) == (most == 40)


def test_a_refusal_has_no_log_probability(endpoint, capsys):
    assert "refused" in refused(words(endpoint, "small?fault=refusal"), capsys)


# -- money, kills ----------------------------------------------------------------------------------


def test_no_more_is_spent_than_allowed_and_more_money_goes_on(endpoint, capsys):
    launch(words(endpoint, out="whole"))
    different, _ = asked(endpoint)
    paid = {"prices": "prices.yaml", "concurrency": 3}
    assert "max_usd" in mistake(words(endpoint, max_usd=0.03, **paid), capsys)
    assert not Path("out/beams.safetensors").exists()
    first, every = asked(endpoint)
    assert 0 < first == every < different
    lines = pl.read_ndjson("out/state/replies.jsonl")
    assert 0.02 < lines["usd"].sum() <= 0.03
    # what was spent before counts
    mistake(words(endpoint, max_usd=0.03, **paid), capsys)
    assert asked(endpoint)[1] <= 1
    launch(words(endpoint, max_usd=5, **paid))
    # but for the first one, which sees what the server gives
    assert first + asked(endpoint)[1] <= different + 2
    assert table_of().digest == table_of("whole").digest


@pytest.mark.usefixtures("_forked")
def test_after_a_kill_nothing_is_asked_twice(endpoint):
    launch(words(endpoint, out="whole"))
    different, _ = asked(endpoint)
    typed = words(endpoint, "small?first_ms=50", concurrency=2)
    log = Path("out/state/replies.jsonl")
    stop_when(lambda: log.exists() and log.read_bytes().count(b"\n") >= 12, Command(typed))
    kept = log.read_bytes().count(b"\n")
    asked(endpoint)
    launch(typed)
    _, every = asked(endpoint)
    # the first line of a run is no request
    assert every <= different - kept + 3
    for name, field in table_of("whole").fields.items():
        close(table_of().fields[name], field)


# -- selectors -------------------------------------------------------------------------------------


def test_a_selector_learns_from_the_beams_and_its_draws_are_recorded(endpoint):
    launch(words(endpoint))
    settings = [word for word in BEAMS if not word.startswith("beams.path")]
    launch("train", "experiment=selector_replay beams.path=out name=r", settings)
    launch(
        words(
            endpoint, checkpoint="runs/selector_replay/r/checkpoints/best.pt", **{"beams.draws": 3}
        )
    )
    table = table_of()
    assert (table.found_by == METHODS.index("policy")).sum() == 3 * len(SUMS)
    policy = table.beam_mask & (table.round == 1)
    assert table.fields["logprob_score"][policy].isfinite().all()


def test_a_selector_learns_and_is_judged_on_what_the_server_answers(endpoint, capsys):
    launch(words(endpoint))
    served = ["beams.model=openai", "beams.vlm.model=small", "beams.vlm.data=questions.jsonl"]
    served.append(f"beams.served.endpoint={endpoint.url}")
    settings = [word for word in BEAMS if not word.startswith("beams.path")]
    live = "variants={grpo_live: {live: true, epochs: 1}}"
    asked(endpoint)
    launch("train", "experiment=selector_replay beams.path=out name=r", settings, served, [live])
    assert asked(endpoint)[1] > 0
    results = read_json("runs/selector_replay/r/results.json")
    assert "grpo_live" in json.dumps(results)
    judge = ["evaluate", "checkpoint=runs/selector_replay/r", "judged_shots=[1,2]", "json=j.json"]
    # with another right answer of the last question the scores would be of both
    write_questions(SUMS | {"s9": (SUMS["s9"][0], "17")})
    assert "beams.vlm.data" in refused(judge, capsys)
    write_questions(SUMS)
    asked(endpoint)
    # as it was trained
    launch(judge)
    assert asked(endpoint)[1] > 0
    for row in read_json("j.json")["rows"]:
        assert 0 <= row["accuracy"] <= 1
    for word, fault in {
        "beams.model=smollm2": "beams.served",
        "beams.served.messages=m:f": "beams.served.messages",
        "beams.served.endpoint=null": "endpoint",
        "beams.vlm.model=unknown": "does not exist",
    }.items():
        assert fault in refused([*judge, word], capsys)


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"vlm.model": ""}, "vlm.model"),
        ({"model": "learner"}, "endpoint"),
        ({"vlm.dtype": "float32"}, "vlm.dtype"),
        ({"vlm.batch_size": 2}, "vlm.batch_size"),
        ({"messages": "m:f"}, "messages"),
        ({"device": "cpu"}, "device"),
        ({"knobs.values": "{model: [small]}"}, "knobs"),
        ({"vlm.data": "none.jsonl"}, "none.jsonl"),
        ({"vlm.model": "unknown"}, "does not exist"),
        ({"vlm.model": "medium", "prices": "prices.yaml"}, "medium"),
        ({"endpoint": "http://127.0.0.1:1/v1"}, "endpoint"),
        ({"pool.sampler": "covers"}, "pool.sampler"),
        ({"max_usd": 1}, "max_usd"),
    ],
)
def test_mistakes_are_refused_in_a_line(endpoint, changed, fault, capsys):
    assert fault in refused(words(endpoint, **changed), capsys).partition(": ")[2]


def test_a_folder_goes_on_only_with_the_same_model(endpoint, capsys):
    launch(words(endpoint))
    assert "large" in mistake(words(endpoint, "large"), capsys)
    Path("out/state/replies.jsonl").write_text("{}\n")
    client = PaidClient(EndpointOptions(endpoint=endpoint.url), [{"model": "small"}])
    replies = Replies(client, 1)
    with input_error("replies.jsonl"):
        replies.keep(Path("out/state"))
    replies.close()
