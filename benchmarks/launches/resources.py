"""Registers, spills and shared memory of a launch, compiled for sm_90."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import triton

from benchmarks.launches.launches import Found, Launch
from benchmarks.launches.layouts import mixed_tiles, torn_tiles
from benchmarks.records.runs import Run
from fusion_backend.compat.gluon import source_class
from fusion_backend.compat.triton import SM_90, JITFunction

SHARED_LIMIT = 227 * 1024  # bytes a block on sm_90


class Usage(NamedTuple):
    registers: int
    spilled: int  # bytes of stack and local memory a thread
    shared: int  # bytes a block
    tensor_core: str  # the matrix instruction, if any
    torn: list[tuple[int, int]]  # shapes of tiles that are computed with in several layouts
    mixed: list[tuple[int, ...]]  # shapes of tiles whose rows are added up wrongly


def compiled_for_hopper(launch: Launch):
    names = [name for name, _ in launch.signature]
    source = source_class(launch.kernel)(
        launch.kernel,
        dict(launch.signature),
        constexprs={(names.index(name),): value for name, value in launch.constants},
        attrs={(i,): [["tt.divisibility", 16]] for i in launch.aligned},
    )
    return triton.compile(source, target=SM_90, options=dict(launch.options))


def usage(launch: Launch) -> Usage:
    """Compile for sm_90, and read what the machine code needs."""
    compiled = compiled_for_hopper(launch)
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
        torn_tiles(compiled.asm["ttgir"]),
        mixed_tiles(compiled.asm["ttgir"]),
    )


def at_once(use: Usage, warps: int) -> int:
    """How many programs an H200 runs at the same time."""
    registers = (use.registers + 7) // 8 * 8 * 32 * warps
    return 132 * min(65536 // registers, (SHARED_LIMIT + 1024) // (use.shared + 1024))


# They compute with a tile in two layouts; with one, the first was no faster on an H200
# (h200-short-rows.json beside h200-short-rows-before.json).
TORN = {"batch_norm_sums_kernel", "batch_norm_sum_sums_kernel"}

# Bytes spilled by configurations that were the fastest on an H200 all the same: tiles of 128 x 64
# at four warps, rows of 32768 at sixteen; in the backward of attention, heads of 128 with dropout
# and a bias, and heads of 192. Those of short attention, of four and of eight warps, were faster
# than the kernels for any lengths. Norms with a gate spill with odd rows in fp32.
TOLERATED = {
    "flash_kernel": 48,
    "flash_keys_kernel": 40,
    "flash_queries_kernel": 8,
    ("flash_short_gradients_kernel", 4): 136,
    ("flash_short_gradients_kernel", 8): 544,
    "gated_norm_backward_kernel": 64,
    "norm_kernel": 216,
}
TOLERATED |= {"softmax_backward_kernel": 72, "l2_norm_backward_kernel": 72}
# in Triton 3.8, with which none of them was timed
TOLERATED |= dict.fromkeys(("batch_moments_kernel", "row_moments_kernel"), 16)
TOLERATED |= dict(pixels_kernel=240, pixels_gradient_kernel=192)


def check_resources(found: list[Found], run: Run) -> int:
    """Compile the launches; print and note what each needs. Returns how many need too much."""
    bad = 0
    print(f"triton {triton.__version__}, sm_90")
    print(f"{'kernel':37}{'dtype':6}{'warps':>6}{'regs':>6}{'spill':>7}{'shared':>8}")
    for launch, dtype, words in found:
        use = usage(launch)
        warps = dict(launch.options)["num_warps"]
        # the programs of a group would wait for one that does not run yet
        waits = launch.programs > at_once(use, warps)
        most = TOLERATED.get((launch.name, warps), TOLERATED.get(launch.name, 0))
        wrong = use.spilled > most or use.shared > SHARED_LIMIT or waits
        wrong = wrong or (use.torn and launch.name not in TORN) or use.mixed
        bad += bool(wrong)
        run.rows.append(
            dict(
                kernel=launch.name,
                dtype=dtype,
                work=words,
                warps=warps,
                triton=triton.__version__,
                **use._asdict(),
            )
        )
        numbers = f"{warps:6}{use.registers:6}{use.spilled:7}{use.shared:8}"
        torn = "".join(f"  torn {rows}x{columns}" for rows, columns in use.torn)
        torn += "".join(f"  mixed {'x'.join(map(str, shape))}" for shape in use.mixed)
        mark = torn + ("  TOO MUCH" if wrong else "")
        print(f"{launch.name:37}{dtype:6}{numbers}  {words} {use.tensor_core}{mark}", flush=True)
    print(
        f"{bad} launches spill, exceed {SHARED_LIMIT} bytes of shared memory, "
        "share rows among more programs than run at once, compute with a tile in two layouts, or "
        "mix up its rows"
    )
    return bad


def first_of_each_kernel(found: list[Found]) -> list[Found]:
    first: dict[str, Found] = {}
    for one in found:
        first.setdefault(one.launch.name, one)
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
    """Keep the rows that the file has of other versions of Triton, before those of the run."""
    if not path.exists():
        return
    before = Run.load(path)
    if before.kind != run.kind:
        raise SystemExit(f"{path} holds a run of benchmarks.{before.kind}")
    run.rows = [row for row in before.rows if row["triton"] != triton.__version__] + run.rows
    run.about["triton"] = ", ".join(dict.fromkeys(row["triton"] for row in run.rows))
    said = dict.fromkeys([*before.about["torch"].split(", "), torch.__version__])
    run.about["torch"] = ", ".join(sorted(said))
