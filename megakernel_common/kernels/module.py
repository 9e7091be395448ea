"""The protocol of compiled kernels: one module holds the kernels of a program on one device."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from megakernel_common.kernels.declarations import DeviceStruct

if TYPE_CHECKING:
    from torch import Tensor

DEFAULT_SHARED_BYTES = 48 * 1024  # dynamic shared memory that any kernel may use
Struct = TypeVar("Struct", bound=DeviceStruct)


class LaunchConfig(NamedTuple):
    """The geometry of a launch.

    Attributes:
        num_blocks: Thread blocks.
        num_threads: Threads of a block.
        shared_bytes: Dynamic shared memory of a block.
        cooperative: All blocks must be resident at a time.
        overlap_previous: The kernel may begin while the one before it in the stream ends.
    """

    num_blocks: int
    num_threads: int
    shared_bytes: int = 0
    cooperative: bool = False
    overlap_previous: bool = False


class KernelModule(Protocol):
    """The kernels of a program, loaded on a device."""

    def read(self, symbol: str, struct: type[Struct]) -> Struct:
        """Returns a copy of a global variable of the module.

        Args:
            symbol: Its name.
            struct: Its type.
        """
        ...

    def launch(
        self,
        kernel: str,
        params: DeviceStruct,
        config: LaunchConfig,
        *,
        writes: Sequence["Tensor"],
        set_bits: "Tensor | None" = None,
    ) -> None:
        """Launches a kernel on torch's current stream of the device; does not wait.

        Args:
            kernel: Its name, one of the program's.
            params: Its only argument. The launch copies it.
            config: The geometry.
            writes: Tensors that the kernel writes; their addresses are in `params`. At least one.
            set_bits: A tensor of 32-bit values whose bits are all set before the kernel begins.

        Raises:
            RuntimeError: CUDA refused the launch.
        """
        ...
