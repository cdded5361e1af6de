"""Kernels are compiled several at a time before a graph depends on them; torch's analysis of them is remembered."""

import json
import os
import subprocess
import sys

import pytest

CASES = (
    "overlap",
    "threads_see_no_modes",
    "each_launch_once",
    "a_failure_is_told_at_its_site",
    "a_smaller_site_takes_the_place",
    "what_failed_does_not_count_for_the_limit",
    "triton_itself_refuses",
    "an_interrupt_waits_for_nobody",
    "writes_are_analysed_once",
)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """A case's outcome is its traceback, or nothing."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    command = [sys.executable, "-m", "tests.trial_cases"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_every_case_is_named(outcomes):
    assert set(outcomes) == set(CASES)


@pytest.mark.parametrize("case", CASES)
def test_trial(outcomes, case):
    assert not outcomes[case], outcomes[case]
