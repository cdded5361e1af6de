"""Triton's interpreter without what it does again and again: a third of the time of our kernels.

At every launch, and at every call of a device function within one, it looks through all members of
`triton.language` and replaces the builtins among them, which within a launch are replaced already.
"""

import functools
import inspect
import os

import triton.language as tl


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
