from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from knobwise.agents.selector.selector import Selector, StoredEmbeddings
from knobwise.agents.selector.settings import SelectorConfig
from knobwise.common.errors import InputError

CONFIGS = [
    SelectorConfig(version=version, width=8, heads=2, update=update)
    for version in ("v0", "v1", "v2")
    for update in ("additive", "convex")
]
every_config = pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.version}-{c.update}")


def embeddings() -> StoredEmbeddings:
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor([1.0, 100.0, 1e-3, 1.0])
    queries, candidates = (3 + scale * torch.randn(n, 4, generator=generator) for n in (6, 20))
    queries[:, 3] = candidates[:, 3] = 3.0
    return StoredEmbeddings(queries, candidates)


def pools() -> Tensor:
    pool = torch.stack([torch.randperm(20, generator=torch.Generator().manual_seed(q))[:5] for q in range(6)])
    pool[1, 2:] = -1
    pool[2] = -1
    return pool


def selector(config: SelectorConfig = CONFIGS[0]) -> Selector:
    torch.manual_seed(0)
    stored = embeddings()
    return Selector.fitted(config, stored.query_table, stored.candidate_table)


def batch() -> tuple[Tensor, Tensor, Tensor]:
    pool = pools()
    return (*embeddings().both(torch.arange(6), pool), pool >= 0)


# -- embeddings --------------------------------------------------------------------------------------------------------


def test_stored_embeddings_are_looked_up_and_padding_is_zero() -> None:
    stored = embeddings()
    queries, found = stored.both(torch.tensor([5, -1]), torch.tensor([[3, -1], [0, 3]]))
    assert torch.equal(found[0, 0], stored.candidate_table[3])
    assert torch.equal(found[1], stored.candidate_table[[0, 3]])
    assert (found[0, 1] == 0).all()
    assert torch.equal(queries, torch.stack([stored.query_table[5], torch.zeros(4)]))
    assert not list(stored.parameters())
    assert not stored.state_dict()


# -- the selector ------------------------------------------------------------------------------------------------------


def test_embeddings_are_standardised_by_queries_and_candidates_together() -> None:
    stored, made = embeddings(), selector()
    both = torch.cat([stored.query_table, stored.candidate_table])
    normal = (both - made.mean) / made.scale
    torch.testing.assert_close(normal.mean(0), torch.zeros(4), atol=1e-4, rtol=0)
    torch.testing.assert_close(normal.std(0, correction=0), torch.tensor([1.0, 1.0, 1.0, 0.0]), atol=1e-3, rtol=0)


def test_the_scale_of_the_embeddings_does_not_matter() -> None:
    stored = embeddings()
    torch.manual_seed(0)
    scaled = Selector.fitted(CONFIGS[4], 7 * stored.query_table - 1, 7 * stored.candidate_table - 1)
    query, pool, mask = batch()
    wanted = selector(CONFIGS[4]).distribution(query, pool, mask, 2).beam(3)
    found = scaled.distribution(7 * query - 1, 7 * pool - 1, mask, 2).beam(3)
    assert torch.equal(found[0], wanted[0])
    torch.testing.assert_close(found[1], wanted[1], atol=1e-3, rtol=0)


@pytest.mark.parametrize("decoding", ["greedy", "beam"])
@every_config
def test_choices_are_different_places_of_the_querys_own_pool(config: SelectorConfig, decoding: str) -> None:
    made = selector(config)
    chosen = made.choose(*batch(), shots=3, decoding=decoding, width=4)
    assert chosen.shape == (6, 3)
    assert chosen.dtype == torch.int64
    for query, size in enumerate((5, 2, 0, 5, 5, 5)):
        kept = chosen[query, : min(3, size)].tolist()
        assert len(set(kept)) == len(kept)
        assert all(0 <= place < size for place in kept)
        assert (chosen[query, size:] == -1).all()


def test_greedy_is_the_mode_and_beam_is_at_least_as_probable() -> None:
    made = selector(CONFIGS[5])
    dist = made.distribution(*batch(), 3)
    greedy, beam = (made.choose(*batch(), shots=3, decoding=decoding) for decoding in ("greedy", "beam"))
    assert torch.equal(greedy, dist.mode)
    assert torch.equal(beam, dist.beam(5)[0][:, 0])
    assert (dist.log_prob(beam) >= dist.log_prob(greedy) - 1e-6).all()


def test_choosing_is_without_dropout_and_leaves_the_mode_as_it_was() -> None:
    made = selector(dataclasses.replace(CONFIGS[4], dropout=0.9)).train()
    first = made.choose(*batch(), shots=3)
    assert all(torch.equal(made.choose(*batch(), shots=3), first) for _ in range(5))
    assert made.training
    assert not made.eval().choose(*batch(), shots=3).requires_grad
    assert not made.training


def test_log_probs_are_the_same_before_any_step() -> None:
    """Old and new log-probs of a selector in eval mode: ratio 1, KL 0."""
    network = selector(CONFIGS[4]).eval()
    dist = network.distribution(*batch(), 2, group_size=8)
    action, old = dist.sample_with_log_prob()
    assert (network.distribution(*batch(), 2, group_size=8).log_prob(action) - old).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"query": torch.zeros(6, 3)}, "query embeddings are 3 wide, but this selector reads 4"),
        ({"pool": torch.zeros(6, 5, 3)}, "candidate embeddings are 3 wide"),
        ({"shots": 0}, "shots=0: must be at least 1"),
        ({"decoding": "best"}, "decoding='best': must be one of greedy, beam"),
        ({"decoding": "beam", "width": 0}, "width=0"),
    ],
)
def test_mistakes_are_told(changed: dict[str, Any], message: str) -> None:
    query, pool, mask = batch()
    with pytest.raises(InputError, match=message):
        selector().choose(**{"query": query, "pool": pool, "mask": mask, "shots": 2} | changed)


# -- saved and restored ------------------------------------------------------------------------------------------------


@every_config
def test_restored_is_the_same_selector(config: SelectorConfig, tmp_path: Path) -> None:
    made = selector(config)
    made.stage = "grpo"
    torch.save(made.plain(), tmp_path / "selector.pt")
    restored = Selector.restored(torch.load(tmp_path / "selector.pt", weights_only=True))
    assert restored.config == config
    assert restored.stage == "grpo"
    assert not restored.training
    wanted, found = (s.eval().distribution(*batch(), 3).beam(6) for s in (made, restored))
    assert all(map(torch.equal, found, wanted))


@every_config
def test_every_key_must_be_there_and_no_other(config: SelectorConfig) -> None:
    plain = selector(config).plain()
    for key, value in plain["state"].items():
        missing = {k: v for k, v in plain["state"].items() if k != key}
        for state in (missing, missing | {f"{key}_renamed": value}, plain["state"] | {f"{key}_renamed": value}):
            with pytest.raises(RuntimeError, match=r"Missing key|Unexpected key"):
                Selector.restored(plain | {"state": state})


def test_weights_of_another_network_are_refused() -> None:
    plain = selector(CONFIGS[4]).plain()
    for changed in ({"features": 5}, {"selector": plain["selector"] | {"update": "convex"}}):
        with pytest.raises(RuntimeError, match="size mismatch"):
            Selector.restored(plain | changed)
    with pytest.raises(InputError, match="stage='v3': must be one of sft, rce, grpo"):
        Selector.restored(plain | {"stage": "v3"})
