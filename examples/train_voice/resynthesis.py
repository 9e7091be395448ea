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
_NUM_SAMPLES = 3  # per voice
_SAMPLE_RATE = 24_000


class Resynthesis:
    """Encodes and decodes held-out recordings with the current parameters of a codec."""

    def __init__(self, work: Work, stage: str, model: CodecModel, recordings: Recordings) -> None:
        self._work, self._stage = work, stage
        self._model, self._recordings = model, recordings
        self._spectra = Spectra(model.quantizer.books.device)

    def measure(self) -> dict[str, float]:
        """Mean distance of log-mels, and how many entries of the codebooks are used effectively."""
        distances: list[Tensor] = []
        codes: list[Tensor] = []
        for utterance in self._recordings.held_out[:_NUM_MEASURED]:
            original, found, decoded = self._run(utterance)
            codes.append(found)
            distances.append(self._spectra.mel_distance(decoded, original))
        entries = self._model.quantizer.books.shape[1]
        used = [_perplexity(column, entries) for column in torch.cat(codes).t()]
        return {
            "held_mel": float(torch.stack(distances).mean()),
            "held_perplexity_0": used[0],
            "held_perplexity_rest": float(np.mean(used[1:])),
            "held_perplexity_least": min(used),
        }

    def write_samples(self) -> None:
        """Writes held-out recordings of every voice and their resynthesis as WAV files."""
        speakers = np.concatenate(self._recordings.tables["speaker"])
        texts = np.concatenate(self._recordings.tables["text"])
        held_out = self._recordings.held_out
        for i, name in enumerate(VOICES):
            for utterance in held_out[speakers[held_out] == i][:_NUM_SAMPLES]:
                original, _, decoded = self._run(utterance)
                for folder, samples in (("recordings", original), (self._stage, decoded)):
                    self._write(f"{folder}/{name}-{texts[utterance]:06d}", samples[0])

    @torch.no_grad()
    def _run(self, utterance: np.int64) -> tuple[Tensor, Tensor, Tensor]:
        """Waveform [1, samples], codes [frames, groups] and decoded waveform of a recording."""
        model = self._model
        original, _ = self._recordings.whole(np.array([utterance]))
        semantic, acoustic = model.embed(original)
        codes = model.quantizer.encode(semantic[0], acoustic[0])
        return original, codes, model.decoder(model.embed_codes(codes[None]))

    def _write(self, name: str, samples: Tensor) -> None:
        file = self._work.folder / "samples" / f"{name}.wav"
        file.parent.mkdir(parents=True, exist_ok=True)
        pcm = (32767 * samples.clamp(-1, 1)).round().to(torch.int16)
        with wave.open(str(file), "wb") as out:
            out.setnchannels(1)
            out.setsampwidth(2)
            out.setframerate(_SAMPLE_RATE)
            out.writeframes(pcm.cpu().numpy().tobytes())


def _perplexity(codes: Tensor, entries: int) -> float:
    share = torch.bincount(codes, minlength=entries) / len(codes)
    return float((-(share * (share + 1e-9).log()).sum()).exp())
