"""The generated page is current, and the code in the documents runs."""

import re
from pathlib import Path

import pytest

from fusion_backend.backend import patterns
from fusion_backend.catalogue import catalogue

ROOT = Path(__file__).parent.parent
BUILT_IN = ROOT / "patterns"


def test_catalogue_is_current():
    ours = [p for p in patterns() if Path(p.file).parent == BUILT_IN or "fusion_backend" in p.file]
    assert (ROOT / "docs" / "catalogue.md").read_text() == catalogue(ours), "run `make docs`"


def test_every_linked_file_exists():
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


@pytest.mark.parametrize("page", ["README.md"])
def test_quickstart_and_custom_pattern_are_short(page):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)
    assert blocks and len(blocks[0].strip().splitlines()) <= 20
