"""The fit of what encodes texts as feature blocks.

Readers keep texts as they are, since they do not know the split. What turns them into numbers is
fitted on training samples, and goes along with the controller that reads these numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from knobwise.agents.deployed.arrays import Array, Arrays
from knobwise.agents.deployed.text import (
    BITS,
    MESSAGES,
    SURFACE,
    TextEncoder,
    known_shares,
    parts_of,
)
from knobwise.common.checks import one_of
from knobwise.common.errors import InputError
from knobwise.envs.bandit.budgets import log_measured, subsample
from knobwise.envs.tables.profile_table import ProfileTable, Split

MAX_PARTS = 4096
"""The most parts of texts that are known."""
MIN_TEXTS = 2
"""A part is known if so many texts of training have it."""
MAX_FITTED = 20_000
"""Of more training samples a part is fitted on."""
MAX_JUDGED = 4000
"""Of more samples a part tells how many components are best."""
WIDTHS = (8, 16, 32, 64)
"""Numbers of components; that which predicts validation outcomes best is kept."""
PENALTIES = (1.0, 10.0, 100.0, 1000.0)
"""Of the regressions that tell."""
UNLIKE = 0.5
"""A text is unlike training if it has less than this share of the known runs, or words, that all
but `RARE` of the validation texts have."""
RARE = 0.05
FAR_LONGER = 2.0
"""So is one that is so many times as long as the longest text to fit on."""


def fit_encoders(
    table: ProfileTable, split: Split, messages: str = "last"
) -> dict[str, TextEncoder]:
    """Fit what encodes the texts of a table, by name; {} if it has none.

    Args:
        split: encoders are fitted on its training samples, and as wide as is best for its
            validation samples.
        messages: what is read of a chat, see `knobwise.agents.deployed.text.MESSAGES`.

    Raises:
        InputError: `messages` is another word.
    """
    one_of("chat", messages, MESSAGES)
    encoders = {}
    for name, texts in table.texts.items():
        encoders[name] = TextEncoder(fitted_arrays(texts, table, split, messages))
    return encoders


def encoded_by(table: ProfileTable, encoders: Mapping[str, TextEncoder]) -> ProfileTable:
    """Return a table with a feature block for each text that has an encoder; itself if none has.

    Raises InputError: there is no such text, or it has the name of a feature block.
    """
    if not (table.texts and encoders):
        return table
    blocks = {}
    for name, encoder in encoders.items():
        if name in table.features or name not in table.texts:
            raise InputError(
                f"features: the text {name!r} is missing, or has the name of a feature block; "
                "rename the one or the other"
            )
        blocks[name] = torch.from_numpy(encoded_texts(encoder, table.texts[name]))
    return replace(table, features=table.features | blocks)


def encoded_texts(encoder: TextEncoder, texts: Iterable[Any]) -> Array:
    """Return the numbers of n texts, float32 [n, width], each as if it were alone."""
    return np.stack([encoder(text) for text in texts])


def fitted_arrays(
    texts: Sequence[str], table: ProfileTable, split: Split, messages: str = "last"
) -> Arrays:
    """Fit a `TextEncoder` on training samples, and return its arrays.

    Parts are weighted by how rare they are (idf), and projected onto the first components of a
    truncated singular value decomposition ("latent semantic analysis"). How many is decided by
    ridge regressions of accuracies and latencies.

    Args:
        texts: N, those of the table.
    """
    from scipy.sparse import csr_matrix
    from sklearn.decomposition import TruncatedSVD

    train = subsample(split.train, MAX_FITTED)
    validation = subsample(split.validation, MAX_FITTED)
    counted = [np.unique(parts_of(texts[row], messages).hashes) for row in train.tolist()]
    # in how many texts each part is
    spread = np.bincount(np.concatenate(counted), minlength=1 << BITS)
    rarity = np.log((1 + len(train)) / (1 + spread)) * (spread >= MIN_TEXTS)
    # those that vary most, in the order of their hashes
    kept = np.sort(np.argsort(-spread * rarity**2, kind="stable")[: MAX_PARTS - 1])
    kept = kept[rarity[kept] > 0]
    slots = np.zeros(1 << BITS, np.int16)
    slots[kept] = np.arange(1, len(kept) + 1)
    weights = np.zeros(len(kept) + 1, np.float32)
    weights[1:] = rarity[kept]
    arrays: dict[str, Array] = {
        "slots": slots,
        "weights": weights,
        "projection": np.zeros((len(weights), 0), np.float32),
        "limits": np.array([0.0, 0.0, np.inf]),
        "messages": np.array(MESSAGES.index(messages)),
    }
    encoder = TextEncoder(arrays)
    # as sparse as texts are
    rows = []
    for row in train.tolist():
        rows.append(encoder.weighted(slots[parts_of(texts[row], messages).hashes]))
    stops = np.cumsum([0, *(len(present) for present, _ in rows)])
    present, values = (np.concatenate(part) for part in zip(*rows, strict=True))
    matrix = csr_matrix((values, present, stops), (len(rows), len(weights)))
    widths = [width for width in WIDTHS if width <= min(len(train) // 4, len(kept) - 1)]
    if widths:
        fitted = TruncatedSVD(widths[-1], random_state=0).fit(matrix)
        arrays["projection"] = np.ascontiguousarray(fitted.components_.T, np.float32)
        width = _best_width(arrays, texts, table, split)
        arrays["projection"] = np.ascontiguousarray(arrays["projection"][:, :width])
    arrays["limits"] = _limits(slots, texts, validation, split.fitted, messages)
    return arrays


def _best_width(arrays: Arrays, texts: Sequence[str], table: ProfileTable, split: Split) -> int:
    """Return how many of the components predict the validation samples best, beside `SURFACE`.

    A ridge regression is fitted on training samples, where a cell that was not measured counts as
    the mean of its configuration.
    """
    from sklearn.linear_model import Ridge

    encoder = TextEncoder(arrays)
    fit, hold = (subsample(rows, MAX_JUDGED) for rows in split[:2])
    x, judged = (encoded_texts(encoder, [texts[row] for row in rows]) for rows in (fit, hold))
    mean = x.mean(0)
    scale = x.std(0) + 1e-6
    explained = Counter[int]()
    for values in (table.accuracy.double(), log_measured(table.latency_ms.double())):
        known = values[fit].numpy()
        level = np.nan_to_num(np.nanmean(known, 0))
        y = np.where(np.isnan(known), level, known) - level
        wanted = values[hold].numpy() - level
        for width in range(encoder.width - len(SURFACE), 0, -1):
            if width not in WIDTHS:
                continue
            part = slice(len(SURFACE) + width)
            errors = []
            for penalty in PENALTIES:
                model = Ridge(penalty).fit(((x - mean) / scale)[:, part], y)
                left = wanted - model.predict(((judged - mean) / scale)[:, part])
                errors.append(np.nanmean(left**2))
            explained[width] += 1 - min(errors) / np.nanmean(wanted**2)
    return explained.most_common(1)[0][0]


def _limits(
    slots: Array, texts: Sequence[str], validation: Tensor, fitted: Tensor, messages: str
) -> Array:
    """Return the least shares of known runs and words, and the most characters, that are like
    training."""
    shares = []
    for row in validation.tolist():
        parts = parts_of(texts[row], messages)
        shares.append(known_shares(parts, slots[parts.hashes]))
    longest = max(parts_of(texts[row], messages).characters for row in fitted.tolist())
    return np.array([*(UNLIKE * np.quantile(shares, RARE, axis=0)), FAR_LONGER * longest])
