"""Tensors -> the kernel's parameters, field by field as in csrc/params.cuh."""

import ctypes as C
from typing import Any

import torch
from torch import Tensor

from megakernel_tts.config import ModelConfig, StackConfig
from megakernel_tts.sampling import Sampling
from megakernel_tts.weights import Model, Stack

P, I, U, F = C.c_void_p, C.c_int, C.c_uint, C.c_float
GROUPS, COLUMNS, SPANS, HEAD = 16, 8, 16, 128


def fields(**names: Any) -> list[tuple[str, Any]]:
    return list(names.items())


class Layer(C.Structure):
    _fields_ = [(n, P) for n in (
        "qkv", "out", "gate_up", "down", "input_norm", "post_norm", "query_norm", "key_norm")]


class Network(C.Structure):
    _fields_ = fields(layers=P, num_layers=I, norm=P, keys=P, values=P, slots=I, positions=I,
                      turns=P, eps=F)


class Rule(C.Structure):
    _fields_ = fields(temperature=F, top_k=I, top_p=F)


class Stream(C.Structure):
    _fields_ = fields(slot=I, prompt=I, frames=I, max_frames=I, fed=I, ended=I, fresh=I, over=I, made=I, broken=I,
                      codes=I * GROUPS, first_frame=U, seed=U * 2, penalty=F, talker=Rule,
                      predictor=Rule)


class Published(C.Structure):
    _fields_ = fields(over=I, codes=I * GROUPS)


class Params(C.Structure):
    _fields_ = fields(
        talker=Network, predictor=Network, talker_head=P, predictor_heads=P, project=P,
        project_bias=P, code_embedding=P, group_embeddings=P, pad=P, text=P, prompt=P,
        prompt_length=I, hidden=P, seen=P, eos=I, streams=P, columns=I, out_splits=I,
        down_splits=I, max_frames=I, frames=P, published=P, stop=P, qkv=P, attended=P, weight=P,
        partial=P, middle=P, logits=P, drawn=P, barrier=P, epoch=P, given_up=P,
        patience=C.c_uint64, failure=P)


def packed(weight: Tensor) -> Tensor:
    """[rows, K] in fragment order."""
    rows, k = weight.shape
    tiles = weight.bfloat16().view(rows // 16, 2, 8, k // 16, 2, 4, 2)
    return tiles.permute(0, 3, 2, 5, 4, 1, 6).contiguous()


class Kernel:
    """Everything that a launch needs, kept alive."""

    def __init__(self, model: Model, config: ModelConfig, pad: Tensor, slots: int,
                 positions: int) -> None:
        self.kept: list[Any] = []
        t, p = config.talker, config.predictor
        hidden = t.stack.hidden
        b = lambda x: self.at(x.bfloat16().contiguous())  # noqa: E731
        self.hidden = torch.zeros(slots, hidden)
        self.text = torch.zeros(slots, positions, hidden, dtype=torch.bfloat16)
        self.logits = torch.zeros(COLUMNS, t.vocab)
        self.seen = torch.zeros(slots, t.vocab, dtype=torch.uint8)
        self.published = torch.zeros(COLUMNS, dtype=torch.int32)
        self.failure = torch.zeros(3, dtype=torch.int32)
        self.barrier = torch.zeros(3, dtype=torch.int32)
        wide = max(t.stack.hidden, p.stack.hidden)
        f = lambda *shape: self.at(torch.zeros(*shape))  # noqa: E731
        self.p = Params(
            talker=self.network(model.talker.stack, t.stack, slots, positions),
            predictor=self.network(model.predictor.stack, p.stack, COLUMNS, GROUPS),
            talker_head=self.at(packed(model.talker.head)),
            predictor_heads=self.at(torch.stack([packed(h) for h in model.predictor.heads])),
            code_embedding=b(model.embeddings.codec),
            group_embeddings=self.at((P * 15)(*map(b, model.embeddings.groups))), pad=b(pad),
            text=self.at(self.text), hidden=self.at(self.hidden), seen=self.at(self.seen),
            eos=t.control.eos, out_splits=2, down_splits=2,
            published=self.at(self.published), stop=self.at(torch.zeros(COLUMNS, dtype=torch.int32)),
            qkv=f(COLUMNS, 3 * 4096), attended=f(COLUMNS, SPANS, 16, HEAD),
            weight=f(COLUMNS, SPANS, 16, 2), partial=f(8, COLUMNS, wide),
            middle=f(COLUMNS, 6144), logits=self.at(self.logits),
            drawn=self.at(torch.zeros(COLUMNS, dtype=torch.int32)),
            barrier=self.barrier.data_ptr(), epoch=self.barrier.data_ptr() + 4,
            given_up=self.barrier.data_ptr() + 8,
            patience=10**12, failure=self.at(self.failure),
        )
        if model.predictor.project is not None:
            self.p.project = self.at(packed(model.predictor.project.weight))
            self.p.project_bias = b(model.predictor.project.bias)

    def at(self, x: Any) -> int:
        self.kept.append(x)
        return x.data_ptr() if isinstance(x, Tensor) else C.addressof(x)

    def network(self, s: Stack, c: StackConfig, slots: int, positions: int) -> Network:
        b = lambda x: self.at(x.bfloat16().contiguous())  # noqa: E731
        layers = (Layer * c.layers)()
        for i, w in enumerate(s.layers):
            pair = torch.cat([w.gate.unflatten(0, (-1, 8)), w.up.unflatten(0, (-1, 8))], dim=1)
            layers[i] = Layer(
                self.at(packed(torch.cat([w.q, w.k, w.v]))), self.at(packed(w.o)),
                self.at(packed(pair.flatten(0, 1))), self.at(packed(w.down)), b(w.input_norm),
                b(w.post_norm), b(w.q_norm), b(w.k_norm))
        inverse = 1.0 / c.theta ** (torch.arange(0, HEAD, 2).float() / HEAD)
        angle = torch.arange(positions).float()[:, None] * inverse
        turns = torch.stack([angle.cos(), angle.sin()], dim=-1).contiguous()
        cache = lambda: self.at(torch.zeros(  # noqa: E731
            c.layers, slots, c.kv_heads, positions, HEAD, dtype=torch.bfloat16))
        return Network(self.at(layers), c.layers, b(s.norm), cache(), cache(), slots, positions,
                       self.at(turns), c.eps)

    def stream(self, slot: int, prompt: int, sampling: Sampling, fed: int) -> Stream:
        seed = sampling.seed or 0
        return Stream(
            slot=slot, prompt=prompt, max_frames=10**6, fed=fed, ended=1, fresh=1,
            seed=(U * 2)(seed & 0xFFFFFFFF, seed >> 32), penalty=sampling.repetition_penalty,
            talker=Rule(sampling.temperature, sampling.top_k, sampling.top_p),
            predictor=Rule(sampling.predictor_temperature, sampling.predictor_top_k,
                           sampling.predictor_top_p))
