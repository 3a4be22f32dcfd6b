"""The demo's picture: where a few heads look, and how exact each rung is.

Two hues (blue and orange of Okabe and Ito's set) and lightness carry everything, so the picture
reads on a projector, in grey and by colour-blind people.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .demo import Result

HEADS = (
    (8, "patient", "looks at the next word"),
    (1, "card", "looks for the same word, and its kin"),
    (7, "brings", "looks for what the verb is about"),
)
"""Head, the query whose row is shown, and what the head does."""

BLUE, ORANGE, PALE = "#0072B2", "#E69F00", "#DDDDDD"
INK, GREY = "#1A1A1A", "#5F5F5F"
FULL_BLUE = 0.5
"""The attention weight that is drawn in full blue."""
LEFT, LINE, SPACE = 0.025, 1 / 6, 0.0125
"""Margin of the figure; line height and word space of a panel, in its own units."""


def draw(tokens: Sequence[str], P: np.ndarray, results: Sequence[Result], out: Path) -> None:
    """Draw the picture and save it.

    Parameters
    ----------
    tokens : sequence of str
    P : ndarray, (heads, tokens, tokens)
        Attention probabilities; a row sums to one.
    results : sequence of Result
        One for each rung and direction.
    out : Path
        The suffix says the format: ``.png``, ``.svg``, ``.pdf``.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 9), dpi=120, facecolor="white")
    FigureCanvasAgg(figure)  # measures text, without a window
    figure.text(LEFT, 0.942, "Where attention looks", fontsize=26, weight="bold", color=INK)
    figure.text(
        LEFT,
        0.905,
        "The framed word asks; the darker a word, the more of the answer:",
        fontsize=15,
        color=GREY,
    )
    draw_scale(figure.add_axes((0.465, 0.9, 0.125, 0.027)))
    for panel, (head, query, does) in enumerate(HEADS):
        top = 0.85 - 0.29 * panel
        figure.text(LEFT, top, f"Head {head}", fontsize=17, weight="bold", color=INK)
        figure.text(LEFT + 0.062, top, does, fontsize=17, color=INK)
        draw_text(figure.add_axes((LEFT, top - 0.232, 0.54, 0.222)), tokens, P[head], query)
    figure.text(0.67, 0.942, "How exact each rung is", fontsize=26, weight="bold", color=INK)
    figure.text(0.67, 0.905, "Error against float64; grey: what it may be", fontsize=15, color=GREY)
    draw_errors(figure.add_axes((0.73, 0.06, 0.25, 0.79)), results)
    figure.savefig(out)


def draw_text(axes: Any, tokens: Sequence[str], P: np.ndarray, query: str) -> None:
    """The paragraph, each word on a blue as dark as the weight that ``query`` gives it."""
    from matplotlib.patches import Rectangle

    renderer = axes.figure.canvas.get_renderer()
    axes.set(xlim=(0, 1), ylim=(0, 1))
    axes.axis("off")
    asks = tokens.index(query)
    x, y = 0.0, 1 - LINE / 2
    for j, token in enumerate(tokens):
        weight = P[asks, j]
        label = axes.text(
            x,
            y,
            token,
            fontsize=15,
            va="center_baseline",
            color="white" if weight > FULL_BLUE / 2 else INK,
            zorder=4,
        )
        width = label.get_window_extent(renderer).width / axes.bbox.width
        if x + width > 1:
            x, y = 0.0, y - LINE
            label.set_position((x, y))
        box = Rectangle(
            (x - SPACE / 3, y - 0.46 * LINE),
            width + 2 / 3 * SPACE,
            0.92 * LINE,
            facecolor=shade(weight),
            edgecolor=ORANGE if j == asks else "none",
            linewidth=3,
            zorder=3 if j == asks else 2,
            clip_on=False,
        )
        axes.add_patch(box)
        x += width + SPACE


def draw_scale(axes: Any) -> None:
    """What the shades of blue mean."""
    weights = (0.05, 0.1, 0.2, 0.3, 0.5)
    axes.imshow([[shade(weight) for weight in weights]], aspect="auto")
    for x, weight in enumerate(weights):
        color = "white" if weight > FULL_BLUE / 2 else INK
        axes.text(x, 0, f"{weight:.0%}", ha="center", va="center", fontsize=12, color=color)
    axes.axis("off")


def shade(weight: float) -> tuple[float, float, float]:
    """White at a weight of 0, the full blue from FULL_BLUE on."""
    strength = min(1.0, weight / FULL_BLUE)
    blue = np.array([0x00, 0x72, 0xB2]) / 255
    r, g, b = 1 - strength * (1 - blue)
    return float(r), float(g), float(b)


def draw_errors(axes: Any, results: Sequence[Result]) -> None:
    """A bar for each rung and direction, on a pale one that is as long as its bound."""
    names = list(dict.fromkeys(result.rung for result in results))
    top = 1.1 * max(result.bound for result in results)
    for result in results:
        backward = result.direction == "backward"
        y = names.index(result.rung) + (0.24 if backward else -0.16)
        axes.barh(y, result.bound, height=0.17, color=PALE)
        axes.barh(y, min(result.error, top), height=0.17, color=ORANGE if backward else BLUE)
        text = f" {result.direction} {result.error:.1e}"
        axes.text(0, y - 0.1, text, fontsize=15, va="bottom", color=INK)
    axes.set_yticks(range(len(names)), names, fontsize=18)
    axes.set(xlim=(0, top), ylim=(len(names) - 0.55, -0.5), xticks=[])
    axes.tick_params(length=0, colors=INK)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
