"""FlashAttention, forward and backward, as Numba CUDA kernels that people can read."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .stub import install

if TYPE_CHECKING:
    from . import emulator, reference
    from .data import load_sample
    from .emulator import emulate
    from .interface import attention, attention_backward
    from .kernels import LADDER
    from .launch import emulation

__all__ = [
    "LADDER",
    "attention",
    "attention_backward",
    "emulate",
    "emulation",
    "emulator",
    "load_sample",
    "reference",
]

_HOMES = {
    "LADDER": "kernels",
    "attention": "interface",
    "attention_backward": "interface",
    "emulate": "emulator",
    "emulation": "launch",
    "load_sample": "data",
}
_MODULES = ("emulator", "reference")

install()


def __getattr__(name: str) -> Any:
    """Import a public name when it is asked for: `numba-flash doctor` must start without Numba."""
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
