"""What a report shows: every line with its costs and faults, and a warp's accesses as a picture."""

import inspect
import io
import re

import matplotlib
import numpy as np
import pytest
from matplotlib.patches import PathPatch, Rectangle
from numba import cuda, float32
from rich.console import Console

from numba_flash.emulator import emulate
from numba_flash.emulator.picture import VERMILLION, served
from numba_flash.emulator.show import figure

N = 32


@cuda.jit(device=True)
def twice(source, y, x):
    return source[y, x] * 2


@cuda.jit
def transpose(source, out):
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    tile = cuda.shared.array((N, N), float32)
    tile[y, x] = twice(source, y, x)  # < a row & a warp
    cuda.syncthreads()
    out[y, x] = tile[x, y]


@cuda.jit
def transpose_without_barrier(source, out):
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    tile = cuda.shared.array((N, N), float32)
    tile[y, x] = source[y, x]
    out[y, x] = tile[x, y]


def run(kernel, **options):
    return emulate(kernel, **options)[1, (N, N)](*np.zeros((2, N, N), np.float32))


def line_of(kernel, text):
    lines, first = inspect.getsourcelines(kernel.py_func)
    return first + next(n for n, line in enumerate(lines) if text in line)


def printed(report, width=140):
    console = Console(width=width, record=True, file=io.StringIO())
    report.show(console)
    return console.export_text()


def row(text, number):
    """The line of the output that begins with a line's number."""
    return next(line for line in text.splitlines() if line.split()[:1] == [str(number)])


def test_a_terminal_shows_the_costs_of_a_line_beside_it():
    text = printed(run(transpose))
    store = row(text, line_of(transpose, "out[y, x]"))
    assert "out[y, x] = tile[x, y]" in store
    assert re.findall(r"\d[\d,]*(?: %)?", store)[1:] == ["4,096", "128", "1,024", "992", "100 %"]
    load = row(text, line_of(twice, "return"))
    assert "4,096" in load
    assert "100 %" in load
    assert "1" in row(text, line_of(transpose, "syncthreads")).split()


def test_the_kernel_comes_first_and_device_functions_follow_whole():
    text = printed(run(transpose))
    assert text.index("def transpose(") < text.index("def twice(")
    assert "@cuda.jit(device=True)" in text
    assert "transpose_without_barrier" not in text


def test_a_fault_stands_under_its_line():
    report = run(transpose_without_barrier)
    text = printed(report).splitlines()
    number = line_of(transpose_without_barrier, "out[y, x]")
    at = next(n for n, line in enumerate(text) if line.split()[:1] == [str(number)])
    assert "race:" in text[at + 1]
    assert "1 fault" in text[0]


def test_a_narrow_terminal_is_not_overrun():
    text = printed(run(transpose), width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert "992" in text


def test_html_escapes_the_source_and_carries_everything_itself():
    page = run(transpose)._repr_html_()
    assert "&lt; a row &amp; a warp" in page
    assert "http" not in page
    assert "<script" not in page
    assert 'title="992, 100 % of all conflicts"' in page
    assert page.count("<td") == page.count("</td>")
    assert page.count("<tr") == page.count("</tr>")


def test_html_has_a_fault_under_its_line():
    page = run(transpose_without_barrier)._repr_html_()
    source = page.index("out[y, x] = tile[x, y]")
    assert source < page.index('<td class="fault"') < page.index("race:")


def test_a_report_without_counts_still_shows_source_and_faults():
    report = run(transpose_without_barrier, counts=False)
    text = printed(report)
    assert "tile[y, x] = source[y, x]" in text
    assert "race:" in text
    assert "race:" in report._repr_html_()


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (9_999, "9,999"), (10_000, "10 k"), (999_499, "999 k"), (999_600, "1 M")],
)
def test_figures_have_three_digits_from_ten_thousand_on(number, text):
    assert figure(number) == text


# Pictures


def patches(axes, kind):
    return [patch for patch in axes.patches if type(patch) is kind]


def test_a_picture_has_a_panel_for_each_array_of_the_line():
    figure = run(transpose).picture(line_of(transpose, "out[y, x]")).figure
    titles = [[text.get_text() for text in axes.texts] for axes in figure.axes]
    assert any("tile" in t and "31 lost to bank conflicts" in t for t in titles[0])
    assert any("out" in t and "4 sectors of 32 bytes: 100 % used" in t for t in titles[1])
    for axes in figure.axes:
        assert len(patches(axes, PathPatch)) == 32  # a wire a lane


def test_lost_wavefronts_are_marked_in_the_picture():
    axes = run(transpose).picture(line_of(transpose, "out[y, x]")).figure.axes[0]
    lost = matplotlib.colors.to_rgba(VERMILLION)
    assert sum(patch.get_facecolor() == lost for patch in patches(axes, Rectangle)) == 31


def test_the_wavefronts_drawn_are_those_counted():
    report = run(transpose)
    for site, request in report.counts.requests.items():
        if site.kind == "shared":
            warps = N * N // 32
            drawn = sum(map(len, served(site, request)))
            assert drawn == report.counts.accesses[site].units // warps


def test_a_picture_is_saved_and_shown_by_a_notebook(tmp_path):
    picture = run(transpose).picture(line_of(transpose, "tile[y, x]"))
    picture.save(tmp_path / "warp.png")
    pixels = matplotlib.image.imread(tmp_path / "warp.png")
    assert pixels[..., :3].std() > 0.1  # not a blank page
    assert picture._repr_png_().startswith(b"\x89PNG")


def test_a_line_without_accesses_is_refused_with_those_that_have_some():
    report = run(transpose)
    with pytest.raises(ValueError, match=str(line_of(transpose, "out[y, x]"))):
        report.picture(line_of(transpose, "syncthreads"))


def test_inactive_lanes_have_no_wire():
    @cuda.jit
    def some(source, out):
        if cuda.threadIdx.x % 4 == 1:
            out[cuda.threadIdx.x] = source[0]

    report = emulate(some)[1, 32](np.zeros(1, np.float32), np.zeros(32, np.float32))
    panels = report.picture(line_of(some, "out[")).figure.axes
    assert [len(patches(axes, PathPatch)) for axes in panels] == [8, 8]
