"""Tiny random vision-language models of three families that score demonstrations; their tokens are words."""

import torch
import transformers
from tiny_models import TEXT, VISION, numbers_of

WORDS = (
    "Question : ? . Answer with a single word or short phrase How many What color is it dogs cats 2 1 3 red blue green"
)
CHAT = (
    "{% for m in messages %}{{ m.role }} : {% for c in m.content %}{% if c.type == 'image' %}VISION{% else %} "
    "{{ c.text }}{% endif %}{% endfor %} <end>\n{% endfor %}{% if add_generation_prompt %}assistant :{% endif %}"
)
FAMILIES = ("llava", "idefics3", "qwen2_vl")
SMALL_TEXT = TEXT | {"hidden_size": 16, "num_hidden_layers": 2, "head_dim": 4, "initializer_range": 0.4}
SMALL_VISION = VISION | {"image_size": 8, "patch_size": 4, "initializer_range": 0.4}


def tiny_tokenizer(*special):
    """One word, one token; a new line is a token, spaces are none."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    known = {"unk_token": "<unk>", "pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    words = dict.fromkeys([*known.values(), "<end>", *special, "\n", "user", "assistant", *WORDS.split()])
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Punctuation()]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **known, extra_special_tokens=["<end>", *special]
    )


def tiny_vlm(family, chat=True):
    """A random model of some 10 k parameters and its processor, with images of 8 × 8 pixels and some 5 tokens."""
    torch.manual_seed(0)
    name, config, processor = globals()[f"_{family}"](CHAT if chat else None)
    return getattr(transformers, f"{name}ForConditionalGeneration")(config), processor


def _llava(chat):
    tokenizer = tiny_tokenizer("<image>")
    pixels = transformers.CLIPImageProcessor(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
    processor = transformers.LlavaProcessor(
        pixels, tokenizer, 4, "full", chat_template=chat and chat.replace("VISION", "<image>"),
        num_additional_image_tokens=1,
    )  # fmt: skip
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**SMALL_VISION),
        text_config=transformers.LlamaConfig(**SMALL_TEXT, vocab_size=len(tokenizer)),
        image_token_id=processor.image_token_id,
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
    )
    return "Llava", config, processor


def _idefics3(chat):
    tokenizer = tiny_tokenizer("<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>")
    size = {"longest_edge": 8}
    pixels = transformers.Idefics3ImageProcessor(size=size, max_image_size=size, do_image_splitting=False)
    chat = chat.replace("VISION", "<image>")
    processor = transformers.Idefics3Processor(pixels, tokenizer, image_seq_len=4, chat_template=chat)
    config = transformers.Idefics3Config(
        image_token_id=processor.image_token_id,
        vision_config=SMALL_VISION,
        text_config={"model_type": "llama", **SMALL_TEXT, "vocab_size": len(tokenizer)},
        scale_factor=1,
        pad_token_id=1,
    )
    return "Idefics3", config, processor


def _qwen2_vl(chat):
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    marks = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    tokenizer = tiny_tokenizer(*marks)
    pixels = {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 400}}
    processor = transformers.Qwen2VLProcessor(
        transformers.Qwen2VLImageProcessor(**pixels),
        tokenizer,
        transformers.Qwen2VLVideoProcessor(**pixels),
        chat_template=chat.replace("VISION", "<|vision_start|><|image_pad|><|vision_end|>"),
    )
    positions = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 1, 0]}
    config = transformers.Qwen2VLConfig(
        text_config={**SMALL_TEXT, "vocab_size": len(tokenizer), "rope_parameters": positions},
        vision_config={"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "patch_size": 4, "mlp_ratio": 1},
        **numbers_of(tokenizer, dict(zip(names, marks, strict=True))),
    )
    return "Qwen2VL", config, processor
