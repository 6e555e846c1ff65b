"""The models that can be profiled and served, by name, with what they are asked."""

from __future__ import annotations

from collections.abc import Sequence

from knobwise.common.checks import one_of
from knobwise.common.errors import InputError, Missing
from knobwise.common.extras import install_command
from knobwise.common.imports import import_callable, instance
from knobwise.profiling.endpoint.settings import NAME as ENDPOINT
from knobwise.profiling.endpoint.settings import EndpointOptions
from knobwise.profiling.huggingface.smollm import source_of
from knobwise.profiling.measuring.adaptive_model import AdaptiveVLM
from knobwise.profiling.measuring.questions import VQAItem, read_vqa_data
from knobwise.profiling.measuring.requests import DrawnQuestions, Questions, Requests
from knobwise.profiling.measuring.settings import BUILT_IN, VLMProfileConfig

MEMBERS = ("name", "knobs", "set_knobs", "first_stage", "answer")
"""What a model of the user's own must have."""


def load_model(
    name: str,
    data: str | None,
    config: VLMProfileConfig,
    *,
    importance: str | None = None,
    dtype: str = "auto",
    device: str | None = None,
    endpoint: EndpointOptions | None = None,
) -> tuple[AdaptiveVLM, Sequence[VQAItem]]:
    """Load a model, and the questions that it is asked.

    Args:
        name: one of `BUILT_IN`; `module:Class`, a class of the user's own; `openai`, models behind
            an endpoint, whose items may have an image; or a Hugging Face
            model, by folder or name: a vision-language model, or a language model, whose items
            need no image.
        data: a file of questions (`read_vqa_data`); None for the `questions` of the model.
        config: has the length of answers.
        importance: file of the importance of a Hugging Face model's blocks; None leaves out blocks
            from the end on.
        dtype: type of its weights; "auto" as they were saved.
        device: its device; None for the GPU where there is one.
        endpoint: how models behind an endpoint are asked (`openai`).

    Raises:
        InputError: a model or questions that cannot be loaded.
    """
    # models of ours and of the user may bring their questions along
    if name in BUILT_IN or ":" in name:
        items = _items(data, images=True) if data else ()
        model = _own_model(name)
        if items := items or getattr(model, "questions", ()):
            return model, items
    if data is None:
        raise InputError(
            f"model={name}: needs data=FILE, the questions that it is asked, or a class of your "
            "own an attribute `questions`, a list of VQAItem"
        )
    if name == ENDPOINT:
        return _behind_endpoint(data, config, endpoint or EndpointOptions())
    return _of_hugging_face(name, data, config, importance, dtype, device)


def _of_hugging_face(
    name: str,
    data: str,
    config: VLMProfileConfig,
    importance: str | None,
    dtype: str,
    device: str | None,
) -> tuple[AdaptiveVLM, Sequence[VQAItem]]:
    """Return a Hugging Face model, and its questions; arguments as in `load_model`."""
    # transformers is imported only here, since it takes seconds
    from knobwise.profiling.huggingface.knobs import read_importance
    from knobwise.profiling.huggingface.loading import reads_text_alone
    from knobwise.profiling.huggingface.model import HuggingFaceModel

    # all else before a large model is loaded
    source = source_of(name)
    items = _items(data, images=not reads_text_alone(source))
    one_of("dtype", dtype, ("auto", "bfloat16", "float16", "float32"))
    known = None
    if importance is not None:
        known = read_importance(importance)
    model = HuggingFaceModel.load(
        source,
        device=device,
        dtype=dtype,
        importance=known,
        max_new_tokens=config.max_new_tokens,
    )
    return model, items


def _behind_endpoint(
    data: str, config: VLMProfileConfig, options: EndpointOptions
) -> tuple[AdaptiveVLM, Sequence[VQAItem]]:
    """Return models behind an endpoint, and their questions."""
    if config.clock != "wall":
        raise InputError(f"knobs.clock={config.clock}: an endpoint works elsewhere; take wall")
    try:
        from knobwise.profiling.endpoint.model import EndpointModel
    except ImportError as error:
        raise Missing(f"model={ENDPOINT} needs: {install_command('endpoint')}") from error
    # all else before the server is asked
    items = _items(data, images=None)
    return EndpointModel(options, config.chosen_values(), config.max_new_tokens), items


def _items(path: str, images: bool | None) -> tuple[VQAItem, ...]:
    """Return all items of a file; those that could be demonstrations are questions too."""
    read = read_vqa_data(path, images=images)
    if read.bank is read.queries:
        return read.queries
    return (*read.queries, *read.bank)


def _own_model(name: str) -> AdaptiveVLM:
    """Return one of the models that come with knobwise, or an instance of the class `module:Class`,
    made without arguments. Raises InputError: there is no such class, it raises, or lacks a member
    of `AdaptiveVLM` (named)."""
    # looked for in the current folder first
    made = import_callable(f"model={name}", BUILT_IN.get(name, name), "class", "my_module:MyModel")
    return instance(f"model={name}", made, MEMBERS, AdaptiveVLM)


def requests_of(items: Sequence[VQAItem], config: VLMProfileConfig) -> Requests:
    """Return the requests to serve the model with, and how to score its answers; generated
    questions never run out. Raises InputError for a metric that does not fit the items."""
    if isinstance(items, DrawnQuestions):
        return items
    return Questions(items, config.metric, config.prompt)
