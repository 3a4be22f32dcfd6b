"""Counts, for the last line of a run, the tests that launched kernels on a GPU or the emulator."""

from __future__ import annotations

from collections import Counter

import pytest

from numba_flash import launch
from numba_flash.emulator import launch as emulator_launch
from numba_flash.launch import gpu_count

from .gpu import on_gpu

_launches: Counter[str] = Counter()
_tests: Counter[str] = Counter()


def pytest_configure(config):
    """Count launches where they happen, so that the counts cannot claim what did not run."""
    _count(launch.Program, "launch", "GPU")
    _count(on_gpu, "launch", "GPU")
    _count(emulator_launch.Launch, "__call__", "emulator")


def _count(owner, name, place):
    inner = getattr(owner, name)

    def counted(*args, **kwargs):
        _launches[place] += 1
        return inner(*args, **kwargs)

    setattr(owner, name, counted)


def pytest_collection_modifyitems(items):
    """Without a GPU, a test that needs one is skipped and says so."""
    if gpu_count():
        return
    skip = pytest.mark.skip(reason="no CUDA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item):
    before = Counter(_launches)
    yield
    for place in _launches - before:
        item.user_properties.append(("ran on", place))


def pytest_runtest_logreport(report):
    if report.when == "call" and report.passed:
        places = {place for key, place in report.user_properties if key == "ran on"}
        _tests.update(places)
        _tests["neither"] += not places
    if report.skipped and "gpu" in report.keywords and not gpu_count():
        _tests["skipped"] += 1


def pytest_unconfigure(config):
    if hasattr(config, "workerinput") or not _tests:
        return
    print(
        f"kernels on a GPU: {_tests['GPU']} tests passed; "
        f"on the emulator: {_tests['emulator']}; without kernels: {_tests['neither']}; "
        f"could not run for want of a GPU: {_tests['skipped']}"
    )
