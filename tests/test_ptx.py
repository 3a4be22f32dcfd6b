"""Every special instruction compiles, assembles, and is in the PTX as its description says."""

import re
import sys

import pytest
from numba import cuda, float32, types, uint16, uint32, uint64

from numba_flash import instructions as isa
from numba_flash import ptx
from numba_flash.instructions import Address, Literal, Registers, Scalar
from tests.compiling import assemble

needs_compiler = pytest.mark.skipif(
    sys.platform == "darwin", reason="no CUDA compiler runs on macOS"
)

AMPERE, HOPPER = (8, 0), (9, 0, "a")
SINCE_HOPPER = {
    *("StMatrix", "MbarrierInit", "MbarrierArrive", "MbarrierArriveExpectTx", "MbarrierWait"),
    *("FenceMbarrierInit", "FenceProxyAsync", "TmaLoad", "TmaStore", "BulkCommit", "BulkWait"),
    *("PrefetchTensorMap", "WgmmaFence", "WgmmaCommit", "WgmmaWait", "SetMaxNReg"),
}
SCALARS = {"float32": "x", "int32": "n", "uint32": "i", "uint16": "uint16(i)", "boolean": "i > n"}
SCALARS |= {"int64": "n"}
REGISTERS = {"float32": "rF", "uint32": "rU", "": "rU"}
REGISTERS_OF_A_WARPGROUP = 24

WORDS = [word for word in dir(ptx) if getattr(ptx, word) in list(ptx.INSTRUCTIONS)]


def arguments(description):
    """Source text of one call's arguments."""
    if isinstance(description, isa.VectorLoad):
        return "rU, 4, sX, 8 * i"
    if isinstance(description, isa.VectorStore):
        return f"X, 8 * i + {1024 * description.words}, rF, 4"
    parts = []
    for operand in description.ptx.operands.values():
        if isinstance(operand, Scalar):
            parts.append(SCALARS[operand.dtype])
        elif isinstance(operand, Literal):
            count = isinstance(description, isa.SetMaxNReg)
            parts.append(str(REGISTERS_OF_A_WARPGROUP if count else 1))
        elif isinstance(operand, Registers):
            parts += [REGISTERS[operand.dtype], "4"]
        elif operand == Address("global", "uint64", whole=True):
            parts.append("tensor_map")
        elif operand == Address("global", whole=True):
            parts.append("X4")
        elif operand.dtype == "uint64":
            parts += ["bars", "i"]
        else:
            parts += ["sX" if operand.space == "shared" else "X", "8 * i"]
    return ", ".join(parts)


def call(name):
    """A statement that uses an instruction and keeps its result, where no other one is kept."""
    description = ptx.INSTRUCTIONS[getattr(ptx, name)]
    statement = f"{name}({arguments(description)})"
    kept = f"out[i + {8 + WORDS.index(name)}]"
    if isinstance(description, isa.VectorLoad):
        return f"{statement}; {kept} = rU[4]"
    if isinstance(description, (isa.ElementOffset, isa.LoadsByFour)):
        return f"{kept} = {statement}"
    if not isinstance(description, isa.Elementwise):
        return statement
    return f"{kept} = {statement}{'[0]' if ', ' in description.result else ''}"


def kernel_with(statements):
    lines = [
        "def kernel(X, X4, tensor_map, out, x, n):",
        "sX = cuda.shared.array(0, uint16, alignment=1024)",
        "bars = cuda.shared.array(8, uint64)",
        "rU = cuda.local.array(8, uint32)",
        "rF = cuda.local.array(8, float32)",
        "i = uint32(cuda.threadIdx.x)",
        *statements,
        "for e in range(8): out[e] = rU[e] + rF[e]",
    ]
    namespace = {"cuda": cuda, "float32": float32, "uint16": uint16, "uint32": uint32}
    namespace |= {"uint64": uint64, **vars(ptx)}
    exec("\n    ".join(lines), namespace)
    return namespace["kernel"]


SIGNATURE = types.void(
    types.uint16[::1],
    types.Array(types.uint16, 4, "A"),
    types.uint64[::1],
    types.float32[::1],
    types.float32,
    types.int32,
)


@needs_compiler
@pytest.mark.parametrize("architecture", [AMPERE, HOPPER], ids=["sm_80", "sm_90a"])
def test_every_instruction_is_in_the_ptx_and_assembles(architecture, tmp_path):
    kinds = {name: type(ptx.INSTRUCTIONS[getattr(ptx, name)]).__name__ for name in WORDS}
    here = [name for name in WORDS if (kinds[name] in SINCE_HOPPER) == (architecture == HOPPER)]
    assert len(here) > 20
    assembled = assemble(kernel_with(map(call, here)), SIGNATURE, architecture, tmp_path)
    for name in here:
        description = ptx.INSTRUCTIONS[getattr(ptx, name)]
        text = description.ptx.text if hasattr(description, "ptx") else ""
        words = re.findall(r"(?<![\w.:])[a-z]\w*\.[\w.:]*\w", text)
        if isinstance(description, isa.VectorLoad):
            words = [f"ld.shared.v{description.words}"]
        if isinstance(description, isa.VectorStore):
            words = [f"st.global.v{description.words}"]
        assert words or not text, name
        for word in words:
            assert word in assembled.ptx, f"{name}: {word} is not in the PTX"


WGMMA = [
    {"n": 128, "k": 64},
    {"n": 64, "k": 128, "dtype": "f16"},
    {"n": 128, "k": 128, "a": "registers", "b_major": "mn"},
    {"n": 256, "k": 64, "a_rows": 128, "b_rows": 256},
    {"n": 64, "k": 64, "a_major": "mn", "b_major": "mn", "a_rows": 128},
]


@needs_compiler
@pytest.mark.parametrize("accumulate", ["False", "True", "n > 3"])
@pytest.mark.parametrize("options", WGMMA, ids=str)
def test_wgmma_is_one_unserialised_chain_over_k(options, accumulate, tmp_path):
    product = ptx.make_wgmma(**options)
    wgmma = ptx.INSTRUCTIONS[product]
    touch = ptx.make_touch(wgmma.n // 2)
    namespace = {"product": product, "touch": touch}
    lines = [
        "def kernel(X, out, n):",
        "sX = cuda.shared.array(0, uint16, alignment=1024)",
        f"acc = cuda.local.array({wgmma.n // 2}, float32)",
        f"rA = cuda.local.array({4 * wgmma.steps}, uint32)",
        "i = uint32(cuda.threadIdx.x)",
        f"for e in range({wgmma.n // 2}): acc[e] = float32(1)",
        f"for e in range({wgmma.steps}): ldmatrix_x4(rA, 4 * e, sX, 8 * i)",
        "touch(acc)",
        "wgmma_fence()",
        f"product(acc, {'rA' if wgmma.a == 'registers' else 'sX'}, 0, sX, 8192, {accumulate})",
        "wgmma_commit()",
        "wgmma_wait(0)",
        "touch(acc)",
        f"for e in range({wgmma.n // 2}): out[{wgmma.n // 2} * i + e] = acc[e]",
    ]
    namespace |= {"cuda": cuda, "float32": float32, "uint16": uint16, "uint32": uint32, **vars(ptx)}
    exec("\n    ".join(lines), namespace)
    signature = types.void(types.uint16[::1], types.float32[::1], types.int32)
    assembled = assemble(namespace["kernel"], signature, HOPPER, tmp_path, (128, 1))
    found = re.findall(r"wgmma\.mma_async[^;]*;", assembled.ptx)
    assert len(found) == wgmma.steps
    scales = [re.search(r"[}\d], (\w+), 1, 1, ", step)[1] for step in found]
    first = {"False": "0", "True": "1"}.get(accumulate, "p")
    assert scales == [first] + ["1"] * (wgmma.steps - 1)
    assert not re.search(r"C75\d\d", assembled.log), assembled.log
    assert assembled.spill_bytes == assembled.stack_bytes == 0
