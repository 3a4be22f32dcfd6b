"""The formulas of passes count what the loops of the algorithms touch."""

import numpy as np
import pytest

from numba_flash.passes import pass_bytes
from numba_flash.problem import Layout, make_problem
from numba_flash.reference import (
    dkdv_steps,
    dq_steps,
    flash1_forward_steps,
    flash2_forward_steps,
    naive_forward,
)

D, DV = 3, 5
SHAPES = [(7, 11, 4, 3), (8, 6, 4, 3), (1, 13, 2, 8), (16, 16, 16, 16)]


def make_arrays(seqlen_q, seqlen_k, num_heads=1, num_heads_kv=1):
    rng = np.random.default_rng(0)
    q = rng.normal(size=(1, num_heads, seqlen_q, D))
    k = rng.normal(size=(1, num_heads_kv, seqlen_k, D))
    v = rng.normal(size=(1, num_heads_kv, seqlen_k, DV))
    return q, k, v


def problem_of(*arrays):
    return make_problem(*(Layout(x.shape, x.strides, str(x.dtype)) for x in arrays))


def numbers(rung, direction, arrays, tile_m, tile_n):
    return pass_bytes(rung, direction, problem_of(*arrays), tile_m, tile_n) / 8


def length(rows):
    return rows.stop - rows.start


@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "tile_m", "tile_n"), SHAPES)
def test_minimal_forward_counts_what_each_step_of_flash1_touches(
    seqlen_q, seqlen_k, tile_m, tile_n
):
    arrays = make_arrays(seqlen_q, seqlen_k)
    before, after = seqlen_q * (DV + 2), seqlen_q * 3  # O, l, m set up; l, m turned into LSE
    total = before + after
    for step in flash1_forward_steps(*(x[0, 0] for x in arrays), tile_m, tile_n):
        if step.i == 0:
            total += length(step.cols) * (D + DV)
        total += length(step.rows) * (D + 2 * (DV + 1 + 1))
    assert numbers("minimal", "forward", arrays, tile_m, tile_n) == total


@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "tile_m", "tile_n"), SHAPES)
def test_fa2_forward_counts_what_each_step_of_flash2_touches(seqlen_q, seqlen_k, tile_m, tile_n):
    arrays = make_arrays(seqlen_q, seqlen_k)
    total = 0
    for step in flash2_forward_steps(*(x[0, 0] for x in arrays), tile_m, tile_n):
        if step.j == 0:
            total += length(step.rows) * (D + DV + 1)
        total += length(step.cols) * (D + DV)
    assert numbers("fa2", "forward", arrays, tile_m, tile_n) == total


@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "tile_m", "tile_n"), SHAPES)
def test_backward_formulas_count_what_each_step_touches(seqlen_q, seqlen_k, tile_m, tile_n):
    arrays = make_arrays(seqlen_q, seqlen_k)
    o, lse = naive_forward(*arrays)
    args = tuple(x[0, 0] for x in (o, *arrays, o, lse))
    minimal, fa2 = seqlen_q * D, seqlen_q * (2 * DV + 1)  # dQ zeroed; the delta pass
    for step in dkdv_steps(*args, tile_m, tile_n):
        if step.i == 0:
            minimal += length(step.cols) * 2 * (D + DV)
            fa2 += length(step.cols) * 2 * (D + DV)
        minimal += length(step.rows) * (D + DV + DV + 1 + 2 * D)
        fa2 += length(step.rows) * (D + DV + 1 + 1)
    for step in dq_steps(*args, tile_m, tile_n):
        if step.j == 0:
            fa2 += length(step.rows) * (D + DV + 1 + 1 + D)
        fa2 += length(step.cols) * (D + DV)
    assert numbers("minimal", "backward", arrays, tile_m, tile_n) == minimal
    assert numbers("fa2", "backward", arrays, tile_m, tile_n) == fa2


@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "tile_m", "tile_n"), SHAPES)
def test_register_tiled_formulas_count_the_operands_of_every_product(
    seqlen_q, seqlen_k, tile_m, tile_n
):
    arrays = make_arrays(seqlen_q, seqlen_k)
    o, lse = naive_forward(*arrays)
    forward, backward = seqlen_q * (DV + 1), seqlen_q * (2 * DV + 1)  # O and LSE; the delta pass
    for step in flash2_forward_steps(*(x[0, 0] for x in arrays), tile_m, tile_n):
        forward += length(step.rows) * D + length(step.cols) * (D + DV)  # Q, K; V
    args = tuple(x[0, 0] for x in (o, *arrays, o, lse))
    for step in dkdv_steps(*args, tile_m, tile_n):
        backward += length(step.rows) * (2 * D + 2 * DV + 2)  # Q, dO for S, dV, dP, dK
        backward += length(step.cols) * (D + DV)  # K, V for S, dP
    backward += seqlen_k * (D + DV)  # dK, dV
    for step in dq_steps(*args, tile_m, tile_n):
        if step.j == 0:
            backward += length(step.rows) * (1 + 1 + D)  # LSE, delta, dQ
        backward += length(step.rows) * (D + DV) + length(step.cols) * (2 * D + DV)
    assert numbers("register_tiled", "forward", arrays, tile_m, tile_n) == forward
    assert numbers("register_tiled", "backward", arrays, tile_m, tile_n) == backward


def test_naive_formulas_sum_the_operands_of_its_kernels():
    arrays = make_arrays(7, 11)
    Q, K, V, S, lse = 7 * D, 11 * D, 11 * DV, 7 * 11, 7
    O = 7 * DV
    forward = (Q + K + S) + (S + S + lse) + (S + V + O)
    assert numbers("naive", "forward", arrays, 1, 1) == forward
    probabilities = (Q + K + S) + (S + S) + (O + V + S)
    backward = probabilities + 3 * S + (S + K + Q) + (S + Q + K) + (S + O + V)
    assert numbers("naive", "backward", arrays, 1, 1) == backward


def test_key_heads_that_serve_a_group_write_their_gradients_once():
    own, shared = make_arrays(8, 6, 4, 4), make_arrays(8, 6, 4, 2)
    for rung in ("minimal", "fa2"):
        saved = numbers(rung, "backward", own, 4, 3) - numbers(rung, "backward", shared, 4, 3)
        assert saved == 2 * 2 * 6 * (D + DV)  # K, V, dK, dV of two key heads


def test_bytes_follow_the_dtype():
    wide = make_arrays(8, 6)
    narrow = tuple(x.astype(np.float32) for x in wide)
    for rung in ("naive", "minimal", "fa2"):
        bytes_wide = pass_bytes(rung, "forward", problem_of(*wide), 4, 3)
        assert bytes_wide == 2 * pass_bytes(rung, "forward", problem_of(*narrow), 4, 3)
