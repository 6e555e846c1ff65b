"""From a profile's feature blocks to the one vector that policies and baselines read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from knobwise.common.errors import InputError
from knobwise.envs.tables.columns import Column, columns_of
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.envs.tables.tensor_file import with_prefix

HEAVY_TAILED = 10.0
"""Kurtosis above which a column is taken logarithmically: 3 is a normal variable, 9 an exponential
one."""


class FeatureNormaliser(nn.Module):
    """Joins named feature blocks and normalises them.

    It imputes missing values by the median, takes heavy tails logarithmically, standardises and
    clips. Everything is fitted on the blocks (the training split) and kept in buffers, so that a
    checkpoint includes it. A column that never varies gives 0; a column with missing values in the
    blocks gets an indicator column. `fit` can add a projection onto principal components, which
    comes last. A column with a kurtosis above `HEAVY_TAILED` (sizes, counts, times) becomes
    sign(x)·ln(1 + |x|/unit), where unit is the 10 % quantile of its magnitudes other than 0, so
    that the result does not depend on the column's unit.

    Args:
        blocks: name → float [n, d], the rows to fit on. May be empty: the output then has width 0.
        clip: standardised values are clipped to ±clip.

    Shapes:
        forward: name → [*, d] in, float32 [*, width] out; without any block [*shape, 0].
    """

    mean: Tensor
    scale: Tensor
    median: Tensor
    heavy: Tensor
    unit: Tensor
    has_missing: Tensor
    projection: Tensor | None

    def __init__(self, blocks: Mapping[str, Tensor], clip: float = 5.0) -> None:
        super().__init__()
        self.sizes = {name: block.shape[-1] for name, block in blocks.items()}
        self.clip = clip
        self.datasets: list[str] = []  # the columns of the block `dataset`, if that is an input
        self.columns: tuple[Column, ...] = ()  # those of the block `features`, if they have names
        self.register_buffer("projection", None)
        columns = sum(self.sizes.values())
        joined = torch.zeros(1, 0)
        if blocks:
            joined = torch.cat([b.float() for b in blocks.values()], -1)
        # a column without any value is 0
        median = joined.nanmedian(0).values.nan_to_num()
        filled = torch.where(joined.isnan(), median, joined).double()
        centred = filled - filled.mean(0)
        heavy = centred.pow(4).mean(0) > HEAVY_TAILED * centred.square().mean(0).square()
        unit = torch.ones(columns)
        for column in heavy.nonzero().squeeze(1).tolist():
            magnitude = filled[:, column].abs()
            unit[column] = magnitude[magnitude > 0].quantile(0.1)
        # how a column is drawn in must be known before its mean is
        self.register_buffer("median", median)
        self.register_buffer("heavy", heavy)
        self.register_buffer("unit", unit)
        self.register_buffer("has_missing", joined.isnan().any(0))
        drawn_in = self._drawn_in(filled)
        mean = drawn_in.mean(0)
        scale = (drawn_in - mean).square().mean(0).sqrt()
        # relative to the mean: features may be tiny, and a constant one differs from its mean by
        # rounding
        varies = scale > (1e-6 * mean.abs()).clamp_min(torch.finfo(torch.float32).tiny)
        # a constant column gives x/∞ = 0; a difference from its mean might overflow, and ∞/∞ is NaN
        self.register_buffer("mean", torch.where(varies, mean, 0.0).float())
        self.register_buffer("scale", torch.where(varies, scale, torch.inf).float())

    @property
    def width(self) -> int:
        """The number of inputs that it gives a network."""
        if self.projection is not None:
            return self.projection.shape[1]
        return len(self.mean) + int(self.has_missing.sum())

    @classmethod
    def fit(
        cls,
        table: ProfileTable,
        rows: Tensor,
        project: int = 0,
        dataset_input: bool = False,
    ) -> FeatureNormaliser:
        """Fit on some rows of a table.

        Args:
            rows: int64 [n].
            project: number of principal components to project onto; 0 for no projection.
            dataset_input: True if the data sets of the table are an input, whose names are kept.

        Raises:
            InputError: there are not so many components.
        """
        normaliser = cls(table.blocks(rows))
        normaliser.columns = table.columns
        if dataset_input:
            normaliser.datasets = sorted(set(table.dataset_names))
        if project:
            from sklearn.decomposition import PCA

            x = normaliser.of_rows(table, rows)
            most = min(len(x) - 1, int((x != x[0]).any(0).sum()))
            if project > most:
                raise InputError(
                    f"policy.project={project}: profile {table.name!r} has at most {most} "
                    "components: no more than features that vary in training, and fewer than "
                    "training samples"
                )
            fitted = PCA(project, random_state=0).fit(x.numpy())
            # a floor, because dependent features leave components without variance
            variance = fitted.explained_variance_.clip(1e-6 * fitted.explained_variance_[0])
            axes = fitted.components_.T / variance**0.5
            normaliser.projection = torch.from_numpy(axes).contiguous()
        return normaliser

    @classmethod
    def restored(cls, plain: Mapping[str, Any]) -> FeatureNormaliser:
        """Build the normaliser of a saved controller: means, spreads, projection and columns as it
        was fitted with."""
        state: dict[str, Any] = with_prefix(plain["state"], "normaliser.")
        sizes = plain["features"].items()
        normaliser = cls({name: torch.zeros(1, width) for name, width in sizes})
        normaliser.projection = state.get("projection")
        normaliser.load_state_dict(state)
        normaliser.datasets = plain["datasets"]
        normaliser.columns = columns_of(plain["columns"])
        return normaliser

    def forward(self, blocks: Mapping[str, Tensor], *shape: int) -> Tensor:
        """Join, normalise and project. Raises InputError: see `normal`."""
        return self.project(self.normal(blocks, *shape))

    def of_rows(self, table: ProfileTable, rows: Tensor) -> Tensor:
        """Return the features of these rows of a table (int64 [n]), normalised and projected."""
        return self(table.blocks(rows), len(rows))

    def project(self, x: Tensor) -> Tensor:
        """Project normalised features, or leave them as they are where there is no projection."""
        if self.projection is None:
            return x
        return x @ self.projection

    def normal(self, blocks: Mapping[str, Tensor], *shape: int) -> Tensor:
        """Join and normalise, without a projection.

        Raises:
            InputError: if a block is missing or has another width than in fitting.
        """
        for name, size in self.sizes.items():
            width = blocks[name].shape[-1] if name in blocks else "nothing"
            if width != size:
                raise InputError(
                    f"features: block {name!r} must be {size} wide, got {width}; give the features "
                    "that the policy was trained with (profile.features=…)"
                )
        # without features only the shape is known
        if not self.sizes:
            return self.mean.new_zeros(*shape, 0)
        joined = torch.cat([blocks[name].float() for name in self.sizes], -1)
        # an indicator for columns that had missing values where fitted
        missing = joined.isnan()
        drawn_in = self._drawn_in(torch.where(missing, self.median, joined))
        normal = ((drawn_in - self.mean) / self.scale).clamp(-self.clip, self.clip)
        return torch.cat([normal, missing[..., self.has_missing].to(normal.dtype)], -1)

    def noise_like(
        self, x: Tensor, size: float, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draw noise for features that this returned, [*, width], of standard deviation `size`; 0
        for what never varies, and for what tells that a value is missing."""
        drawn = size * torch.randn(x.shape, generator=generator, device=x.device)
        if self.projection is None:
            varies = x.new_zeros(self.width)
            varies[: len(self.scale)] = self.scale.isfinite().to(varies)
            drawn *= varies
        return drawn

    def _drawn_in(self, values: Tensor) -> Tensor:
        return torch.where(self.heavy, values.sign() * (values.abs() / self.unit).log1p(), values)
