"""The names of fusion_backend that a side of benchmarks.compare needs, in whatever layout.

benchmarks.compare times two revisions of fusion_backend with the benchmarks of the working tree. So
what a side imports of fusion_backend goes by this file, which also knows where older revisions,
before the package was divided, had it. The current place of a name comes first.
"""

from __future__ import annotations

import importlib


def first_found(*places: str) -> object:
    """The object at the first of some places, "module:name", that exists. ImportError where none
    does.
    """
    for place in places:
        module, _, name = place.partition(":")
        try:
            return getattr(importlib.import_module(module), name)
        except (ModuleNotFoundError, AttributeError) as error:
            # a dependency that is missing is no sign of another layout
            if isinstance(error, ModuleNotFoundError) and not module.startswith(error.name or ""):
                raise
    raise ImportError(f"this revision of fusion_backend has none of {', '.join(places)}")


fusion = first_found("fusion_backend.frontends.dynamo:fusion", "fusion_backend.backend:fusion")
patterns = first_found(
    "fusion_backend.frontends.loading:patterns",
    "fusion_backend.frontends.dynamo:patterns",
    "fusion_backend.backend:patterns",
)
FUSION_RULES = first_found(
    "fusion_backend.ops.registry:FUSION_RULES",
    "fusion_backend.ops.pattern:REGISTRY",
    "fusion_backend.pattern:REGISTRY",
)
inductor_config = first_found(
    "fusion_backend.compat.torch:inductor_config", "fusion_backend.torch_api:inductor_config"
)
