"""transformers' models of the same checkpoints, and a transducer that decodes frame by frame."""

from typing import Any

import torch
from torch import Tensor

from megakernel_stt.model.config import TransducerConfig
from megakernel_stt.model.weights import TransducerWeights


def encode(model: Any, mels: Tensor, lookahead: int | None) -> Tensor:
    """Encodes a whole recording.

    Args:
        model: Of `load_reference`.
        mels: [mel frames, bins].
        lookahead: None for offline models.

    Returns:
        [frames, hidden].
    """
    options = {} if lookahead is None else {"num_lookahead_tokens": lookahead}
    mask = torch.ones(1, len(mels), dtype=torch.long)
    with torch.inference_mode():
        return model.encoder(mels[None], attention_mask=mask, **options).last_hidden_state[0]


def decode_by_frames(
    weights: TransducerWeights, config: TransducerConfig, frames: Tensor
) -> list[tuple[int, int, int]]:
    """Greedy decoding of one recording, frame by frame, with torch's LSTM.

    It follows the algorithm that NeMo publishes for RNN-T and TDT: a blank of duration 0 lasts one
    frame, and after `max_symbols` tokens the next frame follows if the last one had duration 0.

    Args:
        weights: Tensors.
        config: Rules.
        frames: [frames, hidden] of the encoder.

    Returns:
        Token, frame and duration of every token.
    """
    lstm = torch.nn.LSTM(config.hidden_size, config.hidden_size, config.num_layers)
    with torch.no_grad():
        for i, layer in enumerate(weights.lstm):
            for kind, part in (("ih", layer.input), ("hh", layer.hidden)):
                getattr(lstm, f"weight_{kind}_l{i}").copy_(part.weight)
                assert part.bias is not None
                getattr(lstm, f"bias_{kind}_l{i}").copy_(part.bias)
    linear = torch.nn.functional.linear
    emitted: list[tuple[int, int, int]] = []
    with torch.no_grad():
        output, state = lstm(weights.embedding[config.blank_id][None])
        frame = count = 0
        while frame < len(frames):
            projected = linear(
                frames[frame], weights.encoder_projector.weight, weights.encoder_projector.bias
            )
            prediction = linear(output[0], weights.projector.weight, weights.projector.bias)
            hidden = torch.relu(projected + prediction)
            logits = linear(hidden, weights.head.weight, weights.head.bias)
            token = int(logits[: config.vocab_size].argmax())
            duration = 0
            if config.durations is not None:
                duration = config.durations[int(logits[config.vocab_size :].argmax())]
            if token == config.blank_id:
                frame, count = frame + (duration or 1), 0
                continue
            emitted.append((token, frame, duration if config.durations is not None else 1))
            count = count + 1
            if duration:
                frame, count = frame + duration, 0
            elif count >= config.max_symbols:
                frame, count = frame + 1, 0
            output, state = lstm(weights.embedding[token][None], state)
    return emitted
