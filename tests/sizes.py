"""What a ShapeEnv believes of its symbols before a pass and after it. conftest.py holds every test
to: the same.
"""

import contextlib

from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fusion_backend import remembered
from fusion_backend.compat.torch import fake_mode_of
from fusion_backend.frontends import explain as collect
from fusion_backend.frontends import exported as export


def facts(env: ShapeEnv) -> dict:
    return {
        "guards": [str(g.expr) for g in env.guards],
        "replacements": {str(a): str(env.replace(a)) for a in env.replacements},
        "assertions": {
            str(a): [str(r.expr) for r in held] for a, held in env.deferred_runtime_asserts.items()
        },
        # torch drops the others
        "divisible": sorted(str(e) for e in env.divisible if not env.replace(e).is_number),
        "ranges": {str(a): str(r) for a, r in env.var_to_range.items()},
        "sizes": sorted(map(str, env.size_like)),
        "unbacked": list(map(str, env.pending_fresh_unbacked_symbols)),
        "methods": sorted(name for name in vars(env) if callable(getattr(type(env), name, None))),
    }


def changes(gm, run) -> tuple[object, list[str]]:
    """What `run()` gives, and what the ShapeEnv of the graph believes afterwards and did not
    before.
    """
    mode = fake_mode_of(gm)
    env = mode.shape_env if mode is not None else None
    before = {} if env is None else facts(env)
    out = run()
    after = {} if env is None else facts(env)
    return out, [
        f"{kind}: {before[kind]} -> {after[kind]}" for kind in before if before[kind] != after[kind]
    ]


@contextlib.contextmanager
def watched():
    """Inside, every pass over a graph is watched. Gives the list of all that has changed."""
    found: list[str] = []

    def watching(pass_):
        def run(gm, *args, **options):
            out, changed = changes(gm, lambda: pass_(gm, *args, **options))
            found.extend(changed)
            return out

        return run

    places = [(remembered, "fuse_graph"), (collect, "fuse_graph"), (export, "fuse_module")]
    before = [getattr(module, name) for module, name in places]
    for (module, name), pass_ in zip(places, before, strict=True):
        setattr(module, name, watching(pass_))
    try:
        yield found
    finally:
        for (module, name), pass_ in zip(places, before, strict=True):
            setattr(module, name, pass_)
