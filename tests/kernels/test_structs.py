"""The declarations of the structs against csrc: a difference fails the build with a sentence."""

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megakernel_tts.kernels.program import CSRC
from megakernel_tts.kernels.structs import (
    DECODE_TYPES,
    DeviceEnum,
    DeviceStruct,
    Params,
    SamplingParams,
    SharedType,
    Stream,
    layout_checks,
    pointer,
)
from tests.emulator.build import FOLDER

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


def compile_checks(types: tuple[SharedType, ...]) -> str:
    """Compiles the checks behind the real headers, and returns the compiler's errors."""
    text = (
        "#define MEGAKERNEL_EMULATOR\n#define MEGAKERNEL_MODEL ModelTiny\n"
        f'#include "{CSRC}/decode/kernels.cuh"\n{layout_checks(types)}'
    )
    command = ["g++", "-std=c++20", "-fsyntax-only", f"-I{FOLDER}", "-x", "c++", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True).stderr


def changed(struct: type[DeviceStruct], fields: Any) -> type[DeviceStruct]:
    """A declaration of the same struct with other fields."""
    names = {"__slots__": (), "CPP_NAME": struct.CPP_NAME, "_fields_": fields}
    return type(struct.__name__, (DeviceStruct,), names)


@needs_compiler
def test_the_declarations_agree_with_the_sources() -> None:
    assert compile_checks(DECODE_TYPES) == ""


@needs_compiler
def test_a_difference_fails_the_build_with_the_name_of_the_field() -> None:
    fields = [*Stream._fields_]
    swapped = [fields[0], fields[2], fields[1], *fields[3:]]
    retyped = [(name, ctypes.c_uint if name == "slot" else kind) for name, kind, *_ in fields]
    renamed = [("slots" if name == "slot" else name, kind) for name, kind, *_ in fields]
    pointed = [
        (name, pointer("const int") if name == "talker_head" else kind)
        for name, kind, *_ in Params._fields_
    ]
    for struct, changes, sentence in (
        (Stream, swapped, "Stream.num_frames has another offset than the 4 of kernels/structs.py"),
        (Stream, retyped, "Stream.slot has another type than in kernels/structs.py"),
        (Stream, renamed, "has no member named .slots."),
        (Stream, fields[:-1], "Stream has another size than the 120 bytes of kernels/structs.py"),
        (Params, pointed, "Params.talker_head has another type than in kernels/structs.py"),
    ):
        errors = compile_checks((changed(struct, changes),))
        assert sentence.replace(".slots.", "") in errors.replace("‘slots’", ""), errors


@needs_compiler
def test_another_value_of_an_enumerator_fails_the_build() -> None:
    class EndReason(DeviceEnum):
        EOS = 1
        NON_FINITE = 3

    errors = compile_checks((EndReason,))
    assert "EndReason.NON_FINITE has another value than in kernels/structs.py" in errors
    assert "EOS" not in errors


def test_an_unknown_field_cannot_be_set() -> None:
    with pytest.raises(AttributeError):
        SamplingParams().temprature = 1.0


def test_every_struct_has_one_declaration() -> None:
    """Other modules of the package declare none."""
    package = Path(__file__).parents[2] / "megakernel_tts"
    for file in package.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        declares = "ctypes.Structure)" in text or "struct.Struct(" in text
        assert not declares or file.name.endswith("structs.py"), file
