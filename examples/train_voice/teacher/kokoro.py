"""Kokoro-82M in torch, in batches, from the weights that `convert` writes.

It imports the networks of the package `kokoro` (`istftnet`, `modules`, `custom_stft`, `model`) but
none of the package's dependencies for text.
"""

import importlib.machinery
import importlib.util
import io
import json
import sys
import types
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from examples.train_voice.speech import SAMPLE_RATE, TeacherSpeech
from examples.train_voice.training import fused

PACK, STYLES = "kokoro.pack", "styles.npz"
WHEEL = "kokoro-0.9.4-py3-none-any.whl"
_HOP = 600  # samples of a frame of the duration model, 25 ms
_LEAD_S = 0.050  # speech sounds this much before its nominal time
_MAX_PHONEMES = 510
_STYLE = 256  # of which the first half is for the decoder, the second for prosody
_ROUND = 8  # frames: utterances are lengthened to a multiple, so that they form batches
_TEXT_BATCH = 256
_MAX_BATCH = 64
_MAX_FRAMES = 24_000  # of a batch
_NORM_EPS = 1e-5  # of the decoder's instance norms


def read_pack(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Configuration and float32 parameters of a pack (see `convert.write_pack`)."""
    raw = zlib.decompress(file.read_bytes())
    size = int.from_bytes(raw[:8], "little")
    head = json.loads(raw[8 : 8 + size])

    def array(entry: tuple[str, list[int], int]) -> NDArray[Any]:
        dtype, shape, offset = entry
        return np.frombuffer(raw, np.dtype(dtype), int(np.prod(shape)), 8 + size + offset).reshape(
            shape
        )

    parameters: dict[str, Tensor] = {}
    for entry in head["tensors"]:
        if "f" in entry:
            values = array(entry["f"]).astype(np.float32)
        else:
            values = array(entry["q"]).astype(np.float32)
            if "z" in entry:
                values = values - array(entry["z"]).astype(np.float32)
            values = values * array(entry["s"])
        parameters[entry["n"]] = torch.from_numpy(np.ascontiguousarray(values))
    return head["config"], parameters


def build_network(config: dict[str, Any]) -> Any:
    """The package's network without its weights' normalisation.

    Raises:
        ImportError: The package `kokoro` is not on the path.
    """
    warnings.filterwarnings("ignore", message=".*weight_norm.*")
    warnings.filterwarnings("ignore", message=".*dropout option.*")
    if "kokoro" not in sys.modules:  # a bare package, because kokoro/__init__.py imports misaki
        found = importlib.util.find_spec("kokoro")
        if found is None or found.submodule_search_locations is None:
            raise ImportError(f"{WHEEL} is not on the path")
        package = types.ModuleType("kokoro")
        package.__path__ = list(found.submodule_search_locations)
        sys.modules["kokoro"] = package
    if importlib.util.find_spec("loguru") is None:
        log = types.ModuleType("loguru")
        log.__spec__ = importlib.machinery.ModuleSpec("loguru", None)
        log.__dict__["logger"] = types.SimpleNamespace(debug=lambda *_, **__: None)
        sys.modules["loguru"] = log
    from kokoro.model import KModel  # pyright: ignore[reportMissingImports]

    empty = io.BytesIO()
    torch.save({}, empty)
    empty.seek(0)
    network = KModel(repo_id="local", config=config, model=empty).eval()
    for module in network.modules():
        if hasattr(module, "weight_g"):
            torch.nn.utils.remove_weight_norm(module)
    return network.requires_grad_(False)


def _activated(
    x: Tensor, scale: Tensor, shift: Tensor, alpha: Tensor, dtype: torch.dtype
) -> Tensor:
    """Instance norm of x [texts, channels, time], and the activation x + sin^2(alpha x) / alpha."""
    x = x.float()
    variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    x = (x - mean) * torch.rsqrt(variance + _NORM_EPS) * scale + shift
    return (x + torch.sin(alpha * x).square() / alpha).to(dtype)


class _ResidualBlock(torch.nn.Module):
    """A residual block of the decoder's last stages, in which it spends most of its time.

    On a GPU norms and activations are fused, and convolutions have float16 inputs, whose mantissa
    is that of TF32.
    """

    def __init__(self, block: Any, device: torch.device) -> None:
        super().__init__()
        on_gpu = device.type == "cuda"
        self._dtype = torch.float16 if on_gpu else torch.float32
        self._activated = fused(_activated, device)
        self.convs = torch.nn.ModuleList(
            conv.to(self._dtype)
            for pair in zip(block.convs1, block.convs2, strict=True)
            for conv in pair
        )
        self.styles = torch.nn.ModuleList(
            norm.fc for pair in zip(block.adain1, block.adain2, strict=True) for norm in pair
        )
        self.alphas = torch.nn.ParameterList(
            alpha for pair in zip(block.alpha1, block.alpha2, strict=True) for alpha in pair
        )

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        y = x
        layers = zip(self.convs, self.styles, self.alphas, strict=True)
        for i, (conv, affine, alpha) in enumerate(layers):
            gain, shift = affine(style)[..., None].chunk(2, 1)
            y = conv(self._activated(y, 1 + gain, shift, alpha, self._dtype))
            if i % 2:
                y = x = x + y
        return x


class Kokoro:
    """The teacher on a device."""

    def __init__(self, folder: Path, device: torch.device, rate: float) -> None:
        """Loads the weights.

        Args:
            folder: What `get.sh` made: `kokoro.pack` with the weights, `styles.npz` with style
                tables [510, 256], and the wheel of the package `kokoro`.
            device: Of the computation.
            rate: How fast it speaks, relative to the durations that it was trained with.

        Raises:
            FileNotFoundError: A file is missing in the folder.
            ValueError: The pack does not fit the network.
        """
        pack = folder / PACK
        config, parameters = read_pack(pack)
        sys.path.append(str(folder / WHEEL))
        network = build_network(config)
        loaded = network.load_state_dict(parameters, strict=False)
        # Instance norms have no weights of their own in the export.
        unset = [k for k in loaded.missing_keys if "norm" not in k and "pooler" not in k]
        if loaded.unexpected_keys or unset:
            raise ValueError(f"{pack} does not fit the network: {loaded.unexpected_keys + unset}")
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
        generator = network.decoder.generator
        for blocks in (generator.resblocks, generator.noise_res):
            for i, block in enumerate(blocks):
                blocks[i] = _ResidualBlock(block, device)
        self._network, self._device, self._rate = network.to(device), device, rate
        for module in network.modules():
            if isinstance(module, torch.nn.LSTM):
                module.flatten_parameters()
        self._vocab: dict[str, int] = config["vocab"]
        with np.load(folder / STYLES) as file:
            self._styles = {k: torch.from_numpy(v.astype(np.float32)) for k, v in file.items()}

    def __call__(self, texts: list[tuple[str, str]]) -> list[TeacherSpeech]:
        """Speaks texts; 2,000 or more in a call form large batches.

        Args:
            texts: Phonemes and a style table's name, or several names separated by `+`, of which
                the average is used.

        Returns:
            The speech of each text, with the silence around it.

        Raises:
            FloatingPointError: The speech is not finite.
        """
        known = ["".join(c for c in p if c in self._vocab)[:_MAX_PHONEMES] or "." for p, _ in texts]
        styles = [self._style(s, len(p)) for (_, s), p in zip(texts, known, strict=True)]
        frames = self._durations(known, styles)
        extra = [int(-f.sum() % _ROUND) for f in frames]
        total = [int(f.sum()) + e for f, e in zip(frames, extra, strict=True)]
        order = sorted(range(len(texts)), key=lambda i: (total[i], len(known[i])))
        speeches: dict[int, TeacherSpeech] = {}
        at = 0
        while at < len(order):
            # The decoder's norms look at the whole utterance: no padding, one length per batch.
            length = total[order[at]]
            most = max(1, min(_MAX_BATCH, _MAX_FRAMES // length))
            batch = [i for i in order[at : at + most] if total[i] == length]
            at += len(batch)
            waves = self._decode(
                [known[i] for i in batch],
                [styles[i] for i in batch],
                [np.append(frames[i][:-1], frames[i][-1] + extra[i]) for i in batch],
            )
            for i, wave in zip(batch, waves, strict=True):
                speeches[i] = _speech(wave[: int(frames[i].sum()) * _HOP], known[i], frames[i])
        return [speeches[i] for i in range(len(texts))]

    def _style(self, names: str, phonemes: int) -> Tensor:
        """Style vector for a number of phonemes."""
        tables = [self._styles[name].reshape(_MAX_PHONEMES, _STYLE) for name in names.split("+")]
        return torch.stack([table[max(0, phonemes - 1)] for table in tables]).mean(0)

    def _durations(self, phonemes: list[str], styles: list[Tensor]) -> list[NDArray[np.int64]]:
        """Frames of each token, which are the phonemes between two pads."""
        order = sorted(range(len(phonemes)), key=lambda i: len(phonemes[i]))
        found: dict[int, NDArray[np.int64]] = {}
        for at in range(0, len(order), _TEXT_BATCH):
            batch = order[at : at + _TEXT_BATCH]
            texts = _Texts(self, [phonemes[i] for i in batch], [styles[i] for i in batch])
            for i, row in zip(batch, texts.durations().cpu().numpy(), strict=True):
                found[i] = row[: len(phonemes[i]) + 2]
        return [found[i] for i in range(len(phonemes))]

    @torch.no_grad()
    def _decode(
        self, phonemes: list[str], styles: list[Tensor], frames: list[NDArray[np.int64]]
    ) -> NDArray[np.float32]:
        """Waves [texts, samples] of texts with the same number of frames."""
        texts, network = _Texts(self, phonemes, styles), self._network
        count, tokens = texts.ids.shape
        repeats = np.zeros((count, tokens), np.int64)
        for row, one in zip(repeats, frames, strict=True):
            row[: len(one)] = one
        flat = torch.from_numpy(repeats.reshape(-1)).to(self._device)
        token = torch.arange(tokens, device=self._device).repeat(count)
        index = torch.repeat_interleave(token, flat).view(count, -1)[..., None]
        hidden = texts.hidden()
        prosody = hidden.gather(1, index.expand(-1, -1, hidden.shape[-1])).mT
        content = network.text_encoder(texts.ids, texts.lengths, texts.mask)
        content = content.gather(2, index.mT.expand(-1, content.shape[1], -1))
        half = _STYLE // 2
        pitch, energy = network.predictor.F0Ntrain(prosody, texts.styles[:, half:])
        wave = network.decoder(content, pitch, energy, texts.styles[:, :half])
        if not wave.isfinite().all():
            raise FloatingPointError(f"the decoder overflowed in one of {phonemes}")
        return wave.reshape(count, -1).float().cpu().numpy()


class _Texts:
    """Texts of a batch, padded to the longest, on the device."""

    def __init__(self, teacher: Kokoro, phonemes: list[str], styles: list[Tensor]) -> None:
        device = teacher._device
        self._network, self._rate = teacher._network, teacher._rate
        self.lengths = torch.tensor([len(p) + 2 for p in phonemes])
        ids = torch.zeros(len(phonemes), int(self.lengths.max()), dtype=torch.long)
        for row, text in zip(ids, phonemes, strict=True):
            row[1 : 1 + len(text)] = torch.tensor([teacher._vocab[c] for c in text])
        mask = torch.arange(ids.shape[1])[None] >= self.lengths[:, None]
        self.ids, self.mask = ids.to(device), mask.to(device)
        self.styles = torch.stack(styles).to(device)

    @torch.no_grad()
    def hidden(self) -> Tensor:
        """Prosody features [texts, tokens, width]."""
        encoded = self._network.bert(self.ids, attention_mask=(~self.mask).long())
        encoded = self._network.bert_encoder(encoded).mT
        style = self.styles[:, _STYLE // 2 :]
        return self._network.predictor.text_encoder(encoded, style, self.lengths, self.mask)

    @torch.no_grad()
    def durations(self) -> Tensor:
        """Frames of each token [texts, tokens], 0 past a text's end."""
        predictor = self._network.predictor
        packed = torch.nn.utils.rnn.pack_padded_sequence(
            self.hidden(), self.lengths, batch_first=True, enforce_sorted=False
        )
        out, _ = torch.nn.utils.rnn.pad_packed_sequence(
            predictor.lstm(packed)[0], batch_first=True, total_length=self.ids.shape[1]
        )
        frames = torch.sigmoid(predictor.duration_proj(out)).sum(-1) / self._rate
        return frames.round().clamp(min=1).long().masked_fill(self.mask, 0)


def _speech(wave: NDArray[np.float32], phonemes: str, frames: NDArray[np.int64]) -> TeacherSpeech:
    edges = np.maximum(np.cumsum(frames)[:-1] * (_HOP / SAMPLE_RATE) - _LEAD_S, 0)
    return TeacherSpeech(wave.copy(), phonemes, edges[:-1], edges[1:])
