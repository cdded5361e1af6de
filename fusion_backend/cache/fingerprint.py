"""The fingerprint of a pattern: a digest of its functions' code and of everything that the code
reaches.

Objects in memory are followed, never files: bytecode and its constants, the globals and attributes
of modules that it names, closures, defaults, attributes of functions and classes, partial
applications, Triton kernels with the globals they use, and the contents of plain objects and
containers. So the digest describes what runs in this process, even if the files have changed since.

Names are looked up when the digest is taken, which is at every compilation. So a helper may be
defined below the pattern, and a global that is bound again gives another digest, after which the
pattern is traced anew. In Python, torch, triton and this package only closures are followed,
because the cache keys also contain their versions or sources.

An object that cannot be followed (a tensor, C code of other packages, a module that is used as a
value, `exec`) makes the fingerprint `opaque`. Within one process it still shows whether something
has changed, but it must not be part of a cache key.
"""

from __future__ import annotations

import collections
import dataclasses
import dis
import enum
import functools
import hashlib
import importlib
import os
import sys
import types
import weakref
from collections.abc import Callable

import torch

from fusion_backend.compat.torch import OPERATORS
from fusion_backend.ops.definition import Definition
from fusion_backend.ops.rule import ANALYSES

OURS = {"torch", "triton", "fusion_backend"}
PYTHON = os.path.dirname(os.__file__) + os.sep
PLAIN = {type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented)}
PLAIN |= {torch.dtype, torch.device, torch.layout, torch.memory_format}
DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType, types.WrapperDescriptorType)
DESCRIPTORS += (
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.MethodWrapperType,
)
# Attributes of a pattern and of a class that say where it is or what it is called, not what it
# does.
POSITIONS = {"memo", "file", "line", "where", "spec", "doc", "near_misses"}
LABELS = {
    "__doc__",
    "__module__",
    "__annotations__",
    "__dict__",
    "__weakref__",
    "_abc_impl",
    "__firstlineno__",
}
LABELS |= {"__dataclass_fields__", "__dataclass_params__"}
# Attributes of a Triton kernel that decide how it is compiled and tuned.
KERNEL = (
    "fn",
    "src",
    "configs",
    "values",
    "keys",
    "noinline",
    "do_not_specialize",
    "do_not_specialize_on_alignment",
)
KERNEL += (
    "pre_hook",
    "post_hook",
    "early_config_prune",
    "perf_model",
    "reset_to_zero",
    "restore_value",
)
# Functions whose results depend on more than code.
DYNAMIC = {eval, exec, compile, globals, locals, __import__, open, input}
DYNAMIC |= {importlib.import_module, importlib.reload, os.getenv}
LOOKED_UP = dict.fromkeys(("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"), "global")
LOOKED_UP |= dict.fromkeys(("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"), "cell")
MAX_OBJECTS = 20_000  # more would take too long to follow

NAMES: weakref.WeakKeyDictionary[types.CodeType, list[tuple[str, ...]]] = (
    weakref.WeakKeyDictionary()
)


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """`opaque` says what could not be followed; "" where the digest holds in every process."""

    digest: str
    opaque: str


def fingerprint(what: Definition | dict[str, Callable]) -> Fingerprint:
    """The fingerprint of a pattern, or of functions by name, as they are now."""
    walk = Walk()
    walk.token(what)
    return walk.finish()


def built_in(pattern: Definition) -> bool:
    """Is the pattern one of ours, whose sources are part of every key?"""
    return known(pattern.reference.__globals__.get("__name__"), None)


def known(name: str | None, file: str | None) -> bool:
    """Does a module with this name and file belong to Python, torch, triton or this package?"""
    root = (name or "").partition(".")[0]
    if root in OURS:
        return True
    own = (
        file is None
        or file.startswith("<frozen")
        or (file.startswith(PYTHON) and "-packages" not in file)
    )
    # a user's file may have the name of a module of Python
    return root in sys.stdlib_module_names and own


def known_module(module: types.ModuleType | None) -> bool:
    """`known`, with the file from the module's dictionary: getattr may run code of the module."""
    return module is not None and known(module.__name__, vars(module).get("__file__"))


def names_in(code: types.CodeType) -> list[tuple[str, ...]]:
    """The names that code, and code nested in it, looks up outside of itself, each with the
    attributes that follow.

    `helpers.act(x)` gives ("global", "helpers", "act"); a variable of an enclosing function begins
    with "cell"; `import helpers` gives ("import", "helpers").
    """
    if code not in NAMES:
        found: dict[tuple[str, ...], None] = {}
        chain: tuple[str, ...] | None = None
        for step in dis.get_instructions(code):
            if chain is not None and step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                chain = (*chain, step.argval)
            elif step.opname not in ("EXTENDED_ARG", "PUSH_NULL"):
                if chain is not None:
                    found[chain] = None
                where = LOOKED_UP.get(step.opname)
                chain = (where, step.argval) if where else None
            if step.opname == "IMPORT_NAME":
                found["import", step.argval] = None
        for inner in code.co_consts:
            if isinstance(inner, types.CodeType):
                found |= dict.fromkeys(names_in(inner))
        NAMES[code] = list(found)
    return NAMES[code]


class Walk:
    """A breadth-first walk from one object. Each object has a number, and its description refers to
    other objects by number, so that cycles end.
    """

    def __init__(self):
        self.numbers: dict[int, int] = {}
        self.objects: list[object] = []
        self.opaque = ""
        self.digest = hashlib.sha256()

    def finish(self) -> Fingerprint:
        """Describe every object that was reached, also from the descriptions themselves."""
        done = 0
        while done < len(self.objects):
            if done == MAX_OBJECTS:
                self.unfollowed(self.objects[0], f"it reaches more than {MAX_OBJECTS} objects")
                break
            value = self.objects[done]
            try:
                lines = self.describe(value)
            except Exception as error:  # an attribute of a user's object may raise anything
                lines = [
                    self.unfollowed(value, f"{type(value).__name__} raised {type(error).__name__}")
                ]
            self.digest.update(repr((done, lines)).encode())
            done += 1
        return Fingerprint(self.digest.hexdigest(), self.opaque)

    def unfollowed(self, value, why: str) -> str:
        self.opaque = self.opaque or why
        return f"opaque {id(value)}"

    def token(self, value) -> str:
        """A value within the description of another: the value where it is short and immutable,
        else its number.
        """
        kind = type(value)
        if kind in PLAIN:
            return f"{kind.__name__} {value!r}"
        if kind is tuple:
            return f"({', '.join(map(self.token, value))})"
        if kind is types.CodeType:
            return f"code {self.code(value)}"
        if kind in (set, frozenset):
            if not {type(v) for v in value} <= PLAIN:
                return self.unfollowed(value, "a set of objects")
            return f"{kind.__name__} {sorted(map(self.token, value))}"
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        return f"#{self.numbers[id(value)]}"

    def code(self, code: types.CodeType) -> str:
        """A digest of code without its file and lines. Constants count by value, because it differs
        between processes which equal constants are one object.
        """
        parts = [
            code.co_code,
            code.co_names,
            code.co_varnames,
            code.co_freevars,
            code.co_cellvars,
            code.co_flags,
        ]
        parts += [
            code.co_argcount,
            code.co_posonlyargcount,
            code.co_kwonlyargcount,
            code.co_exceptiontable,
        ]
        constants = ", ".join(map(self.token, code.co_consts))
        return hashlib.sha256(f"{parts!r}{constants}".encode()).hexdigest()

    def describe(self, value) -> list[str]:
        """The kind of an object and what it refers to."""
        kind = type(value)
        if kind in RULES:
            return [kind.__name__, *RULES[kind](self, value)]
        if isinstance(value, type):
            return ["class", *self.of_class(value)]
        if isinstance(value, types.ModuleType):
            return [
                f"module {value.__name__}",
                *([] if known_module(value) else [self.module(value)]),
            ]
        if isinstance(value, Definition):
            asked = getattr(value, "asks", {}).values()  # analyses, which are reached by name
            return [
                "pattern",
                *(f"{k}={self.token(v)}" for k, v in vars(value).items() if k not in POSITIONS),
                *(self.token(ANALYSES[name]) for name in asked if name in ANALYSES),
            ]
        if isinstance(value, enum.Enum):
            return ["member", self.token(kind), value.name, self.token(value.value)]
        if isinstance(value, DESCRIPTORS):
            return [
                repr(kind),
                value.__qualname__,
                self.token(getattr(value, "__objclass__", None)),
            ]
        if isinstance(value, OPERATORS):
            return [kind.__name__, str(value)]
        if kind.__module__.startswith("triton.") and hasattr(value, "fn"):
            return [kind.__name__, *(f"{k}={self.token(getattr(value, k, None))}" for k in KERNEL)]
        return self.of_object(value)

    def module(self, module: types.ModuleType) -> str:
        return self.unfollowed(module, f"the module {module.__name__} is used as a value")

    def of_function(self, fn: types.FunctionType) -> list[str]:
        cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
        closure = {name: cell_content(cell) for name, cell in cells.items()}
        lines = [f"attributes {self.token(vars(fn))}"] if vars(fn) else []
        if known(fn.__globals__.get("__name__"), fn.__code__.co_filename):
            lines += [f"{fn.__globals__['__name__']}.{fn.__qualname__}"]
            return lines + [f"{name}={self.token(value)}" for name, value in closure.items()]
        lines += [
            self.token(fn.__code__),
            self.token(fn.__defaults__),
            self.token(fn.__kwdefaults__),
        ]
        for where, name, *attributes in names_in(fn.__code__):
            if where == "import":
                lines.append(self.imported(fn, name))
                continue
            for names in (closure,) if where == "cell" else (fn.__globals__, fn.__builtins__):
                if name in names:
                    lines.append(f"{name} is {self.follow(names[name], attributes)}")
                    break
        return lines

    def imported(self, fn: types.FunctionType, name: str) -> str:
        if known_module(sys.modules.get(name)):
            return f"import {name}"
        return self.unfollowed(fn, f"{fn.__qualname__} imports {name} while it runs")

    def follow(self, value, attributes: list[str]) -> str:
        """The value of a name and of the attributes that follow it, as long as these belong to
        modules.
        """
        for name in attributes:
            if not isinstance(value, types.ModuleType) or value.__name__.partition(".")[0] in OURS:
                break
            if name not in vars(value):
                if known_module(value):
                    break
                return self.unfollowed(
                    value, f"{value.__name__}.{name} is not an attribute that can be looked up"
                )
            value = vars(value)[name]
        return self.token(value)

    def of_class(self, cls: type) -> list[str]:
        if known_module(sys.modules.get(cls.__module__)):
            return [f"{cls.__module__}.{cls.__qualname__}"]
        attributes = {k: v for k, v in vars(cls).items() if k not in LABELS}
        return [
            cls.__qualname__,
            self.token(type(cls)),
            self.token(cls.__bases__),
            *self.of_dict(attributes),
        ]

    def of_dict(self, value) -> list[str]:
        return [f"{self.token(k)}: {self.token(v)}" for k, v in value.items()]

    def of_list(self, value) -> list[str]:
        return [self.token(v) for v in value]

    def of_builtin(self, fn: types.BuiltinFunctionType) -> list[str]:
        home = fn.__self__.__name__ if isinstance(fn.__self__, types.ModuleType) else fn.__module__
        if fn in DYNAMIC or not (home is None or known(home, None)):
            return [self.unfollowed(fn, f"{home}.{fn.__qualname__} is not Python code")]
        method = fn.__self__ is not None and not isinstance(fn.__self__, types.ModuleType)
        return [f"{home}.{fn.__qualname__}", *([self.token(fn.__self__)] if method else [])]

    def of_object(self, value) -> list[str]:
        """An instance: its class, and the state that `copy` would take over."""
        cls = type(value)
        plain = cls.__reduce_ex__ is object.__reduce_ex__ and cls.__reduce__ is object.__reduce__
        plain = plain and cls.__getstate__ is object.__getstate__
        if not plain and cls.__module__.partition(".")[0] not in sys.stdlib_module_names:
            return [self.unfollowed(value, f"an object of {cls.__module__}.{cls.__qualname__}")]
        try:
            parts = value.__reduce_ex__(2)
        except TypeError:
            return [self.unfollowed(value, f"an object of {cls.__module__}.{cls.__qualname__}")]
        if isinstance(parts, str):
            return [self.token(cls), parts]
        rest = [list(p) if p is not None else None for p in parts[3:5]]
        return [self.token(cls), *map(self.token, parts[:3]), *map(self.token, rest)]


def cell_content(cell: types.CellType):
    try:
        return cell.cell_contents
    except ValueError:  # a name that is bound later
        return "unbound"


RULES = {
    types.FunctionType: lambda walk, fn: (
        [walk.unfollowed(fn, fn.__qualname__)] if fn in DYNAMIC else walk.of_function(fn)
    ),
    types.BuiltinFunctionType: Walk.of_builtin,
    types.MethodType: lambda walk, m: [walk.token(m.__func__), walk.token(m.__self__)],
    types.MappingProxyType: Walk.of_dict,
    dict: Walk.of_dict,
    collections.OrderedDict: Walk.of_dict,
    list: Walk.of_list,
    staticmethod: lambda walk, m: [walk.token(m.__func__)],
    classmethod: lambda walk, m: [walk.token(m.__func__)],
    property: lambda walk, p: [walk.token((p.fget, p.fset, p.fdel))],
    functools.partial: lambda walk, p: [walk.token((p.func, p.args)), walk.token(p.keywords)],
    type(functools.lru_cache(lambda: None)): lambda walk, f: [walk.token(f.__wrapped__)],
}
