"""The group as an axis against flat rows with repeated contexts, forward and backward, in CPU time on one thread.

The same 64 contexts × 8 draws, the same network and the same loss: once encoded once for each context and asked for the
log-probs of its whole group, once encoded for every draw. Prints ms of each and the ratio, for the features of the
built-in profile and for none.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import torch
from tensordict import TensorDict

from knobwise.agents.controller.actor import make_actor
from knobwise.agents.controller.controller import Controller
from knobwise.agents.training.settings import PolicyConfig
from knobwise.envs import ConfigBandit, builtin_profile
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.losses import GRPOLoss

ROUNDS, CALLS, CONTEXTS, GROUP = 15, 20, 64, 8


def losses(table: ProfileTable) -> dict[str, Callable[[], None]]:
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

    def along_an_axis() -> None:
        loss(data)["loss_objective"].backward()

    def as_flat_rows() -> None:
        new = flat.get_dist(repeated).log_prob(repeated["action"]).unflatten(0, (CONTEXTS, GROUP))
        ratio = (new - data["action_log_prob"]).exp()
        reward = data["next", "reward"]
        scale = reward.std(1, correction=0, keepdim=True).clamp_min(0.1)
        advantage = ((reward - reward.mean(1, keepdim=True)) / scale).clamp(-5, 5)
        (-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()).backward()

    return {"axis": along_an_axis, "flat": as_flat_rows}


def compare(name: str, ways: dict[str, Callable[[], None]]) -> None:
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(ROUNDS):
        for way, call in ways.items():
            start = time.process_time()
            for _ in range(CALLS):
                call()
            times[way].append((time.process_time() - start) / CALLS * 1e3)
    axis, flat = (torch.tensor(values[1:]) for values in times.values())
    print(
        f"{name}, {CONTEXTS} contexts × {GROUP} draws: group as an axis {axis.median():.2f} ms, flat rows "
        f"{flat.median():.2f} ms; ratio flat / axis {(flat / axis).median():.2f}",
        flush=True,
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    TABLE = builtin_profile()
    compare("built-in profile", losses(TABLE))
    compare("without features", losses(dataclasses.replace(TABLE, features={})))
