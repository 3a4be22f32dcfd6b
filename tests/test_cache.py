"""A second process starts from the kernels that the first one compiled, or compiles again."""

from __future__ import annotations

import ctypes
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from weakref import WeakKeyDictionary

import pytest
from numba import cuda

from numba_flash import cache, launch
from numba_flash.cache import Cubin
from numba_flash.plan import Step

KEY = "0123abcd"
CUBIN = Cubin("_Z6kernelf", b"\x7fELF\0machine\0code")
OUT_OF_MEMORY = 2


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.delenv("NUMBA_FLASH_CACHE", raising=False)
    monkeypatch.setenv("NUMBA_FLASH_CACHE_DIR", str(tmp_path / "kernels"))
    return tmp_path / "kernels"


def test_what_is_stored_is_loaded():
    assert cache.load(KEY) is None
    cache.store(KEY, CUBIN)
    assert cache.load(KEY) == CUBIN
    assert cache.load("another") is None


def test_cache_turned_off_neither_stores_nor_loads(monkeypatch, folder):
    cache.store(KEY, CUBIN)
    monkeypatch.setenv("NUMBA_FLASH_CACHE", "0")
    assert cache.load(KEY) is None
    cache.store("another", CUBIN)
    assert len(list(folder.iterdir())) == 1


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="the directory of Linux")
def test_directory_is_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.delenv("NUMBA_FLASH_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.directory() == tmp_path / "numba_flash"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/somebody")
    assert str(cache.directory()) == "/somebody/.cache/numba_flash"


@pytest.mark.parametrize("damage", ["truncated", "empty", "a byte changed", "another file"])
def test_damaged_file_is_ignored_and_written_anew(folder, damage):
    cache.store(KEY, CUBIN)
    (file,) = folder.iterdir()
    data = file.read_bytes()
    file.write_bytes(
        {
            "truncated": data[:-1],
            "empty": b"",
            "a byte changed": data[:-1] + bytes([data[-1] ^ 1]),
            "another file": b"some text that is no kernel, long enough for a hash",
        }[damage]
    )
    assert cache.load(KEY) is None
    cache.store(KEY, CUBIN)
    assert cache.load(KEY) == CUBIN


def test_directory_that_cannot_be_made_is_no_error(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("NUMBA_FLASH_CACHE_DIR", str(tmp_path / "file" / "kernels"))
    cache.store(KEY, CUBIN)
    assert cache.load(KEY) is None


def test_disk_that_takes_no_more_is_no_error_and_leaves_nothing_behind(monkeypatch, folder):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    cache.store(KEY, CUBIN)
    assert list(folder.iterdir()) == []


def test_reader_never_sees_half_a_file(folder):
    """Eight writers of one file, each with its own long content, while readers read it."""
    contents = [Cubin(f"kernel{n}", bytes([n]) * 300_000) for n in range(8)]
    cache.store(KEY, contents[0])
    with ThreadPoolExecutor(16) as pool:
        writers = [pool.submit(cache.store, KEY, cubin) for cubin in contents for _ in range(5)]
        readers = [pool.submit(cache.load, KEY) for _ in range(100)]
    assert all(reader.result() in contents for reader in readers)
    assert all(writer.exception() is None for writer in writers)
    assert len(list(folder.iterdir())) == 1


def test_kernels_that_nobody_used_for_longest_go_first(monkeypatch, folder):
    monkeypatch.setattr(cache, "MOST_KERNELS", 3)
    for n, key in enumerate("abc"):
        cache.store(key, CUBIN)
        os.utime(folder / f"{key}{cache.SUFFIX}", (1000 + n, 1000 + n))
    (folder / "notes.txt").write_text("somebody else's")
    assert cache.load("a") == CUBIN
    cache.store("d", CUBIN)
    assert [key for key in "abcd" if cache.load(key)] == ["a", "c", "d"]
    assert (folder / "notes.txt").exists()


class Driver:
    """Loads what is not empty; the handle of a kernel is its number in ``loaded``."""

    def __init__(self):
        self.loaded = []
        self.status = 0

    def cuLibraryLoadData(self, library, code, *options):
        assert options[2].value == options[5].value == 0
        if self.status:
            return self.status
        self.loaded.append(code)
        library._obj.value = 7
        return 0

    def cuLibraryGetKernel(self, function, library, name):
        assert (library.value, name) == (7, CUBIN.name.encode())
        function._obj.value = 100 + len(self.loaded)
        return 0


COMPILED = 0xC0DE


class Gpu:
    """A process with a GPU: what the driver loads, and what Numba compiles."""

    def __init__(self, monkeypatch):
        self.monkeypatch = monkeypatch
        self.compiled = []
        self.whole = True
        self.start_again()

    def start_again(self):
        """As a new process, which has loaded nothing."""
        self.driver = Driver()
        device = SimpleNamespace(id=0, compute_capability=(9, 0))
        context = SimpleNamespace(device=device)
        patch = self.monkeypatch.setattr
        patch(launch, "cuda", SimpleNamespace(current_context=lambda: context))
        patch(launch, "_cuda_driver", lambda: self.driver)
        patch(launch, "_compile", self.compile)
        patch(launch, "_functions", WeakKeyDictionary())

    def compile(self, kernel, argument_types):
        self.compiled.append(kernel)
        return COMPILED, CUBIN if self.whole else None

    def function(self):
        return launch._function(Step(kernel, 1, (32,), (), 1), {})


@cuda.jit
def kernel():
    cuda.syncthreads()


@pytest.fixture
def gpu(monkeypatch):
    if sys.platform == "darwin":
        pytest.skip("no CUDA compiler runs on macOS")
    return Gpu(monkeypatch)


def test_second_process_loads_what_the_first_compiled(gpu):
    assert gpu.function() == COMPILED
    gpu.start_again()
    assert gpu.function() == 101
    assert gpu.driver.loaded == [CUBIN.code]
    assert len(gpu.compiled) == 1


def test_kernel_is_loaded_once_a_process(gpu):
    gpu.function()
    gpu.start_again()
    assert gpu.function() == gpu.function() == 101
    assert len(gpu.driver.loaded) == 1


def test_kernel_that_the_driver_does_not_take_is_compiled_again(gpu):
    gpu.function()
    gpu.start_again()
    gpu.driver.status = OUT_OF_MEMORY
    assert gpu.function() == COMPILED
    assert len(gpu.compiled) == 2


def test_kernel_that_is_more_than_its_machine_code_is_not_stored(gpu, folder):
    gpu.whole = False
    assert gpu.function() == COMPILED
    assert not folder.exists()


def test_kernel_is_compiled_every_time_with_the_cache_off(gpu, monkeypatch, folder):
    monkeypatch.setenv("NUMBA_FLASH_CACHE", "0")
    gpu.function()
    gpu.start_again()
    assert gpu.function() == COMPILED
    assert len(gpu.compiled) == 2
    assert not folder.exists()


def compiled(**changes):
    """What Numba gives back of a kernel."""
    library = {
        "_setup_functions": [],
        "referenced_objects": {},
        "use_cooperative": False,
        "get_cubin": lambda: SimpleNamespace(code=CUBIN.code),
        "get_cufunc": lambda: SimpleNamespace(handle=ctypes.c_void_p(COMPILED).value),
    }
    kernel = {"entry_name": CUBIN.name, "shared_memory_carveout": None}
    for values in (library, kernel):
        values.update({name: changes[name] for name in values.keys() & changes.keys()})
    kernel = SimpleNamespace(_codelibrary=SimpleNamespace(**library), **kernel)
    return SimpleNamespace(compile=lambda signature: kernel)


def test_machine_code_comes_with_the_name_that_numba_gave_the_kernel():
    assert launch._compile(compiled(), ()) == (COMPILED, CUBIN)


@pytest.mark.parametrize(
    "more",
    [
        {"_setup_functions": [print]},
        {"referenced_objects": {1: "an array on the GPU"}},
        {"use_cooperative": True},
        {"shared_memory_carveout": 50},
    ],
    ids=lambda more: next(iter(more)),
)
def test_kernel_that_needs_more_than_machine_code_is_not_kept(more):
    assert launch._compile(compiled(**more), ()) == (COMPILED, None)
