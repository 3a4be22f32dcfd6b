"""FlashAttention as learners write it, when they get it right."""

import math

import numpy as np
from numba import cuda, float32

from numba_flash.emulator import empty

from .case import noise, right, zeros

MINUS_INFINITY = np.float32(-np.inf)


def attention(Q, K, V, causal=False):
    """O and LSE of one head, or of many in front."""
    S = Q.astype(np.float64) @ K.swapaxes(-1, -2) / math.sqrt(Q.shape[-1])
    if causal:
        S = np.where(np.tri(*S.shape[-2:], dtype=bool), S, -np.inf)
    lse = np.log(np.exp(S).sum(axis=-1))
    return np.exp(S - lse[..., None]) @ V, lse


def heads(count, n, d):
    return tuple(noise(3, count, n, d))


@right(
    "FlashAttention-1: O, l and m go back to global memory after every tile, tails are guarded",
    lambda: (
        *heads(2, 40, 16),
        np.float32(0.25),
        empty((2, 40)),
        empty((2, 40)),
        empty((2, 40, 16)),
    ),
    lambda Q, K, V, scale, l, m, O: attention(Q, K, V)[0],
    grid=2,
    rtol=1e-5,
)
@cuda.jit
def flash_attention_1(Q, K, V, scale, l, m, O):
    Kj = cuda.shared.array((32, 16), float32)
    Vj = cuda.shared.array((32, 16), float32)
    S = cuda.shared.array((32, 33), float32)
    tx, h = cuda.threadIdx.x, cuda.blockIdx.x
    n, d = Q.shape[1], Q.shape[2]
    for row in range(tx, n, 32):
        m[h, row] = MINUS_INFINITY
        l[h, row] = float32(0)
        for x in range(d):
            O[h, row, x] = float32(0)
    for j in range(0, n, 32):
        for x in range(d):
            Kj[tx, x] = K[h, j + tx, x] if j + tx < n else float32(0)
            Vj[tx, x] = V[h, j + tx, x] if j + tx < n else float32(0)
        cuda.syncthreads()
        for row in range(tx, n, 32):
            row_m = MINUS_INFINITY
            for y in range(min(32, n - j)):
                total = float32(0)
                for x in range(d):
                    total += Q[h, row, x] * Kj[y, x]
                S[tx, y] = total * scale
                row_m = max(row_m, S[tx, y])
            row_l = float32(0)
            for y in range(min(32, n - j)):
                S[tx, y] = math.exp(S[tx, y] - row_m)
                row_l += S[tx, y]
            m_new = max(m[h, row], row_m)
            old, new = math.exp(m[h, row] - m_new) * l[h, row], math.exp(row_m - m_new)
            l_new = old + new * row_l
            for x in range(d):
                pv = float32(0)
                for y in range(min(32, n - j)):
                    pv += S[tx, y] * Vj[y, x]
                O[h, row, x] = (old * O[h, row, x] + new * pv) / l_new
            m[h, row] = m_new
            l[h, row] = l_new
        cuda.syncthreads()


def make_forward(tile_m, tile_n, head_dim, causal):
    softmax_scale = np.float32(1 / math.sqrt(head_dim))

    @cuda.jit
    def flash_attention_2_causal(Q, K, V, O, lse):
        sQ = cuda.shared.array((tile_m, head_dim), float32)
        sK = cuda.shared.array((tile_n, head_dim), float32)
        sV = cuda.shared.array((tile_n, head_dim), float32)
        sP = cuda.shared.array((tile_m, tile_n), float32)
        acc = cuda.local.array(head_dim, float32)
        head, first = cuda.blockIdx.y, cuda.blockIdx.x * tile_m
        t, threads = cuda.threadIdx.x, cuda.blockDim.x
        seqlen = Q.shape[1]
        for e in range(t, tile_m * head_dim, threads):
            r, x = e // head_dim, e % head_dim
            sQ[r, x] = Q[head, first + r, x] if first + r < seqlen else float32(0)
        for x in range(head_dim):
            acc[x] = float32(0)
        row_max, row_sum = MINUS_INFINITY, float32(0)
        end = min(seqlen, first + tile_m) if causal else seqlen
        for start in range(0, end, tile_n):
            for e in range(t, tile_n * head_dim, threads):
                r, x = e // head_dim, e % head_dim
                inside = start + r < seqlen
                sK[r, x] = K[head, start + r, x] if inside else float32(0)
                sV[r, x] = V[head, start + r, x] if inside else float32(0)
            cuda.syncthreads()
            for e in range(t, tile_m * tile_n, threads):
                r, c = e // tile_n, e % tile_n
                score = float32(0)
                for x in range(head_dim):
                    score += sQ[r, x] * sK[c, x]
                seen = start + c < seqlen and (not causal or start + c <= first + r)
                sP[r, c] = score * softmax_scale if seen else MINUS_INFINITY
            cuda.syncthreads()
            if t < tile_m:
                new_max = row_max
                for c in range(tile_n):
                    new_max = max(new_max, sP[t, c])
                row_scale = math.exp(row_max - new_max)
                row_sum *= row_scale
                for x in range(head_dim):
                    acc[x] *= row_scale
                for c in range(tile_n):
                    p = math.exp(sP[t, c] - new_max)
                    row_sum += p
                    for x in range(head_dim):
                        acc[x] += p * sV[c, x]
                row_max = new_max
            cuda.syncthreads()
        if t < tile_m and first + t < seqlen:
            for x in range(head_dim):
                O[head, first + t, x] = acc[x] / row_sum
            lse[head, first + t] = row_max + math.log(row_sum)

    return flash_attention_2_causal


right(
    "FlashAttention-2: a block a query tile, keys up to the diagonal, one division at the end",
    lambda: (*heads(2, 40, 8), empty((2, 40, 8)), empty((2, 40))),
    lambda Q, K, V, O, lse: attention(Q, K, V, causal=True),
    grid=(3, 2),
    block=64,
    rtol=1e-5,
)(make_forward(16, 8, 8, True))


def gradient_arguments():
    S = noise(32, 48)
    P = np.exp(S - np.log(np.exp(S).sum(axis=1, keepdims=True)))
    return P, *noise(2, 32, 8), noise(48, 8), zeros(48, 8), zeros(48, 8), zeros(32, 8)


def gradients(P, Q, dO, V, dV, dK, dQ):
    dP = dO @ V.T
    dS = P * (dP - (P * dP).sum(axis=1, keepdims=True))
    return P.T @ dO, dS.T @ Q, dS @ V


@right(
    "a block a key tile: it owns dK and dV, and adds to the common dQ by atomics",
    gradient_arguments,
    gradients,
    grid=3,
    block=16,
    rtol=1e-5,
)
@cuda.jit
def backward_with_atomic_dq(P, Q, dO, V, dV, dK, dQ):
    dOi = cuda.shared.array((16, 8), float32)
    Qi = cuda.shared.array((16, 8), float32)
    delta = cuda.shared.array(16, float32)
    dVj = cuda.local.array(8, float32)
    dKj = cuda.local.array(8, float32)
    tx, key = cuda.threadIdx.x, cuda.grid(1)
    for x in range(8):
        dVj[x] = float32(0)
        dKj[x] = float32(0)
    for i in range(0, P.shape[0], 16):
        for x in range(8):
            dOi[tx, x] = dO[i + tx, x]
            Qi[tx, x] = Q[i + tx, x]
        delta[tx] = float32(0)
        for j in range(V.shape[0]):
            dp = float32(0)
            for x in range(8):
                dp += dOi[tx, x] * V[j, x]
            delta[tx] += P[i + tx, j] * dp
        cuda.syncthreads()
        for y in range(16):
            p = P[i + y, key]
            dp = float32(0)
            for x in range(8):
                dp += dOi[y, x] * V[key, x]
            ds = p * (dp - delta[y])
            for x in range(8):
                dVj[x] += p * dOi[y, x]
                dKj[x] += ds * Qi[y, x]
                cuda.atomic.add(dQ, (i + y, x), ds * V[key, x])
        cuda.syncthreads()
    for x in range(8):
        dV[key, x] = dVj[x]
        dK[key, x] = dKj[x]
