"""In whole models, in evaluation and in training, everything that their sources hold is found, and nothing else."""

import pytest

pytest.importorskip("transformers")

from benchmarks.recognition import KINDS, SUBJECTS, found


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", SUBJECTS)
def test_counts(name, training):
    subject = SUBJECTS[name]
    expected = {kind: subject.expected.get(kind, 0) for kind in KINDS}
    assert found(subject, training) == expected
