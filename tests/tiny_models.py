"""Tiny random vision-language models of every family whose knobs can be set, with working
processors; no downloads.

`tiny_model("llama4")` gives a new model of some 50 k seeded weights in eval mode, and a processor
that takes texts and images of any size; its tokens are characters. Decoders have 4 blocks of width
32, and 4 experts of which 2 are used where the family has experts. Models of the families that
score demonstrations are smaller still: 10 k weights, two blocks, images of 8 × 8 pixels and some 5
tokens; their tokens are words.
"""

from contextlib import contextmanager

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

FAMILIES = (
    "llama4", "aria", "llava_next", "qwen3_vl_moe", "qwen3_5_moe", "glm4v_moe", "gemma4", "smolvlm", "idefics3",
    "molmo2",
)  # fmt: skip
SCORERS = ("llava", "idefics3_words", "qwen2_vl")
BLOCKS, EXPERTS, TOP_K = 4, 4, 2
CHAT = (
    "{% for m in messages %}{{ m.role }}: {% for c in m.content %}{% if c.type == 'image' "
    "%}IMAGE{% else %}"
    "{{ c.text }}{% endif %}{% endfor %}<end>\n{% endfor %}{% if add_generation_prompt "
    "%}assistant:{% endif %}"
)
TEXT = {
    "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": BLOCKS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 8192, "pad_token_id": 1,
    "bos_token_id": 2, "eos_token_id": 3, "initializer_range": 0.3,
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "initializer_range": 0.3,
}  # fmt: skip
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "head_dim": 4, "initializer_range": 0.4}
EIGHT = {"size": {"shortest_edge": 8}, "crop_size": {"height": 8, "width": 8}}
"""Pixels of CLIP's images."""
WORDS = (
    "Question : ? . Answer with a single word or short phrase How many What "
    "color is it dogs cats 2 1 3 red blue green"
)
KNOWN = {"unk_token": "<unk>", "pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
QWEN = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4,
    "spatial_merge_size": 2, "out_hidden_size": 32, "initializer_range": 0.3,
}  # fmt: skip
ROUTING = {"num_experts_per_tok": TOP_K, "moe_intermediate_size": 24}
# positions in time, height and width
MROPE = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 1, 1]}
# the pixels of 64 to 256 image tokens
PIXELS = {"shortest_edge": 64 * 64, "longest_edge": 256 * 64}


def picture(seed, height=40, width=64):
    return Image.fromarray(
        np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    )


def rows(prompts):
    """The prompts as a scorer takes them: queries [n], demonstrations [n, 4]."""
    padded = [[*shown, *[-1] * (4 - len(shown))] for _, shown in prompts]
    return torch.tensor([query for query, _ in prompts]), torch.tensor(padded)


def saved(folder, model, processor):
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def seeded(kind, config, seed=0):
    """A new model in eval mode, always with the same weights for a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind(config).eval()


def chat(image):
    """The chat template of a processor that knows images by this text."""
    return CHAT.replace("IMAGE", image)


def tiny_tokenizer(*special, **named):
    """One character, one token, of ASCII and the special ones; `named` become attributes such as
    `image_token`."""
    added = [*KNOWN.values(), "<end>", *special, *named.values()]
    # as ByteLevel writes bytes: a space is Ġ, a new line is Ċ
    letters = [chr(byte) for byte in range(33, 127)] + ["Ġ", "Ċ"]
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys([*added, *letters]))}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    extra = {"extra_special_tokens": named} if named else {}
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **KNOWN, **extra)
    made.add_special_tokens({"additional_special_tokens": ["<end>", *special]})
    return made


MIXTRAL = {"num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K}


def tiny_language_model():
    """A new Mixtral, which takes no images, with 4 experts of which 2 are used, and its
    tokenizer; always the same weights."""
    tokenizer = tiny_tokenizer()
    config = transformers.MixtralConfig(**TEXT, **MIXTRAL, vocab_size=len(tokenizer))
    return seeded(transformers.MixtralForCausalLM, config), tokenizer


def tiny_llama(seed=0):
    """A new Llama of two blocks and its tokenizer; always the same weights for a seed."""
    tokenizer = tiny_tokenizer()
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = seeded(transformers.LlamaForCausalLM, config, seed)
    # random weights of the usual size make all tokens equally likely
    model.lm_head.weight.data *= 20
    return model, tokenizer


def word_tokenizer(*special):
    """One word, one token; a new line is a token, spaces are none."""
    special = ["<end>", *special]
    words = [*KNOWN.values(), *special, "\n", "user", "assistant", *WORDS.split()]
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys(words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    spaces, lines = pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Split("\n", "isolated")
    parts = [spaces, lines, pre_tokenizers.Punctuation()]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **KNOWN, extra_special_tokens=special
    )


def tiny_model(family, **text):
    """A new model of a family, in eval mode, and its processor; always the same weights.

    Args:
        family: one of `FAMILIES` and `SCORERS`.
        text: settings of the language model's configuration that replace those of the tiny one.
    """
    name, config, processor = globals()[f"_{family}"](TEXT | text)
    model = seeded(getattr(transformers, f"{name}ForConditionalGeneration"), config)
    # trained models do not answer with image tokens
    model.generation_config.suppress_tokens = [
        number
        for number, token in processor.tokenizer.added_tokens_decoder.items()
        if token.special and number != TEXT["eos_token_id"]
    ]
    return model, processor


def tiny_clip(folder):
    """Save a new CLIP model of 9 k weights and its processor into a folder, and return it."""
    layers = {"hidden_size": 16, "intermediate_size": 32}
    layers |= {"num_hidden_layers": 1, "num_attention_heads": 2}
    tokenizer = word_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        "<s> $A </s>", special_tokens=[("<s>", 2), ("</s>", 3)]
    )
    tokenizer.model_max_length = 12
    words = {"vocab_size": len(tokenizer), "max_position_embeddings": 12}
    config = transformers.CLIPConfig(
        text_config=layers | words | {"bos_token_id": 2, "eos_token_id": 3},
        vision_config=layers | {"image_size": 8, "patch_size": 4},
        projection_dim=12,
    )
    pixels = transformers.CLIPImageProcessor(**EIGHT)
    model = seeded(transformers.CLIPModel, config)
    return saved(folder, model, transformers.CLIPProcessor(pixels, tokenizer))


def blocks_of(model):
    decoder = model.get_decoder()
    return getattr(decoder, "model", decoder).layers


def tower_of(model):
    return model.get_encoder(modality="image")


@contextmanager
def watched(model):
    """What runs inside: numbers of the blocks, of experts for each token in each block, rows that
    the vision tower is asked for and that it computes, last logits."""
    seen = {"blocks": [], "experts": [], "rows": [], "computed": [], "logits": []}
    llama4 = model.config.model_type == "llama4"
    hooks = []

    def before(module, name, value):
        hook = lambda _, args, kwargs: seen[name].append(value(args, kwargs))  # noqa: E731
        hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def after(module, name, value):
        hook = lambda *arguments: seen[name].append(value(arguments[2]))  # noqa: E731
        hooks.append(module.register_forward_hook(hook))

    def experts(args, _):  # which [tokens, k], and how much each counts
        _, which, weights = args
        assert all(len(set(row)) == len(row) for row in which.tolist())
        return set((weights > 0).sum(-1).tolist())

    def rows(args, kwargs):
        if "pixel_position_ids" in kwargs:  # of Gemma, padded to the budget
            return int((kwargs["pixel_position_ids"] >= 0).all(-1).sum())
        return len([*args, *kwargs.values()][0])

    for number, block in enumerate(blocks_of(model)):
        before(next(block.children()), "blocks", lambda *_, number=number: number)
    for name, module in model.named_modules():
        if llama4 and name.endswith(".router"):  # scores [tokens, experts], 0 if not chosen
            after(module, "experts", lambda scores: set((scores[0] > 0).sum(-1).tolist()))
        elif not llama4 and name.endswith(".experts"):
            before(module, "experts", experts)
    before(tower_of(model), "rows", rows)
    before(next(tower_of(model).children()), "computed", rows)
    after(model.get_output_embeddings(), "logits", lambda logits: logits[:, -1].float())
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def state_of(model, processor):
    """All that could have been changed, without what the last pass leaves behind (positions of its
    images)."""
    modules = {name: vars(module) | {"rope_deltas": None} for name, module in model.named_modules()}
    for state in modules.values():
        state["_forward_hooks"] = len(state["_forward_hooks"])
    parts = {
        name: str(vars(part)) for name, part in vars(processor).items() if hasattr(part, "__dict__")
    }
    return modules, vars(processor).copy(), parts, str(model.config)


def built(family, processor, text, vision, tokens, **settings):
    """The name of the family, its configuration and the processor.

    Args:
        tokens: special tokens, by the setting that holds their number.
    """
    tokenizer = processor.tokenizer
    for name, token in tokens.items():
        settings[name] = tokenizer.convert_tokens_to_ids(token)
    text = {"vocab_size": len(tokenizer)} | text
    kind = getattr(transformers, f"{family}Config")
    return family, kind(text_config=text, vision_config=vision, **settings), processor


def _llama4(text):
    marks = ["image_start", "image_end", "image", "patch", "tile_x_separator", "tile_y_separator"]
    tokenizer = tiny_tokenizer(*(f"<|{mark}|>" for mark in marks))
    pixels = transformers.Llama4ImageProcessor(size={"height": 16, "width": 16}, max_patches=4)
    processor = transformers.Llama4Processor(
        pixels, tokenizer, patch_size=4, chat_template=chat("<|image|>")
    )
    vision = VISION | {
        "intermediate_size": 64,
        "image_size": 16,
        "patch_size": 4,
        "vision_output_dim": 32,
        "projector_input_dim": 32,
        "projector_output_dim": 32,
    }
    settings = {"no_rope_layer_interval": 2, "attention_chunk_size": 64}
    settings |= {"intermediate_size_mlp": 24, **MIXTRAL}
    tokens = {
        "image_token_index": "<|patch|>",
        "boi_token_index": "<|image_start|>",
        "eoi_token_index": "<|image_end|>",
    }
    return built("Llama4", processor, settings | text, vision, tokens)


def _aria(text):
    tokenizer = tiny_tokenizer(image_token="<|img|>")
    # its processor knows images of 490 and 980 pixels only: 5 × 5 and 10 × 10 patches here
    pixels, sizes = transformers.AriaImageProcessor(), {490: 4, 980: 8}
    processor = transformers.AriaProcessor(
        pixels, tokenizer, size_conversion=sizes, chat_template=chat("<|img|>")
    )
    vision = VISION | {"model_type": "idefics3_vision", "image_size": 980, "patch_size": 98}
    text = text | {"moe_num_experts": EXPERTS, "moe_topk": TOP_K, "moe_num_shared_experts": 1}
    queries = {25: 4, 100: 8}
    tokens = {"image_token_index": "<|img|>"}
    return built("Aria", processor, text, vision, tokens, projector_patch_to_query_dict=queries)


def _llava_next(text):
    grids = [[16, 32], [32, 16], [32, 32], [48, 16], [16, 48]]
    pixels = transformers.LlavaNextImageProcessor(
        size={"shortest_edge": 16},
        crop_size={"height": 16, "width": 16},
        image_grid_pinpoints=grids,
    )
    text = {"model_type": "mixtral", "sliding_window": None} | MIXTRAL | text
    tokenizer = tiny_tokenizer("<image>")
    return _with_clip("LlavaNext", text, tokenizer, pixels, "default", image_grid_pinpoints=grids)


def _llava(text):
    text = {"model_type": "llama"} | text | SMALL
    pixels = transformers.CLIPImageProcessor(**EIGHT)
    return _with_clip("Llava", text, word_tokenizer("<image>"), pixels, "full")


def _with_clip(name, text, tokenizer, pixels, strategy, **grids):
    processor = getattr(transformers, f"{name}Processor")(
        pixels, tokenizer, 4, strategy, chat_template=chat("<image>"), num_additional_image_tokens=1
    )
    vision = VISION | {
        "model_type": "clip_vision_model",
        "image_size": pixels.crop_size["height"],
        "patch_size": 4,
        "initializer_range": text["initializer_range"],
    }
    return built(
        name,
        processor,
        text,
        vision,
        {"image_token_index": "<image>"},
        vision_feature_select_strategy=strategy,
        vision_feature_layer=-1,
        **grids,
    )


def _qwen(name, text, tokenizer=tiny_tokenizer, size=PIXELS, version=3, **vision):
    tokens = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    pixels = {"patch_size": 4, "merge_size": 2, "size": size}
    processor = getattr(transformers, f"Qwen{version}VLProcessor")(
        transformers.Qwen2VLImageProcessor(**pixels),
        tokenizer(*tokens.values()),
        getattr(transformers, f"Qwen{version}VLVideoProcessor")(**pixels),
        chat_template=chat("<|vision_start|><|image_pad|><|vision_end|>"),
    )
    return built(name, processor, {"rope_parameters": MROPE} | text, vision, tokens)


def _qwen2_vl(text):
    text = text | SMALL | {"rope_parameters": MROPE | {"mrope_section": [1, 1, 0]}}
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "patch_size": 4}
    size = {"shortest_edge": 64, "longest_edge": 400}
    return _qwen("Qwen2VL", text, word_tokenizer, size, version=2, mlp_ratio=1, **vision)


def _qwen3_vl_moe(text):
    vision = QWEN | {"num_position_embeddings": 256, "deepstack_visual_indexes": [0, 1]}
    return _qwen("Qwen3VLMoe", {"num_experts": EXPERTS, **ROUTING} | text, **vision)


def _qwen3_5_moe(text):
    settings = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 2,
        "num_experts": EXPERTS,
        **ROUTING,
        "shared_expert_intermediate_size": 24,
        "rope_parameters": MROPE | {"partial_rotary_factor": 1.0},
        "layer_types": ["linear_attention", "full_attention"] * (BLOCKS // 2),
        **text,
    }
    del settings["intermediate_size"]
    return _qwen("Qwen3_5Moe", settings, **QWEN, num_position_embeddings=256)


def _glm4v_moe(text):
    tokens = {}
    for kind in ("image", "video"):
        tokens[f"{kind}_token_id"] = f"<|{kind}|>"
        tokens[f"{kind}_start_token_id"] = f"<|begin_of_{kind}|>"
        tokens[f"{kind}_end_token_id"] = f"<|end_of_{kind}|>"
    # its sizes count pixels of two frames
    pixels = {"patch_size": 4, "size": {name: 2 * value for name, value in PIXELS.items()}}
    processor = transformers.Glm4vProcessor(
        transformers.Glm4vImageProcessor(**pixels),
        tiny_tokenizer(*tokens.values()),
        transformers.Glm4vVideoProcessor(**pixels),
        chat_template=chat("<|begin_of_image|><|image|><|end_of_image|>"),
    )
    settings = {
        "n_routed_experts": EXPERTS,
        **ROUTING,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "rope_parameters": MROPE | {"partial_rotary_factor": 1.0},
        **text,
    }
    del settings["head_dim"]
    vision = QWEN | {"depth": 1, "image_size": 64}
    return built("Glm4vMoe", processor, settings, vision, tokens)


def _gemma4(text):
    named = {
        "image_token": "<|image|>",
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "audio_token": "<|audio|>",
    }
    tokenizer = tiny_tokenizer("<|video|>", **named, boa_token="<|audio>", eoa_token="<audio|>")
    pixels = {"patch_size": 4, "pooling_kernel_size": 2}
    processor = transformers.Gemma4Processor(
        transformers.Gemma4AudioFeatureExtractor(),
        transformers.Gemma4ImageProcessor(**pixels, max_soft_tokens=280),
        tokenizer,
        transformers.Gemma4VideoProcessor(**pixels),
        chat_template=chat("<|image|>"),
    )
    settings = {
        "use_bidirectional_attention": "vision",
        "enable_moe_block": True,
        "num_experts": EXPERTS,
        "top_k_experts": TOP_K,
        "moe_intermediate_size": 24,
        "hidden_size_per_layer_input": 0,
        "global_head_dim": 8,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"] * (BLOCKS // 2),
    }
    vision = VISION | pixels | {"head_dim": 8, "num_key_value_heads": 2}
    vision["position_embedding_size"] = 2048
    tokens = {f"{name}_id": token for name, token in named.items()}
    tokens["video_token_id"] = "<|video|>"
    return built("Gemma4", processor, settings | text, vision, tokens, audio_config=None)


def _smolvlm(text):
    return _idefics("SmolVLM", text, video_processor=transformers.SmolVLMVideoProcessor())


def _idefics3(text):
    return _idefics("Idefics3", text)


def _idefics3_words(text):
    return _idefics("Idefics3", text | SMALL, word_tokenizer, size=8, longest=8)


def _idefics(family, text, tokenizer=tiny_tokenizer, size=16, longest=48, **video):
    splits = longest > size
    marks = ["<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"]
    if splits:
        marks += [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    pixels = getattr(transformers, f"{family}ImageProcessor")(
        size={"longest_edge": longest},
        max_image_size={"longest_edge": size},
        do_image_splitting=splits,
    )
    processor = getattr(transformers, f"{family}Processor")(
        pixels, tokenizer(*marks), image_seq_len=4, chat_template=chat("<image>"), **video
    )
    vision = VISION | {"image_size": size, "patch_size": 4}
    vision["initializer_range"] = text["initializer_range"]
    text = {"model_type": "llama"} | text
    settings = {"scale_factor": size // 8, "pad_token_id": 1}
    return built(family, processor, text, vision, {"image_token_id": "<image>"}, **settings)


def _molmo2(text):
    marks = {
        "image_start_token_id": "<im_start>",
        "low_res_image_start_token_id": "<low_res_im_start>",
        "image_end_token_id": "<im_end>",
        "image_patch_id": "<im_patch>",
        "frame_start_token_id": "<frame_start>",
        "frame_end_token_id": "<frame_end>",
    }
    tokenizer = tiny_tokenizer("<|image|>", "<|video|>", "<im_col>", "<im_low>", *marks.values())
    pixels = {"patch_size": 4, "size": {"height": 24, "width": 24}}
    processor = transformers.Molmo2Processor(
        transformers.Molmo2ImageProcessor(**pixels, overlap_margins=[1, 1], max_crops=6),
        transformers.Molmo2VideoProcessor(**pixels),
        tokenizer,
        chat_template=chat("<|image|>"),
    )
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    vision = VISION | heads | {"num_hidden_layers": 2, "image_size": [24, 24], "patch_size": 4}
    adapter = {
        "vision_feature_layer": [1, 0], "hidden_size": 16, "intermediate_size": 24,
        "text_hidden_size": 32, **heads,
    }  # fmt: skip
    text = {"additional_vocab_size": 8} | text
    return built("Molmo2", processor, text, vision, marks, adapter_config=adapter)
