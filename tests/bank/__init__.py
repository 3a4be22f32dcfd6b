"""The bank: small kernels that are wrong, each in one way, and kernels that are right.

Each is what a student might write. `case` says what a kernel comes with; the other files hold the
kernels by subject. `tests/test_bank.py` runs the emulator over all of them.
"""

import importlib
import pkgutil

from .case import FAULTY, RIGHT, Case

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["FAULTY", "RIGHT", "Case"]
