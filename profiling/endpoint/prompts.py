"""A question with demonstrations as a server reads it: turns of a chat, or a plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from knobwise.profiling.endpoint.messages import Message, with_image
from knobwise.profiling.huggingface.loading import INSTRUCTION
from knobwise.profiling.measuring.questions import VQAItem

Fields = dict[str, Any]
"""Fields of a request."""


class PromptForm(Protocol):
    """How demonstrations, a question and an answer become fields of a request."""

    def before(self, shots: Sequence[VQAItem], item: VQAItem) -> Fields:
        """Return a prompt up to where the answer begins."""
        ...

    def answered(
        self, shots: Sequence[VQAItem], item: VQAItem, answer: str, goes_on: bool = False
    ) -> Fields:
        """Return a prompt with an answer and its end; `goes_on` without the end."""
        ...


class ChatForm:
    """Turns of a chat, each question with `INSTRUCTION`; the server has a template for them.

    `add_generation_prompt` and `continue_final_message` are fields of vLLM.
    """

    def before(self, shots: Sequence[VQAItem], item: VQAItem) -> Fields:
        """As in `PromptForm`; of the protocol alone."""
        turns: list[Message] = []
        for shot in shots:
            turns += [_question_turn(shot), {"role": "assistant", "content": shot.answer}]
        return {"messages": [*turns, _question_turn(item)]}

    def answered(
        self, shots: Sequence[VQAItem], item: VQAItem, answer: str, goes_on: bool = False
    ) -> Fields:
        """As in `PromptForm`."""
        turns = self.before(shots, item)["messages"]
        turns.append({"role": "assistant", "content": answer})
        options = {"add_generation_prompt": False, "continue_final_message": goes_on}
        return {"messages": turns, "extra_body": options}


class PlainForm:
    """A text with a line for each question and each answer, for models that were never taught to
    chat. The end of a line ends an answer. Images are left out."""

    def before(self, shots: Sequence[VQAItem], item: VQAItem) -> Fields:
        """As in `PromptForm`."""
        lines = [f"{_line(shot)} {shot.answer}\n" for shot in shots]
        return {"prompt": "".join([*lines, _line(item)])}

    def answered(
        self, shots: Sequence[VQAItem], item: VQAItem, answer: str, goes_on: bool = False
    ) -> Fields:
        """As in `PromptForm`."""
        text = f"{self.before(shots, item)['prompt']} {answer}"
        return {"prompt": text if goes_on else f"{text}\n"}


def _question_turn(item: VQAItem) -> Message:
    """Return the turn of a question, with its image where there is one."""
    message = {"role": "user", "content": f"{item.question}\n{INSTRUCTION}"}
    picture = None if item.image is None else item.picture()
    return with_image([message], picture)[0]


def _line(item: VQAItem) -> str:
    """Return a question as a text that the answer follows."""
    return f"Question: {item.question}\nAnswer:"
