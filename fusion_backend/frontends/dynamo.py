"""The torch.compile entry: run the pipeline on a Dynamo graph, and hand the result to Inductor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

from torch import fx

from fusion_backend import remembered
from fusion_backend.cache.identity import key_of, with_identity
from fusion_backend.capture.bucket_cuts import first_nodes
from fusion_backend.capture.cut_graphs import Parts
from fusion_backend.compat.channels_last import FORCE_LAYOUT
from fusion_backend.compat.compile_time import hastened
from fusion_backend.compat.distributed import cut_at
from fusion_backend.compat.inductor import inductor_of_ours
from fusion_backend.compat.memory import saves_unseen
from fusion_backend.compat.torch import (
    RestartAnalysis,
    dynamo_config,
    graph_break,
    inductor,
    inductor_config,
    reset_cudagraphs,
)
from fusion_backend.frontends.loading import names, patterns, usable
from fusion_backend.frontends.together import NotCompiledByAllRanks, tell_failure, together
from fusion_backend.frontends.verify import Pair, compile_both
from fusion_backend.options import DISABLED, Options, parse
from fusion_backend.reporting import report as reporting
from fusion_backend.reporting.records import FAILED, GraphRecord
from fusion_backend.rewrite.attention_inputs import keep_inputs_of_attention
from fusion_backend.rewrite.embeddings import give_gradients
from fusion_backend.rewrite.in_memory import keep_in_memory
from fusion_backend.rewrite.returned import Separated, separate
from fusion_backend.rewrite.scatters import add_before_scatters


class FusionBackend:
    """`torch.compile(model, backend="fusion", mode=…, options=…)`. Options beginning `fusion.` are
    ours.
    """

    __name__ = "fusion"

    def __call__(
        self,
        gm: fx.GraphModule,
        example_inputs,
        *,
        mode: str | None = None,
        options: dict | None = None,
    ):
        ours, theirs = parse(options, names())
        plain = inductor(mode, theirs)  # report the user's own mistakes before we start
        if DISABLED.get():
            return plain(gm, example_inputs)
        record = GraphRecord(len(gm.graph.nodes), broken=graph_break(gm))
        reporting.add(record)
        observed = as_a_part(gm, example_inputs, record)
        try:
            with hastened():
                return observed(self.compile(gm, example_inputs, mode, ours, theirs, record))
        except RestartAnalysis:
            # Dynamo hands the graph over again, with a float that Inductor wants constant
            reporting.take_back(record)
            raise

    def compile(
        self, gm: fx.GraphModule, example_inputs, mode, ours: Options, theirs: dict, record
    ):
        """Compile a graph with its sites fused; if that fails, as plain Inductor would."""
        plain = inductor(mode, theirs)
        try:
            with inductor_config.patch(plain.config), saves_unseen():
                new, used = remembered.fuse(gm, ours, record, patterns(), usable)
            reporting.log(record)
            if new is not gm:
                key = key_of(
                    used,
                    [str(ours), *(f"{s.pattern} {s.forward} {s.backward}" for s in record.sites)],
                )

                cudagraphs = plain.config.get(
                    "triton.cudagraphs", inductor_config.triton.cudagraphs
                )

                def compilers(options: dict) -> Pair:
                    forced = FORCE_LAYOUT if record.lays_out else {}
                    keyed = with_identity(options | forced, key)
                    failed = partial(backward_failed, record)
                    prepared = partial(prepare, record)
                    fused = inductor_of_ours(mode, keyed, failed, prepared)
                    rewritten = partial(compile_rewritten, fused, gm, cudagraphs, record)
                    return Pair(rewritten, inductor(mode, options))

                with together(new, record):
                    if not ours.verify:
                        return compilers(theirs).ours(new, example_inputs)
                    return compile_both(gm, new, example_inputs, record, compilers, theirs)
            failure = None
        except RestartAnalysis:
            raise
        except Exception as error:
            failure = error
            give_up(record, error)
            tell_failure(gm, error, record.error)
            if record.remembered:
                with contextlib.suppress(Exception), inductor_config.patch(plain.config):
                    remembered.forget(gm, ours, patterns())
        try:
            compiled = plain(gm, example_inputs)
        except RestartAnalysis:
            raise
        except Exception as error:
            # the model's or Inductor's fault: plain Inductor's error is reported
            if failure is not None:
                record.error += f"; plain Inductor refuses the graph as well: {summary(error)}"
            raise
        if failure is not None:
            ours_to_mend = not isinstance(failure, NotCompiledByAllRanks)
            please = ", please report this" if ours_to_mend else ""
            told = f"fusion: a graph went to Inductor as it was{please}: {record.error}"
            reporting.warn_once(f"graph {record.error}", told)
        return compiled

    def reset(self) -> None:
        reset_cudagraphs()


def as_a_part(gm: fx.GraphModule, example_inputs, record: GraphRecord) -> Callable:
    """If `gm` is a part of a cut graph, let it recompute values that earlier parts computed from
    constants. Returns a wrapper for the compiled part.
    """
    parts = Parts.now()
    try:
        if parts is not None:
            parts.recompute(gm, example_inputs)
            return parts.observed(gm)
    except Exception as error:
        note_fault(record, f"a part of a cut graph is taken as it is: {summary(error)}")
    return lambda compiled: compiled


def cuts(gm: fx.GraphModule, bucket: int, first_bucket: int, options: dict | None):
    """Where to cut a graph for buckets of so many bytes. None: where Dynamo does."""
    try:
        if DISABLED.get() or (options or {}).get("fusion.gate") == "never":
            return None
        return first_nodes(gm, bucket, first_bucket)
    except Exception as error:
        fault = f"a graph is cut where Dynamo cuts it: {summary(error)}"
        reporting.warn_once(f"fault {fault}", f"fusion: {fault}; please report this")
        return None


def compile_rewritten(
    compile: Callable, source: fx.GraphModule, cudagraphs: bool, record: GraphRecord,
    gm: fx.GraphModule, example_inputs,
) -> Callable:  # fmt: skip
    """Compile a graph with sites written in, and with a kernel for the gradient of large
    embeddings. The gradient that a large result gets from outside is added only where there is one;
    not in CUDA graphs, which replay the same kernels in each step, nor for compiled autograd. A
    failure of either costs nothing else.
    """
    separated = Separated([], [])
    try:
        record.embeddings = give_gradients(gm)
    except Exception as error:
        note_fault(record, f"embeddings keep Inductor's gradient: {summary(error)}")
    try:
        if not cudagraphs and not dynamo_config.compiled_autograd:
            separated = separate(gm, source)
    except Exception as error:
        note_fault(record, f"results keep AOTAutograd's gradient: {summary(error)}")
    record.from_outside = separated.told
    return separated.wrap(compile(gm, example_inputs))


def note_fault(record: GraphRecord, fault: str) -> None:
    record.faults.append(fault)
    reporting.warn_once(f"fault {fault}", f"fusion: {fault}; please report this")


def prepare(record: GraphRecord, gm: fx.GraphModule) -> None:
    """Choose values that Inductor writes to memory, and what is added before a scatter. A failure
    of one costs nothing else.
    """
    try:
        add_before_scatters(gm)
    except Exception as error:
        note_fault(record, f"sums with scattered gradients stay: {summary(error)}")
    try:
        record.in_memory += keep_in_memory(gm)
    except Exception as error:
        note_fault(
            record, f"cosines and sines are computed wherever they are read: {summary(error)}"
        )
    try:
        record.in_memory += keep_inputs_of_attention(gm)
    except Exception as error:
        note_fault(record, f"inputs of attention are computed for each reader: {summary(error)}")


def give_up(record: GraphRecord, error: Exception) -> None:
    """Nothing of the graph is fused, because of this error."""
    record.error = summary(error)
    record.forget_rewrites()
    for s in record.sites:
        s.fused, s.forward, s.backward = False, None, None
        s.reason, s.cause = f"the whole graph fell back: {record.error}", FAILED


def backward_failed(record: GraphRecord, error: Exception) -> None:
    """Note the failure of a backward. Inductor compiles it when it first runs; the forward has run
    by then, so the graph cannot fall back to plain Inductor.
    """
    record.backward_error = summary(error)
    record.in_memory.clear()  # some of it was about the backward
    reporting.warn_once(
        f"backward {record.backward_error}",
        "fusion: Inductor cannot compile the backward of a graph with fused sites; it runs "
        "operator by operator. "
        f"Please report this if plain Inductor compiles it: {record.backward_error}",
    )


def summary(error: Exception) -> str:
    """Its type and its first line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"


fusion = FusionBackend()
cut_at(fusion, cuts)
