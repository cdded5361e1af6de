"""The faults that `python -m tests.mutations` plants are still of this code, and what catches them
runs by default.
"""

import importlib

import pytest

from tests.mutations import MUTATIONS, ROOT
from tests.planted import MODULES
from tests.selection import LEFT_OUT, left_out


def test_every_fault_has_a_name_of_its_own():
    assert sum(len(module.FAULTS) for module in MODULES) == len(MUTATIONS)


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_text_to_be_replaced_stands_once_in_its_file(name):
    mutation = MUTATIONS[name]
    assert (ROOT / mutation.file).read_text().count(mutation.old) == 1
    assert all((ROOT / path.partition("::")[0]).exists() for path in mutation.tests.split())


def runs_by_default(path: str) -> bool:
    """Of a folder or a file: all of it, or the sample that `tests.mutations` runs, too. Of a test:
    its first case, or more.
    """
    if left_out(path):
        return False
    file, _, function = path.partition("::")
    if not function:
        return not any(name.startswith(file) for name in LEFT_OUT)
    module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    marks = [mark.name for mark in getattr(getattr(module, function), "pytestmark", ())]
    return "full" not in marks


@pytest.mark.parametrize("name", MUTATIONS)
def test_what_catches_it_runs_by_default(name):
    """At least one of the tests that the mutation names."""
    assert any(map(runs_by_default, MUTATIONS[name].tests.split()))


def test_what_is_left_out_does_not_run_by_default():
    assert not any(map(runs_by_default, LEFT_OUT))
    of_full = "tests/test_template_cache.py::test_a_second_process_reads_the_templates"
    assert not runs_by_default(of_full) and runs_by_default(of_full.partition("::")[0])
