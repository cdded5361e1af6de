"""What is set in Inductor that is not the default."""

from __future__ import annotations

import re
from collections.abc import Callable

from fusion_backend.compat.torch import CustomGraphPass, inductor_config


def changed_settings() -> str:
    """Inductor's settings that are not the default, a line each."""
    prefix = f"{inductor_config.__name__}."
    lines = []
    for line in inductor_config.codegen_config().splitlines():
        name, _, value = line.partition(" = ")
        known = inductor_config._config.get(name.removeprefix(prefix))
        if known is None or repr(known.default) != value:  # set again to what it was
            lines.append(line)
    return "\n".join(lines)


def custom_passes() -> list[CustomGraphPass | Callable]:
    """The user's own passes over Inductor's graphs, which `changed_settings` leaves out."""
    slots = [n for n in inductor_config._config if re.search(r"_custom_(pre_|post_)?pass$", n)]
    return [one for name in slots if (one := getattr(inductor_config, name)) is not None]
