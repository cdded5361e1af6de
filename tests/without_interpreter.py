"""Programs for a process of their own, in which kernels are compiled and not interpreted.

Each is forked from one process that has imported everything, and has had Inductor generate code
once: that takes longer than most of the programs. `python -m tests.without_interpreter` is that
process.
"""

import functools
import gc
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
import types
from pathlib import Path
from typing import NoReturn

import torch

ROOT = Path(__file__).parent.parent
WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": ""}  # torch's CUDA does not survive a fork


def printed_by(script: str):
    """What the last line that the program prints says, as JSON."""
    return json.loads(output_of("-c", script).splitlines()[-1])


def output_of(*command: str, given: str = "", **environment: str) -> str:
    """What a program prints, `python -c ...` or `python -m ...`, which has `given` as its standard
    input. One that fails is a failure of the test.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "in").write_text(given)
        variables = os.environ | WITHOUT_GPU | environment
        asked = {"command": command, "environment": variables, "folder": folder}
        server = started(os.getpid())
        server.stdin.write(json.dumps(asked) + "\n")
        server.stdin.flush()
        status = server.stdout.readline()
        assert status, "the process that programs are forked from has ended"
        out, err = ((Path(folder) / name).read_text() for name in ("out", "err"))
    assert status == "0\n", out[-3000:] + err[-3000:]
    return out


@functools.cache
def started(pid: int) -> subprocess.Popen:
    """The process that the programs of this one are forked from; it ends when this one does."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    # The default cache directory: the tests before have left the traced patterns there.
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    environment |= WITHOUT_GPU
    return subprocess.Popen(
        [sys.executable, "-m", __name__],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def serve() -> None:
    """Fork one process for each line of the standard input, and print its exit status."""
    prepare()
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            become(**json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def prepare() -> None:
    import fusion_backend
    from benchmarks.host_runs.without_gpu import cpu_tensors_pass
    from fusion_backend.compat.pretended_cuda import code_for_cuda

    from . import quick_pytorch, traced

    torch.set_num_threads(1)
    quick_pytorch.hasten()
    traced.trace()
    with cpu_tensors_pass(), code_for_cuda(), torch.no_grad():
        torch.compile(torch.sin)(torch.ones(8, 8))
    torch.compiler.reset()
    fusion_backend.reset()
    gc.freeze()  # no program looks for garbage among all this


def become(command: list[str], environment: dict[str, str], folder: str) -> NoReturn:
    """Run a program in place of this one."""
    modes = {"in": os.O_RDONLY, "out": os.O_WRONLY | os.O_CREAT, "err": os.O_WRONLY | os.O_CREAT}
    for descriptor, (name, mode) in enumerate(modes.items()):
        os.dup2(os.open(f"{folder}/{name}", mode), descriptor)
    sys.stdin = open(0)  # what the other has read ahead is not for this one
    torch.set_num_threads(1)  # a pool of threads, which the fork has lost, is made anew
    environment.pop("TRITON_INTERPRET", None)
    os.environ.clear()
    os.environ |= environment
    how, what, *sys.argv[1:] = command
    status = 1
    try:
        if how == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            sys.modules["__main__"] = types.ModuleType("__main__")
            exec(what, vars(sys.modules["__main__"]))
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)


if __name__ == "__main__":
    serve()
