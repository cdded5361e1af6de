"""A report as one self-contained HTML page: its text, and the model's modules as a tree."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

from fusion_backend.reporting.places import short
from fusion_backend.reporting.records import NO_KERNEL, Site
from fusion_backend.reporting.text import headline, measured

if TYPE_CHECKING:
    from fusion_backend.reporting.report import Report

STYLE = """
.fusion{color-scheme:light dark;font:15px/1.5 system-ui,sans-serif;max-width:70em;
  --fused:light-dark(#12733b,#5fd38d);--left:light-dark(#8a5a00,#e0b050);
  --dim:light-dark(#5c6470,#9aa4b1);--line:light-dark(#d9dde3,#3a414b)}
.fusion h1{font-size:1.25em}
.fusion details{border-left:1px solid var(--line);padding-left:1em;margin-left:.25em}
.fusion summary{cursor:pointer;padding:.1em 0}
.fusion summary:focus-visible{outline:2px solid var(--fused)}
.fusion .class,.fusion .where{color:var(--dim)}
.fusion .site{padding:.1em 0 .1em 1em;overflow-wrap:anywhere}
.fusion .site b{font-weight:600}
.fusion .yes b,.fusion .n{color:var(--fused)}
.fusion .no b{color:var(--left)}
.fusion .none b{color:var(--dim)}
.fusion pre{overflow-x:auto;padding:1em;border:1px solid var(--line);font-size:13px}
"""
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1">
<meta name="color-scheme" content="light dark"><title>{title}</title></head>
<body style="margin:1.5em auto;max-width:72em;padding:0 1em">
{body}
</body></html>
"""


@dataclasses.dataclass
class Module:
    """A module of the tree: its class, the sites in itself and the modules inside it."""

    name: str
    kind: str = ""
    sites: list[Site] = dataclasses.field(default_factory=list)
    inside: dict[str, Module] = dataclasses.field(default_factory=dict)

    def every_site(self) -> Iterator[Site]:
        yield from self.sites
        for module in self.inside.values():
            yield from module.every_site()


def page(report: Report) -> str:
    """A whole page."""
    return PAGE.format(title=escape(headline(report)), body=fragment(report))


def fragment(report: Report) -> str:
    """The content of a page, or of a notebook's output."""
    root = tree(report)
    inside = "".join(map(drawn, root.inside.values()))
    times = [f"graph {i}: {measured(g)}" for i, g in enumerate(report.graphs) if g.measured]
    spent = f'<p class="where">measured {"; ".join(times)}</p>' if times else ""
    return (
        f'<div class="fusion"><style>{STYLE}</style><h1>{escape(headline(report))}</h1>{spent}'
        f"{''.join(map(row, root.sites))}{inside}"
        "<details><summary>The report as text</summary>"
        f"<pre>{escape(report.text())}</pre></details></div>"
    )


def tree(report: Report) -> Module:
    """The modules of the model, or those that the sites name, with the counted sites in them."""
    root = Module("")

    def at(path: str) -> Module:
        module = root
        for name in filter(None, path.split(".")):
            module = module.inside.setdefault(name, Module(name))
        return module

    for path, kind in report.modules.items():
        at(path).kind = kind
    for s in report.sites:
        if s.counted:
            at(s.module).sites.append(s)
    return root


def drawn(module: Module) -> str:
    """A module as HTML. One that has sites can be opened; it is open at first if something in it is
    fused, except in layers after the first.
    """
    sites = list(module.every_site())
    kind = f' <span class="class">{escape(module.kind)}</span>' if module.kind else ""
    name = f"{escape(module.name)}{kind}"
    if not sites:
        return f'<div class="site none">{name}</div>'
    fused = sum(s.fused for s in sites)
    shown = " open" if fused and not (module.name.isdigit() and module.name != "0") else ""
    inside = "".join(map(row, module.sites)) + "".join(map(drawn, module.inside.values()))
    return (
        f"<details{shown}><summary>{name} "
        f'<span class="n">{fused} of {len(sites)} fused</span></summary>{inside}</details>'
    )


def row(s: Site) -> str:
    told = s.how if s.fused else s.reason
    shade = "yes" if s.fused else "none" if s.cause == NO_KERNEL else "no"
    where = "" if s.by_module else f' <span class="where">{escape(short(s.where))}</span>'
    mark = "fused" if s.fused else "not fused"
    return (
        f'<div class="site {shade}"><b>{mark}: {escape(s.pattern)}</b>{where} '
        f"{escape(short(told))}</div>"
    )
