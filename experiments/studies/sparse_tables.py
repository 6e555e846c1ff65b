"""Tables and a picture of what `experiments/studies/sparse.py` ran: what GRPO adds to imitation,
and utility over the share of a profile that was measured.

Intervals are bootstraps over draws of the cells and test samples.

    python experiments/studies/sparse_tables.py sparse docs/sparse.svg [FOLDER OF A TABLE ...]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path

import altair as alt
import numpy as np

from knobwise.agents.evaluation.policy import Array
from knobwise.experiments.studies.sparse import (
    CURVE,
    DRAWS,
    PROFILES,
    SHARES,
    SPLITS,
    WAYS,
    Case,
    cells_drawn,
    name_of,
    profile_named,
)

RESAMPLES = 4000
TITLES = {"builtin": "built-in", "ocr": "RapidOCR", "smollm": "SmolLM2"}
Row = Sequence[object]


def title_of(profile: str) -> str:
    """Return the name of a profile for readers."""
    return TITLES.get(profile, name_of(profile))


class Draws:
    """Resamples of draws of the cells of a profile, and of its test samples.

    Args:
        profile: the profile.
        draws: how many.
    """

    def __init__(self, profile: str, draws: int) -> None:
        self.draws = draws
        generator = np.random.default_rng(list(name_of(profile).encode()))
        table = profile_named(profile)
        self.configurations = table.num_configurations
        count = table.num_samples
        even = np.full(count, 1 / count)
        # how often each resample holds a sample, [R, N], and a draw, [R, D]
        self.samples = generator.multinomial(count, even, RESAMPLES).astype(np.float32)
        self.of_draws = generator.multinomial(draws, np.full(draws, 1 / max(draws, 1)), RESAMPLES)

    def gains_in(self, cases: Sequence[Mapping[str, Array]], way: str, reference: str) -> Array:
        """Return the mean gain of a way over a reference, first in truth, then in each resample.

        Samples that are in the test part of several draws are resampled together.

        Args:
            cases: of each draw, the utilities of test samples by each way, and their `rows`.
        """
        sums = np.zeros((2, RESAMPLES + 1))
        for draw, case in enumerate(cases):
            gained = (case[way] - case[reference]).astype(np.float32)
            weights = self.samples[:, case["rows"]]
            of_draw = self.of_draws[:, draw]
            sums[0] += [gained.sum(), *(of_draw * (weights @ gained))]
            sums[1] += [len(gained), *(of_draw * weights.sum(1))]
        # of few test samples a resample may hold none
        means = np.full(RESAMPLES + 1, np.nan)
        np.divide(sums[0], sums[1], out=means, where=sums[1] > 0)
        return means


class Resamples(Draws):
    """What all draws of some cases of a profile got, and resamples of them.

    Args:
        folder: of `run`.
        profile: the profile.
        shares: those whose draws are resampled together; a draw counts if it has all of them.
    """

    def __init__(self, folder: Path, profile: str, shares: Sequence[Fraction]) -> None:
        self.cases: dict[Fraction, list[dict[str, np.ndarray]]] = {}
        draws = 0
        for draw in range(DRAWS):
            paths = {share: Case(profile, share, draw).path(folder) for share in shares}
            if all(path.exists() for path in paths.values()):
                draws += 1
                # the test samples of the whole profile are the same, by the same split
                whole = Case(profile, Fraction(1), draw % SPLITS).path(folder)
                of_whole = np.load(whole)["imitation"]
                for share, path in paths.items():
                    case = dict(np.load(path), imitation_of_whole=of_whole)
                    self.cases.setdefault(share, []).append(case)
        super().__init__(profile, draws)

    def words(self, share: Fraction) -> str:
        """Return a share as the number of cells of a sample."""
        return f"{cells_drawn(share, self.configurations):.3g} of {self.configurations}"

    def mean(self, share: Fraction, way: str) -> float:
        """Return the mean of a way, in which all splits count alike."""
        means = [case[way].mean() for case in self.cases[share]]
        return float(np.mean([np.mean(means[split::SPLITS]) for split in range(SPLITS)]))

    def gains(self, share: Fraction, way: str, reference: str) -> Array:
        """Return the mean gain of a way over a reference, see `gains_in`. The draws of all shares
        are resampled together, because the cells of a smaller one are among those of a larger one.
        """
        return self.gains_in(self.cases[share], way, reference)


def in_points(gains: Array) -> tuple[float, float, float]:
    """Return the first of gains in points, and the 95 % interval of the others."""
    low, high = np.nanquantile(gains[1:], [0.025, 0.975])
    # + 0.0 makes 0 of −0
    mean, low, high = (round(100 * float(value), 1) + 0.0 for value in (gains[0], low, high))
    return mean, low, high


def words_of(gains: Array) -> str:
    """Return gains as text, – where there is none at all."""
    if not gains.any():
        return "–"
    mean, low, high = in_points(gains)
    return f"{mean:+.1f} [{low:.1f}, {high:.1f}]".replace("-", "−")


def rows_of(cells: Sequence[Row]) -> str:
    """Return rows of a table in Markdown, the first of them its header."""
    lines = [" | ".join(["", *map(str, row), ""]).strip() for row in cells]
    lines.insert(1, "| --- " * len(cells[0]) + "|")
    return "\n".join(lines)


def gains_of_grpo(folder: Path) -> Iterator[Row]:
    """Yield what GRPO adds to imitation, by its rewards; last, the mean of all rows."""
    yield ("profile", "cells of a sample", "draws", *WAYS)
    pooled: dict[str, list[Array]] = {way: [] for way in WAYS}
    for profile in PROFILES:
        resamples = Resamples(folder, profile, SHARES)
        for share in SHARES:
            gains = {way: resamples.gains(share, way, "imitation") for way in WAYS}
            for way, values in gains.items():
                pooled[way].append(values)
            cells = resamples.words(share)
            gained = map(words_of, gains.values())
            yield (title_of(profile), cells, resamples.draws, *gained)
    yield ("all", "–", "–", *(words_of(np.mean(values, axis=0)) for values in pooled.values()))


def shares_of(folder: Path, profile: str) -> Iterator[tuple[Fraction, Resamples]]:
    """Yield the shares of a profile that were run, each with its draws."""
    run = [share for share in CURVE if Case(profile, share, 0).path(folder).exists()]
    resamples = Resamples(folder, profile, run)
    for share in run:
        yield share, resamples
    yield Fraction(1), Resamples(folder, profile, [Fraction(1)])


def curve(folder: Path, profiles: list[str]) -> Iterator[Row]:
    """Yield utilities over the share that was measured."""
    names = ("static", "imitation", "guarded")
    differences = ("imitation − whole static", "imitation − whole imitation")
    yield ("profile", "cells of a sample", *names, "budgets of the policy", *differences)
    for profile in profiles:
        for share, resamples in shares_of(folder, profile):
            means = [f"{resamples.mean(share, way):.3f}" for way in names]
            deployed = f"{resamples.mean(share, 'share_deployed'):.0%}"
            references = ("static_of_whole", "imitation_of_whole")
            gains = [resamples.gains(share, "imitation", other) for other in references]
            cells = resamples.words(share)
            yield (title_of(profile), cells, *means, deployed, *map(words_of, gains))


def picture(folder: Path, profiles: list[str]) -> alt.FacetChart:
    """Draw, for each profile, how far policy and static are above the static of everything."""
    points = []
    for profile in profiles:
        for share, resamples in shares_of(folder, profile):
            measured = cells_drawn(share, resamples.configurations) / resamples.configurations
            for way, words in {"imitation": "policy", "static": "static"}.items():
                mean, low, high = in_points(resamples.gains(share, way, "static_of_whole"))
                about = {"profile": title_of(profile), "policy": words, "share": 100 * measured}
                points.append({**about, "mean": mean, "low": low, "high": high})
    # five panels have room for few numbers
    axis = alt.Axis(values=[2, 5, 10, 25, 100])
    x = alt.X("share:Q", title="cells measured, %", scale=alt.Scale(type="log"), axis=axis)
    y = alt.Y("mean:Q", title="points above static of all cells")
    colour = alt.Color("policy:N", title=None)
    base = alt.Chart().encode(x=x, color=colour)
    band = base.mark_area(opacity=0.15).encode(y=alt.Y("low:Q"), y2="high:Q")
    layers = alt.layer(band, base.mark_line(point=True).encode(y=y))
    titles = [title_of(profile) for profile in profiles]
    layers = layers.properties(width=170, height=200, data=alt.InlineData(points))
    return layers.facet(column=alt.Column("profile:N", title=None, sort=titles)).resolve_scale(
        y="independent"
    )


if __name__ == "__main__":
    where, drawing, *others = sys.argv[1:]
    FOLDER = Path(where)
    NAMES = [*PROFILES, *others]
    parts = [gains_of_grpo(FOLDER), curve(FOLDER, NAMES)]
    print(*(rows_of([*part]) for part in parts), sep="\n\n")
    picture(FOLDER, NAMES).save(drawing)
