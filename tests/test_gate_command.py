"""`fusion gate`: measured answers are listed, shown, forgotten and carried to another store."""

import dataclasses
import datetime
import json
import os
import sys

import pytest
import torch

from fusion_backend.compat.torch import cache_folder
from fusion_backend.frontends.command_line import main
from fusion_backend.frontends.commands import checks, gate_measure, gate_store
from fusion_backend.frontends.explain import Collector
from fusion_backend.measure import store as answers
from fusion_backend.measure.answer_text import reason, unmeasured
from fusion_backend.measure.key import machine
from fusion_backend.measure.store import Answer, read_answers, store, write_answers
from fusion_backend.reporting import report as reporting
from fusion_backend.reporting.records import UNPROFITABLE, GraphRecord, Site
from fusion_backend.reporting.report import Report

H200 = machine("NVIDIA H200")
NORM = Answer(
    key="3f2a91bc" + "0" * 24,
    sites=("layer_norm", "layer_norm", "gelu"),
    take=("kernel/kernel", "kernel/kernel", ""),
    plain_ms=0.159,
    ours_ms=0.071,
    ratio=2.24,
    low=2.2,
    high=2.28,
    verdict="faster",
    more_bytes=12_000_000,
    date="2026-11-20",
    about={**H200, "training": True, "operators": {"native_layer_norm": 2, "gelu": 1}},
)
SOFTMAX = Answer(
    key="3f2b" + "1" * 28,
    sites=("softmax",),
    take=("",),
    plain_ms=0.3,
    ours_ms=0.32,
    ratio=0.94,
    low=0.93,
    high=0.95,
    verdict="slower",
    date="2026-11-21",
    about={**H200, "gpu": "NVIDIA L40S", "training": False, "operators": {"_softmax": 1}},
)


@pytest.fixture
def held(tmp_path, monkeypatch):
    """The store of this user, with two answers."""
    monkeypatch.setattr(answers, "cache_folder", lambda: str(tmp_path / "cache"))
    monkeypatch.setattr(gate_store, "seed", dict)
    found = store()
    assert not found.put(NORM) and not found.put(SOFTMAX)
    return found


def gate(capsys, *argv) -> tuple[int, str, str]:
    status = main(["gate", *map(str, argv)])
    return status, *capsys.readouterr()


def refused(capsys, status: int, said: str, *argv) -> None:
    """It ends with this status and one line, in which this is said."""
    got, out, err = gate(capsys, *argv)
    assert (got, out) == (status, "") and err.count("\n") == 1
    assert said in err


def on_disk(held) -> dict[str, Answer]:
    """What another process finds."""
    held.known.clear()
    return {a.key: a for a in held.all()}


def test_an_answer_is_a_line(held, capsys):
    _, out, _ = gate(capsys, "list")
    assert [" ".join(row.split()) for row in out.splitlines()[1:-3]] == [
        "3f2b1111 2026-11-21 NVIDIA L40S 0.94 (0.93 to 0.95) 0.320, 0.300 softmax: Inductor",
        "3f2a91bc 2026-11-20 NVIDIA H200 2.24 (2.20 to 2.28) 0.071, 0.159 "
        "layer_norm ×2: forward kernel, backward kernel; gelu: Inductor",
    ]
    assert str(held.folder) in out and "2 answers, and no GPU here that could use them" in out


def test_answers_are_listed_by_pattern_and_as_json(held, capsys, monkeypatch):
    monkeypatch.setattr(gate_store, "machines", lambda: [H200])
    _, out, _ = gate(capsys, "list", "gelu", "rms_norm")
    assert "3f2a91bc" in out and "3f2b" not in out and "1 answer with gelu or rms_norm\n" in out
    found = json.loads(gate(capsys, "list", "--json")[1])["answers"]
    assert [(a["key"], a["here"]) for a in found] == [(SOFTMAX.key, False), (NORM.key, True)]
    assert found[0]["low"] == 0.93 and "all of another" not in gate(capsys, "list")[1]
    assert "2 answers, 1 of another GPU or version" in gate(capsys, "list")[1]


def test_what_ships_is_listed_on_demand(held, capsys, monkeypatch):
    ours = dataclasses.replace(NORM, key="ab" * 16, seed=True)
    monkeypatch.setattr(gate_store, "seed", lambda: {ours.key: ours})
    assert "abababab" not in gate(capsys, "list")[1]
    _, out, _ = gate(capsys, "list", "--seed")
    assert "abababab" in out and out.count("(ships with the package)") == 1
    assert "ships with the package" in gate(capsys, "show", "abab")[1]


def test_a_damaged_file_is_counted(held, capsys):
    (held.folder / f"{'9' * 32}.json").write_text('{"format": 1, "key"')
    assert "1 file there cannot be read as an answer" in gate(capsys, "list")[1]


def test_everything_of_one_answer_is_shown(held, capsys, monkeypatch):
    monkeypatch.setattr(gate_store, "machines", lambda: [H200])
    _, out, _ = gate(capsys, "show", "3f2a")
    for said in (
        f"{NORM.key}: measured on 2026-11-20\n",
        f"NVIDIA H200, torch {H200['torch']}, triton {H200['triton']}\n",
        "training: forward and backward",
        "layer_norm: forward kernel, backward kernel\n",
        "gelu: Inductor\n",
        "the region takes 0.0710 ms, with Inductor alone 0.1590 ms; ratio 2.24 (2.20 to 2.28): fas",
        "12.0 MB more kept for backward than with Inductor",
        "native_layer_norm ×2, gelu\n",
        "0.071 ms, Inductor 0.159 ms here with its neighbours, 12 MB more kept for backward, mea",
    ):
        assert said in out
    assert "(not the GPU and the versions that are here)" in gate(capsys, "show", SOFTMAX.key)[1]


def test_a_pattern_is_shown_with_its_answers(held, capsys):
    _, out, _ = gate(capsys, "show", "softmax")
    assert "Decided by worthwhile at" in out and "  Measured:\n    3f2b1111  2026-11-21" in out
    assert "Measured" not in gate(capsys, "show", "rotary")[1]


def test_a_key_that_is_none_or_several(held, capsys):
    refused(capsys, 2, "has a key that begins with 'dead'; fusion gate list has", "show", "dead")
    refused(capsys, 2, "3f2 begins 2 keys: 3f2a91b, 3f2b111", "show", "3f2")
    refused(capsys, 2, "3f2 begins 2 keys", "clear", "3f2")
    refused(capsys, 2, "begins with ''", "clear", "")
    refused(capsys, 2, "begins with 'dead'", "export", "x.json", "3f2a", "dead")
    assert len(on_disk(held)) == 2


def test_nothing_is_forgotten_by_accident(held, capsys):
    refused(capsys, 2, "name the keys that fusion gate list shows, or give --all", "clear")
    refused(capsys, 2, "--all leaves no key to name", "clear", "--all", "3f2a")
    assert len(on_disk(held)) == 2


def test_answers_are_forgotten(held, capsys):
    _, out, _ = gate(capsys, "clear", "3f2b")
    assert "3f2b1111" in out and out.endswith(f"1 answer removed from {held.folder}\n")
    assert {*on_disk(held)} == {NORM.key}
    (held.folder / f"{'9' * 32}.json").write_text("{")
    assert "1 answer and 1 damaged file removed" in gate(capsys, "clear", "--all")[1]
    assert not on_disk(held) and not [*held.folder.iterdir()]


def test_answers_go_to_another_store(held, capsys, tmp_path, monkeypatch):
    file = tmp_path / "answers.json"
    assert "2 answers" in gate(capsys, "export", file)[1]
    assert read_answers(file) == [NORM, SOFTMAX]
    monkeypatch.setattr(gate_store, "machines", lambda: [H200])
    monkeypatch.setattr(answers, "cache_folder", lambda: str(tmp_path / "other"))
    _, out, _ = gate(capsys, "import", file)
    said = "2 answers read: 2 new, 0 newer than the known, 0 known; 1 of another GPU or version"
    assert said in out
    assert on_disk(store()) == {NORM.key: NORM, SOFTMAX.key: SOFTMAX}
    assert "0 new, 0 newer than the known, 2 known" in gate(capsys, "import", file)[1]
    gate(capsys, "clear", "--all")
    refused(capsys, 1, "there is no answer to export", "export", file)


def test_an_older_answer_replaces_nothing(held, capsys, tmp_path):
    file = tmp_path / "answers.json"
    older = dataclasses.replace(NORM, date="2026-11-19", verdict="slower")
    newer = dataclasses.replace(SOFTMAX, date="2026-11-22", verdict="same")
    write_answers(file, [older, newer])
    assert "0 new, 1 newer than the known, 1 known" in gate(capsys, "import", file)[1]
    assert on_disk(held) == {NORM.key: NORM, SOFTMAX.key: newer}


@pytest.mark.parametrize(
    "wrong, said",
    [
        (dict(key="../../../.bashrc"), "'../../../.bashrc' is no key"),
        (dict(ratio=float("nan")), "a time or a ratio is no number"),
        (dict(plain_ms=-1.0), "or negative"),
        (dict(verdict=""), "'' is no verdict"),
        (dict(take=("kernel", "", "")), "who computes a site"),
        (dict(date="yesterday"), "'yesterday'"),
        (dict(about={}), "of which GPU and versions"),
        (dict(why="\x1b[2J"), "cannot be printed"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_a_wrong_answer_refuses_the_whole_file(held, capsys, tmp_path, wrong, said):
    file = tmp_path / "answers.json"
    good = dataclasses.replace(SOFTMAX, key="5" * 32)
    bad = {**json.loads(NORM.to_json()), "key": "e" * 32, **wrong}
    text = json.dumps({"answers": [json.loads(good.to_json()), bad]})
    file.write_text(text)
    refused(capsys, 2, said, "import", file)
    assert {*on_disk(held)} == {NORM.key, SOFTMAX.key}


def test_a_file_that_is_cut_short_or_none_of_ours(held, capsys, tmp_path):
    file = tmp_path / "answers.json"
    write_answers(file, [dataclasses.replace(NORM, key="e" * 32)])
    whole = file.read_text()
    deep, huge = "[" * 100_000, whole.replace("0.159", "1" + "0" * 400)
    for text in (whole[:-9], whole[: len(whole) // 2], "", "{}", "[]", "\x00", deep, huge):
        file.write_text(text)
        refused(capsys, 2, "is not what fusion gate export writes: ", "import", file)
    refused(capsys, 2, "cannot read", "import", tmp_path / "nowhere.json")
    refused(capsys, 2, "cannot write", "export", tmp_path / "nowhere" / "x.json")
    assert len(on_disk(held)) == 2


WITH_STORE = ["list", "clear --all", "show 3f2a", "export x.json"]


@pytest.mark.parametrize("command", WITH_STORE)
def test_a_store_that_cannot_be_used(held, capsys, monkeypatch, command):
    argv = command.split()
    os.chmod(held.folder, 0o777)
    refused(capsys, 1, f"others may write to {held.folder} (chmod go-w)", *argv)
    os.chmod(held.folder, 0o700)
    with monkeypatch.context() as patched:
        patched.setattr(os, "access", lambda path, mode: not mode & os.R_OK)
        refused(capsys, 1, f"cannot be read: {held.folder}", *argv)
    with monkeypatch.context() as patched:
        patched.setattr(answers, "cache_folder", cache_folder)
        with torch._inductor.config.patch(force_disable_caches=True):
            refused(capsys, 1, "Inductor's caches are off", *argv)
    assert len(on_disk(held)) == 2


def test_a_store_of_somebody_else(held, capsys, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    if os.stat(held.folder).st_uid == 0:  # whom everybody trusts
        os.chown(held.folder, 54321, -1)
    refused(capsys, 1, "belongs to another user", "list")
    found = checks.answers()
    assert not found.ok and "belongs to another user" in found.found


def test_what_can_only_be_read_is_not_changed(held, capsys, monkeypatch, tmp_path):
    file = tmp_path / "answers.json"
    write_answers(file, [NORM])
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    for argv in (["clear", "--all"], ["clear", "3f2a"], ["import", file]):
        refused(capsys, 1, f"cannot be kept: {held.folder} is not writable", *argv)
    assert gate(capsys, "list")[0] == 0
    found = checks.answers()
    assert not found.ok and "is not writable" in found.found and "CACHE_DIR" in found.advice


def test_a_pattern_is_shown_although_the_store_is_off(held, capsys, monkeypatch):
    os.chmod(held.folder, 0o777)
    _, out, _ = gate(capsys, "show", "softmax")
    assert "others may write to" in out and "Decided by" in out and "Measured:" not in out
    monkeypatch.setattr(answers, "cache_folder", cache_folder)
    with torch._inductor.config.patch(force_disable_caches=True):
        status, out, _ = gate(capsys, "show", "softmax")
        assert status == 0 and "caches are off" in out and "Decided by" in out
        assert gate(capsys, "list", "--seed")[0] == 0
        assert checks.answers().ok and "caches are off" in checks.answers().found


def test_the_doctor_counts_answers(held, monkeypatch):
    monkeypatch.setattr(gate_store, "machines", lambda: [H200])
    assert checks.answers().found == f"2 answers, 1 of another GPU or version, in {held.folder}"


MINE = """
import torch

class Mine(torch.nn.Module):
    def forward(self, x):
        return torch.softmax(x, -1)

class Wrong(torch.nn.Module):
    def forward(self, x):
        return x.view(7, 7)

x = torch.ones(4, 8)
def build(): return Mine(), x
def wrong(): return Wrong(), x
"""


class Measuring(Collector):
    """In place of the backend: it measures at once, and Inductor compiles nothing."""

    def __init__(self):
        super().__init__({"fusion.gate": "measure"})

    def __call__(self, gm, example_inputs, *, options):
        assert options == {"fusion.gate": "measure"}
        run = super().__call__(gm, example_inputs)
        record = self.report.graphs[-1]
        record.measured, record.measure_s = 2, 3.25
        reporting.add(record)
        store().put(dataclasses.replace(NORM, key="c" * 32))
        return run


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop("mine", None)


def test_a_model_is_measured(held, mine, capsys, monkeypatch):
    monkeypatch.setattr(gate_measure, "gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(gate_measure, "fusion", Measuring())
    reporting.add(GraphRecord(9, measured=5, measure_s=60.0))  # before
    status, out, _ = gate(capsys, "measure", "mine.py:build")
    assert status == 0 and "2 kinds of regions measured in 3.2 s" in out
    listed = out.partition("regions measured")[2]
    assert "cccccccc" in listed and "3f2a" not in listed
    assert "1 without a certain answer" in listed and str(held.folder) in listed
    refused(capsys, 1, "mine:wrong run on its inputs raised", "measure", "mine.py:wrong")
    refused(capsys, 2, "mine:build: no parameter requires", "measure", "mine.py:build", "--train")
    refused(capsys, 2, "there is no file", "measure", "yours.py:build")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_can_be_measured(mine, capsys):
    refused(capsys, 1, "there is no CUDA GPU that torch can use", "measure", "mine.py:build")


def test_what_is_measured_could_be_kept(held, mine, capsys, monkeypatch):
    monkeypatch.setattr(gate_measure, "gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(gate_measure, "compile_and_run", lambda *model: pytest.fail("measured"))
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    refused(capsys, 1, "is not writable", "measure", "mine.py:build")


# What a report says.


def told(answer: Answer, take: str, together: bool = False) -> str:
    """The sentence of a report about a site."""
    forward, _, backward = take.partition("/")
    fused, said = bool(take), reason(answer, take, together)
    return str(Site("softmax", "mine.py:3", fused, said, forward, backward))


def test_an_answer_is_a_sentence_of_the_report():
    today = datetime.date.today().isoformat()
    one = dataclasses.replace(NORM, date=today, more_bytes=0)
    said = "(0.071 ms, Inductor 0.159 ms here, measured today)"
    assert told(one, "kernel/kernel").endswith(f"  forward kernel, backward kernel {said}")
    said = "  left to Inductor: 0.94 times as fast in its region, measured on 2026-11-21"
    assert told(SOFTMAX, "").endswith(said)
    assert "with its neighbours, 12 MB more kept" in told(NORM, "kernel/kernel", True)
    # the ratio is that of the other sites
    said = (
        "left to Inductor: its region is faster with its other sites alone, measured on 2026-11-20"
    )
    assert told(NORM, "", True).endswith(said)
    seeded = dataclasses.replace(SOFTMAX, seed=True)
    assert told(seeded, "").endswith("0.94 times as fast in its region, measured on an NVIDIA L40S")
    lost = dataclasses.replace(SOFTMAX, plain_ms=0.0, why="result 0 is another")
    assert "left to Inductor: result 0 is another, measured on 2026" in told(lost, "")
    estimated = "fused on an estimate from bytes and launches; it is large"
    assert unmeasured("it is large", True) == estimated
    assert unmeasured("it is large", False) == "left to Inductor: it is large"


def test_the_report_says_what_was_measured_and_what_to_do():
    late = "left to Inductor: not measured, the 20 s of fusion.measure_s are used up"
    sites = [Site("softmax", f"mine.py:{i}", False, late, cause=UNPROFITABLE) for i in (3, 4)]
    graphs = [GraphRecord(9), GraphRecord(9, sites=sites, measured=1, measure_s=12.34)]
    text = Report(graphs).text()
    assert "\nmeasured\n  graph 1: 1 distinct region in 12.3 s\n" in text
    words = " ".join(text.split())
    assert "2 sites could not be measured in the seconds of fusion.measure_s. Raise it" in words
    assert "graph 1: 1 distinct region in 12.3 s</p>" in Report(graphs).to_html()
    found = json.loads(Report(graphs).to_json())["graphs"][1]
    assert (found["measured"], found["measure_s"]) == (1, 12.34)
    nothing = Report([GraphRecord(9)])
    assert "measured" not in nothing.text() and "measured" not in nothing.to_html()
