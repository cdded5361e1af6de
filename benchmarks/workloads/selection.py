"""Which pieces of work a command line asks for."""

from __future__ import annotations

import argparse
import difflib
import inspect

import torch

from benchmarks.workloads.listed import SMALL, WORK
from benchmarks.workloads.work import DTYPES, F32, Work
from fusion_backend.ops.registry import FUSION_RULES

SIZES = ("small", "large", "all")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="patterns to measure (default: all with kernels)"
    )
    parser.add_argument(
        "--sizes",
        nargs="+",
        default=["all"],
        metavar="SIZE",
        help="small (fits in the L2), large (does not), all, or cases such as rows=4096,n=1024; "
        "without a GPU always the tiny sizes, unless cases are given",
    )
    parser.add_argument(
        "--rows",
        nargs="+",
        metavar="NAME",
        help="of these, the rows of this name as the table prints "
        "it; else those with this in their name: 'hand=1', 'bf16 rows=16384'",
    )
    parser.add_argument(
        "--dtype", help="f32, bf16, f16 or several with commas (default: as listed)"
    )
    parser.add_argument("--train", action="store_true", help="forward with backward only")
    parser.add_argument("--infer", action="store_true", help="forward alone only")


def selected(args: argparse.Namespace, on_gpu: bool) -> list[Work]:
    """The work in question; ValueError names what is not known, and what is."""
    names = args.only or sorted({work.pattern for work in WORK})
    if unknown := sorted(set(names) - set(FUSION_RULES)):
        raise ValueError(
            f"no pattern {', '.join(unknown)}; there is {', '.join(sorted(FUSION_RULES))}"
        )
    dtypes = [dtype_of(word) for word in args.dtype.split(",")] if args.dtype else None
    modes = {True: [True], False: [False]}.get(
        args.train if args.train != args.infer else None, [False, True]
    )
    cases = [case_of(word) for word in args.sizes if word not in SIZES]
    if cases:
        if not args.only:
            raise ValueError("cases need --only: every pattern has its own")
        chosen = given(
            names, cases, dtypes or [F32], modes if args.train or args.infer else [False]
        )
    else:
        chosen = listed(names, args.sizes, dtypes, modes, on_gpu)
    if not chosen:
        raise ValueError("no work is left: no row has these sizes, dtypes and modes")
    chosen = [work for i, work in enumerate(chosen) if work not in chosen[:i]]
    return named_rows(chosen, args.rows, on_gpu) if args.rows else chosen


def named_rows(works: list[Work], asked: list[str], on_gpu: bool) -> list[Work]:
    """Those of exactly a name that is asked for; where no row has it, those with it in
    their name.
    """
    names, kept = [work.name for work in works], set()
    for words in (" ".join(word.split()) for word in asked):
        found = {words} & {*names} or {name for name in names if words in name}
        if not found:
            near = difflib.get_close_matches(words, names, n=3, cutoff=0.3)
            tiny = (
                ""
                if on_gpu
                else "; without a GPU only tiny rows are listed, others with --only and --sizes"
            )
            raise ValueError(
                f"no row {words!r}{tiny}; there is {'; '.join(near or names[:3])}; ..."
            )
        kept |= found
    return [work for work in works if work.name in kept]


def dtype_of(word: str) -> torch.dtype:
    if word not in DTYPES:
        raise ValueError(f"no dtype {word}; there is {', '.join(DTYPES)}")
    return DTYPES[word]


def case_of(word: str) -> dict[str, int]:
    try:
        pairs = [pair.split("=") for pair in word.split(",")]
        case = {key: int(value.replace("_", "")) for key, value in pairs}
    except ValueError:
        raise ValueError(
            f"{word!r} is neither {', '.join(SIZES)} nor a case such as rows=4096,n=1024"
        ) from None
    if min(case.values()) < 1:
        raise ValueError(f"{word}: sizes are 1 or more")
    return case


def keys_of(pattern: str) -> list[str]:
    """The sizes that a pattern's example inputs take."""
    fn = FUSION_RULES[pattern].inputs_fn
    return list(inspect.signature(fn).parameters)[1:] if fn else []


def needed(pattern: str) -> list[str]:
    """Those that have no default."""
    fn = FUSION_RULES[pattern].inputs_fn
    return (
        [
            p.name
            for p in list(inspect.signature(fn).parameters.values())[1:]
            if p.default is p.empty
        ]
        if fn
        else []
    )


def takes(pattern: str, case: dict) -> bool:
    """Are these sizes of its example inputs, with all that have no default?"""
    return bool(keys_of(pattern)) and {*needed(pattern)} <= case.keys() <= {*keys_of(pattern)}


def unfit(pattern: str, case: dict) -> str:
    """Why a pattern does not take a case."""
    keys, must = keys_of(pattern), needed(pattern)
    if not keys:
        return f"{pattern} has no example inputs"
    strange, missing = (
        [key for key in case if key not in keys],
        [key for key in must if key not in case],
    )
    wrong = [f"has no size {', '.join(strange)}"] if strange else []
    wrong += [f"needs {', '.join(missing)} too"] if missing else []
    free = f"; may be left out: {', '.join(keys[len(must) :])}" if keys != must else ""
    return f"{pattern} {' and '.join(wrong)} (all of {', '.join(must)}{free})"


def given(names, cases, dtypes, modes) -> list[Work]:
    chosen = []
    for case in cases:
        fit = [name for name in names if takes(name, case)]
        if not fit:
            said = ",".join(f"{key}={value}" for key, value in case.items())
            why = "; ".join(unfit(name, case) for name in names)
            raise ValueError(
                f"no pattern takes {said}: {why}; --rows chooses among the listed rows"
            )
        chosen += [
            Work(name, case, dtype, train) for name in fit for dtype in dtypes for train in modes
        ]
    return chosen


def listed(names, sizes, dtypes, modes, on_gpu) -> list[Work]:
    rows = WORK if on_gpu else SMALL
    have = {work.pattern for work in rows}
    # A pattern without rows of its own is measured at the case that its file names for benchmarks,
    # the last. A rule by itself, which sums over ranks, is for benchmarks.all_reduce.
    more = [n for n in names if n not in have and hasattr(FUSION_RULES[n], "kernel_fn")]
    rows = [*rows, *(Work(n, FUSION_RULES[n].cases[-1 if on_gpu else 0], F32) for n in more)]
    chosen = []
    for work in rows:
        fits = "all" in sizes or not on_gpu or ("small" if work.small else "large") in sizes
        if work.pattern in names and work.train in modes and fits:
            chosen += [work._replace(dtype=dtype) for dtype in dtypes or [work.dtype]]
    return chosen


def spread(works: list[Work]) -> list[Work]:
    """One row of every pattern, then a second one, ...: what a run that stops early should have
    seen.
    """
    turn: dict[str, int] = {}
    order = []
    for i, work in enumerate(works):
        turn[work.pattern] = turn.get(work.pattern, 0) + 1
        order.append((turn[work.pattern], i, work))
    return [work for _, _, work in sorted(order, key=lambda entry: entry[:2])]
