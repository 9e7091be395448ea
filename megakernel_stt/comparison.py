"""Compares a recogniser with transformers' model of the same checkpoint, token by token."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megakernel_common.checkpoint import Checkpoint
from megakernel_common.errors import CheckpointError, MissingExtraError
from megakernel_stt.audio import Resampler, Wav, read_blocks
from megakernel_stt.errors import RecognitionError
from megakernel_stt.model.config import AUTO, FRAME_S, SAMPLE_RATE, ModelConfig, read_model_config
from megakernel_stt.model.hub import find_model
from megakernel_stt.stt import STT
from megakernel_stt.text.tokenizer import Tokenizer
from megakernel_stt.text.words import Token

_MODELS = {  # of transformers 5.23, by kind: streaming or not, with a language prompt or durations
    "streaming": "NemotronAsrStreamingForRNNT",
    "multilingual": "Nemotron3_5AsrForRNNT",
    "rnnt": "ParakeetForRNNT",
    "tdt": "ParakeetForTDT",
}


@dataclass(frozen=True)
class Comparison:
    """Tokens of one recording.

    Attributes:
        ours: Tokens of this package.
        theirs: Ids of transformers' tokens.
        their_texts: Their pieces of the vocabulary.
    """

    ours: tuple[Token, ...]
    theirs: tuple[int, ...]
    their_texts: tuple[str, ...]

    @property
    def first_difference(self) -> int | None:
        """Index of the first token that differs, or that one side lacks; None if all are equal."""
        ids = [token.id for token in self.ours]
        for i, (ours, theirs) in enumerate(zip(ids, self.theirs, strict=False)):
            if ours != theirs:
                return i
        return None if len(ids) == len(self.theirs) else min(len(ids), len(self.theirs))


def compare(
    model: str, wav: Wav, language: str = AUTO, lookahead_ms: int | None = None
) -> Comparison:
    """Recognises a recording with both, on the CPU in float32.

    Args:
        model: A folder that transformers saved, or a hub id of one.
        wav: As for `STT.transcribe`.
        language: As for `STT.transcribe`.
        lookahead_ms: As for `STT.transcribe`.

    Raises:
        MissingExtraError: transformers 5.23 or newer is not installed.
        CheckpointError: The model is missing or broken, a NeMo archive, or stored in int8.
        RecognitionError: transformers fails.
        AudioError: The recording is not readable.
        LanguageError: The model has no such language.
        LookaheadError: The model has no such lookahead.
    """
    folder = find_model(model)
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json, and transformers reads no archives.")
    if Checkpoint(folder).has_int8:
        raise CheckpointError(
            f"{folder} has matrices of int8, which transformers does not read; compare a model of "
            "bfloat16, float16 or float32."
        )
    config = read_model_config(folder)
    samples, kind = _read(wav), _kind(config)
    _reference_class(kind)  # before the models are loaded, which takes longer
    with STT.load(folder, "cpu", "float32", slots=1) as stt:
        ms = stt.lookaheads_ms[-1] if lookahead_ms is None and stt.lookaheads_ms else lookahead_ms
        transcript = stt.transcribe((samples, SAMPLE_RATE), language, ms)
    lookahead = round(ms / 1000 / FRAME_S) - 1 if ms is not None and stt.lookaheads_ms else None
    options = {}
    if config.prompt is not None:
        options["prompt_ids"] = torch.tensor([config.prompt.ids[language]])
    reference = load_reference(folder, kind)
    try:
        mels = extract_features(folder, config, samples)
        (theirs,) = generate(reference, [mels], lookahead, **options)
    except Exception as error:  # of any kind: transformers documents none
        raise RecognitionError(
            f"transformers fails: {error!r}. Its TDT decoding is known to, where a duration has "
            "the largest logit."
        ) from error
    ids = config.transducer.vocab_size, config.transducer.blank_id
    pieces = Tokenizer.from_folder(folder, *ids).pieces
    return Comparison(transcript.tokens, tuple(theirs), tuple(pieces[i] for i in theirs))


def _read(wav: Wav) -> NDArray[np.float32]:
    """A recording at 16 kHz [samples]."""
    parts, resampler = [], None
    for samples, rate in read_blocks(wav):
        resampler = resampler or Resampler(rate)
        parts.append(resampler.push(samples))
    if resampler is not None:
        parts.append(resampler.rest())
    return np.concatenate([np.zeros(0, np.float32), *parts])


def _kind(config: ModelConfig) -> str:
    if config.encoder.streaming is not None:
        return "streaming" if config.prompt is None else "multilingual"
    return "rnnt" if config.transducer.durations is None else "tdt"


def load_reference(folder: Path, kind: str) -> Any:
    """The model of a folder in transformers.

    Args:
        folder: Of the checkpoint.
        kind: A key of `_MODELS`.

    Raises:
        MissingExtraError: transformers is missing, or has no such model.
    """
    model_class, transformers = _reference_class(kind), import_module("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = model_class.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.decoder_start_token_id = model.config.blank_token_id
    return model


def _reference_class(kind: str) -> Any:
    try:
        return getattr(import_module("transformers"), _MODELS[kind])
    except (ImportError, AttributeError) as error:
        raise MissingExtraError(
            "The comparison needs transformers 5.23 or newer with its audio packages: "
            "pip install 'transformers>=5.23' librosa"
        ) from error


def extract_features(folder: Path, config: ModelConfig, samples: NDArray[np.float32]) -> Tensor:
    """Transformers' features [mel frames, bins] of a recording at 16 kHz."""
    streaming = config.encoder.streaming is not None
    name = "NemotronAsrStreamingFeatureExtractor" if streaming else "ParakeetFeatureExtractor"
    extractor = getattr(import_module("transformers"), name).from_pretrained(folder)
    features = extractor(samples, sampling_rate=SAMPLE_RATE, return_tensors="pt")
    return features.input_features[0][: int(features.attention_mask.sum())]


def generate(
    model: Any, mels: Sequence[Tensor], lookahead: int | None, **options: Any
) -> list[list[int]]:
    """Tokens of a ragged batch of recordings in transformers, blanks left out.

    Args:
        model: Of `load_reference`.
        mels: [mel frames, bins] each.
        lookahead: Frames; None for offline models.
        **options: Of the model's `generate`.
    """
    lengths = torch.tensor([len(mel) for mel in mels])
    padded = torch.nn.utils.rnn.pad_sequence(list(mels), batch_first=True)
    mask = (torch.arange(padded.shape[1]) < lengths[:, None]).long()
    if lookahead is not None:
        options["num_lookahead_tokens"] = lookahead
    frames = model._get_subsampling_output_length(lengths)
    # The default limit counts the start token and so loses the last token of a full recording.
    limit = int(frames.max()) * (model.config.max_symbols_per_step + 1) + 1
    with torch.inference_mode():
        output = model.generate(
            input_features=padded, attention_mask=mask, max_new_tokens=limit, **options
        )
    tokens = []
    for ids, durations, count in zip(output.sequences, output.durations, frames, strict=True):
        frame, found = 0, []
        for token, duration in zip(ids[1:].tolist(), durations[1:].tolist(), strict=True):
            if frame >= int(count):
                break
            if token != model.config.blank_token_id:
                found.append(token)
            frame += duration
        tokens.append(found)
    return tokens
