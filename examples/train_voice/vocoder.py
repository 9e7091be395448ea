"""Goes on with the codec's decoder alone, against critics of its sound; the codes stay the same.

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
from examples.train_voice.spectral import Critic, Spectra
from examples.train_voice.training import (
    Average,
    Budget,
    Replayed,
    adamw,
    fast_type,
    load_state,
    pick_device,
    save_state,
    set_rate,
)

_PEAK_RATE = 3e-4
_COLD = 1920  # samples at a crop's start that no critic hears: the decoder has no past there
_WRONG = 0.15  # of the deep codes in a quarter of the crops: what a sampling talker will do
_WRONG_FROM = 6
_LOG_EVERY = 100


class _Training:
    """One step: the critics, then the decoder."""

    def __init__(self, model: CodecModel, device: torch.device, channels: int) -> None:
        self.model = model
        self.parameters = model.decoder_parameters()
        self._spectra = Spectra(device)
        self._critic = Critic(self._spectra, channels).to(device)
        self._fast = fast_type(device)
        self._device = device
        self.optimizer = adamw(self.parameters, betas=(0.8, 0.99), decay=1e-3)
        self.judges = adamw(self._critic.parameters(), betas=(0.8, 0.99), decay=1e-3)

    def step(self, wave: Tensor, weight: Tensor) -> dict[str, Tensor]:
        """wave: [crops, samples]; weight: of the critics' view, 0 to 1."""
        made = self.model.decoder(self.model.of_codes(_codes(self.model, wave)))
        real, fake = wave[:, _COLD:], made[:, _COLD:]
        with self._autocast():
            verdicts_real, _ = self._critic(real)
            verdicts_fake, _ = self._critic(fake.detach())
        pairs = zip(verdicts_real, verdicts_fake, strict=True)
        losses = [F.relu(1 - r.float()).mean() + F.relu(1 + f.float()).mean() for r, f in pairs]
        judging = torch.stack(losses).mean()
        self.judges.zero_grad(set_to_none=True)
        judging.backward()
        torch.nn.utils.clip_grad_norm_(self._critic.parameters(), 5.0)
        self.judges.step()

        with self._autocast():
            with torch.no_grad():
                _, seen_real = self._critic(real)
            verdicts, seen = self._critic(fake)
        fooling = -torch.stack([v.float().mean() for v in verdicts]).mean()
        unlike = torch.stack(
            [
                (a.float() - b.float()).abs().mean() / (a.float().abs().mean() + 1e-3)
                for a, b in zip(seen_real, seen, strict=True)
            ]
        ).mean()
        sound = self._spectra.distance(made, wave)
        self.optimizer.zero_grad(set_to_none=True)
        (sound + weight * (0.5 * fooling + 2 * unlike)).backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 10.0)
        self.optimizer.step()
        return {
            "sound": sound.detach(),
            "judging": judging.detach(),
            "fooling": fooling.detach(),
            "unlike": unlike.detach(),
            "wave_mel": self._spectra.mel_distance(made.detach(), wave),
        }

    def _autocast(self) -> torch.autocast:
        enabled = self._fast != torch.float32
        return torch.autocast(self._device.type, self._fast, enabled=enabled, cache_enabled=False)


@torch.no_grad()
def _codes(model: CodecModel, wave: Tensor) -> Tensor:
    """What the codec makes of crops; some deep codes of some crops are wrong."""
    semantic, acoustic = model.embed(wave)
    codes = model.quantizer.encode(semantic.flatten(0, 1), acoustic.flatten(0, 1))
    codes = codes.unflatten(0, semantic.shape[:2])
    wrong = torch.rand(codes.shape, device=codes.device) < _WRONG
    wrong[..., :_WRONG_FROM] = False
    wrong[len(wave) // 4 :] = False
    return torch.where(wrong, torch.randint_like(codes, model.quantizer.books.shape[1]), codes)


def train(work: Work, minutes: float, crops: int, frames: int, channels: int, seed: int) -> None:
    """Trains until the time is used up; goes on where an earlier call stopped."""
    device, file = pick_device(), work.state("vocoder")
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model = CodecModel(work.codec_config(), device)
    state = load_state(file if file.exists() else work.state("codec"), device)
    model.load(state)
    used = state["used"] if file.exists() else 0.0
    recordings = Recordings(work, device)
    recordings.wait()
    training = _Training(model, device, channels)
    average = Average(model.parameters.values())
    budget, steps, done = Budget(minutes, used), dict[bool, Replayed](), 0
    with tqdm(desc="vocoder", unit=" steps", disable=None) as progress:
        while budget.share < 1:
            if done % 10 == 0 and not recordings.complete:
                recordings.poll()
            long = done % 3 == 0
            count, length = (max(1, crops // 4), 4 * frames) if long else (crops, frames)
            wave, _ = recordings.crops(count, length, rng)
            weight = torch.tensor(min(1.0, done / 300), device=device)
            rate = budget.rate(_PEAK_RATE)
            set_rate(training.optimizer, rate)
            set_rate(training.judges, rate)
            if long not in steps:
                steps[long] = Replayed(training.step, wave, weight)
            figures = steps[long](wave, weight)
            if done % 4 == 0:
                average.update(done)
            if done % _LOG_EVERY == 0:
                shown = {name: float(value) for name, value in figures.items()}
                progress.set_postfix({k: f"{v:.3f}" for k, v in shown.items()})
                times = {"step": done, "seconds": budget.used}
                append_json(work.log("vocoder"), times | shown)
            if budget.due:
                save_state(file, model.state(average.tensors) | {"used": budget.used})
            done += 1
            progress.update()
    save_state(file, model.state(average.tensors) | {"used": budget.used})


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("work", type=Path, help="the run's folder, after `codec`")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--crops", type=int, default=32, help="a step")
    parser.add_argument("--frames", type=int, default=24, help="a crop")
    parser.add_argument("--channels", type=int, default=24, help="of the critics")
    parser.add_argument("--seed", type=int, default=0)
    o = parser.parse_args()
    train(Work(o.work), o.minutes, o.crops, o.frames, o.channels, o.seed)


if __name__ == "__main__":
    main()
