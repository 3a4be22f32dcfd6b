"""A picture of one warp's accesses: its 32 lanes, and the sectors or banks that they ask for.

In global memory a lane is tied to its bytes in the sectors that move; what nobody asked for stays
pale. In shared memory every row of cells is a wavefront, which serves one word of each bank: the
first that a bank serves is blue, each further one is a cycle lost and vermillion. Colours of lanes
run from dark to light, so that the order shows in grey too.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .count import (
    BANK_BYTES,
    NUM_BANKS,
    SECTOR_BYTES,
    WARP_SIZE,
    Counts,
    Request,
    Site,
    lanes_together,
    sectors,
    wavefronts,
)
from .report import source_line, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, VERMILLION, PALE, INK, GREY = "#0072B2", "#D55E00", "#E4E4E4", "#1A1A1A", "#6B6B6B"
INCHES_WIDE, GLOBAL_INCHES = 13.0, 3.5
MOST_PANELS = 4
MOST_CHARACTERS = 105
"""Of a source line."""
TO, TIMES = "\N{EN DASH}", "\N{MULTIPLICATION SIGN}"
HOW = {"read": "reads", "write": "writes", "atomic": "changes"}
LANE_Y, WIRE_Y, ROW = 1.0, -2.2, 0.62
"""Where the boxes of the lanes begin, where their wires end, and the height of a wavefront."""


class Picture:
    """A matplotlib figure that a notebook shows by itself.

    Attributes
    ----------
    figure : matplotlib.figure.Figure
    """

    def __init__(self, figure: Figure):
        self.figure = figure

    def save(self, path: str | Path) -> None:
        """Write it to a file; the suffix says the format."""
        self.figure.savefig(path)

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.figure.savefig(file, format="png", dpi=100)
        return file.getvalue()


def picture(counts: Counts, file: str, line: int) -> Picture:
    """Draw the first request that a warp made on a line, for each array on it.

    Parameters
    ----------
    counts : Counts
    file : str
    line : int

    Returns
    -------
    Picture

    Raises
    ------
    ValueError
        If the line accesses neither global nor shared memory.
    ImportError
        Without matplotlib.
    """
    requests = {site: r for site, r in counts.requests.items() if site.place == (file, line)}
    if not requests:
        lines = sorted({site.place[1] for site in counts.requests if site.place[0] == file})
        raise ValueError(
            f"line {line} of {title(file)} accesses neither global nor shared memory; "
            f"the lines that do are {', '.join(map(str, lines)) or 'none'}"
        )
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a picture needs matplotlib: pip install matplotlib") from error
    shown = list(requests.items())[:MOST_PANELS]
    heights = [panel_height(site, request) for site, request in shown]
    figure = Figure(figsize=(INCHES_WIDE, sum(heights) + 0.7), facecolor="white")
    top = 1 - 0.5 / figure.get_figheight()
    figure.text(0.02, top, f"{title(file)}:{line}", fontsize=12, color=GREY, va="center")
    source = source_line(file, line)[:MOST_CHARACTERS]
    figure.text(0.16, top, source, fontsize=13, color=INK, va="center", family="monospace")
    bottom = sum(heights)
    for (site, request), height in zip(shown, heights, strict=True):
        bottom -= height
        box = (0.02, bottom / figure.get_figheight(), 0.96, (height - 0.1) / figure.get_figheight())
        panel = draw_global if site.kind == "global" else draw_shared
        panel(figure.add_axes(box), site, request)
    return Picture(figure)


def panel_height(site: Site, request: Request) -> float:
    """Inches."""
    if site.kind == "global":
        return GLOBAL_INCHES
    rows = sum(len(phase) for phase in served(site, request))
    phases = WARP_SIZE // lanes_together(site.size)
    return GLOBAL_INCHES - 0.4 + 0.21 * rows + 0.08 * phases


# Lanes


def draw_lanes(axes: Axes, request: Request) -> list[Any]:
    """The row of lanes, one unit wide each; returns their colours."""
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    colors = [
        colormaps["cividis"](0.08 + 0.84 * lane / (WARP_SIZE - 1)) for lane in range(WARP_SIZE)
    ]
    axes.text(-0.4, LANE_Y + 0.5, "lane", ha="right", va="center", fontsize=11, color=GREY)
    for lane in range(WARP_SIZE):
        active = bool(request.active[lane])
        face = colors[lane] if active else "white"
        edge = "white" if active else GREY
        box = Rectangle((lane, LANE_Y), 1, 1, facecolor=face, edgecolor=edge, linewidth=1)
        box.set_linestyle("-" if active else ":")
        axes.add_patch(box)
        ink = "white" if active and lane < 18 else INK if active else GREY
        axes.text(
            lane + 0.5, LANE_Y + 0.47, str(lane), ha="center", va="center", fontsize=10, color=ink
        )
    return colors


def wire(axes: Axes, lane: int, x: float, y: float, color: Any) -> None:
    """A curve from a lane down to a place."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Curve

    middle = (LANE_Y + y) / 2
    points = [(lane + 0.5, LANE_Y), (lane + 0.5, middle), (x, middle), (x, y)]
    codes = [Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4]
    patch = PathPatch(Curve(points, codes), facecolor="none", edgecolor=color, linewidth=1.6)
    axes.add_patch(patch)


def headline(axes: Axes, site: Site, words: str) -> None:
    text = f"{site.array}: a warp's first request {HOW[site.how]} {words}"
    axes.text(0, LANE_Y + 1.75, text, fontsize=13, weight="bold", color=INK, va="center")


# Global memory


def draw_global(axes: Axes, site: Site, request: Request) -> None:
    """Lanes to sectors of 32 bytes."""
    from matplotlib.patches import Rectangle

    addresses, active = request.addresses, request.active
    headline(axes, site, sector_words(site, request))
    colors = draw_lanes(axes, request)
    touched = {
        (a + b) // SECTOR_BYTES for a in addresses[active].tolist() for b in range(site.size)
    }
    places = sector_places(sorted(touched))
    scale = WARP_SIZE / (max(places.values()) + 1)
    width = scale * 0.94

    def across(byte: int) -> float:
        return places[byte // SECTOR_BYTES] * scale + byte % SECTOR_BYTES / SECTOR_BYTES * width

    for place in places.values():
        axes.add_patch(Rectangle((place * scale, WIRE_Y - 1), width, 1, facecolor=PALE))
    for lane in np.flatnonzero(active)[::-1].tolist():
        first = int(addresses[lane])
        for byte in range(first, first + site.size, BANK_BYTES):
            length = min(BANK_BYTES, first + site.size - byte) / SECTOR_BYTES * width
            part = Rectangle((across(byte), WIRE_Y - 1), length, 1, facecolor=colors[lane])
            part.set(edgecolor="white", linewidth=0.6 if length > 0.3 else 0)
            axes.add_patch(part)
        wire(axes, lane, across(first) + site.size / SECTOR_BYTES * width / 2, WIRE_Y, colors[lane])
    axes.text(-0.4, WIRE_Y - 0.5, "sector", ha="right", va="center", fontsize=11, color=GREY)
    label_sectors(axes, places, scale, width)
    idle = int(active.sum()) * site.size < SECTOR_BYTES * len(touched)
    footnote(axes, WIRE_Y - 2, "Pale bytes move too, though no lane asks for them." * idle)


def sector_words(site: Site, request: Request) -> str:
    """What a request to global memory moves."""
    count = sectors(request.addresses[None], request.active[None], site.size)
    asked = int(request.active.sum()) * site.size
    used = asked / (SECTOR_BYTES * count)
    words = f"{asked} bytes in {count} sector{'s' * (count > 1)} of 32 bytes: {100 * used:.0f} %"
    return f"{words} used" + ", because lanes share bytes" * (used > 1)


def sector_places(touched: Sequence[int]) -> dict[int, float]:
    """Where each sector is drawn, in sectors: neighbours touch, others leave a gap."""
    places: dict[int, float] = {}
    at, before = 0.0, touched[0]
    for number in touched:
        at += 0 if number == touched[0] else 1 if number == before + 1 else 1.35
        places[number], before = at, number
    return places


def label_sectors(axes: Axes, places: dict[int, float], scale: float, width: float) -> None:
    """The distance of a sector from the first one, in bytes, under as many as have room."""
    first = min(places)
    every = max(1, round(len(places) / 16))
    for i, (number, place) in enumerate(places.items()):
        if i % every == 0:
            text = f"+{(number - first) * SECTOR_BYTES:,}" if number > first else "0"
            x = place * scale + width / 2
            axes.text(x, WIRE_Y - 1.4, text, ha="center", va="center", fontsize=9, color=GREY)
    axes.text(-0.4, WIRE_Y - 1.4, "byte", ha="right", va="center", fontsize=9, color=GREY)


# Shared memory


def served(site: Site, request: Request) -> list[list[dict[int, list[int]]]]:
    """Who is served when: for each group of lanes its wavefronts, bank to lanes."""
    together = lanes_together(site.size)
    phases = []
    for first in range(0, WARP_SIZE, together):
        words: dict[int, list[int]] = {}
        for lane in range(first, first + together):
            if request.active[lane]:
                start = int(request.addresses[lane])
                for word in range(start // BANK_BYTES, (start + site.size - 1) // BANK_BYTES + 1):
                    words.setdefault(word, []).append(lane)
        phase: list[dict[int, list[int]]] = []
        for word, lanes in words.items():
            bank = word % NUM_BANKS
            free = next((w for w in phase if bank not in w), None)
            if free is None:
                free = {}
                phase.append(free)
            free[bank] = lanes
        if phase:
            phases.append(phase)
    return phases


def draw_shared(axes: Axes, site: Site, request: Request) -> None:
    """Lanes to banks, and below each bank its words, a row a wavefront."""
    addresses, active = request.addresses, request.active
    needed, least = wavefronts(addresses[None], active[None], site.size)
    lost = f"{needed - least} lost to bank conflicts" if needed > least else "no bank conflict"
    cycles = f"{needed} wavefront{'s' * (needed > 1)}"
    headline(axes, site, f"{int(active.sum()) * site.size} bytes in {cycles}: {lost}")
    colors = draw_lanes(axes, request)
    axes.text(-0.4, WIRE_Y - 0.4, "bank", ha="right", va="center", fontsize=11, color=GREY)
    for bank in range(NUM_BANKS):
        axes.text(
            bank + 0.5, WIRE_Y - 0.4, str(bank), ha="center", va="center", fontsize=9, color=GREY
        )
    for lane in np.flatnonzero(active)[::-1]:
        bank = int(addresses[lane]) // BANK_BYTES % NUM_BANKS
        spread = min(NUM_BANKS - bank, max(1, site.size // BANK_BYTES))
        wire(axes, int(lane), bank + spread / 2, WIRE_Y, colors[lane])
    y, number = WIRE_Y - 0.9, 0
    for phase in served(site, request):
        for i, wavefront in enumerate(phase):
            number += 1
            y -= ROW
            middle = y + ROW / 2
            axes.text(-0.4, middle, str(number), ha="right", va="center", fontsize=9, color=GREY)
            draw_wavefront(axes, y, wavefront, BLUE if i == 0 else VERMILLION)
        y -= 0.25
    footnote(axes, y - 0.35, "Rows are wavefronts; a cell names the lanes that its word goes to.")


def draw_wavefront(axes: Axes, y: float, wavefront: dict[int, list[int]], color: str) -> None:
    """A cell for each bank, which names the lanes it serves."""
    from matplotlib.patches import Rectangle

    for bank in range(NUM_BANKS):
        lanes = wavefront.get(bank, [])
        face = color if lanes else PALE
        axes.add_patch(Rectangle((bank + 0.03, y + 0.04), 0.94, ROW - 0.08, facecolor=face))
        text = lanes_text(lanes)
        axes.text(
            bank + 0.5,
            y + ROW / 2 - 0.02,
            text,
            ha="center",
            va="center",
            fontsize=8 if len(text) < 5 else 6,
            color="white",
        )


def lanes_text(lanes: list[int]) -> str:
    """Lanes as a cell names them: one, a range, or how many."""
    if len(lanes) < 2:
        return "".join(map(str, lanes))
    if lanes == list(range(lanes[0], lanes[-1] + 1)):
        return f"{lanes[0]}{TO}{lanes[-1]}"
    return f"{len(lanes)}{TIMES}"


def footnote(axes: Axes, y: float, words: str) -> None:
    """A line of explanation, where the panel ends."""
    axes.text(0, y, words, fontsize=10, color=GREY, va="center")
    axes.set(xlim=(-2.2, WARP_SIZE + 0.3), ylim=(y - 0.45, LANE_Y + 2.2))
    axes.axis("off")
