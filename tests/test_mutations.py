"""The faults that `python -m tests.mutations` plants are still of this code."""

import pytest

from tests.mutations import MUTATIONS, ROOT


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_text_to_be_replaced_stands_once_in_its_file(name):
    mutation = MUTATIONS[name]
    assert (ROOT / mutation.file).read_text().count(mutation.old) == 1
    assert all((ROOT / path.partition("::")[0]).exists() for path in mutation.tests.split())
