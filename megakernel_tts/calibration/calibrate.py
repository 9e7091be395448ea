"""Calibration of a checkpoint: captures attention, ranks heads, chooses heads and look-ahead."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from megakernel_common.devices import pick_device
from megakernel_tts import TTS, Voice
from megakernel_tts.align.alignment import ALIGNMENT_FILE, Alignment
from megakernel_tts.calibration import ranking
from megakernel_tts.calibration.capture import SpeechCapture, synthesise
from megakernel_tts.calibration.ground_truth import TimedSpeech, read_truth
from megakernel_tts.calibration.ranking import RankedHead
from megakernel_tts.info import model_info
from megakernel_tts.loader import load_checkpoint
from megakernel_tts.model import hub

SENTENCES = (
    "Good morning, how can I help you today?",
    "The train to the north leaves at seven in the morning.",
    "I have found three hotels near the station, and two of them have a free room.",
    "Please wait a moment.",
    "Yes, that is possible, but it takes a little longer.",
    "Your order was sent on Monday and should arrive by the end of the week.",
    "Would you like a window seat or a seat near the door?",
    "It rains in the mountains, so take a warm coat with you.",
    "I am sorry to hear that; let me see what I can do.",
    "The museum is closed on Tuesdays, except in summer.",
    "Turn right after the bridge, then follow the river until you see the old mill.",
    "Thank you for calling, and have a pleasant evening!",
)


@dataclass(frozen=True)
class Calibration:
    """The result of a calibration.

    Attributes:
        alignment: The contents of `alignment.json`.
        ranked: All heads, the best first.
    """

    alignment: Alignment
    ranked: list[RankedHead]


def alignment_file(model: str) -> Path:
    """Where the loader expects a model's `alignment.json`; downloads the model where needed.

    Raises:
        CheckpointError: There is no such model.
    """
    return hub.find_checkpoint(model) / ALIGNMENT_FILE


def calibrate(
    model: str,
    device: str = "auto",
    *,
    sentences: Sequence[str] = SENTENCES,
    truth: Path | None = None,
    voice: str | Voice | None = None,
    instruct: str | None = None,
) -> Calibration:
    """Selects the alignment heads of a checkpoint; progress is shown on standard error.

    Args:
        model: A folder, a hub id or `demo`.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        sentences: Texts for the model to speak, without ground truth.
        truth: A file of speech with known word times, which replaces the sentences; see
            `ground_truth.py`. Heads are then ranked by their errors.
        voice: A named voice, or a cloned one for a Base model.
        instruct: How to speak; for VoiceDesign a description of the voice.

    Raises:
        MegakernelTTSError: The model, the voice or the ground truth cannot be used.
    """
    loaded = load_checkpoint(hub.find_checkpoint(model), pick_device(device), torch.float32, 1)
    talker = loaded.config.talker
    with TTS(loaded, model_info(loaded.config, model)) as tts:
        if truth is not None:
            speeches = read_truth(truth, talker.num_groups, talker.num_codes)
        else:
            generated = synthesise(tts, sentences, voice, instruct)
            speeches = list(tqdm(generated, "speaking", len(sentences), disable=None))
        capture = SpeechCapture(loaded, voice, instruct)
        progress: tqdm[TimedSpeech] = tqdm(speeches, "capturing attention", disable=None)
        captures = [capture.capture_attention(speech) for speech in progress]
    by_layout = list(zip(*captures, strict=True))
    stack = talker.stack
    heads = [(layer, head) for layer in range(stack.num_layers) for head in range(stack.num_heads)]
    ranked = ranking.rank(by_layout, tqdm(heads, "ranking heads", disable=None))
    chosen = ranking.choose_heads(by_layout, ranked)
    all_speeches = [speech for layout in by_layout for speech in layout]
    late = ranking.lookahead_errors(all_speeches, chosen)
    made: dict[str, Any] = {
        "speeches": len(speeches),
        "truth": None if truth is None else truth.name,
        "late_s": [round(seconds, 4) for seconds in late],
        "heads": [_figures(head) for head in ranked if head.head in chosen],
    }
    if truth is not None:
        made["error_s"] = round(ranking.mean_error(all_speeches, chosen), 4)
    lookahead = ranking.choose_lookahead(late)
    alignment = Alignment(tuple(chosen), ranking.FLOOR, lookahead, made)
    return Calibration(alignment, ranked)


def _figures(ranked: RankedHead) -> dict[str, Any]:
    error = {} if ranked.error_s is None else {"error_s": round(ranked.error_s, 4)}
    return {"head": ranked.head, "monotonicity": round(ranked.monotonicity, 3), **error}
