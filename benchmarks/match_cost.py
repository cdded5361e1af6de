"""What matching costs with the full catalogue: milliseconds for graphs of decoder layers, and for
chains of one call.

    python -m benchmarks.match_cost [--nodes 1000 3000 10000] [--runs 5]

Read turns the graph into canonical expressions, match tries all patterns at all nodes, and decide
is the gate, for what was matched. The figures are the least CPU time of several runs. Capture,
which comes before, is measured by benchmarks.capture_cost.
"""

from __future__ import annotations

import argparse

from benchmarks.compiler.matching import GRAPHS, cost
from benchmarks.compiler.synthetic import decoder


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.match_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--nodes", type=int, nargs="+", default=[1000, 3000, 10000], help="of a graph"
    )
    parser.add_argument("--runs", type=int, default=5, help="default: 5")
    arguments = parser.parse_args()
    cost(decoder(2), 1)
    print(
        f"{'ms':<14}{'nodes':>8}{'read':>9}{'match':>9}{'decide':>9}"
        f"{'read + match':>14}{'sites':>8}"
    )
    for name, make in GRAPHS.items():
        for nodes in arguments.nodes:
            c = cost(make(nodes), arguments.runs)
            ms = {k: 1e3 * c[k] for k in ("read", "match", "decide")}
            times = "".join(f"{v:>9.1f}" for v in ms.values())
            print(
                f"{name:<14}{c['nodes']:>8}{times}{ms['read'] + ms['match']:>14.1f}{c['sites']:>8}",
                flush=True,
            )


if __name__ == "__main__":
    main()
