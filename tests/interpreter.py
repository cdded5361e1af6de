"""Triton's interpreter without what it does again and again: half of the time of our kernels.

At every launch, and at every call of a device function within one, it looks through all members of
`triton.language` and replaces the builtins among them, which within a launch are replaced already.
At every sum of integers it asks in six operations whether the sum is too large, and drops the
answer. Every value has a shape of its own, which is checked, and written out, anew.
"""

import functools
import inspect
import os

import triton.language as tl
from triton.language.semantic import TritonSemantic


def hasten() -> None:
    """The builtins of a module are listed once, and replaced once a launch."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime import interpreter

    replace, nothing = interpreter._patch_lang, interpreter._LangPatchScope

    @functools.cache
    def builtins_of(package) -> list[str]:
        return [name for name, it in inspect.getmembers(package) if tl.core.is_builtin(it)]

    def replace_builtins(package, builder, scope):
        for name in builtins_of(package):
            member = getattr(package, name)
            if tl.core.is_builtin(member):
                interpreter._patch_attr(package, name, member, builder, scope)

    def replace_once(fn):
        langs = [v for v in fn.__globals__.values() if v is tl or v is tl.core]
        within = langs and not any(tl.core.is_builtin(lang.load) for lang in langs)
        return nothing() if within else replace(fn)

    of_scalar = functools.cache(interpreter._get_np_dtype)

    def np_dtype(dtype):
        if isinstance(dtype, tl.block_type):  # which has no hash
            dtype = dtype.element_ty
        return of_scalar(tl.uint64 if isinstance(dtype, tl.pointer_type) else dtype)

    interpreter._patch_builtin = replace_builtins
    interpreter._patch_lang = replace_once
    interpreter._get_np_dtype = np_dtype
    overflows_where_it_is_told()
    shapes_once()


def overflows_where_it_is_told() -> None:
    """`device_assert` does nothing but in debug mode."""
    ask = TritonSemantic.binary_op_sanitize_overflow_impl

    def ask_if_told(self, *operands):
        if self.builder.options.debug:
            ask(self, *operands)

    TritonSemantic.binary_op_sanitize_overflow_impl = ask_if_told


def shapes_once() -> None:
    """The types of blocks, and the shapes of tensors, share what follows from their sizes."""
    make_type = tl.block_type.__init__
    types: dict[tuple, dict] = {}
    shapes: dict[tuple, tuple] = {}

    def type_made(self, element_ty, shape):
        sizes = tuple(getattr(s, "value", s) for s in shape)
        known = types.get((sizes, element_ty.name))
        if known is None:
            make_type(self, element_ty, shape)
            types[sizes, element_ty.name] = {k: vars(self)[k] for k in ("shape", "numel", "name")}
        else:
            vars(self).update(known, element_ty=element_ty)

    make_tensor = tl.tensor.__init__

    def tensor_made(self, handle, type):
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes not in shapes:
            make_tensor(self, handle, type)
            shapes[sizes] = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = shapes[sizes]

    tl.block_type.__init__ = type_made
    tl.tensor.__init__ = tensor_made
