"""Trains the codec's decoder further with discriminators; the codes do not change.

The losses are those of `codec`, spectra at several resolutions, and of HiFi-GAN: least-squares
scores, and features of discriminators by period and by spectrum.

python -m examples.train_voice.vocoder WORK --minutes 6
"""

import argparse
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from examples.train_voice.codec_model import CodecModel
from examples.train_voice.discriminators import (
    Discriminators,
    adversarial_loss,
    discriminator_loss,
    feature_loss,
)
from examples.train_voice.layout import Work, append_json, summary
from examples.train_voice.phone_recogniser import PhoneRecogniser
from examples.train_voice.recordings import CODEC_HOURS, Recordings
from examples.train_voice.resynthesis import Resynthesis
from examples.train_voice.spectral import Spectra
from examples.train_voice.speech import FRAME
from examples.train_voice.training import (
    Average,
    Budget,
    CapturedStep,
    adamw,
    fast_type,
    load_state,
    pick_device,
    save_state,
    set_rate,
)

_PEAK_RATE = 2e-4
_BETAS, _DECAY = (0.8, 0.99), 1e-3
_WEIGHTS = {
    "magnitudes": 0.5, "phases": 1.5, "recognised": 2.5, "adversarial": 0.2, "features": 0.5,
}  # fmt: skip
_DISCRIMINATOR_LOSSES = "adversarial", "features"
_MAX_NORMS = 100.0, 200.0  # of the gradients of decoder and discriminators
_DISCRIMINATOR_STEPS = 300  # first steps, whose adversarial losses do not train the decoder
_RAMP_STEPS = 1000  # after these, over which the adversarial losses reach their weights
# Of four steps one decodes the start of its crops, one has a quarter of the crops, four times as
# long.
_INTERVAL, _START_STEP, _LONG_STEP = 4, 0, 2
_CORRUPTION_SHARE = 0.15  # of the later codes in a quarter of the crops, as in sampled codes
_CORRUPTION_FROM = 6  # group
_LOG_EVERY = 99  # odd, so that steps of all kinds are logged


class _Training:
    """Optimisers, and a step of the discriminators and the decoder."""

    def __init__(self, model: CodecModel, device: torch.device, channels: int) -> None:
        self.model = model
        self.discriminators = Discriminators(Spectra(device), channels).to(device)
        self._spectra = Spectra(device)
        self.recogniser = PhoneRecogniser(self._spectra).to(device).requires_grad_(False)
        self._fast = fast_type(device)
        self._device = device
        self._parameters = model.decoder_parameters(), list(self.discriminators.parameters())
        self._optimizers = [adamw(p, betas=_BETAS, decay=_DECAY) for p in self._parameters]

    def set_rate(self, rate: float) -> None:
        """Sets the learning rate of the next step."""
        for optimizer in self._optimizers:
            set_rate(optimizer, rate)

    def step(self, wave: Tensor, weight: Tensor, *, at_start: bool) -> dict[str, Tensor]:
        """Trains the decoder and the discriminators, both on the same forward pass.

        Args:
            wave: [crops, samples].
            weight: Of the adversarial losses, 0 to 1.
            at_start: Whether the start of the crops is decoded.
        """
        q = self.model.embed_codes(_codes(self.model, wave))
        decoded, target = self.model.decode_part(q, wave, at_start=at_start)
        # Within an utterance the first frame cannot be decoded without its context.
        first = FRAME if at_start and decoded.shape[1] > FRAME else 0
        enabled = self._fast != torch.float32
        with torch.autocast(self._device.type, self._fast, enabled=enabled, cache_enabled=False):
            real = self.discriminators(target[:, first:])
            fake = self.discriminators(decoded[:, first:])
        losses = {
            "magnitudes": self._spectra.magnitude_distance(decoded, target),
            "phases": self._spectra.phase_distance(decoded, target),
            "recognised": self.recogniser.distance(decoded, target),
            "adversarial": adversarial_loss(fake),
            "features": feature_loss(real, fake),
        }
        weights = {
            name: w * weight if name in _DISCRIMINATOR_LOSSES else w for name, w in _WEIGHTS.items()
        }
        decoding = torch.stack([weights[name] * loss for name, loss in losses.items()]).sum()
        discriminating = discriminator_loss(real, fake)
        # Both gradients before both steps: they belong to the parameters of the forward pass.
        for loss, parameters in zip((decoding, discriminating), self._parameters, strict=True):
            for p in parameters:
                p.grad = None
            loss.backward(inputs=parameters, retain_graph=loss is decoding)
        norms = [
            torch.nn.utils.clip_grad_norm_(parameters, limit)
            for parameters, limit in zip(self._parameters, _MAX_NORMS, strict=True)
        ]
        for optimizer in self._optimizers:
            optimizer.step()
        return {
            **{name: loss.detach() for name, loss in losses.items()},
            "wave_mel": self._spectra.mel_distance(decoded.detach(), target),
            "discriminator": discriminating.detach(),
            "norm_decoder": norms[0],
            "norm_discriminator": norms[1],
        }


@torch.no_grad()
def _codes(model: CodecModel, wave: Tensor) -> Tensor:
    """Codes [crops, frames, groups] of crops; some later codes of some crops are random."""
    semantic, acoustic = model.embed(wave)
    codes = model.quantizer.encode(semantic.flatten(0, 1), acoustic.flatten(0, 1))
    codes = codes.unflatten(0, semantic.shape[:2])
    corrupted = torch.rand(codes.shape, device=codes.device) < _CORRUPTION_SHARE
    corrupted[..., :_CORRUPTION_FROM] = False
    corrupted[len(wave) // 4 :] = False
    return torch.where(corrupted, torch.randint_like(codes, model.quantizer.books.shape[1]), codes)


def train(work: Work, minutes: float, crops: int, frames: int, channels: int, seed: int) -> None:
    """Trains for the given time; resumes from the state of an earlier call."""
    device, file = pick_device(), work.state("vocoder")
    discriminators_file = work.state("discriminators")
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model = CodecModel(work.codec_config(), device)
    codec = load_state(work.state("codec"), device)
    state = load_state(file, device) if file.exists() else codec | {"used": 0.0}
    model.load(state)
    used_s = state["used"]
    recordings = Recordings(work, device, CODEC_HOURS)
    recordings.wait()
    training = _Training(model, device, channels)
    training.recogniser.load_state_dict(codec["recogniser"])
    if discriminators_file.exists():
        training.discriminators.load_state_dict(load_state(discriminators_file, device))
    judged_steps = _DISCRIMINATOR_STEPS + _RAMP_STEPS if discriminators_file.exists() else 0
    average = Average(model.parameters.values())
    budget, steps, step_idx = Budget(minutes, used_s), dict[tuple[bool, bool], CapturedStep](), 0
    weight = torch.zeros((), device=device)
    resynthesis = Resynthesis(work, "vocoder", model, recordings)

    def save() -> None:
        save_state(file, model.state(average.tensors) | {"used": budget.used_s})
        tensors = training.discriminators.state_dict()
        save_state(discriminators_file, {k: tensor.half() for k, tensor in tensors.items()})
        with average.applied():
            times = {"step": step_idx, "seconds": budget.used_s}
            append_json(work.log("vocoder"), times | resynthesis.measure())

    with tqdm(desc="vocoder", unit=" steps", disable=None) as progress:
        while budget.share < 1:
            if step_idx % 10 == 0 and not recordings.complete:
                recordings.poll()
            kind = step_idx % _INTERVAL
            long, at_start = kind == _LONG_STEP, kind == _START_STEP
            num_crops, num_frames = (max(1, crops // 4), 4 * frames) if long else (crops, frames)
            wave, _ = recordings.crops(num_crops, num_frames, rng)
            num_ramped = judged_steps + step_idx - _DISCRIMINATOR_STEPS
            weight.fill_(min(1.0, max(0.0, num_ramped / _RAMP_STEPS)))
            training.set_rate(budget.rate(_PEAK_RATE))
            if (long, at_start) not in steps:
                step = partial(training.step, at_start=at_start)
                steps[long, at_start] = CapturedStep(step, wave, weight)
            metrics = steps[long, at_start](wave, weight)
            if step_idx % 4 == 0:
                average.update(step_idx)
            if step_idx % _LOG_EVERY == 0:
                values = {name: float(value) for name, value in metrics.items()}
                values |= {"at_start": float(at_start), "long": float(long)}
                progress.set_postfix({k: f"{v:.3f}" for k, v in values.items()})
                times = {"step": step_idx, "seconds": budget.used_s}
                append_json(work.log("vocoder"), times | values)
            if budget.due:
                save()
            step_idx += 1
            progress.update()
    save()
    with average.applied():
        resynthesis.write_samples()


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("work", type=Path, help="the run's folder, after `codec`")
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--crops", type=int, default=16, help="crops of a step")
    parser.add_argument("--frames", type=int, default=16, help="frames of a crop")
    parser.add_argument(
        "--channels", type=int, default=32, help="channels of the discriminators' first layers"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    train(
        Work(options.work),
        options.minutes,
        options.crops,
        options.frames,
        options.channels,
        options.seed,
    )


if __name__ == "__main__":
    main()
