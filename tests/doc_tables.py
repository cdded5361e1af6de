"""Tables of docs/write-a-pattern.md that are made of the code: `python -m tests.doc_tables` writes
them, and tests/test_docs.py compares them.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

import fusion_backend.kernels
from fusion_backend.ir.canonicalize import OUR_RULES
from fusion_backend.ir.rules import RULES

PAGE = Path(__file__).parent.parent / "docs" / "write-a-pattern.md"
# What each public name of fusion_backend.kernels is for, in the order of the page.
HELPERS = {
    "running a kernel": ("launch", "interpreting", "interpreted"),
    "guards: a `Reject`, or None": (
        "reject_dtypes",
        "reject_shapes",
        "reject_layouts",
        "reject_rows",
        "reject_vectors",
        "reject_dynamic",
    ),
    "sizes that may be symbolic": ("dynamic", "number"),
    "elementwise kernels": ("blocks_of", "block_of", "in_layout"),
    "kernels on rows": ("as_rows", "maybe_rows", "row_config"),
    "dropout by seed and position": (
        "dropped",
        "dropout_factors",
        "dropout_threshold",
        "dropout_scale",
    ),
}
# The files of rules, by the title that the page gives their operators.
TITLES = {
    "rules_pointwise": "arithmetic and elementwise",
    "rules_gelu": "GELU",  # composites, which are no operators of ATen
    "rules_shape": "views, indexing, shapes",
    "rules_norm": "reductions and norms",
    "rules_batch_norm": "group, instance and batch norms",
    "rules_channel_norm": "norms over channels",  # composites
    "rules_conv": "convolutions",
    "rules_images": "images that are resized or pooled",
    "rules_complex": "complex numbers",
    "rules_product": "matrix products",
    "rules_attention": "attention",
    "rules_loss": "losses",
    "rules_soft_loss": "losses of probabilities",
    "rules_collective": "all-reduces",
}


def first_sentence(fn) -> str:
    return re.match(r".+?[.?](?= |$)", " ".join(inspect.getdoc(fn).split()))[0]


def signature(fn) -> str:
    """With the annotations as they are written, for a cell of a table."""
    text = str(inspect.signature(fn)).replace("'", "")
    return text.replace("|", "\\|")


def helpers() -> str:
    lines = ["| name | what it does |", "|---|---|"]
    for title, names in HELPERS.items():
        lines.append(f"| *{title}* | |")
        for name in names:
            what = getattr(fusion_backend.kernels, name)
            fn = getattr(what, "fn", what)  # of a kernel's function, the Python function
            lines.append(f"| `{name}{signature(fn)}` | {first_sentence(fn)} |")
    return "\n".join(lines)


def operators() -> str:
    """The operators with a rule of ours, by the file of the first; each once."""
    lines, seen = ["| operators of ATen | names |", "|---|---|"], set()
    for module in OUR_RULES:
        ours = {
            subject.partition("::")[2]
            for subject, rules in RULES.items()
            if any(r.built_in and r.function.__module__ == module.__name__ for r in rules)
        }
        title = TITLES[module.__name__.rpartition(".")[2]]
        if ours - seen:
            lines.append(f"| {title} | {' '.join(f'`{name}`' for name in sorted(ours - seen))} |")
        seen |= ours
    return "\n".join(lines)


TABLES = {"helpers": helpers, "operators": operators}


def block(title: str) -> str:
    return f"<!-- {title} -->\n\n{TABLES[title]()}\n\n<!-- end of {title} -->"


def with_tables(text: str) -> str:
    """The page with its tables made anew."""
    for title in TABLES:
        found = re.compile(f"<!-- {title} -->.*?<!-- end of {title} -->", re.DOTALL)
        if len(found.findall(text)) != 1:
            sys.exit(f"the page has no place for the table of {title}, or several")
        text = found.sub(lambda _, title=title: block(title), text)
    return text


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
