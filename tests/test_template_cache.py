"""Templates on disk: the next process reads the same ones, traces anew when the source has changed,
and stores none where the caches are off.
"""

import concurrent.futures
import math
import os
import pickle
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from fusion_backend import Pattern
from fusion_backend.cache import disk
from fusion_backend.cache import identity as cache
from fusion_backend.frontends.loading import patterns
from fusion_backend.ir.expr import Expr
from fusion_backend.match.templates import templates

SCRIPT = """
import sys, time
sys.path.insert(0, sys.argv[1])
import mine
from fusion_backend.match import templates as template
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
        [sys.executable, "-c", SCRIPT, str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    count, _, rest = done.stdout.strip().splitlines()[-1].partition(" ")
    return int(count), rest


@pytest.mark.full
def test_a_second_process_reads_the_templates(tmp_path):
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


def test_autocast_around_the_first_call_is_not_the_references(monkeypatch):
    """A model is often called within autocast, and its first call traces the patterns."""
    monkeypatch.setattr("fusion_backend.match.templates.file_of", lambda pattern: None)

    @Pattern
    def scored(x: Tensor, w: Tensor) -> Tensor:
        return torch.relu(x @ w).to(x.dtype) * x

    plain = repr([t.roots for t in templates(scored)])
    scored.forget()
    with torch.autocast("cpu", torch.bfloat16):
        assert repr([t.roots for t in templates(scored)]) == plain


@pytest.fixture
def file(tmp_path):
    """A file for a value, in a folder that `store` makes."""
    return tmp_path / "cache" / "fusion" / "mine.json"


def stored_value():
    x = Expr("var", (), "x", (6, 6), 0)
    twice = Expr("mul", (x, x), (torch.int8, None, (True, -0.0, math.inf)), (), 1)
    return {
        "templates": [(("tensor", "=relu"), (twice, x), 2, 7)],
        "dtypes": {"x": torch.int8},
        "random": {("none",)},
    }


def test_read_as_it_was_written(file):
    disk.store(file, stored_value())
    found = disk.load(file)
    assert repr(found) == repr(stored_value())
    twice, x = found["templates"][0][1]
    assert twice.args == (x, x) and (twice.id, x.id) == (1, 0), "one value is one object"
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    disk.store(file, {"an object": object()})
    assert repr(disk.load(file)) == repr(stored_value()) and len(list(file.parent.iterdir())) == 1


# What may lie there instead: each is as good as nothing.
BROKEN = {
    "empty": "",
    "cut short": '{"value": ["dict", ["templates", ["list", ["tuple", ["tuple", "ten',
    "of another version": '{"version": 1, "templates": []}',
    "another kind": '{"value": ["eval", "1"], "expressions": []}',
    "no dtype": '{"value": ["dtype", "load"], "expressions": []}',
    "no expression": '{"value": ["expression", 0], "expressions": []}',
    "a pickle": pickle.dumps({"templates": []}).decode("latin1"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_file_that_cannot_be_read_counts_as_missing(kind, file):
    disk.store(file, stored_value())
    file.write_text(BROKEN[kind], encoding="latin1")
    assert disk.load(file) is None
    assert disk.load(file.parent / "missing.json") is None and disk.load(None) is None


def others_folder(file, monkeypatch):
    file.parent.chmod(0o770)


def others_file(file, monkeypatch):
    file.chmod(0o622)


def link(file, monkeypatch):
    file.rename(file.with_suffix(".elsewhere"))
    file.symlink_to(file.with_suffix(".elsewhere"))


def owner(file, monkeypatch):
    mine = os.stat(file).st_uid
    monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    if mine == 0:  # what the administrator put there is trusted
        os.chown(file, 12345, -1)


CHANGES = {
    others_folder: "others may write",
    others_file: "others may write",
    link: "is a link",
    owner: "another user",
}


@pytest.mark.parametrize("change", CHANGES)
def test_read_only_where_nobody_else_may_write(change, file, monkeypatch):
    disk.store(file, stored_value())
    change(file, monkeypatch)
    with pytest.warns(RuntimeWarning, match=f"traced patterns are not read.*{CHANGES[change]}"):
        assert disk.load(file) is None
    assert disk.load(file) is None, "warned once"


def test_several_writers(file):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: disk.store(file, stored_value()), range(64)))
    assert repr(disk.load(file)) == repr(stored_value()) and list(file.parent.iterdir()) == [file]


def test_nothing_is_stored_where_a_source_of_ours_has_changed(monkeypatch):
    """The files then differ from what runs."""
    pattern = next(p for p in patterns() if p.name == "gelu")
    assert disk.file_of(pattern) is not None and cache.key_of([pattern], [])
    monkeypatch.setattr(cache, "LOADED_AT", 0.0)
    cache.own_sources.cache_clear()
    try:
        assert disk.file_of(pattern) is None and cache.key_of([pattern], []) is None
    finally:
        cache.own_sources.cache_clear()


NUMBERS = torch.ones(2)


def test_nothing_is_stored_for_an_opaque_pattern(scratch):
    """Its tensor may be another one in the next process: no template is stored, and torch caches
    nothing.
    """

    @Pattern
    def opaque(x: torch.Tensor) -> torch.Tensor:
        return x.sinh() * NUMBERS.dim()

    assert templates(opaque)
    assert disk.file_of(opaque) is None and cache.key_of([opaque], []) is None
    assert (
        cache.Identity(None).uuid() is None
        and cache.Identity(None, lambda graph: None).uuid() is None
    )
