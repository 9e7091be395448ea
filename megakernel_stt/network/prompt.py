"""The language prompt of a multilingual model, merged into the encoder's frames."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel_stt.model.weights import PromptWeights
from megakernel_stt.network.layers import apply


def add_prompt(weights: PromptWeights, frames: Tensor, prompts: Tensor, num_prompts: int) -> Tensor:
    """Merges the language of every stream into its frames.

    Args:
        weights: Of the merging network.
        frames: [batch, frames, hidden] of the encoder.
        prompts: [batch] int64, index of each stream's language.
        num_prompts: Width of the one-hot vector.

    Returns:
        [batch, frames, hidden].
    """
    one_hot = F.one_hot(prompts, num_prompts).to(frames.dtype)
    x = torch.cat([frames, one_hot[:, None].expand(-1, frames.shape[1], -1)], -1)
    return apply(weights.linear2, torch.relu(apply(weights.linear1, x)))
