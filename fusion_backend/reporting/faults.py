"""What one rule, site or guard raised, as the reason why it alone is refused, and not the graph."""

from __future__ import annotations

from fusion_backend.compat.torch import GuardOnDataDependentSymNode


def named(error: Exception) -> str:
    """The kind of an exception and the first line of what it says."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def refusal(error: Exception, doing: str) -> tuple[str, str | None]:
    """Why a site is refused, and the same once more where it is a fault: to need a
    guard is none.
    """
    if isinstance(error, GuardOnDataDependentSymNode):
        return f"it would need a guard on {error.cond}", None
    told = f"{doing} raised {named(error)}"
    return told, told


def of_kernel(error: Exception) -> str:
    """Why a site is refused whose kernel was tried out. A question that needs a guard is raised
    again.
    """
    if isinstance(error, GuardOnDataDependentSymNode):
        raise error
    return f"its kernel failed: {named(error)}"
