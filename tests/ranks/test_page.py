"""The code of docs/distributed.md runs in two processes, and sites are fused in it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ..doc_blocks import Block, to_run
from .page import SAID, with_hooks
from .starting import need_gloo

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "distributed.md"
FILE = re.compile(r"# (\w+\.py)\n")
COMMAND = to_run(PAGE, "sh")[0].text


def run(folder: Path, name: str, blocks: list[Block]) -> dict[int, list[set[str]]]:
    """What each rank has fused, by the line of the block; with the command of the page."""
    need_gloo()
    (folder / name).write_text(with_hooks(blocks))
    folders = [str(Path(sys.executable).parent), os.environ["PATH"]]
    modules = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    given = {"PATH": os.pathsep.join(folders), "PYTHONPATH": os.pathsep.join(modules)}
    given |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", COMMAND.replace("train.py", name)],
        cwd=folder,
        env=os.environ | given,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    found: dict[int, list[set[str]]] = {}
    for line, sites in re.findall(SAID + r"(\d+) on \d: (.+)", done.stdout):
        found.setdefault(int(line), []).append({*json.loads(sites)})
    return found


BLOCK = {"attention", "gelu"}
# What each block of the program compiles, with the first words of its code. The loss is compiled
# once.
FUSED = {
    "import os": set(),
    "from torch.nn.parallel": {*BLOCK, "cross_entropy"},
    "from torch.distributed.fsdp import fully_shard": BLOCK,
    "from torch.distributed.fsdp import MixedPrecisionPolicy": {*BLOCK, "cross_entropy"},
    "parts = ": set(),
    "from torch.utils.checkpoint": BLOCK,
    "from torch.distributed.device_mesh": BLOCK,
    "import torch.distributed.checkpoint": set(),
}
NORMS = {"layer_norm", "add_layer_norm", "norm_linear"}


def test_the_program_of_the_page(tmp_path):
    blocks = [b for b in to_run(PAGE, "python") if not FILE.match(b.text)]
    found = run(tmp_path, "train.py", blocks)
    assert len(blocks) == len(FUSED)
    for block, (words, expected) in zip(blocks, FUSED.items(), strict=True):
        assert block.text.startswith(words)
        one, other = found[block.line]
        assert one == other and one - NORMS == expected, words
        # a norm with the linear layer behind it: not under tensor parallelism
        assert ("norm_linear" in one) == bool(expected and "mesh" not in words), words
    assert (tmp_path / "saved").is_dir()


@pytest.mark.parametrize("name", ["with_accelerate.py", "with_trainer.py"])
def test_the_programs_that_need_accelerate(tmp_path, name):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match="'FUSION' is not a valid DynamoBackend"):
        accelerate.utils.TorchDynamoPlugin(backend="fusion")
    (block,) = [b for b in to_run(PAGE, "python") if b.text.startswith(f"# {name}\n")]
    found = run(tmp_path, name, [block])
    assert len(found[block.line]) == 2
    for sites in found[block.line]:
        assert sites & {"gelu", "cross_entropy"}


def test_the_program_with_a_plan_of_transformers(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="from_pretrained asks for accelerate with a tp_plan")
    (block,) = [b for b in to_run(PAGE, "python") if b.text.startswith("# with_tp_plan.py\n")]
    one, other = run(tmp_path, "with_tp_plan.py", [block])[block.line]
    assert one == other >= {"attention", "rotary", "rms_norm", "add_rms_norm", "gated_linear"}
