"""What a pattern does, as a digest: the code of its functions and everything that this code
reaches.

Objects in memory are followed, never files: bytecode and its constants, the globals and attributes
of modules that it names, closures, defaults, attributes of functions and classes, partial
applications, Triton kernels with the globals they use, plain objects and containers by what they
hold. So the digest tells what runs in this process, whatever has become of the files since.

A name means what it means when the digest is taken, which is at every compilation: a helper may be
defined below the pattern, and a global that is bound again gives another digest, after which the
pattern is traced anew. Python, torch, triton and this package are not followed, but for what they
hold in closures: their versions or sources are in the keys beside it.

What cannot be followed (a tensor, C code of other packages, a module that is handed around, `exec`)
makes the fingerprint `opaque`: it then tells this process whether something has changed, and must
not name anything in a cache.
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
from fusion_backend.ops.pattern import Pattern

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
# Of a pattern and of a class these say where it is or what it is called, not what it does.
PLACES = {"memo", "file", "line", "where", "spec", "doc", "near_misses"}
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
# What decides how a Triton kernel is compiled and tuned.
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
# What these return depends on more than code.
DYNAMIC = {eval, exec, compile, globals, locals, __import__, open, input}
DYNAMIC |= {importlib.import_module, importlib.reload, os.getenv}
LOOKED_UP = dict.fromkeys(("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"), "global")
LOOKED_UP |= dict.fromkeys(("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"), "cell")
LONGEST = 20_000  # objects that are followed, before it takes too long

NAMES: weakref.WeakKeyDictionary[types.CodeType, list[tuple[str, ...]]] = (
    weakref.WeakKeyDictionary()
)


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """`opaque` says what could not be followed; empty where the digest holds in every process."""

    digest: str
    opaque: str


def fingerprint(what: Pattern | dict[str, Callable]) -> Fingerprint:
    """Of a pattern, or of functions by name, as they are now."""
    walk = Walk()
    walk.token(what)
    return walk.finish()


def built_in(pattern: Pattern) -> bool:
    """Is it one of ours, whose sources are part of every key?"""
    return known(pattern.reference.__globals__.get("__name__"), None)


def known(name: str | None, file: str | None) -> bool:
    """Is a module, given its file, one of Python's own, of torch, triton, or ours?"""
    root = (name or "").partition(".")[0]
    if root in OURS:
        return True
    own = (
        file is None
        or file.startswith("<frozen")
        or (file.startswith(PYTHON) and "-packages" not in file)
    )
    # a user's file may have the name of one of Python's
    return root in sys.stdlib_module_names and own


def known_module(module: types.ModuleType | None) -> bool:
    """Looked up in its dictionary: to ask a module for what it lacks may run code of its own."""
    return module is not None and known(module.__name__, vars(module).get("__file__"))


def names_in(code: types.CodeType) -> list[tuple[str, ...]]:
    """The names that code looks up outside of itself, each with the attributes taken of it; nested
    code too.

    `helpers.act(x)` gives ("global", "helpers", "act"); a variable of a function around it begins
    with "cell", and `import helpers` gives ("import", "helpers").
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
    """Objects are numbered as they are met, and described by the numbers of what they hold; cycles
    end there.
    """

    def __init__(self):
        self.numbers: dict[int, int] = {}
        self.met: list[object] = []
        self.opaque = ""
        self.digest = hashlib.sha256()

    def finish(self) -> Fingerprint:
        """Describe all that was met, and what is met while doing so."""
        done = 0
        while done < len(self.met):
            if done == LONGEST:
                self.unfollowed(self.met[0], f"it reaches more than {LONGEST} objects")
                break
            value = self.met[done]
            try:
                lines = self.describe(value)
            except Exception as error:  # whatever an object of a user's does when it is looked at
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
        """A value in the description of another: itself where it is short and cannot change, else
        its number.
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
            self.numbers[id(value)] = len(self.met)
            self.met.append(value)
        return f"#{self.numbers[id(value)]}"

    def code(self, code: types.CodeType) -> str:
        """Without its file and lines. By value: two processes may share equal constants
        differently.
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
        """What an object is and holds."""
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
        if isinstance(value, Pattern):
            return [
                "pattern",
                *(f"{k}={self.token(v)}" for k, v in vars(value).items() if k not in PLACES),
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
        held = {name: content(cell) for name, cell in cells.items()}
        lines = [f"attributes {self.token(vars(fn))}"] if vars(fn) else []
        if known(fn.__globals__.get("__name__"), fn.__code__.co_filename):
            lines += [f"{fn.__globals__['__name__']}.{fn.__qualname__}"]
            return lines + [f"{name}={self.token(value)}" for name, value in held.items()]
        lines += [
            self.token(fn.__code__),
            self.token(fn.__defaults__),
            self.token(fn.__kwdefaults__),
        ]
        for where, name, *attributes in names_in(fn.__code__):
            if where == "import":
                lines.append(self.imported(fn, name))
                continue
            for names in (held,) if where == "cell" else (fn.__globals__, fn.__builtins__):
                if name in names:
                    lines.append(f"{name} is {self.reached(names[name], attributes)}")
                    break
        return lines

    def imported(self, fn: types.FunctionType, name: str) -> str:
        if known_module(sys.modules.get(name)):
            return f"import {name}"
        return self.unfollowed(fn, f"{fn.__qualname__} imports {name} while it runs")

    def reached(self, value, attributes: list[str]) -> str:
        """What a name stands for, through the attributes of modules."""
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
        """An instance: its class, and what `copy` would take over."""
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


def content(cell: types.CellType):
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
