"""What is recognised in whole models, against what their sources hold (random weights; needs
transformers).

    python -m benchmarks.recognition [model ...] [--out docs/recognition.md]

Expected is layers × count a layer, counted in the models' sources. Found is every place where one
of the patterns of a kind stands, fused or not: a value counts once, whatever larger pattern it is
part of, and once for every call of its graph. --out writes what was found into the section of the
installed transformers and leaves the others.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import logging
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from benchmarks.tiny_models import LAYERS
from benchmarks.whole_models import SUBJECTS, Subject
from fusion_backend.compat.torch import many_recompiles
from fusion_backend.frontends.explain import Collector
from fusion_backend.ops.pattern import REGISTRY

KINDS = {
    "layer norm": ("layer_norm", "add_layer_norm", "dropout_add_layer_norm"),
    "RMS norm": ("rms_norm", "add_rms_norm"),
    "L2 norm": ("l2_norm",),
    "gated MLP": ("gated_linear", "gated_act"),
    "linear + act": ("linear_act",),
    "attention": ("attention",),
    "rotary": ("rotary",),
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
ABOUT = """\
# What is recognised in whole models

This page counts sites in models of transformers with random weights and {layers} layers; an encoder
and a decoder have {layers} layers each. The first table counts what the sources of the models
contain: how often in each layer, times the number of layers, plus how often outside the layers.
Then follows a table for each release of transformers: how many of these were found. One counts as
found where a pattern of its kind is recognised, whether or not that pattern has a kernel yet. A
cell names a kind where its count differs from that of the sources.

The columns are settings: evaluation; training in fp32; training under bf16 autocast of the CPU,
with fp32 weights; with the layers checkpointed (not reentrant); with only the norms trained; with
the embeddings and the first layer frozen; and with attention written out by hand
(`attn_implementation="eager"`).

What is missed. When its layers are checkpointed, T5 sets `requires_grad` in the first layer of the
decoder, and Dynamo leaves that layer to Python. In training, Whisper of release 5.17 draws a random
number for each layer and branches on it. Dynamo leaves both loops over the layers to Python, and
the norms after them.

Mixtral's experts use one operator for all stacked weights (`grouped_mm`, the default), in groups
whose sizes depend on data. What is recognised is the gate that follows, `gated_act`. With
`experts_implementation="eager"` the experts are a loop that depends on data, which Dynamo leaves to
Python.

What is not counted, because it is not of the kind in the heading. Whisper's two activations outside
the layers follow convolutions, not linear layers. The patch embeddings of ViT and CLIP are
convolutions without an activation, and CLIP's projections are linear layers without one.

`python -m benchmarks.recognition --out docs/recognition.md` writes this page.
"""


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
                places[kind].add((i, site.nodes[-REGISTRY[site.pattern].outputs]))
    return {kind: sum(collector.calls[i] for i, _ in where) for kind, where in places.items()}


def expected(subject: Subject, setting: str = "", release: str = "") -> dict[str, int]:
    """Kind -> places in the model's source, less those that are known to be missed there."""
    missed, counts = subject.missed.get(f"{release} {setting}", subject.missed.get(setting, {})), {}
    for kind in KINDS:
        each, once = subject.expected.get(kind, (0, 0))
        counts[kind] = LAYERS * each + once - missed.get(kind, 0)
    return counts


def release() -> str:
    return importlib.metadata.version("transformers")


# The page.


def row(cells) -> str:
    return f"| {' | '.join(cells)} |\n"


def sources() -> str:
    lines = row(["model", *KINDS]) + row(["---"] * (len(KINDS) + 1))
    for name, subject in SUBJECTS.items():
        cells = []
        for kind in KINDS:
            each, once = subject.expected.get(kind, (0, 0))
            parts = [f"{each} · {LAYERS}"] * bool(each) + [str(once)] * bool(once)
            cells.append(" + ".join(parts))
        lines += row([name, *cells])
    return lines


def cell(name: str, counts: dict[str, int]) -> str:
    want = expected(SUBJECTS[name])
    wrong = "".join(f"; {k}: {n} of {want[k]}" for k, n in counts.items() if n != want[k])
    return f"{sum(counts.values())} of {sum(want.values())}{wrong}"


def section(counts: dict[tuple[str, str], dict[str, int]]) -> str:
    """(model, setting) -> counts, as a table."""
    lines = row(["model", *SETTINGS]) + row(["---"] * (len(SETTINGS) + 1))
    for name in dict.fromkeys(name for name, _ in counts):
        lines += row([name, *(cell(name, counts[name, setting]) for setting in SETTINGS)])
    return lines


def page(sections: dict[str, str]) -> str:
    tables = {"In the sources": sources(), **dict(sorted(sections.items()))}
    return ABOUT.format(layers=LAYERS) + "".join(
        f"\n## {title}\n\n{table}" for title, table in tables.items()
    )


def sections_of(text: str) -> dict[str, str]:
    """Release -> table, of a page."""
    parts = [part.split("\n\n", 1) for part in text.split("\n## ")[1:]]
    return {
        title: table.rstrip("\n") + "\n"
        for title, table in parts
        if title.startswith("transformers")
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", help=f"of {', '.join(SUBJECTS)} (default: all)")
    parser.add_argument("--out", type=Path, metavar="FILE")
    args = parser.parse_args()
    if importlib.util.find_spec("transformers") is None:
        parser.error("needs transformers: pip install -e '.[bench]'")
    if unknown := [name for name in args.models if name not in SUBJECTS]:
        parser.error(f"no model {', '.join(unknown)}; there is {'; '.join(SUBJECTS)}")
    logging.getLogger("torch").setLevel(logging.ERROR)
    counts = {}
    for name in args.models or SUBJECTS:
        for setting in SETTINGS:
            counts[name, setting] = found(SUBJECTS[name], SETTINGS[setting])
            print(f"{name}, {setting}: {cell(name, counts[name, setting])}", flush=True)
    title = f"transformers {release()}, torch {torch.__version__.split('+')[0]}"
    if args.out:
        before = sections_of(args.out.read_text()) if args.out.exists() else {}
        args.out.write_text(page(before | {title: section(counts)}))


if __name__ == "__main__":
    main()
