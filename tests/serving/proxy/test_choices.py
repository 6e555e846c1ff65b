"""What a client leaves open, and decisions among a part of the configurations."""

import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from knobwise.common.errors import InputError
from knobwise.profiling.endpoint.model import request_fields
from knobwise.serving.exploration import near_best
from knobwise.serving.proxy.chat import last_question, parse
from knobwise.serving.proxy.knob_fields import FIELDS, KnobFields
from knobwise.serving.runtime import Runtime

GRID = [
    {"model": model, "max_tokens": tokens, "reasoning_effort": effort}
    for model, tokens, effort in itertools.product(("s", "l"), (16, 64, None), ("low", None))
]
QUESTION = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Why?"}]


def allowed(fields, **body):
    """The configurations that are left, and whether they are cut; None where nothing is known."""
    freedom = fields.freedom(body)
    if freedom is None:
        return None
    left = GRID
    if freedom.allowed is not None:
        left = [values for values, may in zip(GRID, freedom.allowed, strict=True) if may]
    return left, freedom.capped


@pytest.mark.parametrize("model", [None, "", "auto", "knobwise"])
def test_names_that_leave_the_model_open(model):
    assert allowed(KnobFields(GRID), model=model) == (GRID, False)


def test_a_clients_own_values():
    fields = KnobFields(GRID)
    assert allowed(fields) == (GRID, False)
    large = [values for values in GRID if values["model"] == "l"]
    assert allowed(fields, model="l") == (large, False)
    # a cap is kept by what is no longer; null has no end
    for name in ("max_tokens", "max_completion_tokens"):
        short = [values for values in GRID if values["max_tokens"] == 16]
        assert allowed(fields, **{name: 63}) == (short, False)
        assert allowed(fields, **{name: 3}) == (short, True)
        assert len(allowed(fields, **{name: 64})[0]) == 8
    low = [values for values in large if values["reasoning_effort"] == "low"]
    assert allowed(fields, model="l", reasoning_effort="low", max_tokens=20) == (low[:1], False)
    # of these nothing is known
    assert allowed(fields, model="other") is None
    assert allowed(fields, reasoning_effort="high") is None
    # what is no knob is no matter
    assert allowed(fields, temperature=3) == (GRID, False)
    assert allowed(KnobFields(GRID, override=True), model="other", max_tokens=1) == (GRID, False)


def test_what_would_pass_unchanged_by_a_name_that_no_endpoint_knows_is_refused():
    fields = KnobFields(GRID)
    for model in ("auto", "knobwise"):
        with pytest.raises(InputError, match=r'^reasoning_effort="high": .*"low", null'):
            fields.freedom({"model": model, "reasoning_effort": "high"})
        # of the values that go with what else the client has set
        pairs = [{"model": "s", "n": 1, "seed": 3}, {"model": "l", "n": 2, "seed": 4}]
        with pytest.raises(InputError, match=r"^seed=3: .*is 4;"):
            KnobFields(pairs).freedom({"model": model, "n": 2, "seed": 3})
        # a model of every request is sent instead; so is one that is no knob of ours
        body = {"model": model, "reasoning_effort": "high"}
        assert KnobFields(GRID, extra={"model": "s"}).freedom(body) is None
        assert KnobFields([{"reasoning_effort": "low"}]).freedom(body) is None
    # whoever names none, or one that may be there, asks the endpoint
    for body in ({}, {"model": "s"}, {"model": "other"}):
        assert fields.freedom({**body, "reasoning_effort": "high"}) is None


@pytest.mark.parametrize(
    ("extra", "cap", "cut", "tokens", "measured"),
    [
        # without a client's length every answer is as measured
        ({"max_tokens": 256}, None, True, 256, True),
        ({}, None, True, 256, True),
        # cut by the client alone, or as every answer is
        ({}, 256, True, 256, False),
        ({}, 256, False, 100, True),
        ({"max_tokens": 256}, 256, True, 256, True),
        ({"max_tokens": 256}, 255, True, 255, False),
        # longer than every answer would have been
        ({"max_tokens": 256}, 4096, False, 257, False),
        ({"max_tokens": 256}, 4096, False, 256, True),
        ({"max_tokens": 256}, 4096, True, 4096, False),
        ({"max_tokens": 256}, 4096, False, np.nan, False),
    ],
)
def test_what_a_clients_own_length_made_of_an_answer_is_not_as_measured(
    extra, cap, cut, tokens, measured
):
    body = {} if cap is None else {"max_completion_tokens": cap}
    grid = [{"model": model} for model in ("s", "l")]
    for override in (False, True):
        fields = KnobFields(grid, extra=extra, override=override)
        assert fields.is_measured(body, cut, tokens) == measured
        assert fields.may_be_longer(body) == (cap == 4096)
    # a knob is sent as it was measured, or the answer counts as cut from the beginning
    assert KnobFields(GRID, extra=extra).is_measured(body, cut, tokens)


@pytest.mark.parametrize("override", [False, True])
def test_a_cap_below_the_length_of_every_request_cuts(override):
    def is_capped(extra, knobs=("model",), **body):
        grid = [{name: values[name] for name in knobs} for values in GRID]
        return KnobFields(grid, extra=extra, override=override).freedom(body).capped

    for name, other in itertools.product(("max_tokens", "max_completion_tokens"), repeat=2):
        assert is_capped({name: 256}, **{other: 255})
        assert not is_capped({name: 256}, **{other: 256})
    assert is_capped({"max_tokens": 256, "max_completion_tokens": 64}, max_tokens=63)
    assert not is_capped({"max_tokens": 256})
    assert not is_capped({"max_tokens": 256}, max_tokens=None)
    assert not is_capped({"seed": 1}, max_tokens=3)
    # a knob sets the length, not the field
    knobs = ("model", "max_tokens")
    assert not is_capped({"max_tokens": 256}, knobs, max_tokens=100)
    assert not is_capped({"max_completion_tokens": 256}, knobs, max_tokens=100)


def test_a_length_that_nobody_can_count_with_is_refused():
    for fields in (KnobFields(GRID), KnobFields(GRID, override=True)):
        for name in ("max_tokens", "max_completion_tokens"):
            with pytest.raises(InputError, match=name):
                fields.freedom({name: 10**400})


def test_knobs_are_set_within_the_cap():
    fields = KnobFields(GRID)
    body = {"messages": QUESTION, "max_completion_tokens": 20, "model": "auto"}
    sent = fields.sent(body, GRID[2])
    assert sent == {"model": "s", "max_tokens": 20, "reasoning_effort": "low"}
    assert fields.set(body, sent) == {
        "messages": QUESTION,
        "max_tokens": 20,
        "model": "s",
        "reasoning_effort": "low",
    }
    # null leaves a field out
    assert fields.set({"messages": []}, GRID[5]) == {"messages": [], "model": "s"}
    extra = KnobFields([{"min_p": 1}], extra={"min_p": 0, "model": "x", "seed": 1})
    for model in (None, "auto"):
        body = {"model": model, "seed": 2}
        assert extra.set(body, {"min_p": 1}) == {"min_p": 1, "model": "x", "seed": 2}
    # a client's length, by the name of the profile
    extra = KnobFields([{"min_p": 1}], extra={"max_tokens": 256, "min_p": 0})
    for body, cap in (({}, 256), ({"max_completion_tokens": 9}, 9), ({"max_tokens": 300}, 300)):
        assert extra.set(body, {"min_p": 1}) == {"min_p": 1, "max_tokens": cap}


def test_every_field_of_the_official_client_can_be_a_knob():
    assert request_fields() <= FIELDS


def test_messages_of_the_users_own():
    def messages(question, knobs):
        return [{"role": "user", "content": f"{knobs['shots']} {question}"}]

    knobs = {"shots": 2}
    with pytest.raises(InputError, match="shots"):
        KnobFields([knobs])
    changed = KnobFields([knobs], messages).set({"messages": QUESTION}, knobs)
    assert changed == {"messages": [QUESTION[0], {"role": "user", "content": "2 Why?"}]}
    # a function that is named is asked too where every knob is a field
    for extra in ({"shots": 0}, None):
        known = {"model": "s"} if extra is None else knobs
        assert KnobFields([known], None, extra).are_of_responses
        fields = KnobFields([known], lambda question, knobs: [{"content": question}], extra)
        assert fields.set({"messages": QUESTION}, known)["messages"][1] == {"content": "Why?"}
        assert not fields.are_of_responses
    # images stay, before the text, as when the profile was measured
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    content = [{"type": "text", "text": "Why?"}, image]
    chat = {"messages": [QUESTION[0], {"role": "user", "content": content}]}
    changed = KnobFields([knobs], messages).set(chat, knobs)
    assert changed["messages"][1]["content"] == [image, {"type": "text", "text": "2 Why?"}]


def test_the_last_question():
    assert last_question({"messages": QUESTION}) == (1, "Why?")
    parts = [{"type": "text", "text": "a"}, {"type": "image_url"}, {"type": "text", "text": "b"}]
    chat = [*QUESTION, {"role": "user", "content": parts}, {"role": "assistant", "content": "c"}]
    assert last_question({"messages": chat}) == (2, "a\nb")
    for messages in (None, [], 3, [3], [{"role": "user"}], [{"role": "user", "content": [3]}]):
        assert last_question({"messages": messages})[1] == ""


def test_fields_of_ours_are_taken_out():
    chat = parse(b'{"budget_ms": 5, "limits": {"usd": 1}, "features": {"a": 2}, "n": 1}', {})
    assert (chat.body, chat.budget, chat.limits) == ({"n": 1}, 5, {"usd": 1})
    assert (chat.features, chat.is_plain) == ({"a": 2}, False)
    plain = parse(b'{"n": 1}', {"x-budget-ms": "7"})
    assert (plain.body, plain.is_plain, plain.budget) == ({"n": 1}, True, 7.0)
    with pytest.raises(InputError, match="x-budget-ms"):
        parse(b"{}", {"x-budget-ms": "soon"})
    # a letter more or less, and capitals
    for name in ("budgetms", "budgetMs", "budget_m", "limit", "feature"):
        with pytest.raises(InputError, match=f"^{name}: "):
            parse(f'{{"{name}": 5}}'.encode(), {})
    for name in (*FIELDS, *request_fields(), "budget_tokens"):
        assert parse(f'{{"{name}": 5}}'.encode(), {}).body == {name: 5}


def test_long_names_of_clients_stay_in_no_memory():
    tracemalloc.start()
    for number in range(50):
        parse(f'{{"{number}{"x" * 100_000}": 5}}'.encode(), {})
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 1_000_000


@pytest.mark.parametrize("budget_ms", [120.0, 160.0, 300.0, 370.0, 1000.0])
@pytest.mark.parametrize("drift", [None, 0.3])
def test_a_masked_decision_is_the_best_of_what_is_left(controller, budget_ms, drift):
    """The masked decision of many, for one; guard, static and exploration stay within the mask."""
    count = len(controller.configurations)
    if drift is not None:
        drift = (np.full(count, drift, np.float32), 1.0)
    blocks = {name: np.ones(width, np.float32) for name, width in controller.feature_sizes.items()}
    many = {name: block[None] for name, block in blocks.items()}
    limits = np.array([budget_ms])
    for marks in itertools.product((False, True), repeat=count):
        may = np.array(marks)
        if not may.any():
            continue
        choice, mean, spread = controller.decide_expected(blocks, budget_ms, drift, mask=may)
        assert choice == controller.choose(many, limits, may[None], drift)[0]
        assert (choice, mean, spread) == controller.expected_of(blocks, budget_ms, drift, choice)
        falls_back = controller.fall_back(budget_ms, drift) is not None
        fallen = controller.fall_back(budget_ms, drift, mask=may)
        assert fallen == ((choice, mean, spread) if falls_back else None)
        static = controller.static_expected(blocks, budget_ms, drift, mask=may)[0]
        static_limit = limits * controller.factor(drift)
        assert static == controller.static.choose({}, static_limit, may[None])[0]
        close = near_best(controller, blocks, budget_ms, drift, 0.5, may)
        assert choice in close
        assert may[close].all()


@given(
    budget_ms=st.floats(1, 2000),
    offset=st.none() | st.floats(-1, 1),
    seed=st.integers(0, 1000),
    loss=st.floats(0, 1),
)
def test_a_mask_of_all_decides_like_none(controller, budget_ms, offset, seed, loss):
    count = len(controller.configurations)
    whole = np.ones(count, bool)
    drift = None if offset is None else (np.full(count, offset, np.float32), 1.0)
    generator = np.random.default_rng(seed)
    blocks = {}
    for name, width in controller.feature_sizes.items():
        blocks[name] = generator.normal(size=width).astype(np.float32)
    for decide in (controller.decide_expected, controller.static_expected):
        unmasked = decide(blocks, budget_ms, drift)
        assert decide(blocks, budget_ms, drift, None, whole) == unmasked
    fallen = controller.fall_back(budget_ms, drift)
    assert controller.fall_back(budget_ms, drift, None, whole) == fallen
    close = near_best(controller, blocks, budget_ms, drift, loss)
    assert near_best(controller, blocks, budget_ms, drift, loss, whole) == close
    # and through the runtime, whose rows in the log are those of the controller
    runtime = Runtime(controller, tracker=False)
    masked = runtime.decide(runtime.begin(budget_ms, mask=whole), blocks, spent_ms=0.0)
    unmasked = runtime.decide(runtime.begin(budget_ms), blocks, spent_ms=0.0)
    assert (masked[:3], masked.best) == (unmasked[:3], unmasked.best)


def test_an_answer_with_other_knobs_is_logged_and_not_learned_from(controller, tmp_path):
    runtime = Runtime(controller, log=tmp_path)
    request = runtime.begin(150.0)._replace(log_fields={"id": "mine", "prompt": "Why?"})
    result = runtime.finish(runtime.decide(request), learns=False)
    assert result.request_id == "mine"
    assert runtime.tracker.answers == 0
    (text,) = (path.read_text() for path in tmp_path.glob("requests-*"))
    assert '"prompt":"Why?"' in text
    runtime.finish(runtime.decide(runtime.begin(150.0)))
    assert runtime.tracker.answers == 1


def test_true_is_sent_as_it_was_measured_and_is_neither_text_nor_1():
    grid = [{"enable_thinking": value} for value in (False, True)]
    fields = KnobFields(grid, extra={"enable_thinking": True})
    assert fields.set({}, grid[0])["enable_thinking"] is False
    assert fields.freedom({"enable_thinking": False}).allowed.tolist() == [True, False]
    assert fields.freedom({"enable_thinking": "false"}) is None
    assert fields.freedom({"enable_thinking": 0}) is None
    # people wrote text for controllers that had it
    assert fields.index_of({"enable_thinking": "true"}) == 1
    assert fields.texts_of_truth == []
    old = KnobFields([{"enable_thinking": value} for value in ("false", "true")], extra=grid[0])
    assert old.index_of({"enable_thinking": True}) == 1
    assert old.set({}, {"enable_thinking": "false"}) == {"enable_thinking": "false"}
    assert old.texts_of_truth == ["enable_thinking"]
