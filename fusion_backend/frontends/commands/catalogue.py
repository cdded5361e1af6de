"""`fusion catalogue`: docs/catalogue.md, on standard output."""

from __future__ import annotations

import argparse

from fusion_backend.frontends.catalogue import catalogue
from fusion_backend.frontends.loading import patterns

DESCRIPTION = "Print a page about all patterns: docs/catalogue.md, and the patterns of others."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None besides those of every command."""


def run(arguments: argparse.Namespace) -> int:
    print(catalogue(patterns()), end="")
    return 0
