"""What a measurement ran on: code, device and software, collected once a process and stored with each run.

No host name, user name or path enters: a run must be comparable, not traceable to a machine.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import time
from functools import lru_cache
from pathlib import Path

from gem.digest import ROOT

_SMI_FIELDS = ("name", "driver_version", "power.limit", "clocks.sm", "clocks.mem", "clocks.max.sm", "memory.total")
_TRITON_DISTRIBUTIONS = ("fbtriton", "triton", "pytorch-triton")


@lru_cache
def commit(root: Path = ROOT) -> tuple[str, bool | None]:
    """(commit, dirty) of the checkout.

    Without a .git folder: environment GEM_COMMIT and GEM_DIRTY, else ("unknown", None).
    """
    if os.environ.get("GEM_COMMIT"):
        return os.environ["GEM_COMMIT"], os.environ.get("GEM_DIRTY", "0").lower() not in ("0", "", "false", "no")
    try:
        head = _output("git", "-C", str(root), "rev-parse", "HEAD")
        return head, bool(_output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.CalledProcessError):
        return "unknown", None


def device(num_devices: int = 1) -> dict:
    """Name, slug, count and, on a GPU, driver, power limit in W, clocks in MHz, memory in MiB and the host's CPU;

    on a CPU model and cores.
    """
    smi = _nvidia_smi(int(time.monotonic() // 10))
    if smi is None:
        name = _cpu_name()
        return {"type": "cpu", "name": name, "slug": "cpu", "count": 1, "cores": len(os.sched_getaffinity(0))}
    slug = device_slug(smi["name"], num_devices)
    return {
        "type": "cuda",
        "name": smi["name"],
        "slug": slug,
        "count": num_devices,
        "driver": smi["driver_version"],
        "power_limit_w": smi["power.limit"],
        "clock_sm_mhz": smi["clocks.sm"],
        "clock_memory_mhz": smi["clocks.mem"],
        "clock_max_sm_mhz": smi["clocks.max.sm"],
        "memory_mib": smi["memory.total"],
        **host(),
    }


@lru_cache
def host() -> dict:
    """CPU beside a GPU, and how fast one of its cores queues work: a step of many kernels waits for it.

    host_call_us: microseconds of a small torch operation on the CPU called from Python, the quickest of 20 times 200.
    """
    found = {"host_cpu": _cpu_name(), "host_cores": len(os.sched_getaffinity(0))}
    torch = sys.modules.get("torch")
    if torch is not None:
        x, times = torch.zeros(8), []
        for _ in range(20):
            start = time.perf_counter()
            for _ in range(200):
                torch.add(x, x)
            times.append((time.perf_counter() - start) / 200)
        found["host_call_us"] = round(min(times) * 1e6, 2)
    return found


def device_slug(name: str, count: int = 1) -> str:
    """Folder name of a device: "NVIDIA H200" -> h200, two of them h200x2, "NVIDIA H100 80GB HBM3" -> h100_80gb_hbm3."""
    slug = re.sub(r"[^a-z0-9]+", "_", re.sub(r"^(nvidia|amd)\s+", "", name.strip().lower())).strip("_")
    return slug if count == 1 else f"{slug}x{count}"


@lru_cache
def software() -> dict:
    """Versions of python, torch, cuda and the triton distribution that is really imported."""
    versions = {"python": platform.python_version()}
    for name in ("torch", "torchrec", "numpy"):
        versions[name] = _version(name)
    triton = [f"{name} {version}" for name in _TRITON_DISTRIBUTIONS if (version := _version(name))]
    versions["triton"] = " + ".join(triton) or None
    if "torch" in sys.modules:
        versions["cuda"] = sys.modules["torch"].version.cuda
    return versions


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


@lru_cache(maxsize=2)
def _nvidia_smi(bucket: int) -> dict | None:
    """First visible GPU, or None.

    `bucket` makes the answer at most 10 s old, as clocks move. A hidden GPU counts as none.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return None
    command = ["nvidia-smi", f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader,nounits"]
    if visible:
        command += ["-i", visible.split(",")[0]]
    try:
        line = _output(*command).splitlines()[0]
    except (OSError, subprocess.CalledProcessError, subprocess.TimeoutExpired, IndexError):
        return None
    return dict(zip(_SMI_FIELDS, (part.strip() for part in line.split(",")), strict=True))


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.machine()


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout.strip()
