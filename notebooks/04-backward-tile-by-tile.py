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
# # 04 The backward, tile by tile
#
# *35 minutes. No GPU needed: without one the kernel runs on the emulator.*
#
# After this notebook you can
#
# - derive the five products of the backward, and `delta`,
# - read a FlashAttention backward kernel from its first line to its last,
# - say which thread may add to which gradient, and where threads must wait for each other.
#
# One idea: **P is not stored; it is computed again, from S and one number a row.**
#
# The code on this page is cut out of the kernel that runs, `numba_flash/kernels/minimal.py`.

# %%
import matplotlib.pyplot as plt
import numpy as np
import walkthrough
from walkthrough import compare, difference, excerpt

import numba_flash as nf
from numba_flash.kernels import minimal
from numba_flash.reference import flash_backward_steps, naive_backward, naive_forward

plt.rcParams.update({"figure.dpi": 80, "font.size": 9, "axes.titlesize": 10})
print("The kernel runs on", "the GPU." if walkthrough.ON_GPU else "the emulator.")

# %% [markdown]
# ## What is wanted
#
# Training nudges numbers so that a *loss* gets smaller. Somebody behind attention hands us $dO$:
# how much the loss changes when a number of $O$ changes. We hand on $dQ$, $dK$ and $dV$. We write
# $dX$ for the derivative of the loss by $X$. Our loss is made up: a random weight for each number
# of $O$. So $dO$ is that weight.

# %%
sample = nf.load_sample()
head = 8
q, k, v = (x[:, head : head + 1] for x in (sample.q, sample.k, sample.v))
N, d = q.shape[2:]
scale = 1 / np.sqrt(d)
do = np.random.default_rng(0).standard_normal(q.shape).astype(np.float32)

Q, K, V, dO = (x[0, 0].astype(np.float64) for x in (q, k, v, do))
O, lse = (x[0, 0] for x in naive_forward(*(x[None, None] for x in (Q, K, V))))
print("the loss:", (dO * O).sum())

# %% [markdown]
# ## Five products and a softmax
#
# The forward is $S = \tau QK^T$, $P = \operatorname{softmax}(S)$, $O = PV$, where $\tau$ is the
# scale. Go back through it from the end.
#
# A product $C = AB$ gives $dA = dC\,B^T$ and $dB = A^T dC$. So from $O = PV$
#
# $$dP = dO\,V^T \qquad dV = P^T dO$$
#
# and from $S = \tau QK^T$
#
# $$dQ = \tau\, dS\, K \qquad dK = \tau\, dS^T Q.$$
#
# That is four products. The fifth is $QK^T$ itself, to have $S$ again. Between $dP$ and $dS$
# stands the softmax. If one score $S_k$ of a row grows, its exponential grows, but so does the
# sum that divides all weights of the row: $\partial P_j / \partial S_k = P_j\,(1_{j=k} - P_k)$.
# Add up over $j$:
#
# $$dS_k = P_k\,(dP_k - \textstyle\sum_j P_j\, dP_j)$$

# %%
S = scale * Q @ K.T
P = np.exp(S - lse[:, None])
dP = dO @ V.T
dS = P * (dP - (P * dP).sum(axis=1, keepdims=True))
dQ, dK, dV = scale * dS @ K, scale * dS.T @ Q, P.T @ dO

# %% [markdown]
# Note the second line. The forward left the log-sum-exp of each row, and
# $P = e^{S - \mathrm{lse}}$ needs no maximum and no sum.
#
# Is all this right? Do not trust a derivation; nudge. Change one number by $10^{-5}$ up and down,
# run the forward twice, and see how the loss moves.


# %%
def loss():
    return (dO * naive_forward(*(x[None, None] for x in (Q, K, V)))[0][0, 0]).sum()


nudge = 1e-5
for name, x, dx, where in [("Q", Q, dQ, (30, 3)), ("K", K, dK, (31, 7)), ("V", V, dV, (5, 0))]:
    kept = x[where]
    x[where] = kept + nudge
    above = loss()
    x[where] = kept - nudge
    below = loss()
    x[where] = kept
    print(f"d{name}{where}: nudged {(above - below) / (2 * nudge):+.9f}   formula {dx[where]:+.9f}")

# %% [markdown]
# ## delta, a sum that got shorter
#
# The sum $\sum_j P_j\,dP_j$ runs over all keys. A kernel that sees one tile of keys cannot take
# it. But put $dP_j = \sum_c dO_c V_{jc}$ in, and swap the sums:
#
# $$\sum_j P_j \sum_c dO_c V_{jc} = \sum_c dO_c \sum_j P_j V_{jc} = \sum_c dO_c\, O_c$$
#
# So $\delta$ is the row sum of $dO \circ O$: it runs over `d` numbers that are known from the
# start.

# %%
delta = (dO * O).sum(axis=1)
print("largest difference of the two sums:", np.abs(delta - (P * dP).sum(axis=1)).max())

# %%
pictures = plt.figure(figsize=(10, 3.2), layout="constrained").subplots(1, 3, sharey=True)
for axes, (name, x) in zip(pictures, {"P": P, "dP": dP, "dS": dS}.items(), strict=True):
    largest = np.abs(x).max()
    colours = {"cmap": "Blues", "vmin": 0} if name == "P" else {"cmap": "RdBu_r", "vmin": -largest}
    image = axes.imshow(x, **colours, vmax=largest, interpolation="nearest")
    axes.set(title=name, xlabel="keys")
    plt.colorbar(image, ax=axes, shrink=0.8)
pictures[0].set_ylabel("queries")
plt.show()

# %% [markdown]
# $dP$ is full, but $dS$ is small wherever $P$ is: a score that gets no weight gets no blame.
#
# **Question 1.** Each row of $dS$ adds up to zero. Why?
#
# <details><summary>Answer</summary>
#
# Add one number to all scores of a row, and its softmax stays the same. So the loss does not move
# in that direction, and its derivative there, $\sum_k dS_k$, is zero. In the formula:
# $\sum_k P_k\,dP_k - \delta \sum_k P_k = \delta - \delta$.
#
# </details>

# %%
print("largest row sum of dS:", np.abs(dS.sum(axis=1)).max())

# %% [markdown]
# ## Windows into the kernel
#
# The tiles are those of notebook 03, and so is the loop order: key tiles `j` outside, query tiles
# `i` inside. `flash_backward_steps` hands out every value in float64. The kernel shows us dQ, dK
# and dV in global memory, and again we widen its inputs to see the rest.
#
# - $K' = [K, I]$ and $Q' = [Q, 0]$ leave $S$ as it is, and $dQ' = \tau\,dS\,K' = [dQ, \tau\,dS]$.
# - $dO' = [dO, I]$ and $V' = [V, 0]$ leave $dP$ as it is, and $dV' = P^T dO' = [dV, P^T]$.
# - With $O' = 0$ the kernel's $\delta$ is 0, and what it calls $dS$ is $P \circ dP$.

# %%
Br, Bc = 20, 16
Tr, Tc = -(-N // Br), -(-N // Bc)
config = minimal.Config(tile_m=Br, tile_n=Bc)
steps = {(step.j, step.i): step for step in flash_backward_steps(dO, Q, K, V, O, lse, Br, Bc)}
print(steps[0, 0]._fields)


# %%
def widen(x, extra):
    return np.concatenate([x, extra[None, None].astype(np.float32)], axis=3)


identity, zeros = np.eye(N), np.zeros((N, N))
wide = {
    "do": widen(do, identity), "q": widen(q, zeros), "k": widen(k, identity), "v": widen(v, zeros),
    "o": widen(O[None, None].astype(np.float32), zeros),
}  # fmt: skip
lse_given = lse[None, None].astype(np.float32)


def run(queries, keys, o=wide["o"]):
    """The kernel on some of the queries and keys: dQ, dK, dV, and P and dS through the windows."""
    result = walkthrough.backward(
        wide["do"][:, :, queries], wide["q"][:, :, queries], wide["k"][:, :, keys],
        wide["v"][:, :, keys], o[:, :, queries], lse_given[:, :, queries], config, scale,
    )  # fmt: skip
    dQ, dK, dV = result.dQ[0, 0], result.dK[0, 0], result.dV[0, 0]
    P, dS = np.zeros((2, N, N))
    P[queries] = np.pad(dV[:, d:].T[queries], [(0, 0), (keys.start, N - keys.stop)])
    dS[queries] = dQ[:, d:] / scale
    return {"dQ": dQ[:, :d], "dK": dK[:, :d], "dV": dV[:, :d], "P": P, "dS": dS}


all_queries, all_keys = slice(0, N), slice(0, N)
whole = run(all_queries, all_keys)
without_delta = run(all_queries, all_keys, o=np.zeros_like(wide["o"]))
keys_so_far = [run(all_queries, slice(0, min(Bc * (j + 1), N))) for j in range(Tc)]
queries_so_far = [run(slice(0, min(Br * (i + 1), N)), all_keys) for i in range(Tr)]
kernel = minimal.make_backward(config, d + N, d + N, "float32", False)

# %% [markdown]
# ## The kernel, block by block
#
# One step again: key tile `j = 2`, query tile `i = 2`.

# %%
j, i = 2, 2
step = steps[j, i]
rows, cols = step.rows, step.cols
print(f"queries {rows.start} to {rows.stop - 1}, keys {cols.start} to {cols.stop - 1}")

# %% [markdown]
# ### What is on chip
#
# The inputs of a step, the two sums dKj and dVj that belong to the key tile, and the tiles P and
# dS. That is about twice what the forward needs.

# %%
excerpt(kernel, "Qi = cuda.shared.array", "for head in range")

# %% [markdown]
# ### Start dQ
#
# A gradient is a sum over all steps, so it starts at zero. dQ is in global memory. (Several query
# heads may share a key head; the block then visits them in turn. Here there is one.)

# %%
excerpt(kernel, "for head in range", "for j in range(Tc)")

# %% [markdown]
# ### Load Kj, Vj; start dKj, dVj
#
# The outer loop. dKj and dVj belong to this key tile, so they stay on chip until it is done.

# %%
excerpt(kernel, "# Load Kj, Vj", "for head in range")

# %%
Kj, Vj = K[cols], V[cols]

# %% [markdown]
# ### Load Qi, dOi, Li and compute Di
#
# The inner loop. `Li` is the log-sum-exp of the thread's row and `Di` its delta. A thread without
# a row (past the end) fills its place with zeros: others are going to read it.

# %%
excerpt(kernel, "# Load Qi, dOi", "# P = exp(S - Li)")

# %% [markdown]
# With and without delta the kernel's dS differs by $P\,\delta$. Divide by $P$ where the row has
# its largest weight.

# %%
Qi, dOi, Oi, Li = Q[rows], dO[rows], O[rows], lse[rows]
Di = (dOi * Oi).sum(axis=1)
at = np.arange(N), whole["P"].argmax(axis=1)
delta_kernel = (without_delta["dS"][at] - whole["dS"][at]) / whole["P"][at]
compare("Di", delta_kernel[rows], Di)
print(f"the generator: {difference(Di, step.delta):.0e}")

# %% [markdown]
# ### P, dP and dS
#
# Each thread computes a row of all three. `probability` is $e^{S - L_i}$ where the pair is
# allowed, and 0 elsewhere.

# %%
excerpt(kernel, "# P = exp(S - Li)", "# dQi +=")

# %%
Sij = scale * Qi @ Kj.T
Pij = np.exp(Sij - Li[:, None])
dPij = dOi @ Vj.T
dSij = Pij * (dPij - Di[:, None])
P_kernel, dS_kernel = whole["P"][rows, cols], whole["dS"][rows, cols]
compare("S", np.log(P_kernel) + lse_given[0, 0, rows, None], Sij)
compare("P", P_kernel, Pij)
compare("dP", without_delta["dS"][rows, cols] / P_kernel, dPij)
compare("dS", dS_kernel, dSij)
for name, value in {"S": Sij, "P": Pij, "dP": dPij, "dS": dSij}.items():
    print(f"the generator, {name}: {difference(value, getattr(step, name)):.0e}")

# %% [markdown]
# ### dQ: a thread adds to its own row
#
# Row `tx` of dQ needs row `tx` of dS, which this thread has just made. Nobody else writes there.
# But the next key tile adds to the same row again, so dQ travels to global memory and back at
# every step.

# %%
excerpt(kernel, "# dQi +=", "# dVj +=")

# %%
dQ_before = steps[j - 1, i].dQ
compare("dQ before", keys_so_far[j - 1]["dQ"][rows], dQ_before)
compare("dQ after", keys_so_far[j]["dQ"][rows], dQ_before + scale * dSij @ Kj)

# %% [markdown]
# ### dV and dK: a thread owns a key
#
# $P^T dO$ adds up over the *queries*: column `y` of P, all its rows. Those rows were made by all
# threads. So there is a barrier first, and then the work is dealt out anew: a thread now owns key
# `y`. It reads P and dS by columns, and nobody else adds to its sums.

# %%
excerpt(kernel, "# dVj +=", "cuda.syncthreads()  # before")

# %%
dV_before, dK_before = steps[j, i - 1].dV, steps[j, i - 1].dK
compare("dVj before", queries_so_far[i - 1]["dV"][cols], dV_before)
compare("dVj after", queries_so_far[i]["dV"][cols], dV_before + Pij.T @ dOi)
compare("dKj before", queries_so_far[i - 1]["dK"][cols], dK_before)
compare("dKj after", queries_so_far[i]["dK"][cols], dK_before + scale * dSij.T @ Qi)

# %% [markdown]
# ### Write dKj and dVj
#
# After the inner loop the two sums are complete. They are written once, and the kernel ends.

# %%
excerpt(kernel, "# Write dKj, dVj")

# %%
expected = naive_backward(*(x[None, None] for x in (dO, Q, K, V, O)), lse[None, None])
for name, value in zip(("dQ", "dK", "dV"), expected, strict=True):
    compare(name + ", against the whole table", whole[name], value[0, 0])

# %% [markdown]
# ## Every step
#
# Largest difference between the kernel and NumPy, for all tiles.

# %%
print(" j  i  |       S       P      dP   delta      dS      dQ      dK      dV")
worst = 0.0
for (j, i), step in steps.items():
    rows, cols = step.rows, step.cols
    P_kernel = whole["P"][rows, cols]
    differences = [
        difference(np.log(P_kernel) + lse_given[0, 0, rows, None], step.S),
        difference(P_kernel, step.P),
        difference(without_delta["dS"][rows, cols] / P_kernel, step.dP),
        difference(delta_kernel[rows], step.delta),
        difference(whole["dS"][rows, cols], step.dS),
        difference(keys_so_far[j]["dQ"][rows], step.dQ),
        difference(queries_so_far[i]["dK"][cols], step.dK),
        difference(queries_so_far[i]["dV"][cols], step.dV),
    ]
    worst = max(worst, *differences)
    print(f"{j:2} {i:2}  | " + " ".join(f"{x:7.0e}" for x in differences))
print(f"largest of all: {worst:.0e}; one float32 rounding is {np.finfo(np.float32).eps / 2:.0e}")

# %% [markdown]
# dQ fills up with the outer loop: after each key tile all rows have one more term. dK and dV fill
# up with the inner loop. The picture shows how far each row of dQ still is from its end.

# %%
left = [np.linalg.norm(state["dQ"] - dQ, axis=1) for state in keys_so_far]
axes = plt.figure(figsize=(8, 2.4), layout="constrained").subplots()
image = axes.imshow(left, aspect="auto", cmap="Blues", interpolation="nearest")
axes.set(
    xlabel="query", ylabel="after key tile", title="distance of dQ from its final value, by row"
)
axes.set_yticks(range(Tc))
plt.colorbar(image, ax=axes)
plt.show()

# %% [markdown]
# Head 8 looks one token ahead, so a query gets most of its gradient from the key tile that holds
# the next token. That is the staircase.
#
# **Question 2.** We want one block of threads for each key tile, so that the outer loop runs in
# parallel. dK and dV are easy. What is the trouble with dQ, and what can be done?
#
# <details><summary>Answer</summary>
#
# All key tiles add to the same rows of dQ. Blocks that do this at once overwrite each other's
# sums. One way is an atomic addition; its order changes from run to run, and with it the
# rounding. The other way is a second pass with the loops swapped: one block for each query tile
# adds up its dQ over all keys. It computes S, P and dP again, and is the same to the last bit in
# every run. The next rung, `numba_flash/kernels/fa2.py`, does this. In NumPy it is `dkdv_steps`
# and `dq_steps`.
#
# </details>
