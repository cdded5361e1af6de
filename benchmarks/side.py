"""One of the two processes of benchmarks.compare: it compiles and times work of its revision.

It reads requests from stdin, a JSON line each, and answers each with a JSON line on stdout:
{"do": "prepare", "work": ...} compiles the work, {"do": "time", "calls": n} times it. An answer
with "error" says why that failed.
"""

from __future__ import annotations

import sys


def forget_installation() -> None:
    """An editable installation finds modules that this revision lacks in the checkout that it was
    installed from: a side must not mix the two.
    """
    sys.meta_path[:] = [
        finder
        for finder in sys.meta_path
        if not getattr(finder, "__module__", "").startswith("__editable___fusion_backend")
    ]


def main() -> None:
    forget_installation()
    from benchmarks.pattern_runs.side import serve

    answers, sys.stdout = sys.stdout, sys.stderr  # what compilers print is no answer
    serve(sys.argv[1], sys.stdin, answers)


if __name__ == "__main__":
    main()
