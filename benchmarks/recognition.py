"""What is recognised in whole models, against what their sources hold (random weights; needs transformers).

    python -m benchmarks.recognition [model ...]

Expected is layers × count a layer, counted in the models' sources. Found is every place where one of the patterns of a
kind stands, fused or not: a value counts once, whatever larger pattern it is part of.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

import fusion_backend
from benchmarks.tiny_models import HEADS, LAYERS, LONGEST, MODELS, SIZES, VOCABULARY, WIDTH, hugging_face, tokens
from fusion_backend import explain
from fusion_backend.pattern import REGISTRY

CAUSAL = dict(SIZES, vocab_size=VOCABULARY, max_position_embeddings=LONGEST, num_key_value_heads=2, use_cache=False)
# Kind -> patterns, each with how many of the kind one site holds.
KINDS = {
    "layer norm": ("layer_norm", "add_layer_norm", "dropout_add_layer_norm"),
    "RMS norm": ("rms_norm", "add_rms_norm"),
    "gated MLP": ("gated_linear",),
    "linear + act": ("linear_act",),
    "attention": ("attention",),
    "rotary": ("rotary",),
    "loss": ("cross_entropy", "linear_cross_entropy"),
}


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model, its inputs, and what its source holds: kind -> count (kinds that are not named: none)."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int, int], dict[str, Tensor]]
    expected: dict[str, int]


def images_and_tokens(batch: int, length: int) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (batch, length))
    return dict(input_ids=ids, pixel_values=torch.randn(batch, 3, 32, 32))


def sounds(batch: int, length: int) -> dict[str, Tensor]:
    return dict(input_features=torch.randn(batch, 80, 2 * LONGEST), labels=torch.randint(VOCABULARY, (batch, length)))


def just_tokens(batch: int, length: int) -> dict[str, Tensor]:
    return dict(input_ids=torch.randint(VOCABULARY, (batch, length)))


def known(name: str, **more: int) -> Subject:
    """A model of tiny_models with layer norms, each layer with one attention and one activation after a linear."""
    tiny = MODELS[name]
    counts = {"layer norm": 2 * LAYERS + 1, "linear + act": LAYERS, "attention": LAYERS}
    return Subject(tiny.build, tiny.inputs, counts | more)


def llama_like(norms: int) -> dict[str, int]:
    return {"RMS norm": norms, "gated MLP": LAYERS, "attention": LAYERS, "rotary": 2 * LAYERS, "loss": 1}


def causal(kind: str, norms: int, **options) -> Subject:
    build = hugging_face(f"{kind}ForCausalLM", f"{kind}Config", **{**CAUSAL, **options})
    return Subject(build, tokens, llama_like(norms))


# A norm and the linear after it are one site of norm_linear: left out, so that norms are counted as norms.
OPTIONS = {"fusion.gate": "always", "fusion.skip": "norm_linear"}
TOWERS = dict(hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS)
SUBJECTS = {
    "llama": causal("Llama", 2 * LAYERS + 1),
    "qwen3": causal("Qwen3", 4 * LAYERS + 1, head_dim=16),
    "gemma": causal("Gemma", 2 * LAYERS + 1, head_dim=16),
    "mistral": causal("Mistral", 2 * LAYERS + 1, head_dim=16),
    "mixtral": Subject(
        hugging_face("MixtralForCausalLM", "MixtralConfig", **CAUSAL, num_local_experts=2),
        tokens,
        {k: v for k, v in llama_like(2 * LAYERS + 1).items() if k != "gated MLP"},
    ),
    "gpt2": known("gpt2", loss=1),
    "bert": known("bert"),
    "distilbert": Subject(
        hugging_face("DistilBertModel", "DistilBertConfig", dim=WIDTH, hidden_dim=2 * WIDTH, n_layers=LAYERS,
                     n_heads=HEADS, vocab_size=VOCABULARY, max_position_embeddings=LONGEST),
        just_tokens,
        {"layer norm": 2 * LAYERS + 1, "linear + act": LAYERS, "attention": LAYERS},
    ),
    "t5": Subject(
        MODELS["t5"].build, MODELS["t5"].inputs,
        {"RMS norm": 5 * LAYERS + 2, "linear + act": 2 * LAYERS, "attention": 3 * LAYERS, "loss": 1},
    ),
    "vit": known("vit", loss=1),
    "whisper": Subject(
        hugging_face("WhisperForConditionalGeneration", "WhisperConfig", vocab_size=VOCABULARY, num_mel_bins=80,
                     d_model=WIDTH, encoder_layers=LAYERS, decoder_layers=LAYERS, encoder_attention_heads=HEADS,
                     decoder_attention_heads=HEADS, encoder_ffn_dim=2 * WIDTH, decoder_ffn_dim=2 * WIDTH,
                     max_source_positions=LONGEST, max_target_positions=LONGEST, pad_token_id=0, bos_token_id=1,
                     eos_token_id=2, decoder_start_token_id=1, use_cache=False),
        sounds,
        {"layer norm": 5 * LAYERS + 2, "linear + act": 2 * LAYERS, "attention": 3 * LAYERS, "loss": 1},
    ),
    "clip": Subject(
        hugging_face("CLIPModel", "CLIPConfig",
                     text_config=dict(TOWERS, vocab_size=VOCABULARY, max_position_embeddings=LONGEST, eos_token_id=2,
                                      pad_token_id=1, bos_token_id=0),
                     vision_config=dict(TOWERS, image_size=32, patch_size=8), projection_dim=WIDTH),
        images_and_tokens,
        {"layer norm": 2 * (2 * LAYERS) + 3, "linear + act": 2 * LAYERS, "attention": 2 * LAYERS},
    ),
}  # fmt: skip


def found(subject: Subject, training: bool) -> dict[str, int]:
    """Kind -> places; the graph is looked at, not compiled."""
    torch.manual_seed(0)
    model = subject.build().train(training)
    torch.compiler.reset()
    with torch.set_grad_enabled(training):
        report = explain(model, options=OPTIONS, **subject.inputs(2, 16))
    places: dict[str, set] = {kind: set() for kind in KINDS}
    for i, graph in enumerate(report.graphs):
        for site in graph.sites:
            for kind, patterns in KINDS.items():
                if site.pattern in patterns:
                    places[kind].add((i, site.nodes[-REGISTRY[site.pattern].outputs]))  # the first result
    return {kind: len(where) for kind, where in places.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(SUBJECTS))
    print("| model | " + " | ".join(KINDS) + " |")
    print("|---|" + "---|" * len(KINDS))
    for name in parser.parse_args().models or SUBJECTS:
        subject, cells = SUBJECTS[name], []
        evaluated, trained = found(subject, False), found(subject, True)
        for kind in KINDS:
            expected = subject.expected.get(kind, 0)
            cells.append(f"{evaluated[kind]}, {trained[kind]} of {expected}" if expected or trained[kind] else "")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    fusion_backend.reset()


if __name__ == "__main__":
    main()
