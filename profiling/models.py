"""The models that can be profiled and served, by name, with what they are asked."""

from __future__ import annotations

from collections.abc import Sequence

from knobwise.common.errors import InputError
from knobwise.common.imports import imported, in_a_line
from knobwise.profiling.measuring.adaptive_model import AdaptiveVLM
from knobwise.profiling.measuring.questions import VQAItem, read_vqa_data
from knobwise.profiling.measuring.requests import Questions, Requests
from knobwise.profiling.measuring.settings import VLMProfileConfig


def load_model(
    name: str,
    data: str | None,
    config: VLMProfileConfig,
    *,
    importance: str | None = None,
    dtype: str = "auto",
    device: str | None = None,
) -> tuple[AdaptiveVLM, Requests]:
    """A model and its requests.

    Args:
        name: `elastic`, the built-in model, or `ocr`, RapidOCR, each with its own scenes;
            `module:Class`, a class of the user's own; or a Hugging Face vision-language model, by
            folder or name.
        data: a file of questions (`read_vqa_data`); None for the `questions` of the user's class.
        config: metric, prompt and length of answers.
        importance, dtype, device: of a Hugging Face model, see `profile_hugging_face`.

    Raises:
        InputError: a model or questions that cannot be loaded, a metric that does not fit them.
    """
    if name == "elastic":
        from knobwise.profiling.elastic.adapter import ElasticAdaptive, ElasticRequests

        return ElasticAdaptive(), ElasticRequests()
    if name == "ocr":
        from knobwise.profiling.ocr.adapter import RapidOCRModel
        from knobwise.profiling.ocr.scenes import Scenes

        return RapidOCRModel(), Scenes()
    if ":" in name:
        model = model_of_class(name)
        return model, Questions(questions_of(name, model, data), config.metric, config.prompt)
    if data is None:
        raise InputError(f"model={name}: needs data=FILE, the questions that it is asked")
    from knobwise.profiling.huggingface.model import HuggingFaceVLM
    from knobwise.profiling.huggingface.profile import read_importance

    questions = Questions(
        read_vqa_data(data).queries, config.metric, config.prompt
    )  # before a large model is loaded
    if importance is None:
        known = None
    else:
        known = read_importance(importance)
    return HuggingFaceVLM.load(
        name, device=device, dtype=dtype, importance=known, max_new_tokens=config.max_new_tokens
    ), questions


def model_of_class(name: str) -> AdaptiveVLM:
    """Return an instance of the class `module:Class`, made without arguments, or the model
    `elastic`. Raises InputError: there is no such class, it raises, or lacks a member of
    `AdaptiveVLM` (named)."""
    if name == "elastic":
        from knobwise.profiling.elastic.adapter import ElasticAdaptive

        return ElasticAdaptive()
    made = imported(f"model={name}", name, "class", "my_module:MyModel")
    try:
        model = made()
    except Exception as error:
        raise InputError(f"model={name}: making one raises {in_a_line(error)}") from error
    for member in ("name", "knobs", "set_knobs", "first_stage", "answer"):
        if not hasattr(model, member):
            raise InputError(
                f"model={name}: has no {member}; see knobwise.profiling.measuring.adaptive_model"
            )
    return model


def questions_of(name: str, model: AdaptiveVLM, data: str | None) -> Sequence[VQAItem]:
    """Return the questions of a file, or those that the class of a model brings along. Raises
    InputError where there are none."""
    if data is not None:
        return read_vqa_data(data).queries
    items: Sequence[VQAItem] = tuple(getattr(model, "questions", ()))
    if not items:
        raise InputError(
            f"model={name}: needs data=FILE, or an attribute `questions`, a list of VQAItem"
        )
    return items
