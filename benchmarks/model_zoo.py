"""What benchmarks.models measures: whole models with random weights, of realistic width with a few
layers.

`plain_*` are in this repository (plain_models.py); the others come from Hugging Face transformers,
by their config.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.plain_models import GPT2, Bert, Llama, Size, ViT
from fusion_backend.compat.torch import pytree

INFER, TRAIN, DECODE = MODES = ("infer", "train", "decode")


class Problem(Exception):
    """Something about a model that the user has to put right, in a sentence."""


@dataclasses.dataclass
class Subject:
    """A model and its inputs. `result` takes from the output what is compared, in training the
    loss; `before` runs before each step, outside of the compiled code.
    """

    name: str
    model: nn.Module
    args: tuple = ()
    kwargs: dict = dataclasses.field(default_factory=dict)
    result: Callable = lambda output: output
    before: Callable[[], object] | None = None
    about: dict = dataclasses.field(default_factory=dict)

    def __call__(self) -> object:
        """A step's forward, as it is compiled."""
        return self.result(self.model(*self.args, **self.kwargs))

    def cast(self, dtype: torch.dtype) -> Subject:
        """The same values in another dtype, in memory of their own."""
        if self.before:
            self.before()
        args, kwargs = cast((self.args, self.kwargs), dtype)
        return dataclasses.replace(self, model=copy.deepcopy(self.model).to(dtype), args=args,
            kwargs=kwargs,
                                   before=cache_reset(kwargs))  # fmt: skip


def cast(values, dtype: torch.dtype):
    """A tree of inputs with its floating tensors in dtype; a cache of keys and values is copied."""

    def one(x):
        if isinstance(x, Tensor):
            return x.to(dtype) if x.is_floating_point() else x
        if hasattr(x, "layers"):
            x = copy.deepcopy(x)
            for layer in x.layers:
                layer.keys, layer.values, layer.dtype = (
                    layer.keys.to(dtype),
                    layer.values.to(dtype),
                    dtype,
                )
        return x

    return pytree.tree_map(one, values)


def cache_reset(kwargs: dict) -> Callable[[], object] | None:
    """Sets the cache back by the token that a step adds, so that every step does the same work."""
    cache = kwargs.get("past_key_values")
    if cache is None:
        return None
    lengths, start = (
        [layer.cumulative_length for layer in cache.layers],
        cache.layers[0].cumulative_length.item(),
    )
    return lambda: [length.fill_(start) for length in lengths]


@dataclasses.dataclass(frozen=True)
class Entry:
    """How to build a model: build(size, mode, attention, device) -> Subject; the sizes on a GPU and
    for tests.
    """

    build: Callable[..., Subject]
    full: Size
    tiny: Size
    modes: tuple[str, ...] = (INFER, TRAIN)


def tokens(size: Size, device) -> Tensor:
    return torch.randint(1, size.vocabulary, (size.batch, size.seq), device=device)


def real_tokens(size: Size, device) -> Tensor:
    """1 for tokens, 0 for padding: rows from full to half length."""
    lengths = torch.linspace(size.seq, size.seq / 2, size.batch, device=device).long()
    return (torch.arange(size.seq, device=device) < lengths[:, None]).long()


def pixels(size: Size, device, dtype) -> Tensor:
    return torch.randn(size.batch, 3, size.image, size.image, device=device).to(dtype)


# Plain torch.


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


# Hugging Face transformers.


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
        settings = getattr(transformers, config)(
            **{"attn_implementation": attention, **options(size)}
        )
        with torch.device(device):
            model = getattr(transformers, kind)(settings).to(dtype).eval()
        kwargs = inputs(size, mode, device, dtype)
        if mode == DECODE:
            kwargs = dict(input_ids=kwargs["input_ids"][:, :1], use_cache=True,
                          past_key_values=filled_cache(transformers, model, size,
                          dtype))  # fmt: skip
        result = (lambda out: out.loss) if mode == TRAIN else (lambda out: out.logits)
        return Subject("", model, (), kwargs, result, cache_reset(kwargs))

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
    return dict(hidden_size=size.width, intermediate_size=size.inner, num_hidden_layers=size.layers,
                num_attention_heads=size.heads)  # fmt: skip


def causal(size: Size) -> dict:
    return encoder(size) | dict(num_key_value_heads=size.kv, vocab_size=size.vocabulary,
        pad_token_id=0,
                                max_position_embeddings=size.seq)  # fmt: skip


def decoder(name: str, **options) -> Callable[..., Subject]:
    """A causal language model; `options` may depend on the size."""
    return hugging_face(f"{name}ForCausalLM", f"{name}Config", causal_inputs,
                        lambda s: causal(s) | {k: v(s) if callable(v) else v for k,
                        v in options.items()})  # fmt: skip


def gpt2(size: Size) -> dict:
    return dict(n_embd=size.width, n_layer=size.layers, n_head=size.heads, n_inner=size.inner,
        n_positions=size.seq,
                vocab_size=size.vocabulary, bos_token_id=0, eos_token_id=0)  # fmt: skip


def bert(size: Size) -> dict:
    return encoder(size) | dict(vocab_size=size.vocabulary, max_position_embeddings=size.seq)


def t5(size: Size) -> dict:
    return dict(d_model=size.width, d_kv=size.head, d_ff=size.inner, num_layers=size.layers,
        num_heads=size.heads,
                vocab_size=size.vocabulary, decoder_start_token_id=0)  # fmt: skip


def vit(size: Size) -> dict:
    return encoder(size) | dict(image_size=size.image, patch_size=size.patch,
        num_labels=size.vocabulary,
                                problem_type="single_label_classification")  # fmt: skip


def whisper(size: Size) -> dict:
    each = dict(layers=size.layers, attention_heads=size.heads, ffn_dim=size.inner)
    halves = {
        f"{half}_{name}": value for half in ("encoder", "decoder") for name, value in each.items()
    }
    return halves | dict(d_model=size.width, vocab_size=size.vocabulary, num_mel_bins=80,
                         max_source_positions=sound_frames(size), max_target_positions=size.seq,
                         pad_token_id=0,
                         bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)  # fmt: skip


def window(size: Size) -> int:
    """Keys that a query of a sliding window sees."""
    return size.seq // 2


# batch, seq, layers, width, heads, inner, vocabulary, kv heads
LLAMA = Size(4, 2048, 8, 2048, 32, 8192, 128256, kv=8)
GPT2_MEDIUM = Size(16, 1024, 12, 1024, 16, 4096, 50257)
BERT_LARGE = Size(32, 512, 12, 1024, 16, 4096, 30522)
VIT_L = Size(128, 197, 12, 1024, 16, 4096, 1000)
TINY = Size(2, 16, 2, 64, 4, 128, 128, kv=2, patch=8, image=32)
ALL = (INFER, TRAIN, DECODE)
head_dim, experts = (lambda size: size.head), (lambda size: 8 if size.width > 512 else 2)
ENTRIES = {
    "plain_llama": Entry(plain(Llama), LLAMA, TINY, ALL),
    "plain_gpt2": Entry(plain(GPT2), GPT2_MEDIUM, TINY),
    "plain_bert": Entry(plain(Bert), BERT_LARGE, TINY),
    "plain_vit": Entry(plain(ViT), VIT_L, TINY),
    "llama": Entry(decoder("Llama"), LLAMA, TINY, ALL),
    "qwen3": Entry(decoder("Qwen3", head_dim=lambda s: 128 if s.width > 512 else s.head),
                   Size(8, 1024, 12, 1024, 16, 3072, 151936, kv=8), TINY, ALL),
    "gemma": Entry(decoder("Gemma", head_dim=head_dim),
    Size(4, 1024, 6, 2048, 8, 16384, 256000, kv=1), TINY, ALL),
    "gemma2": Entry(  # capped scores: transformers writes them out, whatever is asked for
        decoder("Gemma2", head_dim=head_dim, query_pre_attn_scalar=head_dim, sliding_window=window,
                attn_implementation="eager"),
        Size(4, 2048, 6, 2048, 16, 9216, 256000, kv=8), TINY),
    "mistral": Entry(decoder("Mistral", head_dim=head_dim, sliding_window=window),
                     Size(2, 8192, 4, 2048, 16, 7168, 32000, kv=4), TINY),
    "mixtral": Entry(decoder("Mixtral", num_local_experts=experts),
                     Size(4, 2048, 4, 2048, 16, 7168, 32000, kv=4), TINY, ALL),
    "gpt2": Entry(hugging_face("GPT2LMHeadModel", "GPT2Config", causal_inputs, gpt2), GPT2_MEDIUM,
    TINY, ALL),
    "bert": Entry(hugging_face("BertForMaskedLM", "BertConfig", padded_inputs, bert), BERT_LARGE,
    TINY),
    "t5": Entry(hugging_face("T5ForConditionalGeneration", "T5Config", pair_inputs, t5),
                Size(16, 512, 6, 1024, 16, 4096, 32128), TINY),
    "vit": Entry(hugging_face("ViTForImageClassification", "ViTConfig", image_inputs, vit), VIT_L,
    TINY),
    "whisper": Entry(hugging_face("WhisperForConditionalGeneration", "WhisperConfig", sound_inputs,
    whisper),
                     Size(16, 448, 6, 1024, 16, 4096, 51865), TINY),
}  # fmt: skip


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
    return dataclasses.replace(subject, name=name, about=about)
