"""Features that a request brings inside objects, as the proxy reads them."""

import asyncio

import pytest
import torch
from helpers import input_error, small_table
from replayed import untrained

from knobwise.agents import NumpyController
from knobwise.envs.tables.columns import Column
from knobwise.serving.proxy.chat import MissingFeatures, RequestFeatures, parse
from knobwise.serving.proxy.routes import features_in

NAMES = ["usage.tokens", "doc.kind"]
NESTED = b'{"features": {"usage": {"tokens": 3}, "doc": {"kind": "ocr"}}, "messages": []}'


def computed(content, compute=None):
    features = RequestFeatures(compute, "prompt", ["features"], NAMES)
    return asyncio.run(features.computed(parse(content, {})))


def test_a_chat_may_bring_its_features_inside_objects():
    values = computed(NESTED)
    assert [values[name] for name in NAMES] == [3, "ocr"]
    # what a function computes goes behind what the request brings
    inner = computed(NESTED, lambda body: {"usage": {"tokens": 9}, "doc.kind": "chart"})
    assert [inner[name] for name in NAMES] == [3, "ocr"]
    part = b'{"features": {"usage": {"tokens": 3}}}'
    assert computed(part, lambda body: {"doc": {"kind": "chart"}})["doc.kind"] == "chart"
    with pytest.raises(MissingFeatures, match=r"doc\.kind"):
        computed(part)


def test_so_may_a_request_that_is_decided_alone(tmp_path):
    columns = (Column("usage.tokens", None, False), Column("doc.kind", ("chart", "ocr"), False))
    block = {"features": torch.eye(4).repeat(10, 1)}
    agent = untrained(small_table(40, features=block, columns=columns))
    agent.export(tmp_path / "c.npz")
    controller = NumpyController.load(tmp_path / "c.npz")
    body = {"usage": {"tokens": 3, "other": True}, "doc": {"kind": "ocr"}, "more": 1}
    assert features_in(body, controller) == {"usage.tokens": 3, "doc.kind": "ocr"}
    with input_error("usage.tokens"):
        features_in({"usage": {"tokens": True}}, controller)
