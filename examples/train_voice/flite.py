"""The flite synthesiser through ctypes: text to samples, with the times of phones and words."""

import ctypes as c
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SAMPLE_RATE = 16_000
PHONES = (
    "pau aa ae ah ao aw ax ay b ch d dh eh er ey f g hh ih iy jh k l m n ng ow oy p r s sh t th uh "
    "uw v w y z zh"
).split()
_LOUD = 250  # peak of 10 ms of speech, of 32767
_BEFORE, _AFTER = 960, 2240  # samples of silence kept around speech: 60 and 140 ms


class _Wave(c.Structure):
    _fields_ = (
        ("type", c.c_char_p),
        ("sample_rate", c.c_int),
        ("num_samples", c.c_int),
        ("num_channels", c.c_int),
        ("samples", c.POINTER(c.c_short)),
    )


@dataclass(frozen=True)
class Segment:
    """Synthesised speech.

    Attributes:
        samples: int16 [samples] at 16 kHz.
        ends: [phones], end of each phone in seconds.
        phones: [phones], indices into `PHONES`.
        words: [phones], index of the space-separated word of each phone, or -1.
    """

    samples: NDArray[np.int16]
    ends: NDArray[np.float64]
    phones: NDArray[np.int64]
    words: NDArray[np.int64]


class Flite:
    """The library and its voices slt and rms."""

    def __init__(self) -> None:
        """Loads the libraries.

        Raises:
            OSError: flite is not installed.
        """
        base = c.CDLL("libflite.so.1", mode=c.RTLD_GLOBAL)
        names = ("usenglish", "cmulex", "cmu_us_slt", "cmu_us_rms")
        parts = {n: c.CDLL(f"libflite_{n}.so.1", mode=c.RTLD_GLOBAL) for n in names}
        pointer, text = c.c_void_p, c.c_char_p
        for name, result, arguments in (
            ("flite_synth_text", pointer, [text, pointer]),
            ("utt_wave", c.POINTER(_Wave), [pointer]),
            ("utt_relation", pointer, [pointer, text]),
            ("relation_head", pointer, [pointer]),
            ("item_next", pointer, [pointer]),
            ("item_feat_string", text, [pointer, text]),
            ("item_feat_float", c.c_float, [pointer, text]),
            ("path_to_item", pointer, [pointer, text]),
            ("item_equal", c.c_int, [pointer, pointer]),
            ("delete_utterance", None, [pointer]),
        ):
            function = getattr(base, name)
            function.restype, function.argtypes = result, arguments
        base.flite_init()
        self._lib = base
        self._voices: dict[str, int] = {}
        for voice in ("slt", "rms"):
            register = getattr(parts[f"cmu_us_{voice}"], f"register_cmu_us_{voice}")
            register.restype, register.argtypes = pointer, [pointer]
            self._voices[voice] = register(None)

    def speak(self, text: str, voice: str) -> Segment:
        """Synthesises a text and trims the silence around it."""
        lib = self._lib
        utterance = lib.flite_synth_text(text.encode("ascii", "ignore"), self._voices[voice])
        try:
            wave = lib.utt_wave(utterance).contents
            assert wave.sample_rate == SAMPLE_RATE
            samples = np.ctypeslib.as_array(wave.samples, (wave.num_samples,)).copy()
            tokens = self._items(utterance, b"Token")
            segments = self._items(utterance, b"Segment")
            words = [self._token(segment, tokens) for segment in segments]
            if len(tokens) != len(text.split()):
                words = [-1] * len(words)
            ends = [lib.item_feat_float(s, b"end") for s in segments]
            names = [lib.item_feat_string(s, b"name").decode() for s in segments]
        finally:
            lib.delete_utterance(utterance)
        phones = [PHONES.index(n) if n in PHONES else 0 for n in names]
        first, last = _speech(samples)
        shifted = np.array(ends) - first / SAMPLE_RATE
        return Segment(samples[first:last], shifted, np.array(phones), np.array(words))

    def _items(self, utterance: int, relation: bytes) -> list[int]:
        items: list[int] = []
        item = self._lib.relation_head(self._lib.utt_relation(utterance, relation))
        while item:
            items.append(item)
            item = self._lib.item_next(item)
        return items

    def _token(self, segment: int, tokens: list[int]) -> int:
        path = b"R:SylStructure.parent.parent.R:Token.parent"
        found = self._lib.path_to_item(segment, path)
        if not found:
            return -1
        return next((i for i, t in enumerate(tokens) if self._lib.item_equal(found, t)), -1)


def _speech(samples: NDArray[np.int16]) -> tuple[int, int]:
    """First and last sample of the speech, with a margin of silence."""
    step = SAMPLE_RATE // 100
    whole = np.abs(samples[: len(samples) // step * step].astype(np.int32)).reshape(-1, step)
    loud = np.flatnonzero(whole.max(1) > _LOUD)
    if not len(loud):
        return 0, len(samples)
    start, end = int(loud[0]) * step - _BEFORE, (int(loud[-1]) + 1) * step + _AFTER
    return max(0, start), min(len(samples), end)
