"""The machine: its device, its libraries, what Triton needs to compile, and the memory's bandwidth, by a copy."""

import os
import platform
import shutil
import sysconfig
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from tests.gpu.report import Report, part_options

_PACKAGES = ("torch", "triton", "transformers", "numpy", "grpcio", "protobuf", "safetensors")
_COPIES = 10
_SMALL_BYTES, _BYTES = 128 << 20, 4 << 30


def main() -> None:
    options = part_options()
    report = Report(options.report)
    report.figure("python", platform.python_version())
    report.figure("processor cores", len(os.sched_getaffinity(0)))
    for name in _PACKAGES:
        report.figure(name, _installed(name))
    compilers = (os.environ.get("CC"), "cc", "gcc", "clang")
    compiler = next((path for name in compilers if name and (path := shutil.which(name))), "none")
    headers = Path(sysconfig.get_path("include"), "Python.h")
    report.figure("C compiler", compiler)
    report.figure("Python's headers", str(headers) if headers.exists() else "none")
    if options.device == "cuda":
        has_device = torch.cuda.is_available()
        report.promise("torch finds a CUDA device", int(has_device), 1)
        needed = (_installed("triton") != "none", compiler != "none", headers.exists())
        report.promise("Triton can compile: triton, a C compiler, Python's headers", sum(needed), len(needed))
        if not has_device:
            return
        device = torch.cuda.get_device_properties(0)
        report.figure("device", f"{device.name}, {device.major}.{device.minor}, CUDA {torch.version.cuda}")
        report.figure("memory GB", device.total_memory / 1e9)
        report.figure("free memory GB", torch.cuda.mem_get_info()[0] / 1e9)
    report.figure("bandwidth GB/s", bandwidth(options.device) / 1e9)


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def bandwidth(device: str) -> float:
    """Bytes that a copy reads and writes in a second; the best of several times."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    source = torch.ones(_BYTES if device == "cuda" else _SMALL_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(_COPIES):
        wait()
        began = time.perf_counter()
        target.copy_(source)
        wait()
        seconds.append(time.perf_counter() - began)
    return 2 * source.nbytes / min(seconds)


if __name__ == "__main__":
    main()
