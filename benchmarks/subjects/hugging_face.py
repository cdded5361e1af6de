"""Models of Hugging Face transformers with random weights, made from their configurations."""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.subjects.plain_models import Size
from benchmarks.subjects.subject import (
    DECODE,
    TRAIN,
    Problem,
    Subject,
    cache_reset,
    pixels,
    real_tokens,
    tokens,
)


def import_transformers():
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # random weights: nothing is fetched
    try:
        import transformers
    except ImportError as error:
        raise Problem(
            f"needs transformers ({error}): pip install -e '.[bench]', or take one of plain_*"
        ) from None
    return transformers


def hugging_face(
    kind: str, config: str, inputs: Callable, options: Callable[[Size], dict]
) -> Callable[..., Subject]:
    """`inputs(size, mode, device, dtype)` and the config's `options(size)`."""

    def build(size: Size, mode: str, attention: str, device, dtype) -> Subject:
        transformers = import_transformers()
        settings = {"attn_implementation": attention, **options(size)}
        with torch.device(device):
            model = getattr(transformers, kind)(getattr(transformers, config)(**settings))
        model = model.to(dtype).eval()
        # In a name such as GPT2LMHeadModel transformers finds no loss. It takes that of a causal
        # model, with a warning inside forward, which ends Dynamo's graph. Named here, it does not.
        if getattr(model, "loss_type", "") is None:
            model.loss_type = "ForCausalLM"
        kwargs = inputs(size, mode, device, dtype)
        if mode == DECODE:
            kwargs = dict(
                input_ids=kwargs["input_ids"][:, :1],
                use_cache=True,
                past_key_values=filled_cache(transformers, model, size, dtype),
            )
        result = (lambda out: out.loss) if mode == TRAIN else (lambda out: out.logits)
        about = {"attention": settings["attn_implementation"]}
        return Subject("", model, (), kwargs, result, cache_reset(kwargs), about)

    return build


def filled_cache(transformers, model: nn.Module, size: Size, dtype: torch.dtype):
    """Keys and values of seq - 1 tokens, random, in a static cache of seq."""
    cache = transformers.StaticCache(config=model.config, max_cache_len=size.seq)
    with torch.no_grad():  # one step allocates it with the model's own shapes
        model(
            torch.ones(size.batch, 1, dtype=torch.long, device=model.device),
            past_key_values=cache,
            use_cache=True,
        )
    if not all(hasattr(layer, "cumulative_length") for layer in cache.layers):
        raise Problem(
            f"decoding needs transformers >= 5.20 (here {transformers.__version__}), or plain_llama"
        )
    for layer in cache.layers:
        for kept in (layer.keys, layer.values):
            kept.copy_(torch.randn(kept.shape, device=kept.device).to(dtype))
        layer.cumulative_length.fill_(size.seq - 1)
    return cache


def causal_inputs(size: Size, mode: str, device, dtype) -> dict:
    ids = tokens(size, device)
    return dict(input_ids=ids, use_cache=False) | ({"labels": ids} if mode == TRAIN else {})


def padded_inputs(size: Size, mode: str, device, dtype) -> dict:
    ids = tokens(size, device)
    return dict(input_ids=ids, attention_mask=real_tokens(size, device)) | (
        {"labels": ids} if mode == TRAIN else {}
    )


def pair_inputs(size: Size, mode: str, device, dtype) -> dict:
    name = "labels" if mode == TRAIN else "decoder_input_ids"
    return {"input_ids": tokens(size, device), name: tokens(size, device), "use_cache": False}


def image_inputs(size: Size, mode: str, device, dtype) -> dict:
    labels = (
        {"labels": torch.randint(size.vocabulary, (size.batch,), device=device)}
        if mode == TRAIN
        else {}
    )
    return dict(pixel_values=pixels(size, device, dtype)) | labels


def sound_inputs(size: Size, mode: str, device, dtype) -> dict:
    sounds = torch.randn(size.batch, 80, 2 * sound_frames(size), device=device).to(dtype)
    name = "labels" if mode == TRAIN else "decoder_input_ids"
    return {"input_features": sounds, name: tokens(size, device), "use_cache": False}


def sound_frames(size: Size) -> int:
    """The encoder's length: 30 s are 1500."""
    return 1500 if size.width > 512 else 24


def encoder(size: Size) -> dict:
    return dict(
        hidden_size=size.width,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
    )


def causal(size: Size) -> dict:
    return encoder(size) | dict(
        num_key_value_heads=size.kv,
        vocab_size=size.vocabulary,
        pad_token_id=0,
        max_position_embeddings=size.seq,
    )


def decoder(name: str, **options) -> Callable[..., Subject]:
    """A causal language model; `options` may depend on the size."""
    return hugging_face(
        f"{name}ForCausalLM",
        f"{name}Config",
        causal_inputs,
        lambda s: causal(s) | {k: v(s) if callable(v) else v for k, v in options.items()},
    )


def gpt2(size: Size) -> dict:
    return dict(
        n_embd=size.width,
        n_layer=size.layers,
        n_head=size.heads,
        n_inner=size.inner,
        n_positions=size.seq,
        vocab_size=size.vocabulary,
        bos_token_id=0,
        eos_token_id=0,
    )


def bert(size: Size) -> dict:
    return encoder(size) | dict(vocab_size=size.vocabulary, max_position_embeddings=size.seq)


def t5(size: Size) -> dict:
    return dict(
        d_model=size.width,
        d_kv=size.head,
        d_ff=size.inner,
        num_layers=size.layers,
        num_heads=size.heads,
        vocab_size=size.vocabulary,
        decoder_start_token_id=0,
    )


def vit(size: Size) -> dict:
    return encoder(size) | dict(
        image_size=size.image,
        patch_size=size.patch,
        num_labels=size.vocabulary,
        problem_type="single_label_classification",
    )


def swin(size: Size) -> dict:
    """Four stages; the third has the layers of the size. Windows of seq patches."""
    return dict(
        image_size=size.image,
        patch_size=size.patch,
        embed_dim=size.width,
        depths=[2, 2, size.layers, 2],
        num_heads=[size.heads << stage for stage in range(4)],
        window_size=math.isqrt(size.seq),
        num_labels=size.vocabulary,
        problem_type="single_label_classification",
    )


def whisper(size: Size) -> dict:
    each = dict(layers=size.layers, attention_heads=size.heads, ffn_dim=size.inner)
    halves = {
        f"{half}_{name}": value for half in ("encoder", "decoder") for name, value in each.items()
    }
    return halves | dict(
        d_model=size.width,
        vocab_size=size.vocabulary,
        num_mel_bins=80,
        max_source_positions=sound_frames(size),
        max_target_positions=size.seq,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )


def window(size: Size) -> int:
    """Keys that a query of a sliding window sees."""
    return size.seq // 2
