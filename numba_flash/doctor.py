"""What this machine can run, and the one fix where something is missing.

Three questions, in this order: does the machine show a GPU, does its driver answer, does a kernel
compile and run on it. The last one is the real test: versions are only looked at to explain a
kernel that failed. Nothing here needs Numba to import, and nothing here raises.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Literal

Status = Literal["gpu", "unusable", "emulator"]

MIN_CAPABILITY = (7, 5)
MIN_DRIVER_CUDA = (12, 0)
PACKAGES = ("numba_flash", "numpy", "numba", "numba-cuda", "ml_dtypes", "torch")
TOOLKIT_PACKAGES = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")

CUDA_ERROR_NO_DEVICE = 100
KERNEL_TIMEOUT_S = 180
"""A first compilation takes seconds; one that takes minutes hangs."""


@dataclass(frozen=True)
class Driver:
    """What the CUDA driver library says; ``loaded`` is False where there is none.

    ``error`` is cuInit's result (0 is success); ``cuda`` is the newest CUDA it serves.
    """

    loaded: bool = False
    error: int = 0
    cuda: tuple[int, int] = (0, 0)
    name: str = ""
    capability: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Hardware:
    """What the operating system shows of a GPU, whether or not CUDA can use it."""

    present: bool = False
    name: str = ""
    driver_version: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """The verdict.

    Attributes
    ----------
    status : {"gpu", "unusable", "emulator"}
    summary : str
        One sentence for a person.
    details : dict of str to str
        Device, driver and versions, in the order to print them.
    fix : str or None
        What to do, where there is something to do.
    """

    status: Status
    summary: str
    details: dict[str, str] = field(default_factory=dict)
    fix: str | None = None

    @property
    def exit_code(self) -> int:
        """1 where a GPU stands unused, else 0."""
        return int(self.status == "unusable")


def find_hardware() -> Hardware:
    """Ask nvidia-smi, or look for the device file."""
    smi = shutil.which("nvidia-smi")
    if smi:
        query = [smi, "--query-gpu=name,driver_version", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
        first = answer.stdout.splitlines()[0].split(",") if answer.stdout.strip() else []
        if answer.returncode == 0 and len(first) == 2:
            return Hardware(True, first[0].strip(), first[1].strip())
    return Hardware(any(Path("/dev").glob("nvidia[0-9]*")))


def ask_driver() -> Driver:
    """Load the CUDA driver library and ask it about device 0; makes no context on the GPU."""
    try:
        if sys.platform == "win32":
            cuda = ctypes.WinDLL("nvcuda.dll")
        else:
            cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Driver()
    version, count, device = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    served = (version.value // 1000, version.value % 1000 // 10)
    error = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
    if not error and count.value == 0:
        error = CUDA_ERROR_NO_DEVICE
    error = error or cuda.cuDeviceGet(ctypes.byref(device), 0)
    if error:
        return Driver(True, error, served)
    name, major, minor = ctypes.create_string_buffer(256), ctypes.c_int(), ctypes.c_int()
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, device)  # COMPUTE_CAPABILITY_MAJOR
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)  # COMPUTE_CAPABILITY_MINOR
    return Driver(True, 0, served, name.value.decode(), (major.value, minor.value))


def read_versions() -> dict[str, str]:
    """Versions of what is installed, by distribution name; absent packages are absent."""
    versions = {"python": platform.python_version()}
    for package in (*PACKAGES, *TOOLKIT_PACKAGES):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def run_tiny_kernel() -> None:
    """Compile, launch and check a kernel of one line; any failure is an exception."""
    import numpy as np
    from numba import cuda

    @cuda.jit
    def double(x):
        i = cuda.grid(1)
        if i < x.size:
            x[i] += x[i]

    x = cuda.to_device(np.arange(32, dtype=np.float32))
    double[1, 32](x)
    if not np.array_equal(x.copy_to_host(), 2 * np.arange(32)):
        raise RuntimeError("the kernel ran and computed the wrong numbers")


def kernel_error() -> str | None:
    """What goes wrong when a kernel runs, or None.

    The kernel runs in a child process, so that neither a crash nor a broken CUDA context reaches
    this one.
    """
    code = "from numba_flash.doctor import run_tiny_kernel; run_tiny_kernel()"
    try:
        child = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            capture_output=True,
            text=True,
            timeout=KERNEL_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"TimeoutExpired: no answer in {KERNEL_TIMEOUT_S} s"
    if child.returncode == 0:
        return None
    return child.stderr.strip() or f"the process ended with code {child.returncode}"


def runnable_rungs(on_gpu: bool) -> str:
    """The rungs that run here, by name, and why the others do not."""
    from .kernels import LADDER
    from .launch import EMULATOR, gpu
    from .problem import Layout, make_problem

    row = Layout((1, 1, 1, 64), (128, 128, 128, 2), "bfloat16")
    problem, device = make_problem(row, row, row), gpu(0) if on_gpu else EMULATOR
    reasons = {rung.name: rung.supports(problem, device) for rung in LADDER}
    able = ", ".join(name for name, reason in reasons.items() if reason is None)
    return "; ".join([able, *(f"not {name}: {why}" for name, why in reasons.items() if why)])


def describe_kernel_cache() -> str:
    """Where compiled kernels are kept, and how many there are."""
    from .cache import SUFFIX, directory

    folder = directory()
    if folder is None:
        return "off: every process compiles its kernels again"
    return f"{len(list(folder.glob(f'*{SUFFIX}')))} in {folder}"


@dataclass(frozen=True)
class Probes:
    """Where :func:`diagnose` gets its facts; a test puts its own functions in."""

    hardware: Callable[[], Hardware] = find_hardware
    driver: Callable[[], Driver] = ask_driver
    versions: Callable[[], dict[str, str]] = read_versions
    kernel: Callable[[], str | None] = kernel_error
    rungs: Callable[[bool], str] = runnable_rungs
    kernel_cache: Callable[[], str] = describe_kernel_cache
    environment: Callable[[], dict[str, str]] = lambda: dict(os.environ)


@dataclass(frozen=True)
class Facts:
    """What the probes found."""

    hardware: Hardware
    driver: Driver
    versions: dict[str, str]
    environment: dict[str, str]

    @property
    def gpu(self) -> str:
        return self.driver.name or self.hardware.name or "an NVIDIA GPU"

    @property
    def hidden(self) -> bool:
        """CUDA_VISIBLE_DEVICES is set to show no GPU."""
        return self.environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1")

    @property
    def toolkit(self) -> tuple[int, int] | None:
        """CUDA version of the wheels, where CUDA came as wheels."""
        for package in TOOLKIT_PACKAGES:
            if package in self.versions:
                major, minor = self.versions[package].split(".")[:2]
                return int(major), int(minor)
        return None

    @property
    def install(self) -> str:
        """The command that installs CUDA wheels this driver can serve."""
        extra = "cu13" if self.driver.cuda >= (13, 0) else "cu12"
        return f'pip install "numba_flash[{extra}]"'


def diagnose(probes: Probes | None = None) -> Diagnosis:
    """Say what this machine can run, and what to do where a GPU stands unused.

    Parameters
    ----------
    probes : Probes, optional
        Where the facts come from; this machine by default.

    Returns
    -------
    Diagnosis
        ``status`` is "gpu" (a kernel compiled and ran), "unusable" (a GPU is there, a kernel does
        not run, ``fix`` says what to do) or "emulator" (no GPU).
    """
    probes = probes or Probes()
    facts = Facts(
        hardware=_attempt(probes.hardware, Hardware()),
        driver=_attempt(probes.driver, Driver()),
        versions=_attempt(probes.versions, {}),
        environment=_attempt(probes.environment, {}),
    )
    details = _describe(facts)
    if not (facts.hardware.present or facts.driver.name):
        return _emulator(probes, facts, details, "no GPU found")
    if facts.hidden:
        return _emulator(probes, facts, details, "CUDA_VISIBLE_DEVICES hides the GPU")
    trouble = _driver_trouble(facts)
    if trouble is None:
        error = _attempt(probes.kernel, "the test of a kernel could not be started")
        if error is None:
            details["rungs"] = _attempt(lambda: probes.rungs(True), "unknown")
            details["kernel cache"] = _attempt(probes.kernel_cache, "unknown")
            major, minor = facts.driver.capability
            summary = f"GPU ok: a kernel compiled and ran on {facts.gpu} (sm_{major}{minor})."
            return Diagnosis("gpu", summary, details)
        details["error"] = _headline(error)
        trouble = _kernel_trouble(error, facts)
    why, fix = trouble
    return Diagnosis("unusable", f"GPU there but unusable: {facts.gpu}, but {why}.", details, fix)


def _headline(error: str) -> str:
    """The last exception of a traceback with its message, on one line."""
    starts = [m.start() for m in re.finditer(r"^[\w.]+(?=:)", error, re.MULTILINE)]
    return " ".join(error[starts[-1] if starts else 0 :].split())[:300]


def _attempt(probe: Callable, default):
    """The probe's answer, or the default where the probe fails: a diagnosis never raises."""
    try:
        return probe()
    except Exception:
        return default


def _emulator(probes: Probes, facts: Facts, details: dict[str, str], why: str) -> Diagnosis:
    fix = None
    if facts.versions and "numba" not in facts.versions:
        why += ", and Numba is not installed"
        fix = "pip install numba (a stub stands in for it: kernels run on the emulator alone)"
    details["rungs"] = _attempt(lambda: probes.rungs(False), "unknown")
    summary = f"Emulator: {why}; everything runs on the CPU emulator."
    return Diagnosis("emulator", summary, details, fix)


def _describe(facts: Facts) -> dict[str, str]:
    details = {}
    if facts.hardware.present or facts.driver.name:
        details["GPU"] = facts.gpu
    if facts.driver.name:
        details["compute capability"] = "{}.{}".format(*facts.driver.capability)
    if facts.hardware.driver_version:
        details["driver"] = facts.hardware.driver_version
    if facts.driver.loaded:
        details["driver's CUDA"] = "{}.{}".format(*facts.driver.cuda)
    return details | facts.versions


def _driver_trouble(facts: Facts) -> tuple[str, str] | None:
    """Why no kernel can run whatever is installed in Python, with the fix."""
    driver = facts.driver
    if not driver.loaded:
        return (
            "its CUDA driver library (libcuda) is not there",
            "Install NVIDIA's driver; in a container, start it with `--gpus all`.",
        )
    if driver.cuda < MIN_DRIVER_CUDA:
        return (
            f"its driver serves CUDA {driver.cuda[0]}.{driver.cuda[1]} and 12.0 is the least",
            "Update NVIDIA's driver to version 525 or newer.",
        )
    if driver.error:
        return _DRIVER_ERRORS.get(
            driver.error,
            (
                f"its driver refuses to start (cuInit gives error {driver.error})",
                "Restart the machine; if that does not help, reinstall NVIDIA's driver.",
            ),
        )
    if driver.capability < MIN_CAPABILITY:
        return (
            "its compute capability is {}.{} and 7.5 is the least".format(*driver.capability),
            "Use a GPU of the Turing generation (2018) or newer, or the emulator: "
            "`with numba_flash.emulation(): ...`.",
        )
    if facts.environment.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0"):
        return (
            "NUMBA_ENABLE_CUDASIM puts Numba's own simulator in its place",
            "Unset NUMBA_ENABLE_CUDASIM.",
        )
    return None


_DRIVER_ERRORS = {
    CUDA_ERROR_NO_DEVICE: (
        "the driver shows this process no device",
        "Let this process see the GPU: unset CUDA_VISIBLE_DEVICES; in a container, start it "
        "with `--gpus all`.",
    ),
    802: (
        "the system is not ready (CUDA_ERROR_SYSTEM_NOT_READY)",
        "Start the fabric manager: `sudo systemctl start nvidia-fabricmanager`.",
    ),
    803: (
        "driver library and kernel module have different versions "
        "(CUDA_ERROR_SYSTEM_DRIVER_MISMATCH)",
        "Restart the machine, so that it loads the module of the installed driver.",
    ),
}


def _kernel_trouble(error: str, facts: Facts) -> tuple[str, str]:
    """Why the kernel failed, with the fix: what was installed first, then what the error says."""
    versions, driver, toolkit = facts.versions, facts.driver, facts.toolkit
    served = "{}.{}".format(*driver.cuda)
    if re.search(r"row_stack|Numba needs NumPy", error):
        return (
            f"NumPy {versions.get('numpy', '')} is too new for numba-cuda",
            'pip install "numpy<2.5"',
        )
    if "numba" not in versions:
        return "Numba is not installed", facts.install
    if "numba-cuda" not in versions:
        return "numba-cuda is not installed", facts.install
    if re.search(r"DynamicLibNotFoundError|NvvmSupportError|NvrtcSupportError", error):
        return "the CUDA compiler libraries (NVRTC, NVVM) are not installed", facts.install
    if toolkit and toolkit[0] > driver.cuda[0]:
        return (
            f"the CUDA {toolkit[0]} wheels need a newer driver: this one serves CUDA {served}",
            f"{facts.install}, or update NVIDIA's driver",
        )
    if re.search(r"UNSUPPORTED_PTX_VERSION|[Uu]nsupported PTX|\.version.*unsupported", error):
        return (
            f"its driver (CUDA {served}) does not know the PTX of the newer CUDA wheels",
            f'{facts.install} "cuda-toolkit=={served}.*"',
        )
    if "OUT_OF_MEMORY" in error:
        return (
            "its memory is full",
            "Stop the process that fills the GPU; `nvidia-smi` names it.",
        )
    if "DEVICE_UNAVAILABLE" in error:
        return (
            "another process holds it in exclusive mode",
            "Stop the process that holds the GPU; `nvidia-smi` names it.",
        )
    return (
        "a kernel does not run: " + _headline(error).rstrip("."),
        f"{facts.install} --force-reinstall; if that does not help, report the lines above",
    )
