"""Kernels are compiled several at a time before a graph depends on them; torch's analysis of them
is remembered.
"""

import json
import re

import pytest

from tests.without_interpreter import output_of

CASES = (
    "overlap",
    "threads_see_no_modes",
    "each_launch_once",
    "a_failure_is_told_at_its_site",
    "a_smaller_site_takes_the_place",
    "what_failed_does_not_count_for_the_limit",
    "triton_itself_refuses",
    "no_constant_of_more_than_32_bits",
    "an_interrupt_waits_for_nobody",
    "writes_are_analysed_once",
    "no_more_launches_than_stated",
)


def printed(folder, *command: str) -> str:
    """What a module prints in a process where kernels are not interpreted and none has been
    compiled.
    """
    return output_of("-m", *command, TRITON_CACHE_DIR=str(folder))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """A case's outcome is its traceback, or nothing."""
    return json.loads(
        printed(tmp_path_factory.mktemp("triton"), "tests.trial_cases").splitlines()[-1]
    )


def test_every_case_is_named(outcomes):
    assert set(outcomes) == set(CASES)


@pytest.mark.parametrize("case", CASES)
def test_trial(outcomes, case):
    assert not outcomes[case], outcomes[case]


@pytest.mark.full
def test_trial_cost_prints_every_kernel(tmp_path):
    text = printed(
        tmp_path,
        "benchmarks.trial_cost",
        "plain_bert",
        "--tiny",
        "--mode",
        "infer",
        "--threads",
        "2",
    )
    assert re.search(r"plain_bert infer: [1-9]\d* sites, [1-9]\d* distinct launches", text), text
    assert "flash_kernel" in text and "threads: 2" in text, text
