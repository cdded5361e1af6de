"""The generated page is current, the code in the documents runs, and the commands in them exist.

A block that is not run has a comment above it that says why, and is counted here:

    <!-- not run: it needs a GPU and ten minutes -->

A ```text block is what the block of code before it prints. It may leave lines out.
"""

import ast
import importlib.util
import inspect
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import torch

import fusion_backend
import fusion_backend.kernels
import fusion_backend.testing
from benchmarks.model_runs.row import SIZES
from fusion_backend.frontends.catalogue import catalogue
from fusion_backend.frontends.explain import Collector
from fusion_backend.frontends.loading import patterns

from .doc_blocks import BLOCK, assert_printed, blocks, placed, to_run
from .doc_tables import HELPERS, PAGE, with_tables

ROOT = Path(__file__).parent.parent
builtin_compile = compile
BUILT_IN = ROOT / "patterns"
# The code of docs/catalogue.md is that of patterns/, which test_catalogue_is_current compares.
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md")),
    *(p for p in sorted((ROOT / "docs").rglob("*.md")) if p.name != "catalogue.md"),
]
NOT_RUN = {
    ("README.md", "sh"): 2,
    ("benchmark-your-model.md", "sh"): 3,
    ("benchmarks.md", "sh"): 1,
    ("command-line.md", "sh"): 5,
    ("contributing.md", "sh"): 3,
    ("gate.md", "sh"): 3,
    ("performance.md", "sh"): 1,
}
# Drawings, printed output and paths: nothing that could be run.
SHOWN = {"README.md": 1, "architecture.md": 1, "benchmark-your-model.md": 1, "command-line.md": 5}


# tests/ranks/test_page.py runs the code of these, in two processes.
OF_RANKS = {"distributed.md"}
WITH_PYTHON = [page for page in PAGES if to_run(page, "python") and page.name not in OF_RANKS]
WITH_SHELL = [page for page in PAGES if to_run(page, "sh") and page.name not in OF_RANKS]


def name(page: Path) -> str:
    return page.name


def test_catalogue_is_current():
    ours = [p for p in patterns() if BUILT_IN in Path(p.file).parents or "fusion_backend" in p.file]
    assert (ROOT / "docs" / "catalogue.md").read_text() == catalogue(ours), "run `make docs`"


def test_every_linked_file_and_heading_exists():
    for page in (*PAGES, ROOT / "docs" / "catalogue.md"):
        words = re.sub("`[^`]*`", "", BLOCK.sub("", page.read_text()))
        for link, heading in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", words):
            target = page.parent / link if link else page
            assert target.exists(), f"{page.name} links to {link}"
            if heading:
                assert heading in headings(target), f"{page.name} links to {link}#{heading}"


def headings(page: Path) -> set[str]:
    """As GitHub names them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_block_of_code_is_run_or_counted():
    """No block escapes under another language or an unnoticed comment."""
    found = {page: blocks(page) for page in PAGES}
    kinds = Counter((page.name, b.kind) for page in PAGES for b in found[page] if b.why is None)
    assert {kind for _, kind in kinds} <= {"python", "sh", "toml", "text", ""}
    assert Counter(page for page, kind in kinds.elements() if not kind) == Counter(SHOWN)
    left_out = Counter((page.name, b.kind) for page in PAGES for b in found[page] if b.why)
    assert left_out == Counter(NOT_RUN)
    assert {"README.md", "write-a-pattern.md", "debugging.md"} <= {*map(name, WITH_PYTHON)}
    assert {"write-a-pattern.md", "debugging.md"} <= {*map(name, WITH_SHELL)}


def write_files(page: Path, folder: Path) -> None:
    """A block whose first line is the comment `# mine.py` is that file."""
    for block in blocks(page, "python"):
        if file := re.match(r"# (\w+\.py)\n", block.text):
            (folder / file[1]).write_text(block.text)


# Each block of these pages is a program of its own.
OF_PROGRAMS = {"cookbook.md"}


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name)
def test_the_python_of_a_page_runs(page, scratch, tmp_path, monkeypatch, capsys):
    """All blocks of a page in one namespace, in order, at their lines. Inductor is left out, the
    pass is not. What the page says that they print is printed.
    """
    real = torch.compile

    def compile(model, backend="inductor", options=None, **kwargs):
        return real(model, backend=Collector(options) if backend == "fusion" else backend, **kwargs)

    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    lines = []
    for block in to_run(page, "python"):
        lines += [""] * (block.line - len(lines)) + block.text.splitlines()
    source = tmp_path / f"page_{page.stem.replace('-', '_')}.py"
    source.write_text("\n".join(lines))  # Triton reads the source of a kernel from its file
    namespace = {"__name__": page.stem}
    for block in to_run(page, "python"):
        if page.name in OF_PROGRAMS:
            namespace = {"__name__": page.stem}
        code = "\n" * block.line + block.text
        exec(builtin_compile(code, str(source), "exec"), namespace)
        assert_printed(page, block, placed(capsys.readouterr().out, page))


@pytest.mark.parametrize("page", WITH_SHELL, ids=name)
def test_the_commands_of_a_page_run(page, tmp_path):
    """In a folder with the files that the page shows; `python` is the one that runs the tests."""
    write_files(page, tmp_path)
    folders = [str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = os.environ | {"PATH": os.pathsep.join(folders), "PYTHONPATH": str(ROOT)}
    environment["COLUMNS"] = "100"
    for block in to_run(page, "sh"):
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.text],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        where = f"{page.name}:{block.line}"
        assert done.returncode == 0, f"{where}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        assert_printed(page, block, re.sub(r"[\w./-]*/(\w+\.py)", r"\1", done.stdout))


def test_the_settings_of_a_page_are_read():
    """A toml block of an author's package names the entry point that the backend loads."""
    found = [tomllib.loads(b.text) for page in PAGES for b in blocks(page, "toml")]
    assert found
    sources = (ROOT / "fusion_backend" / "frontends").glob("*.py")
    loaded = "".join(p.read_text() for p in sources)
    for settings in found:
        for group in settings["project"]["entry-points"]:
            assert f'"{group}"' in loaded, group


def test_a_whole_pattern_fits_in_sixty_lines():
    """The file in docs/write-a-pattern.md is a pattern with all that one needs; the first block
    defines one in six lines.
    """
    found = blocks(ROOT / "docs" / "write-a-pattern.md", "python")
    assert len([line for line in found[0].text.splitlines() if line]) <= 6
    (first,) = [b for b in found if b.text.startswith("# scaled_tanh.py")]
    assert len(first.text.splitlines()) < 60
    for part in (
        "@Pattern",
        ".near_miss",
        ".guard",
        "triton.jit",
        ".kernel",
        ".backward",
        ".inputs",
    ):
        assert part in first.text
    last = first.text.splitlines()[-1]
    assert last.startswith("print(check_pattern(scaled_tanh, dtypes=")


def test_the_cookbook_has_five_patterns_that_are_not_built_in():
    """Each a file of its own with its proof, and short."""
    found = blocks(ROOT / "docs" / "cookbook.md", "python")
    assert len(found) == 5
    built_in = {p.stem for p in BUILT_IN.glob("*.py")}
    for block in found:
        file, *lines = block.text.splitlines()
        pattern = re.fullmatch(r"# (\w+)\.py", file)[1]
        assert len(lines) < 60 and pattern not in built_in
        assert f"print(check_pattern({pattern}))" in lines
        assert f"@{pattern}.near_miss" in lines and f"@{pattern}.inputs" in block.text


# What a page may import of ours: the names of these are for users.
PUBLIC = {f"fusion_backend{part}" for part in ("", ".ir", ".kernels", ".testing")}


def names_imported(code: str) -> dict[str, set[str]]:
    """The modules of ours that a program imports, each with the names that it takes from it."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {alias.name: set() for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.setdefault(node.module, set()).update(alias.name for alias in node.names)
    return {m: names for m, names in found.items() if m.split(".")[0] == "fusion_backend"}


@pytest.mark.parametrize("page", ["README.md", "docs/write-a-pattern.md", "docs/cookbook.md"])
def test_a_page_for_users_imports_public_names_alone(page):
    seen = set()
    for block in blocks(ROOT / page, "python"):
        for module, names in names_imported(block.text).items():
            assert module in PUBLIC, f"{page}:{block.line} imports {module}"
            public = importlib.import_module(module).__all__
            assert names <= set(public), f"{page}:{block.line}: {names - set(public)} of {module}"
            seen.add(module)
    assert page != "docs/write-a-pattern.md" or seen == PUBLIC


def test_the_tables_of_helpers_and_operators_are_current():
    """docs/write-a-pattern.md: every public name of fusion_backend.kernels with its signature and
    the first sentence of its docstring, and every operator with a canonical rule.
    """
    assert sorted(n for names in HELPERS.values() for n in names) == fusion_backend.kernels.__all__
    text = PAGE.read_text()
    assert text == with_tables(text), "run `python -m tests.doc_tables`"
    assert "| `launch(kernel: Any, grid" in text and " `hardswish` " in text


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
        for p in (ROOT / folder).rglob("*.py")
    ]
    options = set(re.findall(r"""["'](--[a-z-]+)["']""", "".join(sources)))
    options |= {f"--{name}" for name in SIZES}
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M)
    commands, seen = (
        re.compile(r"python -m ((?:benchmarks|fusion_backend|tests)\b[\w.]*)((?: +[^\s`()]+)*)"),
        0,
    )
    for page in PAGES:
        text = page.read_text()
        for module, arguments in commands.findall(text):
            assert importlib.util.find_spec(module.rstrip(".")), f"{page.name}: python -m {module}"
            if module.startswith("tests"):
                continue
            for option in re.findall(r"(?<=\s)--[a-z-]+", arguments):
                assert option in options, f"{page.name}: python -m {module}{arguments}: {option}"
            seen += 1
        for block in blocks(page, "sh"):
            made = re.findall(r"^make (?:-n )?(\w+)", block.text, re.M)
            assert all(target in targets for target in made), page.name
    assert seen > 10


@pytest.mark.parametrize("page", ["README.md"])
def test_quickstart_and_custom_pattern_are_short(page):
    first = blocks(ROOT / page, "python")[0]
    assert len(first.text.strip().splitlines()) <= 20


def packages() -> list[list[str]]:
    """Each package of fusion_backend with what its docstring says: the first sentence, what comes
    in, what goes out, what it may import.
    """
    rows = []
    for path in sorted((ROOT / "fusion_backend").glob("*/__init__.py")):
        doc = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split())
        said = re.search(r"Comes in: (.+)\. Goes out: (.+)\. May import: (.+)\.$", doc)
        sentence = re.match(r".+?\.(?= |$)", doc)
        rows.append([f"`{path.parent.name}/`", sentence[0], *said.groups()])
    return rows


def test_the_table_of_packages_is_that_of_their_docstrings():
    """docs/architecture.md, between the comments; pages link to it and have no other."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = re.search(r"<!-- packages -->\n\n(.+?)\n\n<!-- end of packages -->", text, re.S)[1]
    head = ["package", "what it is", "comes in", "goes out", "may import"]
    rows = [head, ["---"] * len(head), *packages()]
    assert table == "\n".join(f"| {' | '.join(row)} |" for row in rows)


def test_pre_commit_runs_what_make_check_runs():
    make = (ROOT / "Makefile").read_text()
    check = re.search(r"^check:.*\n((?:\t.+\n)+)", make, re.MULTILINE)[1]
    wanted = [line.strip().replace("$(TESTS)", "").strip() for line in check.splitlines()]
    hooks = re.findall(r"^ +entry: (.+)$", (ROOT / ".pre-commit-config.yaml").read_text(), re.M)
    assert [hook.replace(".venv/bin/python", "$(PY)") for hook in hooks] == wanted


# What is still to be annotated; a name leaves this list when it is.
UNANNOTATED = {"arguments", "near_misses", "spellings"}


def public_functions() -> dict[str, object]:
    """The functions of the packages with public names, and the methods of their classes."""
    found = {}
    for package in (fusion_backend, fusion_backend.testing, fusion_backend.kernels):
        for name in package.__all__:
            value = getattr(package, name)
            if inspect.isfunction(value):
                found[name] = value
            elif inspect.isclass(value):
                methods = {k: f for k, f in vars(value).items() if inspect.isfunction(f)}
                found |= {f"{name}.{k}": f for k, f in methods.items() if not k.startswith("_")}
    return found


def test_public_functions_are_annotated():
    """Those in modules that mypy does not check strictly, too."""
    bare = set()
    for name, fn in public_functions().items():
        signature = inspect.signature(fn)
        asked = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
        if signature.return_annotation is signature.empty or any(
            p.annotation is p.empty for p in asked
        ):
            bare.add(name)
    assert bare <= UNANNOTATED, bare - UNANNOTATED
