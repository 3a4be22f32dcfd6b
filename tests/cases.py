"""Inputs that broke other attention kernels, as data.

Each entry restates a trigger reported against a public implementation. The emulator runs the
small ones, a GPU runs all of them, on every rung, forward and backward.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Case:
    """One problem; ``times_q`` and ``times_kv`` multiply the standard normal inputs."""

    name: str
    seqlen_q: int
    seqlen_k: int
    head_dim: int = 32
    batch: int = 1
    heads: int = 1
    heads_kv: int | None = None
    head_dim_v: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    make_mask: Any = None
    times_q: float = 1.0
    times_kv: float = 1.0
    cancels: bool = False

    @property
    def scores(self) -> int:
        return self.batch * self.heads * self.seqlen_q * self.seqlen_k

    @property
    def is_long(self) -> bool:
        return self.seqlen_q * self.seqlen_k >= 1_000_000

    def fits_float64(self, kernel):
        """Whether a rung takes the head dimensions in float64; fa2's tiles end at about 350."""
        if kernel == "fa2":
            return self.head_dim + (self.head_dim_v or self.head_dim) <= 350
        return kernel in ("naive", "minimal")

    def inputs(self, dtype, device, seed=0):
        """q, k, v, do and the options, with a mask if the case has one."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(heads, seqlen, head_dim, times=1.0):
            shape = (self.batch, heads, seqlen, head_dim)
            x = torch.randn(shape, generator=generator, device=device, dtype=torch.float64)
            return (times * x).to(dtype)

        heads_kv = self.heads_kv or self.heads
        head_dim_v = self.head_dim_v or self.head_dim
        q = normal(self.heads, self.seqlen_q, self.head_dim, self.times_q)
        k = normal(heads_kv, self.seqlen_k, self.head_dim, self.times_kv)
        v = normal(heads_kv, self.seqlen_k, head_dim_v, self.times_kv)
        do = normal(self.heads, self.seqlen_q, head_dim_v)
        options = dict(self.options)
        if self.make_mask is not None:
            options["mask"] = self.make_mask(self, generator, device)
        return q, k, v, do, options


def random_mask(case, generator, device):
    shape = (case.batch, case.heads, case.seqlen_q, case.seqlen_k)
    return torch.rand(shape, generator=generator, device=device) < 0.6


def mask_with_empty_row(case, generator, device):
    mask = random_mask(case, generator, device)
    mask[..., case.seqlen_q // 2, :] = False
    return mask


def key_padding(case, generator, device):
    """(batch, 1, 1, seqlen_k): a padding mask, repeated over heads and queries."""
    lengths = torch.arange(1, case.batch + 1, device=device) * case.seqlen_k // (case.batch + 1)
    keys = torch.arange(case.seqlen_k, device=device)
    return (keys[None, :] <= lengths[:, None])[:, None, None, :]


CAUSAL = {"causal": True}
TOP_LEFT = {"causal": True, "align": "top-left"}

TAILS = [Case(f"seqlen-{n}", n, n, 32) for n in (1, 5, 31, 33)]
TAILS += [
    Case("shorter-than-a-tile", 8, 8, 128, heads=40),
    Case("head-dim-128-for-64", 2048, 2048, 128, batch=3, heads=2),
    Case("tail-of-head-65", 65, 65, 16, heads=3),
    Case("tail-of-head-100", 100, 100, 16, batch=2, heads=2),
    Case("mask-at-1025", 1025, 1025, 64, make_mask=random_mask),
    Case("seqlen-137", 137, 137, 32, heads=2),
]
TAILS += [
    Case(f"keys-{n}-offset-{offset}", n + offset, n, 16, options=CAUSAL)
    for n in (8, 16, 32, 64, 128)
    for offset in (-3, 5)
]
TAILS += [
    Case(f"keys-{n}-queries-{n}-times-5", n, n, d, times_q=5, times_kv=3, cancels=True)
    for n in (1, 2, 5, 17, 128)
    for d in (16, 32, 64)
]

MASKS = [
    Case(
        f"causal-{q}-{k}-{options.get('align', 'bottom-right')}",
        q,
        k,
        32,
        options=options,
        cancels=min(q, k) <= 2,  # rows that see one key have no gradient
    )
    for q, k in ((5, 2), (2, 5), (2048, 1024), (1, 16), (32, 1024))
    for options in (CAUSAL, TOP_LEFT)
]
MASKS += [
    Case("causal-times-3", 1024, 1024, 128, options=CAUSAL, times_q=3, times_kv=3, cancels=True),
    Case("not-causal", 48, 48, 16, options={"causal": False}),
    Case("window", 70, 70, 16, options={"window": (9, 4)}),
    Case("window-longer-keys", 40, 90, 16, options={"window": (20, 0)}),
    Case("window-top-left", 90, 40, 16, options={"window": (5, 7), "align": "top-left"}),
    Case("window-causal", 75, 75, 16, options={"window": (16, 3), "causal": True}),
    Case("window-sees-nothing", 60, 20, 16, options={"window": (3, 3), "align": "top-left"}),
    Case("bool-mask-empty-row", 8, 8, 8, make_mask=mask_with_empty_row),
    Case("bool-mask-causal", 50, 61, 16, heads=2, options=CAUSAL, make_mask=mask_with_empty_row),
    Case("key-padding", 33, 47, 16, batch=3, heads=2, make_mask=key_padding),
    Case("softmax-scale", 33, 40, 16, options={"softmax_scale": 0.7}),
    Case("negative-softmax-scale", 20, 20, 16, options={"softmax_scale": -0.3}),
]

GROUPS = [
    Case(f"groups-8-{kv}", 33, 40, 16, batch=2, heads=8, heads_kv=kv, options=CAUSAL)
    for kv in (1, 2, 4)
]
GROUPS += [
    Case("batch-2-head-dim-256", 40, 40, 256, batch=2, heads=2),
    Case("extreme-scores", 24, 24, 64, times_q=8.7, times_kv=8.7, cancels=True),
    Case("lse-not-padded", 16, 16, 128, heads=2),
]

PEERS_SEQLENS = [
    (1, 1), (1, 239), (3, 799), (64, 128), (113, 203), (113, 211), (108, 256), (127, 512),
    (127, 513), (128, 217), (239, 1), (256, 512), (512, 256), (640, 128), (799, 3), (1023, 1024),
    (1024, 1023), (1024, 1024), (2048, 2048),
]  # fmt: skip
PEERS_HEAD_DIMS = [32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256]
PEERS = [
    Case(f"peers-{q}-{k}-{d}", q, k, d, heads=2, options=CAUSAL if n % 2 else {})
    for n, (q, k) in enumerate(PEERS_SEQLENS)
    for d in (PEERS_HEAD_DIMS[n % 12], PEERS_HEAD_DIMS[(n + 5) % 12])
]
PEERS += [
    Case(f"head-dim-{d}-value-{dv}", 37, 43, d, heads=2, head_dim_v=dv, options=CAUSAL)
    for d, dv in ((1, 1), (3, 7), (59, 111), (111, 59), (40, 256), (256, 8))
]
PEERS += [Case(f"head-dim-{d}", 35, 50, d) for d in PEERS_HEAD_DIMS]

EMPTIES = [
    Case("batch-0", 4, 4, 16, batch=0),
    Case("no-keys", 5, 0, 16, heads=2),
    Case("no-queries", 0, 5, 16, heads=2),
    Case("no-keys-causal", 5, 0, 16, options=CAUSAL),
]

CASES = [*TAILS, *MASKS, *GROUPS, *PEERS, *EMPTIES]
"""Everything that both tiers can run; larger and device-bound triggers stand in ``gpu/``."""
