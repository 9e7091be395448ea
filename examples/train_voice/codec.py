"""Trains the codec: first its encoder against sounds' features, then all of it with codebooks.

python -m examples.train_voice.codec WORK --minutes 9
"""

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from examples.train_voice.codec_model import CodecModel
from examples.train_voice.codec_net import Quantizer
from examples.train_voice.flite import PHONES
from examples.train_voice.layout import Work, append_json, summary
from examples.train_voice.recordings import Recordings
from examples.train_voice.spectral import Spectra
from examples.train_voice.training import (
    Average,
    Budget,
    Replayed,
    adamw,
    load_state,
    pick_device,
    save_state,
    set_rate,
)

_PEAK_RATE = 1e-3
_FIRST, _LAST = 0.1, 0.85  # shares of the time: no codebooks before, long crops after
_LEVELS_FREE = 4  # one crop in so many uses only the first few codebooks
_LOG_EVERY = 100


class _Training:
    """The two kinds of steps."""

    def __init__(self, model: CodecModel, device: torch.device) -> None:
        self.model = model
        self.parameters = list(model.parameters.values())
        self.optimizer = adamw(self.parameters, betas=(0.8, 0.99), decay=1e-3)
        self._spectra = Spectra(device)

    def features_step(self, wave: Tensor, phones: Tensor, _: Tensor) -> dict[str, Tensor]:
        """The encoder alone: its embedding must tell phones and log-mels.

        Codebooks are drawn from a trained embedding later; those that grow with an untrained one
        collapse.
        """
        semantic, acoustic = self.model.embed(wave)
        q = self.model.join(semantic, acoustic)
        mel, phone = self._features(wave, phones, q, semantic)
        self._descend(5 * mel + phone + 1e-3 * q.square().mean(), limit=5.0)
        return {"mel": mel.detach(), "phone": phone.detach()}

    def codec_step(self, wave: Tensor, phones: Tensor, active: Tensor) -> dict[str, Tensor]:
        """Encoder, codebooks and decoder together; active: [groups, crops]."""
        model, frames = self.model, phones.shape[1]
        semantic, acoustic = model.embed(wave)
        quantized = model.quantizer(
            semantic.flatten(0, 1), acoustic.flatten(0, 1), active.repeat_interleave(frames, 1)
        )
        semantic, acoustic = (x.unflatten(0, (-1, frames)) for x in quantized[:2])
        q = model.join(semantic, acoustic)
        mel, phone = self._features(wave, phones, q, semantic)
        made = model.decoder(q)
        sound = self._spectra.distance(made, wave)
        self._descend(sound + 0.25 * quantized[2] + phone + 5 * mel, limit=20.0)
        whole = active.amin(0) > 0
        distance = (made.detach() * whole[:, None], wave * whole[:, None])
        return {
            "sound": sound.detach(),
            "mel": mel.detach(),
            "phone": phone.detach(),
            "commit": quantized[2].detach(),
            "wave_mel": self._spectra.mel_distance(*distance) / whole.float().mean(),
        }

    def _features(
        self, wave: Tensor, phones: Tensor, q: Tensor, semantic: Tensor
    ) -> tuple[Tensor, Tensor]:
        heads = self.model.parameters
        with torch.no_grad():
            wanted = self._spectra.frame_mels(wave)
        mel = (F.linear(q, heads["mel_head"]) - wanted).abs().mean()
        guess = F.linear(semantic, heads["phone_head"]).unflatten(-1, (2, len(PHONES)))
        phone = F.cross_entropy(guess.flatten(0, 2), phones.flatten(), ignore_index=-100)
        return mel, phone

    def _descend(self, loss: Tensor, limit: float) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, limit)
        self.optimizer.step()


def _active(groups: int, crops: int, some: bool, rng: np.random.Generator) -> Tensor:
    """Which levels each crop uses, [groups, crops]: mostly all of them."""
    used = np.full(crops, groups)
    if some:
        few = crops // _LEVELS_FREE
        used[:few] = rng.integers(1, groups + 1, few)
    return torch.from_numpy((np.arange(groups)[:, None] < used).astype(np.float32))


def train(work: Work, minutes: float, crops: int, frames: int, seed: int) -> None:
    """Trains until the time is used up; goes on where an earlier call stopped."""
    device, file = pick_device(), work.state("codec")
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    config = work.codec_config()
    model = CodecModel(config, device)
    recordings = Recordings(work, device)
    recordings.wait()
    used = 0.0
    if file.exists():
        state = load_state(file, device)
        model.load(state)
        used = state["used"]
    else:
        model.calibrate(recordings.crops(8, frames, rng)[0])
    training, groups = _Training(model, device), config.decoder.num_groups
    average = Average(training.parameters)
    budget = Budget(minutes, used)
    steps: dict[str, Replayed] = {}
    started, done = file.exists(), 0
    with tqdm(desc="codec", unit=" steps", disable=None) as progress:
        while budget.share < 1:
            if done % 50 == 0:
                recordings.poll()
            features = budget.share < _FIRST and not started
            if not features and not started:
                _start_codebooks(model, recordings, crops, frames, rng)
                average, started = Average(training.parameters), True
            long = not features and budget.share > _LAST  # the end sees more of the past
            count, length = (max(1, crops // 4), 4 * frames) if long else (crops, frames)
            wave, phones = recordings.crops(count, length, rng)
            active = _active(groups, count, not long, rng).to(device)
            set_rate(training.optimizer, budget.rate(_PEAK_RATE))
            kind = "features" if features else "long" if long else "codec"
            if kind not in steps:
                step = training.features_step if features else training.codec_step
                steps[kind] = Replayed(step, wave, phones, active)
            figures = steps[kind](wave, phones, active)
            if done % 4 == 0:
                average.update(done)
            if done % 20 == 10 and not features:
                model.quantizer.revive()
            if done % _LOG_EVERY == 0:
                shown = {name: float(value) for name, value in figures.items()}
                shown |= _usage(model.quantizer)
                progress.set_postfix({k: f"{v:.3f}" for k, v in shown.items()})
                times = {"step": done, "seconds": budget.used, "frames": recordings.frames}
                append_json(work.log("codec"), times | shown)
            if not features and budget.due:
                save_state(file, model.state(average.tensors) | {"used": budget.used})
            done += 1
            progress.update()
    save_state(file, model.state(average.tensors) | {"used": budget.used})


def _start_codebooks(
    model: CodecModel, recordings: Recordings, crops: int, frames: int, rng: np.random.Generator
) -> None:
    with torch.no_grad():
        semantic, acoustic = model.embed(recordings.crops(max(64, crops), frames, rng)[0])
    model.quantizer.start(semantic.flatten(0, 1), acoustic.flatten(0, 1))


def _usage(quantizer: Quantizer) -> dict[str, float]:
    perplexity = quantizer.perplexity()
    return {"used_first": float(perplexity[0]), "used_last": float(perplexity[-1])}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("work", type=Path, help="the run's folder; `synthesis` may still run")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--crops", type=int, default=48, help="a step")
    parser.add_argument("--frames", type=int, default=16, help="a crop")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    train(Work(options.work), options.minutes, options.crops, options.frames, options.seed)


if __name__ == "__main__":
    main()
