"""Input frames of the talker as in speech: codes that it sampled itself in earlier steps.

In speech every input frame consists of sampled codes, which differ from a recording's: a talker
that was trained with recorded input frames only predicts the next frame badly from them.
"""

import torch
from torch import Tensor

from examples.train_voice.dialogue import NOTHING, Batch, Dataset
from examples.train_voice.layout import SAMPLING

_FIRST_SHARE = 0.15  # of the frames with own codes whose code 0 is a sample, too


def sample(logits: Tensor, temperature: float) -> Tensor:
    """Draws from logits [..., entries] without waiting for the device."""
    noise = torch.empty_like(logits, dtype=torch.float32).exponential_()
    return (logits.float() / temperature - noise.log()).argmax(-1)


class OwnCodes:
    """The last samples for every recorded frame, each predicted from the frames before it.

    A step trains on its predictions of the recorded codes and samples from the same predictions:
    the samples cost no pass of their own.
    """

    def __init__(self, dataset: Dataset, entries: int) -> None:
        self._dataset, self._entries = dataset, entries
        spare = dataset.codes.new_zeros(1, dataset.codes.shape[1])  # written for positions without
        self._samples = torch.cat([dataset.codes, spare])

    def inputs(self, batch: Batch, share: Tensor, corruption: float) -> Tensor:
        """Draws the codes of a batch's input frames [batch, positions, groups].

        Code 0 is the recording's in most frames: it decides which phone follows, and the frames to
        be predicted are the recording's.

        Args:
            batch: The batch.
            share: Share of the utterances with own codes, a scalar.
            corruption: Mean share of codes that are replaced by random ones.
        """
        recorded = self._dataset.codes_of(batch.previous)
        samples = self._samples[batch.previous.clamp(min=0)].long()
        utterances = torch.rand(len(recorded), 1, 1, device=recorded.device) < share
        first = torch.rand(recorded[..., :1].shape, device=recorded.device) < _FIRST_SHARE
        own = torch.cat([first, torch.ones_like(recorded[..., 1:], dtype=torch.bool)], -1)
        codes = torch.where(own & utterances, samples, recorded)
        shares = 2 * corruption * torch.rand(len(codes), 1, 1, device=codes.device)
        replaced = torch.rand(codes.shape, device=codes.device) < shares
        return torch.where(replaced, torch.randint_like(codes, self._entries), codes)

    @torch.no_grad()
    def store(self, batch: Batch, first: Tensor, picked: Tensor, rest: Tensor) -> None:
        """Samples codes of the frames that a batch predicts.

        Args:
            batch: The batch.
            first: Logits of code 0 and of controls [batch * positions, ids].
            picked: Positions with `rest`, among all batch * positions: [n].
            rest: Logits of the other codes [n, groups - 1, entries].
        """
        frame = batch.frame.flatten()
        row = torch.where(frame == NOTHING, len(self._samples) - 1, frame)
        codes = sample(first[:, : self._entries], SAMPLING["temperature"])
        self._samples[row, 0] = codes.to(self._samples.dtype)
        codes = sample(rest, SAMPLING["subtalker_temperature"])
        self._samples[row[picked], 1:] = codes.to(self._samples.dtype)
