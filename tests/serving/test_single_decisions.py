"""A single decision refuses what is no number in one line, wherever it is made, and takes numbers
of Python, NumPy and torch alike."""

import math
from dataclasses import replace
from decimal import Decimal

import numpy as np
import pytest
import torch
from helpers import arrays, input_error, small_table
from replayed import ReplayedModel, untrained

from knobwise.agents import NumpyController
from knobwise.agents.training.checkpoint import Loaded
from knobwise.common.errors import InputError
from knobwise.envs.tables.columns import Column
from knobwise.profiling.measuring.adaptive_model import FirstStage, Request
from knobwise.serving import AdaptiveModel
from knobwise.serving.knob_policy import KnobPolicy
from knobwise.serving.wrapper import wrap

TABLE = small_table(40)
AGENT = untrained(TABLE)
REQUEST = arrays(TABLE, 3)
BUDGET_MS = 9.0
GRADIENT = torch.tensor(BUDGET_MS, requires_grad=True)
NO_BUDGETS = {
    "text": "5",
    "no number": "soon",
    "None": None,
    "True": True,
    "numpy.True_": np.True_,
    "a tensor of a truth value": torch.tensor(True),
    "NaN": math.nan,
    "infinity": math.inf,
    "negative": -1.0,
    "zero": 0,
    "complex": 3 + 1j,
    "a complex tensor": torch.tensor(3 + 1j),
    "too large": 10**400,
    "a mapping": {},
    "a function": len,
}
BUDGETS = [9, np.float32(9), np.int64(9), np.array(9.0), GRADIENT, GRADIENT.half(), Decimal(9)]
NO_BLOCKS = {
    "text": "0.5",
    "texts": ["0.5"] * 4,
    "None": None,
    "with None": [0.1, None, 0.3, 0.4],
    "infinite": [math.inf, 0, 0, 0],
    "complex": [1j, 0, 0, 0],
    "too short": [0.1, 0.2],
    "too long": [0.1] * 5,
    "ragged": [[0.1], [0.2, 0.3]],
    "one number": 0.5,
    "a mapping": {"a": 1},
    "a set": {0.1, 0.2, 0.3, 0.4},
    "three axes": np.zeros((1, 1, 4)),
}


def policy_of(agent=AGENT):
    return KnobPolicy(Loaded(agent, TABLE.name, TABLE.digest, {}))


class GivenFeatures(ReplayedModel):
    """Its first stage gives what the request holds as features."""

    def first_stage(self, request, features=True):
        return FirstStage(Request(3, ""), dict(request.image), None, 0.0, 0.0)


def ways(agent=AGENT):
    """Each way to decide for one request, by name."""
    serve = wrap(lambda request, **knobs: knobs, agent, features=lambda request: request)
    model = AdaptiveModel(GivenFeatures(TABLE), agent, tracker=False)
    return {
        "KnobPolicy": policy_of(agent).decide,
        "NumpyController": NumpyController(agent.arrays()).decide,
        "wrap": lambda features, budget_ms: serve.result(features, budget_ms=budget_ms),
        "AdaptiveModel": lambda features, budget_ms: model.answer(Request(features, ""), budget_ms),
    }


WAYS = ways()


def is_one_line(error, way):
    """Whether an error is meant to be read: ours, in one line, and not NumPy's or torch's."""
    if way != "NumpyController":
        assert isinstance(error, InputError)
    for words in ("sequence", "grad", "truth value of", "could not convert", "NoneType"):
        assert words not in str(error)
    return "\n" not in str(error)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", NO_BUDGETS)
def test_what_is_no_budget_is_refused(kind, way):
    with pytest.raises(ValueError, match=r"budget") as caught:
        WAYS[way](REQUEST, NO_BUDGETS[kind])
    assert is_one_line(caught.value, way)


@pytest.mark.parametrize("way", ["NumpyController", "wrap", "AdaptiveModel"])
@pytest.mark.parametrize(
    "several", [[9.0], (9.0, 10.0), np.array([9.0]), torch.tensor([9.0, 10.0])]
)
def test_several_budgets_are_not_one(several, way):
    with pytest.raises(ValueError, match=r"budget") as caught:
        WAYS[way](REQUEST, several)
    assert is_one_line(caught.value, way)


@pytest.mark.parametrize(
    "budget", [["5"], [True], [9.0, True], [None], [3j], "59", [[9.0], [1.0, 2.0]]]
)
def test_many_budgets_are_numbers(budget):
    many = {name: np.stack([block] * len(budget)) for name, block in REQUEST.items()}
    with input_error("budget"):
        policy_of().decide(many, budget)
    with pytest.raises(ValueError, match="budget"):
        AGENT.decider.choose(many, budget)
    with input_error("budget"):
        AdaptiveModel(ReplayedModel(TABLE), AGENT).generate([Request(3, "")] * len(budget), budget)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", NO_BLOCKS)
def test_what_is_no_block_is_refused(kind, way):
    with pytest.raises(ValueError, match="image_features") as caught:
        WAYS[way](REQUEST | {"image_features": NO_BLOCKS[kind]}, BUDGET_MS)
    assert is_one_line(caught.value, way)


@pytest.mark.parametrize("way", WAYS)
def test_a_block_that_is_missing_is_named(way):
    for features in ({}, {"image": REQUEST["image_features"]}):
        with pytest.raises(ValueError, match="image_features") as caught:
            WAYS[way](features, BUDGET_MS)
        assert is_one_line(caught.value, way)


@pytest.mark.parametrize("way", ["KnobPolicy", "NumpyController", "wrap"])
@pytest.mark.parametrize("features", ["text", 5, [0.5] * 8, {1.0, 2.0}])
def test_features_without_names_are_refused(features, way):
    with pytest.raises(ValueError, match="features") as caught:
        WAYS[way](features, BUDGET_MS)
    assert is_one_line(caught.value, way)


def same(decided, request, budget_ms=BUDGET_MS, agent=AGENT):
    """Whether a decision is the one for these arrays under this budget; of a request that was served,
    under what was left of it."""
    drift = None
    if not isinstance(decided, dict):
        assert decided.budget_ms == budget_ms
        budget_ms, drift = decided.limit_ms, decided.drift
        decided = decided.configuration
    return decided == agent.decider.decide(request, budget_ms, drift)


@pytest.mark.parametrize("way", WAYS)
def test_numbers_of_any_library_are_taken(way):
    for budget in BUDGETS:
        assert same(WAYS[way](REQUEST, budget), REQUEST)
    for make in (
        np.ndarray.tolist,
        lambda block: torch.tensor(block, requires_grad=True),
        lambda block: torch.tensor(block).double(),
        lambda block: block.astype(object),
        lambda block: [Decimal(value) for value in block.tolist()],
    ):
        request = {name: make(block) for name, block in REQUEST.items()}
        assert same(WAYS[way](request, BUDGET_MS), REQUEST)
    # truth values are features, as 0 and 1
    flags = {name: block > 0 for name, block in REQUEST.items()}
    numbers = {name: block.astype(np.float32) for name, block in flags.items()}
    assert same(WAYS[way](flags, BUDGET_MS), numbers)


COLUMNS = (Column("tokens", None, False), Column("kind", ("chart", "ocr"), False))
NAMED = small_table(40, features={"features": torch.eye(4).repeat(10, 1)}, columns=COLUMNS)


@pytest.mark.parametrize(
    ("values", "column"),
    [
        ({"tokens": "many", "kind": "ocr"}, "tokens"),
        ({"tokens": None, "kind": "ocr"}, "tokens"),
        ({"tokens": math.nan, "kind": "ocr"}, "tokens"),
        ({"tokens": -math.inf, "kind": "ocr"}, "tokens"),
        ({"tokens": 10**400, "kind": "ocr"}, "tokens"),
        ({"tokens": 2j, "kind": "ocr"}, "tokens"),
        ({"tokens": [3, 4], "kind": "ocr"}, "tokens"),
        ({"tokens": np.array([3.0, 4.0]), "kind": "ocr"}, "tokens"),
        ({"tokens": torch.tensor([3.0, 4.0]), "kind": "ocr"}, "tokens"),
        ({"tokens": 3, "kind": 7}, "kind"),
        ({"tokens": 3, "kind": None}, "kind"),
        ({"tokens": 3, "kind": ["ocr"]}, "kind"),
        ({"tokens": 3}, "kind"),
        ({"token": 3, "kind": "ocr"}, "tokens"),
    ],
)
def test_what_is_no_value_of_a_column_is_refused(values, column):
    agent = untrained(NAMED)
    for way, decide in ways(agent).items():
        if way != "AdaptiveModel":  # a model gives blocks
            with pytest.raises(ValueError, match=column) as caught:
                decide(values, BUDGET_MS)
            assert is_one_line(caught.value, way)


INNER = (Column("usage.tokens", None, True), Column("doc.about.kind", ("chart", "ocr"), False))


@pytest.mark.parametrize(
    "nested",
    [
        {"usage": {"tokens": 3, "other": 1}, "doc": {"about": {"kind": "ocr"}}},
        {"usage.tokens": 3, "usage": {"tokens": 9}, "doc.about": {"kind": "ocr"}},
        {"usage": {"tokens": 3}, "doc": {"about.kind": "ocr"}, "doc.about": None},
    ],
)
def test_values_inside_objects_have_dotted_names(nested):
    agent = untrained(replace(NAMED, columns=INNER))
    flat = {"usage.tokens": 3, "doc.about.kind": "ocr"}
    none = {"usage.tokens": None, "doc.about.kind": "ocr"}
    for way, decide in ways(agent).items():
        if way != "AdaptiveModel":
            assert same(decide(nested, BUDGET_MS), flat, agent=agent)
            # an object that is unknown holds nothing that is known
            unknown = {"usage": None, "doc": {"about": {"kind": "ocr"}}}
            assert same(decide(unknown, BUDGET_MS), none, agent=agent)
            with pytest.raises(ValueError, match=r"usage\.tokens"):
                decide({"usage": {"token": 3}, "doc": {"about": {"kind": "ocr"}}}, BUDGET_MS)


def test_values_of_columns_are_numbers_of_any_library():
    agent = untrained(NAMED)
    wanted = {"tokens": 3.0, "kind": "ocr"}
    for tokens in (
        3,
        np.float32(3),
        Decimal(3),
        np.array(3),
        torch.tensor(3.0, requires_grad=True),
    ):
        for way, decide in ways(agent).items():
            if way != "AdaptiveModel":
                decided = decide({"tokens": tokens, "kind": " ocr "}, BUDGET_MS)
                assert same(decided, wanted, agent=agent)


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 4096, b"\0" * 100_000, b"no archive", b"PK\3\4" + bytes(90)]
)
def test_a_file_that_is_no_archive_is_refused(content, tmp_path):
    path = tmp_path / "controller.npz"
    AGENT.export(path)
    whole = path.read_bytes()
    damaged = [content, whole[: len(whole) // 2], bytes(len(whole)), whole[:-30]]
    for each in damaged:
        path.write_bytes(each)
        with pytest.raises(ValueError, match=r"controller.npz: ") as caught:
            NumpyController.load(path)
        assert "\n" not in str(caught.value)
        assert "pickle" not in str(caught.value)
