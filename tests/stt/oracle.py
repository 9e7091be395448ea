"""transformers' models of the same checkpoints, and a transducer that decodes frame by frame."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megakernel_stt.model.config import TransducerConfig
from megakernel_stt.model.random_checkpoint import Kind
from megakernel_stt.model.weights import TransducerWeights

CLASSES = {
    "streaming": "NemotronAsrStreamingForRNNT",
    "multilingual": "Nemotron3_5AsrForRNNT",
    "rnnt": "ParakeetForRNNT",
    "tdt": "ParakeetForTDT",
}


def load_oracle(folder: Path, kind: Kind) -> Any:
    """The model of a folder in transformers."""
    transformers = import_module("transformers")

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = getattr(transformers, CLASSES[kind]).from_pretrained(folder).eval()
    model.generation_config.decoder_start_token_id = model.config.blank_token_id
    return model


def encode(model: Any, mels: Tensor, lookahead: int | None) -> Tensor:
    """Encodes a whole recording.

    Args:
        model: Of `load_oracle`.
        mels: [mel frames, bins].
        lookahead: None for offline models.

    Returns:
        [frames, hidden].
    """
    options = {} if lookahead is None else {"num_lookahead_tokens": lookahead}
    mask = torch.ones(1, len(mels), dtype=torch.long)
    with torch.inference_mode():
        return model.encoder(mels[None], attention_mask=mask, **options).last_hidden_state[0]


def generate(model: Any, mels: Sequence[Tensor], lookahead: int | None) -> list[list[int]]:
    """Tokens of a ragged batch of recordings, blanks left out."""
    lengths = torch.tensor([len(mel) for mel in mels])
    padded = torch.nn.utils.rnn.pad_sequence(list(mels), batch_first=True)
    mask = (torch.arange(padded.shape[1]) < lengths[:, None]).long()
    options = {} if lookahead is None else {"num_lookahead_tokens": lookahead}
    frames = model._get_subsampling_output_length(lengths)
    # The default limit counts the start token and so loses the last token of a full recording.
    limit = int(frames.max()) * (model.config.max_symbols_per_step + 1) + 1
    with torch.inference_mode():
        output = model.generate(
            input_features=padded, attention_mask=mask, max_new_tokens=limit, **options
        )
    tokens = []
    for ids, steps, count in zip(output.sequences, output.durations, frames, strict=True):
        frame, found = 0, []
        for token, step in zip(ids[1:].tolist(), steps[1:].tolist(), strict=True):
            if frame >= int(count):
                break
            if token != model.config.blank_token_id:
                found.append(token)
            frame += step
        tokens.append(found)
    return tokens


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
