"""SmolLM2 with demonstrations before each question: how many, and how they are chosen, are its
knobs.

    knobwise profile model=shots out=DIR knobs.clock=cpu

measures it, on questions that the selector which comes with knobwise was not trained on.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from knobwise.agents.selector.baselines import cosines, marginal_relevance
from knobwise.agents.selector.selector import Selector
from knobwise.agents.training.checkpoint import load_checkpoint
from knobwise.common.errors import InputError
from knobwise.envs.demonstrations.beam_table import BeamTable
from knobwise.profiling.demonstrations.pools import best_places
from knobwise.profiling.demonstrations.tasks import no_beams, question_embedder
from knobwise.profiling.huggingface.loading import load_pretrained
from knobwise.profiling.huggingface.model import HuggingFaceModel
from knobwise.profiling.huggingface.smollm import QUESTIONS_CSV, smollm_folder
from knobwise.profiling.measuring.adaptive_model import (
    FirstStage,
    KeepsConfiguration,
    KnobSupport,
    Request,
    check_configuration,
)
from knobwise.profiling.measuring.questions import VQAItem, folded, read_vqa_data
from knobwise.testbeds import DATA

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SELECTOR = DATA / "smollm2-selector.pt"
"""`knobwise train experiment=selector_language beams.model=null seeds=[0] judged_shots=[2]
variants.grpo_recorded=null variants.grpo_live=null variants.shuffled_recorded=null` makes it in a
minute: checkpoints/seed0/rce/best.pt of the run."""
BEAMS = DATA / "smollm2-beams.safetensors"
SHARES = (0.55, 0.1)
"""Training and validation shares of the queries in `BEAMS` that the selector learned from."""
SHOTS = (1, 2, 3, 4, 6, 8)
ORDERS = ("random", "nearest", "mmr", "learned")
POOL = 64
"""Demonstrations in the pool of a question, as the selector was trained, or all of a smaller
bank."""
NEAREST = 8
"""Cosines to the nearest demonstrations among the features of a decision."""


class DemonstratedModel(KeepsConfiguration, HuggingFaceModel):
    """An `AdaptiveVLM`: a language model that reads demonstrations before each question.

    A question's pool is drawn at random from the bank, by a seed that its text gives; items of the
    same text are left out. The knob `shots` is how many demonstrations the prompt has, and `order`
    how they are chosen: at random, the nearest by cosine (the nearest comes last), by maximal
    marginal relevance, or by a selector. The time of choosing is part of an answer's.

    Args:
        model, tokenizer: as for `HuggingFaceModel`, without a chat template.
        bank: items that can be demonstrations, of which nine at least.
        selector: chooses demonstrations for the order `learned`.
        options: as for `HuggingFaceModel`.

    Raises:
        InputError: too few items in the bank.
    """

    dataset = "questions"
    measured = {"shots": SHOTS, "order": ORDERS}

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        bank: Sequence[VQAItem],
        selector: Selector,
        **options: Any,
    ) -> None:
        super().__init__(model, tokenizer, chats=False, **options)
        self.bank = tuple(bank)
        self.selector = selector
        texts = [item.question for item in self.bank]
        questions = [folded(text) for text in texts]
        fewest = len(texts) - max(Counter(questions).values(), default=0)
        if fewest < NEAREST:
            raise InputError(
                f"bank: {len(texts)} items; a question needs {NEAREST} others to choose from"
            )
        self._pool = min(POOL, fewest)
        self.knobs = (
            KnobSupport("shots", 2, 1, self._pool, "demonstrations before the question"),
            KnobSupport("order", "nearest", values=ORDERS, sets="how demonstrations are chosen"),
        )
        self.configuration = check_configuration(self.knobs, {})
        self._embed = question_embedder(texts)
        self._candidates = self._embed(texts)  # [M, d]
        self._questions = np.array(questions)
        # each takes a table of one query, and a number of shots, and returns places in its pool
        self._ways: dict[str, Callable[[BeamTable, int], Tensor]] = {
            "random": lambda table, shots: torch.arange(shots)[None],
            "nearest": lambda table, shots: best_places(cosines(table, "similarity"), shots).flip(
                1
            ),
            "mmr": marginal_relevance,
            "learned": self._learned,
        }

    @property
    def identity(self) -> dict[str, object]:
        """What tells the model from others of its name, its bank and its selector included."""
        digest = hashlib.sha256()
        for item in self.bank:
            digest.update(f"{item.question}\n{item.answer}\n".encode())
        for weights in self.selector.state_dict().values():
            digest.update(weights.numpy().tobytes())
        return super().identity | {"demonstrations": digest.hexdigest()}

    def first_stage(self, request: Request, features: bool = True) -> FirstStage:
        """Embed the question, and compare it with its pool.

        The features are `language_features`, the embedding [d], and `pool_features`, the `NEAREST`
        highest cosines to demonstrations of its pool, the highest first. No answer continues from
        them. Raises InputError for a request without a text.
        """
        if not features:
            return FirstStage(request, {}, None, 0.0, 0.0)
        start = self._clock()
        self._check([request])
        table = self._table(request.question)
        nearest = cosines(table, "similarity")[0].topk(NEAREST).values
        blocks = {
            "language_features": table.queries[0].numpy(),
            "pool_features": nearest.numpy(),
        }
        total = self._clock() - start
        return FirstStage(request, blocks, None, total, total)

    def inputs(self, requests: Sequence[Request]) -> dict[str, Tensor]:
        """Write the prompts, with the demonstrations that the knobs say: padded on the left."""
        self._check(requests)
        texts = []
        for request in requests:
            turns = []
            for shot in self.demonstrations(request.question, **self.configuration):
                turns += self._turns(shot.question, shot.answer)
            texts.append(self._prompt([*turns, *self._turns(request.question)]))
        return self._processed(texts, None)

    def demonstrations(self, question: str, shots: int, order: str) -> list[VQAItem]:
        """Choose demonstrations for a question, in the order in which the model reads them."""
        table = self._table(question)
        places = self._ways[order](table, shots)[0]
        return [self.bank[row] for row in table.pool[0, places].tolist()]

    def _table(self, question: str) -> BeamTable:
        """Return the question with its pool as a table of one query."""
        rng = np.random.default_rng(zlib.crc32(question.encode()))
        others = np.flatnonzero(self._questions != folded(question))
        pool = torch.from_numpy(rng.choice(others, self._pool, replace=False))
        return BeamTable(
            name="",
            query_ids=("",),
            queries=self._embed([question]),
            candidates=self._candidates,
            blocks={},
            **no_beams(1) | {"pool": pool[None]},
        )

    def _learned(self, table: BeamTable, shots: int) -> Tensor:
        candidates = table.candidates[table.pool]
        return self.selector.choose(table.queries, candidates, table.pool_mask, shots)


class SmollmShots(DemonstratedModel):
    """SmolLM2 with the questions, the bank and the selector that come with knobwise.

    Raises InputError where a package is missing (the message is the command that installs it).
    """

    def __init__(self) -> None:
        model, tokenizer = load_pretrained(smollm_folder(), "bfloat16", "AutoModelForCausalLM")
        data = read_vqa_data(QUESTIONS_CSV, images=False)
        self._queries = data.queries
        selector = load_checkpoint(SELECTOR).selector
        super().__init__(model, tokenizer, data.bank, selector, max_new_tokens=12)

    @property
    def name(self) -> str:
        """The name of the model in files."""
        return "smollm2 with demonstrations"

    @cached_property
    def questions(self) -> tuple[VQAItem, ...]:
        """The queries that the selector was not trained on, and the items of the bank, each of
        which is asked without itself among its demonstrations."""
        train, validation = SHARES
        held_out = BeamTable.load(BEAMS).split(train, validation).test
        return (*(self._queries[row] for row in held_out.tolist()), *self.bank)
