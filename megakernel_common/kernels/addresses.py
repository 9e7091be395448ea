"""Addresses of tensors for the kernels' parameters, after a check of what the kernels assume."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def device_address(
    tensor: "Tensor", dtype: "torch.dtype", name: str, device: "torch.device"
) -> int:
    """The address of a tensor that kernels read or write.

    Args:
        tensor: The tensor. The caller keeps it alive while kernels use the address.
        dtype: The type that the kernels expect.
        name: The tensor's name in messages.
        device: Where the kernels run.

    Raises:
        ValueError: The tensor has another type, has gaps or is elsewhere.
    """
    _check(tensor, dtype, name)
    if tensor.device.type != device.type:
        raise ValueError(f"{name} must be on {device}, found {tensor.device}.")
    return tensor.data_ptr()


def host_address(tensor: "Tensor", dtype: "torch.dtype", name: str, device: "torch.device") -> int:
    """The address of a tensor of the host that kernels read or write: pinned, for a GPU.

    Args:
        tensor: The tensor. The caller keeps it alive while kernels use the address.
        dtype: The type that the kernels expect.
        name: The tensor's name in messages.
        device: Where the kernels run.

    Raises:
        ValueError: The tensor has another type, has gaps, is elsewhere or is not pinned.
    """
    _check(tensor, dtype, name)
    if tensor.device.type != "cpu" or (device.type == "cuda" and not tensor.is_pinned()):
        raise ValueError(f"{name} must be pinned memory of the host, found {tensor.device}.")
    return tensor.data_ptr()


def _check(tensor: "Tensor", dtype: "torch.dtype", name: str) -> None:
    if tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous, of type {dtype}; found {tensor.dtype} with strides "
            f"{tensor.stride()}."
        )
