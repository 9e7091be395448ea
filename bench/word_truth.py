"""Speaks sentences with flite, encodes them with the demo voice's codec, and writes word starts.

The output is the ground truth that `megakernel-tts calibrate --truth` reads. The demo voice's
alignment heads were chosen with examples/train_voice/replies.txt.

python -m bench.word_truth examples/train_voice/replies.txt speeches.json
"""

import argparse
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import soxr
import torch
from tqdm import tqdm

from examples.train_voice.flite import SAMPLE_RATE, Flite, Segment
from megakernel_tts.calibration.ground_truth import FORMAT
from megakernel_tts.codec.encoder import Encoder
from megakernel_tts.codec.weights import encoder_specs
from megakernel_tts.model.checkpoint import Checkpoint
from megakernel_tts.model.config import read_codec_config
from megakernel_tts.model.hub import find_checkpoint

VOICES = (("clara", "slt"), ("henry", "rms"))  # of the demo voice and of flite
_CODEC_RATE = 24_000  # Hz
_NUM_CODE_GROUPS = 16


def demo_encoder() -> Encoder:
    """The demo voice's codec encoder, on the CPU."""
    folder = find_checkpoint("demo") / "speech_tokenizer"
    config = read_codec_config(folder / "config.json")
    specs = encoder_specs(config.encoder, _NUM_CODE_GROUPS)
    cpu = torch.device("cpu")
    return Encoder(Checkpoint(folder).load(specs, cpu, torch.float32), config)


def word_starts(spoken: Segment) -> list[float]:
    """The start of each word in seconds; empty if flite does not give all of them in order."""
    phone_starts = [0.0, *spoken.ends[:-1].tolist()]
    starts: dict[int, float] = {}
    for word, start in zip(spoken.words.tolist(), phone_starts, strict=True):
        if word >= 0:
            starts.setdefault(word, max(0.0, start))
    complete = sorted(starts) == list(range(len(starts)))
    ordered = all(a <= b for a, b in pairwise(starts.values()))
    return list(starts.values()) if complete and ordered else []


def timed_speeches(sentences: list[str]) -> list[dict[str, Any]]:
    """Entries of a ground-truth file; sentences without word starts are left out.

    Args:
        sentences: Texts; the voices alternate.

    Returns:
        For each sentence `text`, `voice`, `codes` [frames, 16] and `starts` in seconds.
    """
    flite, encoder = Flite(), demo_encoder()
    speeches: list[dict[str, Any]] = []
    for i, text in enumerate(tqdm(sentences, disable=None)):
        voice, name = VOICES[i % len(VOICES)]
        spoken = flite.speak(text, name)
        starts = word_starts(spoken)
        if len(starts) != len(text.split()):
            continue
        wave = soxr.resample(spoken.samples.astype(np.float32) / 32768, SAMPLE_RATE, _CODEC_RATE)
        codes = encoder.encode(torch.from_numpy(wave)).tolist()
        rounded = [round(start, 3) for start in starts]
        speeches.append({"text": text, "voice": voice, "codes": codes, "starts": rounded})
    return speeches


def main() -> None:
    """Writes the ground-truth file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sentences", type=Path, help="a text file, one sentence per line")
    parser.add_argument("output", type=Path, help="a JSON file")
    options = parser.parse_args()
    lines = options.sentences.read_text(encoding="utf-8").splitlines()
    sentences = [line.split("\t")[0] for line in lines if line.strip()]
    speeches = timed_speeches(sentences)
    options.output.write_text(json.dumps({"format": FORMAT, "speeches": speeches}))
    print(f"{len(speeches)} of {len(sentences)} sentences written to {options.output}")


if __name__ == "__main__":
    main()
