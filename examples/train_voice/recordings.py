"""The synthetic speech in device memory; shards are added while `synthesis` makes them."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from examples.train_voice.layout import Work
from examples.train_voice.phonemes import VOICES
from examples.train_voice.speech import FRAME, SAMPLE_RATE
from examples.train_voice.synthesis import shard_files

CODEC_HOURS = 60.0  # of speech, of which the codec learns; more would wait for the disk longer
HELD_OUT_INTERVAL = 256  # one text in so many is for validation only
# How often crops of a voice are drawn, relative to its share of the recordings. The codec learned
# the fewest phases of henry, who has 9 harmonics below 1 kHz and the others 5, and of lucia.
_WEIGHTS = {"clara": 2, "henry": 4, "olivia": 2, "lucia": 3}


def is_held_out(texts: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether no stage trains on these texts, given by their index in the corpus."""
    return texts % HELD_OUT_INTERVAL == 0


class Recordings:
    """Finished shards, concatenated."""

    def __init__(self, work: Work, device: torch.device, hours: float = float("inf")) -> None:
        """Finds the shards; `poll` or `wait` loads them.

        Args:
            work: The run.
            device: Device of the speech.
            hours: Speech after which no more shards are loaded.
        """
        self._device = device
        self._max_frames = hours * 3600 * SAMPLE_RATE / FRAME
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
        """Whether all shards of the corpus are loaded, or the given hours of speech."""
        return not self._missing

    def poll(self, max_shards: int | None = 8) -> None:
        """Loads shards that have been finished since the last call, all if there is no maximum."""
        found = [file for file in self._missing if file.exists()][:max_shards]
        if not found:
            return
        with ThreadPoolExecutor() as pool:
            shards = list(pool.map(self._read, found))
        self._missing = [file for file in self._missing if file not in found]
        for name, column in self.tables.items():
            column += [shard[name] for shard in shards]
        self._wave = _append(self._wave, [shard["wave"] for shard in shards])
        self._phones = _append(self._phones, [shard["phones"] for shard in shards])
        ends = np.cumsum(np.concatenate(self.tables["frames"]))
        self._starts = np.concatenate([[0], ends[:-1]])
        self._crop_starts.clear()
        if self.frames >= self._max_frames:
            self._missing.clear()

    def _read(self, file: Path) -> dict[str, NDArray[Any]]:
        with np.load(file) as shard:
            return {name: shard[name] for name in ("wave", *self.tables)}

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


def _append(tensor: Tensor, parts: Sequence[NDArray[Any]]) -> Tensor:
    """The tensor with more rows; `torch.cat` would need the parts on the device as well."""
    longer = tensor.new_empty(len(tensor) + sum(map(len, parts)), *tensor.shape[1:])
    at = len(tensor)
    longer[:at] = tensor
    for part in parts:
        longer[at : at + len(part)] = torch.from_numpy(part)
        at += len(part)
    return longer
