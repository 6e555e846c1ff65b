"""Feature-space augmentation: what the regression of a controller is fitted on is varied, so that it overfits less.

Only regression is augmented, in the warm-up and beside GRPO. GRPO itself compares the policy with the one that drew, on
the same features; there the same noise would have to be in both, and noise in one alone is taken for a change of the
policy.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from knobwise.agents.controller.actor import OutcomesOfRows
from knobwise.agents.controller.networks import UtilityNetwork
from knobwise.agents.predictors.features import FeatureNormaliser
from knobwise.agents.training.settings import AugmentationConfig
from knobwise.envs.tables.profile_table import ProfileTable


class Augmentation:
    """Varies normalised features, and with them what was measured.

    Mixing is mixup (Zhang et al. 2018, "mixup: Beyond Empirical Risk Minimization", equation 1) with log-latency in the
    place of latency; a cell counts where both samples have it.

    Args:
        config: what is varied, and how much.
        table: for the data set of each sample.
        normaliser: of the features, for which column is of which block.
    """

    def __init__(self, config: AugmentationConfig, table: ProfileTable, normaliser: FeatureNormaliser) -> None:
        self.config = config
        device = normaliser.mean.device
        numbers = {name: i for i, name in enumerate(sorted(set(table.dataset_names)))}
        self.dataset = torch.tensor([numbers[name] for name in table.dataset_names], device=device)
        self.blocks = len(normaliser.sizes)
        widths = torch.tensor(list(normaliser.sizes.values()), dtype=torch.int64)
        columns = torch.arange(self.blocks).repeat_interleave(widths).to(device)
        self.block_of_column = torch.cat([columns, columns[normaliser.has_missing]])

    def __call__(self, x: Tensor, row: Tensor, measured: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Draw anew from torch's generator.

        Args:
            x: float [n, M, width], normalised features of n contexts of each of M members.
            row: int64 [n, M], which rows of the table these are.
            measured: float [n, M, C] each, NaN where not profiled.

        Returns:
            x and measured, varied.
        """
        if self.config.mix > 0:
            partner = self._partners(row)
            share = torch.distributions.Beta(self.config.mix, self.config.mix).sample(row.shape).to(x).unsqueeze(-1)
            x = torch.lerp(_taken(x, partner), x, share)
            # without a partner the sample is mixed with itself, and stays as it is
            measured = {name: torch.lerp(_taken(cells, partner), cells, share) for name, cells in measured.items()}
        if self.config.noise > 0:
            x = x + self.config.noise * torch.randn_like(x)
        if self.config.drop > 0:
            kept = torch.rand(*row.shape, self.blocks, device=x.device) >= self.config.drop
            x = x * kept[..., self.block_of_column]
        return x, measured

    def _partners(self, row: Tensor) -> Tensor:
        """For each context [n, M] the place (of n) of another one of its member and data set; itself if there is none.

        In a random order in which data sets stand together it is the next one.
        """
        dataset = self.dataset[row]
        order = (dataset + torch.rand(row.shape, dtype=torch.float64, device=row.device)).argsort(0)
        following = order.roll(-1, 0)
        same = dataset.gather(0, order) == dataset.gather(0, following)
        return torch.empty_like(order).scatter_(0, order, torch.where(same, following, order))


def _taken(values: Tensor, place: Tensor) -> Tensor:
    """values [n, M, d] at these places [n, M] of the first axis."""
    return values.gather(0, place.unsqueeze(-1).expand(-1, -1, values.shape[-1]))


class OutcomesOfFeatures(TensorDictModuleBase):
    """What a `UtilityNetwork` predicts for normalised `features` [n, M, width]; writes what `RegressionLoss` reads."""

    in_keys = ["features"]
    out_keys = OutcomesOfRows.out_keys

    def __init__(self, network: UtilityNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        outcomes = self.network.outcomes(tensordict["features"].transpose(0, 1))
        for key in self.out_keys:
            tensordict[key] = getattr(outcomes, key).transpose(0, 1)
        return tensordict
