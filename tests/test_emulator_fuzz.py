"""Random kernels compute the same on the emulator and on the one-thread-at-a-time engine.

The environment variable NUMBA_FLASH_FUZZ says how many.
"""

import linecache
import os
import random

import numpy as np
import pytest
from numba import cuda, float32, int64, uint32

from numba_flash.emulator import emulate
from numba_flash.emulator.lanes import Lanes
from tests.scalar_engine import ScalarEngine

NUM_KERNELS = int(os.environ.get("NUMBA_FLASH_FUZZ", "150"))
PER_TEST = 50
BLOCKS, THREADS = 2, 36
INTEGERS, FLOATS, UNSIGNED = ("a", "b", "c", "d"), ("f", "g"), ("u", "v")


class Generator:
    """Writes a random kernel: divergent control flow over integers, float32 and uint32."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.loops = 0
        self.in_device_function = True
        self.depth = 0

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    # Expressions: int64, float32, uint32, conditions

    def integer(self, depth: int = 0) -> str:
        kinds = ["leaf"] * 3 + ["binary"] * 4 * (depth < 3)
        kinds += ["division", "local", "choice", "extreme", "call", "shift", "cast"] * (depth < 3)
        deeper = lambda: self.integer(depth + 1)  # noqa: E731
        match self.random.choice(kinds):
            case "leaf":
                return self.random.choice([*INTEGERS, "t", "t", str(self.random.randint(-3, 9))])
            case "binary":
                return f"({deeper()} {self.random.choice('+-*^&|')} {deeper()})"
            case "division":
                divisor = self.random.randint(2, 7)
                return f"({deeper()} {self.random.choice(['//', '%'])} {divisor})"
            case "shift":
                amount = self.random.randint(0, 9)
                return f"({deeper()} {self.random.choice(['<<', '>>'])} {amount})"
            case "local":
                return f"L[({deeper()}) % 4]"
            case "choice":
                return f"({deeper()} if {self.condition(depth + 1)} else {deeper()})"
            case "extreme":
                return f"{self.random.choice(['min', 'max'])}({deeper()}, {deeper()})"
            case "cast":
                return f"int64({self.unsigned(depth + 1)})"
            case _:
                other = "helper" if not self.in_device_function else "max"
                return f"{other}({deeper()}, {deeper()})"

    def floating(self, depth: int = 0) -> str:
        kinds = ["leaf"] * 2 + ["binary", "choice", "local", "mixed"] * (depth < 3)
        match self.random.choice(kinds):
            case "leaf":
                literal = f"float32({self.random.choice(['0.5', '1.25', '-3.0', '0.1'])})"
                return self.random.choice([*FLOATS, literal])
            case "binary":
                op = self.random.choice(["+", "-", "*"])
                return f"({self.floating(depth + 1)} {op} {self.floating(depth + 1)})"
            case "choice":
                chosen, other = self.floating(depth + 1), self.floating(depth + 1)
                return f"({chosen} if {self.condition(depth + 1)} else {other})"
            case "mixed":
                factor = self.random.choice(["0.3", "2", self.integer(depth + 1)])
                return f"float32({self.floating(depth + 1)} * {factor} % 9.5)"
            case _:
                return f"F[({self.integer(depth + 1)}) % 3]"

    def unsigned(self, depth: int = 0) -> str:
        kinds = ["leaf"] * 2 + ["binary", "shift"] * (depth < 3)
        match self.random.choice(kinds):
            case "leaf":
                literal = f"uint32({self.random.choice(['7', '3000000000', '0x9E3779B9'])})"
                return self.random.choice([*UNSIGNED, literal])
            case "binary":
                op = self.random.choice(["+", "-", "*", "^", "&"])
                return f"uint32({self.unsigned(depth + 1)} {op} {self.unsigned(depth + 1)})"
            case _:
                return f"uint32({self.unsigned(depth + 1)} >> {self.random.randint(0, 31)})"

    def condition(self, depth: int = 0) -> str:
        kinds = ["compare"] * 6 + ["and", "or", "not", "chain"] * (depth < 3)
        match self.random.choice(kinds):
            case "compare":
                kind = self.random.choice([self.integer, self.integer, self.floating])
                op = self.random.choice(["<", ">", "<=", "==", "!="])
                return f"{kind(depth + 1)} {op} {kind(depth + 1)}"
            case "not":
                return f"not ({self.condition(depth + 1)})"
            case "chain":
                return f"0 <= {self.integer(depth + 1)} < 20"
            case op:
                return f"({self.condition(depth + 1)} {op} {self.condition(depth + 1)})"

    # Statements

    def assignment(self) -> str:
        pick = self.random.choice
        return pick(
            [
                f"{pick(INTEGERS)} = ({self.integer()}) % 1001",
                f"{pick(INTEGERS)} = ({self.integer()}) % 503",
                f"{pick(INTEGERS)} += ({self.integer()}) % 101",
                f"L[({self.integer()}) % 4] {pick(['=', '+='])} ({self.integer()}) % 77",
                f"F[({self.integer()}) % 3] = {self.floating()}",
                f"a, (b, f) = ({self.integer()}) % 9, (({self.integer()}) % 8, {self.floating()})",
                f"c = d = ({self.integer()}) % 55",
                f"{pick(FLOATS)} = float32({self.floating()} * float32(0.5))",
                f"{pick(UNSIGNED)} = {self.unsigned()}",
                "L[2:4] = L[0:2]",
            ]
        )

    def statement(self, indent: int, loop: bool) -> list[str]:
        pad = "    " * indent
        nested = indent < (3 if self.in_device_function else 4)
        kinds = ["assign"] * 9 + ["if"] * 4 * nested + ["for", "for", "tuple", "while"] * nested
        kinds += (
            ["jump"] * loop + ["return"] * (indent > 1) + ["pair"] * (not self.in_device_function)
        )
        match self.random.choice(kinds):
            case "if":
                lines = [f"{pad}if {self.condition()}:", *self.block(indent + 1, loop)]
                if self.chance(0.5):
                    lines += [f"{pad}else:", *self.block(indent + 1, loop)]
                return lines
            case "for":
                self.loops += 1
                name = self.random.choice([f"i{self.loops}", "c"])
                bounds = self.random.choice(
                    [
                        f"({self.integer()}) % {self.random.randint(2, 6)}",
                        f"t % 3, ({self.integer()}) % 7",
                        f"5, ({self.integer()}) % 4, -1",
                    ]
                )
                lines = [f"{pad}for {name} in range({bounds}):", *self.block(indent + 1, True)]
                if self.chance(0.25):
                    lines += [f"{pad}else:", *self.block(indent + 1, loop)]
                return lines
            case "tuple":
                name = self.random.choice(["w", "d"])
                return [f"{pad}for {name} in (3, 1, 4):", *self.block(indent + 1, True)]
            case "while":
                self.loops += 1
                name = f"n{self.loops}"
                return [
                    f"{pad}{name} = 0",
                    f"{pad}while {name} < 5 and ({self.condition()}):",
                    f"{pad}    {name} += 1",
                    *self.block(indent + 1, True),
                ]
            case "jump":
                return [pad + self.random.choice(["break", "continue"])]
            case "return":
                if self.chance(0.7):
                    return [f"{pad}{self.assignment()}"]
                if self.in_device_function:
                    return [f"{pad}return {self.integer()}, {self.floating()}"]
                return [f"{pad}pass"] if self.uniform else [f"{pad}return"]
            case "pair":
                return [f"{pad}b, g = pair({self.integer()}, {self.random.choice(FLOATS)})"]
            case _:
                return [f"{pad}{self.assignment()}"]

    def block(self, indent: int, loop: bool) -> list[str]:
        return [
            line
            for _ in range(self.random.randint(1, 4 if indent == 1 else 3))
            for line in self.statement(indent, loop)
        ]

    def exchange(self) -> list[str]:
        """Threads of a block meet: a barrier, a shared array, a shuffle."""
        distance = self.random.randint(1, 35)
        shuffle = self.random.choice(
            [
                f"a = cuda.shfl_xor_sync(0xffffffff, a, {self.random.randint(1, 31)})",
                f"f = cuda.shfl_down_sync(0xffffffff, f, {self.random.randint(1, 31)})",
                f"b = cuda.shfl_up_sync(0xffffffff, b, {self.random.randint(1, 31)})",
                "c = cuda.shfl_sync(0xffffffff, c, (t * 7 + 3) % 32)",
            ]
        )
        return [
            "    cuda.syncthreads()",
            "    S[t % 36] = a",
            f"    X[t % 36] = {self.random.choice(FLOATS)}",
            "    cuda.syncthreads()",
            f"    d = S[(t + {distance}) % 36] % 97",
            f"    g = X[(t * 5 + {distance}) % 36]",
            f"    {shuffle}",
        ]

    def kernel(self) -> str:
        prologue = [
            "    L = cuda.local.array(4, int64)",
            "    F = cuda.local.array(3, float32)",
            "    for z in range(4):",
            "        L[z] = z * t",
            "    for z in range(3):",
            "        F[z] = float32(z) + float32(0.25)",
            "    a = t",
            "    b, c, d = 2, t % 5, 0",
            "    f = float32(t) * float32(0.7)",
            "    g = float32(1.5)",
            "    u = uint32(t * 77777)",
            "    v = uint32(5)",
        ]
        device = ["@cuda.jit(device=True)", "def pair(t, g0):", *prologue]
        device += [*self.block(1, False), "    return (a + b) % 1003, f + g0"]
        helper = ["def helper(x, y):", "    if x > y:", "        return x - y"]
        helper += ["    z, _ = pair(x % 7, float32(y % 5))", "    return z + y"]
        self.in_device_function = False
        self.uniform = self.chance(0.7)
        body = ["@cuda.jit", "def kernel(ints, floats, words):"]
        body += ["    S = cuda.shared.array(36, int64)", "    X = cuda.shared.array(36, float32)"]
        body += ["    t = cuda.grid(1)", *prologue, "    ints[t, 0] = 7"]
        for _ in range(3):
            body += self.block(1, False)
            if self.uniform:
                body += self.exchange()
        body += [f"    ints[t, {i + 1}] = {name}" for i, name in enumerate(INTEGERS)]
        body += ["    ints[t, 5] = L[0] + 3 * L[1] + 5 * L[2] + 7 * L[3]"]
        body += [
            "    floats[t, 0] = f",
            "    floats[t, 1] = g",
            "    floats[t, 2] = F[0] + F[1] * F[2]",
        ]
        body += ["    words[t, 0] = u", "    words[t, 1] = v"]
        return "\n".join([*device, *helper, *body]) + "\n"


def build(seed: int):
    source, file = Generator(seed).kernel(), f"<fuzz {seed}>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    names = {"cuda": cuda, "float32": float32, "int64": int64, "uint32": uint32}
    exec(compile(source, file, "exec"), names)
    return names["kernel"], source


def outputs():
    lanes = BLOCKS * THREADS
    return [np.zeros((lanes, 6), np.int64), np.zeros((lanes, 3), "f4"), np.zeros((lanes, 2), "u4")]


def agree(seed: int) -> bool:
    kernel, _ = build(seed)
    expected, got = outputs(), outputs()
    ScalarEngine(kernel)[BLOCKS, THREADS](*expected)
    emulate(kernel)[BLOCKS, THREADS](*got)
    return all(np.array_equal(e, g, equal_nan=True) for e, g in zip(expected, got, strict=True))


@pytest.mark.parametrize("first", range(0, NUM_KERNELS, PER_TEST))
def test_random_kernels_are_equal_on_both_engines(first):
    seeds = range(first, min(first + PER_TEST, NUM_KERNELS))
    assert [seed for seed in seeds if not agree(seed)] == []


def test_without_the_mask_merge_most_random_kernels_differ(monkeypatch):
    """The fuzz has teeth: its kernels depend on keeping the values of waiting lanes."""
    monkeypatch.setattr(Lanes, "merge", lambda self, new, old: new)
    seeds = range(25)
    differing = 0
    for seed in seeds:
        try:
            differing += not agree(seed)
        except (IndexError, ValueError, TypeError):
            differing += 1
    assert differing > len(seeds) / 2
