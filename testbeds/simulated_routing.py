"""A table of evaluations of language models, as those who route requests have one. The models are
those of `simulated_models`, the questions those of SmolLM2 that come with knobwise.

    python -m knobwise.testbeds.simulated_routing evaluations.csv

Its columns are `id`, `prompt`, `model`, `reasoning_effort`, `score` (1 if the answer is right),
`seconds` and `usd`. Without network, models or waiting: times are those that the simulated endpoint
would take.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import polars as pl

from knobwise.common.errors import InputError
from knobwise.common.files import written_whole
from knobwise.testbeds.simulated_models import (
    MODELS,
    Simulation,
    known_questions,
    reply_to,
)

EFFORTS = ("none", "low", "high")
PRICES = {"small": (0.1, 0.4), "medium": (0.5, 2.0), "large": (2.5, 10.0)}
"""US dollars for a million tokens of the prompt, and of the answer."""
JITTER = 0.1
"""The standard deviation of ln seconds."""


def evaluations(questions: int, seed: int = 0) -> pl.DataFrame:
    """Evaluate all models and efforts on some of the questions, drawn at random."""
    draws = np.random.default_rng(seed)
    known = list(known_questions().items())
    drawn = np.sort(draws.permutation(len(known))[:questions])
    rows: list[dict[str, Any]] = []
    for number in drawn.tolist():
        prompt, (answer, _) = known[number]
        for model in MODELS:
            for effort in EFFORTS:
                message = {"role": "user", "content": prompt}
                body = {"messages": [message], "reasoning_effort": effort}
                reply = reply_to(body, model, Simulation(), 1.0)
                usage = reply.usage()
                tokens = usage["prompt_tokens"], usage["completion_tokens"]
                seconds = reply.first_s + reply.word_s * len(reply.words)
                rows.append(
                    {
                        "id": f"q{number}",
                        "prompt": prompt,
                        "model": model,
                        "reasoning_effort": effort,
                        "score": int(" ".join(reply.words) == answer),
                        "seconds": round(seconds * float(np.exp(JITTER * draws.normal())), 4),
                        "usd": round(float(np.dot(tokens, PRICES[model])) / 1e6, 9),
                    }
                )
    return pl.DataFrame(rows)


def main(path: str = "evaluations.csv", questions: str = "600") -> None:
    """Write the table."""
    frame = evaluations(int(questions))
    try:
        with written_whole(path) as part:
            frame.write_csv(part)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error})") from error
    print(f"{path}: {len(frame):,} simulated evaluations of {frame['id'].n_unique()} questions")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:3])
    except InputError as error:
        sys.exit(str(error))
