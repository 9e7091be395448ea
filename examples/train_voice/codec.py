"""Trains the codec: first its encoder to predict speech features, then all of it with codebooks.

python -m examples.train_voice.codec WORK --minutes 7.5
"""

import argparse
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from examples.train_voice.codec_model import CodecModel
from examples.train_voice.codec_net import Quantizer
from examples.train_voice.layout import Work, append_json, summary
from examples.train_voice.phone_recogniser import PhoneRecogniser
from examples.train_voice.phonemes import PHONES
from examples.train_voice.recordings import CODEC_HOURS, Recordings
from examples.train_voice.resynthesis import Resynthesis
from examples.train_voice.spectral import Spectra
from examples.train_voice.training import (
    Average,
    Budget,
    CapturedStep,
    adamw,
    load_state,
    pick_device,
    save_state,
    set_rate,
)

_PEAK_RATE = 1e-3
_CODEBOOKS_FROM, _LONG_CROPS_FROM = 0.1, 0.85  # shares of the time
_PHONE_WEIGHT, _PHASE_WEIGHT, _RECOGNISED_WEIGHT = 2.0, 3.0, 5.0
_BETAS, _DECAY = (0.8, 0.99), 1e-3
_REDUCED_LEVELS_INTERVAL = 4  # one crop in four uses only the first codebooks
_START_INTERVAL = 4  # one step in four decodes the start of its crops
_LOG_EVERY = 99  # odd, so that steps of all kinds are logged


class _Training:
    """Optimisers of the codec and of the recogniser, and the two kinds of steps."""

    def __init__(self, model: CodecModel, device: torch.device) -> None:
        self.model = model
        self.parameters = list(model.parameters.values())
        self._spectra = Spectra(device)
        self.recogniser = PhoneRecogniser(self._spectra).to(device)
        self._recogniser_parameters = list(self.recogniser.parameters())
        self._optimizer, self._recogniser_optimizer = (
            adamw(p, betas=_BETAS, decay=_DECAY)
            for p in (self.parameters, self._recogniser_parameters)
        )

    def set_rate(self, rate: float) -> None:
        """Sets the learning rate of the next step."""
        for optimizer in (self._optimizer, self._recogniser_optimizer):
            set_rate(optimizer, rate)

    def features_step(self, wave: Tensor, phones: Tensor, _: Tensor) -> dict[str, Tensor]:
        """Trains the encoder alone to predict phones and log-mels from its embedding.

        Codebooks are initialised from the trained embedding later; codebooks that are trained
        together with an untrained encoder collapse.
        """
        recogniser = self._train_recogniser(wave, phones)
        semantic, acoustic = self.model.embed(wave)
        q = self.model.join(semantic.detach(), acoustic)
        mel, phone = self._mel_loss(wave, q), self._phone_loss(phones, semantic)
        size = q.square().mean() + semantic.square().mean()
        self._descend(5 * mel + phone + 1e-3 * size, limit=5.0)
        return {"mel": mel.detach(), "phone": phone.detach(), "recogniser": recogniser}

    def codec_step(
        self, wave: Tensor, phones: Tensor, active: Tensor, *, at_start: bool
    ) -> dict[str, Tensor]:
        """Trains encoder, codebooks and decoder together; active: [groups, crops].

        Only the phones train the semantic projection. With gradients of the waveform and the
        log-mels codebook 0 distinguishes loudness and pitch, and has too few entries for phones.
        """
        model, frames = self.model, phones.shape[1]
        recogniser = self._train_recogniser(wave, phones)
        exact, acoustic = model.embed(wave)
        quantized = model.quantizer(
            exact.flatten(0, 1), acoustic.flatten(0, 1), active.repeat_interleave(frames, 1)
        )
        semantic = quantized.semantic.unflatten(0, (-1, frames))
        acoustic = quantized.acoustic.unflatten(0, (-1, frames))
        q = model.join(semantic.detach(), acoustic)
        mel, phone = self._mel_loss(wave, q), self._phone_loss(phones, semantic)
        exact_phone = self._phone_loss(phones, exact)
        decoded, target = model.decode_part(q, wave, at_start=at_start)
        magnitudes = self._spectra.magnitude_distance(decoded, target)
        phases = self._spectra.phase_distance(decoded, target)
        recognised = self.recogniser.distance(decoded, target)
        waveform = magnitudes + _PHASE_WEIGHT * phases + _RECOGNISED_WEIGHT * recognised
        phone_losses = _PHONE_WEIGHT * (phone + 0.5 * exact_phone)
        commitment = 0.25 * quantized.commitment
        norm = self._descend(waveform + commitment + phone_losses + 5 * mel, limit=20.0)
        complete = active.amin(0) > 0  # crops that use all codebooks
        pair = (decoded.detach() * complete[:, None], target * complete[:, None])
        return {
            "magnitudes": magnitudes.detach(),
            "phases": phases.detach(),
            "recognised": recognised.detach(),
            "recogniser": recogniser,
            "mel": mel.detach(),
            "phone": phone.detach(),
            "exact_phone": exact_phone.detach(),
            "commit": quantized.commitment.detach(),
            "norm": norm,
            "wave_mel": self._spectra.mel_distance(*pair) / complete.float().mean(),
        }

    def _mel_loss(self, wave: Tensor, q: Tensor) -> Tensor:
        with torch.no_grad():
            target = self._spectra.codec_frame_mels(wave)
        return (F.linear(q, self.model.parameters["mel_head"]) - target).abs().mean()

    def _phone_loss(self, phones: Tensor, semantic: Tensor) -> Tensor:
        logits = F.linear(semantic, self.model.parameters["phone_head"])
        logits = logits.unflatten(-1, (2, len(PHONES))).flatten(0, 2)
        return F.cross_entropy(logits, phones.flatten(), ignore_index=-100)

    def _descend(self, loss: Tensor, limit: float) -> Tensor:
        """Descends along a gradient of limited norm; gives the norm."""
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward(inputs=self.parameters)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, limit)
        self._optimizer.step()
        return norm

    def _train_recogniser(self, wave: Tensor, phones: Tensor) -> Tensor:
        """Trains the recogniser on recordings; gives its loss."""
        self._recogniser_optimizer.zero_grad(set_to_none=True)
        loss = self.recogniser.loss(wave, phones)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._recogniser_parameters, 1.0)
        self._recogniser_optimizer.step()
        return loss.detach()


def _active(groups: int, crops: int, reduced: bool, rng: np.random.Generator) -> Tensor:
    """Draws the codebooks that each crop uses: [groups, crops], 1 if used; most crops use all."""
    num_used = np.full(crops, groups)
    if reduced:
        num_reduced = crops // _REDUCED_LEVELS_INTERVAL
        num_used[:num_reduced] = rng.integers(1, groups + 1, num_reduced)
    return torch.from_numpy((np.arange(groups)[:, None] < num_used).astype(np.float32))


def train(work: Work, minutes: float, crops: int, frames: int, seed: int) -> None:
    """Trains for the given time; resumes from the state of an earlier call."""
    device, file = pick_device(), work.state("codec")
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    config = work.codec_config()
    model = CodecModel(config, device)
    recordings = Recordings(work, device, CODEC_HOURS)
    recordings.wait()
    training, groups = _Training(model, device), config.decoder.num_groups
    used_s = 0.0
    if file.exists():
        state = load_state(file, device)
        model.load(state)
        training.recogniser.load_state_dict(state["recogniser"])
        used_s = state["used"]
    else:
        model.calibrate(recordings.crops(8, frames, rng)[0])
    average = Average(training.parameters)
    budget = Budget(minutes, used_s)
    steps: dict[tuple[bool, bool, bool], CapturedStep] = {}
    has_codebooks, step_idx = file.exists(), 0
    resynthesis = Resynthesis(work, "codec", model, recordings)

    def save() -> None:
        rest = {"recogniser": training.recogniser.state_dict(), "used": budget.used_s}
        save_state(file, model.state(average.tensors) | rest)
        with average.applied():
            times = {"step": step_idx, "seconds": budget.used_s}
            append_json(work.log("codec"), times | resynthesis.measure())

    with tqdm(desc="codec", unit=" steps", disable=None) as progress:
        while budget.share < 1:
            if step_idx % 50 == 0:
                recordings.poll()
            features = budget.share < _CODEBOOKS_FROM and not has_codebooks
            if not features and not has_codebooks:
                _start_codebooks(model, recordings, crops, frames, rng)
                average, has_codebooks = Average(training.parameters), True
            long = not features and budget.share > _LONG_CROPS_FROM
            num_crops, num_frames = (max(1, crops // 4), 4 * frames) if long else (crops, frames)
            wave, phones = recordings.crops(num_crops, num_frames, rng)
            active = _active(groups, num_crops, not long, rng).to(device, non_blocking=True)
            training.set_rate(budget.rate(_PEAK_RATE))
            at_start = not features and step_idx % _START_INTERVAL == 0
            kind = (features, long, at_start)
            if kind not in steps:
                codec_step = partial(training.codec_step, at_start=at_start)
                step = training.features_step if features else codec_step
                steps[kind] = CapturedStep(step, wave, phones, active)
            metrics = steps[kind](wave, phones, active)
            if step_idx % 4 == 0:
                average.update(step_idx)
            if step_idx % 20 == 10 and not features:
                model.quantizer.reset_unused()
            if step_idx % _LOG_EVERY == 0:
                values = {name: float(value) for name, value in metrics.items()}
                values |= _usage(model.quantizer) | {"at_start": float(at_start)}
                progress.set_postfix({k: f"{v:.3f}" for k, v in values.items()})
                times = {"step": step_idx, "seconds": budget.used_s, "frames": recordings.frames}
                append_json(work.log("codec"), times | values)
            if not features and budget.due:
                save()
            step_idx += 1
            progress.update()
    save()
    with average.applied():
        resynthesis.write_samples()


def _start_codebooks(
    model: CodecModel, recordings: Recordings, crops: int, frames: int, rng: np.random.Generator
) -> None:
    with torch.no_grad():
        semantic, acoustic = model.embed(recordings.crops(max(64, crops), frames, rng)[0])
    model.quantizer.initialise(semantic.flatten(0, 1), acoustic.flatten(0, 1))


def _usage(quantizer: Quantizer) -> dict[str, float]:
    perplexity = quantizer.perplexity()
    return {"used_first": float(perplexity[0]), "used_last": float(perplexity[-1])}


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("work", type=Path, help="the run's folder; `synthesis` may still run")
    parser.add_argument("--minutes", type=float, default=7.5)
    parser.add_argument("--crops", type=int, default=32, help="crops of a step")
    parser.add_argument("--frames", type=int, default=16, help="frames of a crop")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    train(Work(options.work), options.minutes, options.crops, options.frames, options.seed)


if __name__ == "__main__":
    main()
