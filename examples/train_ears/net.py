"""The recogniser's network for training, with the same trees of tensors as the engine's.

Whole recordings are encoded at once: masks have the effect of the chunks in which the engine
encodes. All shapes are static, and the lookahead is a tensor, so that a step of training can be
captured as a CUDA graph for all lookaheads.
"""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.train_voice.codec_net import uniform_
from examples.train_voice.training import bind, fused
from megakernel_common.checkpoint import TensorSpec, leaves
from megakernel_common.layers import merge_heads, split_heads
from megakernel_stt.model import weights as w
from megakernel_stt.model.config import ModelConfig

_EPS = 1e-5
_POSITION_BASE = 10_000.0
_HIDDEN = -1e9  # score of a frame that attention does not see
_DROPOUT = 0.1
_COLUMNS = 16  # a product is fast if its inner size is a multiple
_HEAD_GAIN = 0.1  # of the initial weights of the heads


class Net:
    """All parameters, in float32, and the forward pass.

    Attributes:
        config: Sizes.
        parameters: By the names of the checkpoint's tensors, and those of the CTC head.
        training: Whether dropout is applied.
    """

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        """Initialises the parameters with torch's random state."""
        assert config.encoder.streaming is not None
        self.config, self.training = config, False
        specs = w.model_specs(config)
        ctc = w.Linear(
            TensorSpec("ctc.weight", (config.transducer.vocab_size, config.encoder.hidden_size)),  # type: ignore[arg-type]
            TensorSpec("ctc.bias", (config.transducer.vocab_size,)),  # type: ignore[arg-type]
        )
        self.names = [leaf.name for leaf in leaves(specs)]
        residual_gain = (2 * config.encoder.num_layers) ** -0.5
        self.parameters = {
            leaf.name: nn.Parameter(_initial(leaf, residual_gain).to(device))
            for tree in (specs, ctc)
            for leaf in leaves(tree)
        }
        self._w: w.Weights = bind(specs, self.parameters)
        self._ctc: w.Linear = bind(ctc, self.parameters)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Sets all parameters."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(tensors[name])

    @torch.no_grad()
    def calibrate(self, mels: Tensor, lengths: Tensor) -> None:
        """Makes the first convolution and the first block see a mean of 0 and a deviation of 1.

        The features are logarithms, from -17 to 10. The network has no other normalisation of them.

        Args:
            mels: [batch, mel frames, bins] of speech.
            lengths: [batch] int64, mel frames of each recording.
        """
        subsampling = self._w.encoder.subsampling
        conv, linear = subsampling.stages[0].strided, subsampling.linear
        assert conv.bias is not None and linear.bias is not None
        inside = mels[_inside(mels.shape[1], lengths)]
        conv.weight.div_(inside.std().clamp(min=_EPS))
        conv.bias.sub_(inside.mean() * conv.weight.sum((1, 2, 3)))
        x, lengths = self._subsample(mels, lengths)
        x = x[_inside(x.shape[1], lengths)]
        deviation = x.std(0, correction=0).clamp(min=_EPS)
        linear.weight.div_(deviation[:, None])
        linear.bias.sub_(x.mean(0)).div_(deviation)

    @torch.no_grad()
    def initialise_heads(self, counts: Tensor, frames: float) -> None:
        """Makes the tokens' frequencies the first probabilities of both heads.

        Heads that do not begin with them learn them within a few steps by making the frames of the
        encoder equal, and then the encoder has no gradient.

        Args:
            counts: [ids], how often each token occurs.
            frames: Of all recordings, about.
        """
        blank, tokens = self.config.transducer.blank_id, counts.sum()
        frequencies = (counts + 1) / (counts + 1).sum()
        for name, steps in (("ctc", frames), ("joint.head", frames + tokens)):
            share = (tokens / steps).clamp(max=0.9)  # of the steps that have a label
            bias = self.parameters[f"{name}.bias"]
            bias.copy_((share * frequencies).log())
            bias[blank] = (1 - share).log()

    def encode(self, mels: Tensor, lengths: Tensor, lookahead: Tensor) -> tuple[Tensor, Tensor]:
        """Encodes whole recordings.

        Args:
            mels: [batch, mel frames, bins] float32.
            lengths: [batch] int64, mel frames of each recording, at least 1.
            lookahead: int64 scalar, frames of a chunk after its first.

        Returns:
            [batch, frames, hidden], and the frames of each recording [batch]; frames beyond them
            have no meaning.
        """
        x, lengths = self._subsample(mels, lengths)
        frame = torch.arange(x.shape[1], device=x.device)
        is_frame = frame < lengths[:, None]
        visible = self._visible(frame, lookahead) & is_frame[:, None]
        positions = self._positions(x.shape[1], x.device)
        run = fused(_run_block, x.device)
        for block in self._w.encoder.blocks:
            x = run(block, x, positions, visible, is_frame, self.training)
        return x, lengths

    def _subsample(self, mels: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        x, subsampling = mels[..., None], self._w.encoder.subsampling
        active = fused(_active, mels.device)
        for stage in subsampling.stages:
            x = _convolved(stage, x)
            lengths = lengths // 2 + 1
            x = active(x, _inside(x.shape[1], lengths))
        return _apply(subsampling.linear, x.transpose(2, 3).flatten(2)).float(), lengths

    def _visible(self, frame: Tensor, lookahead: Tensor) -> Tensor:
        """[frames, frames], whether attention from the first index sees the second."""
        streaming = self.config.encoder.streaming
        assert streaming is not None
        size = lookahead + 1
        chunk = frame // size
        ahead = chunk[:, None] - chunk
        return (ahead >= 0) & (ahead <= streaming.left_context // size)

    def _positions(self, frames: int, device: torch.device) -> Tensor:
        """Embeddings of the distances from frames - 1 to 1 - frames: [distances, hidden]."""
        hidden = self.config.encoder.hidden_size
        exponents = torch.arange(0, hidden, 2, device=device).float() / hidden
        distances = torch.arange(frames - 1, -frames, -1, device=device).float()
        angles = distances[:, None] * (1.0 / _POSITION_BASE**exponents)
        return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)

    def ctc_scores(self, frames: Tensor) -> Tensor:
        """Log-probabilities [batch, frames, ids] of the auxiliary CTC head."""
        return _apply(self._ctc, frames).float().log_softmax(-1)

    def transducer_scores(self, frames: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the transducer.

        Args:
            frames: [batch, frames, hidden] of the encoder.
            tokens: [batch, labels] int64; any id beyond a text's end.

        Returns:
            Of blank [batch, frames, labels + 1], and of each next label [batch, frames, labels].
        """
        weights, blank = self._w.transducer, self.config.transducer.blank_id
        predicted = _apply(weights.projector, self._predict(F.pad(tokens, (1, 0), value=blank)))
        projected = _apply(weights.encoder_projector, frames)
        run = fused(_run_joint, frames.device)
        blanks, labels = run(weights.head, projected, predicted, F.pad(tokens, (0, 1)), blank)
        return blanks, labels[:, :, :-1]

    def _predict(self, tokens: Tensor) -> Tensor:
        """Outputs of the prediction network [batch, labels, hidden]."""
        weights, hidden = self._w.transducer, self.config.transducer.hidden_size
        x = F.embedding(tokens, weights.embedding)
        zeros = x.new_zeros(len(weights.lstm), len(tokens), hidden)
        tensors: list[Tensor] = []
        for layer in weights.lstm:
            assert layer.input.bias is not None and layer.hidden.bias is not None
            tensors += [layer.input.weight, layer.hidden.weight]
            tensors += [layer.input.bias, layer.hidden.bias]
        # cuDNN would copy all weights into one block in each step.
        with (
            torch.autocast(x.device.type, enabled=False),
            torch.backends.cudnn.flags(enabled=False),
        ):
            x, _, _ = torch.lstm(
                x, (zeros, zeros), tensors, True, len(weights.lstm), 0.0, True, False, True
            )
        return x


def _initial(leaf: TensorSpec, residual_gain: float) -> Tensor:
    """Initial values of a parameter; residual_gain: of the last layers of residual branches."""
    name, shape = leaf.name, leaf.shape
    values = torch.zeros(shape)
    if "lstm" in name:
        uniform_(values, shape[0] // 4)
    elif len(shape) == 1:
        values.fill_(float(name.endswith(".weight")))  # of a norm
    elif "embedding" in name:
        values.normal_(std=0.5)
    elif not name.endswith(("bias_u", "bias_v")):
        values.normal_(std=1 / math.sqrt(math.prod(shape[1:])))
    if name.endswith(("linear2.weight", "o_proj.weight", "pointwise_conv2.weight")):
        values.mul_(residual_gain)
    elif name in ("ctc.weight", "joint.head.weight"):
        values.mul_(_HEAD_GAIN)
    return values


def _convolved(stage: w.Stage, x: Tensor) -> Tensor:
    """A stage's convolutions of x [batch, frames, bins, channels] as one product or convolution.

    Matrix units multiply by more weights faster than a depthwise convolution by fewer.
    """
    kernel, bias = stage.strided.weight, stage.strided.bias
    assert bias is not None
    frames, bins = x.shape[1] // 2 + 1, x.shape[2] // 2 + 1
    x = F.pad(x, (0, 0, 2, 1, 2, 1))
    if stage.pointwise is None:
        taps = [
            x[:, i : i + 2 * frames - 1 : 2, j : j + 2 * bins - 1 : 2]
            for i in range(kernel.shape[2])
            for j in range(kernel.shape[3])
        ]
        columns = F.pad(torch.cat(taps, 3), (0, -len(taps) % _COLUMNS)).flatten(1, 2)
        weight = F.pad(kernel.flatten(1), (0, -len(taps) % _COLUMNS))
        # By recording, so that the gradient of the weight is a sum of short sums.
        y = columns @ weight.t().expand(len(x), -1, -1)
        return y.unflatten(1, (frames, bins)) + bias
    mix = stage.pointwise.weight.flatten(1)
    assert stage.pointwise.bias is not None
    dense = mix[:, :, None, None] * kernel[:, 0]
    x = F.conv2d(x.permute(0, 3, 1, 2), dense, mix @ bias + stage.pointwise.bias, stride=2)
    return x.permute(0, 2, 3, 1)


def _active(x: Tensor, inside: Tensor) -> Tensor:
    """ReLU of x [batch, frames, bins, channels], 0 outside of the recordings."""
    return torch.relu(x) * inside[..., None, None]


def _run_block(
    block: w.Block, x: Tensor, positions: Tensor, visible: Tensor, is_frame: Tensor, training: bool
) -> Tensor:
    """A conformer block; `training`: whether dropout is applied."""

    def dropped(y: Tensor) -> Tensor:
        return F.dropout(y, _DROPOUT, training)

    def feed_forward(weights: w.FeedForward, y: Tensor) -> Tensor:
        y = F.silu(_apply(weights.up, _norm(weights.norm, y)))
        return dropped(_apply(weights.down, dropped(y)))

    x = x + 0.5 * feed_forward(block.feed_forward1, x)
    x = x + dropped(_attention(block.attention, x, positions, visible))
    x = x + dropped(_convolution(block.convolution, x, is_frame))
    return _norm(block.norm, x + 0.5 * feed_forward(block.feed_forward2, x))


def _attention(weights: w.Attention, x: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
    y = _norm(weights.norm, x)
    size = weights.content_bias.shape[1]
    parts = (_apply(layer, y) for layer in (weights.query, weights.key, weights.value))
    query, key, value = (split_heads(part, size) for part in parts)
    distances = split_heads(F.linear(positions, weights.position)[None], size)[0]
    content = (query + weights.content_bias[:, None]) @ key.mT
    by_distance = (query + weights.position_bias[:, None]) @ distances.mT
    scores = (content + _shifted(by_distance)).float() / math.sqrt(size)
    scores = scores.masked_fill(~visible[:, None], _HIDDEN)
    return _apply(weights.output, merge_heads(scores.softmax(-1).to(value.dtype) @ value))


def _convolution(weights: w.Convolution, x: Tensor, is_frame: Tensor) -> Tensor:
    assert isinstance(weights.inner_norm, w.Norm)
    y = F.glu(_apply(weights.pointwise_in, _norm(weights.norm, x)), -1)
    frames, kernel = x.shape[1], weights.depthwise.weight[:, 0]
    taps = kernel.shape[1]
    y = F.pad(y * is_frame[..., None], (0, 0, taps - 1, 0))
    y = sum(
        (y[:, i : i + frames] * kernel[:, i] for i in range(1, taps)), y[:, :frames] * kernel[:, 0]
    )
    return _apply(weights.pointwise_out, F.silu(_norm(weights.inner_norm, y)))


def _run_joint(
    head: w.Linear, projected: Tensor, predicted: Tensor, tokens: Tensor, blank: int
) -> tuple[Tensor, Tensor]:
    """Log-probabilities [batch, frames, labels] of blank and of `tokens` [batch, labels]."""
    logits = _apply(head, torch.relu(projected[:, :, None] + predicted[:, None])).float()
    total = logits.logsumexp(-1)
    # A sum over all ids with one term: unlike that of a gather, its gradient is fused with the
    # one of the total.
    is_label = torch.arange(logits.shape[-1], device=logits.device) == tokens[:, None, :, None]
    label = torch.where(is_label, logits, 0.0).sum(-1)
    return logits[..., blank] - total, label - total


def _inside(frames: int, lengths: Tensor) -> Tensor:
    """[batch, frames], whether a frame is in its recording."""
    return torch.arange(frames, device=lengths.device) < lengths[:, None]


def _apply(layer: w.Linear, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight.flatten(1), layer.bias)


def _norm(norm: w.Norm, x: Tensor) -> Tensor:
    return F.layer_norm(x.float(), x.shape[-1:], norm.weight, norm.bias, _EPS)


def _shifted(by_distance: Tensor) -> Tensor:
    """Scores by distance [batch, heads, frames, distances] as scores by key [..., frames].

    The distance of query i and key j is at index (frames - 1 - i) + j. With a column more the
    scores of each query begin 2 * frames - 1 values after those of the one before it.
    """
    frames, distances = by_distance.shape[2:]
    flat = F.pad(by_distance, (0, 1)).flatten(2)[..., frames - 1 : -1]
    return flat.unflatten(2, (frames, distances))[..., :frames]
