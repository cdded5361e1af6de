"""Whole models of transformers: what becomes of their attention, with SDPA and by hand.
test_models.py has Inductor.
"""

import contextlib
import copy
import functools
import importlib.metadata
import importlib.util

import pytest
import torch

from benchmarks.measure.distance import distance, joint_distance
from benchmarks.subjects.tiny_models import CAUSAL, MODELS, Tiny, hugging_face, loss, result, tokens
from fusion_backend.frontends.explain import Collector

FACTOR, FLOOR = 2.0, 1.2e-7  # as in test_models

LONG, SHORT = dict(CAUSAL, sliding_window=64), dict(CAUSAL, sliding_window=8)
DROPPED, WINDOW = (
    "causal, proven from masking_utils.py:",
    "its mask stays: causal and window of 8 keys",
)
PADDED, WRITTEN = (
    "its mask stays: padding from attention_mask",
    "the code calls scaled_dot_product_attention itself",
)
BIAS, NOTHING = "its mask stays: a", "nothing is masked, proven at "
CAUSAL_STAYS = "its mask stays: causal, proven from "


def left_padded(batch: int, length: int):
    mask = (torch.arange(length) >= 3 * torch.arange(batch)[:, None]).long()
    return dict(tokens(batch, length), attention_mask=mask)


def mistral(config: dict) -> Tiny:
    return Tiny(hugging_face("MistralForCausalLM", "MistralConfig", **config), tokens, 0)


def unpadded(batch: int, length: int):
    return dict(input_ids=tokens(batch, length)["input_ids"])


def older_than(*release: int) -> bool:
    return tuple(map(int, importlib.metadata.version("transformers").split(".")[:2])) < release


# model -> how to build it; reasons with sdpa; reasons by hand
WHOLE = {
    "llama": (MODELS["llama"], [DROPPED], [DROPPED]),
    "llama, left padding": (Tiny(MODELS["llama"].build, left_padded, 0),
    ["its mask stays: causal, proven from"],
                            ["its mask stays: causal, proven from"]),
    "qwen3": (MODELS["qwen3"], [DROPPED], [DROPPED]),
    "gpt2": (MODELS["gpt2"], [DROPPED], [DROPPED]),
    "mistral, window longer than the text": (mistral(LONG), [DROPPED], [DROPPED]),
    "mistral, window": (mistral(SHORT), [WINDOW], [WINDOW]),
    "bert": (MODELS["bert"], [PADDED], [PADDED]),
    "bert, no padding": (Tiny(MODELS["bert"].build, unpadded, 0), [WRITTEN], ["one call"]),
    "vit": (MODELS["vit"], [WRITTEN], ["one call"]),
    "t5": (MODELS["t5"], [BIAS, NOTHING, CAUSAL_STAYS], [BIAS, NOTHING]),
    "gemma2": (Tiny(hugging_face("Gemma2ForCausalLM", "Gemma2Config", **SHORT, head_dim=16), tokens,
    0), None,
               ["its mask stays: causal, proven from", WINDOW]),
}  # fmt: skip
# where nothing is masked it hands over a mask, since 5.18 with an old torch alone
OLD = torch.__version__ < "2.12"
if importlib.util.find_spec("transformers") and (older_than(5, 18) or OLD):
    T5 = [NOTHING, CAUSAL_STAYS, "its mask stays: nothing is masked"]
    by_hand = T5 if older_than(5, 18) else WHOLE["t5"][2]
    WHOLE["t5"] = (WHOLE["t5"][0], T5, by_hand)
    for name in ("bert, no padding", "vit"):
        WHOLE[name] = (WHOLE[name][0], [NOTHING], [NOTHING])


@functools.cache
def model_of(name, by_hand):
    pytest.importorskip(
        "transformers", reason="the models come from transformers: pip install -e '.[bench]'"
    )
    model = WHOLE[name][0].model()
    model.set_attn_implementation("eager" if by_hand else "sdpa")
    return model, copy.deepcopy(model).double()


def step(model, inputs, train):
    with contextlib.nullcontext() if train else torch.no_grad():
        model.zero_grad(set_to_none=True)
        output = model(**inputs)
    if not train:
        return result(output), {}
    loss(output).backward()
    return result(output).detach(), {
        n: p.grad for n, p in model.named_parameters() if p.grad is not None
    }


# Either way to write attention in inference and in training, with static sizes or with dynamic
# ones.
WAYS = {
    "sdpa-inference-dynamic": (False, False, True),
    "sdpa-training-static": (False, True, False),
    "by hand-inference-static": (True, False, False),
    "by hand-training-dynamic": (True, True, True),
}


@pytest.mark.parametrize("hand, train, dynamic", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("name", WHOLE)
def test_whole_model(name, hand, train, dynamic):
    tiny, *reasons = WHOLE[name]
    if reasons[hand] is None or (dynamic and name == "gemma2"):
        pytest.skip("transformers has it by hand only, and with dynamic=True its cap is an input")
    model, exact = model_of(name, hand)
    torch.compiler.reset()
    collector = Collector({"fusion.only": "attention"})
    # test_models goes through Inductor
    compiled = torch.compile(model, backend=collector, dynamic=dynamic)
    for example in [tiny.example(2, 16)] + [tiny.example(3, 20)] * dynamic:
        double = {key: x.double() if x.is_floating_point() else x for key, x in example.items()}
        have, eager, want = (
            step(compiled, example, train),
            step(model, example, train),
            step(exact, double, train),
        )
        # a query that keeps nothing is NaN by hand in fp64, and has no gradient
        if name == "llama, left padding":
            assert torch.equal(have[0].isnan(), eager[0].isnan())
            assert torch.allclose(have[0], eager[0], atol=1e-5, equal_nan=True)
            continue
        assert distance(have[0], want[0]) <= FACTOR * distance(eager[0], want[0]) + FLOOR
        if train:
            have = {n.removeprefix("_orig_mod."): g for n, g in have[1].items()}
            assert (
                joint_distance(have, want[1]) <= FACTOR * joint_distance(eager[1], want[1]) + FLOOR
            )
    report = collector.report
    assert not any(g.error for g in report.graphs), report
    sites = [s for s in report.sites if s.pattern == "attention" and not s.covered]
    expected = reasons[hand]
    if dynamic and name.startswith("mistral, window longer"):
        expected = ["its mask stays: causal and window of 64 keys"]
    assert sites and all(any(s.reason.startswith(r) for r in expected) for s in sites), report
    for reason in expected:
        found = [s for s in sites if s.reason.startswith(reason)]
        refused = reason.startswith("it") or reason == WRITTEN
        assert found and all(s.fused != refused for s in found), report
