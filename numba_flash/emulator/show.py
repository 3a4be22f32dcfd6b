"""A report with the kernel's source beside it: in a terminal by rich, in a notebook as HTML.

Both show the same `Listing`: every function that ran, line by line, with what the line cost and
what went wrong in it. Bars and bold figures show a line's share of the whole, figures say it
exactly; no meaning hangs on a colour alone.
"""

from __future__ import annotations

import ast
import html
import io
import keyword
import linecache
import math
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from .count import Costs, Table
from .report import Fault, Report, title

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

# Blue and vermillion of Okabe and Ito's set.
BLUE, VERMILLION = (0, 114, 178), (213, 94, 0)
LARGE_SHARE = 0.2
"""From this share of the whole on, a figure is printed bold."""
POOR_EFFICIENCY = 0.5
"""Below this, the use of the sectors that move is marked."""
WIDE = 120
"""The width of a terminal that has room for bars."""
BAR_CELLS, FIGURE_CELLS, NUMBER_CELLS, LEAST_SOURCE = 6, 6, 4, 26
"""Characters of a bar, a figure, a line's number, and at least of the source."""
EIGHTHS = ("", *"▏▎▍▌▋▊▉")
PREFIXES = ("", "k", "M", "G", "T")


class Column(NamedTuple):
    """One kind of cost.

    Attributes
    ----------
    title, meaning : str
    value : callable
        The figure of some costs; figures of lines add up to that of the whole.
    bar : bool
        Whether a terminal draws a bar too; HTML always does.
    color : (int, int, int)
        Of its bar.
    """

    title: str
    meaning: str
    value: Callable[[Costs], int]
    bar: bool = False
    color: tuple[int, int, int] = BLUE


COLUMNS = (
    Column("read", "bytes of global memory that lanes load", lambda c: c.traffic.read_bytes),
    Column("written", "bytes of global memory that lanes store", lambda c: c.traffic.write_bytes),
    Column("sectors", "32-byte sectors of global memory", lambda c: c.traffic.sectors, bar=True),
    Column("shared", "wavefronts: cycles of shared memory", lambda c: c.shared.wavefronts),
    Column(
        "conflicts",
        "cycles of shared memory lost to bank conflicts",
        lambda c: c.bank_conflicts,
        bar=True,
        color=VERMILLION,
    ),
    Column("barriers", "arrivals of a block at a barrier", lambda c: c.barriers),
    Column("mul-adds", "a * b + c of floats, lane by lane", lambda c: c.multiply_adds),
)
USED = "used"
USED_MEANING = (
    "bytes asked for, of those in the sectors that move; above 100 % where lanes share bytes"
)


@dataclass
class Line:
    """A line of source, its costs and its faults."""

    number: int
    text: str
    costs: Costs
    faults: list[Fault]


@dataclass
class Function:
    """The source of a kernel or device function."""

    title: str
    lines: list[Line]


class Listing:
    """What both pictures of a report show.

    Attributes
    ----------
    functions : list of Function
        The kernel, then the device functions that cost something or went wrong.
    total : Costs
    columns : list of Column
        Those in which the launch has anything.
    has_sectors : bool
        Whether there is one more column, how well sectors are used.
    titles : list of str
    """

    def __init__(self, report: Report):
        self.report = report
        files = report.counts.by_file() if report.counts else {}
        self.total = report.counts.total() if report.counts else Costs()
        self.columns = [column for column in COLUMNS if column.value(self.total)]
        self.has_sectors = bool(self.total.traffic.sectors)
        self.titles = [column.title for column in self.columns] + [USED] * self.has_sectors
        touched = {(file, line) for file, table in files.items() for line in table}
        touched |= {(fault.file, fault.line) for fault in report.faults}
        extents = {extent_of(file, line) for file, line in touched | {report.place} if file}
        kernel = extent_of(*report.place)
        self.functions = [
            self.function(extent, files.get(extent.file, Table()))
            for extent in sorted(extents, key=lambda extent: (extent != kernel, extent))
        ]

    def function(self, extent: Extent, table: Table) -> Function:
        source = linecache.getlines(extent.file)[extent.first - 1 : extent.last]
        width = min((indent(text) for text in source if text.strip()), default=0)
        lines = [
            Line(number, text[width:].rstrip(), table[number], self.faults(extent.file, number))
            for number, text in enumerate(source, extent.first)
        ]
        return Function(f"{extent.name}, {title(extent.file)}:{extent.first}", lines)

    def faults(self, file: str, line: int) -> list[Fault]:
        return [f for f in self.report.faults if (f.file, f.line) == (file, line)]

    def share(self, column: Column, costs: Costs) -> float:
        """A figure's part of that of the whole launch."""
        return column.value(costs) / (column.value(self.total) or 1)

    def headline(self) -> str:
        report = self.report
        count = len(report.faults)
        found = "no fault" if report.ok else f"{count} fault{'s' * (count > 1)}"
        return f"{report.kernel}: {found}"

    def summary(self) -> list[str]:
        """What the launch costs, in words."""
        traffic, shared = self.total.traffic, self.total.shared
        lines = []
        if traffic.sectors:
            lines.append(
                f"global memory: {figure(traffic.read_bytes, 'B')} read, "
                f"{figure(traffic.write_bytes, 'B')} written, in {figure(traffic.sectors)} sectors "
                f"of 32 bytes ({percent(traffic.efficiency)} {USED})"
            )
        if shared.wavefronts:
            lines.append(
                f"shared memory: {figure(shared.wavefronts)} cycles, "
                f"{figure(shared.bank_conflicts)} of them lost to bank conflicts"
            )
        if self.total.multiply_adds:
            each = self.total.multiply_adds / max(1, traffic.bytes)
            per_byte = f", {each:.2g} a byte of global memory" if traffic.bytes else ""
            lines.append(f"multiply-adds: {figure(self.total.multiply_adds)}{per_byte}")
        return lines


class Extent(NamedTuple):
    """Where a function stands in a file: its lines from the first decorator to the last."""

    file: str
    first: int
    last: int
    name: str


def extent_of(file: str, line: int) -> Extent:
    """The innermost function around a line, or the line alone where there is none."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return Extent(file, line, line, "line")
    around = [extent for extent in functions_of(tree, file) if extent.first <= line <= extent.last]
    return max(around, default=Extent(file, line, line, "line"), key=lambda extent: extent.first)


def functions_of(tree: ast.AST, file: str) -> Iterator[Extent]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(part.lineno for part in node.decorator_list)])
            yield Extent(file, first, node.end_lineno or node.lineno, node.name)


def indent(text: str) -> int:
    return len(text) - len(text.lstrip())


# Figures


def figure(number: float, unit: str = "") -> str:
    """A count, exact below 10,000 and else with three digits, and its unit."""
    if number < 10_000:
        return f"{number:,} {unit}".rstrip()
    thousands = 0
    while number >= 999.5 and thousands < len(PREFIXES) - 1:
        number, thousands = number / 1000, thousands + 1
    return f"{number:.3g} {PREFIXES[thousands]}{unit}"


def percent(part: float) -> str:
    return f"{part:.0%}".replace("%", " %")


def bar(share: float) -> str:
    """A share as a bar of block characters; the least of them for anything above nothing."""
    eighths = math.ceil(share * BAR_CELLS * 8)
    return "█" * (eighths // 8) + EIGHTHS[eighths % 8]


def fault_words(fault: Fault) -> str:
    times = f" ({fault.count:,} times)" if fault.count > 1 else ""
    return f"{fault.kind}: {fault.message}{times}"


# In a terminal


def in_terminal(report: Report, width: int) -> RenderableType:
    """The report for `rich`, in so many characters a line."""
    from rich.console import Group
    from rich.table import Table as Grid
    from rich.text import Text

    listing = Listing(report)
    bars = width >= WIDE
    widths = [
        max(len(column.title), FIGURE_CELLS + BAR_CELLS * (bars and column.bar))
        for column in listing.columns
    ]
    widths += [FIGURE_CELLS] * listing.has_sectors
    room = width - NUMBER_CELLS - 2 - sum(each + 1 for each in widths)
    grid = Grid(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="italic")
    grid.add_column("", justify="right", style="dim", width=NUMBER_CELLS)
    grid.add_column("", width=max(LEAST_SOURCE, room))
    for name, cells_wide in zip(listing.titles, widths, strict=True):
        grid.add_column(
            name, justify="right", min_width=cells_wide, max_width=cells_wide, no_wrap=True
        )
    for function in listing.functions:
        grid.add_row("", Text(function.title, "bold italic"))
        for line, text in zip(function.lines, highlighted(function), strict=True):
            grid.add_row(str(line.number), text, *cells(listing, line.costs, bars))
            for fault in line.faults:
                grid.add_row("", Text(f"✗ {fault_words(fault)}", "bold red"))
        grid.add_row()
    head = Text(listing.headline(), "bold" if report.ok else "bold red")
    summary = [Text(f"  {line}") for line in listing.summary()]
    return Group(head, *summary, grid, *(Text(f"note: {note}") for note in report.notes))


def cells(listing: Listing, costs: Costs, bars: bool) -> Iterator[Text]:
    """The figures of a line, for a terminal; bold where they are a large part of the whole."""
    from rich.text import Text

    for column in listing.columns:
        number, share = column.value(costs), listing.share(column, costs)
        drawn = bar(share).ljust(BAR_CELLS) if bars and column.bar else ""
        shown = figure(number).rjust(FIGURE_CELLS) if number else ""
        style = "bold" if share >= LARGE_SHARE else ""
        yield Text.assemble((drawn, rgb(column.color)), (shown, style)) if number else Text()
    if listing.has_sectors:
        efficiency = costs.traffic.efficiency
        poor = f"bold {rgb(VERMILLION)}" if efficiency < POOR_EFFICIENCY else ""
        yield Text(percent(efficiency) if costs.traffic.sectors else "", poor)


def highlighted(function: Function) -> list[Text]:
    """The lines of a function in the terminal's own colours."""
    from rich.syntax import Syntax

    syntax = Syntax("", "python", theme="ansi_dark", background_color="default")
    code = "\n".join(line.text for line in function.lines)
    lines = list(syntax.highlight(code).split("\n", allow_blank=True))[: len(function.lines)]
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return lines


def rgb(color: tuple[int, int, int]) -> str:
    return f"rgb({','.join(map(str, color))})"


def show(report: Report, console: Console | None = None) -> None:
    """Print a report with its source to a terminal."""
    from rich.console import Console

    console = console or Console()
    console.print(in_terminal(report, console.width))


# In a notebook

STYLE = """
<style>
.numba-flash { font-size: 12px; line-height: 1.45; overflow-x: auto; }
.numba-flash table { border-collapse: collapse; margin: 0.4em 0; }
.numba-flash tr { background: none !important; }
.numba-flash th, .numba-flash td { padding: 0 0.6em; text-align: right; white-space: pre;
  border: none; background: none; font-family: ui-monospace, Menlo, Consolas, monospace; }
.numba-flash th { font-weight: normal; font-style: italic; }
.numba-flash td.code, .numba-flash td.fault { text-align: left; }
.numba-flash td.number { opacity: 0.55; }
.numba-flash tr.title td { font-weight: bold; padding-top: 0.6em; }
.numba-flash tr.cost:hover td { outline: 1px solid rgba(128, 128, 128, 0.35); }
.numba-flash .keyword { font-weight: bold; }
.numba-flash .comment { opacity: 0.6; font-style: italic; }
.numba-flash td.fault { white-space: normal; border-left: 4px solid rgb(213, 94, 0);
  background: rgba(213, 94, 0, 0.16); max-width: 60em; }
</style>
"""
STRENGTH = 0.38
"""Of the bars: text in the reader's own colour stays legible on them, dark or light."""


def as_html(report: Report) -> str:
    """The report as HTML that needs nothing else, in the colours of the page around it."""
    listing = Listing(report)
    meanings = [*(column.meaning for column in listing.columns), USED_MEANING]
    heads = [head(name, words) for name, words in zip(listing.titles, meanings, strict=False)]
    rows = [f"<tr><th></th><th></th>{''.join(heads)}</tr>"]
    for function in listing.functions:
        name = html.escape(function.title)
        rows.append(f'<tr class="title"><td></td><td class="code">{name}</td></tr>')
        texts = marked_up([line.text for line in function.lines])
        for line, text in zip(function.lines, texts, strict=True):
            figures = "".join(html_cells(listing, line.costs))
            rows.append(
                f'<tr class="cost"><td class="number">{line.number}</td>'
                f'<td class="code">{text}</td>{figures}</tr>'
            )
            rows += [html_fault(fault, len(heads)) for fault in line.faults]
    words = [f"<b>{html.escape(listing.headline())}</b>", *map(html.escape, listing.summary())]
    words += [f"note: {html.escape(note)}" for note in report.notes]
    paragraph = "<br>".join(words)
    return f'{STYLE}<div class="numba-flash">{paragraph}<table>{"".join(rows)}</table></div>'


def head(name: str, meaning: str) -> str:
    return f'<th title="{html.escape(meaning)}">{name}</th>'


def html_cells(listing: Listing, costs: Costs) -> Iterator[str]:
    """The figures of a line, each on a bar as long as its share of the whole."""
    for column in listing.columns:
        number, share = column.value(costs), listing.share(column, costs)
        if not number:
            yield "<td></td>"
            continue
        color = f"rgba({', '.join(map(str, column.color))}, {STRENGTH})"
        length = f"{100 * share:.1f}%"
        background = f"linear-gradient(to left, {color} {length}, transparent {length})"
        exactly = f"{number:,}, {percent(share)} of all {column.title}"
        yield f'<td title="{exactly}" style="background: {background}">{figure(number)}</td>'
    if listing.has_sectors:
        efficiency = costs.traffic.efficiency
        shown = percent(efficiency) if costs.traffic.sectors else ""
        yield f"<td>{f'<b>{shown} !</b>' if efficiency < POOR_EFFICIENCY else shown}</td>"


def html_fault(fault: Fault, columns: int) -> str:
    words = html.escape(fault_words(fault))
    return f'<tr><td></td><td class="fault" colspan="{columns + 1}">✗ {words}</td></tr>'


def marked_up(lines: list[str]) -> list[str]:
    """Lines of Python as HTML, with keywords and comments marked."""
    spans: dict[int, list[tuple[int, int, str]]] = {}
    reader = io.StringIO("\n".join(lines) + "\n").readline
    try:
        for token in tokenize.generate_tokens(reader):
            kind = "comment" if token.type == tokenize.COMMENT else ""
            if token.type == tokenize.NAME and keyword.iskeyword(token.string):
                kind = "keyword"
            if kind:
                spans.setdefault(token.start[0], []).append((token.start[1], token.end[1], kind))
    except (tokenize.TokenError, SyntaxError):
        spans = {}
    return [mark(text, spans.get(number, [])) for number, text in enumerate(lines, 1)]


def mark(text: str, spans: list[tuple[int, int, str]]) -> str:
    out, last = "", 0
    for begin, end, kind in spans:
        out += html.escape(text[last:begin])
        out += f'<span class="{kind}">{html.escape(text[begin:end])}</span>'
        last = end
    return out + html.escape(text[last:])
