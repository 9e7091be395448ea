"""Training data of the talker: batches of whole sequences of text and codes in both layouts."""

import json
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from examples.train_voice.layout import Work
from examples.train_voice.phonemes import VOICES
from examples.train_voice.recordings import is_held_out
from megakernel_tts.model.config import ModelConfig
from megakernel_tts.text.tokenizer import TextTokenizer

NOTHING = -1  # instead of an id or an index
_ROLE = 3  # positions
_MARKS = 12  # positions of a sequence besides those of text and frames, at most
_MAX_HELD_OUT = 256  # utterances of a validation
# Sequences are padded to one of these lengths, so that batches have few shapes. The last one is
# enough for the longest text and the longest recording.
_LENGTHS = *range(32, 160, 16), *range(160, 256, 32), *range(256, 513, 64), 640, 832


@dataclass(frozen=True)
class Batch:
    """Sequences: text and control ids, input frames, and the frames to be predicted.

    All tensors are [batch, positions].

    Attributes:
        text: Text ids.
        control: Ids of the codec embedding, or `NOTHING`.
        previous: Index of the input frame among all recorded frames, or `NOTHING`.
        frame: Index of the frame that the position predicts, or `NOTHING`.
        is_eos: Whether the position predicts the end of speech.
        spoken: Whether the text id belongs to the spoken text.
        text_word: Index of the word of the text id, or `NOTHING`.
        frame_word: Index of the word of the predicted frame, or `NOTHING`.
    """

    text: Tensor
    control: Tensor
    previous: Tensor
    frame: Tensor
    is_eos: Tensor
    spoken: Tensor
    text_word: Tensor
    frame_word: Tensor


class Dataset:
    """All utterances of a run, in device memory.

    Attributes:
        codes: Of all recorded frames [frames, groups].
        phones: Phones of the two halves of each frame [frames, 2].
        ends: Number of frames up to the end of each utterance.
        lengths: Positions of each utterance, at most.
        held_out: Whether an utterance is for validation only.
    """

    def __init__(self, work: Work, config: ModelConfig, device: torch.device) -> None:
        self._config, self._device = config, device
        with np.load(work.codes) as file:
            tables = dict(file)
        self.codes = torch.from_numpy(tables["codes"]).to(device)
        self.phones = torch.from_numpy(tables["phones"]).to(device)
        self._words = torch.from_numpy(tables["words"][:, 0].astype(np.int64)).to(device)
        tokenizer = TextTokenizer(work.voice, config.talker.text_vocab_size)
        role = [config.text.im_start, config.text.assistant, tokenizer.encode("\n")[0]]
        self._role = torch.tensor(role, device=device)
        width = _token_widths(work)
        texts, spoken = work.texts(), tables["text"].tolist()
        ids = {k: tokenizer.encode(texts[k]) for k in set(spoken)}  # of both encodings of a text
        words = {k: _words_of(texts[k], [width[i] for i in one]) for k, one in ids.items()}
        self._ids = torch.tensor([i for k in spoken for i in ids[k]], device=device)
        self._token_words = torch.tensor([w for k in spoken for w in words[k]], device=device)
        tokens, frames = np.array([len(ids[k]) for k in spoken]), tables["frames"]
        self.ends = np.cumsum(frames)
        self.lengths = frames + tokens + _MARKS
        self.held_out = is_held_out(tables["text"])
        columns = tables["speaker"], tokens, np.cumsum(tokens) - tokens, frames, self.ends - frames
        self._columns = torch.from_numpy(np.stack(columns, 1)).to(device)
        rows = [self._tag_rows(auto) for auto in (False, True)]
        self._tags = torch.tensor(rows, device=device)  # [auto, speakers, 6]

    def _tag_rows(self, auto: bool) -> list[list[int]]:
        """Control ids before the text, for each speaker: language, speaker, codec_pad."""
        talker = self._config.talker
        control, rows = talker.control, list[list[int]]()
        for name, voice in VOICES.items():
            language = [control.think, control.think_bos, talker.languages[voice.language]]
            start = [control.nothink, control.think_bos] if auto else language
            row = [*start, control.think_eos, talker.speakers[name], control.pad]
            rows.append(row + [NOTHING] * (6 - len(row)))
        return rows

    def split(
        self, utterances: NDArray[np.int64], positions: int
    ) -> Iterator[tuple[NDArray[np.int64], int]]:
        """Splits utterances into batches, one shape for each length of sequences.

        Args:
            utterances: Their indices, in about the order of their lengths.
            positions: Of a batch, at most.

        Yields:
            Indices and padded length. The last batch is filled with repeated utterances.
        """
        order = utterances[::-1]  # longest first, so that shorter ones fill the batches
        while len(order):
            shapes = ((max(1, positions // length), length) for length in _LENGTHS)
            rows, length = next((r, n) for r, n in shapes if self.lengths[order[:r]].max() <= n)
            yield np.resize(order[:rows], rows), length
            order = order[rows:]

    def build_held_out(self, full: bool) -> Batch:
        """Builds a batch of held-out utterances with given language, in one layout."""
        chosen = np.flatnonzero(self.held_out)[:_MAX_HELD_OUT]
        flags = torch.zeros(len(chosen), dtype=torch.bool, device=self._device)
        indices = torch.from_numpy(chosen).to(self._device)
        return self.build(indices, flags | full, flags, int(self.lengths[chosen].max()))

    def build(self, chosen: Tensor, full: Tensor, auto: Tensor, length: int) -> Batch:
        """Builds a batch without waiting for the device.

        Args:
            chosen: Indices of the utterances [batch].
            full: For each, whether the prompt contains the whole text.
            auto: For each, whether the language is not given.
            length: Positions, at least the utterances' `lengths`.
        """
        ids, control = self._config.text, self._config.talker.control
        p = torch.arange(length, device=self._device)[None]
        speaker, n, token_at, t, frame_at = self._columns[chosen][..., None].unbind(1)
        first = _ROLE + torch.where(auto, 5, 6)[:, None]  # position of the text
        bos = torch.where(full[:, None], first + n + 1, first)  # position of codec_bos

        role = self._role[p.clamp(max=_ROLE - 1)]
        text = torch.where(p < _ROLE, role, ids.pad).expand(len(chosen), -1)
        text = torch.where(p == first - 1, ids.bos, text)
        token = p - first
        spoken = (token >= 0) & (token < n)
        index = (token_at + token.clamp(min=0)).clamp(max=len(self._ids) - 1)
        text = torch.where(spoken, self._ids[index], text)
        text = torch.where(token == n, ids.eos, text)

        tags = self._tags[auto.long(), speaker[:, 0]]
        tagged = tags.gather(1, (p - _ROLE).clamp(0, 5).expand(len(chosen), -1))
        codec = torch.where((p >= _ROLE) & (p < first), tagged, NOTHING)
        codec = torch.where((p >= first) & (p < bos), control.pad, codec)
        codec = torch.where(p == bos, control.bos, codec)

        at = p - bos  # frame that the position predicts
        frame = torch.where((at >= 0) & (at < t), frame_at + at, NOTHING)
        return Batch(
            text, codec, frame=frame, spoken=spoken,
            previous=torch.where((at >= 1) & (at <= t), frame_at + at - 1, NOTHING),
            is_eos=at == t,
            text_word=torch.where(spoken, self._token_words[index], NOTHING),
            frame_word=torch.where(frame >= 0, self._words[frame.clamp(min=0)], NOTHING),
        )  # fmt: skip

    def codes_of(self, frames: Tensor) -> Tensor:
        """Codes [..., groups] of recorded frames, given by index; of the first for `NOTHING`."""
        return self.codes[frames.clamp(min=0)].long()


def _token_widths(work: Work) -> dict[int, int]:
    """Number of bytes of each token."""
    vocab = json.loads((work.voice / "vocab.json").read_text(encoding="utf-8"))
    return {i: len(token) for token, i in vocab.items()}


def _words_of(text: str, widths: list[int]) -> list[int]:
    """Index of the space-separated word of each token, given the tokens' bytes."""
    data, words, at = text.encode(), list[int](), 0
    for width in widths:
        piece = data[at : at + width]
        start = at + len(piece) - len(piece.lstrip())
        words.append(data[:start].count(b" "))
        at += width
    return words
