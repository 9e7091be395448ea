"""Trains the codec's decoder further with discriminators; the codes do not change.

python -m examples.train_voice.vocoder WORK --minutes 10
"""

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from examples.train_voice.codec_model import CodecModel
from examples.train_voice.layout import Work, append_json, summary
from examples.train_voice.recordings import Recordings
from examples.train_voice.spectral import Discriminator, Spectra
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

_PEAK_RATE = 3e-4
_SKIPPED_SAMPLES = 1920  # at a crop's start, where the decoder has no context
_CORRUPTION_SHARE = 0.15  # of the later codes in a quarter of the crops, as in sampled codes
_CORRUPTION_FROM = 6  # group
_LOG_EVERY = 100


class _Training:
    """Optimisers, and a step of the discriminators and the decoder."""

    def __init__(self, model: CodecModel, device: torch.device, channels: int) -> None:
        self.model = model
        self.parameters = model.decoder_parameters()
        self._spectra = Spectra(device)
        self._discriminator = Discriminator(self._spectra, channels).to(device)
        self._fast = fast_type(device)
        self._device = device
        self.optimizer = adamw(self.parameters, betas=(0.8, 0.99), decay=1e-3)
        self.discriminator_optimizer = adamw(
            self._discriminator.parameters(), betas=(0.8, 0.99), decay=1e-3
        )

    def step(self, wave: Tensor, weight: Tensor) -> dict[str, Tensor]:
        """Trains on wave [crops, samples]; weight: of the adversarial losses, 0 to 1."""
        decoded = self.model.decoder(self.model.embed_codes(_codes(self.model, wave)))
        real, fake = wave[:, _SKIPPED_SAMPLES:], decoded[:, _SKIPPED_SAMPLES:]
        with self._autocast():
            scores_real, _ = self._discriminator(real)
            scores_fake, _ = self._discriminator(fake.detach())
        pairs = zip(scores_real, scores_fake, strict=True)
        losses = [F.relu(1 - r.float()).mean() + F.relu(1 + f.float()).mean() for r, f in pairs]
        discriminator = torch.stack(losses).mean()
        self.discriminator_optimizer.zero_grad(set_to_none=True)
        discriminator.backward()
        torch.nn.utils.clip_grad_norm_(self._discriminator.parameters(), 5.0)
        self.discriminator_optimizer.step()

        with self._autocast():
            with torch.no_grad():
                _, features_real = self._discriminator(real)
            scores, features = self._discriminator(fake)
        adversarial = -torch.stack([v.float().mean() for v in scores]).mean()
        feature_matching = torch.stack(
            [
                (a.float() - b.float()).abs().mean() / (a.float().abs().mean() + 1e-3)
                for a, b in zip(features_real, features, strict=True)
            ]
        ).mean()
        spectral = self._spectra.distance(decoded, wave)
        self.optimizer.zero_grad(set_to_none=True)
        (spectral + weight * (0.5 * adversarial + 2 * feature_matching)).backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 10.0)
        self.optimizer.step()
        return {
            "spectral": spectral.detach(),
            "discriminator": discriminator.detach(),
            "adversarial": adversarial.detach(),
            "feature_matching": feature_matching.detach(),
            "wave_mel": self._spectra.mel_distance(decoded.detach(), wave),
        }

    def _autocast(self) -> torch.autocast:
        enabled = self._fast != torch.float32
        return torch.autocast(self._device.type, self._fast, enabled=enabled, cache_enabled=False)


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
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model = CodecModel(work.codec_config(), device)
    state = load_state(file if file.exists() else work.state("codec"), device)
    model.load(state)
    used_s = state["used"] if file.exists() else 0.0
    recordings = Recordings(work, device)
    recordings.wait()
    training = _Training(model, device, channels)
    average = Average(model.parameters.values())
    budget, steps, step_idx = Budget(minutes, used_s), dict[bool, CapturedStep](), 0
    with tqdm(desc="vocoder", unit=" steps", disable=None) as progress:
        while budget.share < 1:
            if step_idx % 10 == 0 and not recordings.complete:
                recordings.poll()
            long = step_idx % 3 == 0
            num_crops, num_frames = (max(1, crops // 4), 4 * frames) if long else (crops, frames)
            wave, _ = recordings.crops(num_crops, num_frames, rng)
            weight = torch.tensor(min(1.0, step_idx / 300), device=device)
            rate = budget.rate(_PEAK_RATE)
            set_rate(training.optimizer, rate)
            set_rate(training.discriminator_optimizer, rate)
            if long not in steps:
                steps[long] = CapturedStep(training.step, wave, weight)
            metrics = steps[long](wave, weight)
            if step_idx % 4 == 0:
                average.update(step_idx)
            if step_idx % _LOG_EVERY == 0:
                values = {name: float(value) for name, value in metrics.items()}
                progress.set_postfix({k: f"{v:.3f}" for k, v in values.items()})
                times = {"step": step_idx, "seconds": budget.used_s}
                append_json(work.log("vocoder"), times | values)
            if budget.due:
                save_state(file, model.state(average.tensors) | {"used": budget.used_s})
            step_idx += 1
            progress.update()
    save_state(file, model.state(average.tensors) | {"used": budget.used_s})


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("work", type=Path, help="the run's folder, after `codec`")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--crops", type=int, default=32, help="crops of a step")
    parser.add_argument("--frames", type=int, default=24, help="frames of a crop")
    parser.add_argument("--channels", type=int, default=24, help="channels of the discriminators")
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
