"""Measured answers on disk: whole or not there, whatever runs beside and is killed."""

import dataclasses
import json
import multiprocessing
import os
import threading

import pytest

from benchmarks import rekey
from benchmarks.rekey import with_new_key
from fusion_backend.frontends.loading import patterns
from fusion_backend.measure.store import (
    Answer,
    Store,
    answer_of,
    read_answers,
    seed,
    write_answers,
)

ANSWER = Answer(
    "k1", ("rms_norm", "gelu"), ("kernel/kernel", ""), 0.2, 0.1, 2.0, 1.9, 2.1, "faster",
    more_bytes=5, date="2026-11-23", about={"gpu": "NVIDIA H200"},
)  # fmt: skip


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "measured")


def again(store):
    """The same folder, as another process sees it."""
    return Store(store.folder)


def test_an_answer_is_read_as_it_was_written(store):
    assert store.put(ANSWER) == ""
    assert again(store).get("k1") == ANSWER
    assert [*again(store).all()] == [ANSWER]


def test_what_nobody_measured_is_none(store):
    assert store.get("k1") is None and store.empty
    store.put(ANSWER)
    assert not again(store).empty and again(store).get("other") is None


def test_an_answer_that_is_cut_off_at_any_byte_is_none(store):
    store.put(ANSWER)
    path = store.folder / "k1.json"
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert again(store).get("k1") is None, whole[:length]
    path.write_bytes(whole)
    assert again(store).get("k1") == ANSWER


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"take": ["kernel/kernel"]},
        {"take": "kernel"},
        {"ratio": "fast"},
        {"ratio": None},
        {"verdict": 1},
        {"about": []},
        {"unknown": 1},
        {"sites": [1, 2]},
        {"whole": 1},
        {"ratio": 10**400},
        {"key": "k2"},
    ],
    ids=str,
)
def test_an_answer_of_another_form_is_none(store, change):
    store.put(ANSWER)
    path = store.folder / "k1.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert again(store).get("k1") is None


@pytest.mark.parametrize("text", ["", "[]", "null", "3", '{"format": 1}', "\x00"])
def test_what_is_no_answer_raises_a_value_error(text):
    with pytest.raises(ValueError):
        answer_of(json.loads(text))


def test_json_that_is_nested_too_deeply_is_no_answer(store):
    store.put(ANSWER)
    (store.folder / "k1.json").write_text("[" * 100_000)
    assert again(store).get("k1") is None


def test_where_nothing_can_be_written_the_answer_holds_for_this_process(tmp_path):
    (tmp_path / "file").write_text("")
    store = Store(tmp_path / "file" / "measured")
    assert "Not a directory" in store.put(ANSWER)
    assert store.get("k1") == ANSWER and again(store).get("k1") is None
    assert Store(None).put(ANSWER) == "Inductor's caches are off"


def test_what_others_may_write_is_not_read(store):
    store.put(ANSWER)
    os.chmod(store.folder, 0o777)
    assert again(store).get("k1") is None
    assert "others may write" in again(store).put(ANSWER)


def test_a_link_is_not_followed(store, tmp_path):
    other = Store(tmp_path / "other")
    other.put(ANSWER)
    store.folder.mkdir(mode=0o700)
    (store.folder / "k1.json").symlink_to(other.folder / "k1.json")
    assert store.get("k1") is None


def test_clearing(store):
    store.put(ANSWER)
    store.put(Answer("k2", (), ()))
    assert store.clear(["k2", "k3"]) == 1
    assert store.get("k2") is None and again(store).get("k1") == ANSWER
    assert store.clear() == 1 and store.empty and again(store).empty


def test_export_and_import(tmp_path):
    file = tmp_path / "answers.json"
    write_answers(file, [ANSWER, Answer("a", (), ())])
    assert read_answers(file) == [Answer("a", (), ()), ANSWER]
    assert all(a.seed for a in read_answers(file, seed=True))
    file.write_text(file.read_text()[:-20])
    with pytest.raises(ValueError):
        read_answers(file)
    file.write_text("{}")
    with pytest.raises(ValueError, match="no list of answers"):
        read_answers(file)


def write_often(folder, number):
    store = Store(folder)
    for i in range(200):
        store.put(Answer("k", ("p",) * (1 + i % 7), ("x" * number,) * (1 + i % 7), why="y" * i))


def test_processes_and_threads_that_write_at_once_leave_whole_answers(store):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_often, args=(store.folder, n)) for n in range(2)]
    writers += [threading.Thread(target=write_often, args=(store.folder, n)) for n in range(8)]
    for w in writers:  # the processes first: a fork should find no other thread
        w.start()
    seen = 0
    while any(w.is_alive() for w in writers):
        found = again(store).get("k")
        seen += found is not None
        path = store.folder / "k.json"
        assert found is not None or not path.exists(), path.read_text()
    for w in writers:
        w.join()
    assert seen and again(store).get("k").sites


def test_a_process_that_is_killed_while_it_writes_leaves_no_half_answer(store):
    store.put(ANSWER)
    context = multiprocessing.get_context("fork")
    for _ in range(5):
        writer = context.Process(target=write_often, args=(store.folder, 1))
        writer.start()
        while writer.is_alive() and again(store).get("k") is None:
            pass
        writer.kill()
        writer.join()
        assert again(store).get("k") is not None and again(store).get("k1") == ANSWER
        store.clear(["k"])


def test_the_answers_that_ship_are_about_the_code_that_ships():
    """An answer is found by a digest of this code. If this test fails, a pattern or a kernel has
    changed: measure the answers again (docs/gate.md), or, if what was timed is the same, compute
    their keys anew: `python -m benchmarks.rekey --write`.
    """
    patterns()
    shipped = seed().values()
    assert len(shipped) >= 60 and any("gated_mlp" in a.about["code"] for a in shipped)
    assert [with_new_key(a) for a in shipped] == [*shipped]


def test_stale_answers_are_named_and_get_new_keys(monkeypatch, tmp_path, capsys):
    """As after a change of a kernel that leaves the timed code as it was."""
    patterns()
    code = "masked_attention", "0" * 12
    old = [
        dataclasses.replace(a, key="old", about=a.about | {"code": a.about["code"] | dict([code])})
        for a in seed().values()
        if code[0] in a.about["code"]
    ][:1]
    kept = [a for a in seed().values() if "layer_norm" in a.sites][:1]
    monkeypatch.setattr(rekey, "seed", lambda: {a.key: a for a in (*old, *kept)})
    monkeypatch.setattr(rekey, "SEED", tmp_path / "seed.json")
    assert rekey.main([]) == 1 and not rekey.SEED.exists()
    printed = capsys.readouterr().out
    assert "old: " in printed and "1 of 2 answers are about other code" in printed
    assert rekey.main(["--write"]) == 0
    found = {a.key: a for a in read_answers(rekey.SEED, seed=True)}
    assert set(found) == {a.key for a in kept} | {with_new_key(old[0]).key} and "old" not in found
    assert all(found[key] == seed()[key] for key in found)
