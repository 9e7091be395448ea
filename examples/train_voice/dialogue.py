"""Training data of the talker: batches of whole sequences of text and codes in both layouts."""

import json
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from examples.train_voice.layout import VOICES, Work
from megakernel_tts.model.config import ModelConfig
from megakernel_tts.text.tokenizer import TextTokenizer

NOTHING = -1  # instead of an id: no vector is added at the position
IGNORED = -100  # label without a loss
_ROLE = 3  # positions


@dataclass(frozen=True)
class Batch:
    """Sequences; all tensors but `codes` have the shape [batch, positions].

    Attributes:
        text: Text ids.
        control: Ids of the codec embedding, or `NOTHING`.
        codes: Codes of the input frames [batch, positions, groups].
        fed: Whether a position has an input frame.
        labels: Code 0 or the end of speech, or `IGNORED`.
        frame: Index of the frame that a position predicts, or `NOTHING`.
        spoken: Whether the text id belongs to the spoken text.
        text_word: Index of the word of the text id, or `NOTHING`.
        frame_word: Index of the word of the predicted frame, or `NOTHING`.
    """

    text: Tensor
    control: Tensor
    codes: Tensor
    fed: Tensor
    labels: Tensor
    frame: Tensor
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
        self._first_frame = np.cumsum(self._frames) - self._frames
        tokenizer = TextTokenizer(work.voice, config.talker.text_vocab_size)
        self._newline = tokenizer.encode("\n")[0]
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
            return torch.from_numpy(np.ascontiguousarray(values)).to(device)[:, None]

        tokens, frames = self._tokens[chosen], self._frames[chosen]
        tags = np.where(auto, 5, 6)
        start = _ROLE + tags  # position of the text
        speech = np.where(full, start + tokens + 1, start)  # position of codec_bos
        length = -(-int((speech + frames + 1).max()) // 8) * 8
        p = torch.arange(length, device=device)[None]
        n, t, k, first, bos = map(column, (tokens, frames, tags, start, speech))

        text = torch.full((len(chosen), length), ids.pad, device=device)
        role = torch.tensor([ids.im_start, ids.assistant, self._newline], device=device)
        text = torch.where(p < _ROLE, role[p.clamp(max=_ROLE - 1)], text)
        text = torch.where(p == first - 1, ids.bos, text)
        token = p - first
        spoken = (token >= 0) & (token < n)
        index = column(self._first_token[chosen]) + token.clamp(min=0)
        index = index.clamp(max=len(self._ids) - 1)
        text = torch.where(spoken, self._ids[index], text)
        text = torch.where(token == n, ids.eos, text)

        tag = (p - _ROLE).clamp(0, 5)
        given = self._tags([control.think, control.think_bos, self._language, control.think_eos])
        open_language = self._tags([control.nothink, control.think_bos, control.think_eos])
        tagged = torch.where(k == 6, given[tag], open_language[tag.clamp(max=4)])
        speakers = torch.tensor([self._config.talker.speakers[v] for v in VOICES], device=device)
        tagged = torch.where(tagged == NOTHING, speakers[column(self._speakers[chosen])], tagged)
        codec = torch.full_like(text, NOTHING)
        codec = torch.where((p >= _ROLE) & (p < first), tagged, codec)
        codec = torch.where((p >= first) & (p < bos), control.pad, codec)
        codec = torch.where(p == bos, control.bos, codec)

        base, frame_idx = column(self._first_frame[chosen]), p - bos
        fed = (frame_idx >= 1) & (frame_idx <= t)
        codes = self.codes[torch.where(fed, base + frame_idx - 1, 0)].long()
        frame = torch.where((frame_idx >= 0) & (frame_idx < t), base + frame_idx, NOTHING)
        labels = torch.where(frame >= 0, self.codes[frame.clamp(min=0), 0].long(), IGNORED)
        labels = torch.where(frame_idx == t, control.eos, labels)
        return Batch(
            text, codec, codes, fed, labels, frame, spoken,
            text_word=torch.where(spoken, self._token_words[index], NOTHING),
            frame_word=torch.where(frame >= 0, self._words[frame.clamp(min=0)], NOTHING),
        )  # fmt: skip

    @property
    def _language(self) -> int:
        return self._config.talker.languages["english"]

    def _tags(self, ids: list[int]) -> Tensor:
        """Tags, a place for the speaker, codec_pad."""
        tags = [*ids, NOTHING, self._config.talker.control.pad]
        return torch.tensor(tags, device=self._device)


def _token_widths(work: Work) -> dict[int, int]:
    """Number of ASCII characters of each token."""
    vocab = json.loads((work.voice / "vocab.json").read_text(encoding="utf-8"))
    return {i: len(token) for token, i in vocab.items()}


def _words_of(text: str, widths: list[int]) -> list[int]:
    """Index of the space-separated word of each token."""
    words: list[int] = []
    at = 0
    for width in widths:
        piece = text[at : at + width]
        start = at + len(piece) - len(piece.lstrip())
        words.append(text[:start].count(" "))
        at += width
    return words
