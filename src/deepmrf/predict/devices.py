"""The device to compute on, checked before anything is read or computed, and what it is fast in."""

from __future__ import annotations

import torch


def chosen_device(name: str | torch.device | None = None) -> torch.device:
    """Return the device of that name, or for None the GPU if there is one; raise a ValueError if it cannot be used."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise ValueError(f"device={name!r} is unknown: choose 'cpu' or 'cuda'.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={str(name)!r} was asked for, but PyTorch finds no GPU here: choose 'cpu'.")
    try:
        torch.empty(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError):
        raise ValueError(f"device={str(name)!r} cannot be used here: choose 'cpu' or 'cuda'.") from None
    return device


def is_fast_in_bfloat16(device: torch.device) -> bool:
    """Does the processor multiply bfloat16 by itself (AVX-512 BF16, AMX)? Others imitate it, and are slower so."""
    checks = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return device.type == "cpu" and any(check() for check in checks if check is not None)
