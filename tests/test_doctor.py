"""Each verdict of the doctor, on machines made up for it."""

import sys

import pytest

from numba_flash import cache, doctor
from numba_flash.doctor import Diagnosis, Driver, Hardware, Probes, diagnose

H200 = Driver(loaded=True, cuda=(13, 0), name="NVIDIA H200", capability=(9, 0))
SEEN = Hardware(True, "NVIDIA H200", "580.82")
VERSIONS = {"numpy": "2.4.6", "numba": "0.68.1", "numba-cuda": "0.30.4"}
CU13 = {"nvidia-cuda-nvrtc": "13.5.37"}


def diagnose_machine(
    hardware=SEEN, driver=H200, versions=None, kernel=None, environment=None
) -> Diagnosis:
    def run_kernel():
        return kernel

    return diagnose(
        Probes(
            hardware=lambda: hardware,
            driver=lambda: driver,
            versions=lambda: VERSIONS | CU13 if versions is None else versions,
            kernel=run_kernel,
            rungs=lambda on_gpu: "naive, minimal, fa2",
            environment=lambda: environment or {},
        )
    )


def test_machine_whose_kernel_runs_is_ok():
    d = diagnose_machine()
    assert (d.status, d.exit_code, d.fix) == ("gpu", 0, None)
    assert "NVIDIA H200" in d.summary
    assert "sm_90" in d.summary
    assert d.details["driver"] == "580.82"
    assert d.details["driver's CUDA"] == "13.0"
    assert d.details["rungs"] == "naive, minimal, fa2"
    assert d.details["numpy"] == "2.4.6"


@pytest.mark.parametrize(
    ("hardware", "driver", "environment"),
    [
        (Hardware(), Driver(), {}),
        (Hardware(), Driver(loaded=True, error=100, cuda=(13, 0)), {}),
        (Hardware(), Driver(loaded=True, error=34), {}),  # the stub library of a build image
        (SEEN, Driver(loaded=True, error=100, cuda=(13, 0)), {"CUDA_VISIBLE_DEVICES": ""}),
    ],
    ids=["nothing", "driver without device", "stub library", "hidden on purpose"],
)
def test_machine_without_a_visible_gpu_has_the_emulator(hardware, driver, environment):
    d = diagnose_machine(hardware, driver, environment=environment, kernel="must not be run")
    assert (d.status, d.exit_code, d.fix) == ("emulator", 0, None)
    assert d.details["rungs"] == "naive, minimal, fa2"


@pytest.mark.parametrize(
    ("driver", "fix"),
    [
        (Driver(), "Install NVIDIA's driver"),
        (Driver(loaded=True, error=100, cuda=(13, 0)), "unset CUDA_VISIBLE_DEVICES"),
        (Driver(loaded=True, error=802, cuda=(13, 0)), "fabricmanager"),
        (Driver(loaded=True, error=803, cuda=(13, 0)), "Restart the machine"),
        (Driver(loaded=True, error=999, cuda=(13, 0)), "reinstall NVIDIA's driver"),
        (Driver(True, 0, (11, 8), "Tesla T4", (7, 5)), "version 525 or newer"),
        (Driver(True, 0, (12, 4), "Tesla V100", (7, 0)), "Turing"),
    ],
    ids=["absent", "no device", "not ready", "mismatch", "unknown", "too old", "old GPU"],
)
def test_driver_that_cannot_serve_gets_its_fix_and_no_kernel_is_tried(driver, fix):
    d = diagnose_machine(driver=driver, kernel="must not be run")
    assert (d.status, d.exit_code) == ("unusable", 1)
    assert fix in d.fix
    assert "error" not in d.details


ROW_STACK = "AttributeError: module 'numpy' has no attribute 'row_stack'"
NO_NVRTC = (
    "cuda.pathfinder._dynamic_libs.load_dl_common.DynamicLibNotFoundError: "
    'Failure finding "libnvrtc.so.13 or libnvrtc.so.12"'
)
BAD_PTX = "numba.cuda.cudadrv.driver.LinkerError: [222] CUDA_ERROR_UNSUPPORTED_PTX_VERSION"
OLDER = Driver(True, 0, (12, 4), "NVIDIA A100", (8, 0))


@pytest.mark.parametrize(
    ("driver", "versions", "error", "fix"),
    [
        (H200, VERSIONS | CU13 | {"numpy": "2.5.2"}, ROW_STACK, 'pip install "numpy<2.5"'),
        (H200, {"numba": "0.68"}, "ImportError: no", 'pip install "numba_flash[cu13]"'),
        (H200, VERSIONS, NO_NVRTC, 'pip install "numba_flash[cu13]"'),
        (OLDER, VERSIONS, NO_NVRTC, 'pip install "numba_flash[cu12]"'),
        (OLDER, VERSIONS | CU13, "RuntimeError: x", 'pip install "numba_flash[cu12]", or update'),
        (
            H200,
            VERSIONS | CU13,
            BAD_PTX,
            'pip install "numba_flash[cu13]" "cuda-toolkit==13.0.*"',
        ),
        (H200, VERSIONS | CU13, "E: CUDA_ERROR_OUT_OF_MEMORY", "fills the GPU"),
        (H200, VERSIONS | CU13, "E: CUDA_ERROR_DEVICE_UNAVAILABLE", "holds the GPU"),
        (H200, VERSIONS | CU13, "RuntimeError: never seen", "report the lines above"),
    ],
    ids=[
        "numpy too new",
        "plain numba",
        "no CUDA wheels, driver 13",
        "no CUDA wheels, driver 12",
        "wheels newer than driver",
        "PTX newer than driver",
        "memory full",
        "held by another",
        "unknown",
    ],
)
def test_kernel_that_fails_gets_the_one_fix(driver, versions, error, fix):
    trace = f"Traceback (most recent call last):\n  File 'x', line 1\n{error}\n:"
    d = diagnose_machine(driver=driver, versions=versions, kernel=trace)
    assert (d.status, d.exit_code) == ("unusable", 1)
    assert fix in d.fix
    assert driver.name in d.summary
    assert d.details["error"].startswith(error[:20])


def test_missing_numba_is_named_with_the_one_fix():
    error = "RuntimeError: double cannot be launched on a GPU"
    d = diagnose_machine(versions={"numpy": "2.4.6"}, kernel=error)
    assert (d.status, d.fix) == ("unusable", 'pip install "numba_flash[cu13]"')
    assert "Numba is not installed" in d.summary
    d = diagnose_machine(Hardware(), Driver(), versions={"numpy": "2.4.6"})
    assert (d.status, d.exit_code) == ("emulator", 0)
    assert "Numba is not installed" in d.summary
    assert d.fix.startswith("pip install numba ")


def test_simulator_switch_is_named():
    d = diagnose_machine(environment={"NUMBA_ENABLE_CUDASIM": "1"})
    assert d.fix == "Unset NUMBA_ENABLE_CUDASIM."


def test_probes_that_raise_leave_a_verdict():
    def broken(*_):
        raise OSError("broken probe")

    probes = Probes(broken, broken, broken, broken, broken, broken)
    assert diagnose(probes).status == "emulator"
    probes = Probes(lambda: SEEN, lambda: H200, broken, broken, broken, broken)
    assert diagnose(probes).status == "unusable"


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in is a shell script")
def test_nvidia_smi_names_gpu_and_driver(tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'NVIDIA H200, 580.82'\necho 'NVIDIA H200, 580.82'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.find_hardware() == Hardware(True, "NVIDIA H200", "580.82")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows loads the driver by another name")
def test_driver_library_is_asked_for_name_capability_and_cuda(monkeypatch):
    class Library:
        def __init__(self, name):
            assert name == "libcuda.so.1"

        def cuInit(self, flags):
            return 0

        def cuDriverGetVersion(self, version):
            version._obj.value = 13010

        def cuDeviceGetCount(self, count):
            count._obj.value = 2

        def cuDeviceGet(self, device, ordinal):
            return 0

        def cuDeviceGetName(self, name, length, device):
            name.value = b"NVIDIA H200"

        def cuDeviceGetAttribute(self, value, attribute, device):
            value._obj.value = {75: 9, 76: 0}[attribute]

    monkeypatch.setattr("ctypes.CDLL", Library)
    assert doctor.ask_driver() == Driver(True, 0, (13, 1), "NVIDIA H200", (9, 0))


def test_machine_with_a_gpu_says_where_its_compiled_kernels_are(monkeypatch, tmp_path):
    monkeypatch.setenv("NUMBA_FLASH_CACHE_DIR", str(tmp_path))
    cache.store("0123", cache.Cubin("kernel", b"machine code"))
    assert diagnose_machine().details["kernel cache"] == f"1 in {tmp_path}"
    monkeypatch.setenv("NUMBA_FLASH_CACHE", "0")
    assert diagnose_machine().details["kernel cache"].startswith("off")


def test_diagnosis_of_this_machine_is_one_of_the_three():
    d = diagnose()
    assert d.status in ("gpu", "unusable", "emulator")
    assert d.details["python"].startswith("3.")
    assert (d.fix is not None) == (d.status == "unusable")
