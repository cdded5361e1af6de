"""An exception in a rule, site or guard, as the reason to refuse it, and not the whole graph."""

from __future__ import annotations

from fusion_backend.compat.torch import GuardOnDataDependentSymNode


def described(error: Exception) -> str:
    """The class of an exception and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def refusal(error: Exception, doing: str) -> tuple[str, str | None]:
    """(the reason why a site is refused, the fault to report). The fault is None where a question
    about sizes would need a guard: such a site is refused by design.
    """
    if isinstance(error, GuardOnDataDependentSymNode):
        return f"it would need a guard on {error.cond}", None
    fault = f"{doing} raised {described(error)}"
    return fault, fault


def of_kernel(error: Exception) -> str:
    """Why a site is refused: its kernel failed when it was compiled or run on fake tensors. Raises
    `error` again where it says that a guard is needed.
    """
    if isinstance(error, GuardOnDataDependentSymNode):
        raise error
    return f"its kernel failed: {described(error)}"
