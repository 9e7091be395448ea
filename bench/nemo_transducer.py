"""NeMo's greedy decoders with the weights of ours, which benchmarks and tests compare with.

NeMo 3.0 is the package `nemo_toolkit` with its extra `asr`; docs/recognition.md says how to install
it.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor

from megakernel_stt.model.config import TransducerConfig
from megakernel_stt.model.weights import Linear, TransducerWeights

# graph: label looping whose two loops are WHILE nodes of a CUDA graph, FULL_GRAPH in NeMo
# graph_steps: the functions that this graph records, called from loops in Python
# labels: label looping in torch, which NeMo runs without a GPU
# frames: frame by frame; RNN-T in batches, TDT one recording after the other
Mode = Literal["graph", "graph_steps", "labels", "frames"]

_DECODING = "nemo.collections.asr.parts.submodules.rnnt_greedy_decoding"


def nemo_is_installed() -> bool:
    """Whether `NemoTransducer` can be made."""
    return find_spec("nemo") is not None


class NemoTransducer:
    """One of NeMo's greedy decoders."""

    def __init__(self, weights: TransducerWeights, config: TransducerConfig, mode: Mode) -> None:
        """Makes NeMo's modules, with copies of the weights.

        Args:
            weights: The tensors, on any device.
            config: Their sizes; blank is the last id, as always in NeMo.
            mode: Which decoder. `graph` needs a GPU; it raises `RuntimeError` at the first launch
                if the graph cannot be recorded, instead of falling back to a slower mode.

        Raises:
            ImportError: NeMo, or a package that it needs, is not installed.
        """
        assert config.blank_id == config.vocab_size - 1
        self._mode, self._has_durations = mode, config.durations is not None
        self._infer = _make_decoder(*_make_modules(weights, config), config, mode)
        self._computer = getattr(self._infer, "decoding_computer", None)
        if mode in ("graph", "graph_steps"):
            assert self._computer is not None
            name = {"graph": "full_graph", "graph_steps": "no_graphs"}[mode]
            self._computer.force_cuda_graphs_mode(name)

    def launch(self, frames: Tensor, lengths: Tensor) -> Any:
        """Decodes by label looping; on a GPU it does not wait.

        Args:
            frames: [batch, frames, in] of the encoder.
            lengths: [batch] int64, frames of every recording.

        Returns:
            NeMo's `BatchedHyps`.
        """
        assert self._computer is not None, "frame by frame, NeMo returns only texts"
        if self._mode == "graph_steps":  # a call on a CPU would choose the mode `labels`
            return self._computer.cuda_graphs_impl(frames, lengths)[0]
        return self._computer(frames, lengths)[0]

    @torch.inference_mode()
    def decode(self, frames: Tensor, lengths: list[int]) -> list[list[tuple[int, int, int]]]:
        """Decodes recordings.

        Args:
            frames: [batch, frames, in] of the encoder; there must be one frame at least.
            lengths: How many of them a recording has.

        Returns:
            Token, frame and duration (1 of RNN-T) of every token. Durations of the mode `labels`
            are those of the next joint step if another recording is at a blank (NeMo 3.0.0).
        """
        counts = torch.tensor(lengths, device=frames.device)
        if self._mode == "frames":
            channels_first = frames.transpose(1, 2)
            (found,) = self._infer(encoder_output=channels_first, encoded_lengths=counts)
        else:
            utilities = import_module("nemo.collections.asr.parts.utils.rnnt_utils")
            hypotheses = self.launch(frames, counts)
            found = utilities.batched_hyps_to_hypotheses(hypotheses, len(lengths))
        return [self._triples(hypothesis) for hypothesis in found]

    def _triples(self, hypothesis: Any) -> list[tuple[int, int, int]]:
        tokens = [int(token) for token in hypothesis.y_sequence]
        frames = [int(frame) for frame in hypothesis.timestamp]
        durations = [1] * len(tokens)
        if self._has_durations:
            durations = [int(duration) for duration in hypothesis.token_duration]
        return list(zip(tokens, frames, durations, strict=True))


def _make_modules(weights: TransducerWeights, config: TransducerConfig) -> tuple[Any, Any]:
    """NeMo's prediction network and joint network."""
    modules = import_module("nemo.collections.asr.modules.rnnt")
    like, size, num_tokens = weights.embedding, config.hidden_size, config.vocab_size - 1
    prediction = modules.RNNTDecoder(
        prednet={"pred_hidden": size, "pred_rnn_layers": config.num_layers}, vocab_size=num_tokens
    )
    joint = modules.RNNTJoint(
        jointnet={
            "encoder_hidden": weights.encoder_projector.weight.shape[1],
            "pred_hidden": size,
            "joint_hidden": size,
            "activation": "relu",
        },
        num_classes=num_tokens,
        num_extra_outputs=len(config.durations or ()),
        # On a GPU, logits are not normalised. On a CPU they would be: rounding could equal two.
        log_softmax=False,
    )
    tensors = {"prediction.embed.weight": weights.embedding}
    for i, layer in enumerate(weights.lstm):
        for kind, part in (("ih", layer.input), ("hh", layer.hidden)):
            tensors[f"prediction.dec_rnn.lstm.weight_{kind}_l{i}"] = part.weight
            tensors[f"prediction.dec_rnn.lstm.bias_{kind}_l{i}"] = _bias(part)
    prediction.load_state_dict(tensors)
    tensors = {}
    parts = {
        "enc": weights.encoder_projector,
        "pred": weights.projector,
        "joint_net.1": weights.head,
    }
    for name, part in parts.items():
        tensors |= {f"{name}.weight": part.weight, f"{name}.bias": _bias(part)}
    joint.load_state_dict(tensors)
    return prediction.to(like).eval(), joint.to(like).eval()


def _bias(layer: Linear) -> Tensor:
    return layer.weight.new_zeros(len(layer.weight)) if layer.bias is None else layer.bias


def _make_decoder(prediction: Any, joint: Any, config: TransducerConfig, mode: Mode) -> Any:
    decoding = import_module(_DECODING)
    options: dict[str, Any] = {
        "decoder_model": prediction,
        "joint_model": joint,
        "blank_index": config.blank_id,
        "max_symbols_per_step": config.max_symbols,
    }
    if config.durations is not None:
        options |= {"durations": list(config.durations), "include_duration": True}
        if mode == "frames":
            return decoding.GreedyTDTInfer(**options)
    else:
        options["loop_labels"] = mode != "frames"
    options["use_cuda_graph_decoder"] = mode == "graph"
    kind = "RNNT" if config.durations is None else "TDT"
    return getattr(decoding, f"GreedyBatched{kind}Infer")(**options)
