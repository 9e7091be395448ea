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

NOTHING = -1  # instead of an id: no vector is added at the position
_ROLE = 3  # positions
_MAX_HELD_OUT = 256  # utterances of a validation


@dataclass(frozen=True)
class Batch:
    """Sequences: text and control ids, input frames, and the frames to be predicted.

    Attributes:
        text: Text ids [batch, positions].
        control: Ids of the codec embedding, or `NOTHING`, of the same shape.
        codes: Codes of the input frames [batch, positions, groups].
        fed: Whether a position has an input frame [batch, positions].
        predicting: Positions that predict a frame, among all batch * positions: [frames].
        frames: Index of the frame that each of them predicts [frames].
        ending: Positions that predict the end of speech, among all batch * positions: [batch].
        spoken: Whether the text id belongs to the spoken text [batch, positions].
        text_word: Index of the word of the text id, or `NOTHING`, of the same shape.
        frame_word: Index of the word of the predicted frame, or `NOTHING`, of the same shape.
    """

    text: Tensor
    control: Tensor
    codes: Tensor
    fed: Tensor
    predicting: Tensor
    frames: Tensor
    ending: Tensor
    spoken: Tensor
    text_word: Tensor
    frame_word: Tensor


class Dataset:
    """All utterances of a run."""

    def __init__(self, work: Work, config: ModelConfig, device: torch.device) -> None:
        self._config, self._device = config, device
        with np.load(work.codes) as file:
            tables = dict(file)
        self.codes = torch.from_numpy(tables["codes"]).to(device)
        self.phones = torch.from_numpy(tables["phones"]).to(device)
        self._words = torch.from_numpy(tables["words"].astype(np.int64)).to(device)
        self._speakers: NDArray[np.int64] = tables["speaker"]
        self._frames: NDArray[np.int64] = tables["frames"]
        self.ends = np.cumsum(self._frames)  # frames up to the end of each utterance
        self._first_frame = self.ends - self._frames
        tokenizer = TextTokenizer(work.voice, config.talker.text_vocab_size)
        role = [config.text.im_start, config.text.assistant, tokenizer.encode("\n")[0]]
        self._role = torch.tensor(role, device=device)
        width = _token_widths(work)
        texts = work.texts()
        spoken = [texts[i] for i in tables["text"]]
        ids = [tokenizer.encode(text) for text in spoken]
        self._tokens = np.array([len(i) for i in ids])
        self._first_token = np.cumsum(self._tokens) - self._tokens
        self._ids = torch.tensor([i for one in ids for i in one], device=device)
        pairs = zip(spoken, ids, strict=True)
        words = [_words_of(text, [width[i] for i in one]) for text, one in pairs]
        self._token_words = torch.tensor([w for one in words for w in one], device=device)
        self.lengths = self._frames + self._tokens + 12  # upper bound in positions
        self.held_out = is_held_out(tables["text"])
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

    def split(self, order: NDArray[np.int64], positions: int) -> Iterator[NDArray[np.int64]]:
        """Splits utterances, in this order, into batches of at most so many positions."""
        start = 0
        while start < len(order):
            most = np.maximum.accumulate(self.lengths[order[start : start + positions]])
            fits = most * np.arange(1, len(most) + 1) <= positions
            end = start + max(1, int(fits.sum()))
            yield order[start:end]
            start = end

    def _to_device(self, values: NDArray[np.int64]) -> Tensor:
        """Copies without waiting for the GPU, which a copy from pageable memory would do."""
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        if self._device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)

    def build_held_out(self, full: bool) -> Batch:
        """Builds a batch of held-out utterances with given language, in one layout."""
        chosen = np.flatnonzero(self.held_out)[:_MAX_HELD_OUT]
        layout = np.full(len(chosen), full)
        return self.build(chosen, layout, np.zeros_like(layout))

    def build(
        self, chosen: NDArray[np.int64], full: NDArray[np.bool_], auto: NDArray[np.bool_]
    ) -> Batch:
        """Builds a batch.

        Args:
            chosen: Indices of the utterances.
            full: For each, whether the prompt contains the whole text.
            auto: For each, whether the language is not given.
        """
        device, ids, control = self._device, self._config.text, self._config.talker.control

        def column(values: NDArray[np.int64]) -> Tensor:
            return self._to_device(values)[:, None]

        tokens, frames = self._tokens[chosen], self._frames[chosen]
        tags = np.where(auto, 5, 6)
        start = _ROLE + tags  # position of the text
        speech = np.where(full, start + tokens + 1, start)  # position of codec_bos
        length = -(-int((speech + frames + 1).max()) // 8) * 8
        p = torch.arange(length, device=device)[None]
        n, t, first, bos = map(column, (tokens, frames, start, speech))

        text = torch.full((len(chosen), length), ids.pad, device=device)
        text = torch.where(p < _ROLE, self._role[p.clamp(max=_ROLE - 1)], text)
        text = torch.where(p == first - 1, ids.bos, text)
        token = p - first
        spoken = (token >= 0) & (token < n)
        index = column(self._first_token[chosen]) + token.clamp(min=0)
        index = index.clamp(max=len(self._ids) - 1)
        text = torch.where(spoken, self._ids[index], text)
        text = torch.where(token == n, ids.eos, text)

        rows = self._tags[column(auto.astype(np.int64)), column(self._speakers[chosen])]
        tagged = rows[:, 0].gather(1, (p - _ROLE).clamp(0, 5).expand(len(chosen), -1))
        codec = torch.full_like(text, NOTHING)
        codec = torch.where((p >= _ROLE) & (p < first), tagged, codec)
        codec = torch.where((p >= first) & (p < bos), control.pad, codec)
        codec = torch.where(p == bos, control.bos, codec)

        base, frame_idx = column(self._first_frame[chosen]), p - bos
        fed = (frame_idx >= 1) & (frame_idx <= t)
        codes = self.codes[torch.where(fed, base + frame_idx - 1, 0)].long()
        frame = torch.where((frame_idx >= 0) & (frame_idx < t), base + frame_idx, NOTHING)
        begin = np.arange(len(chosen)) * length + speech
        order = np.arange(frames.sum()) - np.repeat(np.cumsum(frames) - frames, frames)
        return Batch(
            text, codec, codes, fed,
            predicting=self._to_device(np.repeat(begin, frames) + order),
            frames=self._to_device(np.repeat(self._first_frame[chosen], frames) + order),
            ending=self._to_device(begin + frames),
            spoken=spoken,
            text_word=torch.where(spoken, self._token_words[index], NOTHING),
            frame_word=torch.where(frame >= 0, self._words[frame.clamp(min=0)], NOTHING),
        )  # fmt: skip


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
