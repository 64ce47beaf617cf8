"""The llvmlite machinery behind `ptx.py`: how a PTX instruction becomes a name that numba can compile.

The tools: `instruction` wraps one line of inline PTX, `in_place` one that changes a local array, `vector_load` / `vector_store`
are 8- and 16-byte accesses that NVVM understands (so it may schedule and hoist them), and the pointer, local-array and unroll
intrinsics are what plain numba-cuda lacks. Nothing here needs a driver or a GPU.
"""

import inspect

from llvmlite import ir
from numba.cuda import cgutils, types
from numba.cuda.core.errors import TypingError
from numba.cuda.extending import intrinsic

GLOBAL_SPACE = 1
SHARED_SPACE = 3
SHARED_SYMBOL = "numba_verify_dynamic_shared"
# wgmma descriptors and the 128-byte swizzle count from a 1024-byte boundary; every weaker use is served as well.
SHARED_ALIGNMENT = 1024

I8 = ir.IntType(8)
I32 = ir.IntType(32)
I64 = ir.IntType(64)

# numba type -> (LLVM type, register constraint letter of inline PTX)
REGISTERS = {
    types.uint16: (ir.IntType(16), "h"),
    types.int32: (I32, "r"),
    types.uint32: (I32, "r"),
    types.int64: (I64, "l"),
    types.uint64: (I64, "l"),
    types.float32: (ir.FloatType(), "f"),
}


class Declaration:
    """Name, parameter types and result types of an instruction, read off a function's annotations."""

    def __init__(self, function):
        signature = inspect.signature(function)
        self.function = function
        self.name = function.__name__
        self.parameters = list(signature.parameters)
        self.arguments = [p.annotation for p in signature.parameters.values()]
        returned = signature.return_annotation
        self.results = list(returned) if isinstance(returned, tuple) else [] if returned is None else [returned]
        self.python_signature = signature

    @property
    def result_type(self):
        if not self.results:
            return types.void
        return self.results[0] if len(self.results) == 1 else types.UniTuple(self.results[0], len(self.results))

    def check(self, given):
        """Refuse what numba would convert in silence: a double where the instruction works on float32."""
        if len(given) != len(self.arguments):
            raise TypingError(f"{self.name} takes {len(self.arguments)} arguments ({', '.join(self.parameters)}), "
                              f"got {len(given)}")
        for name, wanted, got in zip(self.parameters, self.arguments, given, strict=True):
            if wanted == types.float32 and got == types.float64:
                raise TypingError(f"{self.name}: {name} must be float32, got float64; wrap the literal or the "
                                  "expression in float32(...)")

    def publish(self, codegen):
        """The numba intrinsic with this name, signature and docstring whose body is `codegen(builder, arguments)`."""

        def typing(typingctx, *given):
            self.check(given)

            def lower(context, builder, signature, arguments):
                values = codegen(builder, arguments)
                if not self.results:
                    return context.get_dummy_value()
                return values[0] if len(values) == 1 else context.make_tuple(builder, signature.return_type, values)

            return self.result_type(*self.arguments), lower

        context = inspect.Parameter("typingctx", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = [context, *self.python_signature.parameters.values()]
        typing.__signature__ = self.python_signature.replace(parameters=parameters)
        typing.__name__ = typing.__qualname__ = self.name
        typing.__doc__ = self.function.__doc__
        typing.__module__ = self.function.__module__
        return intrinsic(typing)


def instruction(text, *, volatile=False, memory=False, convergent=False, tied=()):
    """Decorator: the annotated, empty function below it becomes the PTX instruction `text`.

    Operands are numbered as in LLVM inline assembly: results $0, $1, ..., then the arguments. Register classes follow
    from the annotations. `tied` names arguments that share a register with the results, in order (CUDA's "+f").
    volatile: neither dropped, doubled nor reordered with other volatile ones. memory: the same, and no load or store
    moves across it. convergent: may not be moved into or out of divergent control flow.
    """

    def decorate(function):
        declaration = Declaration(function)
        constraints = ["=" + REGISTERS[result][1] for result in declaration.results]
        for name, argument in zip(declaration.parameters, declaration.arguments, strict=True):
            constraints.append(str(tied.index(name)) if name in tied else REGISTERS[argument][1])
        if memory:
            constraints.append("~{memory}")
        outputs = [REGISTERS[result][0] for result in declaration.results]
        returned = ir.VoidType() if not outputs else outputs[0] if len(outputs) == 1 else ir.LiteralStructType(outputs)
        function_type = ir.FunctionType(returned, [REGISTERS[argument][0] for argument in declaration.arguments])
        attributes = ("convergent",) if convergent else ()

        def codegen(builder, arguments):
            assembly = ir.InlineAsm(function_type, text, ",".join(constraints), side_effect=volatile or memory)
            value = builder.call(assembly, arguments, attrs=attributes)
            return [value] if len(outputs) == 1 else [builder.extract_value(value, i) for i in range(len(outputs))]

        return declaration.publish(codegen)

    return decorate


def in_place(text, count, *, first=0, memory=False):
    """Decorator: the annotated, empty function below it becomes the PTX `text`, which changes a local array in its registers.

    The first argument is the array: `count` float32 of it, from `first` on, are operands $0 to $count - 1, each read and
    written, and the other arguments follow. Always volatile and convergent; memory as in `instruction`. Loads and stores around the
    instruction go away once everything is inlined, like those of any local array that is indexed by constants.
    """

    def decorate(function):
        declaration = Declaration(function)
        others = declaration.arguments[1:]
        element, letter = REGISTERS[types.float32]
        constraints = ["=" + letter] * count + [REGISTERS[argument][1] for argument in others] + [str(i) for i in range(count)]
        if memory:
            constraints.append("~{memory}")
        function_type = ir.FunctionType(ir.LiteralStructType([element] * count), [REGISTERS[argument][0] for argument in others] + [element] * count)
        assembly = ir.InlineAsm(function_type, text, ",".join(constraints), side_effect=True)

        def codegen(builder, arguments):
            places = [builder.gep(arguments[0], [I32(first + i)]) for i in range(count)]
            values = builder.call(assembly, [*arguments[1:], *map(builder.load, places)], attrs=("convergent",))
            for i, place in enumerate(places):
                builder.store(builder.extract_value(values, i), place)
            return []

        return declaration.publish(codegen)

    return decorate


def llvm_intrinsic(name):
    """Decorator: the annotated, empty function below it becomes a call of the LLVM intrinsic `name`."""

    def decorate(function):
        declaration = Declaration(function)
        function_type = ir.FunctionType(REGISTERS[declaration.results[0]][0],
                                        [REGISTERS[argument][0] for argument in declaration.arguments])

        def codegen(builder, arguments):
            return [builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), arguments)]

        return declaration.publish(codegen)

    return decorate


def expression(codegen):
    """Decorator: the annotated, empty function below it becomes `codegen(builder, *arguments)`, one LLVM value."""

    def decorate(function):
        return Declaration(function).publish(lambda builder, arguments: [codegen(builder, *arguments)])

    return decorate


def _vector_pointer(builder, address, vector, space):
    return builder.inttoptr(address, ir.PointerType(vector, space))


def vector_load(space):
    """Decorator: the annotated function (one address, four results) becomes one 16-byte load."""

    def decorate(function):
        declaration = Declaration(function)
        element = REGISTERS[declaration.results[0]][0]

        def codegen(builder, arguments):
            vector = builder.load(_vector_pointer(builder, arguments[0], ir.VectorType(element, 4), space), align=16)
            return [builder.extract_element(vector, I32(i)) for i in range(4)]

        return declaration.publish(codegen)

    return decorate


def vector_store(space):
    """Decorator: the annotated function (one address, two or four 4-byte values) becomes one aligned 8- or 16-byte store."""

    def decorate(function):
        declaration = Declaration(function)
        width = len(declaration.arguments) - 1
        vector_type = ir.VectorType(REGISTERS[declaration.arguments[1]][0], width)

        def codegen(builder, arguments):
            vector = ir.Constant(vector_type, ir.Undefined)
            for i in range(width):
                vector = builder.insert_element(vector, arguments[1 + i], I32(i))
            builder.store(vector, _vector_pointer(builder, arguments[0], vector_type, space), align=4 * width)
            return []

        return declaration.publish(codegen)

    return decorate


def shared_base(builder):
    """The block's dynamic shared memory as an `i8 addrspace(3)*`, declared in the module on first use."""
    module = builder.module
    symbol = module.globals.get(SHARED_SYMBOL)
    if symbol is None:
        symbol = ir.GlobalVariable(module, ir.ArrayType(I8, 0), SHARED_SYMBOL, addrspace=SHARED_SPACE)
        symbol.linkage = "external"
        symbol.align = SHARED_ALIGNMENT
    return builder.bitcast(symbol, ir.PointerType(I8, SHARED_SPACE))


def generic_pointer(context, builder, value, space, pointer_type):
    """`value` (an integer or an i8 pointer in `space`) as the generic pointer that numba indexes.

    The detour through the address space tells NVVM which memory it is, so it emits ld.global / ld.shared, not ld.
    """
    generic = context.get_value_type(pointer_type)
    typed = ir.PointerType(context.get_data_type(pointer_type.dtype), space)
    convert = builder.inttoptr if isinstance(value.type, ir.IntType) else builder.bitcast
    return builder.addrspacecast(convert(value, typed), generic)


def make_local_array(length, element):
    """A zero-argument intrinsic that returns a typed pointer to `length` uninitialised elements of the thread's own."""

    @intrinsic
    def local_array(typingctx):
        def lower(context, builder, signature, arguments):
            storage = cgutils.alloca_once(builder, ir.ArrayType(context.get_data_type(element), length))
            return builder.bitcast(storage, context.get_value_type(signature.return_type))

        return types.CPointer(element)(), lower

    return local_array


def _unroll_metadata(module):
    """A fresh loop identity that carries `llvm.loop.unroll.full`. LLVM wants its first operand to be the node itself."""
    request = module.add_metadata([ir.MetaDataString(module, "llvm.loop.unroll.full")])
    # The placeholder keeps llvmlite from merging two loops into one node; it is replaced by the self reference.
    placeholder = ir.MetaDataString(module, f"loop {len(module.metadata)}")
    identity = module.add_metadata([placeholder, request])
    identity.operands = (identity, request)
    return identity


def _loop_header(builder):
    """The numba block that fetches the next index of the `for` loop whose body begins where `builder` stands, or None.

    numba has lowered it already; its last part branches here. Parts of a block that numba splits while lowering it
    carry its name and a suffix ("B40" -> "B40.endif"), and jumps go to the first part.
    """
    body = builder.block
    blocks = builder.function.blocks
    names = {block.name.partition(".")[0] for block in blocks
             if isinstance(block.terminator, ir.instructions.ConditionalBranch) and body in block.terminator.operands}
    headers = [block for block in blocks if block.name in names]
    return headers[0] if len(headers) == 1 else None


def _advance_unconditionally(header):
    """Let a `range` loop's header step its counter and index without asking first whether there is a next one.

    numba writes "if count > 0: take the index, count -= 1, index += step", then asks count > 0 again to enter the
    body. In that diamond the newer NVVM (sm_100 and up) cannot count the trips of a loop around two others, and does
    not unroll it. Without the first question it is a plain counted loop; what the last step computes too much, nobody
    reads.
    """
    terminator = header.terminator
    if not isinstance(terminator, ir.instructions.ConditionalBranch):
        return
    more, step, _ = terminator.operands
    counts_down = isinstance(more, ir.instructions.ICMPInstr) and any(
        instruction.opname == "sub" and instruction.operands[0] is more.operands[0] for instruction in step.instructions)
    if counts_down:
        header.instructions.remove(terminator)
        header.terminator = None
        ir.IRBuilder(header).branch(step)


def mark_loop_for_full_unroll(builder):
    """Attach `llvm.loop.unroll.full` to the `range` loop whose body begins where `builder` stands.

    LLVM looks for loop metadata on the back edges. They are the jumps to the loop's header that numba has yet to emit,
    so the builder's `branch` is wrapped; a builder belongs to one function, and the wrapper ends with it.
    """
    header = _loop_header(builder)
    if header is None:
        raise TypingError("unroll() must be the first statement of the body of a for loop")
    _advance_unconditionally(header)
    identity = _unroll_metadata(builder.module)
    branch = builder.branch

    def branch_and_mark(target):
        jump = branch(target)
        if target is header:
            jump.set_metadata("llvm.loop", identity)
        return jump

    builder.branch = branch_and_mark
