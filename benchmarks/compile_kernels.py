"""Compile every kernel for sm_90, without a GPU: registers, spills and shared memory of what the
launchers would run.

    python -m benchmarks.compile_kernels [PATTERN ...] [--each-kernel] [--out FILE.json]
    python -m benchmarks.compile_kernels --mutations [PATTERN ...]

The launchers' own choice of tile sizes is compiled; with --each-kernel only the first launch of
each kernel. --out keeps what the file holds of other versions of Triton, so that they stand side by
side. With --mutations, instead: which arguments torch believes that a kernel writes; when its
analysis fails, it believes all, and Inductor copies them. Exit status 1 where a kernel spills more
than is known to pay, or asks for more than there is.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

os.environ["TRITON_INTERPRET"] = "0"  # before any kernel is defined

import torch
import triton

from benchmarks.launches import SHARED, SITES, TYPES, Launch, sites
from benchmarks.results import Run, machine
from benchmarks.trial_cost import Driver
from fusion_backend.compat.inductor import mutated_tensors
from fusion_backend.compat.triton import SM_90, ASTSource, JITFunction, set_driver

# Kernels that write to what they are given.
IN_PLACE = {"cross_entropy_in_place_kernel": {"X"}} | dict.fromkeys(SHARED, {"MAILBOX"})
SHARED_LIMIT = 227 * 1024  # bytes a block on sm_90


class Usage(NamedTuple):
    registers: int
    spilled: int  # bytes of stack and local memory a thread
    shared: int  # bytes a block
    tensor_core: str  # the matrix instruction, if any


def usage(launch: Launch) -> Usage:
    """Compile for sm_90 and read the resources off the machine code."""
    names = [name for name, _ in launch.signature]
    source = ASTSource(
        launch.kernel,
        dict(launch.signature),
        constexprs={(names.index(name),): value for name, value in launch.constants},
        attrs={(i,): [["tt.divisibility", 16]] for i in launch.aligned},
    )
    compiled = triton.compile(source, target=SM_90, options=dict(launch.options))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        text = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
    mma = re.search(r"wgmma\.mma_async|mma\.sync", compiled.asm["ptx"])
    return Usage(
        int(found["REG"]),
        int(found["STACK"]) + int(found["LOCAL"]),
        compiled.metadata.shared,
        mma[0] if mma else "",
    )


def mutated(launch: Launch) -> list[str]:
    """The arguments that torch finds a kernel to write."""
    constants = dict(launch.constants)
    tensors = {}
    for name, kind in launch.signature:
        if kind.startswith("*"):
            tensors[name] = torch.empty(
                2, dtype=next(d for d, short in TYPES.items() if "*" + short == kind)
            )
        elif name not in constants:
            constants[name] = 0.5 if kind == "fp64" else 48
    return mutated_tensors(launch.kernel, constants, tensors)


def at_once(use: Usage, warps: int) -> int:
    """How many programs an H200 runs at the same time."""
    registers = (use.registers + 7) // 8 * 8 * 32 * warps
    return 132 * min(65536 // registers, (SHARED_LIMIT + 1024) // (use.shared + 1024))


# Bytes that configurations may spill which were the fastest on an H200 all the same: tiles of 128 x
# 64 at four warps, rows of 32768 at sixteen. In the backward of attention, of heads of 128 with
# dropout and a bias alone.
TOLERATED = {
    "flash_kernel": 48,
    "flash_keys_kernel": 32,
    "flash_queries_kernel": 8,
    "norm_kernel": 216,
}
TOLERATED |= {"softmax_backward_kernel": 72, "l2_norm_backward_kernel": 72}


def check_resources(chosen: list, run: Run) -> int:
    """Compile, print and note what each launch needs. How many need too much."""
    bad = 0
    print(f"triton {triton.__version__}, sm_90")
    print(f"{'kernel':37}{'dtype':6}{'warps':>6}{'regs':>6}{'spill':>7}{'shared':>8}")
    for launch, dtype, words in chosen:
        use = usage(launch)
        warps = dict(launch.options)["num_warps"]
        # programs of a group would wait for one that is not there yet
        waits = launch.programs > at_once(use, warps)
        wrong = use.spilled > TOLERATED.get(launch.name, 0) or use.shared > SHARED_LIMIT or waits
        bad += wrong
        run.rows.append(dict(kernel=launch.name, dtype=dtype, work=words, warps=warps,
            triton=triton.__version__,
                             **use._asdict()))  # fmt: skip
        numbers = f"{warps:6}{use.registers:6}{use.spilled:7}{use.shared:8}"
        mark = "  TOO MUCH" if wrong else ""
        print(f"{launch.name:37}{dtype:6}{numbers}  {words} {use.tensor_core}{mark}", flush=True)
    print(
        f"{bad} that spill, exceed {SHARED_LIMIT} bytes of shared memory, or share rows and have not all room at once"
    )
    return bad


def check_mutations(chosen: list) -> int:
    set_driver(Driver())
    bad = 0
    for launch, dtype, _ in chosen:
        written = mutated(launch)
        tensors = [name for name, kind in launch.signature if kind.startswith("*")]
        wrong = set(written) != set(tensors) - set(launch.inputs) | IN_PLACE.get(launch.name, set())
        bad += wrong
        print(
            f"{launch.name:37}{dtype:6}writes {', '.join(written)}{'  WRONG' if wrong else ''}",
            flush=True,
        )
    print(f"{bad} launches whose written arguments torch does not see")
    return bad


def first_of_each_kernel(chosen: list) -> list:
    first: dict[str, tuple] = {}
    for launch, *words in chosen:
        first.setdefault(launch.name, (launch, *words))
    return list(first.values())


def kernels() -> set[str]:
    """The names of all kernels of the package."""
    packages = ("fusion_backend.kernels.", "fusion_backend.patterns.")
    values = [
        v
        for name, module in sys.modules.items()
        if name.startswith(packages)
        for v in vars(module).values()
    ]
    return {
        v.__name__ for v in values if isinstance(v, JITFunction) and v.__name__.endswith("_kernel")
    }


def keep_other_versions(run: Run, path: Path) -> None:
    """Put in front of the rows those that the file has of other versions of Triton."""
    if not path.exists():
        return
    before = Run.load(path)
    if before.kind != run.kind:
        raise SystemExit(f"{path} holds a run of benchmarks.{before.kind}")
    run.rows = [row for row in before.rows if row["triton"] != triton.__version__] + run.rows
    run.about["triton"] = ", ".join(dict.fromkeys(row["triton"] for row in run.rows))
    said = dict.fromkeys([*before.about["torch"].split(", "), torch.__version__])
    run.about["torch"] = ", ".join(sorted(said))


def main(argv: list[str] | None = None) -> int:
    known = list(dict.fromkeys(name for name, *_ in SITES))
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compile_kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("patterns", nargs="*", metavar="PATTERN")
    parser.add_argument(
        "--mutations", action="store_true", help="what torch believes that each kernel writes"
    )
    parser.add_argument(
        "--each-kernel", action="store_true", help="only the first launch of each kernel"
    )
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    args = parser.parse_args(argv)
    if unknown := set(args.patterns) - set(known):
        parser.error(f"no pattern {', '.join(sorted(unknown))} here; there are {', '.join(known)}")
    chosen = list(sites(args.patterns))
    if not args.patterns and (missing := kernels() - {launch.name for launch, *_ in chosen}):
        raise SystemExit(f"nothing in benchmarks/launches.py launches {', '.join(sorted(missing))}")
    if args.each_kernel:
        chosen = first_of_each_kernel(chosen)
    if args.mutations:
        return 1 if check_mutations(chosen) else 0
    run = Run("compile_kernels", machine(torch.device("cpu"), "benchmarks.compile_kernels"))
    bad = check_resources(chosen, run)
    if args.out:
        keep_other_versions(run, args.out)
        run.save(args.out)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
