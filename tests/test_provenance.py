"""Every figure names the commit that it was measured at, and that commit is in the repository's
history.
"""

import json
import re
import subprocess

import pytest
import torch

from benchmarks import readme
from benchmarks.pages.quoted import pages
from benchmarks.records import provenance, runs
from benchmarks.records.provenance import ROOT, history, missing, revision

FILES = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
COMMIT = re.compile(r"\b(?=[0-9a-f]*[0-9])(?=[0-9a-f]*[a-f])[0-9a-f]{7,40}\b")
CODE, COMMAND = "fusion_backend/kernel.py", "benchmarks.patterns"


@pytest.mark.parametrize("path", [*pages(), *FILES], ids=lambda path: path.name)
def test_every_revision_is_in_the_history(path):
    if history() is None:
        pytest.skip("the repository's history is not at hand: no git, or a shallow clone")
    text = path.read_text()
    named = json.loads(text).get("revision", "").split("; ") if path.suffix == ".json" else []
    named += [
        name
        for found in re.findall(r"revision ([^`]*?): `", text)
        for name in " ".join(found.split()).split("; ")
    ]
    named += COMMIT.findall(text)
    assert not missing("; ".join(filter(None, named)))


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A checkout with one commit, and a function that runs git in it."""
    monkeypatch.delenv(provenance.TOLD, raising=False)

    def git(*arguments):
        who = ("-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
        done = subprocess.run(
            ["git", "-C", str(tmp_path), *who, *arguments], capture_output=True, text=True
        )
        assert not done.returncode, done.stderr
        return done.stdout.strip()

    write(tmp_path / CODE, "one")
    write(tmp_path / "benchmarks" / "results" / "run.json", "{}")
    for arguments in (("init",), ("add", "."), ("commit", "-m", "one")):
        git(*arguments)
    return tmp_path, git


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_revision_of_a_checkout(repository):
    root, git = repository
    head = git("rev-parse", "HEAD")[:12]
    assert revision(root) == head and not missing(head, root)
    write(root / "benchmarks" / "results" / "run.json", '{"rows": []}')  # as a run writes it
    write(root / "README.md", "other figures")
    assert revision(root) == head


@pytest.mark.parametrize(
    "file", [CODE, "fusion_backend/new.py", "patterns/new.py", "benchmarks/work.py"]
)
def test_changed_and_new_code_is_told(repository, file):
    root, git = repository
    write(root / file, "two")
    changed = revision(root)
    assert changed == git("rev-parse", "HEAD")[:12] + "+changes"
    assert missing(changed, root) == [changed]  # what no commit holds nobody can look up


def test_a_revision_that_is_told_is_checked(repository, monkeypatch):
    root, git = repository
    head = git("rev-parse", "HEAD")
    monkeypatch.setenv(provenance.TOLD, head[:7])
    assert revision(root) == head[:12]
    monkeypatch.setenv(provenance.TOLD, head[:7] + "d5a5a")
    with pytest.raises(ValueError, match="this checkout is at"):
        revision(root)
    monkeypatch.setattr(runs, "revision", lambda: revision(root))
    with pytest.raises(SystemExit, match=provenance.TOLD):
        runs.machine(torch.device("cpu"), COMMAND)


def test_a_copy_without_git(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setenv(provenance.TOLD, "8cccfab3153c")
    assert revision(tmp_path) == "8cccfab3153c (told)"
    monkeypatch.setattr(runs, "revision", lambda: revision(tmp_path))
    assert runs.machine(torch.device("cpu"), COMMAND)["revision"] == "8cccfab3153c (told)"
    monkeypatch.delenv(provenance.TOLD)
    assert (
        revision(tmp_path) is None
        and history(tmp_path) is None
        and not missing("0000000", tmp_path)
    )


def test_what_is_missing(repository):
    root, git = repository
    first = git("rev-parse", "HEAD")
    write(root / CODE, "two")
    git("commit", "-am", "two")
    second = git("rev-parse", "HEAD")
    assert not missing(f"{first[:12]}; {second[:7]} (told); {second}", root)
    assert missing(f"{first[:7]}d5a5a; {second[:7]}; {second[:6]}; main", root) == [
        f"{first[:7]}d5a5a",
        second[:6],
        "main",
    ]
    git("reset", "--hard", first)
    assert missing(second, root) == [second]  # git has it, and HEAD does not go back to it


def test_a_commit_that_was_squashed(repository, monkeypatch):
    root, git = repository
    head, lost = git("rev-parse", "HEAD"), "8cccfabd5a5a"
    monkeypatch.setattr(provenance, "SQUASHED", {lost: head[:12]})
    assert not missing(f"{lost} (told)", root)
    monkeypatch.setattr(provenance, "SQUASHED", {lost: "8cccfabd5a5b"})
    assert missing(f"{lost} (told)", root) == [lost]


def test_no_page_quotes_a_run_of_nowhere(repository, capsys):
    root, git = repository
    about = dict(
        gpu=None,
        torch="2",
        triton="3",
        date="2026-01-01",
        command="python -m x",
        revision="8cccfabd5a5a",
    )
    runs.Run("models", about, []).save(root / "run.json")
    page = root / "README.md"
    page.write_text("<!-- figures: source run.json -->\n<!-- end of figures -->\n")
    assert (
        readme.main([], root) == 2
        and "run.json names 8cccfabd5a5a, which is no commit" in capsys.readouterr().err
    )
    runs.Run("models", about | dict(revision=git("rev-parse", "HEAD")[:12]), []).save(
        root / "run.json"
    )
    assert readme.main([], root) == 0 and git("rev-parse", "HEAD")[:12] in page.read_text()
