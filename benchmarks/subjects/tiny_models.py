"""What tests and benchmarks.capture_cost compile: six Hugging Face models, random weights, in
seconds.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable

import torch
from torch import Tensor, nn

LAYERS, WIDTH, HEADS, VOCABULARY, LONGEST = 2, 64, 4, 128, 64
SIZES = dict(
    hidden_size=WIDTH,
    intermediate_size=2 * WIDTH,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
)


@dataclasses.dataclass(frozen=True)
class Tiny:
    """How to build a model and its inputs; `layer_norms` is how many times its source calls
    LayerNorm.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[int, int], dict[str, Tensor]]
    layer_norms: int

    def model(self) -> nn.Module:
        """In eval mode: dropout would make two runs incomparable."""
        torch.manual_seed(0)
        return self.build().eval()

    def example(self, batch: int, length: int) -> dict[str, Tensor]:
        torch.manual_seed(batch * LONGEST + length)
        return self.inputs(batch, length)


def hugging_face(
    kind: str, config: str, model_options: dict | None = None, **options
) -> Callable[[], nn.Module]:
    """A constructor that imports transformers only when it is called."""

    def build() -> nn.Module:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        import transformers

        return getattr(transformers, kind)(
            getattr(transformers, config)(**options), **model_options or {}
        )

    return build


def tokens(batch: int, length: int) -> dict[str, Tensor]:
    ids = torch.randint(VOCABULARY, (batch, length))
    return dict(input_ids=ids, labels=ids)


def padded_tokens(batch: int, length: int) -> dict[str, Tensor]:
    """Rows of different lengths, with their mask."""
    mask = (torch.arange(length) < length - 3 * torch.arange(batch)[:, None]).long()
    return dict(input_ids=torch.randint(VOCABULARY, (batch, length)) * mask, attention_mask=mask)


def images(batch: int, length: int) -> dict[str, Tensor]:
    return dict(pixel_values=torch.randn(batch, 3, 32, 32), labels=torch.arange(batch) % 10)


CAUSAL = dict(
    SIZES,
    vocab_size=VOCABULARY,
    max_position_embeddings=LONGEST,
    num_key_value_heads=2,
    use_cache=False,
)
T5 = dict(
    d_model=WIDTH,
    d_kv=WIDTH // HEADS,
    d_ff=2 * WIDTH,
    num_layers=LAYERS,
    num_heads=HEADS,
    vocab_size=VOCABULARY,
    decoder_start_token_id=0,
    use_cache=False,
)
MODELS = {
    "llama": Tiny(hugging_face("LlamaForCausalLM", "LlamaConfig", **CAUSAL), tokens, 0),
    "qwen3": Tiny(
        hugging_face("Qwen3ForCausalLM", "Qwen3Config", **CAUSAL, head_dim=16), tokens, 0
    ),
    "gpt2": Tiny(
        hugging_face(
            "GPT2LMHeadModel",
            "GPT2Config",
            n_embd=WIDTH,
            n_layer=LAYERS,
            n_head=HEADS,
            n_positions=LONGEST,
            vocab_size=VOCABULARY,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        ),
        tokens,
        2 * LAYERS + 1,
    ),
    "bert": Tiny(
        hugging_face(
            "BertModel",
            "BertConfig",
            **SIZES,
            vocab_size=VOCABULARY,
            max_position_embeddings=LONGEST,
            model_options=dict(add_pooling_layer=False),
        ),
        padded_tokens,
        2 * LAYERS + 1,
    ),
    "t5": Tiny(hugging_face("T5ForConditionalGeneration", "T5Config", **T5), tokens, 0),
    "vit": Tiny(
        hugging_face(
            "ViTForImageClassification",
            "ViTConfig",
            **SIZES,
            image_size=32,
            patch_size=8,
            num_labels=10,
            problem_type="single_label_classification",
        ),
        images,
        2 * LAYERS + 1,
    ),
}


def result(output) -> Tensor:
    """What is compared: logits, or the last hidden state."""
    return output.logits if hasattr(output, "logits") else output.last_hidden_state


def loss(output) -> Tensor:
    """The model's own loss, or a fixed weighting of the hidden state (its plain sum would have no
    gradient through a layer norm).
    """
    if getattr(output, "loss", None) is not None:
        return output.loss
    hidden = output.last_hidden_state
    weights = torch.linspace(-1, 1, hidden.shape[-1], dtype=hidden.dtype, device=hidden.device)
    return (hidden * weights).square().mean()
