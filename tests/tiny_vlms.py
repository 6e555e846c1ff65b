"""Tiny random vision-language models of three families that score demonstrations, made here without any download."""

import torch
import transformers

WORDS = (
    "Question : ? . Answer with a single word or short phrase How many What color is it dogs cats 2 1 3 red blue green"
)
CHAT = (
    "{% for m in messages %}{{ m.role }} : {% for c in m.content %}{% if c.type == 'image' %}VISION{% else %} "
    "{{ c.text }}{% endif %}{% endfor %} <end>\n{% endfor %}{% if add_generation_prompt %}assistant :{% endif %}"
)
FAMILIES = ("llava", "idefics3", "qwen2_vl")


def tiny_tokenizer(*special):
    """One word, one token; a new line is a token, spaces are none."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    ours = ["<unk>", "<pad>", "<s>", "</s>", "<end>", *special]
    words = dict.fromkeys([*ours, "\n", "user", "assistant", *WORDS.split()])
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Punctuation()]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens=["<end>", *special],
    )


def tiny_vlm(family, chat=True):
    """A random model of some 10 k parameters and its processor, with images of 8 × 8 pixels and some 5 tokens."""
    torch.manual_seed(0)
    text = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    text |= {
        "num_key_value_heads": 2, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3,
        "initializer_range": 0.4,
    }  # fmt: skip
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 8, "patch_size": 4, "initializer_range": 0.4}
    if family == "llava":
        tokenizer = tiny_tokenizer("<image>")
        template = CHAT.replace("VISION", "<image>") if chat else None
        pixels = transformers.CLIPImageProcessor(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
        processor = transformers.LlavaProcessor(
            pixels, tokenizer, 4, "full", chat_template=template, num_additional_image_tokens=1
        )
        config = transformers.LlavaConfig(
            vision_config=transformers.CLIPVisionConfig(**vision),
            text_config=transformers.LlamaConfig(**text, vocab_size=len(tokenizer)),
            image_token_id=processor.image_token_id,
            vision_feature_select_strategy="full",
            vision_feature_layer=-1,
        )
        return transformers.LlavaForConditionalGeneration(config), processor
    if family == "idefics3":
        from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

        tokenizer = tiny_tokenizer("<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>")
        pixels = Idefics3ImageProcessorPil(
            size={"longest_edge": 8}, max_image_size={"longest_edge": 8}, do_image_splitting=False
        )
        processor = transformers.Idefics3Processor(
            pixels, tokenizer, image_seq_len=4, chat_template=CHAT.replace("VISION", "<image>")
        )
        config = transformers.Idefics3Config(
            image_token_id=processor.image_token_id,
            vision_config=vision,
            text_config={"model_type": "llama", **text, "vocab_size": len(tokenizer)},
            scale_factor=1,
            pad_token_id=1,
        )
        return transformers.Idefics3ForConditionalGeneration(config), processor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.processing_utils import ProcessorMixin

    class ImagesOnly(transformers.Qwen2VLProcessor):  # the video part of the real one needs torchvision
        def __init__(self, image_processor, tokenizer, chat_template=None):
            self.image_token, self.image_token_id = "<|image_pad|>", tokenizer.convert_tokens_to_ids("<|image_pad|>")
            self.video_token, self.video_token_id = "<|video_pad|>", tokenizer.convert_tokens_to_ids("<|video_pad|>")
            ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    marks = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    tokenizer = tiny_tokenizer(*marks)
    template = CHAT.replace("VISION", "<|vision_start|><|image_pad|><|vision_end|>")
    pixels = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size={"shortest_edge": 64, "longest_edge": 400})
    config = transformers.Qwen2VLConfig(
        text_config={
            **text,
            "vocab_size": len(tokenizer),
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 1, 0]},
        },
        vision_config={"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "patch_size": 4, "mlp_ratio": 1},
        **{f"{name}_token_id": tokenizer.convert_tokens_to_ids(mark) for name, mark in zip(
            ("image", "video", "vision_start", "vision_end"), marks, strict=True)},
    )  # fmt: skip
    return transformers.Qwen2VLForConditionalGeneration(config), ImagesOnly(pixels, tokenizer, template)
