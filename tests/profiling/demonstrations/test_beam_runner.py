"""Recording beam data: what is written, interruptions, rounds of a policy, and the command line
with real models."""

import math
from dataclasses import replace
from hashlib import sha256

import polars as pl
import pytest
import torch
from commands import launch, mistake, read_json, refused, words_of
from helpers import close, identical, input_error
from PIL import Image
from safetensors.torch import save_file
from test_beam_search import HandScorer
from tiny_models import saved, tiny_model

from knobwise.agents.selector.selector import Selector
from knobwise.agents.selector.settings import SelectorConfig
from knobwise.agents.training.checkpoint import save_checkpoint
from knobwise.envs.demonstrations.beam_files import read_beam_data
from knobwise.envs.demonstrations.beam_table import BeamTable, bank_rows
from knobwise.envs.demonstrations.settings import METHODS
from knobwise.profiling.demonstrations.profile import profile_beams
from knobwise.profiling.demonstrations.settings import BeamProfileConfig, PoolConfig, VLMTaskConfig
from knobwise.profiling.demonstrations.tasks import BeamTask, kinds_of_questions, no_beams, vlm_task
from knobwise.profiling.measuring.questions import VQAData, VQAItem

BEAM, _, RETRIEVAL, RANDOM, POLICY = range(len(METHODS))
CONFIG = BeamProfileConfig(shots=2, width=3, retrieved=2, random=2, chunk=2)


def task(scorer=None):
    """Seven queries with pools of five to one out of a bank of six."""
    generator = torch.Generator().manual_seed(0)
    pool = torch.stack([torch.randperm(6, generator=generator)[:5] for _ in range(7)])
    pool = pool.where(torch.arange(5) < torch.tensor([5, 5, 5, 4, 3, 2, 1])[:, None], -1)
    table = BeamTable(
        name="by hand",
        query_ids=tuple("abcdefg"),
        **no_beams(7) | {"pool": pool},
        queries=torch.randn(7, 4, generator=generator),
        candidates=torch.randn(6, 4, generator=generator),
        blocks={"image": (0, 2), "question": (2, 4)},
    )
    worth = torch.randn(7, 6, generator=generator).tolist()
    return BeamTask(table, scorer or HandScorer(worth), {"model": "hand"})


def backwards(rows, count):
    """A policy that takes the last two places of the pool, and once in a while the first."""
    last = (task().table.pool[rows] >= 0).sum(1)
    sequences = torch.stack([last - 1, last - 2], 1)[:, None].expand(-1, count, -1).clone()
    sequences[:, torch.rand(count) < 0.5] = torch.tensor([0, -1])
    return sequences


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def test_everything_that_was_asked_for_is_recorded_with_how_it_was_found(out):
    whole = task()
    table = profile_beams(out, whole, CONFIG)
    for query, size in enumerate([5, 5, 5, 4, 3, 2, 1]):
        counts = table.found_by[query].clamp_min(0).bincount(minlength=len(METHODS))
        assert counts[RETRIEVAL] == max(1, min(2, size - 1))
        assert counts[BEAM] >= min(3, size * (size - 1) or 1)
        assert 1 <= counts[RANDOM] <= 2
        assert set(table.lengths[query].tolist()) <= {min(2, size), 0}
    log_prob = table.fields["logprob_score"]
    assert (log_prob[:, 0] == log_prob.nan_to_num(-9).amax(1)).all()
    rows, shown = recorded(table)
    close(log_prob[table.beam_mask], whole.scorer(rows, shown)["logprob_score"])
    close(table.fields["beam_score"], log_prob.exp() - math.exp(-3), 1e-6)


def read_back(out):
    embeddings = out / "embeddings.safetensors", out / "query_embeddings.safetensors"
    return read_beam_data(out / "beams.json", *embeddings)


def recorded(table):
    """The queries of all recorded sequences, and what these show."""
    rows, beams = table.beam_mask.nonzero(as_tuple=True)
    return rows, bank_rows(table.pool[rows], table.sequences[rows, beams])


def test_what_is_written_fits_together(out, capsys):
    table = profile_beams(out, task(), CONFIG)
    assert BeamTable.load(out / "beams.safetensors").digest == table.digest
    again = read_back(out)
    for name in ("sequences", "found_by", "candidates"):
        identical(getattr(again, name), getattr(table, name))
    assert read_json(out / "beams.json")["_meta"]["query_ids"] == list("abcdefg")
    info = read_json(out / "beams-info.json")
    assert info["task"] == {"model": "hand"}
    assert info["beams"].items() >= {"width": 3, "retrieved": 2, "random": 2, "chunk": 2}.items()
    for name, digest in info["sha256"].items():
        assert sha256((out / name).read_bytes()).hexdigest() == digest
    (row,) = [r for r in info["figures"]["found"] if (r["found_by"], r["shots"]) == ("beam", 2)]
    pairs = (table.found_by == BEAM) & (table.lengths == 2)
    correct = table.fields["vqa_correct"].where(pairs, torch.nan)
    shares = [correct.nanmean(), (correct == 1).any(1).sum() / 6]  # one query has a pool of one
    assert row["sequences"] == pairs.sum()
    close(torch.tensor([row["correct"], row["any_correct"]]), shares, 1e-6)
    assert f"{row['correct']:.1%}" in capsys.readouterr().out
    assert not list(out.rglob(".*"))
    without = profile_beams(out, task(), replace(CONFIG, json=False))
    assert without.digest == table.digest  # no other run


@pytest.mark.parametrize("at", [0, 5, 10])
def test_an_interrupted_run_goes_on_and_gives_what_an_uninterrupted_one_gives(tmp_path, out, at):
    whole = task()
    wanted = profile_beams(tmp_path / "whole", whole, CONFIG)
    with pytest.raises(KeyboardInterrupt):
        profile_beams(out, task(HandScorer(whole.scorer.worth, at)), CONFIG)
    assert not (out / "beams.safetensors").exists()
    saved = [int(path.stem) for path in (out / "state" / "search").glob("*.safetensors")]
    second = task()
    assert profile_beams(out, second, CONFIG).digest == wanted.digest
    # nothing of a chunk of two queries that was finished is scored again
    left = [row for row in whole.scorer.scored if row[0] // 2 * 2 not in saved]
    assert second.scorer.scored == left
    third = task()
    assert profile_beams(out, third, CONFIG).digest == wanted.digest
    assert third.scorer.scored == []


def test_rounds_of_a_policy_are_added_once_each(out):
    config = replace(CONFIG, draws=4)
    base = profile_beams(out, task(), config)
    adding = task()
    first = profile_beams(out, adding, config, backwards, "one")
    assert (first.round == 1).sum(1).tolist() == [4] * 7
    kept = first.sequences[:, : base.num_beams]
    identical(kept[base.beam_mask], base.sequences[base.beam_mask])
    assert not first.fields["vqa_correct"][first.beam_mask].isnan().any()
    # each different sequence once, and none that had been recorded
    rows, shown = recorded(base)
    known = map(tuple, torch.cat([rows[:, None], shown], 1).tolist())
    assert len(adding.scorer.scored) == len(set(adding.scorer.scored) - set(known))

    unused = task()
    # the same command: nothing new
    assert profile_beams(out, unused, config, backwards, "one").digest == first.digest
    second = profile_beams(out, task(), replace(config, draws=2), backwards, "two")
    assert [int((second.round == index).sum()) for index in (1, 2)] == [28, 14]
    # without a policy: all there is
    assert profile_beams(out, unused, config).digest == second.digest
    assert unused.scorer.scored == []
    info = read_json(out / "beams-info.json")
    assert [beginning["policy"] for beginning in info["rounds"]] == ["one", "two"]
    assert {"policy-1", "policy-2"} <= {row["found_by"] for row in info["figures"]["found"]}
    assert read_back(out).round.max() == 2


def test_an_interrupted_round_goes_on_with_its_policy_alone(tmp_path, out):
    wanted = profile_beams(tmp_path / "whole", task(), CONFIG, backwards, "one")
    like = task()
    profile_beams(out, like, CONFIG)
    with pytest.raises(KeyboardInterrupt):
        profile_beams(out, task(HandScorer(like.scorer.worth, 2)), CONFIG, backwards, "one")
    for policy in ((), (backwards, "two")):
        with input_error("round-1"):
            profile_beams(out, task(), CONFIG, *policy)
    assert profile_beams(out, task(), CONFIG, backwards, "one").digest == wanted.digest


ITEMS = "model=model vlm.data=items.jsonl"
VLM = f"{ITEMS} vlm.embeddings=e.safetensors"
TINY = "profile model=learner learner.queries=12 learner.candidates=300 beams.chunk=5 out=out"


def test_the_built_in_learner_end_to_end(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    launch(TINY)
    assert "12 queries with pools of 48 out of 300 candidates" in capsys.readouterr().out
    table = BeamTable.load("out/beams.safetensors")
    assert [int((table.found_by == m).sum()) for m in (BEAM, RETRIEVAL, RANDOM)] == [60, 36, 48]
    found = read_json("out/beams-info.json")["figures"]["found"]
    correct = {row["found_by"]: row["correct"] for row in found}
    assert correct["beam"] > 0.8 > 0.6 > correct["random"]

    # a selector's own draws
    selector = Selector.fitted(SelectorConfig(width=8), table.queries, table.candidates)
    save_checkpoint("policy.pt", selector, table, {})
    for _ in range(2):  # the second time nothing is new
        launch(TINY, "checkpoint=policy.pt beams.draws=3")
        with_draws = BeamTable.load("out/beams.safetensors")
        assert (with_draws.found_by == POLICY).sum() == 36
        assert (with_draws.lengths[with_draws.round == 1] == 2).all()
    # another setting in the same folder
    assert "random: 4 → 1" in mistake(words_of(TINY, "beams.random=1"), capsys)


@pytest.fixture(scope="module")
def vlm_files(tmp_path_factory):
    """A tiny random LLaVA, six items about four images, and embeddings of them."""
    folder = tmp_path_factory.mktemp("vlm")
    saved(folder / "model", *tiny_model("llava"))
    (folder / "empty").mkdir()
    for row in range(4):
        Image.new("RGB", (8, 8), (40 * row, 90, 10)).save(folder / f"{row}.png")
    known = {"question": "How many dogs ?", "choices": ["1", "2", "3"]}
    rows = [
        known | {"id": f"q{row}", "image": f"{row % 4}.png", "answers": str(1 + row % 3)}
        for row in range(6)
    ]
    pl.DataFrame(rows).write_ndjson(folder / "items.jsonl")
    embeddings = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    parts = {"e": embeddings, "narrow": embeddings[:, :3].contiguous(), "short": embeddings[:4]}
    for name, part in parts.items():
        save_file({"embeddings": part}, folder / f"{name}.safetensors")
    return folder


def test_a_vision_language_model_end_to_end(vlm_files, tmp_path, monkeypatch):
    monkeypatch.chdir(vlm_files)
    options = "vlm.image_columns=2 vlm.device=cpu pool.size=4 beams.width=2 beams.random=1"
    launch("profile", VLM, options, [f"out={tmp_path}"])
    table = BeamTable.load(tmp_path / "beams.safetensors")
    assert table.query_ids == tuple(f"q{i}" for i in range(6))
    assert table.blocks == {"image": (0, 2), "question": (2, 5)}
    pools = [{i for i in row if i >= 0} for row in table.pool.tolist()]
    # items 0 and 4 show one image, 1 and 5 another; every pool is all that is left
    assert pools[:2] == pools[4:] == [{1, 2, 3, 5}, {0, 2, 3, 4}]
    assert all(query not in pool for query, pool in enumerate(pools))
    assert (table.fields["logprob_score"][table.beam_mask] < 0).all()
    first, second = table.fields["logprob_score"][:, :2].T
    assert (first >= second).all()
    assert (tmp_path / "beams.json").exists()


@pytest.mark.parametrize(
    ("words", "fault"),
    {
        "model=gpt": "vlm.data",
        ITEMS: "vlm.embeddings",
        f"{VLM} vlm.data=none.jsonl": "none.jsonl",
        f"{ITEMS} vlm.embeddings=none.npz": "none.npz",
        f"{ITEMS} vlm.embeddings=short.safetensors": "short",
        f"{VLM} vlm.bank=items.jsonl": "query_embeddings",
        f"{VLM} vlm.image_columns=5": "columns 5 to 5",
        f"{VLM} vlm.bank=items.jsonl vlm.query_embeddings=narrow.safetensors": "[M, d]",
        f"{VLM} pool.sampler=covers": "covers",
        f"{VLM} model=empty": "empty",
        f"{VLM} beams.same_kind=2": "beams.same_kind",  # its items name no kinds
        "model=learner learner.variant=lazy": "lazy",
        "model=learner learner.part=validation": "validation",
        "model=learner learner.queries=0": "queries",
        "model=learner pool.size=0": "pool.size",
        "model=learner pool.sampler=nearest": "nearest",
        "model=learner beams.shots=0": "beams.shots",
        "model=learner beams.random=-1": "beams.random",
        "model=learner beams.width=0 beams.retrieved=0 beams.random=0": "width",
        "model=learner learner.queries=3 learner.candidates=99 checkpoint=none.pt": "none.pt",
    }.items(),
)
def test_mistakes_end_with_one_message_before_anything_is_written(
    vlm_files, monkeypatch, capsys, words, fault
):
    monkeypatch.chdir(vlm_files)
    assert fault in refused(words_of("profile out=out", words), capsys)


def test_questions_without_a_kind_are_of_no_kind():
    """Nor are they of the same one."""
    kinds = ("sum", "", "plural", "")
    items = tuple(VQAItem(str(i), None, "?", ("a",), question_type=k) for i, k in enumerate(kinds))
    known = kinds_of_questions(VQAData(items, items[1:]))
    same = known.queries.unsqueeze(1) == known.candidates
    assert same.nonzero().tolist() == [[2, 1]]
    assert kinds_of_questions(VQAData(items[1:2], items[3:])) is None


def test_a_bank_of_its_own(vlm_files, monkeypatch):
    monkeypatch.chdir(vlm_files)
    config = VLMTaskConfig(
        data="items.jsonl", bank="items.jsonl", embeddings="e.safetensors", query_embeddings="e.safetensors",
        device="cpu",
    )  # fmt: skip
    found = vlm_task("model", config, PoolConfig(sampler="random", size=3, seed=1))
    assert found.table.query_ids[:2] == ("q0", "q1")
    for query in (0, 1):
        assert not set(found.table.pool[query].tolist()) & {query, query + 4}
    assert set(found.sources) == {"items.jsonl"}
    assert found.options["pool"] == {"sampler": "random", "size": 3, "seed": 1}
