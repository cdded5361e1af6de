"""The rules of the repository that a reader can check by looking, checked by looking: `ast`, no
imports.
"""

import ast
import functools
import graphlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CORE = sorted((ROOT / "fusion_backend").rglob("*.py"))
ROOMS = sorted((ROOT / "patterns").glob("*.py"))
TOOLS = sorted((ROOT / "benchmarks").rglob("*.py"))
LINES = 400

# Modules at the top of the package that are no room: what they may import.
LOOSE = {
    "__init__": {"options", "ops", "reporting", "frontends"},
    "__main__": {"frontends"},
    "options": set(),
    "pipeline": {
        "capture",
        "compat",
        "decide",
        "dump",
        "extend",
        "ir",
        "match",
        "measure",
        "ops",
        "options",
        "reporting",
        "rewrite",
    },
    "remembered": {
        "cache",
        "compat",
        "ir",
        "kernels",
        "measure",
        "ops",
        "options",
        "pipeline",
        "reporting",
        "rewrite",
    },
    "dump": {"pipeline", "ir", "reporting", "compat"},
}
# a library call in place: there is nothing to open up
OPAQUE = {"fusion_backend/kernels/gemm/products.py"}
ITSELF = "the package itself"
# a built-in pattern writes `from fusion_backend import ...`, as a user's own does
FOR_PATTERNS = {ITSELF, "kernels"}


def room_of(path: Path) -> str:
    """fusion_backend/kernels/norm/forward.py -> kernels; fusion_backend/options.py -> options."""
    return path.relative_to(ROOT / "fusion_backend").with_suffix("").parts[0]


@functools.cache
def declared(folder: Path) -> dict[str, set[str]]:
    """Each package of a folder and what it may import, by the docstring of its `__init__.py`."""
    table = {}
    for path in sorted(folder.glob("*/__init__.py")):
        doc = ast.get_docstring(ast.parse(path.read_text())) or ""
        said = re.search(
            r"^Comes in: .+^Goes out: .+^May import: (.+)\.$", doc, re.MULTILINE | re.DOTALL
        )
        assert said, (
            f"{name(path)}: its docstring says what comes in, what goes out and what it may import"
        )
        table[path.parent.name] = (
            set() if said[1].startswith("nothing") else set(said[1].split(", "))
        )
    return table


@functools.cache
def rooms() -> dict[str, set[str]]:
    """The packages of fusion_backend, of which "everything" may import all others."""
    table = dict(declared(ROOT / "fusion_backend"))
    for room, may in table.items():
        if may == {"everything"}:
            table[room] = {*table, *LOOSE, "patterns", ITSELF} - {room}
    return table


@functools.cache
def imports_of(text: str) -> list[tuple[int, str, str]]:
    """Every import in a program, in functions too: (line, module, name), with name "" for a whole
    module.
    """
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: a relative import"
            found += [(node.lineno, node.module, alias.name) for alias in node.names]
    return found


def is_import(node: ast.stmt) -> bool:
    return isinstance(node, (ast.Import, ast.ImportFrom))


def is_module(name: str) -> bool:
    path = ROOT / "fusion_backend" / name
    return name == "patterns" or path.is_dir() or path.with_suffix(".py").exists()


def own_imports(path: Path) -> list[tuple[int, str]]:
    """The rooms that a file imports: (line, "ops")."""
    found = []
    for line, module, name in imports_of(path.read_text()):
        parts = module.split(".")
        if parts[0] != "fusion_backend":
            continue
        inner = [parts[1]] if len(parts) > 1 else [n for n in (name,) if is_module(n)]
        found.append((line, inner[0] if inner else ITSELF))
    return found


# Names that begin with an underscore and are public all the same.
PUBLIC = {"_replace", "_asdict", "_make", "_fields"}  # of named tuples
PUBLIC |= {"_attn_implementation"}  # of configurations of transformers, which have no other
# not public, whatever they are called
INSIDE_TRITON = {"triton.backends", "triton.compiler", "triton.runtime"}
BY_NAME = {"getattr", "hasattr", "setattr", "delattr"}


def is_private(word: str) -> bool:
    return word.startswith("_") and not word.startswith("__") and word not in PUBLIC


def is_internal(dotted: str) -> bool:
    words = dotted.split(".")
    return any(map(is_private, words)) or ".".join(words[:2]) in INSIDE_TRITON


def private_names(text: str) -> list[tuple[int, str]]:
    """Private names of other packages that a program uses: imported, as an attribute of any object,
    or in a string.
    """
    found = [(line, f"{module} {name}".strip()) for line, module, name in imports_of(text)
             if is_internal(f"{module}.{name}")]  # fmt: skip
    for node in ast.walk(ast.parse(text)):
        wrong = False
        if isinstance(node, ast.Attribute):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            wrong = (is_private(node.attr) and not own) or ast.unparse(node) in INSIDE_TRITON
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in BY_NAME
        ):
            wrong = any(
                isinstance(a, ast.Constant) and is_private(str(a.value)) for a in node.args[1:2]
            )
        elif isinstance(node, ast.Constant) and re.fullmatch(
            r"(torch|triton)(\.\w+)+", str(node.value)
        ):
            wrong = is_internal(node.value)
        if wrong:
            found.append((node.lineno, ast.unparse(node)))
    return found


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_rooms_stand_on_one_another():
    """No cycle between rooms, but for the frontends, which are above everything, and testing, above
    them.
    """
    list(graphlib.TopologicalSorter(rooms() | {"frontends": set()}).static_order())


def test_modules_have_no_cycle():
    """Of imports at the top of files, without those of a package's own names by its modules."""
    dotted = {
        ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p
        for p in CORE
    }
    graph = {}
    for module, path in dotted.items():
        found = imports_of(
            "\n".join(ast.unparse(n) for n in ast.parse(path.read_text()).body if is_import(n))
        )
        graph[module] = {
            f"{m}.{n}" if f"{m}.{n}" in dotted else m for _, m, n in found
        } & dotted.keys() - {module}
    list(graphlib.TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("path", CORE, ids=name)
def test_imports_go_one_way(path):
    room, table = room_of(path), LOOSE | rooms()
    wrong = [
        f"{name(path)}:{line} imports {other}; the docstring of {room}/__init__.py says what it may"
        for line, other in own_imports(path)
        if other != room and other not in table[room]
    ]
    assert not wrong, "\n".join(wrong)


def benchmark_imports(path: Path) -> list[tuple[int, str]]:
    """The packages and commands of benchmarks/ that a file imports: (line, "records")."""
    found = [
        (line, f"{module}.{name}".split(".")) for line, module, name in imports_of(path.read_text())
    ]
    return [(line, words[1]) for line, words in found if words[0] == "benchmarks"]


def test_packages_of_the_benchmarks_stand_on_one_another():
    list(graphlib.TopologicalSorter(declared(ROOT / "benchmarks")).static_order())


@pytest.mark.parametrize("path", TOOLS, ids=name)
def test_benchmarks_import_one_way(path):
    """A command imports any package, and nobody imports a command."""
    table, inner = declared(ROOT / "benchmarks"), path.relative_to(ROOT / "benchmarks").parts
    may = {inner[0], *table[inner[0]]} if len(inner) > 1 else set(table)
    wrong = [
        f"{name(path)}:{line} imports benchmarks.{other}"
        for line, other in benchmark_imports(path)
        if other not in may
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", ROOMS, ids=name)
def test_a_pattern_imports_only_the_public_names_and_kernels(path):
    allowed = FOR_PATTERNS | ({"ops", "reporting"} if path.stem == "__init__" else set())
    wrong = [f"{name(path)}:{line} imports fusion_backend.{other}" for line,
        other in own_imports(path)
             if other not in allowed]  # fmt: skip
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "path", [p for p in CORE + ROOMS + TOOLS if "compat" not in p.parts], ids=name
)
def test_private_names_live_in_compat(path):
    wrong = [f"{name(path)}:{line}: {what}" for line, what in private_names(path.read_text())]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("text", [
    "import torch._dynamo", "from torch._inductor import config",
    "from torch.fx.graph import _Namespace",
    "from sympy.core._print_helpers import Printable", "torch._C.DisableTorchFunction()",
    "schema = op._schema",
    "tensor.untyped_storage()._cdata", "graph._root._prev", "self.graph._codegen",
    "kernel.fn._fn_name",
    "getattr(op, '_schema', None)", "mock.patch('torch._inductor.config.debug')",
    "setattr(node, '_next', other)",
    "from triton.runtime.autotuner import Autotuner", "import triton.backends.compiler",
    "triton.runtime.driver",
])  # fmt: skip
def test_a_private_name_is_found(text):
    assert private_names(f"def f():\n    {text}\n")


@pytest.mark.parametrize("text", [
    "from __future__ import annotations", "self._memo = {}", "row._replace(n=1)", "x.__class__",
    "aten.add_(x, y)",
    "import triton.language as tl", "triton.knobs.compilation.scope()",
    "getattr(module, '__file__', None)",
    "from triton import cdiv", "RULES = {'aten::_to_copy': 1}",
])  # fmt: skip
def test_a_public_name_is_not(text):
    assert not private_names(text)


@pytest.mark.parametrize("path", CORE + ROOMS + TOOLS, ids=name)
def test_a_file_stays_short(path):
    length = len(path.read_text().splitlines())
    assert length <= LINES, f"{name(path)} has {length} lines"


@pytest.mark.parametrize("path", CORE + ROOMS, ids=name)
def test_no_opaque_op(path):
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    calls = [node.lineno for node in nodes
             if isinstance(node,
             ast.Call) and ast.unparse(node.func).endswith("custom_op")]  # fmt: skip
    decorators = [node.lineno for node in nodes if isinstance(node, ast.FunctionDef)
                  for d in node.decorator_list if ast.unparse(d).endswith("custom_op")]  # fmt: skip
    if name(path) in OPAQUE:
        return
    assert not calls + decorators, (
        f"{name(path)}: custom_op at lines {calls + decorators}; Inductor cannot open it up"
    )
