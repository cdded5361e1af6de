"""The command `fusion`; `python -m fusion_backend` is the same."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from types import ModuleType

from fusion_backend.frontends.commands.failure import Failure

DESCRIPTION = "fusion: a torch.compile backend that fuses patterns into Triton kernels"
COMMANDS = {
    "explain": "what would be fused in your model, what would not, and why",
    "doctor": "check the installation, and print what a bug report needs",
    "gate": "which patterns are fused by default, and on what evidence",
    "catalogue": "print docs/catalogue.md, which lists all patterns",
    "bench": "time your model, or others, under eager, plain Inductor and this backend",
}
STATUS = (
    "exit status: 0; 1 when something failed; 2 when it was asked for wrongly; 130 after Ctrl-C"
)


def main(argv: list[str] | None = None) -> int:
    """Run a command. Returns its exit status; an error is one line on standard error."""
    argv = sys.argv[1:] if argv is None else argv
    whole = "--traceback" in argv
    try:
        if argv[:1] == ["bench"]:  # which parses its own arguments
            return module_of("bench").run(argv[1:])
        arguments = parser_for(argv).parse_args(argv)
        status = module_of(arguments.command).run(arguments)
        sys.stdout.flush()  # here, where a reader that has left is no error
        return status
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of the output has closed it, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if whole:
            traceback.print_exception(error)
        first = next(iter(str(error).splitlines()), "")
        text = str(error) if isinstance(error, Failure) else f"{type(error).__name__}: {first}"
        hint = "" if whole or not error_inside(error) else " (--traceback shows the whole error)"
        print(f"fusion {argv[0]}: {text}{hint}", file=sys.stderr)
        return error.status if isinstance(error, Failure) else 1


def error_inside(error: Exception) -> bool:
    """Does the error have a traceback that says more than its sentence?"""
    return not isinstance(error, Failure) or error.__cause__ is not None


def module_of(command: str) -> ModuleType:
    return importlib.import_module(f"fusion_backend.frontends.commands.{command}")


def parser_for(argv: list[str]) -> argparse.ArgumentParser:
    """The parser, with the arguments of the chosen command alone: the others need not be
    imported.
    """
    parser = argparse.ArgumentParser(prog="fusion", description=DESCRIPTION, epilog=STATUS)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, what in COMMANDS.items():
        if argv[:1] != [name]:
            commands.add_parser(name, help=what)
            continue
        module = module_of(name)
        one = commands.add_parser(name, help=what, description=module.DESCRIPTION, epilog=STATUS)
        module.add_arguments(one)
        one.add_argument("--traceback", action="store_true", help="show errors as a whole")
    return parser
