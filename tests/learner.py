"""What a learner writes, with every part of Numba that a kernel is written with."""

import numpy as np

import numba_flash as nf  # isort: skip
from numba import cuda, float32, int32, types, uint16, uint32  # isort: skip

from numba_flash import ptx


@cuda.jit(device=True, inline=True)
def mirrored(i, n):
    return int32(n - 1 - i)


@cuda.jit(fastmath=True)
def mirror(x, BLOCK):
    tile = cuda.shared.array(32, types.float32)
    t = cuda.threadIdx.x
    tile[t] = x[t]
    cuda.syncthreads()
    x[t] = tile[mirrored(t, BLOCK)] * float32(2)


@cuda.jit()
def product(a, b, out):
    """A 16 by 8 product of ones and twos on the matrix unit."""
    fragment_a = cuda.local.array(4, uint32)
    fragment_b = cuda.local.array(2, uint32)
    acc = cuda.local.array(4, float32)
    for i in range(4):
        fragment_a[i] = ptx.pack_bf16(a, a)
        acc[i] = float32(0)
    for i in range(2):
        fragment_b[i] = ptx.pack_bf16(b, b)
    ptx.mma_m16n8k16_bf16(acc, 0, fragment_a, 0, fragment_b, 0)
    for i in range(4):
        out[cuda.laneid, i] = acc[i]


@cuda.jit
def faulty(x):
    x[cuda.grid(1)] = uint16(1)


def run():
    """Emulate each of them."""
    x = np.arange(32, dtype=np.float32)
    assert nf.emulate(mirror)[1, 32](x, 32).ok
    np.testing.assert_array_equal(x, 2.0 * np.arange(32)[::-1])
    out = np.zeros((32, 4), np.float32)
    assert nf.emulate(product)[1, 32](np.float32(1), np.float32(2), out).ok
    np.testing.assert_array_equal(out, 32)
    (fault,) = nf.emulate(faulty)[1, 64](np.zeros(32, np.uint16)).faults
    assert fault.source == "x[cuda.grid(1)] = uint16(1)"
