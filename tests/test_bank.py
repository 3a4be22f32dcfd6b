"""The emulator judges every kernel of the bank rightly: kind and line, or no finding at all."""

import copy
import os
import re
import sys
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from numba import cuda, typeof, types

from numba_flash.emulator import emulate
from numba_flash.tensor_map import TensorMap
from tests.bank import FAULTY, RIGHT

MEMORY = {"out-of-bounds", "uninitialised-read", "race", "missing-wait"}
"""Kinds of faults at an element of an array, met by a thread."""


def entries(cases):
    return [pytest.param(case, id=case.name) for case in cases]


@pytest.mark.parametrize("case", entries(FAULTY))
def test_fault_is_found_with_its_kind_and_line_and_nothing_else_is(case):
    report = emulate(case.kernel)[case.launch](*case.arguments())
    marks = case.marks()
    assert marks, f"no line of {case.name} is marked"
    found = {(fault.kind, os.path.basename(fault.file), fault.line) for fault in report.faults}
    assert found, f"nothing was found; expected one of {sorted(marks)}"
    assert found <= marks, f"{report}\nexpected among {sorted(marks)}"
    for fault in report.faults:
        assert "# fault: " in fault.source
        assert fault.source in str(fault)
        if fault.kind in MEMORY:
            assert fault.array, fault
            assert re.search(rf"\b{fault.array}\b", fault.message), fault
            assert fault.threads, fault
            assert "thread" in fault.message, fault


@pytest.mark.parametrize("case", entries(RIGHT))
def test_right_kernel_has_no_finding_and_the_right_numbers(case):
    arguments = case.arguments()
    wanted = case.want(*copy.deepcopy(arguments))
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    report = emulate(case.kernel)[case.launch](*arguments)
    assert report.ok, str(report)
    for got, want in zip(arguments[-len(wanted) :], wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=case.rtol, atol=case.rtol)


def numba_type(argument):
    return types.uint64[::1] if isinstance(argument, TensorMap) else typeof(argument)


@pytest.mark.skipif(sys.platform == "darwin", reason="no CUDA compiler runs on macOS")
@pytest.mark.parametrize("case", entries(FAULTY + RIGHT))
def test_kernel_is_one_that_numba_compiles(case):
    signature = types.void(*map(numba_type, case.arguments()))
    pretended = SimpleNamespace(compute_capability=(9, 0))
    with mock.patch("numba.cuda.dispatcher.get_current_device", return_value=pretended):
        cuda.compile(
            case.kernel.py_func, signature, cc=(9, 0, "a"), output="ptx", device=False, abi="numba"
        )


def test_bank_is_large_and_every_entry_says_why():
    assert len(FAULTY) >= 36
    assert len(RIGHT) >= 24
    names = [case.name for case in FAULTY + RIGHT]
    assert len(set(names)) == len(names)
    assert all(case.reason and "\n" not in case.reason for case in FAULTY + RIGHT)
    kinds = {kind for case in FAULTY for kind, _, _ in case.marks()}
    assert kinds >= {"out-of-bounds", "uninitialised-read", "race", "barrier-divergence", "float64"}
