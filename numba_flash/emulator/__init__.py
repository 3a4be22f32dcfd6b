"""An emulator of CUDA kernels: runs ``@cuda.jit`` kernels on the CPU, unmodified.

Read it in this order:

- how a kernel runs: `launch` (a launch in batches of blocks), `transform` (a kernel's source to
  operations on lane vectors, with `liveness`), `lanes` (masks, branches, loops, calls), `roles` and
  `groups` (warps that wait for each other);
- what it works on: `memory` (arrays, over `spaces`), `arguments`, `facade` (what ``cuda`` means
  inside a kernel, with `functions`, `warp` and `atomics`), `tensor` (matrix instructions and
  cp.async, with `rows` and `copies`), `hopper` (mbarriers, TMA, wgmma), `bind` (what the other
  names mean), `arithmetic`;
- what it finds: `check` (bounds, unwritten elements, barriers), `race` and `clocks` (who met whom
  in memory), `float64` (double precision that nobody asked for, with `inference`, `origin` and
  `compiled`), `count` (bytes, sectors, bank conflicts), `trace` and `steps` (the values of chosen
  variables), `report`, and what one looks like: `show` (beside the source), `picture` (a warp's
  accesses).
"""

from .arguments import empty
from .compiled import Float64Variable, float64_variables
from .launch import emulate
from .report import EmulatorFault, Fault, Report, UnsupportedConstruct
from .steps import Step

__all__ = [
    "EmulatorFault",
    "Fault",
    "Float64Variable",
    "Report",
    "Step",
    "UnsupportedConstruct",
    "empty",
    "emulate",
    "float64_variables",
]
