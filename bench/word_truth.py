"""Flite's recordings as the demo voice's codec hears them, with flite's own word times.

What the demo voice's heads were calibrated with: sentences that are in no corpus.

python -m bench.word_truth held_out.txt truth.json
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

VOICES = (("clara", "slt"), ("henry", "rms"))
_GROUPS = 16


def demo_encoder() -> Encoder:
    """The demo voice's."""
    folder = find_checkpoint("demo") / "speech_tokenizer"
    config = read_codec_config(folder / "config.json")
    specs = encoder_specs(config.encoder, _GROUPS)
    cpu = torch.device("cpu")
    return Encoder(Checkpoint(folder).load(specs, cpu, torch.float32), config)


def word_starts(said: Segment) -> list[float]:
    """When each word begins, in seconds; empty if flite could not tell for each."""
    begins = [0.0, *said.ends[:-1].tolist()]
    starts: dict[int, float] = {}
    for word, begin in zip(said.words.tolist(), begins, strict=True):
        if word >= 0:
            starts.setdefault(word, max(0.0, begin))
    whole = sorted(starts) == list(range(len(starts)))
    rising = all(a <= b for a, b in pairwise(starts.values()))
    return list(starts.values()) if whole and rising else []


def timed_speeches(sentences: list[str]) -> list[dict[str, Any]]:
    """Speeches of a truth file; sentences that flite cannot tell the times of are left out."""
    flite, encoder = Flite(), demo_encoder()
    speeches: list[dict[str, Any]] = []
    for i, text in enumerate(tqdm(sentences, disable=None)):
        voice, name = VOICES[i % len(VOICES)]
        said = flite.speak(text, name)
        starts = word_starts(said)
        if len(starts) != len(text.split()):
            continue
        wave = soxr.resample(said.samples.astype(np.float32) / 32768, SAMPLE_RATE, 24_000)
        codes = encoder.encode(torch.from_numpy(wave)).tolist()
        rounded = [round(start, 3) for start in starts]
        speeches.append({"text": text, "voice": voice, "codes": codes, "starts": rounded})
    return speeches


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sentences", type=Path, help="one a line")
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    lines = options.sentences.read_text(encoding="utf-8").splitlines()
    sentences = [line.split("\t")[0] for line in lines if line.strip()]
    speeches = timed_speeches(sentences)
    options.output.write_text(json.dumps({"format": FORMAT, "speeches": speeches}))
    print(f"{len(speeches)} of {len(sentences)} sentences")


if __name__ == "__main__":
    main()
