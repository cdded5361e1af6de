"""The rules of the repository that a reader can check by looking, checked by looking: `ast`, no imports."""

import ast
import graphlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CORE = sorted((ROOT / "fusion_backend").rglob("*.py"))
ROOMS = sorted((ROOT / "patterns").glob("*.py"))
TOOLS = sorted((ROOT / "benchmarks").glob("*.py"))
LINES = 400

# Who may import whom: pattern <- canonical <- matcher <- gate <- recompute <- rewrite <- backend, op beside pattern.
# A module that is not named here, or that imports what its line does not name, fails the test below.
LEAVES = {"compat", "faults", "reporting"}
VIEW = {"capture", "functional", "autocast", "expressions", "index", "canonical", "composites", "attention"}
MATCH = VIEW | {"pattern", "fitting", "template", "unify", "matcher", "views"}
ALLOWED = {
    "compat": set(),
    "faults": set(),
    "reporting": set(),
    "options": set(),
    "definition": set(),
    "pattern": {"definition"},
    "kernels": {"pattern"},
    "op": {"pattern", "kernels"},
    "recipes": set(),
    "written": set(),
    "lowering": {"recipes", "written"},
    "capture": {"lowering", "written"},
    "functional": {"capture", "expressions"},
    "autocast": {"capture", "functional", "recipes"},
    "expressions": set(),
    "index": {"expressions"},
    "composites": {"expressions"},
    "attention": {"expressions", "composites"},
    "canonical": {"capture", "expressions", "composites", "attention"},
    "fitting": {"expressions", "index"},
    "template": VIEW | {"pattern", "disk", "fingerprint", "fitting"},
    "views": {"expressions"},
    "unify": {"expressions", "index", "fitting", "template", "views"},
    "matcher": {"pattern", "canonical", "expressions", "index", "fitting", "template", "unify", "views"},
    "catalogue": {"pattern", "template"},
    "fingerprint": {"pattern"},
    "cache": {"", "pattern", "fingerprint"},
    "disk": {"pattern", "cache", "expressions", "fingerprint"},
    "terms": set(),
    "reading": {"capture", "terms"},
    "elements": {"expressions", "reading", "terms"},
    "kept": {"expressions", "terms"},
    "masks": VIEW | {"elements", "kept", "reading", "terms", "views"},
    "diagonals": VIEW | {"elements", "masks", "reading", "terms", "views"},
    "bodies": VIEW,
    "library": MATCH | {"diagonals", "masks", "op", "reading"},
    "neighbours": MATCH,
    "gate": MATCH | {"neighbours", "bodies", "op", "kernels", "options", "masks", "library"},
    "recompute": {"capture", "expressions", "gate"},
    "rewrite": MATCH | {"op", "gate", "recompute"},
    "backend": MATCH | {"bodies", "op", "gate", "rewrite", "cache", "options", "patterns"},
    "untouched": set(),
    "collect": {"backend", "options", "untouched"},
    "comparing": {"pattern", "op", "kernels", "template"},
    "proof": {"pattern"},
    "kernel_checks": {"pattern", "op", "kernels", "comparing", "proof"},
    "checking": {"pattern", "op", "template", "collect", "comparing", "kernel_checks", "proof"},
    "spelling": {"pattern", "capture", "functional", "template", "collect", "testing"},
    "export": MATCH | {"gate", "rewrite", "backend", "options"},
}
ANYTHING = {"__init__", "__main__", "testing"}  # the public names, the command line and the users' test helpers
OPAQUE = {"fusion_backend/kernels/products.py"}  # a library call in place: there is nothing to open up
FOR_ROOMS = {"", "kernels"}  # a room writes `from fusion_backend import ...`, as a user's own pattern does


def module_of(path: Path) -> str:
    """fusion_backend/kernels/launch.py -> kernels; fusion_backend/op.py -> op."""
    return path.relative_to(ROOT / "fusion_backend").with_suffix("").parts[0]


def imports_of(text: str) -> list[tuple[int, str, str]]:
    """Every import in a program, in functions too: (line, module, name), with name "" for a whole module."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: a relative import"
            found += [(node.lineno, node.module, alias.name) for alias in node.names]
    return found


def own_imports(path: Path) -> list[tuple[int, str]]:
    """The modules of ours that a file imports: (line, "op"), with "" for the package itself."""
    found = []
    for line, module, name in imports_of(path.read_text()):
        parts = module.split(".")
        if parts[0] != "fusion_backend":
            continue
        submodule = len(parts) == 1 and (name in ALLOWED or name in ANYTHING | {"patterns"})
        found.append((line, name if submodule else (parts + [""])[1]))
    return found


# Names that begin with an underscore and are public all the same.
PUBLIC = {"_replace", "_asdict", "_make", "_fields"}  # of named tuples
PUBLIC |= {"_attn_implementation"}  # of configurations of transformers, which have no other
INSIDE_TRITON = {"triton.backends", "triton.compiler", "triton.runtime"}  # not public, whatever they are called
BY_NAME = {"getattr", "hasattr", "setattr", "delattr"}


def is_private(word: str) -> bool:
    return word.startswith("_") and not word.startswith("__") and word not in PUBLIC


def is_internal(dotted: str) -> bool:
    words = dotted.split(".")
    return any(map(is_private, words)) or ".".join(words[:2]) in INSIDE_TRITON


def private_names(text: str) -> list[tuple[int, str]]:
    """Private names of other packages that a program uses: imported, as an attribute of any object, or in a string."""
    found = [(line, f"{module} {name}".strip()) for line, module, name in imports_of(text)
             if is_internal(f"{module}.{name}")]  # fmt: skip
    for node in ast.walk(ast.parse(text)):
        wrong = False
        if isinstance(node, ast.Attribute):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            wrong = (is_private(node.attr) and not own) or ast.unparse(node) in INSIDE_TRITON
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BY_NAME:
            wrong = any(isinstance(a, ast.Constant) and is_private(str(a.value)) for a in node.args[1:2])
        elif isinstance(node, ast.Constant) and re.fullmatch(r"(torch|triton)(\.\w+)+", str(node.value)):
            wrong = is_internal(node.value)
        if wrong:
            found.append((node.lineno, ast.unparse(node)))
    return found


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_table_has_no_cycle():
    list(graphlib.TopologicalSorter(ALLOWED).static_order())


@pytest.mark.parametrize("path", CORE, ids=name)
def test_imports_go_one_way(path):
    module = module_of(path)
    if module in ANYTHING:
        return
    assert module in ALLOWED, f"{name(path)}: add {module!r} to ALLOWED, saying which modules it may import"
    wrong = [
        f"{name(path)}:{line} imports {other or 'fusion_backend'}"
        for line, other in own_imports(path)
        if other != module and other not in ALLOWED[module] | LEAVES
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", ROOMS, ids=name)
def test_a_room_imports_only_the_public_names_and_kernels(path):
    allowed = FOR_ROOMS | ({"pattern", "reporting"} if path.stem == "__init__" else set())
    wrong = [f"{name(path)}:{line} imports fusion_backend.{other}" for line, other in own_imports(path)
             if other not in allowed]  # fmt: skip
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", [p for p in CORE + ROOMS + TOOLS if "compat" not in p.parts], ids=name)
def test_private_names_live_in_compat(path):
    wrong = [f"{name(path)}:{line}: {what}" for line, what in private_names(path.read_text())]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("text", [
    "import torch._dynamo", "from torch._inductor import config", "from torch.fx.graph import _Namespace",
    "from sympy.core._print_helpers import Printable", "torch._C.DisableTorchFunction()", "schema = op._schema",
    "tensor.untyped_storage()._cdata", "graph._root._prev", "self.graph._codegen", "kernel.fn._fn_name",
    "getattr(op, '_schema', None)", "mock.patch('torch._inductor.config.debug')", "setattr(node, '_next', other)",
    "from triton.runtime.autotuner import Autotuner", "import triton.backends.compiler", "triton.runtime.driver",
])  # fmt: skip
def test_a_private_name_is_found(text):
    assert private_names(f"def f():\n    {text}\n")


@pytest.mark.parametrize("text", [
    "from __future__ import annotations", "self._memo = {}", "row._replace(n=1)", "x.__class__", "aten.add_(x, y)",
    "import triton.language as tl", "triton.knobs.compilation.scope()", "getattr(module, '__file__', None)",
    "from triton import cdiv", "RULES = {'aten::_to_copy': 1}",
])  # fmt: skip
def test_a_public_name_is_not(text):
    assert not private_names(text)


@pytest.mark.parametrize("path", CORE + ROOMS, ids=name)
def test_a_file_stays_short(path):
    length = len(path.read_text().splitlines())
    assert length <= LINES, f"{name(path)} has {length} lines"


@pytest.mark.parametrize("path", CORE + ROOMS, ids=name)
def test_no_opaque_op(path):
    calls = [node.lineno for node in ast.walk(ast.parse(path.read_text()))
             if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("custom_op")]  # fmt: skip
    decorators = [node.lineno for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)
                  for d in node.decorator_list if ast.unparse(d).endswith("custom_op")]  # fmt: skip
    if name(path) in OPAQUE:
        return
    assert not calls + decorators, f"{name(path)}: custom_op at lines {calls + decorators}; Inductor cannot open it up"
