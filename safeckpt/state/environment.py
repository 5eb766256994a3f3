"""The environment a run computes in: what can change bits without changing code."""

from __future__ import annotations

import os
import platform
from typing import Any

import numpy as np
import torch

__all__ = ["differences", "environment"]


def environment() -> dict[str, Any]:
    """Return the facts that results depend on, as plain values: no host name, no process id, no path."""
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "default_dtype": str(torch.get_default_dtype()),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "fp32_precision": _fp32_precision(),
        "mkldnn": torch.backends.mkldnn.enabled,
        "devices": [],
    }
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and accelerator.type == "cuda":
        facts["devices"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        facts["cuda"] = torch.version.cuda
        facts["cudnn"] = torch.backends.cudnn.version()
        facts["cudnn_deterministic"] = torch.backends.cudnn.deterministic
        facts["cudnn_benchmark"] = torch.backends.cudnn.benchmark
        facts["fp16_reduction"] = str(torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction)
        facts["bf16_reduction"] = str(torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction)
        facts["cublas_workspace"] = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
    elif accelerator is not None:
        facts["devices"] = [accelerator.type] * torch.accelerator.device_count()
    return facts


def _fp32_precision() -> dict[str, str]:
    """Return how float32 is rounded inside matrix products, by backend and operation.

    `torch.get_float32_matmul_precision()` raises when the settings were made through these.
    """
    backends = {"cuda": torch.backends.cuda, "cudnn": torch.backends.cudnn, "mkldnn": torch.backends.mkldnn}
    return {
        f"{name}.{operation}": str(getattr(backend, operation).fp32_precision)
        for name, backend in backends.items()
        for operation in ("matmul", "conv", "rnn")
        if hasattr(getattr(backend, operation, None), "fp32_precision")
    }


def differences(saved: dict[str, Any]) -> list[str]:
    """Return `field: saved -> now` for every field that differs from this process."""
    live = environment()
    fields = sorted(saved.keys() | live.keys())
    return [f"{f}: {saved.get(f)!r} -> {live.get(f)!r}" for f in fields if saved.get(f) != live.get(f)]
