"""Devices: the only package besides the kernels that knows hardware."""

from .cpu import HOST, Cpu, CpuBuffer, SingleThreadedTorch
from .interface import NUMPY, Buffer, Device, DeviceDefaults, Fence, Result, Values
from .selection import check_activations, check_kv_dtype, choose_backend, open_device, within_memory

__all__ = [
    "HOST",
    "NUMPY",
    "Buffer",
    "Cpu",
    "CpuBuffer",
    "Device",
    "DeviceDefaults",
    "Fence",
    "Result",
    "SingleThreadedTorch",
    "Values",
    "check_activations",
    "check_kv_dtype",
    "choose_backend",
    "open_device",
    "within_memory",
]
