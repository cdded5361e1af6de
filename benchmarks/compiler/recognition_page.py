"""docs/recognition.md, from what was found."""

from __future__ import annotations

import importlib.metadata
import importlib.util

from benchmarks.compiler.recognition import KINDS, SETTINGS, expected
from benchmarks.subjects.tiny_models import LAYERS
from benchmarks.subjects.whole_models import SUBJECTS

ABOUT = """\
# What is recognised in whole models

Models of transformers with random weights and {layers} layers (encoder and decoder: {layers} each).
The first table says what their sources hold: how often in each layer · layers, and how often
outside of them. The others say for each release how many of these sites were found. A site is found
where a pattern of its kind matches, whether or not the pattern has a kernel yet. A cell names each
kind that was found less or more often than the source holds it.

The settings are evaluation; training in fp32; training under bf16 autocast of CPU, with fp32
weights; with the layers checkpointed (not reentrant); with only the norms trained; with the
embeddings and the first layer frozen; and with attention by hand (`attn_implementation="eager"`).

What is missed: with its layers checkpointed, T5 sets `requires_grad` in the first layer of the
decoder, and Dynamo leaves that layer to Python. In training, Whisper of 5.17 draws a number for
each layer and branches on it: Dynamo leaves both loops to Python, and the norms after them.

Mixtral's experts project with one operator over stacked weights (`grouped_mm`, the default), in
groups that depend on data: what is recognised is the gate after it, `gated_act`. With
`experts_implementation="eager"` they are a loop that depends on data, and Dynamo leaves it to
Python.

What is not counted, because it is not of the kind: the two activations of Whisper that stand
outside the layers follow convolutions. The patches of ViT and CLIP are convolutions without an
activation, and CLIP's projections are linear layers without one.

Written by `python -m benchmarks.recognition --out docs/recognition.md`.
"""


def release() -> str:
    return importlib.metadata.version("transformers")


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
