"""The architectures kernels are compiled for, and which GPU each one runs on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class UnsupportedTargetError(RuntimeError):
    """No kernels exist for the GPU or target that was asked for."""


@dataclass(frozen=True)
class Target:
    """name: what the compiler is given. capability: the one compute capability its code runs on (the "a"
    suffix of an architecture excludes every other). default: whether tensors on such a GPU select it without
    being asked."""

    name: str
    capability: tuple[int, int]
    default: bool


TARGETS = {
    target.name: target
    for target in (
        Target("sm_100a", (10, 0), default=True),
        Target("sm_103a", (10, 3), default=False),
        Target("sm_90a", (9, 0), default=True),
    )
}
EMULATED_DEFAULT = TARGETS["sm_100a"]


def resolve_target(name: str | None, device: Any = None) -> Target:
    """The target called `name`; without a name the one of `device`, a torch.device (CPU: sm_100a).

    Raises UnsupportedTargetError for an unknown name, for a GPU without kernels, and for a name that the GPU
    cannot run.
    """
    if name is not None and name not in TARGETS:
        raise UnsupportedTargetError(f"target: got {name!r}, expected one of {', '.join(TARGETS)}")
    if device is None or device.type == "cpu":
        return TARGETS[name] if name else EMULATED_DEFAULT
    import torch

    capability = torch.cuda.get_device_capability(device)
    if name is not None:
        target = TARGETS[name]
        if capability != target.capability:
            raise UnsupportedTargetError(
                f"target {name} needs a GPU of compute capability {_dotted(target.capability)}; {device} "
                f"({torch.cuda.get_device_name(device)}) has {_dotted(capability)}"
            )
        return target
    for target in TARGETS.values():
        if target.default and target.capability == capability:
            return target
    supported = ", ".join(f"{_dotted(t.capability)} ({t.name})" for t in TARGETS.values() if t.default)
    gpu = f"{torch.cuda.get_device_name(device)}, compute capability {_dotted(capability)}"
    raise UnsupportedTargetError(
        f"no kernels for {device} ({gpu}); supported: {supported}. CPU tensors run in the emulator"
    )


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
