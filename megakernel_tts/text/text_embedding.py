"""Text embeddings of the talker's input: one vector per token, computed once, in host memory.

A stream needs one of them per frame. Host memory for the table (311 MB for the 0.6B, 622 MB for the
1.7B) and for the wider table from which it is projected saves GPU memory.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel_common.layers import linear
from megakernel_tts.model.weights import Embeddings

_BATCH_SIZE = 4096  # tokens per projection
_INTEGERS = {2: torch.int16, 4: torch.int32}  # of each size in bytes


class TextEmbedding:
    """Computes `W2 silu(W1 e + b1) + b2` per token, batch-invariantly, and caches the results.

    With a GPU all tokens are projected at construction, so that no request waits for a projection.
    On a CPU that would take too long, so tokens are projected at their first use.
    """

    def __init__(self, embeddings: Embeddings) -> None:
        """With projections on a GPU, projects all tokens.

        Args:
            embeddings: The text table may be on any device; the projections are computed on theirs.
        """
        self._embeddings = embeddings
        num_tokens, weight = len(embeddings.text), embeddings.text_down.weight
        # The system commits memory of the table when a row is first written.
        self._table = torch.empty(num_tokens, len(weight), dtype=weight.dtype)
        # NumPy, which has no bfloat16, copies rows in less time than torch.
        self._rows = self._table.view(_INTEGERS[self._table.itemsize]).numpy()
        self._is_cached = bytearray(num_tokens)  # of each token 0 or 1
        if weight.is_cuda:
            self._cache(range(num_tokens))

    def __call__(self, ids: Sequence[int]) -> Tensor:
        """Looks up token vectors.

        Args:
            ids: Text tokens.

        Returns:
            [tokens, hidden], in host memory.
        """
        if not all(map(self._is_cached.__getitem__, ids)):
            self._cache(sorted({i for i in ids if not self._is_cached[i]}))
        rows = self._rows.take(np.array(ids, np.int64), axis=0)
        return torch.from_numpy(rows).view(self._table.dtype)

    @torch.inference_mode()
    def _cache(self, ids: Sequence[int]) -> None:
        """Projects tokens. Needs no lock: concurrent calls write the same values."""
        for batch in torch.tensor(ids).split(_BATCH_SIZE):
            self._table[batch] = self._project(batch).cpu()
            for i in batch.tolist():
                self._is_cached[i] = 1

    def _project(self, ids: Tensor) -> Tensor:
        table, up, down = (
            self._embeddings.text,
            self._embeddings.text_up,
            self._embeddings.text_down,
        )
        x = table[ids.to(table.device)].to(up.weight.device)[:, None]
        x = F.silu(linear(x, up.weight, up.bias))
        return linear(x, down.weight, down.bias)[:, 0]
