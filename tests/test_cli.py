"""The commands say what they should and end with the right code."""

import os
import subprocess
import sys

import matplotlib.image
import numpy as np
import pytest
from typer.testing import CliRunner

from numba_flash import demo, doctor, reference
from numba_flash.cli import app
from numba_flash.data import load_sample
from numba_flash.doctor import Diagnosis


def run(*args):
    return CliRunner(env={"COLUMNS": "120", "TERM": "dumb"}).invoke(app, list(args))


@pytest.fixture
def numpy_rungs(monkeypatch):
    """The demo with the NumPy formula in the place of every rung; its outputs may be changed."""
    factor = {"forward": 1.0, "backward": 1.0}

    def forward(q, k, v, **_):
        o, lse = reference.naive_forward(q, k, v)
        return o * np.float32(factor["forward"]), lse

    def backward(do, q, k, v, o, lse, **_):
        dq, dk, dv = reference.naive_backward(do, q, k, v, o, lse)
        return dq, dk * np.float32(factor["backward"]), dv

    monkeypatch.setattr(demo, "attention", forward)
    monkeypatch.setattr(demo, "attention_backward", backward)
    return factor


def test_demo_runs_real_kernels_and_saves_a_picture(tmp_path):
    picture = tmp_path / "demo.png"
    result = run("demo", "--emulator", "--kernel", "fa2", "--out", str(picture))
    assert result.exit_code == 0, result.output
    assert "All within bounds: fa2, forward and backward, on the emulator." in result.output
    pixels = matplotlib.image.imread(picture)
    assert pixels.shape[:2] == (1080, 1920)
    assert pixels[..., :3].std() > 0.1  # not a blank page


def test_demo_tables_every_rung_in_both_directions(tmp_path, numpy_rungs):
    result = run("demo", "--out", str(tmp_path / "demo.svg"))
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    for rung in ("naive", "minimal", "fa2", "register_tiled"):
        assert sum(rung in line and " ok" in line for line in lines) == 2
    assert (tmp_path / "demo.svg").exists()


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_demo_prints_in_every_encoding(encoding):
    program = (
        "from numba_flash import cli, demo, reference\n"
        "demo.attention = lambda q, k, v, **_: reference.naive_forward(q, k, v)\n"
        "demo.attention_backward = lambda *a, **_: reference.naive_backward(*a)\n"
        "cli.save_picture = lambda *_: cli.console.print('Picture: \u03c0.png')\n"
        "cli.app(['demo', '--emulator'])\n"
    )
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, env=environment)
    output = done.stdout.decode(encoding)
    assert done.returncode == 0, done.stderr
    assert "All within bounds" in output
    assert "error: |x - x64| / |x64| against float64" in output
    assert output.count("?") == 1  # only the one character that the encoding lacks


@pytest.mark.parametrize(
    ("direction", "factor", "code"),
    [
        ("forward", 1 + 5e-6, 1),
        ("forward", float("nan"), 1),
        ("backward", 1 + 1e-5, 1),
        ("forward", 1 + 2e-7, 0),  # a rounding more is still float32
    ],
)
def test_demo_ends_with_1_exactly_when_an_error_breaks_its_bound(
    tmp_path, numpy_rungs, direction, factor, code
):
    numpy_rungs[direction] = factor
    result = run("demo", "--kernel", "minimal", "--out", str(tmp_path / "demo.png"))
    assert result.exit_code == code, result.output
    verdict = "Too far from float64: minimal" if code else "All within bounds"
    assert verdict in result.output
    if np.isfinite(factor) and code:
        assert f"minimal {direction}" in result.output


def test_demo_reports_a_failing_kernel_as_a_sentence(tmp_path, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("the launch failed")

    monkeypatch.setattr(demo, "attention", broken)
    result = run("demo", "--out", str(tmp_path / "demo.png"))
    assert result.exit_code == 1
    assert "Failed: RuntimeError: the launch failed" in result.output
    assert "numba-flash doctor" in result.output
    assert isinstance(result.exception, SystemExit)  # a traceback would be any other


def test_demo_without_matplotlib_says_how_to_get_the_picture(tmp_path, numpy_rungs, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # cannot be imported
    result = run("demo", "--out", str(tmp_path / "demo.png"))
    assert result.exit_code == 0
    assert "import of matplotlib.figure halted" in result.output
    assert "All within bounds" in result.output
    assert 'pip install "numba_flash[notebooks]"' in result.output
    assert not (tmp_path / "demo.png").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--kernel", "fa9"), "'fa9' is no rung; there are naive, minimal, fa2, register_tiled"),
        (("--out", "demo.txt"), "demo.txt does not end in .png, .svg, .pdf"),
        (("--out", "/no/such/folder/demo.png"), "there is no folder /no/such/folder"),
        (("--out", ".png"), ".png is no more than an ending"),
    ],
)
def test_wrong_option_of_the_demo_gets_a_sentence(arguments, sentence):
    result = run("demo", *arguments)
    assert result.exit_code == 2
    assert sentence in " ".join(result.output.replace("│", " ").split())


def test_folder_with_the_name_of_a_picture_is_refused_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "attention", None)  # calling it fails
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo.png").mkdir()
    result = run("demo")
    assert result.exit_code == 2
    assert "demo.png is a folder" in result.output


def test_file_that_may_not_be_written_is_refused_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "attention", None)  # calling it fails
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    monkeypatch.chdir(tmp_path)
    result = run("demo")
    assert result.exit_code == 2
    assert "demo.png cannot be written to" in result.output


def test_ending_of_the_picture_may_be_in_capitals(tmp_path, numpy_rungs):
    picture = tmp_path / "demo.PNG"
    result = run("demo", "--kernel", "fa2", "--out", str(picture))
    assert result.exit_code == 0, result.output
    assert matplotlib.image.imread(picture.open("rb"), format="png").shape[:2] == (1080, 1920)


@pytest.mark.parametrize(
    ("diagnosis", "code"),
    [
        (Diagnosis("gpu", "GPU ok: it runs.", {"GPU": "H200"}), 0),
        (Diagnosis("emulator", "Emulator: no GPU found.", {}), 0),
        (Diagnosis("unusable", "GPU there but unusable.", {}, 'pip install "x[cu13]"'), 1),
    ],
)
def test_doctor_prints_verdict_and_fix(monkeypatch, diagnosis, code):
    monkeypatch.setattr(doctor, "diagnose", lambda: diagnosis)
    result = run("doctor")
    assert result.exit_code == code
    assert diagnosis.summary in result.output
    if diagnosis.fix:
        assert f"Fix: {diagnosis.fix}" in result.output


def test_version_and_help_need_no_command():
    assert "numba-flash" in run("--version").output
    for command in ("doctor", "demo"):
        assert command in run("--help").output


def test_probabilities_of_the_picture_give_the_models_output():
    sample = load_sample()
    P = demo.attention_probabilities(sample)
    o = P @ sample.v[0]
    # float32 twice: in the model and here.
    assert np.linalg.norm(o - sample.o[0]) / np.linalg.norm(o) < 1e-6


def test_gpu_is_the_device_outside_of_emulation(monkeypatch):
    from numba_flash.launch import EMULATOR, emulation
    from numba_flash.problem import Device

    h200 = Device("NVIDIA H200", (9, 0), 232_448, 1 << 37)
    monkeypatch.setattr(demo, "gpu_count", lambda: 1)
    monkeypatch.setattr(demo, "gpu", lambda ordinal: h200)
    assert demo.current_device() is h200
    with emulation():
        assert demo.current_device() is EMULATOR
