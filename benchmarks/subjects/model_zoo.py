"""What benchmarks.models measures: whole models with random weights, of realistic width with a few
layers.

`plain_*` are in this repository (plain_models.py); the others come from Hugging Face transformers,
by their config.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.subjects.hugging_face import (
    bert,
    causal_inputs,
    decoder,
    gpt2,
    hugging_face,
    image_inputs,
    padded_inputs,
    pair_inputs,
    sound_inputs,
    swin,
    t5,
    vit,
    whisper,
    window,
)
from benchmarks.subjects.plain_models import GPT2, Bert, Llama, Size, ViT
from benchmarks.subjects.subject import (
    DECODE,
    INFER,
    TRAIN,
    Problem,
    Subject,
    pixels,
    real_tokens,
    tokens,
)


@dataclasses.dataclass(frozen=True)
class Entry:
    """How to build a model: build(size, mode, attention, device) -> Subject; the sizes on a GPU and
    for tests.
    """

    build: Callable[..., Subject]
    full: Size
    tiny: Size
    modes: tuple[str, ...] = (INFER, TRAIN)


def plain(kind: type[nn.Module]) -> Callable[..., Subject]:
    def build(size: Size, mode: str, attention: str, device, dtype) -> Subject:
        with torch.device(device):
            model = kind(size, attention).to(dtype).eval()
            for module in model.modules():
                if isinstance(module, nn.Embedding):
                    nn.init.normal_(module.weight, std=0.02)
        kwargs, train = {}, mode == TRAIN
        if kind is ViT:
            args = (pixels(size, device, dtype),)
            labels = torch.randint(size.vocabulary, (size.batch,), device=device)
        else:
            args = (tokens(size, device),)
            labels = args[0]
        if kind is Bert:
            args += (real_tokens(size, device),)
        if mode == DECODE:
            args = (args[0][:, :1],)
            shape = (size.batch, size.kv, size.seq - 1, size.head)
            kwargs["past"] = [
                tuple(torch.randn(2, *shape, device=device).to(dtype)) for _ in range(size.layers)
            ]
        return Subject("", model, args, kwargs | ({"labels": labels} if train else {}))

    return build


# batch, seq, layers, width, heads, inner, vocabulary, kv heads
LLAMA = Size(4, 2048, 8, 2048, 32, 8192, 128256, kv=8)
GPT2_MEDIUM = Size(16, 1024, 12, 1024, 16, 4096, 50257)
BERT_LARGE = Size(32, 512, 12, 1024, 16, 4096, 30522)
VIT_L = Size(128, 197, 12, 1024, 16, 4096, 1000)
TINY = Size(2, 16, 2, 64, 4, 128, 128, kv=2, patch=8, image=32)
TINY_UNGROUPED = dataclasses.replace(TINY, kv=TINY.heads)
ALL = (INFER, TRAIN, DECODE)
head_dim, experts = (lambda size: size.head), (lambda size: 8 if size.width > 512 else 2)
ENTRIES = {
    "plain_llama": Entry(plain(Llama), LLAMA, TINY, ALL),
    "plain_gpt2": Entry(plain(GPT2), GPT2_MEDIUM, TINY),
    "plain_bert": Entry(plain(Bert), BERT_LARGE, TINY),
    "plain_vit": Entry(plain(ViT), VIT_L, TINY),
    "llama": Entry(decoder("Llama"), LLAMA, TINY, ALL),
    "qwen3": Entry(
        decoder("Qwen3", head_dim=lambda s: 128 if s.width > 512 else s.head),
        Size(8, 1024, 12, 1024, 16, 3072, 151936, kv=8),
        TINY,
        ALL,
    ),
    "gemma": Entry(
        decoder("Gemma", head_dim=head_dim),
        Size(4, 1024, 6, 2048, 8, 16384, 256000, kv=1),
        TINY,
        ALL,
    ),
    "gemma2": Entry(  # capped scores: transformers writes them out, whatever is asked for
        decoder(
            "Gemma2",
            head_dim=head_dim,
            query_pre_attn_scalar=head_dim,
            sliding_window=window,
            attn_implementation="eager",
        ),
        Size(4, 2048, 6, 2048, 16, 9216, 256000, kv=8),
        TINY,
    ),
    "mistral": Entry(
        decoder("Mistral", head_dim=head_dim, sliding_window=window),
        Size(2, 8192, 4, 2048, 16, 7168, 32000, kv=4),
        TINY,
    ),
    "mixtral": Entry(
        decoder("Mixtral", num_local_experts=experts),
        Size(4, 2048, 4, 2048, 16, 7168, 32000, kv=4),
        TINY,
        ALL,
    ),
    "gpt_oss": Entry(  # sinks: transformers writes the attention out, whatever is asked for
        decoder(
            "GptOss",
            head_dim=head_dim,
            sliding_window=lambda size: min(128, size.seq // 2),
            num_local_experts=experts,
            num_experts_per_tok=lambda size: min(4, experts(size)),
            attn_implementation="eager",
        ),
        Size(2, 4096, 4, 2048, 32, 2048, 201088, kv=4),
        TINY,
    ),
    "deepseek": Entry(  # latent attention: values of two thirds of the size of queries and keys
        decoder(
            "DeepseekV3",
            q_lora_rank=None,
            kv_lora_rank=lambda size: 4 * size.head,
            qk_nope_head_dim=head_dim,
            qk_rope_head_dim=lambda size: size.head // 2,
            v_head_dim=head_dim,
            moe_intermediate_size=lambda size: size.inner // 4,
            first_k_dense_replace=1,
            n_routed_experts=experts,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
        ),
        Size(2, 4096, 4, 2048, 16, 7168, 102400, kv=16),
        TINY_UNGROUPED,
    ),
    "gpt2": Entry(
        hugging_face("GPT2LMHeadModel", "GPT2Config", causal_inputs, gpt2), GPT2_MEDIUM, TINY, ALL
    ),
    "bert": Entry(
        hugging_face("BertForMaskedLM", "BertConfig", padded_inputs, bert), BERT_LARGE, TINY
    ),
    "t5": Entry(
        hugging_face("T5ForConditionalGeneration", "T5Config", pair_inputs, t5),
        Size(16, 512, 6, 1024, 16, 4096, 32128),
        TINY,
    ),
    "vit": Entry(
        hugging_face("ViTForImageClassification", "ViTConfig", image_inputs, vit), VIT_L, TINY
    ),
    "swin": Entry(  # Swin-T; seq: the patches of a window
        hugging_face("SwinForImageClassification", "SwinConfig", image_inputs, swin),
        Size(64, 49, 6, 96, 3, 384, 1000, patch=4),
        Size(2, 16, 1, 32, 2, 128, 128, patch=1, image=32),
    ),
    "whisper": Entry(
        hugging_face("WhisperForConditionalGeneration", "WhisperConfig", sound_inputs, whisper),
        Size(16, 448, 6, 1024, 16, 4096, 51865),
        TINY,
    ),
}


def build(
    name: str, mode: str, size: Size, attention: str, device: torch.device, dtype: torch.dtype
) -> Subject:
    """A model of ENTRIES with random weights, the same at every call."""
    entry = ENTRIES[name]
    if mode not in entry.modes:
        raise Problem(f"{name} has no mode {mode}; it has {', '.join(entry.modes)}")
    torch.manual_seed(0)
    subject = entry.build(size, mode, attention, device, dtype)
    about = {
        f: getattr(size, f)
        for f in ("batch", "seq", "layers", "width", "heads", "inner", "vocabulary")
    }
    about["attention"] = subject.about.get("attention", attention)
    return dataclasses.replace(subject, name=name, about=about)
