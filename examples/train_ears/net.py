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
from examples.train_voice.training import bind
from megakernel_common.checkpoint import TensorSpec, leaves
from megakernel_common.layers import merge_heads, split_heads
from megakernel_stt.model import weights as w
from megakernel_stt.model.config import ModelConfig

_EPS = 1e-5
_POSITION_BASE = 10_000.0
_HIDDEN = -1e9  # score of a frame that attention does not see
_DROPOUT = 0.1
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
        for block in self._w.encoder.blocks:
            x = x + 0.5 * self._feed_forward(block.feed_forward1, x)
            x = x + self._dropped(self._attention(block.attention, x, positions, visible))
            x = x + self._dropped(self._convolution(block.convolution, x, is_frame))
            x = _norm(block.norm, x + 0.5 * self._feed_forward(block.feed_forward2, x))
        return x, lengths

    def _subsample(self, mels: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        x, subsampling = mels[:, None], self._w.encoder.subsampling
        for stage in subsampling.stages:
            x = F.pad(x, (2, 1, 2, 1))
            strided = stage.strided
            x = F.conv2d(x, strided.weight, strided.bias, stride=2, groups=x.shape[1])
            if stage.pointwise is not None:
                x = F.conv2d(x, stage.pointwise.weight, stage.pointwise.bias)
            lengths = lengths // 2 + 1
            x = torch.relu(x * _inside(x.shape[2], lengths)[:, None, :, None])
        return _apply(subsampling.linear, x.transpose(1, 2).flatten(2)), lengths

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

    def _attention(
        self, weights: w.Attention, x: Tensor, positions: Tensor, visible: Tensor
    ) -> Tensor:
        y, size = _norm(weights.norm, x), self.config.encoder.head_dim
        parts = (_apply(layer, y) for layer in (weights.query, weights.key, weights.value))
        query, key, value = (split_heads(part, size) for part in parts)
        distances = split_heads(F.linear(positions, weights.position)[None], size)[0]
        content = (query + weights.content_bias[:, None]) @ key.mT
        by_distance = (query + weights.position_bias[:, None]) @ distances.mT
        scores = (content + _shifted(by_distance)).float() / math.sqrt(size)
        scores = scores.masked_fill(~visible[:, None], _HIDDEN)
        return _apply(weights.output, merge_heads(scores.softmax(-1).to(value.dtype) @ value))

    def _convolution(self, weights: w.Convolution, x: Tensor, is_frame: Tensor) -> Tensor:
        assert isinstance(weights.inner_norm, w.Norm)
        y = F.glu(_apply(weights.pointwise_in, _norm(weights.norm, x)), -1)
        y = (y * is_frame[..., None]).mT
        kernel = weights.depthwise.weight
        y = F.conv1d(F.pad(y, (kernel.shape[2] - 1, 0)), kernel, groups=y.shape[1]).mT
        return _apply(weights.pointwise_out, F.silu(_norm(weights.inner_norm, y)))

    def _feed_forward(self, weights: w.FeedForward, x: Tensor) -> Tensor:
        y = F.silu(_apply(weights.up, _norm(weights.norm, x)))
        return self._dropped(_apply(weights.down, self._dropped(y)))

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, _DROPOUT, self.training)

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
        joint = torch.relu(projected[:, :, None] + predicted[:, None])
        logits = _apply(weights.head, joint)
        total = logits.float().logsumexp(-1)
        index = tokens[:, None, :, None].expand(-1, frames.shape[1], -1, 1)
        label = logits[:, :, :-1].gather(3, index)[..., 0].float()
        return logits[..., blank].float() - total, label - total[:, :, :-1]

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
