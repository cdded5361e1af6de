"""What benchmarks.recognition counts sites in: small Hugging Face models, and what their sources
hold.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.subjects.tiny_models import (
    CAUSAL,
    HEADS,
    LAYERS,
    LONGEST,
    MODELS,
    SIZES,
    T5,
    VOCABULARY,
    WIDTH,
    hugging_face,
    padded_tokens,
    tokens,
)

TEXT = dict(SIZES, vocab_size=VOCABULARY, max_position_embeddings=LONGEST)
DISTILBERT = dict(
    dim=WIDTH,
    hidden_dim=2 * WIDTH,
    n_layers=LAYERS,
    n_heads=HEADS,
    vocab_size=VOCABULARY,
    max_position_embeddings=LONGEST,
)
TRAINING = (
    "train",
    "autocast",
    "checkpoint",
    "norms trained",
    "first layer frozen",
    "attention by hand",
)


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model and its inputs.

    expected: kind -> how often its source holds it in each layer, and besides (kinds that are not
    named: never). missed: setting, or release and setting, which counts first -> kind -> how many
    are known not to be found.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[int, int], dict[str, Tensor | bool]]
    expected: dict[str, tuple[int, int]]
    missed: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)


def padded(batch: int, length: int) -> dict[str, Tensor]:
    """Rows of different lengths with their mask, labels of the words and of the rows."""
    inputs = padded_tokens(batch, length)
    return inputs | dict(labels=inputs["input_ids"], next_sentence_label=torch.arange(batch) % 2)


def spans(batch: int, length: int) -> dict[str, Tensor]:
    ids = torch.randint(VOCABULARY, (batch, length))
    return dict(
        input_ids=ids, start_positions=torch.arange(batch), end_positions=torch.arange(batch) + 2
    )


def images_and_tokens(batch: int, length: int) -> dict[str, Tensor | bool]:
    ids = torch.randint(3, VOCABULARY, (batch, length))
    return dict(input_ids=ids, pixel_values=torch.randn(batch, 3, 32, 32), return_loss=True)


def sounds(batch: int, length: int) -> dict[str, Tensor]:
    return dict(
        input_features=torch.randn(batch, 80, 2 * LONGEST),
        labels=torch.randint(VOCABULARY, (batch, length)),
    )


def causal(kind: str, norms: int = 2, **options) -> Subject:
    """A decoder with RMS norms in each layer and one at the end; rotary embeddings of queries and
    of keys.
    """
    holds = {
        "RMS norm": (norms, 1),
        "gated MLP": (1, 0),
        "attention": (1, 0),
        "rotary": (2, 0),
        "loss": (0, 1),
    }
    build = hugging_face(f"{kind}ForCausalLM", f"{kind}Config", **{**CAUSAL, **options})
    return Subject(build, tokens, holds)


def layers(
    norms: tuple[int, int], loss: int, acts: tuple[int, int] = (1, 0)
) -> dict[str, tuple[int, int]]:
    """Of models with layer norms: one attention and one activation after a linear in each layer."""
    return {"layer norm": norms, "linear + act": acts, "attention": (1, 0), "loss": (0, loss)}


def t5(mlp: str, **options) -> Subject:
    """Two norms in each layer of the encoder, three in each of the decoder; norms at the end of
    both.

    Missed: under checkpointing the first layer of the decoder, which sets requires_grad, so that
    Dynamo leaves it to Python.
    """
    holds = {"RMS norm": (5, 2), mlp: (2, 0), "attention": (3, 0), "loss": (0, 1)}
    missed = {"checkpoint": {"RMS norm": 3, mlp: 1, "attention": 2}}
    return Subject(
        hugging_face("T5ForConditionalGeneration", "T5Config", **T5, **options),
        tokens,
        holds,
        missed,
    )


SUBJECTS = {
    "llama": causal("Llama"),
    "qwen3": causal("Qwen3", norms=4, head_dim=16),  # queries and keys have norms of their own
    "gemma": causal("Gemma", head_dim=16),
    "mistral": causal("Mistral", head_dim=16),
    "mixtral": causal("Mixtral", num_local_experts=2),
    "gpt2": Subject(MODELS["gpt2"].build, tokens, layers((2, 1), 1)),
    # Besides the layers: the embeddings' norm; pooler and head, each with an activation; the head's
    # norm; two losses.
    "bert": Subject(
        hugging_face("BertForPreTraining", "BertConfig", **TEXT), padded, layers((2, 2), 2, (1, 2))
    ),
    "distilbert": Subject(
        hugging_face("DistilBertForMaskedLM", "DistilBertConfig", **DISTILBERT),
        tokens,
        layers((2, 2), 1, (1, 1)),
    ),
    "distilbert, questions": Subject(
        hugging_face("DistilBertForQuestionAnswering", "DistilBertConfig", **DISTILBERT),
        spans,
        layers((2, 1), 2),
    ),
    "t5": t5("linear + act"),
    "t5, gated": t5("gated MLP", feed_forward_proj="gated-gelu"),
    "vit": Subject(MODELS["vit"].build, MODELS["vit"].inputs, layers((2, 1), 1)),
    "whisper": Subject(
        hugging_face(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            vocab_size=VOCABULARY,
            num_mel_bins=80,
            d_model=WIDTH,
            encoder_layers=LAYERS,
            decoder_layers=LAYERS,
            encoder_attention_heads=HEADS,
            decoder_attention_heads=HEADS,
            encoder_ffn_dim=2 * WIDTH,
            decoder_ffn_dim=2 * WIDTH,
            max_source_positions=LONGEST,
            max_target_positions=LONGEST,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            use_cache=False,
        ),
        sounds,
        {"layer norm": (5, 2), "linear + act": (2, 0), "attention": (3, 0), "loss": (0, 1)},
        # In training 5.17 branches on a random number: the loops over the layers, and the norms
        # after them, are Python.
        {f"5.17.0 {how}": {"layer norm": 2} for how in TRAINING},
    ),
    # Two towers; besides their layers, the images' first and both last norms, an L2 norm and a loss
    # each way.
    "clip": Subject(
        hugging_face(
            "CLIPModel",
            "CLIPConfig",
            text_config=dict(
                SIZES,
                vocab_size=VOCABULARY,
                max_position_embeddings=LONGEST,
                eos_token_id=2,
                pad_token_id=1,
                bos_token_id=0,
            ),
            vision_config=dict(SIZES, image_size=32, patch_size=8),
            projection_dim=WIDTH,
        ),
        images_and_tokens,
        {
            "layer norm": (4, 3),
            "L2 norm": (0, 2),
            "linear + act": (2, 0),
            "attention": (2, 0),
            "loss": (0, 2),
        },
    ),
}
