"""What one rule, site or guard raised, as the reason why it alone is refused, and not the graph."""

from __future__ import annotations

from fusion_backend.compat.torch import GuardOnDataDependentSymNode


class Fault(Exception):
    """Code that was asked about one site raised something. The message is a sentence that says so."""


def named(error: Exception) -> str:
    """The kind of an exception and the first line of what it says."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def refusal(error: Exception, doing: str) -> tuple[str, str | None]:
    """Why a site is refused, and the same once more where it is a fault: to need a guard is none."""
    if isinstance(error, GuardOnDataDependentSymNode):
        return f"it would need a guard on {error.cond}", None
    told = str(error) if isinstance(error, Fault) else f"{doing} raised {named(error)}"
    return told, told


def ask(name: str, question, values):
    """The answer of a pattern's function. Fault: it raised something, other than that it needs a guard."""
    try:
        return question(*values)
    except GuardOnDataDependentSymNode:
        raise
    except Exception as error:
        raise Fault(f"its {name} raised {named(error)}") from error


def of_kernel(error: Exception) -> str:
    """Why a site is refused whose kernel was tried out. A question that needs a guard is raised again."""
    if isinstance(error, GuardOnDataDependentSymNode):
        raise error
    return f"its kernel failed: {named(error)}"
