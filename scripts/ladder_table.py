"""Print the README's table of measured times from what bench_ladder.py recorded.

python scripts/ladder_table.py [FILE]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

RECORDED = Path(__file__).parent.parent / "notebooks" / "data" / "ladder-h200.json"


def table(record: dict) -> str:
    """The forward and backward milliseconds of every kernel, as Markdown."""
    shapes = sorted({(r["batch"], r["heads"], r["seqlen"], r["head_dim"]) for r in record["rows"]})
    shapes.sort(key=lambda shape: shape[2])
    times = {
        (r["kernel"], r["direction"], r["batch"], r["heads"], r["seqlen"], r["head_dim"]): r["ms"]
        for r in record["rows"]
    }
    kernels = list(dict.fromkeys(r["kernel"] for r in record["rows"]))
    columns = [(d, shape) for d in ("forward", "backward") for shape in shapes]
    heads = [f"{direction} N {shape[2]}" for direction, shape in columns]
    lines = [
        "| ms | " + " | ".join(heads) + " |",
        "|---|" + "---:|" * len(columns),
    ]
    for kernel in kernels:
        cells = [times.get((kernel, direction, *shape)) for direction, shape in columns]
        text = ["" if ms is None else f"{ms:.3g}" if ms < 1000 else f"{ms:.0f}" for ms in cells]
        lines.append(f"| `{kernel}` | " + " | ".join(text) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else RECORDED
    print(table(json.loads(path.read_text())))
