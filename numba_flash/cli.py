"""The command line: ``numba-flash doctor`` and ``numba-flash demo``.

A command imports what it needs when it runs, so that the doctor works where a kernel does not even
import.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from .data import Sample
    from .demo import Result
    from .kernels import Rung

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console(highlight=False)

COLORS = {"gpu": "green", "unusable": "red", "emulator": "yellow"}
PICTURE_SUFFIXES = (".png", ".svg", ".pdf")


def print_version(wanted: bool) -> None:
    """Print the version and leave, if it is wanted."""
    if not wanted:
        return
    try:
        console.print(f"numba-flash {metadata.version('numba_flash')}")
    except metadata.PackageNotFoundError:
        console.print("numba-flash, run from its source without being installed")
    raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=print_version,
            is_eager=True,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    """FlashAttention as Numba CUDA kernels, on a GPU or on the CPU emulator."""
    # A name or a message may have characters that a terminal of another encoding lacks.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


@app.command()
def doctor() -> None:
    """Say what this machine can run, and the one fix where something is missing.

    Ends with 1 where a GPU is there but cannot be used, else with 0.
    """
    from .doctor import diagnose

    with console.status("Looking for a GPU, and compiling a kernel if there is one"):
        diagnosis = diagnose()
    facts = Table.grid(padding=(0, 2))
    for name, value in diagnosis.details.items():
        facts.add_row(f"[dim]{name}[/]", value)
    console.print(facts)
    console.print()
    console.print(diagnosis.summary, style=f"bold {COLORS[diagnosis.status]}", soft_wrap=True)
    if diagnosis.fix:
        console.print(f"Fix: {diagnosis.fix}", markup=False, soft_wrap=True)
    raise typer.Exit(diagnosis.exit_code)


@app.command()
def demo(
    out: Annotated[
        Path, typer.Option(help="Where to save the picture (.png, .svg or .pdf).")
    ] = Path("demo.png"),
    kernel: Annotated[
        list[str] | None,
        typer.Option(help="Run this rung only; give it several times for several. [default: all]"),
    ] = None,
    emulator: Annotated[
        bool, typer.Option("--emulator", help="Run on the emulator, even with a GPU.")
    ] = False,
) -> None:
    """Run every rung on a layer of a real model, forward and backward, and judge it.

    Compares with float64 and with the model's own output, prints a table and saves a picture.

    Ends with 1 if an error is larger than its bound.
    """
    check_picture_path(out)
    with errors_as_sentences():
        from .data import load_sample
        from .demo import EMULATOR, current_device, make_table
        from .launch import emulation

        rungs, sample = choose_rungs(kernel), load_sample()
        console.print(
            "Attention of one layer of all-MiniLM-L6-v2: 12 heads of 32, "
            f"{len(sample.tokens)} tokens, float32."
        )
        on_emulator = emulator or current_device() is EMULATOR
        with emulation(limit=None) if on_emulator else contextlib.nullcontext():
            results, skipped = run_all(rungs, sample)
        console.print(make_table(results))
        console.print(LEGEND, style="dim")
        for name, reason in skipped.items():
            console.print(f"{name} did not run: {reason}", soft_wrap=True)
        save_picture(sample, results, out)
    give_verdict(results)


LEGEND = """\
error: |x - x64| / |x64| against float64 (backward: the worst of dQ, dK, dV).
from model: the same distance from the model's own output.
moved: bytes read and written in global memory, by formula. Seconds on the emulator rank nothing.
"""


@contextlib.contextmanager
def errors_as_sentences() -> Iterator[None]:
    """End with a sentence, not with a traceback (which NUMBA_FLASH_DEBUG=1 asks for)."""
    try:
        yield
    except (typer.Exit, typer.BadParameter):
        raise
    except Exception as error:
        if os.environ.get("NUMBA_FLASH_DEBUG") == "1":
            raise
        console.print("[bold red]Failed:[/]", type(error).__name__, end=": ")
        console.print(str(error), markup=False, soft_wrap=True)
        console.print("`numba-flash doctor` says whether this machine is set up.")
        raise typer.Exit(1) from None


def check_picture_path(out: Path) -> None:
    """Refuse a path that no picture can be saved at, before anything runs."""
    if out.name.lower() in PICTURE_SUFFIXES:
        reason = f"{out} is no more than an ending, and a file needs a name before it"
    elif out.suffix.lower() not in PICTURE_SUFFIXES:
        reason = f"{out} does not end in {', '.join(PICTURE_SUFFIXES)}"
    elif not out.parent.is_dir():
        reason = f"there is no folder {out.parent}"
    elif out.is_dir():
        reason = f"{out} is a folder"
    elif not os.access(out if out.exists() else out.parent, os.W_OK):
        reason = f"{out} cannot be written to"
    else:
        return
    raise typer.BadParameter(reason, param_hint="--out")


def choose_rungs(names: list[str] | None) -> list[Rung]:
    """The rungs of these names, or all of them, slowest first."""
    from .kernels import LADDER

    known = [rung.name for rung in LADDER]
    for name in names or ():
        if name not in known:
            raise typer.BadParameter(
                f"{name!r} is no rung; there are {', '.join(known)}", param_hint="--kernel"
            )
    return [rung for rung in LADDER if not names or rung.name in names]


def run_all(rungs: list[Rung], sample: Sample) -> tuple[list[Result], dict[str, str]]:
    """Results of the rungs that support the sample, and the reasons of the others."""
    from .demo import Judge, current_device, run_rung, sample_problem

    judge = Judge(sample)
    problem, device = sample_problem(sample), current_device()
    results: list[Result] = []
    skipped: dict[str, str] = {}
    columns = (TextColumn("{task.description:20}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=2 * len(rungs))
        for rung in rungs:
            reason = rung.supports(problem, device)
            if reason is not None:
                skipped[rung.name] = reason
                progress.advance(task, 2)
                continue
            progress.update(task, description=f"{rung.name} forward")
            for result in run_rung(rung, sample, judge):
                results.append(result)
                progress.update(task, description=f"{rung.name} backward", advance=1)
    return results, skipped


def save_picture(sample: Sample, results: list[Result], out: Path) -> None:
    """Draw the picture, if matplotlib is there."""
    if not results:
        return
    from .demo import attention_probabilities
    from .picture import draw

    try:
        draw(sample.tokens, attention_probabilities(sample), results, out)
    except ImportError as error:
        said = f'No picture: matplotlib does not import ("{error}"); '
        fix = 'pip install "numba_flash[notebooks]" brings it.\n'
        console.print(said + fix, markup=False, soft_wrap=True)
        return
    console.print(f"Picture: {out}\n", markup=False, soft_wrap=True)


def give_verdict(results: list[Result]) -> None:
    """Say whether every error kept its bound, and end with 1 if one did not."""
    failed = [f"{result.rung} {result.direction}" for result in results if not result.ok]
    if failed or not results:
        reason = f"Too far from float64:[/] {', '.join(failed)}." if failed else "Nothing ran.[/]"
        console.print(f"[bold red]{reason}", soft_wrap=True)
        raise typer.Exit(1)
    names = ", ".join(dict.fromkeys(result.rung for result in results))
    console.print(
        f"[bold green]All within bounds:[/] {names}, forward and backward, on {results[0].where}.",
        soft_wrap=True,
    )
