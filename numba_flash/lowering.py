"""From the description of an instruction to an intrinsic that Numba compiles."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from numba import types

from .instructions import Address, Literal, Ptx, RegisterProduct, Registers, Scalar, Wgmma

intrinsic: Any
try:
    from numba.cuda.extending import intrinsic
except ImportError:  # plain numba, without the numba-cuda package
    from numba.extending import intrinsic

INSTRUCTIONS: dict[Any, Any] = {}
"""The description of each intrinsic."""

CONSTRAINTS = {"float32": "f", "int32": "r", "uint32": "r", "boolean": "r"}
"""How LLVM names the PTX register of a value."""
SHARED_POINTER, GLOBAL_POINTER = "r", "l"
ADDRESS_SPACE = {"global": 1, "shared": 3}
REGISTER_BYTES = 4


def define(description: Any, emit: Callable | None = None, operands: Ptx | None = None) -> Any:
    """The intrinsic of an instruction.

    Parameters
    ----------
    description
        A dataclass of `instructions`.
    emit : callable, optional
        ``emit(code: Code) -> LLVM value or None`` writes it; left out, it is the statement
        ``description.ptx``.
    operands : Ptx, optional
        What it takes, where ``description.ptx`` does not say.
    """
    ptx = operands or description.ptx

    def typer(typingctx, *arguments):
        signature = signature_of(ptx, arguments)
        if signature is None:
            return None

        def codegen(context, builder, signature, values):
            code = Code(context, builder, signature.args, values, ptx)
            value = emit(code) if emit else code.statement()
            return context.get_dummy_value() if value is None else value

        return signature, codegen

    # Numba takes the name and the number of arguments from the function.
    typer.__name__ = getattr(description, "name", type(description).__name__)
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    typer.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, kind) for name in ("typingctx", *parameters(ptx))]
    )
    made = intrinsic(typer)
    INSTRUCTIONS[made] = description
    return made


def parameters(ptx: Ptx) -> list[str]:
    """Names of the arguments."""
    names = []
    for name, operand in ptx.operands.items():
        names.append(name)
        if isinstance(operand, (Registers, Address)) and not operand.whole:
            names.append(f"{name}_offset")
    return names


def signature_of(ptx: Ptx, arguments: tuple[Any, ...]) -> Any:
    """The types that Numba shall convert the arguments to; None where they cannot be taken."""
    given, taken = iter(arguments), []
    for operand in ptx.operands.values():
        argument = next(given)
        if isinstance(operand, Scalar):
            taken.append(getattr(types, operand.dtype))
        elif isinstance(operand, Literal):
            # Numba asks a second time, with the values of constants.
            if not isinstance(argument, types.IntegerLiteral):
                return None
            taken.append(argument)
        elif not holds(argument, operand):
            return None
        else:
            taken.append(argument)
            if not operand.whole:
                taken.append(next(given))
    result = types.void if ptx.result is None else result_type(ptx.result)
    return result(*taken)


def holds(argument: Any, operand: Registers | Address) -> bool:
    """Whether an argument is an array of what the operand asks for."""
    if not isinstance(argument, types.Array):
        return False
    if operand.dtype:
        return str(argument.dtype) == operand.dtype
    return isinstance(operand, Address) or argument.dtype.bitwidth == 8 * REGISTER_BYTES


def result_type(name: str) -> Any:
    """The type of a name, or the tuple type of several with commas between."""
    parts = [getattr(types, part) for part in name.split(", ")]
    return parts[0] if len(parts) == 1 else types.UniTuple(parts[0], len(parts))


class Code:
    """The LLVM code of one use of an instruction.

    Attributes
    ----------
    arguments : dict of str to tuple
        By name, the LLVM value of an argument and its Numba type.
    """

    def __init__(self, context: Any, builder: Any, kinds: Any, values: Any, ptx: Ptx):
        from llvmlite import ir  # not at import: the emulator runs without it

        self.ir = ir
        self.context = context
        self.builder = builder
        self.ptx = ptx
        self.arguments = dict(zip(parameters(ptx), zip(values, kinds, strict=True), strict=True))

    def llvm_type(self, dtype: str) -> Any:
        if dtype == "boolean":
            return self.ir.IntType(1)
        return self.ir.FloatType() if dtype == "float32" else self.ir.IntType(32)

    def scalar(self, name: str) -> Any:
        value, kind = self.arguments[name]
        return self.builder.zext(value, self.ir.IntType(32)) if kind == types.boolean else value

    # Places

    def data(self, name: str) -> Any:
        """The pointer to an array's first element."""
        value, kind = self.arguments[name]
        return self.context.make_array(kind)(self.context, self.builder, value).data

    def offset(self, name: str, dtype: Any) -> Any:
        """The element offset of an operand; 0 if it has none."""
        if f"{name}_offset" not in self.arguments:
            return self.context.get_constant(dtype, 0)
        value, kind = self.arguments[f"{name}_offset"]
        return self.context.cast(self.builder, value, kind, dtype)

    def pointers(self, name: str, count: int) -> list[Any]:
        """Pointers to elements in a row."""
        data, first = self.data(name), self.offset(name, types.int64)
        steps = [self.context.get_constant(types.int64, i) for i in range(count)]
        return [self.builder.gep(data, [self.builder.add(first, step)]) for step in steps]

    def address(self, name: str, space: str) -> Any:
        """A place as an integer in an address space: 32 bits for shared memory, else 64."""
        data, kind = self.data(name), types.uint32 if space == "shared" else types.uint64
        pointee = self.context.get_data_type(self.arguments[name][1].dtype)
        typed = self.builder.addrspacecast(data, pointee.as_pointer(ADDRESS_SPACE[space]))
        start = self.builder.ptrtoint(typed, self.context.get_value_type(kind))
        itemsize = self.context.get_constant(kind, self.context.get_abi_sizeof(pointee))
        return self.builder.add(start, self.builder.mul(self.offset(name, kind), itemsize))

    # Statements

    def assembly(
        self, text: str, outputs: list[str], inputs: list[tuple[str, Any]], pure: bool = False
    ) -> list[Any]:
        """Inline PTX; the values of the outputs.

        Parameters
        ----------
        text : str
            With ``$0``, ``$1``... for outputs, then inputs.
        outputs : list of str
            Their dtypes.
        inputs : list of (str, LLVM value)
            A constraint each: a PTX register, or the number of an output that it shares one with.
        """
        ir = self.ir
        kinds = [self.llvm_type(dtype) for dtype in outputs]
        result = (ir.VoidType(), *kinds)[-1] if len(kinds) < 2 else ir.LiteralStructType(kinds)
        constraints = [f"={CONSTRAINTS[dtype]}" for dtype in outputs]
        constraints += [constraint for constraint, _ in inputs]
        constraints += [] if pure else ["~{memory}"]
        values = [value for _, value in inputs]
        function = ir.FunctionType(result, [value.type for value in values])
        asm = ir.InlineAsm(function, text, ",".join(constraints), side_effect=not pure)
        value = self.builder.call(asm, values)
        if len(kinds) < 2:
            return [value][: len(kinds)]
        return [self.builder.extract_value(value, i) for i in range(len(kinds))]

    def statement(self) -> Any:
        """The instruction as its description says; its value, or None."""
        ptx = self.ptx
        written = {
            name: operand
            for name, operand in ptx.operands.items()
            if isinstance(operand, Registers) and operand.access != "read"
        }
        outputs = [] if ptx.result is None else [ptx.result]
        names = {"result": "$0"}
        for name, registers in written.items():
            names[name] = self.braces(len(outputs), registers.count)
            outputs += [registers.dtype] * registers.count
        inputs: list[tuple[str, Any]] = []
        for name, operand in ptx.operands.items():
            if isinstance(operand, Literal):
                names[name] = str(self.arguments[name][1].literal_value)
            elif name not in written:
                more = self.inputs(name, operand)
                names[name] = self.braces(len(outputs) + len(inputs), len(more))
                inputs += more
        first = len(outputs) - sum(operand.count for operand in written.values())
        for name, registers in written.items():
            if registers.access == "update":
                inputs += [
                    (str(first + i), self.builder.load(pointer))
                    for i, pointer in enumerate(self.pointers(name, registers.count))
                ]
            first += registers.count
        values = self.assembly(ptx.text.format(**names), outputs, inputs, ptx.pure)
        value = values.pop(0) if ptx.result else None
        for name, registers in written.items():
            self.store(name, values[: registers.count])
            values = values[registers.count :]
        return value

    def inputs(self, name: str, operand: Any) -> list[tuple[str, Any]]:
        """Constraints and values of an operand that is only read."""
        if isinstance(operand, Scalar):
            return [(CONSTRAINTS[operand.dtype], self.scalar(name))]
        if isinstance(operand, Address):
            constraint = SHARED_POINTER if operand.space == "shared" else GLOBAL_POINTER
            return [(constraint, self.address(name, operand.space))]
        pointers = self.pointers(name, operand.count)
        return [(CONSTRAINTS[operand.dtype], self.builder.load(p)) for p in pointers]

    def store(self, name: str, values: list[Any]) -> None:
        for pointer, value in zip(self.pointers(name, len(values)), values, strict=True):
            self.builder.store(value, pointer)

    @staticmethod
    def braces(first: int, count: int) -> str:
        """PTX's vector of registers, or one register."""
        names = ", ".join(f"${first + i}" for i in range(count))
        return names if count == 1 else f"{{{names}}}"


# Functions that are ordinary LLVM instructions, on every architecture


def bf16_to_f32(code: Code) -> Any:
    builder, ir = code.builder, code.ir
    wide = builder.zext(code.scalar("x"), ir.IntType(32))
    return builder.bitcast(builder.shl(wide, ir.IntType(32)(16)), ir.FloatType())


def f32_to_bf16(code: Code) -> Any:
    """Round to nearest, ties to even: add half a unit of the last kept bit, less one if it is 0."""
    builder, word, value = code.builder, code.ir.IntType(32), code.scalar("x")
    bits = builder.bitcast(value, word)
    last = builder.and_(builder.lshr(bits, word(16)), word(1))
    rounded = builder.add(bits, builder.add(last, word(0x7FFF)))
    is_nan = builder.fcmp_unordered("uno", value, value)
    quiet = builder.or_(bits, word(0x400000))
    kept = builder.lshr(builder.select(is_nan, quiet, rounded), word(16))
    return builder.trunc(kept, code.ir.IntType(16))


def f16_to_f32(code: Code) -> Any:
    half = code.builder.bitcast(code.scalar("x"), code.ir.HalfType())
    return code.builder.fpext(half, code.ir.FloatType())


def f32_to_f16(code: Code) -> Any:
    half = code.builder.fptrunc(code.scalar("x"), code.ir.HalfType())
    return code.builder.bitcast(half, code.ir.IntType(16))


def unpack_bf16(code: Code) -> Any:
    """A bf16 is the upper half of a float32."""
    builder, word, value = code.builder, code.ir.IntType(32), code.scalar("word")
    parts = [builder.shl(value, word(16)), builder.and_(value, word(0xFFFF0000))]
    return pair(code, [builder.bitcast(part, code.ir.FloatType()) for part in parts])


def unpack_f16(code: Code) -> Any:
    builder, ir, value = code.builder, code.ir, code.scalar("word")
    parts = [value, builder.lshr(value, ir.IntType(32)(16))]
    halves = [builder.bitcast(builder.trunc(part, ir.IntType(16)), ir.HalfType()) for part in parts]
    return pair(code, [builder.fpext(half, ir.FloatType()) for half in halves])


def pair(code: Code, values: list[Any]) -> Any:
    return code.context.make_tuple(code.builder, types.UniTuple(types.float32, 2), values)


# Arrays


def strided(code: Code) -> tuple[Any, list[Any]]:
    """The pointer to the first element of ``array`` and its strides in bytes."""
    value, kind = code.arguments["array"]
    array = code.context.make_array(kind)(code.context, code.builder, value)
    strides = [code.builder.extract_value(array.strides, axis) for axis in range(kind.ndim)]
    return array.data, strides


def element_offset(code: Code) -> Any:
    """Strides are multiples of the item size, a power of two."""
    builder, (data, strides) = code.builder, strided(code)
    indices = [code.scalar(name) for name in parameters(code.ptx)[1:]]
    terms = [builder.mul(i, stride) for i, stride in zip(indices, strides, strict=True)]
    itemsize = code.context.get_abi_sizeof(data.type.pointee)
    shift = code.context.get_constant(types.int64, itemsize.bit_length() - 1)
    return builder.ashr(functools.reduce(builder.add, terms), shift, flags=("exact",))


def loads_by_four(code: Code) -> Any:
    builder, (data, strides) = code.builder, strided(code)
    itemsize = code.context.get_abi_sizeof(data.type.pointee)
    places = [builder.ptrtoint(data, strides[0].type), *strides[:-1]]
    word = functools.partial(code.context.get_constant, types.int64)
    sign = -(1 << 63)
    odd = builder.and_(functools.reduce(builder.or_, places), word(sign | 4 * itemsize - 1))
    next_to_each_other = builder.icmp_signed("==", strides[-1], word(itemsize))
    return builder.and_(next_to_each_other, builder.icmp_signed("==", odd, word(0)))


# Vector accesses: LLVM finds out which memory an array is in


def vector_at(code: Code, name: str, words: int) -> tuple[Any, Any]:
    """The pointer to a place as one to a vector, and the vector's type."""
    kind = code.ir.VectorType(code.ir.IntType(32), words)
    return code.builder.bitcast(code.pointers(name, 1)[0], kind.as_pointer()), kind


def vector_load(words: int) -> Callable[[Code], None]:
    """Load a vector and spread it over registers."""

    def emit(code: Code) -> None:
        builder, word = code.builder, code.ir.IntType(32)
        pointer, _ = vector_at(code, "src", words)
        loaded = builder.load(pointer, align=REGISTER_BYTES * words)
        parts = [builder.extract_element(loaded, word(i)) for i in range(words)]
        register = code.context.get_data_type(code.arguments["dst"][1].dtype)
        code.store("dst", [builder.bitcast(part, register) for part in parts])

    return emit


def vector_store(words: int) -> Callable[[Code], None]:
    """Gather registers to a vector and store it."""

    def emit(code: Code) -> None:
        builder, word = code.builder, code.ir.IntType(32)
        pointer, kind = vector_at(code, "dst", words)
        vector = kind(code.ir.Undefined)
        for i, register in enumerate(code.pointers("src", words)):
            part = builder.bitcast(builder.load(register), word)
            vector = builder.insert_element(vector, part, word(i))
        builder.store(vector, pointer, align=REGISTER_BYTES * words)

    return emit


def register_product(product: RegisterProduct) -> Callable[[Code], None]:
    def emit(code: Code) -> None:
        builder, rows, columns = code.builder, product.rows, product.columns
        counts = {"acc": rows * columns, "a": rows * product.depth, "b": columns * product.depth}
        registers = {
            name: [builder.load(pointer) for pointer in code.pointers(name, count)]
            for name, count in counts.items()
        }
        acc = registers["acc"]
        for x in range(product.depth):
            for c in range(columns):
                b = registers["b"][product.place(c, x, columns)]
                for r in range(rows):
                    a = registers["a"][product.place(r, x, rows)]
                    acc[c * rows + r] = builder.fma(a, b, acc[c * rows + r])
        code.store("acc", acc)

    return emit


# The whole chain of a warpgroup's product


def wgmma_operands(wgmma: Wgmma) -> Ptx:
    a: Registers | Address = Address("shared", "uint16")
    if wgmma.a == "registers":
        a = Registers(4 * wgmma.steps, "uint32", "read")
    operands = {
        "acc": Registers(wgmma.n // 2, "float32", "update", whole=True),
        "a": a,
        "b": Address("shared", "uint16"),
        "accumulate": Scalar("boolean"),
    }
    return Ptx("", operands)


def wgmma_chain(wgmma: Wgmma) -> Callable[[Code], None]:
    """All steps of K in one statement.

    Where ``accumulate`` is the constant False, the accumulators are outputs only, so that their
    old values die before.
    """

    def emit(code: Code) -> None:
        count = wgmma.n // 2
        fresh, always = (is_constant(code, "accumulate", value) for value in (0, 1))
        inputs = descriptors(code, wgmma, "b")
        if wgmma.a == "shared":
            inputs += descriptors(code, wgmma, "a")
        else:
            inputs += code.inputs("a", code.ptx.operands["a"])
        acc = code.braces(0, count)
        lines = []
        for step in range(wgmma.steps):
            b, a = count + step, count + wgmma.steps + step
            a_text = f"${a}"
            if wgmma.a == "registers":
                a_text = code.braces(count + wgmma.steps + 4 * step, 4)
            first = "0" if fresh else "1" if always else "p"
            lines.append(wgmma.step_text(acc, a_text, f"${b}", "1" if step else first))
        text = " ".join(lines)
        if not fresh and not always:
            flag = count + len(inputs)
            inputs.append(("r", code.scalar("accumulate")))
            text = f"{{ .reg .pred p; setp.ne.b32 p, ${flag}, 0; {text} }}"
        if not fresh:
            pointers = code.pointers("acc", count)
            inputs += [(str(i), code.builder.load(p)) for i, p in enumerate(pointers)]
        code.store("acc", code.assembly(text, ["float32"] * count, inputs))

    return emit


def descriptors(code: Code, wgmma: Wgmma, side: str) -> list[tuple[str, Any]]:
    """The matrix descriptor of each step: the address counts in 16 bytes, as do the steps."""
    builder, wide = code.builder, code.ir.IntType(64)
    start = builder.lshr(code.address(side, "shared"), code.ir.IntType(32)(4))
    tile = builder.or_(builder.zext(start, wide), wide(wgmma.descriptor(side)))
    return [("l", builder.add(tile, wide(step >> 4))) for step in wgmma.step_bytes(side)]


def is_constant(code: Code, name: str, value: int) -> bool:
    """Whether an argument is written as this constant."""
    given = code.arguments[name][0]
    return isinstance(given, code.ir.Constant) and bool(given.constant) == bool(value)
