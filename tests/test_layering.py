"""The rules of the repository that a reader can check by looking, checked by looking: `ast`, no imports."""

import ast
import graphlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CORE = sorted((ROOT / "fusion_backend").rglob("*.py"))
ROOMS = sorted((ROOT / "patterns").glob("*.py"))
LINES = 400

# Who may import whom: pattern <- canonical <- matcher <- gate <- recompute <- rewrite <- backend, op beside pattern.
# A module that is not named here, or that imports what its line does not name, fails the test below.
LEAVES = {"compat", "reporting"}
VIEW = {"capture", "functional", "autocast", "expressions", "index", "canonical", "composites", "attention"}
MATCH = VIEW | {"pattern", "fitting", "template", "unify", "matcher", "views"}
ALLOWED = {
    "compat": set(),
    "reporting": set(),
    "options": set(),
    "pattern": set(),
    "kernels": {"pattern"},
    "op": {"pattern", "kernels"},
    "recipes": set(),
    "written": set(),
    "lowering": {"recipes", "written"},
    "capture": {"lowering", "written"},
    "functional": {"capture"},
    "autocast": {"capture", "functional"},
    "expressions": set(),
    "index": {"expressions"},
    "composites": {"expressions"},
    "attention": {"expressions", "composites"},
    "canonical": {"capture", "expressions", "composites", "attention"},
    "fitting": {"expressions", "index"},
    "template": {"pattern", "cache", "capture", "functional", "canonical", "expressions", "fitting", "index"},
    "views": {"expressions"},
    "unify": {"expressions", "index", "fitting", "template", "views"},
    "matcher": {"pattern", "canonical", "expressions", "index", "fitting", "template", "unify", "views"},
    "catalogue": {"pattern", "template"},
    "cache": {"pattern"},
    "terms": set(),
    "reading": {"capture", "terms"},
    "elements": {"expressions", "reading", "terms"},
    "kept": {"expressions", "terms"},
    "masks": VIEW | {"elements", "kept", "reading", "terms", "views"},
    "diagonals": VIEW | {"elements", "masks", "reading", "terms", "views"},
    "bodies": VIEW,
    "library": MATCH | {"diagonals", "masks", "op", "reading"},
    "gate": MATCH | {"bodies", "op", "kernels", "options", "masks", "library"},
    "recompute": {"capture", "expressions", "gate"},
    "rewrite": MATCH | {"op", "gate", "recompute"},
    "backend": MATCH | {"bodies", "op", "gate", "rewrite", "cache", "options", "patterns"},
    "collect": {"backend", "options"},
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


def imports(path: Path) -> list[tuple[int, str, str]]:
    """Every import in a file, in functions too: (line, module, name), with name "" for a whole module."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: a relative import"
            found += [(node.lineno, node.module, alias.name) for alias in node.names]
    return found


def own_imports(path: Path) -> list[tuple[int, str]]:
    """The modules of ours that a file imports: (line, "op"), with "" for the package itself."""
    found = []
    for line, module, name in imports(path):
        parts = module.split(".")
        if parts[0] != "fusion_backend":
            continue
        submodule = len(parts) == 1 and (name in ALLOWED or name in ANYTHING | {"patterns"})
        found.append((line, name if submodule else (parts + [""])[1]))
    return found


def private_torch_names(path: Path) -> list[tuple[int, str]]:
    """Underscored names of torch that a file imports or reaches for by attribute (torch._dynamo, torch.fx._x)."""
    found = []
    for line, module, name in imports(path):
        words = f"{module}.{name}".split(".")
        if words[0] == "torch" and any(w.startswith("_") and not w.startswith("__") for w in words):
            found.append((line, f"{module} {name}".strip()))
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            words = ast.unparse(node).split(".")
            if words[0] == "torch":
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
    allowed = FOR_ROOMS | ({"patterns"} if path.stem == "__init__" else set())
    wrong = [f"{name(path)}:{line} imports fusion_backend.{other}" for line, other in own_imports(path)
             if other not in allowed]  # fmt: skip
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", [p for p in CORE + ROOMS if "compat" not in p.parts], ids=name)
def test_private_torch_names_live_in_compat(path):
    wrong = [f"{name(path)}:{line}: {what}" for line, what in private_torch_names(path)]
    assert not wrong, "\n".join(wrong)


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
