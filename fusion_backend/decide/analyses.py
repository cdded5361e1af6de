"""The analyses that a rule's replacement may ask for: `asks={"mask": "attention_mask"}`."""

from __future__ import annotations

import torch
from torch import fx

from fusion_backend.capture.view import is_lowered, name_of
from fusion_backend.decide.facts import Facts
from fusion_backend.ir.argument_views import Viewed, original
from fusion_backend.masks.reader import INTEGERS
from fusion_backend.masks.relative_index import Index, index_of
from fusion_backend.masks.spec import Mask
from fusion_backend.match.matcher import Match
from fusion_backend.ops.rule import ANALYSES, Rule, analysis
from fusion_backend.reporting.reject import PatternError, Reject


@analysis
def attention_mask(argument: fx.Node | Viewed, graph: Facts) -> Mask:
    """What a mask of attention scores keeps: everything, a band, a vector over the keys, ..."""
    return graph.masks.of(argument)


@analysis
def relative_index(argument: fx.Node | Viewed, graph: Facts) -> Index:
    """Is an integer index a function of i - j alone?"""
    if original(argument).dtype not in INTEGERS:
        return Index(False, f"its index is {original(argument).dtype}")
    return index_of(argument, graph.masks)


@analysis
def before_rounding(argument: fx.Node | Viewed, graph: Facts) -> fx.Node | Reject:
    """The fp32 tensor that was rounded to this one and to nothing else in between, as autocast
    rounds the weights of a layer.
    """
    node = argument if isinstance(argument, fx.Node) else None
    if node is not None and is_lowered(node) and name_of(node) in ("aten::to", "aten::_to_copy"):
        (source,) = node.all_input_nodes
        if source.meta["val"].dtype == torch.float32:
            return source
    dtype = str(original(argument).dtype).removeprefix("torch.")
    return Reject(f"its weight is {dtype}: with a batch norm in it, it would be rounded once more")


def known_of(match: Match, facts: Facts) -> dict[str, object]:
    """The results of the analyses that the rule asks for, for its arguments that are tensors
    here.
    """
    rule: Rule = match.pattern
    missing = [name for name in rule.asks.values() if name not in ANALYSES]
    if missing:
        there = ", ".join(sorted(ANALYSES))
        raise PatternError(f"{rule.where}: it asks for {missing[0]}; the analyses are {there}")
    about = {name: match.tensors[name] for name in rule.asks if name in match.tensors}
    return {name: ANALYSES[rule.asks[name]](a, facts) for name, a in about.items()}
