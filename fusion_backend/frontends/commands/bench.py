"""`fusion bench ...`: `python -m benchmarks.models ...` of the checkout, from any folder."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

from fusion_backend.frontends.commands.failure import Failure

CHECKOUT = Path(__file__).parents[3]  # where the package is not installed as a copy
MISSING = (
    "the benchmarks are not part of the installed package: clone the repository, run "
    "pip install -e '.[bench]' there, and then fusion bench from any folder"
)


def run(argv: list[str]) -> int:
    """Run the command with these arguments. Raises Failure where there is no checkout."""
    package = CHECKOUT / "benchmarks" / "__init__.py"
    if not (package.parent / "models.py").exists():
        raise Failure(MISSING, 2)
    # by its place: a folder of the user's may have a package of this name
    if "benchmarks" not in sys.modules:
        spec = importlib.util.spec_from_file_location("benchmarks", package)
        sys.modules["benchmarks"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["benchmarks"])
    return importlib.import_module("benchmarks.models").main(argv, "fusion bench")
