"""The table of sentences: each is said somewhere, with all that is to be filled in."""

import ast
import string
from pathlib import Path

from page_parts import said

from knobwise.experiments import report
from knobwise.experiments.report.sentences import Sentence, texts, write_sentences

TREES = [ast.parse(path.read_text()) for path in Path(report.__path__[0]).glob("*.py")]


def nodes(kind):
    return (node for tree in TREES for node in ast.walk(tree) if isinstance(node, kind))


def fields_of(name):
    return {field for _, field, *_ in string.Formatter().parse(texts("sentences")[name]) if field}


def test_every_sentence_is_said_with_its_fields():
    """A name may be looked up in a table, as of signs; where it stands in the call, so do its
    fields."""
    names = {node.value for node in nodes(ast.Constant) if isinstance(node.value, str)}
    assert {*texts("sentences")} <= names
    for call in nodes(ast.Call):
        if isinstance(call.func, ast.Name) and call.func.id == "Sentence":
            given = {keyword.arg for keyword in call.keywords}
            if isinstance(call.args[0], ast.Constant) and None not in given:
                assert fields_of(call.args[0].value) == given, ast.unparse(call)


def test_parts_are_written_within_their_sentence_and_costs_are_no_latencies():
    part = Sentence("best_policy", policy="latency")
    assert [*said([Sentence("no_policy", best=part)])] == ["no_policy", "best_policy"]
    (as_time,), (as_cost,) = (
        write_sentences([Sentence("no_policy", best=part)], unit) for unit in ("ms", "USD")
    )
    assert str(part) in as_time
    assert as_cost == as_time.replace("latency", "cost")
