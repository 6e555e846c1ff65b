"""Every loss on fixed draws: its value, its diagnostics and its gradient, in double precision."""

import torch
from actors import actor_of
from golden.tables import number
from tensordict import TensorDict
from torch import nn

from knobwise.losses import ADVANTAGES, ExactGRPOLoss, GRPOLoss, RCELoss

GRID = torch.cartesian_prod(torch.arange(3), torch.arange(2))
CONTEXTS = 6
GROUP = 4
USUAL = {"kl_to_ref_coeff": 0.3, "entropy_coeff": 0.02}
SETTINGS = {
    **{f"advantage={name}": {"advantage": name} for name in sorted(ADVANTAGES)},
    "advantage=zscore, std not below .1": {"advantage": "zscore", "advantage_std_floor": 0.1},
    "advantage=zscore, std + eps": {
        "advantage": "zscore",
        "advantage_std_floor": 0.0,
        "advantage_std_eps": 1e-8,
    },
    "advantage_clip=0.2": {"advantage_clip": 0.2},
    "reward_spread=0.5": {"reward_spread": 0.5, "advantage": "zscore"},
    "clip_epsilon=0.05": {"clip_epsilon": 0.05},
    "clip_epsilon=[0.02,0.3]": {"clip_epsilon": (0.02, 0.3)},
    "without KL and entropy": {"kl_to_ref_coeff": 0.0, "entropy_coeff": 0.0},
    "the best two": {"top": 2},
}


def values():
    """Losses and gradients by kind and setting."""
    made = {}
    for name, settings in SETTINGS.items():
        made[f"sampled, {name}"] = _of(GRPOLoss(_actor(), **USUAL | settings), _draws())
        if settings.get("top") is None:
            made[f"exact, {name}"] = _of(ExactGRPOLoss(_actor(), **USUAL | settings), _draws())
    made["sampled, masked"] = _of(GRPOLoss(_actor(), masked=True, **USUAL), _draws())
    knobs = ["crops", "k"]
    made["sampled, a key a knob"] = _of(GRPOLoss(_actor(knobs), **USUAL), _draws(knobs))
    made["exact, cells not profiled"] = _of(ExactGRPOLoss(_actor(holes=True), **USUAL), _holes())
    for temperature in (0.5, 2.0, float("inf")):
        loss = RCELoss(_actor(), temperature=temperature)
        made[f"RCE, temperature={temperature}"] = _of(loss, _draws())
        loss = RCELoss(_actor(), temperature=temperature, recorded=True)
        made[f"RCE of recorded actions, temperature={temperature}"] = _of(loss, _draws())
    made["RCE, cells not profiled"] = _of(RCELoss(_actor(holes=True), temperature=0.5), _holes())
    return made


def _of(loss, data):
    out = loss(data)
    total = sum(value for name, value in out.items() if name.startswith("loss_"))
    slopes = torch.autograd.grad(total, list(loss.parameters()))
    values = {name: float(f"{value.item():.10g}") for name, value in sorted(out.items())}
    gradient = torch.cat([slope.flatten() for slope in slopes]).tolist()
    return values | {"gradient": [float(f"{slope:.10g}") for slope in gradient]}


class Scores(nn.Linear):
    """Scores of the configurations; with `holes` those of cells not profiled are −∞."""

    def __init__(self, holes):
        super().__init__(3, len(GRID), dtype=torch.float64)
        self.weight.data = _numbers(len(GRID), 3, salt=1)
        self.bias.data = _numbers(len(GRID), salt=2)
        self.holes = holes

    def forward(self, observation):
        scores = super().forward(observation)
        return scores.masked_fill(_mask(), -torch.inf) if self.holes else scores


def _actor(knobs=None, holes=False):
    """A linear policy over six configurations; with `knobs` each has a key of its own."""
    return actor_of(Scores(holes), GRID, GROUP, knobs)


def _mask():
    """Which cells were not profiled."""
    cells = [[number(p, c, 9) % 4 == 0 for c in range(len(GRID))] for p in range(CONTEXTS)]
    return torch.tensor(cells)


def _draws(knobs=None):
    """Four draws for each of six contexts, and all rewards; one group is empty, some are short."""
    observation = _numbers(CONTEXTS, 3, salt=3)
    reward = (_numbers(CONTEXTS, len(GRID), salt=4) + 1) / 2
    # near the policy, so that some ratios are inside the clip, some beyond either end
    scores = observation @ _numbers(len(GRID), 3, salt=1).T + _numbers(len(GRID), salt=2)
    old = (scores + 0.3 * _numbers(CONTEXTS, len(GRID), salt=5)).log_softmax(-1)
    reference = (scores + _numbers(CONTEXTS, len(GRID), salt=6)).log_softmax(-1)
    index = torch.tensor(
        [[number(p, g, 7) % len(GRID) for g in range(GROUP)] for p in range(CONTEXTS)]
    )
    reward[1] = 0.5  # a group that teaches nothing
    reward[2] = 0.5 + 0.05 * reward[2]  # one whose rewards hardly differ
    old_draws = old.gather(1, index)
    data = {
        "observation": observation,
        "reward_per_configuration": reward,
        "behaviour_log_probs": old,
        "reference_log_prob": reference.gather(1, index),
        "reference_log_probs": reference,
        "group_mask": torch.arange(GROUP) < torch.arange(CONTEXTS).unsqueeze(1),
        "next": {"reward": reward.gather(1, index)},
    }
    action = GRID[index]
    if knobs:
        # a group of draws is an axis of each knob's own key
        data |= {name: action[..., place] for place, name in enumerate(knobs)}
        data |= {f"{name}_log_prob": old_draws / len(knobs) for name in knobs}
    else:
        data |= {"action": action, "action_log_prob": old_draws}
    return TensorDict(data, [CONTEXTS])


def _holes():
    data = _draws()
    mask = _mask()
    data["reward_per_configuration"] = data["reward_per_configuration"].masked_fill(mask, torch.nan)
    for name in ("behaviour_log_probs", "reference_log_probs"):
        data[name] = data[name].masked_fill(mask, -torch.inf).log_softmax(-1)
    return data


def _numbers(*shape, salt):
    """Numbers from −1 to 1, float64, the same everywhere."""
    made = [
        number(place, salt, below=1999) / 999.5 - 1 for place in range(torch.Size(shape).numel())
    ]
    return torch.tensor(made, dtype=torch.float64).view(shape)
