"""An emulator of CUDA kernels: runs ``@cuda.jit`` kernels on the CPU, unmodified.

Read it in this order: `launch` (a launch in batches of blocks), `transform` (a kernel's source to
operations on lane vectors, with `liveness`), `lanes` (masks, branches, loops, calls), `memory`
(arrays, over `spaces`), `check` (bounds, unwritten elements, barriers),
`race` (who met whom in memory), `facade` (what ``cuda``
means inside a kernel, with `functions`, `warp` and `atomics`), `bind` (what the other names mean),
`report`.
"""

from .arguments import empty
from .launch import emulate
from .report import EmulatorFault, Fault, Report, UnsupportedConstruct

__all__ = ["EmulatorFault", "Fault", "Report", "UnsupportedConstruct", "empty", "emulate"]
