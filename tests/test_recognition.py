"""In whole models, however they are run, everything that their sources hold is found, and nothing
else.
"""

import itertools
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from benchmarks.compiler.recognition import SETTINGS, expected, found
from benchmarks.compiler.recognition_page import page, release, section, sections_of
from benchmarks.subjects.whole_models import SUBJECTS
from tests.oracle.harness import TORCH
from tests.selection import only_full

PAGE = Path(__file__).parent.parent / "docs" / "recognition.md"
# in every setting; each other model in training and one more, with `--full` in evaluation too
EVERY = ("llama", "bert", "t5")
OTHER = itertools.cycle(list(SETTINGS)[2:])
CASES = [
    (pytest.param if name in EVERY or setting != "eval" else only_full)(name, setting)
    for name in SUBJECTS
    for setting in (SETTINGS if name in EVERY else ("eval", "train", next(OTHER)))
]


@pytest.mark.parametrize("name, setting", CASES)
def test_counts(name, setting):
    # a layer that Dynamo left there
    in_python = not (name == "t5" and setting == "checkpoint" and TORCH >= (2, 15))
    want = expected(SUBJECTS[name], setting if in_python else "", release())
    assert found(SUBJECTS[name], SETTINGS[setting]) == want


def test_page_is_current():
    """Of every release on the page what the sources hold was found, but for what is known to be
    missed.
    """
    releases = sections_of(PAGE.read_text())
    assert len(releases) >= 2
    for title in releases:
        counts = {
            (name, setting): expected(SUBJECTS[name], setting, title.split()[1].rstrip(","))
            for name, setting in itertools.product(SUBJECTS, SETTINGS)
        }
        releases[title] = section(counts)
    assert PAGE.read_text() == page(releases), (
        "run `python -m benchmarks.recognition --out docs/recognition.md`"
    )
