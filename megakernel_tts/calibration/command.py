"""`megakernel-tts calibrate`: finds the heads that follow the text, and writes `alignment.json`."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megakernel_tts.cli.console import UsageError

if TYPE_CHECKING:
    from megakernel_tts.align.alignment import Alignment
    from megakernel_tts.calibration.ranking import Ranked

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
_LONGEST = 200  # characters of a sentence, which is spoken as one piece
_SHOWN = 8  # heads in the table
_VOICE_FILE = ".safetensors"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("model", help="a folder, a hub id, or demo")
    parser.add_argument(
        "--sentences", type=Path, help="what to let it say, one a line (default: a few in English)"
    )
    parser.add_argument(
        "--truth",
        type=Path,
        help="speech whose words' times are known, in place of sentences: heads are then ranked by "
        "their errors (the format: megakernel_tts/align/truth.py)",
    )
    parser.add_argument("--voice", help="a named voice, or a voice file for a Base model")
    parser.add_argument("--instruct", help="how to speak, or for VoiceDesign who")
    parser.add_argument(
        "-o", "--output", type=Path, help="default: alignment.json beside the model's config.json"
    )
    parser.add_argument(
        "--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)"
    )


@dataclass(frozen=True)
class Calibration:
    """What was found.

    Attributes:
        alignment: To be written.
        ranked: All heads, the best first.
        file: Where the loader looks for it.
    """

    alignment: "Alignment"
    ranked: "list[Ranked]"
    file: Path


def calibrate(options: argparse.Namespace) -> Calibration:
    """Finds the heads.

    Raises:
        UsageError: Options that do not fit together, or no sentences.
        MegakernelTTSError: The model or the truth cannot be used.
    """
    if options.truth is not None and options.sentences is not None:
        raise UsageError("--truth has texts of its own; leave --sentences out")
    sentences = SENTENCES if options.sentences is None else _read(options.sentences)
    import torch
    from tqdm import tqdm

    from megakernel_tts import Voice
    from megakernel_tts.align.alignment import ALIGNMENT_FILE, Alignment
    from megakernel_tts.backends.select import pick_device
    from megakernel_tts.calibration import ranking
    from megakernel_tts.calibration.capture import SpeechCapture, speak
    from megakernel_tts.calibration.ground_truth import read_truth
    from megakernel_tts.info import model_info
    from megakernel_tts.loader import load_checkpoint
    from megakernel_tts.model import hub
    from megakernel_tts.tts import TTS

    folder = hub.find_checkpoint(options.model)
    voice = options.voice
    if voice is not None and voice.endswith(_VOICE_FILE):
        voice = Voice.load(voice)
    loaded = load_checkpoint(folder, pick_device(options.device), torch.float32, 1)
    config = loaded.config
    with TTS(loaded, model_info(config, options.model)) as tts:
        if options.truth is not None:
            talker = config.talker
            speeches = read_truth(options.truth, talker.num_groups, talker.num_codes)
        else:
            said = speak(tts, sentences, voice, options.instruct)
            speeches = list(tqdm(said, "speaking", len(sentences), disable=None))
        listener = SpeechCapture(loaded, voice, options.instruct)
        heard = [listener.capture_attention(s) for s in tqdm(speeches, "listening", disable=None)]
    layouts = list(zip(*heard, strict=True))
    stack = config.talker.stack
    heads = [(layer, head) for layer in range(stack.num_layers) for head in range(stack.num_heads)]
    ranked = ranking.rank(layouts, tqdm(heads, "ranking", disable=None))
    chosen = ranking.choose(layouts, ranked)
    everything = [speech for speeches in layouts for speech in speeches]
    late = ranking.lateness(everything, chosen)
    made: dict[str, Any] = {
        "speeches": len(speeches),
        "truth": None if options.truth is None else options.truth.name,
        "late_s": [round(seconds, 4) for seconds in late],
        "heads": [_figures(r) for r in ranked if r.head in chosen],
    }
    if options.truth is not None:
        made["error_s"] = round(ranking.error(everything, chosen), 4)
    lookahead = ranking.choose_lookahead(late)
    alignment = Alignment(tuple(chosen), ranking.FLOOR, lookahead, made)
    return Calibration(alignment, ranked, folder / ALIGNMENT_FILE)


def _read(file: Path) -> Sequence[str]:
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read as UTF-8 text ({error})") from None
    if not any(lines):
        raise UsageError(f"{file} holds no sentences; write one a line")
    for number, line in enumerate(lines, 1):
        if len(line) > _LONGEST:
            raise UsageError(
                f"{file}: line {number} has {len(line)} characters; give sentences of "
                f"{_LONGEST} at most, which are spoken in one piece"
            )
    return [line for line in lines if line]


def _figures(ranked: "Ranked") -> dict[str, Any]:
    known = {} if ranked.error is None else {"error_s": round(ranked.error, 4)}
    return {"head": ranked.head, "monotonicity": round(ranked.monotonicity, 3), **known}


def table(found: Calibration) -> list[str]:
    """The best heads as lines of text; those that are watched are marked."""
    lines = ["  layer  head  nats above chance  mean error"]
    for r in found.ranked[:_SHOWN]:
        mark = "*" if r.head in found.alignment.heads else " "
        error = "" if r.error is None else f"{1000 * r.error:8.0f} ms"
        lines.append(f"{mark} {r.head[0]:5}  {r.head[1]:4}  {r.monotonicity:17.2f} {error}")
    return lines
