"""The GPU at hand, by name."""

from __future__ import annotations

import re

from cuverify.errors import DeviceError


def gpu_name() -> str:
    """Return the name of the current CUDA device.

    Raises
    ------
    DeviceError
        There is none, or torch is missing.
    """
    try:
        import torch
    except ImportError as error:
        raise DeviceError(f"evidence is recorded on a GPU through torch: {error}") from error
    if not torch.cuda.is_available():
        raise DeviceError(
            "evidence is recorded on a GPU, and there is no CUDA device here; "
            "`cuverify env` says why"
        )
    return str(torch.cuda.get_device_name())


def slug(gpu: str) -> str:
    """Return the file stem of a GPU's evidence: ``"NVIDIA H200"`` -> ``"h200"``."""
    name = re.sub(r"\b(nvidia|geforce|tesla|quadro)\b", " ", gpu.lower())
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-") or "gpu"
