"""One room per pattern: every file here, loaded by itself. Of one that cannot be loaded there is a
warning.

Installed as fusion_backend.patterns; refuses to be imported under another name.
"""

import importlib
import pkgutil

from fusion_backend.ops.registry import clashes_left_out
from fusion_backend.reporting.report import warn_once

if __name__ != "fusion_backend.patterns":
    raise ImportError(
        "import fusion_backend.patterns: a bare `import patterns` would load a second copy"
    )

for room in sorted(module.name for module in pkgutil.iter_modules(__path__)):
    try:
        with clashes_left_out():
            importlib.import_module(f"fusion_backend.patterns.{room}")
    except Exception as error:
        warn_once(
            f"room {room}", f"fusion: the built-in patterns of {room}.py cannot be loaded: {error}"
        )
