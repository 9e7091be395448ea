"""Validation of the codec: encodes and decodes held-out recordings."""

import wave

import numpy as np
import torch
from torch import Tensor

from examples.train_voice.codec_model import CodecModel
from examples.train_voice.layout import Work
from examples.train_voice.phonemes import VOICES
from examples.train_voice.recordings import Recordings
from examples.train_voice.spectral import Spectra

_NUM_MEASURED = 48  # utterances
_NUM_SAMPLES = 2  # per voice
_SAMPLE_RATE = 24_000


class Resynthesis:
    """Encodes and decodes held-out recordings with the current parameters of a codec."""

    def __init__(
        self,
        work: Work,
        stage: str,
        model: CodecModel,
        recordings: Recordings,
    ) -> None:
        """Prepares the validation.

        Args:
            work: The run.
            stage: Folder of the samples.
            model: The codec.
            recordings: The recordings.
        """
        self._work, self._stage = work, stage
        self._model, self._recordings = model, recordings
        self._spectra = Spectra(model.quantizer.books.device)

    def measure(self) -> dict[str, float]:
        """Mean distances of log-mels and, for each voice, of phases; entries in effective use."""
        distances: list[Tensor] = []
        phases: dict[str, list[float]] = {}
        found: list[Tensor] = []
        names, speakers = list(VOICES), np.concatenate(self._recordings.tables["speaker"])
        for utterance in self._recordings.held_out[:_NUM_MEASURED]:
            original, codes = self._read(utterance)
            found.append(codes)
            decoded = self._decode(codes)
            distances.append(self._spectra.mel_distance(decoded, original))
            phase = float(self._spectra.phase_distance(decoded, original))
            phases.setdefault(names[speakers[utterance]], []).append(phase)
        entries = self._model.quantizer.books.shape[1]
        used = [_perplexity(column, entries) for column in torch.cat(found).t()]
        return {
            "held_mel": float(torch.stack(distances).mean()),
            "held_perplexity_0": used[0],
            "held_perplexity_rest": float(np.mean(used[1:])),
            "held_perplexity_least": min(used),
            **{f"held_phase_{name}": float(np.mean(each)) for name, each in phases.items()},
        }

    def write_samples(self) -> None:
        """Writes held-out recordings of every voice and their resynthesis as WAV files."""
        speakers = np.concatenate(self._recordings.tables["speaker"])
        texts = np.concatenate(self._recordings.tables["text"])
        held_out = self._recordings.held_out
        for i, voice in enumerate(VOICES):
            for utterance in held_out[speakers[held_out] == i][:_NUM_SAMPLES]:
                name = f"{voice}-{texts[utterance]:06d}"
                original, codes = self._read(utterance)
                self._write("recordings", name, original)
                self._write(self._stage, name, self._decode(codes))

    @torch.no_grad()
    def _read(self, utterance: np.int64) -> tuple[Tensor, Tensor]:
        """Waveform [1, samples] of a recording, and its codes [frames, groups]."""
        original, _ = self._recordings.whole(np.array([utterance]))
        semantic, acoustic = self._model.embed(original)
        codes = self._model.quantizer.encode(semantic[0], acoustic[0])
        return original, codes

    @torch.no_grad()
    def _decode(self, codes: Tensor) -> Tensor:
        return self._model.decoder(self._model.embed_codes(codes[None]))

    def _write(self, folder: str, name: str, samples: Tensor) -> None:
        file = self._work.folder / "samples" / folder / f"{name}.wav"
        file.parent.mkdir(parents=True, exist_ok=True)
        pcm = (32767 * samples[0].clamp(-1, 1)).round().to(torch.int16)
        with wave.open(str(file), "wb") as out:
            out.setnchannels(1)
            out.setsampwidth(2)
            out.setframerate(_SAMPLE_RATE)
            out.writeframes(pcm.cpu().numpy().tobytes())


def _perplexity(codes: Tensor, entries: int) -> float:
    share = torch.bincount(codes, minlength=entries) / len(codes)
    return float((-(share * (share + 1e-9).log()).sum()).exp())
