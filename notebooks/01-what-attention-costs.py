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
# # 01 What attention costs
#
# *15 minutes. Needs NumPy and Matplotlib; no GPU.*
#
# After this notebook you can
#
# - compute attention in three lines and read a picture of it,
# - say how many bytes the three lines move, and how many multiply-adds they do,
# - say how many bytes attention moves only because it stores a table nobody asked for.
#
# One idea: **attention makes a table with a cell for every pair of tokens, and the table is what
# costs.** The notebooks that follow get rid of the table.

# %%
import time
import tracemalloc

import matplotlib.pyplot as plt
import numpy as np

import numba_flash as nf
from numba_flash.reference import naive_forward, tiled_forward

plt.rcParams.update({"figure.dpi": 80, "font.size": 9, "axes.titlesize": 10})

# %% [markdown]
# ## Three lines
#
# The sample is real: one layer of a trained sentence encoder reads a paragraph of 79 tokens. The
# layer has 12 *heads*. Each head has, for every token, a query, a key and a value: 32 numbers
# each. A query says what the token looks for. A key says what the token offers. A value is what
# it hands over.

# %%
sample = nf.load_sample()
print("(batch, heads, tokens, head_dim) =", sample.q.shape)
print(" ".join(sample.tokens))

# %% [markdown]
# We take one head. $N$ is the number of tokens, $d$ the length of a query.
#
# $$S = \frac{Q K^T}{\sqrt d} \qquad P = \operatorname{softmax}(S) \qquad O = P V$$
#
# Row $i$ of $S$ compares query $i$ with every key. The softmax turns the row into weights that
# are positive and add up to 1. Row $i$ of $O$ is the mixture of all values with these weights.
#
# (Before the exponential we subtract the largest score of the row. The result is the same, and
# nothing overflows. Notebook 02 says why.)

# %%
head = 8
Q, K, V = (x[0, head].astype(np.float64) for x in (sample.q, sample.k, sample.v))
N, d = Q.shape

S = Q @ K.T / np.sqrt(d)
P = np.exp(S - S.max(axis=1, keepdims=True))
P /= P.sum(axis=1, keepdims=True)
O = P @ V

print("S", S.shape, " P", P.shape, " O", O.shape)
print("largest distance of a row sum of P from 1:", np.abs(P.sum(axis=1) - 1).max())
print("largest distance of O from the model's own:", np.abs(O - sample.o[0, head]).max())

# %% [markdown]
# The model computed the same thing, so the last number is only rounding. Here is $P$ for the
# first sentence, in this head and in another one. A dark cell is a large weight.

# %%
first = sample.tokens.index(".") + 1
words = sample.tokens[:first]
pictures = plt.figure(figsize=(9, 4.6), layout="constrained").subplots(1, 2)
for axes, h in zip(pictures, (8, 9), strict=True):
    scores = sample.q[0, h] @ sample.k[0, h].T / np.sqrt(d)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    axes.imshow(weights[:first, :first], cmap="Blues", vmin=0, vmax=1)
    axes.set_xticks(range(first), words, rotation=90)
    axes.set_yticks(range(first), words)
    axes.set(title=f"head {h}", xlabel="key: who is looked at", ylabel="query: who looks")
plt.show()

# %% [markdown]
# Head 8 looks one token ahead almost everywhere. Head 9 looks one token back at about one token in
# five, and rests on `[CLS]`, which stands before every text, at the others.
#
# ## Count
#
# $Q$, $K$, $V$ and $O$ have $N d$ numbers each. $S$ and $P$ have $N^2$. When the text gets
# longer, $N$ grows and $d$ does not.


# %%
def megabytes(numbers, bytes_each=4):
    return numbers * bytes_each / 1e6


print(f"{'tokens':>8} {'Q K V O':>12} {'S and P':>14}   (MB for one head, d = 64, float32)")
for n in (79, 1024, 4096, 16384, 65536):
    print(f"{n:8,} {megabytes(4 * n * 64):12,.1f} {megabytes(2 * n * n):14,.1f}")

# %%
lengths = np.logspace(6, 17, 50, base=2)
axes = plt.figure(figsize=(6, 3.4), layout="constrained").subplots()
axes.loglog(lengths, megabytes(4 * lengths * 64), label="Q, K, V, O:  $4 N d$ numbers")
axes.loglog(lengths, megabytes(2 * lengths**2), label="S, P:  $2 N^2$ numbers")
axes.axvline(2 * 64, color="gray", linestyle=":", linewidth=1)
axes.text(2 * 64 * 1.1, 1e4, "$N = 2 d$", color="gray")
axes.set(xlabel="tokens N", ylabel="MB, one head", title="Memory, float32, d = 64")
axes.legend()
axes.grid(alpha=0.3)
plt.show()

# %% [markdown]
# That is one head of one layer. Models have dozens of heads, and they read many texts at once.
#
# **Question 1.** From which $N$ on do $S$ and $P$ need more memory than $Q$, $K$, $V$ and $O$
# together?
#
# <details><summary>Answer</summary>
#
# $2 N^2 > 4 N d$ when $N > 2 d$: the dotted line. For $d = 64$ that is 128 tokens, a paragraph.
#
# </details>
#
# ## Move
#
# Memory that is large is also slow to cross. A processor computes on numbers that sit close to
# it, in registers and in a small fast memory. The big arrays sit in the large, slow memory,
# called
# *global memory* on a GPU. So count what each of the three steps reads from there and writes there.
#
# | step | reads | writes | multiply-adds |
# |---|---|---|---|
# | $S = QK^T / \sqrt d$ | $2Nd$ | $N^2$ | $N^2 d$ |
# | $P = \operatorname{softmax}(S)$ | $N^2$ | $N^2$ | none |
# | $O = PV$ | $N^2 + Nd$ | $Nd$ | $N^2 d$ |
#
# Together: $4N^2 + 4Nd$ numbers moved. This supposes the best case, in which each step touches
# each of its arrays once.

# %%
n, d64 = 4096, 64
moved = {"scores": 2 * n * d64 + n * n, "softmax": 2 * n * n, "values": n * n + 2 * n * d64}
needed = 4 * n * d64
print(f"N = {n}, d = {d64}: moved {megabytes(sum(moved.values())):.1f} MB,")
print(f"of which the inputs and the output are {megabytes(needed):.1f} MB.")
print(f"The other {100 * (1 - needed / sum(moved.values())):.1f} % is S and P going out and back.")

# %% [markdown]
# The softmax is the odd one: half of all the traffic, and no multiply-add at all. Does this show
# on a clock? Here are the three steps on your machine, and beside them a plain copy of the table,
# which computes nothing. The size is 2048 tokens.


# %%
def milliseconds(work, repeats=5):
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


rng = np.random.default_rng(0)
n = 2048
q, k, v = rng.standard_normal((3, n, d64), dtype=np.float32)
table, weights = np.empty((2, n, n), np.float32)


def softmax_in_place():
    np.subtract(table, table.max(axis=1, keepdims=True), out=weights)
    np.exp(weights, out=weights)
    np.divide(weights, weights.sum(axis=1, keepdims=True), out=weights)


steps = {
    "$S = QK^T$": lambda: np.matmul(q, k.T, out=table),
    "copy of S": lambda: np.copyto(weights, table),
    "softmax": softmax_in_place,
    "$O = PV$": lambda: weights @ v,
}
took = {name: milliseconds(work) for name, work in steps.items()}

axes = plt.figure(figsize=(6, 2.4), layout="constrained").subplots()
bars = axes.barh(list(took), list(took.values()), color=["C0", "lightgray", "C1", "C0"])
axes.bar_label(bars, fmt="%.1f ms", padding=3)
axes.invert_yaxis()
axes.margins(x=0.15)
axes.set(title=f"NumPy on this machine, N = {n}, d = {d64}, float32", xlabel="milliseconds")
plt.show()

share = took["softmax"] / (took["softmax"] + took["$S = QK^T$"] + took["$O = PV$"])
print(f"The softmax: 0 % of the multiply-adds, {100 * share:.0f} % of the time of the three steps.")

# %% [markdown]
# ## What to do about it
#
# Nobody asked for $S$ and $P$. They are large notes on the way to $O$. The way out is to work in
# **tiles**: take a few queries and a few keys, compute the small piece of $S$ that they make, use
# it at once, and forget it. Then no table is ever stored. This is FlashAttention.
#
# One thing is in the way. A softmax divides by the sum over the *whole* row, and a tile sees only
# a piece of the row. Notebook 02 deals with this. Here is a look ahead: the same attention by the
# table and by tiles of 64 x 64, both in NumPy, with the peak memory that each one took.

# %%
print(f"{'tokens':>8} {'table, MB':>12} {'tiles, MB':>12} {'largest difference':>20}")
for n in (256, 512, 1024, 2048):
    q, k, v = rng.standard_normal((3, 1, 1, n, d64), dtype=np.float32)
    peaks, outputs = [], []
    for work in (naive_forward, lambda q, k, v: tiled_forward(q, k, v, 64, 64)):
        tracemalloc.start()
        outputs.append(work(q, k, v)[0])
        peaks.append(tracemalloc.get_traced_memory()[1] / 1e6)
        tracemalloc.stop()
    difference = np.abs(outputs[0] - outputs[1]).max()
    print(f"{n:8,} {peaks[0]:12.2f} {peaks[1]:12.2f} {difference:20.1e}")

# %% [markdown]
# The table grows fourfold when the text doubles. The tiles grow twofold, as the output does.
#
# **Question 2.** Tiles do not save arithmetic: they do the same $2 N^2 d$ multiply-adds. And if
# each tile of $B$ queries reads all keys and values again, that is $2 N d$ numbers for each of
# the $N/B$ query tiles. For $d = 64$, which $B$ makes the tiled version move less than the
# table's $4 N^2$?
#
# <details><summary>Answer</summary>
#
# The tiles move $2Nd \cdot N/B$ numbers for the keys and values, and $2Nd$ for $Q$ and $O$, which
# is small. $2 N^2 d / B < 4 N^2$ when $B > d / 2$, here 32. With $B = 128$ the tiles move a
# quarter. A larger tile is better, and what limits it is the size of the fast memory. The
# FlashAttention paper ([arXiv 2205.14135](https://arxiv.org/abs/2205.14135), theorem 2) says this
# in general: the traffic is $O(N^2 d^2 / M)$ for a fast memory of $M$ numbers.
#
# </details>
#
# **Next:** [02 The online softmax](02-online-softmax.ipynb), one row at a time.
