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
# # 03 The forward, tile by tile
#
# *30 minutes. No GPU needed: without one the kernel runs on the emulator.*
#
# After this notebook you can
#
# - read a FlashAttention forward kernel, block by block,
# - say for each block of it which line of NumPy it is, and which numbers it makes,
# - name what lives in shared memory, what goes back to global memory, and how often.
#
# One idea: **the online softmax of notebook 02, for a tile of rows, with one thread a row.**
#
# Two things differ from notebook 02, because this is the first paper's version. The sum of a tile
# is relative to the tile's own maximum, so it needs a factor too: `tile_scale` beside
# `old_scale`, which is notebook 02's alpha. And O is divided after every tile, because it goes
# back to global memory in between. The rung `fa2` does it as notebook 02 does.
#
# Names that the blocks use: `load` reads a number in the precision of the sums, `acc_t`;
# `may_attend` says whether the mask lets a query see a key; `group` query heads share the key
# head `head_kv`. The outer loop runs over key tiles `j`, the inner one over query tiles `i`.
#
# The code on this page is not a copy. It is cut out of the kernel that runs,
# `numba_flash/kernels/minimal.py`.

# %%
import inspect

import matplotlib.pyplot as plt
import numpy as np
import walkthrough
from walkthrough import compare, difference, excerpt

import numba_flash as nf
from numba_flash import passes
from numba_flash.kernels import minimal
from numba_flash.problem import Layout, make_problem
from numba_flash.reference import flash1_forward_steps, naive_forward

plt.rcParams.update({"figure.dpi": 80, "font.size": 9, "axes.titlesize": 10})
print("The kernel runs on", "the GPU." if walkthrough.ON_GPU else "the emulator.")

# %% [markdown]
# ## The problem and its tiles
#
# One head of the sample: 79 queries, 79 keys, 32 numbers each. A query tile has `Br = 20` rows
# and a key tile has `Bc = 16`. The last tile of each kind is not full; a kernel must get this
# right.

# %%
sample = nf.load_sample()
head = 8
q, k, v = (x[:, head : head + 1] for x in (sample.q, sample.k, sample.v))
N, d = q.shape[2:]
scale = 1 / np.sqrt(d)

Br, Bc = 20, 16
Tr, Tc = -(-N // Br), -(-N // Bc)
print(f"{Tr} query tiles of {Br} rows, {Tc} key tiles of {Bc} rows")

# %% [markdown]
# The loop order is that of the first FlashAttention paper: key tiles `j` outside, query tiles `i`
# inside. One block of threads does all of it for one head. The numbers say when a tile of $S$ is
# worked on.

# %%
axes = plt.figure(figsize=(5, 3.4), layout="constrained").subplots()
for j in range(Tc):
    for i in range(Tr):
        width, height = min(Bc, N - Bc * j), min(Br, N - Br * i)
        axes.add_patch(
            plt.Rectangle(
                (Bc * j, Br * i), width, height, facecolor=f"C{j}", alpha=0.4, edgecolor="k"
            )
        )
        axes.text(Bc * j + width / 2, Br * i + height / 2, j * Tr + i, ha="center", va="center")
axes.set(xlim=(0, N), ylim=(N, 0), xlabel="keys: tile j", ylabel="queries: tile i")
axes.set_xticks([Bc * j for j in range(Tc)] + [N])
axes.set_yticks([Br * i for i in range(Tr)] + [N])
axes.set_title("the order in which the tiles of S are visited")
plt.show()

# %% [markdown]
# ## Both sides of the comparison
#
# On the NumPy side, `flash1_forward_steps` is the same algorithm in float64. It hands out every
# value of every tile step.

# %%
Q, K, V = (x[0, 0].astype(np.float64) for x in (q, k, v))
numpy_steps = {(step.j, step.i): step for step in flash1_forward_steps(Q, K, V, Br, Bc)}
print(numpy_steps[0, 0]._fields)

# %% [markdown]
# On the kernel side we see only what the kernel leaves in global memory: O, l and m. Two tricks
# make this enough.
#
# - *Stop early.* If we give the kernel only the first $j+1$ key tiles, it leaves O, l and m as
#   they stand after tile $j$.
# - *A window on P.* We append an identity matrix to V. Then $P\,[V, I] = [PV, P]$: the extra
#   columns of O show P itself. The kernel does not notice. V is just wider.
#
# On the emulator each run is also checked: an index out of bounds, a value that nobody wrote or a
# barrier that only some threads reach would stop this notebook.

# %%
config = minimal.Config(tile_m=Br, tile_n=Bc)
v_window = np.concatenate([v, np.eye(N, dtype=np.float32)[None, None]], axis=3)


def run(keys):
    """The kernel on some of the keys; O, l, m, and P through the window."""
    state = walkthrough.forward(q, k[:, :, keys], v_window[:, :, keys], config, scale)
    O, P = state.O[0, 0, :, :d], state.O[0, 0, :, d:]
    return O, P, state.l[0, 0], state.m[0, 0], state.lse[0, 0]


so_far = [run(slice(0, Bc * (j + 1))) for j in range(Tc)]  # key tiles 0 to j
alone = [run(slice(Bc * j, Bc * (j + 1))) for j in range(Tc)]  # key tile j and no other
kernel = minimal.make_forward(config, d, d + N, "float32", False)

# %% [markdown]
# ## The kernel, block by block
#
# We walk through one step: key tile `j = 2`, query tile `i = 2`. All values of this step are
# compared here; the first four of each are printed. All other steps follow below.

# %%
j, i = 2, 2
step = numpy_steps[j, i]
rows, cols = step.rows, step.cols
print(f"queries {rows.start} to {rows.stop - 1}, keys {cols.start} to {cols.stop - 1}")

# %% [markdown]
# ### Who am I, and what is on chip
#
# A block of `Br` threads works on one head. Thread `tx` owns row `tx` of whatever query tile is
# at hand. The four tiles are in *shared memory*: small, fast, and seen by all threads of the
# block.

# %%
excerpt(kernel, "tx = cuda.threadIdx.x", "for row in range(tx, N_q, Br)")

# %% [markdown]
# ### Start values
#
# Before the first key nothing has been seen: no output, an empty sum, and a maximum below every
# number. Given no keys at all, the kernel leaves just these.

# %%
excerpt(kernel, "for row in range(tx, N_q, Br)", "for j in range(Tc)")

# %%
O, _, l, m, _ = run(slice(0, 0))
compare("O", O, np.zeros((N, d)))
compare("l", l, np.zeros(N))
compare("m", m, np.full(N, -np.inf))

# %% [markdown]
# ### Load Kj, Vj
#
# The outer loop. The threads share the work: thread `tx` copies rows `tx`, `tx + Br`, and so on.
# A row past the end of the sequence is filled with zeros. The barrier makes everybody wait until
# the tile is complete, because each thread is going to read all of it.

# %%
excerpt(kernel, "# Load Kj, Vj", "for i in range(Tr)")

# %% [markdown]
# In NumPy this is `Kj, Vj = K[cols], V[cols]`. To see that a value gets through, give the kernel
# a single key. Then every weight is 1, and O is that row of V, to the last bit.

# %%
Kj, Vj = K[cols], V[cols]
one_key = cols.start
O, *_ = run(slice(one_key, one_key + 1))
compare("one row of Vj", O, np.broadcast_to(Vj[0], (N, d)))

# %% [markdown]
# ### Load Qi, l and m
#
# The inner loop. A thread loads its own query row, and the two numbers that it left in global
# memory when it saw the key tile before.

# %%
excerpt(kernel, "row = Br * i + tx", "# S = Q K^T")

# %%
Qi = Q[rows]
O_before, _, l_before, m_before, _ = so_far[j - 1]
compare("row_m_prev", m_before[rows], step.m_old)
compare("row_l_prev", l_before[rows], step.l_old)

# %% [markdown]
# ### S = Q Kᵀ and its row maximum
#
# A thread computes a row of the tile: `Bc` dot products of length `d`. A score that must not
# count gets $-\infty$ in its place: a key past the end, or one that a mask hides.

# %%
excerpt(kernel, "# S = Q K^T", "# P = exp(S - row_m)")

# %% [markdown]
# The kernel's S is in shared memory and gone. But the window shows P of this tile alone, and l
# and m of this tile alone undo the softmax: $S = \log (P\, l) + m$.

# %%
_, P_alone, l_alone, m_alone, _ = alone[j]
P_tilde_kernel = (P_alone * l_alone[:, None])[rows, cols]
S_kernel = np.log(P_tilde_kernel) + m_alone[rows, None]

S = scale * Qi @ Kj.T
m_tilde = S.max(axis=1)
compare("S", S_kernel, S)
compare("row_m", m_alone[rows], m_tilde)
far = difference(S, step.S), difference(m_tilde, step.m_tilde)
print(f"against flash1_forward_steps: {far[0]:.0e}, {far[1]:.0e}")

# %% [markdown]
# ### P = exp(S - row_m) and its row sum
#
# The maximum here is that of this tile, not of the whole row. `base` is there for rows that see
# no key in this tile: their maximum is $-\infty$, and $-\infty - (-\infty)$ is not a number. P
# takes the place of S; nobody needs S any more.

# %%
excerpt(kernel, "# P = exp(S - row_m)", "# New m and l")

# %%
P_tilde = np.exp(S - m_tilde[:, None])
l_tilde = P_tilde.sum(axis=1)
compare("P", P_tilde_kernel, P_tilde)
compare("row_l", l_alone[rows], l_tilde)
far = difference(P_tilde, step.P_tilde), difference(l_tilde, step.l_tilde)
print(f"against flash1_forward_steps: {far[0]:.0e}, {far[1]:.0e}")

# %% [markdown]
# ### The new m and l
#
# The repair of notebook 02, with a factor for each side. The old sum is relative to the old
# maximum, and the tile's sum to the tile's maximum. Both are brought to the larger of the two.

# %%
excerpt(kernel, "# New m and l", "# Write O, l, m")

# %%
O_now, _, l_now, m_now, _ = so_far[j]
m_new = np.maximum(step.m_old, m_tilde)
old_scale, tile_scale = np.exp(step.m_old - m_new), np.exp(m_tilde - m_new)
l_new = old_scale * step.l_old + tile_scale * l_tilde
compare("row_m_new", m_now[rows], m_new)
compare("row_l_new", l_now[rows], l_new)
compare("old_scale", np.exp(m_before - m_now)[rows], old_scale)
compare("tile_scale", np.exp(m_alone - m_now)[rows], tile_scale)

# %% [markdown]
# ### Write O, l and m
#
# O is a finished softmax over the keys so far. To add a tile, it is multiplied by its old sum
# `row_l_prev` (which undoes the division), rescaled, added to, and divided by the new sum.

# %%
excerpt(kernel, "# Write O, l, m", "cuda.syncthreads()  # before")

# %%
pv = P_tilde @ Vj
pv_kernel = (alone[j][0] * l_alone[:, None])[rows]
O_new = (old_scale * step.l_old)[:, None] * step.O_old + tile_scale[:, None] * pv
O_new /= l_new[:, None]
compare("O before", O_before[rows], step.O_old)
compare("pv", pv_kernel, pv)
compare("O after", O_now[rows], O_new)

# %% [markdown]
# ### After the last tile
#
# A barrier ends each outer step: no thread may load the next Kj and Vj while another one still
# reads these. At the end m and l become one number, the log-sum-exp. The backward needs no more
# than that.

# %%
excerpt(kernel, "cuda.syncthreads()  # before")

# %%
reference, lse = naive_forward(*(x.astype(np.float64) for x in (q, k, v)))
compare("LSE", so_far[-1][4], lse[0, 0])
compare("O, against the whole table", so_far[-1][0], reference[0, 0])
compare("O, against the model", so_far[-1][0], sample.o[0, head])

# %% [markdown]
# ## Every step
#
# The same comparison for all tiles: largest relative difference between the kernel and NumPy.

# %%
print(" j  i  |     S     row_m       P     row_l   new m   new l       O")
worst = 0.0
for (j, i), step in numpy_steps.items():
    rows, cols = step.rows, step.cols
    _, P_alone, l_alone, m_alone, _ = alone[j]
    O_now, _, l_now, m_now, _ = so_far[j]
    local = slice(0, cols.stop - cols.start)
    P_tilde_kernel = (P_alone * l_alone[:, None])[rows, cols]
    differences = [
        difference(np.log(P_tilde_kernel) + m_alone[rows, None], step.S),
        difference(m_alone[rows], step.m_tilde),
        difference(P_tilde_kernel, step.P_tilde),
        difference(l_alone[rows], step.l_tilde),
        difference(m_now[rows], step.m_new),
        difference(l_now[rows], step.l_new),
        difference(O_now[rows], step.O_new),
    ]
    worst = max(worst, *differences)
    print(f"{j:2} {i:2}  | " + " ".join(f"{x:7.0e}" for x in differences))
print(f"largest of all: {worst:.0e}; one float32 rounding is {np.finfo(np.float32).eps / 2:.0e}")

# %% [markdown]
# The window also shows the whole of P as it grows. After each key tile every row adds up to 1.
# When a larger score arrives, the weights to the left fade: that is `old_scale` at work. (The
# shade is the square root of the weight, to make small ones visible.)

# %%
pictures = plt.figure(figsize=(10, 2.6), layout="constrained").subplots(1, Tc, sharey=True)
for j, axes in enumerate(pictures):
    axes.imshow(np.sqrt(so_far[j][1]), cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    axes.axvline(min(Bc * (j + 1), N) - 0.5, color="C1", linewidth=1)
    axes.set(title=f"after key tile {j}", xlabel="keys")
pictures[0].set_ylabel("queries")
plt.show()

# %% [markdown]
# ## What it costs
#
# S and P never leave the chip. But something else travels. For each key tile, O, l and m of *all*
# queries come in and go out again, and Q comes in. `numba_flash.passes` counts the bytes by
# formula, here for the table (`naive`), for this kernel (`minimal`), and for one more (`fa2`).

# %%
print(inspect.getdoc(passes.minimal_forward))
print()
print(f"{'tokens':>7} {'tile':>8} {'naive, MB':>12} {'minimal, MB':>12} {'fa2, MB':>12}")
for tokens, tile_m, tile_n in [(N, Br, Bc), (4096, 20, 16), (4096, 64, 64)]:
    array = Layout((1, 1, tokens, d), (0, 0, 0, 0), "float32")
    problem = make_problem(array, array, array)
    rungs = ("naive", "minimal", "fa2")
    bytes_moved = [passes.pass_bytes(r, "forward", problem, tile_m, tile_n) for r in rungs]
    shown = " ".join(f"{x / 1e6:12.2f}" for x in bytes_moved)
    print(f"{tokens:7,} {tile_m:4}x{tile_n:<3} {shown}")

# %% [markdown]
# With the small tiles of this page `minimal` moves *more* than the table, because O travels so
# often. Larger tiles turn this round. The memory that it needs is small with any tile.
#
# **Question 1.** `fa2` swaps the loops: query tiles outside, key tiles inside. What no longer
# needs to travel, and what travels more?
#
# <details><summary>Answer</summary>
#
# With a query tile outside, O, l and m of its rows stay on chip during the whole inner loop, and
# O is written once. Only one division at the end is needed. In exchange K and V are read once for
# each query tile, but they are never written. Also, the query tiles do not depend on each other,
# so each can be a block of its own: this kernel keeps one block busy a head, that one `Tr`
# blocks. This is the order of FlashAttention-2, and the next rung, `numba_flash/kernels/fa2.py`.
#
# </details>
#
# **Question 2.** Remove the barrier at the end of the outer loop. Every thread still computes its
# own row. What can go wrong?
#
# <details><summary>Answer</summary>
#
# A fast thread runs ahead into the next turn and writes its rows of the next Kj and Vj. A slow
# thread is still at its last query tile and reads them: it mixes keys of two tiles. The result
# depends on who is fast, so it may look right for a long time. This is called a *race*. The
# emulator does not look for races yet: there every thread is equally fast, and all looks well.
#
# </details>
#
# **Next:** [04 The backward, tile by tile](04-backward-tile-by-tile.ipynb).
