# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 02 The online softmax, one row
#
# *15 minutes. Needs NumPy and Matplotlib; no GPU.*
#
# After this notebook you can
#
# - compute a softmax without ever holding the whole row,
# - say what the three numbers `m`, `l` and `alpha` are, and why an old sum may be corrected
#   later,
# - carry the output along, so that the row is never needed again.
#
# One idea: **a sum of exponentials that was taken relative to the wrong maximum is repaired by
# one multiplication.**

# %%
import matplotlib.pyplot as plt
import numpy as np

import numba_flash as nf
from numba_flash.reference import flash2_forward_steps

plt.rcParams.update({"figure.dpi": 80, "font.size": 9, "axes.titlesize": 10})

# %% [markdown]
# ## Why a softmax needs the maximum
#
# $$P_j = \frac{e^{S_j}}{\sum_k e^{S_k}}$$
#
# Computed as written, it overflows: the largest float32 is about $3.4 \cdot 10^{38}$, and
# $e^{89}$ is beyond it.

# %%
scores = np.array([1.0, 60.0, 100.0], np.float32)
with np.errstate(over="ignore", invalid="ignore"):
    print("exp:         ", np.exp(scores))
    print("as written:  ", np.exp(scores) / np.exp(scores).sum())

# %% [markdown]
# Subtract any number $c$ from all scores, and above and below the line everything is divided by
# $e^c$. The result stays the same. With $c = \max S$ the largest exponential is $e^0 = 1$, and
# nothing can overflow.

# %%
shifted = scores - scores.max()
print("minus max:   ", np.exp(shifted) / np.exp(shifted).sum())

# %% [markdown]
# So a softmax takes three walks over a row: one for the maximum, one for the sum, one to divide.
# Each walk needs the whole row. That is what we want to avoid.
#
# ## A real row, in tiles
#
# Head 1 of the sample looks for the same word elsewhere. Our row belongs to the third *word* in
# the text. Its 79 scores come in five tiles of at most 16.

# %%
sample = nf.load_sample()
head, word = 1, 57
Q, K, V = (x[0, head].astype(np.float64) for x in (sample.q, sample.k, sample.v))
N, d = Q.shape
row = Q[word] @ K.T / np.sqrt(d)
tiles = [slice(start, min(start + 16, N)) for start in range(0, N, 16)]
print(f"the query: {sample.tokens[word]!r}; tiles of", [t.stop - t.start for t in tiles])

# %% [markdown]
# ## Two numbers are enough
#
# Walk over the tiles and keep two numbers:
#
# - `m`, the maximum of all scores so far,
# - `l`, the sum of $e^{S_j - m}$ over all scores so far.
#
# A new tile may bring a larger maximum. Then `l` is relative to the wrong one. But
#
# $$\sum_j e^{S_j - m_\text{new}} = e^{m_\text{old} - m_\text{new}} \sum_j e^{S_j - m_\text{old}}$$
#
# so one multiplication by `alpha` $= e^{m_\text{old} - m_\text{new}}$ puts it right.

# %%
m, l = -np.inf, 0.0
history = []
print("tile   m before    m after      alpha     l after")
for j, tile in enumerate(tiles):
    m_old, m = m, max(m, row[tile].max())
    alpha = np.exp(m_old - m)
    l = alpha * l + np.exp(row[tile] - m).sum()
    history.append((m, l))
    print(f"{j:4} {m_old:10.4f} {m:10.4f} {alpha:10.4f} {l:11.6f}")

print()
print("maximum of the whole row:     ", row.max(), " difference", abs(m - row.max()))
whole = np.exp(row - row.max()).sum()
print("sum relative to that maximum: ", whole, " difference", abs(l - whole))

# %% [markdown]
# Before the first tile, `m` is $-\infty$ and `l` is 0. Then `alpha` is $e^{-\infty} = 0$: the
# empty sum is thrown away, and no special case is needed.

# %%
maxima = np.array([m for m, _ in history])
top, bottom = plt.figure(figsize=(8.5, 4.6), layout="constrained").subplots(2, 1, sharex=True)
for j, tile in enumerate(tiles):
    where = np.arange(tile.start, tile.stop)
    top.bar(where, row[tile], color=f"C{j}", width=0.8)
    edges = [tile.start - 0.5, tile.stop - 0.5]
    top.hlines(maxima[j], *edges, color="black", label="m after the tile" if j == 0 else None)
    seen = np.arange(tile.stop)
    bottom.plot(
        seen, np.exp(row[: tile.stop] - maxima[j]), color=f"C{j}", linewidth=1, marker=".",
        markersize=4, alpha=0.8, label=f"after tile {j}",
    )  # fmt: skip
top.set(title=f"scores of the query '{sample.tokens[word]}'", ylabel="S")
top.legend(loc="lower right")
bottom.set(title="what each key counts in l: exp(S - m)", ylabel="exp(S - m)")
bottom.set_xticks(range(N), sample.tokens, rotation=90, fontsize=6)
bottom.legend(loc="upper right", fontsize=7)
for axes in (top, bottom):
    axes.margins(x=0.01)
plt.show()

# %% [markdown]
# Look at the first key, `[CLS]`, in the lower picture. It counts 1 as long as it is the largest.
# Each time the maximum grows, everything that was counted before shrinks by the same factor. That
# factor is `alpha`. Where the maximum stays, the curves lie on top of each other, and `alpha` is
# 1.
#
# ## Carry the output along
#
# We want $O = \sum_j P_j V_j$, not the weights. Keep a third thing, the vector `acc`
# $= \sum_j e^{S_j - m} V_j$. It is a sum of the same exponentials, so the same `alpha` repairs
# it. At the end `acc / l` is the output. A tile of scores is used once and can be forgotten.

# %%
m, l, acc = -np.inf, 0.0, np.zeros(d)
for tile in tiles:
    m_old, m = m, max(m, row[tile].max())
    alpha = np.exp(m_old - m)
    p = np.exp(row[tile] - m)
    l = alpha * l + p.sum()
    acc = alpha * acc + p @ V[tile]
o = acc / l

P = np.exp(row - row.max())
P /= P.sum()
print("largest difference from softmax(S) @ V:  ", np.abs(o - P @ V).max())
print("largest difference from the model itself:", np.abs(o - sample.o[0, head, word]).max())

# %% [markdown]
# `numba_flash.reference` has this loop for a whole tile of rows, and it hands out every value on
# the way. With a tile of one row it must agree with ours, number by number.

# %%
steps = flash2_forward_steps(Q[word : word + 1], K, V, tile_m=1, tile_n=16)
for step, (m_here, l_here) in zip(steps, history, strict=True):
    print(
        f"tile {step.j}: difference in m {abs(step.m[0] - m_here):.0e}, "
        f"in l {abs(step.l[0] - l_here):.0e}"
    )
print(f"difference in O: {np.abs(step.O[0] - o).max():.0e}")

# %% [markdown]
# How good is the output on the way? After each tile, `acc / l` is attention over the keys so far:
# a finished answer to a smaller question.

# %%
steps = list(flash2_forward_steps(Q[word : word + 1], K, V, tile_m=1, tile_n=16))
far, share = plt.figure(figsize=(8.5, 2.6), layout="constrained").subplots(1, 2)
far.plot([np.linalg.norm(step.O[0] - P @ V) for step in steps], marker="o", color="black")
far.set(xlabel="after tile", ylabel="distance from the final O", title="acc / l on the way")
share.bar(range(len(tiles)), [P[t].sum() for t in tiles], color=[f"C{j}" for j in range(5)])
share.set(xlabel="tile", ylabel="sum of P", title="how much of the final weight a tile holds")
for axes in (far, share):
    axes.set_xticks(range(len(tiles)))
plt.show()

# %% [markdown]
# **Question 1.** In which order must the tiles come?
#
# <details><summary>Answer</summary>
#
# In any. The maximum of all scores and the sum relative to it do not depend on the order; only
# the rounding does. The next cell tries it. So a GPU may let different processors take different
# tiles of one row, and combine the triples (`m`, `l`, `acc`) at the end.
#
# </details>


# %%
def online(order):
    m, l, acc, rescales = -np.inf, 0.0, np.zeros(d), 0
    for j in order:
        m_old, m = m, max(m, row[tiles[j]].max())
        alpha = np.exp(m_old - m)
        rescales += bool(np.isfinite(m_old) and alpha < 1)
        p = np.exp(row[tiles[j]] - m)
        l, acc = alpha * l + p.sum(), alpha * acc + p @ V[tiles[j]]
    return acc / l, rescales


for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 4, 0, 3, 1]):
    result, rescales = online(order)
    print(order, f"difference {np.abs(result - o).max():.0e},", f"alpha below 1: {rescales} times")

# %% [markdown]
# **Question 2.** The backward pass will need the weights $P$ again, and they were forgotten. `m`
# and `l` would be enough to compute them from the scores. Can you do it with one number a row?
#
# <details><summary>Answer</summary>
#
# $P_j = e^{S_j - m} / l = e^{S_j - m - \log l}$. So keep $\mathrm{lse} = m + \log l$, which is
# $\log \sum_k e^{S_k}$, the *log-sum-exp*. Then $P_j = e^{S_j - \mathrm{lse}}$. It cannot
# overflow: lse is at least as large as every score.
#
# </details>

# %%
lse = m + np.log(l)
print("largest difference between exp(S - lse) and P:", np.abs(np.exp(row - lse) - P).max())

# %% [markdown]
# **Next:** [03 The forward, tile by tile](03-forward-tile-by-tile.ipynb). There a tile has many
# rows, and the loop is a GPU kernel.
