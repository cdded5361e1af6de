"""What is recognised in whole models, against what their sources hold."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.subjects.tiny_models import LAYERS
from benchmarks.subjects.whole_models import Subject
from fusion_backend.compat.torch import many_recompiles
from fusion_backend.frontends.explain import Collector
from fusion_backend.ops.registry import FUSION_RULES

KINDS = {
    "layer norm": ("layer_norm", "add_layer_norm", "dropout_add_layer_norm"),
    "RMS norm": ("rms_norm", "add_rms_norm", "norm_rotary"),
    "L2 norm": ("l2_norm",),
    "gated MLP": ("gated_linear", "gated_mlp", "dropout_gated_mlp", "gated_act"),
    "linear + act": ("linear_act", "mlp", "dropout_mlp"),
    "attention": ("attention",),
    "rotary": ("rotary", "norm_rotary"),
    "loss": ("cross_entropy", "linear_cross_entropy"),
}
# A norm and the linear after it are one site of norm_linear: left out, so that norms are counted as
# norms.
OPTIONS = {"fusion.gate": "always", "fusion.skip": "norm_linear"}


def norms(model: nn.Module) -> set[nn.Parameter]:
    """The parameters of the norms."""
    return {
        p
        for m in model.modules()
        if "norm" in type(m).__name__.lower()
        for p in m.parameters(recurse=False)
    }


def above_the_first(model: nn.Module) -> set[nn.Parameter]:
    """All but the embeddings and the first layer, of each tower."""
    below = {p for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    for name, p in model.named_parameters():
        places = [part for part in name.split(".") if part.isdigit()]
        if places and places[0] == "0":
            below.add(p)
    return {*model.parameters()} - below


@dataclasses.dataclass(frozen=True)
class Setting:
    """How a model runs; `trained` gives the parameters that require a gradient."""

    training: bool = True
    autocast: bool = False
    checkpoint: bool = False
    trained: Callable[[nn.Module], set[nn.Parameter]] | None = None
    by_hand: bool = False

    def prepared(self, subject: Subject) -> nn.Module:
        torch.manual_seed(0)
        model = subject.build().train(self.training)
        if self.by_hand:
            for m in model.modules():  # set_attn_implementation of 5.17 does not reach T5's towers
                if hasattr(m, "config"):
                    m.config._attn_implementation = "eager"
        if self.checkpoint:
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        if self.trained is not None:
            kept = self.trained(model)
            for p in model.parameters():
                p.requires_grad_(p in kept)
        return model


SETTINGS = {
    "eval": Setting(training=False),
    "train": Setting(),
    "autocast": Setting(autocast=True),
    "checkpoint": Setting(checkpoint=True),
    "norms trained": Setting(trained=norms),
    "first layer frozen": Setting(trained=above_the_first),
    "attention by hand": Setting(by_hand=True),
}


class Counting(Collector):
    """Counts the calls of every graph: Dynamo may use one for all layers that look alike."""

    def __init__(self):
        super().__init__(OPTIONS)
        self.calls: list[int] = []

    def __call__(self, gm, example_inputs):
        run, mine = super().__call__(gm, example_inputs), len(self.calls)
        self.calls.append(0)

        def counted(*args):
            self.calls[mine] += 1
            return run(*args)

        return counted


def found(subject: Subject, setting: Setting) -> dict[str, int]:
    """Kind -> places; the graphs are looked at and run eagerly."""
    model, collector = setting.prepared(subject), Counting()
    torch.compiler.reset()
    cast = torch.autocast("cpu", torch.bfloat16) if setting.autocast else contextlib.nullcontext()
    with torch.set_grad_enabled(setting.training), cast, many_recompiles():
        torch.compile(model, backend=collector)(**subject.inputs(2, 16))
    places: dict[str, set] = {kind: set() for kind in KINDS}
    for i, graph in enumerate(collector.report.graphs):
        for site in (s for s in graph.sites if not s.covered):
            for kind in (k for k, patterns in KINDS.items() if site.pattern in patterns):
                # the first result
                places[kind].add((i, site.nodes[-FUSION_RULES[site.pattern].outputs]))
    return {kind: sum(collector.calls[i] for i, _ in where) for kind, where in places.items()}


def expected(subject: Subject, setting: str = "", release: str = "") -> dict[str, int]:
    """Kind -> places in the model's source, less those that are known to be missed there."""
    missed, counts = subject.missed.get(f"{release} {setting}", subject.missed.get(setting, {})), {}
    for kind in KINDS:
        each, once = subject.expected.get(kind, (0, 0))
        counts[kind] = LAYERS * each + once - missed.get(kind, 0)
    return counts
