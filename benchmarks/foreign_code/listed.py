"""All graphs of the set, by name."""

from __future__ import annotations

import itertools

from benchmarks.foreign_code import (
    assorted_layers,
    attention_variants,
    attentions,
    backbones,
    convnets,
    convolutions,
    decoders,
    dense_vision,
    diffusion,
    distillation,
    dropouts,
    encoders,
    graph_networks,
    image_attentions,
    image_parts,
    image_training,
    language_blocks,
    language_parts,
    losses,
    mixed_precision,
    mixers,
    model_parts,
    molecules,
    multi_scale,
    networks,
    objectives,
    optimizers,
    policies,
    products,
    recommenders,
    segmentation,
    sequences,
    serving_parts,
    single_operators,
    speech,
    state_spaces,
    token_embeddings,
    training_parts,
    varied_parts,
)
from benchmarks.foreign_code.problems import PROBLEMS, Graph

FAMILIES = (
    single_operators,
    losses,
    convolutions,
    products,
    convnets,
    dense_vision,
    multi_scale,
    networks,
    encoders,
    dropouts,
    decoders,
    attention_variants,
    attentions,
    backbones,
    image_attentions,
    language_blocks,
    mixed_precision,
    mixers,
    diffusion,
    distillation,
    recommenders,
    sequences,
    speech,
    graph_networks,
    molecules,
    policies,
    optimizers,
    objectives,
    assorted_layers,
    model_parts,
    training_parts,
    language_parts,
    serving_parts,
    image_parts,
    varied_parts,
    segmentation,
    state_spaces,
    image_training,
    token_embeddings,
)


def graphs() -> dict[str, Graph]:
    """Every graph once; the first of each problem before the second of any."""
    each = [[Graph(p, mode, dtype) for mode, dtype in p.graphs] for p in PROBLEMS.values()]
    turns = itertools.zip_longest(*each)
    return {graph.name: graph for turn in turns for graph in turn if graph is not None}
