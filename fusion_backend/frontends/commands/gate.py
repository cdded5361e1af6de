"""`fusion gate`: what the gate does with each pattern, and the answers that were measured."""

from __future__ import annotations

import argparse
from pathlib import Path

from fusion_backend.frontends.commands.asked_model import DTYPES
from fusion_backend.frontends.commands.failure import Failure
from fusion_backend.frontends.commands.gate_files import clear, export, read_in
from fusion_backend.frontends.commands.gate_measure import measure
from fusion_backend.frontends.commands.gate_measured import line, listed, shown
from fusion_backend.frontends.commands.gate_store import resolved, shipped, trouble
from fusion_backend.frontends.commands.gate_table import section, table
from fusion_backend.frontends.loading import patterns
from fusion_backend.measure.store import store
from fusion_backend.ops.rule import Rule

DESCRIPTION = """Without an action: what the tables of the patterns make the default gate
(fusion.gate=auto) do. The functions of the pattern that the gate asks (replacement, guard,
worthwhile) are asked here about the pattern's example inputs, without its optional arguments, as if
on an H200 and in a graph of nothing else. Other sizes and arguments, and operators next to the
site, may change the answer: `fusion explain` gives it for your model. The actions are about
measured answers, which go before the tables."""
KEY = "the first characters of a key, as `fusion gate list` shows it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION")

    def action(name: str, what: str):
        one = actions.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
        shows = "show errors as a whole"
        one.add_argument("--traceback", action="store_true", default=argparse.SUPPRESS, help=shows)
        return one.add_argument

    add = action("list", "the measured answers of this user, a line each")
    add("patterns", nargs="*", metavar="PATTERN", help="those with one of these patterns alone")
    add("--seed", action="store_true", help="also the answers that ship with the package")
    add("--json", action="store_true", help="all fields, as JSON")
    add = action("show", "all that is known of one measured answer, or of a pattern")
    add(
        "what", nargs="?", metavar="KEY|PATTERN", help=f"{KEY}; or a pattern; default: all patterns"
    )
    add = action("clear", "forget measured answers")
    add("keys", nargs="*", metavar="KEY", help=KEY)
    add("--all", action="store_true", help="all of them, and files that are no answers")
    add = action("export", "write measured answers into a file, for another user or machine")
    add("file", type=Path, metavar="FILE", help="is overwritten where it exists")
    add("keys", nargs="*", metavar="KEY", help=f"{KEY}; default: all answers")
    add = action("import", "add the answers of a file that `fusion gate export` wrote")
    add("file", type=Path, metavar="FILE", help="is refused as a whole where it is damaged")
    add = action("measure", "compile a model and run it once, and measure all that is possible")
    add("spec", metavar="SPEC", help="path/to/file.py:build or package.module:build")
    add("--train", action="store_true", help="the training step: with gradients and the loss")
    add("--dtype", choices=DTYPES, help="cast model and inputs; default: as build() makes them")


def run(arguments: argparse.Namespace) -> int:
    if arguments.action is None:
        print(table(patterns()))
    elif arguments.action == "list":
        print(listed(arguments.patterns, arguments.seed, arguments.json))
    elif arguments.action == "show":
        print(all_of(arguments.what))
    elif arguments.action == "clear":
        print(clear(arguments.keys, arguments.all))
    elif arguments.action == "export":
        print(export(arguments.file, arguments.keys))
    elif arguments.action == "import":
        print(read_in(arguments.file))
    else:
        measure(arguments)
    return 0


def all_of(what: str | None) -> str:
    """The text of `show`, about a pattern, a key, or all patterns."""
    known = {p.name: p for p in patterns()}
    if what is None:
        return "\n\n".join(map(with_measured, known.values()))
    if what in known:
        return with_measured(known[what])
    if not set(what) <= set("0123456789abcdef"):  # what a key consists of
        raise Failure(f"there is no pattern {what}; there is {', '.join(known)}", 2)
    if why := trouble(store()):
        raise Failure(why, 1)
    held = {a.key: a for a in (*shipped(), *store().all())}
    return "\n\n".join(map(shown, resolved([what], held.values())))


def with_measured(rule: Rule) -> str:
    """The evidence of a pattern, and its measured answers, those of this user first."""
    why = trouble(store())
    found = [a for a in (*(() if why else store().all()), *shipped()) if rule.name in a.sites]
    lines = [section(rule)]
    lines += [f"  {why[0].upper()}{why[1:]}."] if why else []
    lines += ["  Measured:", *(f"    {line(a)}" for a in found)] if found else []
    return "\n".join(lines)
