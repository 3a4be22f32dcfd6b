"""The trace holds what the named variables held, at the right moments of every block."""

import json
import time

import numpy as np
import pytest
from numba import cuda, float32, int32

import numba_flash as nf
from numba_flash.emulator import emulate
from numba_flash.emulator import launch as emulator_launch


@cuda.jit
def running_sums(x, out):
    tile = cuda.shared.array((2, 4), float32)
    mine = cuda.local.array(2, float32)
    t, b = cuda.threadIdx.x, cuda.blockIdx.x
    total = float32(0)
    for step in range(3):
        tile[t // 4, t % 4] = x[b, step, t]
        cuda.syncthreads()
        for k in range(2):
            mine[k] = tile[k, t % 4]
        total += mine[0]
        cuda.syncthreads()
    out[b, t] = total


LINE = running_sums.py_func.__code__.co_firstlineno
X = np.arange(72, dtype=np.float32).reshape(3, 3, 8)


def traced(names, grid=3, **more):
    report = emulate(running_sums, trace=names, **more)[grid, 8](X, np.zeros((3, 8), np.float32))
    assert report.ok
    return report


@pytest.mark.parametrize("most_lanes", [8, 8192], ids=["block by block", "in one batch"])
def test_steps_come_at_barriers_and_after_iterations_of_the_outermost_loop(monkeypatch, most_lanes):
    monkeypatch.setattr(emulator_launch, "MOST_LANES", most_lanes)
    report = traced(("tile", "mine", "total", "step", "b"))
    for b in range(3):
        steps = [step for step in report.trace if step.block == (b, 0, 0)]
        assert [step.step for step in steps] == list(range(9))
        kinds = ["barrier", "barrier", "iteration"] * 3
        assert [step.kind for step in steps] == kinds
        assert [step.line - LINE for step in steps] == [8, 12, 6] * 3
        assert all(step.threads == range(8) for step in steps)
        for i, step in enumerate(steps):
            turn = i // 3
            np.testing.assert_array_equal(step.values["tile"], X[b, turn].reshape(2, 4))
            done = turn + (i % 3 > 0)
            rows = X[b, :done].reshape(done, 2, 4)
            np.testing.assert_array_equal(step.values["total"], np.tile(rows[:, 0].sum(0), 2))
            mine = np.tile(rows[-1].T, (2, 1)) if done else np.full((8, 2), np.nan)
            np.testing.assert_array_equal(step.values["mine"], mine)
            np.testing.assert_array_equal(step.values["step"], np.full(8, turn))
            np.testing.assert_array_equal(step.values["b"], np.full(8, b))


def test_steps_keep_their_values_when_the_kernel_goes_on():
    first = traced("tile").trace[0].values["tile"]
    np.testing.assert_array_equal(first, X[0, 0].reshape(2, 4))


def test_nothing_is_traced_unless_asked_for():
    assert traced(()).trace == []


@cuda.jit(device=True)
def half_of_them(tile, t):
    doubled = tile[t] * 2
    for _ in range(5):
        cuda.syncthreads()
    return doubled


@cuda.jit
def barriers_elsewhere(x, out):
    tile = cuda.shared.array(8, int32)
    t = cuda.threadIdx.x
    if t < 4:
        tile[t] = x[t]
    cuda.syncthreads()
    out[t] = 0
    if cuda.blockIdx.x == 1:
        late = half_of_them(tile, t % 4)
        out[t] = late
    for _ in range(cuda.blockIdx.x):
        pair = (t, float32(0.5))
        if t > 2:
            continue
        out[t] += pair[0]


def test_step_belongs_to_the_blocks_that_take_part_in_it():
    x, out = np.arange(8), np.zeros(8, int)
    names = ("tile", "late", "pair", "x")
    report = emulate(barriers_elsewhere, trace=names, checks=False)[2, 8](x, out)
    steps = {b: [s for s in report.trace if s.block == (b, 0, 0)] for b in range(2)}
    assert [s.kind for s in steps[0]] == ["barrier"]
    assert [s.kind for s in steps[1]] == ["barrier"] * 6 + ["iteration"]
    device_line = half_of_them.py_func.__code__.co_firstlineno + 4
    assert [s.line for s in steps[1][1:6]] == [device_line] * 5
    assert set(steps[1][5].values) == {"tile", "x"}
    np.testing.assert_array_equal(steps[0][0].values["tile"], [0, 1, 2, 3, *[np.nan] * 4])
    np.testing.assert_array_equal(steps[0][0].values["x"], x)
    last = steps[1][6].values
    np.testing.assert_array_equal(last["late"], [0, 2, 4, 6] * 2)
    np.testing.assert_array_equal(last["pair"], np.stack([x, np.full(8, 0.5)], axis=1))


@cuda.jit
def view_of_its_own(x, out):
    t = cuda.threadIdx.x
    row = x[t]
    rest = row[1:]
    while t >= 0:
        t -= 4
    out[0] = rest[0]


def test_view_of_each_thread_is_traced_as_its_elements():
    x = np.arange(24.0).reshape(8, 3)
    report = emulate(view_of_its_own, trace=("rest", "t"), checks=False)[1, 8](x, np.zeros(1))
    assert [step.kind for step in report.trace] == ["iteration"] * 2
    np.testing.assert_array_equal(report.trace[0].values["rest"], x[:, 1:])
    np.testing.assert_array_equal(report.trace[1].values["t"], [-4, -3, -2, -1] * 2)


def test_part_of_empty_memory_that_was_written_is_shown():
    @cuda.jit
    def kernel(out):
        out[cuda.threadIdx.x] = 1
        cuda.syncthreads()

    (step,) = emulate(kernel, trace="out")[1, 4](nf.emulator.empty(6)).trace
    np.testing.assert_array_equal(step.values["out"], [1, 1, 1, 1, np.nan, np.nan])


def test_json_is_strict_and_says_what_is_not_a_number():
    @cuda.jit
    def kernel(x):
        value = x[cuda.threadIdx.x]
        above = value > 0
        cuda.syncthreads()
        x[cuda.threadIdx.x] = value if above else float32(0)

    x = np.array([0.1, np.inf, -np.inf, np.nan], np.float32)
    report = emulate(kernel, trace=("value", "above"))[1, 4](x)

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    (step,) = json.loads(report.trace_json(), parse_constant=refuse)
    assert step == {
        "block": [0, 0, 0],
        "step": 0,
        "line": kernel.py_func.__code__.co_firstlineno + 4,
        "kind": "barrier",
        "threads": [0, 4],
        "values": {
            "value": [0.1, "Infinity", "-Infinity", None],
            "above": [True, True, False, False],
        },
    }


def test_name_that_the_kernel_lacks_is_refused_with_those_it_has():
    with pytest.raises(
        ValueError,
        match="trace asks for Tile, row_max, and running_sums has no such variable; it has b, k, ",
    ):
        emulate(running_sums, trace=("Tile", "total", "row_max"))
    for wrong in (3, (3,), ("total", None)):
        with pytest.raises(TypeError, match="trace takes the names of variables, as in trace="):
            emulate(running_sums, trace=wrong)


@cuda.jit
def spinning_warps(out):
    flag = cuda.shared.array(1, int32)
    t = cuda.threadIdx.x
    if t == 0:
        flag[0] = 0
    cuda.syncthreads()
    if t >= 32:
        while cuda.atomic.add(flag, 0, 0) == 0:
            pass
    elif t == 0:
        cuda.atomic.add(flag, 0, 1)
    cuda.syncthreads()
    out[t] = t


def test_step_of_a_group_that_runs_on_its_own_names_its_threads():
    report = emulate(spinning_warps, trace="t")[1, 64](np.zeros(64, np.int64))
    barriers = [step for step in report.trace if step.kind == "barrier"]
    assert len({step.threads.start for step in barriers}) > 1
    for step in report.trace:
        np.testing.assert_array_equal(step.values["t"], np.array(step.threads))
    assert [step.step for step in report.trace] == list(range(len(report.trace)))


@cuda.jit
def masked_assignments(x, out):
    t = cuda.threadIdx.x
    place = 1
    out[t] = place
    if t < 4:
        place = 2
        out[t] = place
    cuda.syncthreads()


def test_threads_that_do_not_take_part_keep_what_they_have():
    report = emulate(masked_assignments, trace="place")[1, 8](np.zeros(8), np.zeros(8))
    (step,) = report.trace
    np.testing.assert_array_equal(step.values["place"], [2] * 4 + [1] * 4)


def test_stepper_of_fa2_takes_less_than_a_second():
    names = ("acc_S", "row_max", "row_sum", "acc_O")
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 1, 128, 32)).astype(np.float32)

    def step_through():
        start = time.perf_counter()
        with nf.emulation(trace=names) as reports:
            nf.attention(q, k, v, kernel="fa2")
        text = reports[0].trace_json()
        return reports[0], text, time.perf_counter() - start

    step_through()
    report, text, seconds = step_through()
    assert len(json.loads(text)) == len(report.trace) > 30
    assert seconds < 1  # half of that on two busy cores
    last = {step.block: step.values for step in report.trace}
    scores = (q @ k.swapaxes(2, 3))[0, 0] / np.sqrt(np.float32(32))
    maxima = np.unique([values["row_max"] for values in last.values()])
    np.testing.assert_allclose(maxima, np.unique(scores.max(axis=1)), rtol=1e-5)  # float32 sums


def test_an_emulation_traces_what_each_kernel_has_and_counts_only_if_asked():
    q = np.ones((1, 1, 40, 16), np.float32)
    with nf.emulation(trace=("row_max", "no_such_name"), counts=False) as reports:
        nf.attention(q, q, q, kernel="fa2")
    (report,) = reports
    assert {name for step in report.trace for name in step.values} == {"row_max"}
    with pytest.raises(ValueError, match="nothing was counted"):
        _ = report.traffic
    with pytest.raises(TypeError, match="trace takes names of variables"), nf.emulation(trace=(1,)):
        pass
