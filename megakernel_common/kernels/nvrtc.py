"""Compiles programs with NVRTC, from the libraries and headers that torch's CUDA wheels bring."""

import importlib.util
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megakernel_common.kernels.program import COMMON_FLAGS, CSRC, Program, architecture_flags

_FLAGS = ("-default-device",)
# NVRTC has no standard library. These are all the names of it that csrc uses.
_STANDARD_NAMES = """#pragma once
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned;
using int64_t = long;
using uint64_t = unsigned long;
using uintptr_t = unsigned long;
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)
namespace std {
template <class A, class B>
inline constexpr bool is_same_v = false;
template <class A>
inline constexpr bool is_same_v<A, A> = true;
template <bool Condition, class A, class B>
struct conditional {
  using type = A;
};
template <class A, class B>
struct conditional<false, A, B> {
  using type = B;
};
template <bool Condition, class A, class B>
using conditional_t = typename conditional<Condition, A, B>::type;
template <class T>
struct remove_reference {
  using type = T;
};
template <class T>
struct remove_reference<T&> {
  using type = T;
};
template <class T>
struct remove_reference<T&&> {
  using type = T;
};
template <class T>
using remove_reference_t = typename remove_reference<T>::type;
template <class T>
constexpr const T& min(const T& a, const T& b) {
  return b < a ? b : a;
}
template <class T>
constexpr const T& max(const T& a, const T& b) {
  return a < b ? b : a;
}
}  // namespace std
"""
_STANDARD_HEADERS = ("stdint.h", "math.h", "type_traits", "algorithm")


def obstacle() -> str | None:
    """Returns why NVRTC cannot be used, or None."""
    if _bindings() is None:
        return "cuda-bindings is not installed"
    try:
        _nvrtc_version()
    except (ImportError, OSError, RuntimeError):
        return "the NVRTC library (nvidia-cuda-nvrtc) is not installed"
    if find_headers() is None:
        return "the CUDA headers (nvidia-cuda-runtime) are not installed"
    return None


def _bindings() -> Any:
    try:
        from cuda.bindings import nvrtc  # pyright: ignore
    except ImportError:
        return None
    return nvrtc


def _nvrtc_version() -> tuple[int, int]:
    major, minor = _checked(_bindings().nvrtcVersion())
    return major, minor


def find_headers() -> Path | None:
    """The folder of the CUDA headers of NVRTC's major version, in the `nvidia` wheels.

    Returns:
        The folder, or None if there is none.
    """
    major, _ = _nvrtc_version()
    for folder in _package_folders("nvidia"):
        for header in sorted(folder.glob("*/include/cuda.h")):
            found = re.search(r"#define CUDA_VERSION (\d+)", header.read_text(errors="replace"))
            if found and int(found[1]) // 1000 == major:
                return header.parent
    return None


def _package_folders(name: str) -> list[Path]:
    """The folders of a package, which several wheels may share."""
    spec = importlib.util.find_spec(name)
    locations = None if spec is None else spec.submodule_search_locations
    return [Path(location) for location in locations or ()]


def compiler_id() -> str:
    """The versions that a compiled program depends on, and NVRTC's flags."""
    versions = ".".join(map(str, ("nvrtc", *_nvrtc_version(), version("cuda-bindings"))))
    return f"{versions} {_FLAGS}"


def compile_program(program: Program, architecture: str) -> bytes:
    """Compiles a program.

    Args:
        program: The program.
        architecture: As nvcc names it, such as `90a`.

    Returns:
        The cubin.

    Raises:
        RuntimeError: The text does not compile; the message has the compiler's log.
    """
    nvrtc, headers = _bindings(), find_headers()
    flags = [
        f"--gpu-architecture=sm_{architecture}",
        *COMMON_FLAGS,
        *_FLAGS,
        f"-I{CSRC}",
        f"-I{headers}",
        *architecture_flags(architecture),
    ]
    names = [name.encode() for name in _STANDARD_HEADERS]
    contents = [_STANDARD_NAMES.encode()] * len(names)
    handle = _checked(
        nvrtc.nvrtcCreateProgram(
            program.text.encode(), f"{program.name}.cu".encode(), len(names), contents, names
        )
    )
    try:
        (error,) = nvrtc.nvrtcCompileProgram(handle, len(flags), [f.encode() for f in flags])
        if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = _bytes(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, handle)
            raise RuntimeError(
                f"NVRTC could not compile {program.source}:\n{log.rstrip(bytes(1)).decode()}"
            )
        return _bytes(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, handle)
    finally:
        nvrtc.nvrtcDestroyProgram(handle)


def _bytes(get_size: Any, get: Any, handle: Any) -> bytes:
    data = bytes(_checked(get_size(handle)))
    _checked(get(handle, data))  # fills the bytes in place
    return data


def _checked(result: tuple[Any, ...]) -> Any:
    error, *values = result
    if error.value:
        raise RuntimeError(f"NVRTC failed: {error.name}.")
    return values[0] if len(values) == 1 else values
