"""Compare the emulator's counts with what Nsight Compute measures on this GPU.

    python scripts/compare_ncu.py --out FILE.json

Runs ``tests/gpu/ncu_kernels.py`` under ``ncu`` and on the emulator, and prints both counts of each
kernel: sectors of global loads and stores, wavefronts of shared loads and stores. They agree when
they differ by at most 2 % or 32, whichever is larger; exit status 1 if some do not.
"""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
SECTORS = "l1tex__t_sectors_pipe_lsu_mem_global_op_{}.sum"
WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_{}.sum"
METRICS = {
    "sectors loaded": SECTORS.format("ld"),
    "sectors stored": SECTORS.format("st"),
    "wavefronts loaded": WAVEFRONTS.format("ld"),
    "wavefronts stored": WAVEFRONTS.format("st"),
}
RELATIVE, ABSOLUTE = 0.02, 32
PLACES = ("/usr/local/cuda*/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu")


def find_ncu() -> str:
    """The profiler: on the path, or where CUDA installs it."""
    found = [shutil.which("ncu"), *(str(p) for g in PLACES for p in sorted(Path("/").glob(g[1:])))]
    for path in found:
        if path:
            return path
    raise typer.BadParameter("ncu (Nsight Compute) is neither on the PATH nor below /usr/local")


def profile(ncu: str) -> list[dict[str, int]]:
    """The metrics of each launch, in order."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        command = [ncu, "--clock-control", "none", "--csv", "--print-units", "base"]
        command += ["--metrics", ",".join(METRICS.values()), "--log-file", str(log)]
        command += [sys.executable, "-m", "tests.gpu.ncu_kernels"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        text = log.read_text() if log.exists() else ""
    if done.returncode:
        raise typer.BadParameter(f"ncu failed:\n{text[-2000:]}{done.stdout}{done.stderr}"[-6000:])
    return parse(text.splitlines())


def parse(lines: Iterable[str]) -> list[dict[str, int]]:
    """What ncu wrote: messages, then a table with a row for each launch and metric."""
    names = {metric: name for name, metric in METRICS.items()}
    launches: dict[int, dict[str, int]] = {}
    for row in csv.DictReader(line for line in lines if line.startswith('"')):
        if row["Metric Name"] in names:
            number = round(float(row["Metric Value"].replace(",", "")))
            launches.setdefault(int(row["ID"]), {})[names[row["Metric Name"]]] = number
    return [launches[number] for number in sorted(launches)]


def emulated(report: Any) -> dict[str, int]:
    """The same numbers from a report of the emulator."""
    costs = report.counts.total()
    traffic, shared = costs.traffic, costs.shared
    sectors = traffic.read_sectors, traffic.write_sectors
    wavefronts = shared.read_wavefronts, shared.write_wavefronts
    return dict(zip(METRICS, sectors + wavefronts, strict=True))


def agrees(measured: int, counted: int) -> bool:
    return abs(measured - counted) <= max(RELATIVE * measured, ABSOLUTE)


def compare(launches: list[dict[str, int]]) -> list[dict[str, Any]]:
    """A record for each launch: both counts, and whether those that compare agree."""
    cases = import_module("tests.gpu.ncu_kernels").cases()
    expected = sum(case.launches for case in cases)
    if len(launches) != expected:
        raise typer.BadParameter(f"ncu saw {len(launches)} launches, not {expected}")
    records, rest = [], iter(launches)
    for case in cases:
        for i, report in enumerate(case.on_emulator()):
            measured, counted = next(rest), emulated(report)
            compared = [n for n in METRICS if case.shared or n.startswith("sectors")]
            title = f"{case.name} ({i + 1})" if case.launches > 1 else case.name
            agree = all(agrees(measured[n], counted[n]) for n in compared)
            record = {"case": title, "agree": agree, "compared": compared}
            records.append({**record, "ncu": measured, "emulator": counted})
    return records


def show(records: list[dict[str, Any]]) -> None:
    """A row for each launch; pairs of ncu and emulator, grey where they do not compare."""
    table = Table("kernel", *(f"{name}\nncu = emulator" for name in METRICS), "")
    for record in records:
        cells = []
        for name in METRICS:
            measured, counted = record["ncu"][name], record["emulator"][name]
            sign = "=" if measured == counted else "~" if agrees(measured, counted) else "≠"
            cell = f"{measured:,} {sign} {counted:,}" if measured or counted else ""
            cells.append(cell if name in record["compared"] else f"[dim]{cell}[/dim]")
        table.add_row(record["case"], *cells, "" if record["agree"] else "[bold]differs[/bold]")
    Console(width=150).print(table)


def main(out: Annotated[Path | None, typer.Option(help="Write the counts here, as JSON.")] = None):
    """Profile, count, compare."""
    sys.path.insert(0, str(ROOT))
    ncu = find_ncu()
    records = compare(profile(ncu))
    show(records)
    wrong = [record["case"] for record in records if not record["agree"]]
    print(f"{len(records) - len(wrong)} of {len(records)} launches agree within 2 % or 32")
    if out is not None:
        version = subprocess.run([ncu, "--version"], capture_output=True, text=True).stdout.split()
        command = "python scripts/compare_ncu.py --out " + str(out)
        from numba_flash.launch import gpu

        facts = {"gpu": gpu(0).name, "ncu": version[-3:], "command": command}
        out.write_text(json.dumps({**facts, "launches": records}, indent=1) + "\n")
    raise typer.Exit(bool(wrong))


if __name__ == "__main__":
    typer.run(main)
