"""Print the bytes that each rung asks for: counted, by formula, and by the paper's order.

    python scripts/traffic_table.py

Short sequences run on the emulator, whose count must be the formula's to the last byte; for long
ones the formulas go on alone. The paper's order is N^2 d^2 / M a head (FlashAttention, arXiv
2205.14135, Theorem 2) with M what the tiles of a rung take of shared memory. Its factor is what
the last column shows: it stays the same as N grows.
"""

from __future__ import annotations

import numpy as np
from rich.console import Console
from rich.table import Table

import numba_flash as nf
from numba_flash.launch import EMULATOR, contiguous_layout
from numba_flash.passes import Direction, pass_bytes
from numba_flash.problem import make_problem
from numba_flash.traffic import paper_numbers, requested_bytes, total_bytes

HEAD_DIM = 64
EMULATED, LONG = (64, 128), (4096, 16384)
FLOAT = 4


def counted_bytes(rung: str, direction: Direction, seqlen: int) -> int:
    """What the emulator counts."""
    rng = np.random.default_rng(0)
    q, k, v, do = (
        rng.standard_normal((1, 1, seqlen, HEAD_DIM)).astype(np.float32) for _ in range(4)
    )
    with nf.emulation(limit=None) as reports:
        o, lse = nf.attention(q, k, v, kernel=rung, return_lse=True)
        if direction == "backward":
            reports.clear()
            nf.attention_backward(do, q, k, v, o, lse, kernel=rung)
    return sum(report.traffic.bytes for report in reports)


def row(rung: nf.kernels.Rung, direction: Direction, seqlen: int) -> list[str]:
    """One line of the table."""
    layout = contiguous_layout((1, 1, seqlen, HEAD_DIM), "float32")
    problem = make_problem(layout, layout, layout)
    backward = direction == "backward"
    config = rung.default_config(problem, EMULATOR, backward)
    formula = total_bytes(requested_bytes(rung.name, direction, problem, config))
    counted = ""
    if seqlen in EMULATED:
        number = counted_bytes(rung.name, direction, seqlen)
        assert number == formula, f"{rung.name} {direction} asks for {number}, not {formula}"
        counted = f"{number:,}"
    passes = pass_bytes(rung.name, direction, problem, config.tile_m, config.tile_n)
    numbers = [counted, f"{formula:,}", f"{passes:,}"]
    fast_memory = rung.shared_bytes(problem, config, backward) // FLOAT
    if fast_memory:
        order = FLOAT * paper_numbers(problem, fast_memory)
        numbers += [f"{order:,.0f}", f"{formula / order:.1f}"]
    return [rung.name, direction, f"{seqlen:,}", *numbers]


def main() -> None:
    """Both directions of every rung that has formulas."""
    table = Table(title=f"Bytes of global memory a head, head_dim {HEAD_DIM}, float32")
    for title in ("rung", "direction"):
        table.add_column(title)
    for title in (
        "N",
        "counted",
        "formula",
        "passes",
        "N\N{SUPERSCRIPT TWO} d\N{SUPERSCRIPT TWO} / M",
    ):
        table.add_column(title, justify="right")
    table.add_column("formula / order", justify="right")
    for rung in nf.LADDER:
        for direction in ("forward", "backward"):
            for seqlen in EMULATED + LONG:
                table.add_row(*row(rung, direction, seqlen))
            table.add_section()
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
