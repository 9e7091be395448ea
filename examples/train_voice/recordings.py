"""The synthetic speech in device memory; shards are added while `synthesis` makes them."""

import time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from examples.train_voice.layout import Work
from examples.train_voice.phonemes import VOICES
from examples.train_voice.speech import FRAME
from examples.train_voice.synthesis import shard_files

HELD_OUT_INTERVAL = 256  # one text in so many is for validation only
# How often crops of a voice are drawn, relative to its share of the recordings. The codec learned
# the fewest phases of henry, who has 9 harmonics below 1 kHz and the others 5, and of lucia.
_WEIGHTS = {"clara": 2, "henry": 4, "olivia": 2, "lucia": 3}


def is_held_out(texts: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether no stage trains on these texts, given by their index in the corpus."""
    return texts % HELD_OUT_INTERVAL == 0


class Recordings:
    """All finished shards, concatenated."""

    def __init__(self, work: Work, device: torch.device) -> None:
        self._device = device
        self._missing = shard_files(work)
        self._wave = torch.zeros(0, dtype=torch.int16, device=device)
        self._phones = torch.zeros(0, 2, dtype=torch.uint8, device=device)
        self.tables: dict[str, list[NDArray[Any]]] = {
            name: [] for name in ("phones", "words", "frames", "text", "speaker")
        }
        self._starts = np.zeros(0, np.int64)
        self._crop_starts: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}

    @property
    def frames(self) -> int:
        """Number of frames."""
        return len(self._phones)

    @property
    def complete(self) -> bool:
        """Whether all shards of the corpus are loaded."""
        return not self._missing

    def poll(self, max_shards: int = 8) -> None:
        """Loads shards that have been finished since the last call."""
        found = [file for file in self._missing if file.exists()][:max_shards]
        waves = [self._wave]
        for file in found:
            self._missing.remove(file)
            with np.load(file) as shard:
                waves.append(torch.from_numpy(shard["wave"]).to(self._device))
                for name, column in self.tables.items():
                    column.append(shard[name])
        if found:
            self._wave = torch.cat(waves)
            new = np.concatenate(self.tables["phones"][-len(found) :])
            self._phones = torch.cat([self._phones, torch.from_numpy(new).to(self._device)])
            ends = np.cumsum(np.concatenate(self.tables["frames"]))
            self._starts = np.concatenate([[0], ends[:-1]])
            self._crop_starts.clear()

    def wait(self) -> None:
        """Waits for the first shard."""
        while not self.frames:
            self.poll()
            time.sleep(0.2)

    @property
    def held_out(self) -> NDArray[np.int64]:
        """Utterances for validation."""
        return np.flatnonzero(is_held_out(np.concatenate(self.tables["text"])))

    def _starts_of_crops(self, frames: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """First frames of crops without held-out frames: all, and those that start utterances.

        Those of a voice are repeated by its weight.
        """
        if frames not in self._crop_starts:
            excluded = is_held_out(np.concatenate(self.tables["text"]))
            excluded = np.repeat(excluded, np.concatenate(self.tables["frames"]))
            total = np.concatenate([[0], np.cumsum(excluded)])
            allowed = total[frames + 1 :] == total[: -frames - 1]  # an unaligned crop has one more
            starts = self._starts[self._starts < len(allowed)]
            starts, inside = starts[allowed[starts]], np.flatnonzero(allowed)
            weights = np.array([_WEIGHTS[voice] for voice in VOICES])
            speakers = np.concatenate(self.tables["speaker"])
            times = np.repeat(weights[speakers], np.concatenate(self.tables["frames"]))
            self._crop_starts[frames] = (
                np.repeat(inside, times[inside]),
                np.repeat(starts, times[starts]),
            )
        return self._crop_starts[frames]

    def crops(self, count: int, frames: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Draws random crops of speech.

        Half of them start with an utterance. A quarter are not aligned to frames and have no
        phones.

        Returns:
            Waves [count, frames * 1920] in [-1, 1] and phones [count, frames, 2], -100 for none.
        """
        starts, first_frames = self._starts_of_crops(frames)
        half = count // 2
        starts = np.concatenate([rng.choice(first_frames, half), rng.choice(starts, count - half)])
        shift = np.zeros(count, np.int64)
        shift[count - count // 4 :] = rng.integers(0, FRAME, count // 4)
        first = self._to_device(starts * FRAME + shift)
        index = first[:, None] + torch.arange(frames * FRAME, device=self._device)
        gain = self._to_device(10 ** rng.uniform(-0.2, 0.1, (count, 1)))
        wave = self._wave[index].float() / 32768 * gain.float()
        at = self._to_device(starts)[:, None]
        phones = self._phones[at + torch.arange(frames, device=self._device)].long()
        return wave, phones.masked_fill(self._to_device(shift > 0)[:, None, None], -100)

    def _to_device(self, values: NDArray[Any]) -> Tensor:
        """Copies without waiting for the GPU."""
        return torch.from_numpy(values).to(self._device, non_blocking=True)

    def whole(self, utterances: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Gives whole utterances, padded to the longest.

        Returns:
            Waves [count, frames * 1920], and the index of each frame among all frames, -1 past an
            utterance's end.
        """
        frames = torch.from_numpy(np.concatenate(self.tables["frames"])[utterances])
        starts = torch.from_numpy(self._starts[utterances])
        offsets = torch.arange(int(frames.max()))
        number = torch.where(offsets < frames[:, None], starts[:, None] + offsets, -1)
        number = number.to(self._device)
        index = number.clamp(min=0)[..., None] * FRAME + torch.arange(FRAME, device=self._device)
        wave = self._wave[index].float() / 32768 * (number >= 0)[..., None]
        return wave.flatten(1), number
