"""What a program asks of the CUDA driver, without one: a stand-in notes every call."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
from numba import cuda, float32

from numba_flash import launch
from numba_flash.plan import Plan, Step

FUNCTION = 0xABC
INVALID_VALUE = 1


class Driver:
    """The driver's entry points that the making of a program calls."""

    def __init__(self):
        self.refused_bytes = 1 << 30
        self.allowed = [49_152]

    def cuCtxGetDevice(self, device):
        device._obj.value = 3
        return 0

    def cuKernelGetAttribute(self, value, attribute, kernel, device):
        assert (attribute.value, kernel.value, device.value) == (8, FUNCTION, 3)
        value._obj.value = self.allowed[-1]
        return 0

    def cuKernelSetAttribute(self, attribute, value, kernel, device):
        assert (attribute.value, kernel.value, device.value) == (8, FUNCTION, 3)
        if value.value >= self.refused_bytes:
            return INVALID_VALUE
        self.allowed.append(value.value)
        return 0

    def cuGetErrorName(self, status, name):
        name._obj.value = b"CUDA_ERROR_INVALID_VALUE"
        return 0


class Gpus:
    """Stands in for ``cuda.gpus``: a list whose elements are contexts to enter."""

    def __getitem__(self, ordinal):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()
    context = SimpleNamespace(handle=ctypes.c_void_p(0x1234).value)
    fake_cuda = SimpleNamespace(gpus=Gpus(), current_context=lambda: context)
    monkeypatch.setattr(launch, "cuda", fake_cuda)
    monkeypatch.setattr(launch, "_cuda_driver", lambda: driver)
    monkeypatch.setattr(launch, "_function", lambda step, layouts: FUNCTION)
    return driver


@cuda.jit
def reverse(X):
    tile = cuda.shared.array(0, float32)
    i = cuda.threadIdx.x
    tile[i] = X[i]
    cuda.syncthreads()
    X[i] = tile[cuda.blockDim.x - 1 - i]


def program(*shared_bytes):
    steps = [Step(reverse, 2, (32,), ("x",), 1, size) for size in shared_bytes]
    layouts = {"x": launch.contiguous_layout((32,), "float32")}
    return launch.Program(Plan(tuple(steps)), layouts, ["x"], 0)


def test_launch_passes_the_dynamic_shared_memory_of_its_step(driver):
    sizes = [[size.value for size in args[1:8]] for _, args in program(0, 128)._launches]
    assert sizes == [[2, 1, 1, 32, 1, 1, 0], [2, 1, 1, 32, 1, 1, 128]]


def test_a_kernel_is_allowed_its_dynamic_shared_memory_once(driver):
    program(100_000)
    program(100_000)
    assert driver.allowed[1:] == [100_000]


def test_a_smaller_tile_does_not_take_away_what_a_larger_one_was_allowed(driver):
    program(100_000)
    program(64_000)
    program(120_000)
    assert driver.allowed[1:] == [100_000, 120_000]


def test_a_kernel_within_the_default_limit_changes_nothing(driver):
    program(0, 128)
    assert driver.allowed == [49_152]


def test_shared_memory_that_the_driver_refuses_is_an_error_that_names_the_kernel(driver):
    driver.refused_bytes = 200_000
    with pytest.raises(RuntimeError, match=r"reverse cannot have 250,000 bytes .*INVALID_VALUE"):
        program(250_000)


def test_emulated_step_has_its_dynamic_shared_memory():
    x = np.arange(32, dtype=np.float32)
    state = launch.Emulation()
    plan = Plan((Step(reverse, 1, (32,), ("x",), 1, shared_bytes=128),))
    launch.run_emulated(plan, {"x": x}, state)
    np.testing.assert_array_equal(x, np.arange(31, -1, -1))
    short = Plan((Step(reverse, 1, (32,), ("x",), 1, shared_bytes=64),))
    with pytest.raises(RuntimeError, match="reverse has a fault"):
        launch.run_emulated(short, {"x": x}, state)
