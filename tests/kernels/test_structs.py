"""The declarations of Python against csrc: a difference fails the build with a sentence."""

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from enum import IntEnum, nonmember
from pathlib import Path
from typing import Any

import pytest

from megakernel_common.kernels.declarations import (
    Declaration,
    DeviceConstant,
    DeviceEnum,
    DeviceStruct,
    declaration_checks,
    pointer,
)
from megakernel_common.kernels.program import CSRC
from megakernel_stt.kernels import conformer_structs, transducer_structs
from megakernel_stt.kernels.conformer_structs import CONFORMER_DECLARATIONS
from megakernel_stt.kernels.transducer_structs import TRANSDUCER_DECLARATIONS
from megakernel_tts.kernels import align_structs, codec_structs, structs
from megakernel_tts.kernels.align_structs import ALIGN_DECLARATIONS
from megakernel_tts.kernels.codec import codec_program
from megakernel_tts.kernels.codec_structs import CODEC_DECLARATIONS
from megakernel_tts.kernels.structs import (
    DECODE_DECLARATIONS,
    MIN_FRAMES,
    NetworkSampling,
    Params,
    StreamParams,
)
from tests.emulator.build import FOLDER

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


def compile_checks(declarations: Sequence[Declaration], program: str = "decode") -> str:
    """Compiles the checks behind the real headers, and returns the compiler's errors."""
    macros = [("MEGAKERNEL_EMULATOR", ""), ("MEGAKERNEL_MODEL", "ModelTiny")]
    macros += codec_program().definitions
    text = "".join(f"#define {macro} {value}\n" for macro, value in macros) + (
        f'#include "{CSRC}/{program}/kernels.cuh"\n{declaration_checks(declarations)}'
    )
    options = ["-std=c++20", "-march=x86-64-v3", "-fsyntax-only", f"-I{FOLDER}"]
    command = ["g++", *options, "-x", "c++", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True).stderr


def changed(struct: type[DeviceStruct], fields: Any) -> type[DeviceStruct]:
    """A declaration of the same struct with other fields."""
    names = {"__slots__": (), "CPP_NAME": struct.CPP_NAME, "_fields_": fields}
    return type(struct.__name__, (DeviceStruct,), names)


@needs_compiler
@pytest.mark.parametrize(
    ("program", "declarations"),
    [
        ("decode", DECODE_DECLARATIONS),
        ("codec", CODEC_DECLARATIONS),
        ("align", ALIGN_DECLARATIONS),
        ("transducer", TRANSDUCER_DECLARATIONS),
        ("conformer", CONFORMER_DECLARATIONS),
    ],
)
def test_the_declarations_agree_with_the_sources(
    program: str, declarations: Sequence[Declaration]
) -> None:
    assert compile_checks(declarations, program) == ""


@needs_compiler
def test_a_difference_fails_the_build_with_the_name_of_the_field() -> None:
    fields = [*StreamParams._fields_]
    swapped = [fields[0], fields[2], fields[1], *fields[3:]]
    retyped = [(name, ctypes.c_uint if name == "slot" else kind) for name, kind, *_ in fields]
    renamed = [("slots" if name == "slot" else name, kind) for name, kind, *_ in fields]
    pointed = [
        (name, pointer("const int") if name == "talker_head" else kind)
        for name, kind, *_ in Params._fields_
    ]
    changes = [(StreamParams, one) for one in (swapped, retyped, renamed, fields[:-1])]
    structs = [changed(struct, one) for struct, one in [*changes, (Params, pointed)]]
    errors = compile_checks(structs).replace("‘slots’", "slots")
    for sentence in (
        "StreamParams.num_frames has another offset than the 4 of Python",
        "StreamParams.slot has another type than in Python",
        "has no member named slots",
        "StreamParams has another size than the 120 bytes of Python",
        "Params.talker_head has another type than in Python",
    ):
        assert sentence in errors, errors


@needs_compiler
def test_another_value_of_an_enumerator_fails_the_build() -> None:
    class EndReason(DeviceEnum):
        EOS = 1
        NON_FINITE = 3

    errors = compile_checks((EndReason,))
    assert "EndReason.NON_FINITE has another value than in Python" in errors
    assert "EOS" not in errors


@needs_compiler
def test_another_value_of_an_enumerator_of_the_codec_fails_the_build() -> None:
    class Epilogue(DeviceEnum):
        CPP_NAMESPACE = nonmember("megakernel::codec")
        SNAKE = 1
        ROPE_QKV = 3

    errors = compile_checks([Epilogue], "codec")
    assert "Epilogue.ROPE_QKV has another value than in Python" in errors
    assert "SNAKE" not in errors


@needs_compiler
def test_another_value_of_a_constant_fails_the_build() -> None:
    errors = compile_checks([DeviceConstant("megakernel::kMinFrames", MIN_FRAMES + 1)])
    assert "megakernel::kMinFrames has another value than the 3 of Python" in errors


def test_builds_check_every_struct_and_enumeration() -> None:
    for module, declarations in (
        (structs, DECODE_DECLARATIONS),
        (codec_structs, CODEC_DECLARATIONS),
        (align_structs, ALIGN_DECLARATIONS),
        (transducer_structs, TRANSDUCER_DECLARATIONS),
        (conformer_structs, CONFORMER_DECLARATIONS),
    ):
        declared = {
            kind
            for kind in vars(module).values()
            if isinstance(kind, type)
            and kind.__module__ == module.__name__
            and issubclass(kind, (ctypes.Structure, IntEnum))
        }
        assert declared - {DeviceStruct, DeviceEnum} <= {*declarations}


def test_an_unknown_field_cannot_be_set() -> None:
    with pytest.raises(AttributeError):
        NetworkSampling().temprature = 1.0


def test_every_struct_has_one_declaration() -> None:
    """Other modules declare none. The server's messages never reach a device."""
    root = Path(__file__).parents[2]
    server = root / "megakernel_tts" / "server"
    packages = (root / name for name in ("megakernel_common", "megakernel_stt", "megakernel_tts"))
    for file in (file for package in packages for file in package.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        packs = "struct.Struct(" in text and not file.is_relative_to(server)
        declares = "ctypes.Structure)" in text or packs
        declaring = file.name.endswith("structs.py") or file.name == "declarations.py"
        assert not declares or declaring, file
