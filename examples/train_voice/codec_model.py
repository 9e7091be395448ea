"""The codec in training: encoder, codebooks and decoder, and their tensors in the checkpoint."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from examples.train_voice.codec_net import (
    DecoderNet,
    EncoderNet,
    Quantizer,
    project,
    uniform_,
    unit_gain,
)
from examples.train_voice.phonemes import PHONES
from examples.train_voice.speech import FRAME
from examples.train_voice.training import bind, fast_type
from megakernel_common.checkpoint import TensorSpec, leaves
from megakernel_tts.codec.weights import decoder_specs, encoder_specs
from megakernel_tts.model.config import CodecConfig

_DECODED_SHARE = 4  # one frame in so many of a crop is decoded
MELS = 320  # per frame: eight spectra of 40 bands
_BOOKS = {  # names in the checkpoint, and the group of layer 0
    "decoder.quantizer.rvq_first.vq.layers.{}._codebook.": 0,
    "decoder.quantizer.rvq_rest.vq.layers.{}._codebook.": 1,
    "encoder.quantizer.semantic_residual_vector_quantizer.layers.{}.codebook.": 0,
    "encoder.quantizer.acoustic_residual_vector_quantizer.layers.{}.codebook.": 1,
}


class CodecModel:
    """Parameters by their names in the checkpoint, and the networks that use them.

    Attributes:
        parameters: Parameters that are trained by gradients, with two auxiliary output layers.
        encoder: Waveform to embedding.
        decoder: Quantised vectors to waveform.
        quantizer: The codebooks.
    """

    def __init__(self, config: CodecConfig, device: torch.device) -> None:
        self.config = config
        dec = decoder_specs(config.decoder)
        enc = encoder_specs(config.encoder, config.decoder.num_groups)
        dim = config.encoder.codebook_dim
        specs = [s for s in (*leaves(enc), *leaves(dec)) if "codebook." not in s.name]
        heads = [
            TensorSpec("phone_head", (2 * len(PHONES), dim)),
            TensorSpec("mel_head", (MELS, config.decoder.codebook_dim)),
        ]
        self.parameters = {s.name: nn.Parameter(_initial(s, device)) for s in (*specs, *heads)}
        self._enc, self._dec = bind(enc, self.parameters), bind(dec, self.parameters)
        fast = fast_type(device)
        self.encoder = EncoderNet(self._enc, config, fast)
        self.decoder = DecoderNet(self._dec, config, fast)
        self.quantizer = Quantizer(
            config.decoder.num_groups, config.decoder.codebook_size, dim, device
        )

    def embed(self, wave: Tensor) -> tuple[Tensor, Tensor]:
        """Semantic and acoustic projection [batch, frames, dim] of a waveform's embedding."""
        z = self.encoder(wave)
        return project(z, self._enc.semantic.input), project(z, self._enc.acoustic.input)

    def join(self, semantic: Tensor, acoustic: Tensor) -> Tensor:
        """Input of the decoder [batch, frames, dim] for both quantised projections."""
        first = project(semantic, self._dec.first_out)
        return first + project(acoustic, self._dec.rest_out)

    def embed_codes(self, codes: Tensor) -> Tensor:
        """Input of the decoder [batch, frames, dim] for codes [batch, frames, groups]."""
        books = self.quantizer.books
        acoustic = sum(books[k][codes[..., k]] for k in range(1, len(books)))
        assert isinstance(acoustic, Tensor)
        return self.join(books[0][codes[..., 0]], acoustic)

    def decode_part(self, q: Tensor, wave: Tensor, *, at_start: bool) -> tuple[Tensor, Tensor]:
        """Decodes a quarter of each crop, which takes a third of the time.

        Args:
            q: Input of the decoder [batch, frames, dim].
            wave: The crops [batch, samples].
            at_start: Whether the first frames are decoded. Otherwise it is the last ones, with the
                others as context.

        Returns:
            The decoded waveform and the crops' part that it should equal, [batch, samples].
        """
        frames = max(1, q.shape[1] // _DECODED_SHARE)
        if at_start:
            return self.decoder(q[:, :frames]), wave[:, : frames * FRAME]
        return self.decoder(q, frames), wave[:, -frames * FRAME :]

    def calibrate(self, wave: Tensor) -> None:
        """Scales the weights of every layer to unit output variance for a sample of speech."""
        self.encoder.calibrating = self.decoder.calibrating = True
        with torch.no_grad():
            z = self.encoder(wave)
            for projection in (self._enc.semantic.input, self._enc.acoustic.input):
                unit_gain(projection, z)
            q = self.join(*(project(z, p.input) for p in (self._enc.semantic, self._enc.acoustic)))
            for projection in (self._dec.first_out, self._dec.rest_out):
                projection.div_(q.std())
            self.decoder(q / q.std())
        self.encoder.calibrating = self.decoder.calibrating = False

    def state(self, average: list[Tensor]) -> dict[str, Any]:
        """State for later stages, as precise as the checkpoint: averages and codebooks."""
        named = {k: v.half() for k, v in zip(self.parameters, average, strict=True)}
        return {"parameters": named, "books": self.quantizer.books.half()}

    def load(self, state: dict[str, Any]) -> None:
        """Loads a result of `state`."""
        with torch.no_grad():
            for name, value in state["parameters"].items():
                self.parameters[name].copy_(value)
        self.quantizer.load(state["books"])

    def decoder_parameters(self) -> list[nn.Parameter]:
        """Parameters on which codes do not depend."""
        return [p for name, p in self.parameters.items() if name.startswith("decoder.")]


def _initial(spec: TensorSpec, device: torch.device) -> Tensor:
    tensor = torch.zeros(spec.shape, device=device)
    leaf = spec.name.rsplit(".", 1)[-1]
    if leaf in ("scale", "gamma"):
        return tensor.fill_(0.1)
    if len(spec.shape) == 1:
        return tensor.fill_(1.0) if leaf == "weight" else tensor
    uniform_(tensor, tensor[0].numel())
    return tensor


def file_tensors(state: dict[str, Any], convert: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Tensors of a trained codec as in a checkpoint, unused ones that loaders require included."""
    books: Tensor = state["books"].float().cpu()
    tensors = {k: v.float().cpu() for k, v in state["parameters"].items() if "." in k}
    dim = books.shape[2]
    hidden = tensors["encoder.downsample.conv.weight"].shape[0]
    width = tensors["decoder.quantizer.rvq_first.output_proj.weight"].shape[0]
    for part in ("first", "rest"):
        tensors[f"decoder.quantizer.rvq_{part}.input_proj.weight"] = torch.zeros(dim, width, 1)
    for part in ("semantic", "acoustic"):
        name = f"encoder.quantizer.{part}_residual_vector_quantizer.output_proj.weight"
        tensors[name] = torch.zeros(hidden, dim, 1)
    for pattern, first in _BOOKS.items():
        encoder = pattern.startswith("encoder")
        for layer, book in enumerate(books[first:] if first else books[:1]):
            prefix = pattern.format(layer)
            tensors[prefix + ("embed_sum" if encoder else "embedding_sum")] = book.clone()
            tensors[prefix + "cluster_usage"] = torch.ones(len(book))
            if encoder:
                tensors[prefix + "initialized"] = torch.ones(1)
    return {name: convert(tensor).contiguous() for name, tensor in tensors.items()}
