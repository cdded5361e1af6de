"""Figures of the layout: `python -m tests.rooms [FOLDER]`, a checkout of any revision.

Rooms are the packages and modules at the top of fusion_backend; a floor is one more than the
highest floor that a room imports from. Imports in functions count too.
"""

import ast
import sys
from collections import Counter
from pathlib import Path


def imports(path: Path, modules: dict[str, Path]) -> set[str]:
    """The modules of ours that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in modules else node.module)
    return found & modules.keys()


def floor(room: str, edges: dict[str, set[str]], above: tuple[str, ...] = ()) -> int:
    below = [floor(r, edges, (*above, room)) for r in edges[room] if r not in (*above, room)]
    return 1 + max(below, default=0)


def main(root: Path) -> None:
    files = sorted((root / "fusion_backend").rglob("*.py"))
    modules = {
        ".".join(p.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): p
        for p in files
    }
    rooms = {m: m.split(".")[1] for m in modules if "." in m and not m.endswith("__main__")}
    edges = {room: set() for room in rooms.values()}
    lines = Counter()
    for module, room in rooms.items():
        lines[room] += len(modules[module].read_text().splitlines())
        edges[room] |= {rooms[m] for m in imports(modules[module], modules) if m in rooms} - {room}
    floors = max(floor(room, edges) for room in edges)
    print(f"{len(edges)} rooms, {floors} floors, {sum(map(len, edges.values()))} imports between")
    patterns = sorted((root / "patterns").rglob("*.py"))
    for title, some in (("fusion_backend", files), ("patterns", patterns)):
        print(f"{title}: {sum(len(p.read_text().splitlines()) for p in some)} lines")
    print(", ".join(f"{room} {n}" for room, n in lines.most_common()))
    found = []
    for path in (*files, *patterns):
        text = path.read_text()
        found += [
            (node.end_lineno - node.lineno + 1, node.name)
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.FunctionDef)
        ]
    sizes = [
        (len(p.read_text().splitlines()), str(p.relative_to(root))) for p in (*files, *patterns)
    ]
    print("longest functions:", sorted(found, reverse=True)[:3])
    print("longest files:", sorted(sizes, reverse=True)[:3])


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
