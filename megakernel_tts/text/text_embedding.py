"""The text side of the talker's input: a vector for every token, computed once, kept on the host.

The talker is fed a few of them at a time, so that their table (311 MB for the 0.6B, 622 for the
1.7B) need not take a GPU's memory; nor need the wider table that they are projected from.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from megakernel_tts.model.layers import linear
from megakernel_tts.model.weights import Embeddings

_BATCH = 4096  # tokens projected at a time


class TextEmbedding:
    """`W2 silu(W1 e + b1) + b2` of tokens, each computed as if alone.

    A GPU projects all of them at once, so that no request waits for it; a CPU, for which those of a
    released model are too many, the ones that are asked for.
    """

    def __init__(self, embeddings: Embeddings) -> None:
        """Projects every token, on a GPU.

        Args:
            embeddings: The text's table anywhere, its projections where they are computed.
        """
        self._embeddings = embeddings
        vocab, out = len(embeddings.text), embeddings.text_down.weight
        # Rows that nobody asks for take no memory.
        self._rows = torch.empty(vocab, len(out), dtype=out.dtype)
        self._known = np.zeros(vocab, np.bool_)
        if out.is_cuda:
            self._learn(np.arange(vocab))

    def __call__(self, ids: Sequence[int]) -> Tensor:
        """The vectors [n, hidden] of tokens, on the host."""
        wanted = np.array(ids, np.int64)
        known = self._known[wanted]
        if not known.all():
            self._learn(np.unique(wanted[~known]))
        return self._rows.index_select(0, torch.from_numpy(wanted))

    @torch.inference_mode()
    def _learn(self, ids: NDArray[np.int64]) -> None:
        """Whoever else learns the same tokens meanwhile writes the same numbers."""
        for chosen in torch.from_numpy(ids).split(_BATCH):
            self._rows[chosen] = self._project(chosen).cpu()
            self._known[chosen.numpy()] = True

    def _project(self, ids: Tensor) -> Tensor:
        e = self._embeddings
        x = e.text[ids.to(e.text.device)].to(e.text_up.weight.device)[:, None]
        x = F.silu(linear(x, e.text_up.weight, e.text_up.bias))
        return linear(x, e.text_down.weight, e.text_down.bias)[:, 0]
