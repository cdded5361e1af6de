"""Traced patterns are kept on disk: the same templates again, new ones when the source changes, none when told so."""

import os
import subprocess
import sys

SCRIPT = """
import sys, time
sys.path.insert(0, sys.argv[1])
import mine
from fusion_backend import template
traced, real = [], template.traced
template.traced = lambda *args: traced.append(1) or real(*args)
found = template.templates(mine.scaled)
print(len(traced), [(t.kinds, repr(t.roots), t.size) for t in found], sorted(mine.scaled.memo))
"""
SOURCE = """
from torch import Tensor
from fusion_backend import Pattern
@Pattern
def scaled(x: Tensor, w: Tensor | None, s: float) -> Tensor:
    return (x if w is None else x * w).FUNCTION() * s
"""


def run(folder, **environment):
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"), **environment}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder)], env=environment, capture_output=True, text=True, check=True
    )
    count, _, rest = done.stdout.strip().splitlines()[-1].partition(" ")
    return int(count), rest


def test_templates_are_kept(tmp_path):
    (tmp_path / "mine.py").write_text(SOURCE.replace("FUNCTION", "tanh"))
    traced, first = run(tmp_path)
    assert traced
    assert run(tmp_path) == (0, first)
    assert run(tmp_path, TORCHINDUCTOR_FORCE_DISABLE_CACHES="1") == (traced, first)
    for file in (tmp_path / "cache" / "fusion").iterdir():
        file.write_bytes(b"broken")
    assert run(tmp_path) == (traced, first)
    (tmp_path / "mine.py").write_text(SOURCE.replace("FUNCTION", "sigmoid"))
    again, second = run(tmp_path)
    assert again == traced and second != first
