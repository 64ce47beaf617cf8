"""numba-cuda's front end (Python functions -> LTO-IR) with no GPU, and in less than half its time: the machine code stays the same.

`prepared` changes a few things around numba's compiler and puts them back at the end, whatever happens. numba's own lock keeps the
compilers of other threads out meanwhile. What a later numba-cuda no longer has is left alone: then compiling takes longer, no more.
docs/facts.md ("Compile time") says what each of them saves.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, SimpleNamespace
from typing import Any

#: Words of the frame that makes room for others: CPython takes the next power of two, 1 MB, and nearly half of it is left.
ROOM_WORDS = 1 << 16

#: Passes over numba's IR for what no kernel here contains: closures, `with`, `raise` with computed arguments, functions to be inlined as
#: source, `literally` and `literal_unroll`, arithmetic on arrays. A kernel that did would be refused by the passes that follow.
NEEDLESS_PASSES = frozenset({
    "WithLifting", "InlineClosureLikes", "RewriteDynamicRaises", "MakeFunctionToJitFunction", "InlineInlinables", "FindLiterallyCalls",
    "LiteralUnroll", "InlineOverloads", "NopythonRewrites"})


def call_with_room(function: Callable, *arguments: Any, **options: Any) -> Any:
    """`function(*arguments, **options)`, with half a megabyte for the frames of all that it calls.

    CPython (3.11 and later) keeps frames in chunks of 16 KB. A call that no longer fits maps another chunk and unmaps it when it returns: 6 us
    instead of 0.03. A loop that happens to run at such a border pays that for every call in it, and numba's compiler is deep and busy enough
    to: a compile of `mma` took 400,000 system calls, a third of its time. A frame larger than a chunk gets one as large as the next power
    of two, and what it leaves of that is room for the frames that follow.
    """

    def call() -> Any:
        return function(*arguments, **options)

    code = call.__code__.replace(co_stacksize=ROOM_WORDS)
    return FunctionType(code, call.__globals__, call.__name__, None, call.__closure__)()


@contextmanager
def _replaced(owner: Any, name: str, replacement: Callable) -> Iterator[None]:
    """`owner.name` is `replacement(what it was)`; nothing is replaced where there is no such name."""
    original = getattr(owner, name, None)
    if original is None:
        yield
        return
    inherited = name not in vars(owner)
    setattr(owner, name, replacement(original))
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """numba makes millions of objects, nearly all of which live until it is done: looking for cycles among them is a tenth of its time.

    What is left of them then, half of it for good, would be looked through as soon as the collector runs again. By way of the permanent
    generation, if nobody uses that, it goes to the oldest one unseen, and what is garbage waits there for the next full collection.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if gc.get_freeze_count() == 0:
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def _remember_signatures(ask: Callable) -> Callable:
    """Let a builtin (an operator, a type, an instruction) be asked once what it makes of some argument types, not at every use.

    To find out that uint32 + uint32 is uint64, numba tries one overload after another, and hears of most that they do not apply from an
    exception; and it asks again when it lowers the sum. The answers depend on the types alone. Refusals are not kept.
    """
    from numba.cuda import types

    known: dict[tuple, Any] = {}

    def get_call_type(self: Any, context: Any, args: tuple, kws: dict) -> Any:
        if kws or not all(isinstance(argument, types.Type) for argument in args):
            return ask(self, context, args, kws)
        key = self, context, tuple(args)
        if key not in known:
            known[key] = ask(self, context, args, kws)
        return known[key]

    return get_call_type


def _skip_needless_passes(compiler: type) -> type:
    """The pipeline without NEEDLESS_PASSES, each of which reads every statement of every function."""

    class NeededPasses(compiler):
        def define_pipelines(self) -> list:
            managers = super().define_pipelines()
            for manager in managers:
                manager.passes = [entry for entry in manager.passes if entry[0].__name__ not in NEEDLESS_PASSES]
                manager.finalize()
            return managers

    return NeededPasses


def _leave_lifetimes(run: Callable) -> Callable:
    """Four passes work out the lifetimes of all variables that generators and `with` blocks want to know; the fifth does so to end them."""
    from numba.cuda.core import transforms

    def run_postprocessor(self: Any, emit_dels: bool = False, extend_lifetimes: bool = False) -> None:
        if emit_dels or self.func_ir.is_generator:
            run(self, emit_dels, extend_lifetimes)
        else:
            self.func_ir.blocks = transforms.canonicalize_cfg(self.func_ir.blocks)

    return run_postprocessor


@contextmanager
def prepared(capability: tuple) -> Iterator[None]:
    """numba-cuda's compiler as this package wants it, for a device of compute capability `capability`.

    The device is pretended: numba-cuda asks for the current GPU whenever it compiles a device function, which fails with no GPU. Its use is
    one flag of the type inference; the code is made for the `cc` that `cuda.compile` is given.
    """
    from numba.cuda import compiler, dispatcher, types
    from numba.cuda.core import postproc
    from numba.cuda.core.compiler_lock import global_compiler_lock

    device = SimpleNamespace(compute_capability=capability[:2])
    with (global_compiler_lock, _no_garbage_collection(),
          _replaced(dispatcher, "get_current_device", lambda ask: lambda: device),
          _replaced(types.Function, "get_call_type", _remember_signatures),
          _replaced(compiler, "CUDACompiler", _skip_needless_passes),
          _replaced(postproc.PostProcessor, "run", _leave_lifetimes)):
        yield
