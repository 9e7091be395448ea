"""Declarations of what Python and csrc share, and the checks of a build that they agree."""

import ctypes
from collections.abc import Iterator, Sequence
from ctypes import c_int
from dataclasses import dataclass
from enum import IntEnum, nonmember
from functools import cache
from itertools import chain
from typing import Any, ClassVar

_SCALARS: dict[type[Any], str] = {
    ctypes.c_bool: "bool",
    ctypes.c_float: "float",
    ctypes.c_int: "int",
    ctypes.c_int64: "int64_t",
    ctypes.c_uint: "unsigned",
    ctypes.c_uint64: "uint64_t",
}


# NVRTC has no `offsetof`, and takes the address of a field at 0 as a constant.
_CHECK_DEFINITIONS = """
template <class, class> constexpr bool megakernel_is_same = false;
template <class T> constexpr bool megakernel_is_same<T, T> = true;
#ifdef __CUDACC_RTC__
#define MEGAKERNEL_OFFSET(type, field) ((unsigned long)__INTADDR__(&((type*)0)->field))
#else
#define MEGAKERNEL_OFFSET(type, field) __builtin_offsetof(type, field)
#endif
"""


class DeviceStruct(ctypes.Structure):
    """A struct of csrc. Assigning to a name that is no field raises `AttributeError`.

    Attributes:
        CPP_NAME: Qualified name in C++.
    """

    __slots__ = ()
    CPP_NAME: ClassVar[str]


class DeviceEnum(IntEnum):
    """An enumeration of csrc: the member `GATE_UP` is `kGateUp` there.

    Attributes:
        CPP_NAMESPACE: Namespace of the enumerators in C++.
    """

    CPP_NAMESPACE = nonmember("megakernel")

    @property
    def cpp_name(self) -> str:
        """Qualified name of the enumerator in C++."""
        return f"{self.CPP_NAMESPACE}::k{self.name.title().replace('_', '')}"


@dataclass(frozen=True)
class DeviceConstant:
    """A number of csrc that Python has as well.

    Attributes:
        cpp_name: Qualified name in C++.
        value: Its value in Python.
    """

    cpp_name: str
    value: int


class _Pointer(ctypes.c_void_p):
    CPP_NAME: ClassVar[str]


class _Enum(c_int):
    CPP_NAME: ClassVar[str]


@cache
def pointer(pointee: str) -> type[ctypes.c_void_p]:
    """The type of a field that holds an address.

    Args:
        pointee: The C++ type it points to, such as `const float`.
    """
    return type(f"Pointer to {pointee}", (_Pointer,), {"CPP_NAME": f"{pointee}*"})


@cache
def enum(name: str) -> type[c_int]:
    """The type of a field that holds a C++ enumerator with `int` as its type.

    Args:
        name: Qualified name in C++.
    """
    return type(name, (_Enum,), {"CPP_NAME": name})


Declaration = type[DeviceStruct] | type[DeviceEnum] | DeviceConstant


def _cpp_type(kind: type[Any]) -> str:
    """The C++ spelling of a field's type."""
    if issubclass(kind, ctypes.Array):
        element: Any = kind._type_
        return f"{_cpp_type(element)}[{kind._length_}]"
    return _SCALARS[kind] if kind in _SCALARS else kind.CPP_NAME


def _constant_check(constant: DeviceConstant) -> str:
    name, value = constant.cpp_name, constant.value
    return (
        f'static_assert({name} == {value}, "{name} has another value than the {value} of Python");'
    )


def _enum_checks(enumeration: type[DeviceEnum]) -> Iterator[str]:
    for member in enumeration:
        yield (
            f"static_assert({member.cpp_name} == {member.value}, "
            f'"{enumeration.__name__}.{member.name} has another value than in Python");'
        )


def _struct_checks(struct: type[DeviceStruct]) -> Iterator[str]:
    cpp, name = struct.CPP_NAME, struct.__name__
    for field, kind, *_ in struct._fields_:
        offset = getattr(struct, field).offset
        yield (
            f"static_assert(megakernel_is_same<decltype({cpp}::{field}), {_cpp_type(kind)}>, "
            f'"{name}.{field} has another type than in Python");'
        )
        yield (
            f"static_assert(MEGAKERNEL_OFFSET({cpp}, {field}) == {offset}, "
            f'"{name}.{field} has another offset than the {offset} of Python");'
        )
    size = ctypes.sizeof(struct)
    yield (
        f"static_assert(sizeof({cpp}) == {size}, "
        f'"{name} has another size than the {size} bytes of Python");'
    )


def _checks(declaration: Declaration) -> Iterator[str]:
    if isinstance(declaration, DeviceConstant):
        return iter([_constant_check(declaration)])
    if issubclass(declaration, DeviceEnum):
        return _enum_checks(declaration)
    return _struct_checks(declaration)


def declaration_checks(declarations: Sequence[Declaration]) -> str:
    """C++ text that compiles only if csrc agrees with Python.

    Args:
        declarations: What to check. The text follows the headers that declare them.
    """
    checks = chain.from_iterable(map(_checks, declarations))
    return "\n".join([_CHECK_DEFINITIONS, *checks, ""])
