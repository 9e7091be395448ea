"""The benchmark of recognition, on a CPU: its bias of blank, and its chunks."""

from dataclasses import replace

import torch

from bench.recognition import (
    TOKENS_PER_FRAME,
    calibrated,
    encoder_frames,
    measure_chunks,
    measure_features,
)
from megakernel_stt.engine.slot_recogniser import SlotRecognisers
from megakernel_stt.model.random_checkpoint import Size, random_model
from megakernel_stt.network.transducer import Transducer
from tests.emulator.transducer import emulated_transducer


def test_the_bias_of_blank_gives_the_tokens_per_frame_that_are_reported() -> None:
    model = random_model("streaming", Size(), torch.device("cpu"), torch.float32)
    weights, config = model.weights.transducer, model.config.transducer
    with torch.inference_mode():
        made = SlotRecognisers(model, emulated_transducer(weights, config), None, 2)
        recogniser = made.make(0)
        frames = encoder_frames(model, recogniser, 40)
        found, rate = calibrated(weights, config, frames, Transducer)
        assert abs(rate - TOKENS_PER_FRAME) < 0.1
        model = replace(model, weights=replace(model.weights, transducer=found))
        made = SlotRecognisers(model, emulated_transducer(found, config), None, 2)
        row = measure_chunks(made.make(0), 2, 4, model.config.encoder.num_mels)
    assert row["streams"] == 2 and row["samples_to_tokens"]


def test_features_of_several_streams_are_measured_together_and_by_packet() -> None:
    row = measure_features(num_streams=3, num_chunks=4, bins=80)
    assert row["streams"] == 3 and 0 < row["together_ms"] < 1000 and 0 < row["each_packet_ms"]
