"""Compiled kernels on disk, so that a second process need not compile them again.

A file holds one kernel under its fingerprint (see `fingerprint`). Nothing here is needed to run:
a directory that cannot be read or written, or a file that is damaged, only means to compile.

``NUMBA_FLASH_CACHE_DIR`` names the directory; ``NUMBA_FLASH_CACHE=0`` turns the cache off.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

SUFFIX = ".kernel"
MOST_KERNELS = 2000
"""Some 100 MB; beyond, those go that nobody has used for the longest time."""


class Cubin(NamedTuple):
    """Machine code, and the name of the kernel in it."""

    name: str
    code: bytes


def directory() -> Path | None:
    """Where compiled kernels are kept, or None if the cache is off."""
    if os.environ.get("NUMBA_FLASH_CACHE") == "0":
        return None
    chosen = os.environ.get("NUMBA_FLASH_CACHE_DIR")
    try:
        return Path(chosen).expanduser() if chosen else _user_cache() / "numba_flash"
    except RuntimeError:  # a user without a home
        return None


def _user_cache() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def load(key: str) -> Cubin | None:
    """The kernel of a fingerprint, if it is there and whole."""
    folder = directory()
    if folder is None:
        return None
    file = folder / f"{key}{SUFFIX}"
    try:
        data = file.read_bytes()
    except OSError:
        return None
    check, content = data[:32], data[32:]
    name, separator, code = content.partition(b"\0")
    if not separator or hashlib.sha256(content).digest() != check:
        return None
    with contextlib.suppress(OSError):
        os.utime(file)
    return Cubin(name.decode(), code)


def store(key: str, cubin: Cubin) -> None:
    """Keep a kernel, if the directory can be written.

    The file appears whole, under its name, or not at all: other processes may be reading it, or
    writing the same.
    """
    folder = directory()
    if folder is None:
        return
    content = cubin.name.encode() + b"\0" + cubin.code
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, unfinished = tempfile.mkstemp(f"{SUFFIX}.part", dir=folder)
        try:
            with open(handle, "wb") as file:
                file.write(hashlib.sha256(content).digest() + content)
            os.replace(unfinished, folder / f"{key}{SUFFIX}")
        except OSError:
            os.unlink(unfinished)
            raise
        _forget_oldest(folder)


def _forget_oldest(folder: Path) -> None:
    kernels = list(folder.glob(f"*{SUFFIX}*"))
    excess = len(kernels) - MOST_KERNELS
    if excess > 0:
        for file in sorted(kernels, key=lambda file: file.stat().st_mtime)[:excess]:
            file.unlink(missing_ok=True)
