"""Special instructions, one a line: each an intrinsic that a kernel calls like a function.

An operand in memory is an array and an element offset, counted from the array's first element in
its own elements, so that the emulator can check its bounds. A 16-bit float in memory is its
``uint16`` bit pattern; fragments are ``uint32`` local arrays, sums ``float32`` local arrays.

`instructions` says what each one is, `lowering` makes the GPU's form of that, `emulator.tensor`
and `emulator.hopper` the NumPy twin. `INSTRUCTIONS` gives the description of an intrinsic.
"""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np

from . import instructions as isa
from . import lowering
from .instructions import Address, Elementwise, Ptx, Registers
from .lowering import INSTRUCTIONS as INSTRUCTIONS
from .lowering import define

BF16 = np.dtype(ml_dtypes.bfloat16)
F16 = np.dtype(np.float16)
SMALLEST_NORMAL = np.float32(2.0**-126)
CANONICAL_NAN = 0x7FFF
"""What a conversion makes of NaN, as two 16-bit floats in a register or as one."""


# NumPy twins of what each lane does for itself


def bits(x: Any, dtype: np.dtype) -> Any:
    """float32 rounded to a 16-bit float, as its bit pattern."""
    return np.asarray(x, np.float32).astype(dtype).view(np.uint16)


def value(pattern: Any, dtype: np.dtype) -> Any:
    """A 16-bit float as float32."""
    return np.asarray(pattern).astype(np.uint16).view(dtype).astype(np.float32)


def pack(lo: Any, hi: Any, dtype: np.dtype) -> Any:
    """Two floats, rounded, in one register."""
    low, high = (
        np.where(np.isnan(x), CANONICAL_NAN, bits(x, dtype)).astype(np.uint32) for x in (lo, hi)
    )
    return low | high << np.uint32(16)


def unpack(word: Any, dtype: np.dtype) -> tuple[Any, Any]:
    """The two floats of a register."""
    word = np.asarray(word).astype(np.uint32)
    return value(word & np.uint32(0xFFFF), dtype), value(word >> np.uint32(16), dtype)


def round_to_tf32(x: Any) -> Any:
    """float32 with 10 bits of mantissa, rounded to nearest, ties away from zero.

    A NaN only loses its last bits, as on an H200; with nothing in the others it becomes infinite.
    """
    pattern, kept = np.asarray(x, np.float32).view(np.uint32), np.uint32(0xFFFFE000)
    return np.where(np.isnan(x), pattern & kept, pattern + np.uint32(0x1000) & kept)


def flush(x: Any) -> Any:
    """Subnormal numbers as zero (``.ftz``)."""
    x = np.asarray(x, np.float32)
    return np.where(np.abs(x) < SMALLEST_NORMAL, np.copysign(np.float32(0), x), x)


def flushing(function: Any) -> Any:
    return lambda x: flush(function(flush(x)))


def one_argument(name: str, result: str, argument: str, twin: Any) -> Any:
    """A conversion that is made of ordinary instructions."""
    description = Elementwise(name, twin, arguments={"x": argument}, result=result)
    return define(description, getattr(lowering, name))


def two_parts(name: str, dtype: np.dtype) -> Any:
    twin = functools.partial(unpack, dtype=dtype)
    description = Elementwise(name, twin, "", {"word": "uint32"}, "float32, float32")
    return define(description, getattr(lowering, name))


def packing(name: str, dtype: np.dtype) -> Any:
    """The text names the higher half first."""
    twin = functools.partial(pack, dtype=dtype)
    text = f"cvt.rn.{name.removeprefix('pack_')}x2.f32 {{result}}, {{hi}}, {{lo}};"
    return define(Elementwise(name, twin, text, {"lo": "float32", "hi": "float32"}, "uint32"))


def approximate(name: str, twin: Any) -> Any:
    """A function of the special-function unit, right to about 2^-22."""
    return define(Elementwise(name, twin, f"{name}.approx.ftz.f32 {{result}}, {{x}};"))


# Conversions that exist on every architecture: the native ones of bfloat16 start at sm_80.
bf16_to_f32 = one_argument("bf16_to_f32", "float32", "uint16", functools.partial(value, dtype=BF16))
f32_to_bf16 = one_argument("f32_to_bf16", "uint16", "float32", functools.partial(bits, dtype=BF16))
f16_to_f32 = one_argument("f16_to_f32", "float32", "uint16", functools.partial(value, dtype=F16))
f32_to_f16 = one_argument("f32_to_f16", "uint16", "float32", functools.partial(bits, dtype=F16))

# (x) -> float32
ex2 = approximate("ex2", flushing(np.exp2))
lg2 = approximate("lg2", flushing(np.log2))
rcp = approximate("rcp", flushing(np.reciprocal))

# (lo, hi) -> uint32, and back
pack_bf16 = packing("pack_bf16", BF16)
pack_f16 = packing("pack_f16", F16)
unpack_bf16 = two_parts("unpack_bf16", BF16)
unpack_f16 = two_parts("unpack_f16", F16)
f32_to_tf32 = define(
    Elementwise("f32_to_tf32", round_to_tf32, "cvt.rna.tf32.f32 {result}, {x};", result="uint32")
)

element_offset = define(isa.ElementOffset(), lowering.element_offset)  # (array, b, h, row, column)
loads_by_four = define(isa.LoadsByFour(), lowering.loads_by_four)  # (array)


def vector(words: int, stores: bool) -> Any:
    memory, registers = Address(""), Registers(words, "", "read" if stores else "write")
    if stores:
        operands = Ptx("", {"dst": memory, "src": registers})
        return define(isa.VectorStore(words), lowering.vector_store(words), operands)
    operands = Ptx("", {"dst": registers, "src": memory})
    return define(isa.VectorLoad(words), lowering.vector_load(words), operands)


# (registers, offset, array, offset) and (array, offset, registers, offset): 4 * words bytes
load_x2 = vector(2, stores=False)
load_x4 = vector(4, stores=False)
store_x2 = vector(2, stores=True)
store_x4 = vector(4, stores=True)

# (registers, offset, shared, offset), the offset of a row of 8 elements
ldmatrix_x2 = define(isa.LdMatrix(2))
ldmatrix_x2_trans = define(isa.LdMatrix(2, trans=True))
ldmatrix_x4 = define(isa.LdMatrix(4))
ldmatrix_x4_trans = define(isa.LdMatrix(4, trans=True))
# (shared, offset, registers, offset)
stmatrix_x4 = define(isa.StMatrix(4))
stmatrix_x4_trans = define(isa.StMatrix(4, trans=True))

# (d, offset, a, offset, b, offset): d += a b
mma_m16n8k16_bf16 = define(isa.Mma(16, "bf16"))
mma_m16n8k16_f16 = define(isa.Mma(16, "f16"))
mma_m16n8k8_tf32 = define(isa.Mma(8, "tf32"))

# (shared, offset, global, offset, keep)
cp_async_4 = define(isa.CpAsync(4))
cp_async_8 = define(isa.CpAsync(8))
cp_async_16 = define(isa.CpAsync(16))
cp_async_commit = define(isa.CpAsyncCommit())
cp_async_wait = define(isa.CpAsyncWait())  # (n), a literal

# (barriers, index, ...), a shared array of uint64
mbarrier_init = define(isa.MbarrierInit())  # count
mbarrier_arrive = define(isa.MbarrierArrive())
mbarrier_arrive_expect_tx = define(isa.MbarrierArriveExpectTx())  # num_bytes
mbarrier_wait = define(isa.MbarrierWait())  # parity
fence_mbarrier_init = define(isa.FenceMbarrierInit())
fence_proxy_async = define(isa.FenceProxyAsync())

# (shared, offset, tensor_map, c0, c1, ..., barriers, index)
tma_load_2d = define(isa.TmaLoad(2))
tma_load_3d = define(isa.TmaLoad(3))
tma_load_4d = define(isa.TmaLoad(4))
# (tensor_map, c0, c1, ..., shared, offset)
tma_store_2d = define(isa.TmaStore(2))
tma_store_3d = define(isa.TmaStore(3))
tma_store_4d = define(isa.TmaStore(4))
tma_reduce_add_2d = define(isa.TmaStore(2, add=True))
tma_reduce_add_3d = define(isa.TmaStore(3, add=True))
tma_reduce_add_4d = define(isa.TmaStore(4, add=True))
bulk_commit = define(isa.BulkCommit())
bulk_wait = define(isa.BulkWait())  # (n), a literal
bulk_wait_read = define(isa.BulkWait(read=True))  # (n), a literal
prefetch_tensor_map = define(isa.PrefetchTensorMap())


@functools.cache
def make_wgmma(
    *,
    n: int,
    k: int,
    dtype: str = "bf16",
    a: str = "shared",
    a_rows: int | None = None,
    b_rows: int | None = None,
    a_major: str = "k",
    b_major: str = "k",
) -> Any:
    """The intrinsic ``(acc, a, a_offset, b, b_offset, accumulate)``: acc += A B over the whole k.

    ``accumulate`` False starts from zero; written as a constant, it costs nothing.

    Parameters
    ----------
    n, k : int
        A is 64 x k, B is k x n.
    dtype : {"bf16", "f16"}
    a : {"shared", "registers"}
    a_rows, b_rows : int, optional
        Rows of the whole tile of A and B in shared memory; as many as the product takes if left
        out.
    a_major, b_major : {"k", "mn"}
        Which index is contiguous in shared memory; see `instructions.Wgmma`.

    Raises
    ------
    ValueError
        If the hardware has no such product.
    """
    a_rows = a_rows or (64 if a_major == "k" else k)
    b_rows = b_rows or (n if b_major == "k" else k)
    wgmma = isa.Wgmma(n, k, dtype, a, a_rows, b_rows, a_major, b_major)
    return define(wgmma, lowering.wgmma_chain(wgmma), lowering.wgmma_operands(wgmma))


@functools.cache
def make_touch(count: int, dtype: str = "float32") -> Any:
    """The intrinsic ``(registers)`` that holds the compiler to a wait.

    The ``count`` first elements of the array may be used before it and after it, but no use moves
    across: sums are read after their wait, and written before the next product begins.
    """
    return define(isa.Touch(count, dtype))


@functools.cache
def make_register_product(rows: int, columns: int, depth: int, depth_first: bool) -> Any:
    """The intrinsic ``(acc, a, b)``: acc[c, r] += sum over x of a[r, x] b[c, x], in registers."""
    product = isa.RegisterProduct(rows, columns, depth, depth_first)
    return define(product, lowering.register_product(product))


wgmma_fence = define(isa.WgmmaFence())
wgmma_commit = define(isa.WgmmaCommit())
wgmma_wait = define(isa.WgmmaWait())  # (n), a literal

# (barrier, threads)
named_barrier_sync = define(isa.NamedBarrierSync())
named_barrier_arrive = define(isa.NamedBarrierArrive())
# (n), a literal
setmaxnreg_inc = define(isa.SetMaxNReg("inc"))
setmaxnreg_dec = define(isa.SetMaxNReg("dec"))
