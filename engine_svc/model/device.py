"""Which device the settings mean."""

from __future__ import annotations

import torch

from loraplex.status import FieldInvalid

#: bfloat16 on tensor cores, and copies that do not wait
LEAST_CAPABILITY = (8, 0)


def device_of(name: str) -> torch.device:
    """Args: name, auto, cpu or cuda. Raises: FieldInvalid."""
    if name == "cpu":
        return torch.device(name)
    if name not in ("auto", "cuda"):
        raise FieldInvalid("device", name, "auto, cpu or cuda", reason="CONFIG_INVALID")
    lacking = _gpu_lacks()
    if not lacking:
        return torch.device("cuda")
    if name == "cuda":
        raise FieldInvalid("device", name, f"cpu: {lacking}", reason="CONFIG_INVALID")
    return torch.device("cpu")


def _gpu_lacks() -> str:
    """Why there is no GPU that serves; empty: there is one."""
    if not torch.cuda.is_available():
        return "torch sees no GPU here"
    found = torch.cuda.get_device_capability()
    if found >= LEAST_CAPABILITY:
        return ""
    least = ".".join(map(str, LEAST_CAPABILITY))
    name, has = torch.cuda.get_device_name(), ".".join(map(str, found))
    return f"{name} has compute capability {has}, and the kernels need at least {least}"
