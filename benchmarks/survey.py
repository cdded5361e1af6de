"""Does the rewriter survive every model class of transformers? On a CPU, tiny, with random weights,
against eager.

    python -m benchmarks.survey [--kind causal ...] [--only CLASS ...] [--attention eager] [--dynamic] [--part 1/2]

A class is built with small sizes, run eagerly, and compiled with `fusion.gate=always`, so that
every site is rewritten to its plain torch code; the rewritten graphs run as they are, without
Inductor. Outputs, and gradients of a weighted sum of them, must agree. One line a class: ok, WRONG,
FAILED, or skipped and why: it cannot be built so small, or eager or torch.compile without this
backend fails, too. Exit status: 0, or 1 when a class was wrong or failed.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import logging
import re
import signal
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.measure import joint_distance, said
from benchmarks.model_run import floats
from benchmarks.model_zoo import import_transformers
from fusion_backend.compat.torch import many_recompiles
from fusion_backend.frontends.explain import Collector

KINDS = {
    "causal": "CAUSAL_LM",
    "masked": "MASKED_LM",
    "seq2seq": "SEQ_TO_SEQ_CAUSAL_LM",
    "image": "IMAGE_CLASSIFICATION",
}
SECONDS, PARAMETERS, AGREE = 120, 30_000_000, 1e-4
WIDTHS = "hidden_size n_embd d_model embedding_size dim emb_dim word_embed_proj_dim".split()
INNER = "intermediate_size n_inner d_ff encoder_ffn_dim decoder_ffn_dim ffn_dim ffn_hidden_size hidden_dim".split()
LAYERS = "num_hidden_layers n_layer num_layers encoder_layers decoder_layers n_layers".split()
HEADS = "num_attention_heads n_head num_heads encoder_attention_heads decoder_attention_heads n_heads num_experts".split()
HEADS += ["num_local_experts", "n_routed_experts"]
POSITIONS = "max_position_embeddings n_positions n_ctx max_seq_len vocab_size".split()
SMALL: dict[str, object] = {
    **dict.fromkeys(WIDTHS, 32), **dict.fromkeys(INNER, 48), **dict.fromkeys(LAYERS, 2),
    **dict.fromkeys(HEADS, 4),
    **dict.fromkeys(POSITIONS, 64), **dict.fromkeys(("head_dim", "d_kv", "qk_rope_head_dim",
    "qk_nope_head_dim"), 8),
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "v_head_dim": 8, "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "sliding_window": 4, "attention_window": 8, "rotary_dim": 4,
    "attention_types": [[["global", "local"], 1]],
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0,
    "state_size": 4,
    "image_size": 32, "patch_size": 8, "num_labels": 7, "hidden_sizes": [16, 32], "depths": [1, 1],
    "embed_dim": 16,
    "embed_dims": [16, 32], "window_size": 4,
}  # fmt: skip
# What some configurations do not take together with the rest, and are then built without.
OPTIONAL = (
    (),
    ("hidden_sizes", "depths", "embed_dim", "embed_dims", "window_size"),
    ("head_dim", "num_key_value_heads"),
)
OPTIONAL += (("sliding_window", "rotary_dim"),)


class Skipped(BaseException):
    """The reason why a class says nothing about the backend. Nobody on the way takes it for an
    error of a model.
    """


@contextlib.contextmanager
def skipped_where(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise Skipped(f"{what}: {said(error)}") from None


def built(transformers, config: type, name: str, attention: str | None) -> torch.nn.Module:
    """The model with the small sizes that its configuration has."""
    defaults = config()
    known = {key: value for key, value in SMALL.items() if hasattr(defaults, key)}
    for without in OPTIONAL:
        try:
            settings = config(**{key: value for key, value in known.items() if key not in without})
            if attention:
                settings._attn_implementation = attention
            with torch.device("meta"):
                size = sum(p.numel() for p in getattr(transformers, name)(settings).parameters())
            break
        except (
            Exception
        ) as error:  # sizes that do not go together: the next attempt has fewer of them
            problem = error
    else:
        raise problem
    if size > PARAMETERS:
        raise ValueError(f"{size:,} parameters")
    torch.manual_seed(0)
    return getattr(transformers, name)(settings).eval()


def inputs(kind: str, model: torch.nn.Module) -> dict:
    """Tokens with padding, in causal models on the left, so that some queries see nothing; or
    images.
    """
    torch.manual_seed(1)
    if kind == "image":
        return dict(pixel_values=torch.randn(2, getattr(model.config, "num_channels", 3), 32, 32))
    ids, mask = torch.randint(3, 64, (2, 16)), torch.ones(2, 16, dtype=torch.long)
    mask[1, slice(3) if kind == "causal" else slice(-5, None)] = 0
    found = dict(input_ids=ids, attention_mask=mask)
    if kind == "seq2seq":
        found["decoder_input_ids"] = torch.randint(3, 64, (2, 12))
    return found if kind == "masked" else found | dict(use_cache=False)


def result_and_gradients(step, model: torch.nn.Module, kwargs: dict) -> dict[str, Tensor]:
    model.zero_grad()
    torch.manual_seed(2)
    out = step(**kwargs)
    (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    return {"": out.detach()} | {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def surveyed(
    model: torch.nn.Module, kwargs: dict, dynamic: bool, backend=None
) -> tuple[str, Collector]:
    """What is wrong, "" for nothing, and what was fused. Skipped where torch alone fails."""
    collector = backend or Collector({"fusion.gate": "always"})

    def step(**kwargs):
        return floats(dict(model(**kwargs)))[0]

    with skipped_where("eager"):
        want = result_and_gradients(step, model, kwargs)
    torch.compiler.reset()
    with many_recompiles():
        try:
            got = result_and_gradients(
                torch.compile(step, backend=collector, dynamic=dynamic), model, kwargs
            )
        except Exception as error:
            torch.compiler.reset()
            with skipped_where("torch.compile"):
                result_and_gradients(
                    torch.compile(step, backend="aot_eager", dynamic=dynamic), model, kwargs
                )
            return f"FAILED: {said(error)}", collector
    if errors := [graph.error for graph in collector.report.graphs if graph.error]:
        return f"FAILED: {errors[0]}", collector
    if got.keys() != want.keys():
        return (
            f"WRONG: gradients of other parameters, {sorted(got.keys() ^ want.keys())[:3]}",
            collector,
        )
    largest = max(g.norm() for g in want.values())
    for name, exact in want.items():  # a gradient that is zero but for rounding is no measure
        off = joint_distance({name: got[name]}, {name: exact})
        if off > AGREE and (
            exact.norm() > 1e-5 * largest or (got[name] - exact).norm() > 1e-5 * largest
        ):
            return (
                f"WRONG: {name and 'the gradient of '}{name or 'the output'} is {off:.1e} off",
                collector,
            )
    return "", collector


def stop(*_):
    raise Skipped(f"it takes longer than {SECONDS} s")


def one(transformers, kind: str, config: type, name: str, args) -> str:
    """The line of a class."""
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        with skipped_where("it cannot be built"):
            model = built(transformers, config, name, args.attention)
        wrong, collector = surveyed(model, inputs(kind, model), args.dynamic)
    except Skipped as reason:
        return f"skipped: {reason}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    fused = collections.Counter(site.pattern for site in collector.report.fused)
    return wrong or "ok, " + (
        ", ".join(f"{n} {pattern}" for pattern, n in sorted(fused.items())) or "nothing to fuse"
    )


def part(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not 0 < int(found[1]) <= int(found[2]):
        raise argparse.ArgumentTypeError(f"{text} is not 1/2 or its like")
    return int(found[1]), int(found[2])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.survey",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=[*KINDS])
    parser.add_argument("--only", nargs="+", metavar="CLASS", help="these classes alone")
    parser.add_argument(
        "--attention",
        choices=("sdpa", "eager"),
        help="by torch, or written out; else as the class has it",
    )
    parser.add_argument("--dynamic", action="store_true", help="with dynamic sizes")
    parser.add_argument(
        "--part", type=part, default=(1, 1), metavar="I/N", help="every Nth class, from the Ith"
    )
    args = parser.parse_args(argv)
    transformers = import_transformers()
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    from transformers.models.auto import configuration_auto, modeling_auto

    told = collections.Counter()
    for kind in args.kind:
        names = getattr(modeling_auto, f"MODEL_FOR_{KINDS[kind]}_MAPPING_NAMES")
        for i, (config, name) in enumerate(sorted(names.items())):
            name = name if isinstance(name, str) else name[0]
            if i % args.part[1] != args.part[0] - 1 or (args.only and name not in args.only):
                continue
            line = one(transformers, kind, configuration_auto.CONFIG_MAPPING[config], name, args)
            told[re.split("[,:]", line)[0]] += 1
            print(f"{kind} {config}, {name}: {line}", flush=True)
    counts = ", ".join(f"{n} {word}" for word, n in told.items())
    print(f"transformers {transformers.__version__}, torch {torch.__version__}: {counts}")
    return 1 if told["WRONG"] or told["FAILED"] else 0


if __name__ == "__main__":
    sys.exit(main())
