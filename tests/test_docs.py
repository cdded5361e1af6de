"""The generated page is current, the code in the documents runs, and the commands in them exist."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fusion_backend.kernels
from benchmarks.models import SIZES
from fusion_backend.frontends.catalogue import catalogue
from fusion_backend.frontends.dynamo import patterns
from fusion_backend.frontends.explain import Collector

ROOT = Path(__file__).parent.parent
builtin_compile = compile
BUILT_IN = ROOT / "patterns"


def test_catalogue_is_current():
    ours = [p for p in patterns() if Path(p.file).parent == BUILT_IN or "fusion_backend" in p.file]
    assert (ROOT / "docs" / "catalogue.md").read_text() == catalogue(ours), "run `make docs`"


def test_every_linked_file_exists():
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


# The code of docs/catalogue.md is that of patterns/, which test_catalogue_is_current compares.
PAGES = [
    ROOT / "README.md",
    *(p for p in sorted((ROOT / "docs").glob("*.md")) if p.name != "catalogue.md"),
]
BLOCK = re.compile(r"^```(.*)\n((?:(?!```).*\n)*)```$", re.M)
NOT_RUN = 0  # blocks that begin with ```python no-run


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """The blocks of a language in a page: line of the page and text. All fences must be
    understood.
    """
    text = page.read_text()
    found = [(text[: m.start()].count("\n") + 1, m[1], m[2]) for m in BLOCK.finditer(text)]
    assert 2 * len(found) == len(re.findall(r"^ *```", text, re.M)), (
        f"{page.name}: a block that is not closed"
    )
    return [(line, code) for line, kind, code in found if kind == language]


WITH_CODE = [page for page in PAGES if blocks(page, "python")]


def test_every_block_of_code_is_run():
    """Nothing hides under another name: a block that is not run says so, and is counted here."""
    kinds = [m[1] for page in PAGES for m in BLOCK.finditer(page.read_text())]
    assert set(kinds) <= {"python", "python no-run", "sh", "toml", ""}
    assert kinds.count("python no-run") == NOT_RUN and kinds.count("python") >= 10
    assert {"README.md", "write-a-pattern.md"} <= {page.name for page in WITH_CODE}


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_the_code_of_a_page_runs(page, scratch, tmp_path, monkeypatch):
    """All blocks of a page in one namespace, in order, at their lines. Inductor is left out, the
    pass is not.
    """
    real = torch.compile

    def compile(model, backend="inductor", options=None, **kwargs):
        return real(model, backend=Collector(options) if backend == "fusion" else backend, **kwargs)

    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.chdir(tmp_path)
    lines = []
    for line, code in blocks(page, "python"):
        lines += [""] * (line - len(lines)) + code.splitlines()
    source = tmp_path / f"{page.stem.replace('-', '_')}.py"
    source.write_text("\n".join(lines))  # Triton reads the source of a kernel from its file
    exec(builtin_compile(source.read_text(), str(source), "exec"), {"__name__": page.stem})


# What a page may import of ours: the names of these are for users.
PUBLIC = {"fusion_backend", "fusion_backend.kernels", "fusion_backend.testing"}


def names_imported(code: str) -> dict[str, set[str]]:
    """The modules of ours that a program imports, each with the names that it takes from it."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {alias.name: set() for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.setdefault(node.module, set()).update(alias.name for alias in node.names)
    return {m: names for m, names in found.items() if m.split(".")[0] == "fusion_backend"}


@pytest.mark.parametrize("page", ["README.md", "docs/write-a-pattern.md"])
def test_a_page_for_users_imports_public_names_alone(page):
    seen = set()
    for line, code in blocks(ROOT / page, "python"):
        for module, names in names_imported(code).items():
            assert module in PUBLIC, f"{page}:{line} imports {module}"
            public = importlib.import_module(module).__all__
            assert names <= set(public), f"{page}:{line}: {names - set(public)} of {module}"
            seen.add(module)
    assert page == "README.md" or seen == PUBLIC


@pytest.mark.parametrize("name", fusion_backend.kernels.__all__)
def test_a_public_name_of_the_kernels_says_what_it_is(name):
    """In a docstring of its own, and in the table of docs/write-a-pattern.md."""
    what = getattr(fusion_backend.kernels, name)
    assert (getattr(what, "fn", what).__doc__ or "").strip()
    page = (ROOT / "docs" / "write-a-pattern.md").read_text()
    table = [line for line in page.splitlines() if line.startswith("| `launch`")]
    assert len(table) == 1, "the table of names begins with `launch`"
    rows = page[page.index(table[0]) :].split("\n\n")[0]
    assert f"`{name}`" in rows


def test_the_package_is_cheap_to_import():
    """Without Triton, the kernels and the compiler, which the backend loads when it is used."""
    code = (
        "import sys, torch; before = {*sys.modules}; import fusion_backend; "
        "print(*sorted({*sys.modules} - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ours = [m for m in done.stdout.split() if m.startswith(("fusion_backend.", "triton"))]
    assert ours and not [m for m in ours if m.startswith(("fusion_backend.kernels", "triton"))]


def test_commands_exist():
    """`python -m MODULE ... --option`: the module is there, and some module of ours takes the
    option; `make TARGET`.
    """
    sources = [
        p.read_text()
        for folder in ("benchmarks", "fusion_backend")
        for p in (ROOT / folder).glob("*.py")
    ]
    options = set(re.findall(r"""["'](--[a-z-]+)["']""", "".join(sources)))
    options |= {f"--{name}" for name in SIZES}
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M)
    commands, seen = (
        re.compile(r"python -m ((?:benchmarks|fusion_backend)\b[\w.]*)((?: +[^\s`()]+)*)"),
        0,
    )
    for page in PAGES:
        text = page.read_text()
        for module, arguments in commands.findall(text):
            assert importlib.util.find_spec(module.rstrip(".")), f"{page.name}: python -m {module}"
            for option in re.findall(r"(?<=\s)--[a-z-]+", arguments):
                assert option in options, f"{page.name}: python -m {module}{arguments}: {option}"
            seen += 1
        for _, code in blocks(page, "sh"):
            assert all(t in targets for t in re.findall(r"^make (\w+)", code, re.M)), page.name
    assert seen > 10


@pytest.mark.parametrize("page", ["README.md"])
def test_quickstart_and_custom_pattern_are_short(page):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)
    assert blocks and len(blocks[0].strip().splitlines()) <= 20
