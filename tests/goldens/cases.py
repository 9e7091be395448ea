"""Requests that are compared with the official package, shared by `make.py` and the tests."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megakernel_tts.model.config import Kind
from megakernel_tts.model.random_checkpoint import Size
from megakernel_tts.text.prompt import PromptLayout

Model = Size | Literal["demo"]  # random checkpoints and the demo voice

FRAMES = 16
REFERENCE_TEXT = "the quick brown fox"
TEXT = "hello to the world, this is a test."
LONG = " ".join([TEXT] * 4)


@dataclass(frozen=True)
class Case:
    """One request."""

    name: str
    kind: Kind
    text: str
    layout: PromptLayout
    language: str = "English"
    speaker: str | None = None
    instruct: str | None = None
    reference: str | None = None  # "x-vector" or "in-context"


CASES = (
    Case("cv-full", "custom_voice", TEXT, "full", speaker="Ryan"),
    Case("cv-streaming", "custom_voice", TEXT, "streaming", speaker="Ryan"),
    Case("cv-auto", "custom_voice", TEXT, "full", language="Auto", speaker="Serena"),
    Case("cv-dialect", "custom_voice", "你好，世界。", "full", language="Auto", speaker="eric"),
    Case("cv-chinese-dialect", "custom_voice", TEXT, "full", language="Chinese", speaker="Dylan"),
    Case("cv-nobody", "custom_voice", TEXT, "full"),
    Case("cv-instruct", "custom_voice", TEXT, "full", speaker="Ryan", instruct="Speak slowly"),
    Case("vd-full", "voice_design", TEXT, "full", instruct="a warm voice"),
    Case("vd-streaming", "voice_design", TEXT, "streaming", instruct="a warm voice"),
    Case("base-x-streaming", "base", TEXT, "streaming", reference="x-vector"),
    Case("base-x-full", "base", TEXT, "full", reference="x-vector"),
    Case("base-icl-streaming", "base", TEXT, "streaming", reference="in-context"),
    Case("base-icl-full", "base", TEXT, "full", reference="in-context"),
    Case("base-icl-long", "base", LONG, "streaming", language="Auto", reference="in-context"),
)

SPOKEN = "Your order is on its way, and it will arrive at 7:30 tonight."
SPANISH = "Su pedido está en camino y llegará esta noche a las siete y media."
DEMO_CASES = (
    Case("demo-full", "custom_voice", SPOKEN, "full", speaker="Clara"),
    Case("demo-streaming", "custom_voice", SPOKEN, "streaming", speaker="Henry"),
    Case("demo-auto", "custom_voice", SPOKEN, "full", language="Auto", speaker="Henry"),
    Case("demo-spanish", "custom_voice", SPANISH, "full", language="Spanish", speaker="Lucia"),
)

# Model -> kinds, entries of a codebook. The small model has the released 2,048 entries. The large
# one has 256, with shifted ids, so that hard-coded ids would fail. There is no 0.6B VoiceDesign.
CHECKPOINTS: dict[Size, tuple[tuple[Kind, ...], int]] = {
    "0b6": (("custom_voice", "base"), 2048),
    "1b7": (("custom_voice", "base", "voice_design"), 256),
}


def cases(model: Model) -> list[Case]:
    """The cases of a model. The 0.6B models do not support instructions."""
    if model == "demo":
        return list(DEMO_CASES)
    kinds, _ = CHECKPOINTS[model]
    return [case for case in CASES if case.kind in kinds and not (model == "0b6" and case.instruct)]


def reference_audio(seconds: float = 2.03) -> NDArray[np.float32]:
    """A reference recording: a tone with noise, at 24 kHz."""
    time_s = np.arange(int(24000 * seconds)) / 24000
    noise = np.random.RandomState(0).standard_normal(time_s.size)
    return (0.3 * np.sin(2 * np.pi * 180 * time_s) + 0.05 * noise).astype(np.float32)


LONG_REFERENCE = 12.5  # seconds: an encoder with windows would differ after 10 s


def codec_codes(codes: int) -> NDArray[np.int64]:
    """Random frames [330, 16], more than one chunk of the official decoder."""
    return np.random.RandomState(5).randint(0, codes, (330, 16)).astype(np.int64)


def tokenizer_texts() -> tuple[str, ...]:
    """Texts whose token ids are compared."""
    return (
        TEXT,
        "  helloWorld OpenAI iPhone 3.14 1,000€ don't I'LL we've  ",
        "naïve e\u0301te\u0301 Ångström ﬁne",
        "你好，世界。今天天气真好！",
        "नमस्ते दुनिया — สวัสดีชาวโลก",
        "👩‍👩‍👧‍👦 ok 🏳️‍🌈!!\n\nnew  paragraph\t tab",
        "안녕하세요 세계",
        "OpenAI iPhone helloWorld  4 1,234 a,b it's we'll ok!!\n\n\tnext  !\r\n\t\tand \n x",
    )
