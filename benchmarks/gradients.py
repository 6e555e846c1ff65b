"""Forward and backward passes in two ways each: the median CPU ms on one thread, and their ratio.

- The group as an axis against flat rows with repeated contexts: the same 64 contexts × 8 draws, the same network and
  loss; encoded once per context and asked for the log-probs of its whole group, or encoded for every draw.
- What it costs a selector to learn from a query's beams of 2–4 shots: the pool encoded once, or once for every beam.
  The log-probs are asserted to be equal. For the original's network (width 256) and for the default one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from tensordict import TensorDict
from timing import Functions, calls_of, in_turns, medians
from torch import Tensor

from knobwise.agents.controller.actor import make_actor
from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.selector.networks import CrossAttentive
from knobwise.agents.selector.sequences import SequenceDistribution
from knobwise.agents.selector.settings import SelectorConfig
from knobwise.envs import ConfigBandit, builtin_profile
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.losses import GRPOLoss
from knobwise.losses.functional import clipped_surrogate, group_advantage

ROUNDS, SECONDS = 15, 0.25
CONTEXTS, GROUP = 64, 8
FEATURES, POOL, BEAMS, SHOTS = 512, 64, 12, 4
NETWORKS = {
    "original": SelectorConfig(width=256, projection="linear", update="convex"),
    "default": SelectorConfig(),
}


def compare(title: str, functions: Functions) -> None:
    (first, ms), (second, other) = medians(in_turns(functions, ROUNDS, calls_of(functions, SECONDS))).items()
    print(f"{title}: {first} {ms:.3f} ms, {second} {other:.3f} ms; ratio {other / ms:.2f}", flush=True)


def passes(network: torch.nn.Module, loss: Callable[[], Tensor]) -> Callable[[], None]:
    """A forward and a backward pass."""

    def learn() -> None:
        network.zero_grad()
        loss().backward()

    return learn


# -- groups ------------------------------------------------------------------------------------------------------------


def groups(table: ProfileTable) -> Functions:
    torch.manual_seed(0)
    controller = Controller.for_table(table, torch.arange(table.num_samples), PolicyConfig()).eval()
    env = ConfigBandit(table, batch_size=CONTEXTS, group_size=GROUP, lean=True)
    data = env.step(env.rand_action(env.reset()))
    grouped, flat = make_actor(controller, table, GROUP), make_actor(controller, table)
    with torch.no_grad():
        data["action_log_prob"] = grouped.get_dist(data).log_prob(data["action"])
    keys = ("row", "budget_ms", "action", "action_log_prob", ("next", "reward"))
    data = data.select(*keys)
    repeated = TensorDict({key: data[key].repeat_interleave(GROUP, 0) for key in keys[:2]}, [CONTEXTS * GROUP])
    repeated["action"] = data["action"].flatten(0, 1)
    loss = GRPOLoss(grouped, functional=False)
    loss.diagnostics = False

    def as_flat_rows() -> Tensor:
        new = flat.get_dist(repeated).log_prob(repeated["action"]).unflatten(0, (CONTEXTS, GROUP))
        advantage = group_advantage(data["next", "reward"])
        return -clipped_surrogate(new, data["action_log_prob"], advantage, 0.2)[0].mean()

    along_an_axis = passes(controller, lambda: loss(data)["loss_objective"])
    return {"group as an axis": along_an_axis, "flat rows": passes(controller, as_flat_rows)}


# -- beams -------------------------------------------------------------------------------------------------------------


def beams_of(queries: int) -> Tensor:
    """int64 [P, BEAMS, SHOTS]: 2 to 4 different places each, then −1."""
    sequences = torch.rand(queries, BEAMS, POOL).argsort(-1)[..., :SHOTS]
    lengths = torch.randint(2, SHOTS + 1, (queries, BEAMS, 1))
    return sequences.masked_fill(torch.arange(SHOTS) >= lengths, -1)


def beams(config: SelectorConfig, queries: int) -> Functions:
    torch.manual_seed(0)
    network = CrossAttentive(config, FEATURES).eval()
    query, pool = torch.randn(queries, FEATURES), torch.randn(queries, POOL, FEATURES)
    mask, sequences = torch.ones(queries, POOL, dtype=torch.bool), beams_of(queries)

    def once() -> Tensor:
        return SequenceDistribution(network, network.encode(query, pool, mask), SHOTS, BEAMS).log_prob(sequences)

    def per_beam() -> Tensor:
        encoded = network.encode(*(each.repeat_interleave(BEAMS, 0) for each in (query, pool, mask)))
        log_prob = SequenceDistribution(network, encoded, SHOTS, 1).log_prob(sequences.view(-1, 1, SHOTS))
        return log_prob.view(queries, BEAMS)

    torch.testing.assert_close(once(), per_beam(), atol=1e-4, rtol=1e-5)
    old, advantage = once().detach(), torch.randn(queries, BEAMS)

    def loss(log_probs: Callable[[], Tensor]) -> Callable[[], Tensor]:
        return lambda: -clipped_surrogate(log_probs(), old, advantage, 0.2)[0].mean()

    return {"encoded once": passes(network, loss(once)), "for every beam": passes(network, loss(per_beam))}


if __name__ == "__main__":
    torch.set_num_threads(1)
    TABLE = builtin_profile()
    for NAME, EACH in (("built-in profile", TABLE), ("without features", dataclasses.replace(TABLE, features={}))):
        compare(f"{NAME}, {CONTEXTS} contexts × {GROUP} draws", groups(EACH))
    for NAME, CONFIG in NETWORKS.items():
        for QUERIES in (1, 32):
            compare(f"{NAME} selector, {QUERIES} queries × {BEAMS} beams, {POOL} candidates", beams(CONFIG, QUERIES))
