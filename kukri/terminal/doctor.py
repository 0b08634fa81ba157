"""`kukri doctor`: processor, kernels, caches and versions, to read when something is slow or broken."""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import kukri
from kukri.formats import hub
from kukri.host.hardware import cpu_features, cpu_model, cpu_quota, installed_versions
from kukri.host.os_calls import allowed_cores
from kukri.kernels import choose_backend
from kukri.kernels.cpu.compile.features import cpu_target, usable_cores
from kukri.kernels.cpu.compile.kernel_cache import cache_dir, cache_root, cached_names
from kukri.kernels.cpu.compile.shipped_kernels import shipped_for_cpu
from kukri.terminal.output import n_bytes_text
from kukri.terminal.tables import print_facts

PACKAGES = (
    "numpy",
    "numba",
    "llvmlite",
    "tokenizers",
    "jinja2",
    "typer",
    "rich",
    "platformdirs",
    "torch",
    "triton",
)


def show_machine(*, as_json: bool) -> None:
    """Prints the report on this machine, as lines or as one JSON object."""
    report = machine_report()
    if as_json:
        print(json.dumps(report, ensure_ascii=False))
    else:
        print_facts(_facts(report))


def check_gpu(device: str, *, as_json: bool) -> None:
    """Compares the kernels on a device with the reference, a line for each check; exits with 1 if one failed.

    With `as_json` a JSON object replaces the lines. Raises ConfigError without PyTorch or such a device.
    """
    backend = "torch" if device.startswith("cpu") else "gpu"
    _, name = choose_backend(backend, device)
    from kukri.bench.device_checks import Check, check_device
    from kukri.kernels.pytorch.devices import device_name, find_device

    checks: list[Check] = []

    def say(check: Check) -> None:
        checks.append(check)
        if not as_json:
            print(f"{'ok' if check.passed else 'FAILED':7}{check.name} ({check.error:.2g})", flush=True)

    full_name = device_name(find_device(str(name)))
    if not as_json:
        print(f"checking {full_name} against the reference")
    passed = check_device(str(name), say, (backend,) if backend == "torch" else ("torch", "gpu"))
    if as_json:
        print(json.dumps({"device": full_name, "passed": passed, "checks": [asdict(c) for c in checks]}))
    else:
        n_failed = sum(not check.passed for check in checks)
        print(f"all {len(checks)} checks passed" if passed else f"{n_failed} of {len(checks)} checks FAILED")
    if not passed:
        raise SystemExit(1)


def machine_report() -> dict[str, Any]:
    """Everything `kukri doctor` shows, ready for JSON. Compiles and loads nothing."""
    target, shipped = cpu_target(), shipped_for_cpu()
    return {
        "kukri": kukri.__version__,
        "python": platform.python_version(),
        "executable": sys.executable,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": {
            "name": cpu_model(),
            "n_cores": usable_cores(),
            "n_allowed_cores": allowed_cores(),
            "quota": cpu_quota(),
            "features": list(cpu_features()),
        },
        "kernels": {
            "target": target.name,
            "int8_dot": target.lowering,
            "hardware_float16": target.has_half,
            "shipped": len(shipped.names) if shipped else 0,
            "compiled": cached_names(),
        },
        "jit_cache": {"path": str(cache_dir()), **_contents(cache_root())},
        "models": {
            "path": str(hub.models_dir()),
            "cached": [name for name, spec in hub.MODELS.items() if spec.path.exists()],
            **_contents(hub.models_dir()),
        },
        "packages": installed_versions(PACKAGES),
    }


def _contents(directory: Path) -> dict[str, int]:
    """The number of files in a directory, and their bytes."""
    sizes = [path.stat().st_size for path in directory.rglob("*") if path.is_file()]
    return {"n_files": len(sizes), "n_bytes": sum(sizes)}


def _cores(cpu: dict[str, Any]) -> str:
    quota = "" if cpu["quota"] is None else f", quota of {cpu['quota']:g}"
    return f"{cpu['n_cores']} usable cores (affinity allows {cpu['n_allowed_cores']}{quota})"


def _facts(report: dict[str, Any]) -> list[tuple[str, str]]:
    cpu, kernels, jit, models = report["cpu"], report["kernels"], report["jit_cache"], report["models"]
    half = "" if kernels["hardware_float16"] else ", float16 in software"
    return [
        ("kukri", report["kukri"]),
        ("python", f"{report['python']} ({report['executable']})"),
        ("system", report["system"]),
        ("cpu", f"{cpu['name']}, {_cores(cpu)}"),
        ("features", " ".join(cpu["features"])),
        ("kernels", f"for {kernels['target']}, int8 dot product by {kernels['int8_dot']}{half}"),
        ("shipped", f"{kernels['shipped']} precompiled kernels"),
        ("compiled", " ".join(kernels["compiled"]) or "none here: a run compiles what it lacks"),
        (
            "jit cache",
            f"{jit['path']} ({jit['n_files']} files, {n_bytes_text(jit['n_bytes'])} in all versions)",
        ),
        (
            "models",
            f"{models['path']} ({', '.join(models['cached']) or 'none'}; {n_bytes_text(models['n_bytes'])})",
        ),
        ("packages", ", ".join(f"{name} {found}" for name, found in report["packages"].items())),
    ]
