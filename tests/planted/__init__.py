"""The faults that `python -m tests.mutations` plants, each with the test that must catch it. Each
module has the faults of one package, or of a few.
"""

import importlib
import pkgutil

from .mutation import Mutation

MODULES = [
    importlib.import_module(f"{__name__}.{found.name}")
    for found in pkgutil.iter_modules(__path__)
    if found.name != "mutation"
]
MUTATIONS: dict[str, Mutation] = {
    name: fault for module in MODULES for name, fault in module.FAULTS.items()
}
