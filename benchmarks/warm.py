"""Compile pieces of work ahead, many at once: afterwards a run finds them in Inductor's and Triton's caches.

`python -m benchmarks.warm` is a helper of benchmarks.patterns: it reads work from stdin, a JSON line each, and writes
"done" or "failed" for each. Processes compile side by side, but only one at a time uses the GPU, so that
max-autotune times its candidates undisturbed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable

import torch

from benchmarks.contenders import HOW, step
from benchmarks.work import Work
from fusion_backend.backend import patterns
from fusion_backend.pattern import REGISTRY

LOCK = "FUSION_BENCH_LOCK"  # the file that whoever uses the GPU has locked
INTENSE = 50  # operations a byte; above, max-autotune times matrix products while it compiles


def compile_ahead(works: list[Work], names: list[str], jobs: int, seconds: float | None = None) -> dict[str, int]:
    """Hand the work out to `jobs` processes; how many rows were "done" and "failed" within the time."""
    counts = {"done": 0, "failed": 0}
    with tempfile.NamedTemporaryFile() as lock:
        environment = dict(os.environ, TORCHINDUCTOR_COMPILE_THREADS="1") | {LOCK: lock.name}
        command = [sys.executable, "-m", "benchmarks.warm", *names]
        root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        workers = [
            subprocess.Popen(
                command, cwd=root, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, start_new_session=True,
            )
            for _ in range(min(jobs, len(works)))
        ]  # fmt: skip
        todo = iter(works)

        def feed(worker: subprocess.Popen) -> None:
            with contextlib.suppress(OSError), worker.stdin as tell, worker.stdout as answers:
                for work in todo:  # next() of a list's iterator is atomic
                    tell.write(work.to_json() + "\n")
                    tell.flush()
                    counts[answers.readline().strip() or "failed"] += 1

        threads = [threading.Thread(target=feed, args=(worker,), daemon=True) for worker in workers]
        deadline = None if seconds is None else time.monotonic() + seconds
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        finally:
            for worker in workers:
                if deadline is not None or sys.exc_info()[0]:
                    worker.kill()
                worker.wait()
    return counts


class Alone:
    """The GPU, for one process at a time; may be entered again by whoever has it."""

    def __init__(self):
        self.file, self.depth = open(os.environ[LOCK], "w"), 0

    def __enter__(self):
        if not self.depth:
            fcntl.flock(self.file, fcntl.LOCK_EX)
        self.depth += 1

    def __exit__(self, *_):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.depth -= 1
        if not self.depth:
            fcntl.flock(self.file, fcntl.LOCK_UN)


def when_alone(how: dict, alone: Alone) -> Callable:
    """The backend that torch.compile(**how) takes, compiling at any time and running alone."""

    def backend(gm, inputs):
        if how.get("backend"):
            run = torch._dynamo.lookup_backend(how["backend"])(gm, inputs, options=how.get("options", {}))
        else:
            mode = torch._inductor.list_mode_options(how["mode"]) if how.get("mode") else {}
            run = torch._inductor.compile(gm, inputs, options=mode)

        def call(*args):
            with alone:
                return run(*args)

        return call

    return backend


def warm(work: Work, names: list[str], alone: Alone) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    reference = REGISTRY[work.pattern].reference
    torch.compiler.reset()
    with torch.set_grad_enabled(work.train):
        with alone:
            args = work.arguments(device)
        for name in names:
            fn = torch.compile(
                lambda *args: reference(*args), dynamic=False, backend=when_alone(HOW[name], alone)
            )  # fmt: skip
            intense = name == "max-autotune" and work.flops > INTENSE * work.bytes
            with alone if intense else contextlib.nullcontext():
                outs = fn(*args)
            outs = outs if isinstance(outs, tuple) else (outs,)
            with alone:
                dys = [torch.randn_like(out) for out in outs] if work.train else None
                step(lambda *_, outs=outs: outs, args, dys)
            del outs, dys


def main() -> None:
    patterns()
    alone, answers = Alone(), sys.stdout
    sys.stdout = sys.stderr  # what compilers print is no answer
    for line in sys.stdin:
        try:
            warm(Work.from_json(line), sys.argv[1:], alone)
            answer = "done"
        except Exception as error:  # the run itself will say so
            print(f"{line.strip()}: {error}", file=sys.stderr)
            answer = "failed"
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        print(answer, file=answers, flush=True)


if __name__ == "__main__":
    main()
