// What the operators are given, as the kernels take it: lists of addresses and of numbers, in the
// order of the enums below. A missing tensor's address is null.
#pragma once

#include "params.cuh"

namespace megakernel::codec {

using Addresses = void* const*;
using Numbers = const int64_t*;

// The numbers of `Rows`, in the same order everywhere.
enum RowNumbers { kPlanes, kChannels, kDepth, kRate, kStride, kNumRowNumbers };

inline Rows rows(void* now, void* past, Numbers n) {
  return {static_cast<f16*>(now),       static_cast<f16*>(past),        n[kStride],
          static_cast<int>(n[kPlanes]), static_cast<int>(n[kChannels]), static_cast<int>(n[kDepth]),
          static_cast<int>(n[kRate])};
}

enum ProductTensors {
  kProductFrames,
  kProductIn,
  kProductPast,
  kProductWeights,
  kProductColumn,
  kProductResidual,
  kProductSum,
  kProductOut,
  kProductTurns,
  kProductQueries,
  kProductMemory,
  kProductPcm,
  kProductBroken,
  kNumProductTensors
};
enum ProductNumbers {
  kProductRows,
  kProductTaps,
  kProductDilation,
  kProductColumns,
  kProductNorm,
  kProductFinish,
  kProductMemoryStride,
  kProductRing,
  kProductHead,
  kProductEarly,
  kProductInRows,
  kProductOutRows = kProductInRows + kNumRowNumbers,
  kNumProductNumbers = kProductOutRows + kNumRowNumbers
};

inline Product product_of(Addresses t, Numbers n, double eps) {
  Product p{};
  p.frames = static_cast<const Frame*>(t[kProductFrames]);
  p.rows = static_cast<int>(n[kProductRows]);
  p.in = rows(t[kProductIn], t[kProductPast], n + kProductInRows);
  p.taps = static_cast<int>(n[kProductTaps]);
  p.dilation = static_cast<int>(n[kProductDilation]);
  p.weights = static_cast<const uint4*>(t[kProductWeights]);
  p.early = n[kProductEarly] != 0;
  p.column = static_cast<const Column*>(t[kProductColumn]);
  p.columns = static_cast<int>(n[kProductColumns]);
  p.norm = static_cast<int>(n[kProductNorm]);
  p.eps = static_cast<float>(eps);
  p.residual = static_cast<const float*>(t[kProductResidual]);
  p.sum = static_cast<float*>(t[kProductSum]);
  p.finish = static_cast<Finish>(n[kProductFinish]);
  p.out = rows(t[kProductOut], nullptr, n + kProductOutRows);
  p.turns = static_cast<const float2*>(t[kProductTurns]);
  p.queries = static_cast<float*>(t[kProductQueries]);
  p.memory = static_cast<float*>(t[kProductMemory]);
  p.memory_stride = n[kProductMemoryStride];
  p.ring = static_cast<int>(n[kProductRing]);
  p.head = static_cast<int>(n[kProductHead]);
  p.pcm = static_cast<short*>(t[kProductPcm]);
  p.broken = static_cast<int*>(t[kProductBroken]);
  return p;
}

enum EmbedTensors {
  kEmbedFrames,
  kEmbedAsked,
  kEmbedTables,
  kEmbedInverse,
  kEmbedTurns,
  kEmbedOut,
  kNumEmbedTensors
};
enum EmbedNumbers {
  kEmbedCount,
  kEmbedCodes,
  kEmbedHalf,
  kEmbedOutRows,
  kNumEmbedNumbers = kEmbedOutRows + kNumRowNumbers
};

inline Embed embed_of(Addresses t, Numbers n) {
  Embed p{};
  p.frames = static_cast<Frame*>(t[kEmbedFrames]);
  p.asked = static_cast<const Frame*>(t[kEmbedAsked]);
  p.count = static_cast<int>(n[kEmbedCount]);
  p.codes = static_cast<int>(n[kEmbedCodes]);
  p.tables = static_cast<const float*>(t[kEmbedTables]);
  p.inverse = static_cast<const float*>(t[kEmbedInverse]);
  p.turns = static_cast<float2*>(t[kEmbedTurns]);
  p.half = static_cast<int>(n[kEmbedHalf]);
  p.out = rows(t[kEmbedOut], nullptr, n + kEmbedOutRows);
  return p;
}

enum AttendTensors { kAttendFrames, kAttendQueries, kAttendMemory, kAttendOut, kNumAttendTensors };
enum AttendNumbers {
  kAttendCount,
  kAttendHeads,
  kAttendHead,
  kAttendMemoryStride,
  kAttendRing,
  kAttendOutRows,
  kNumAttendNumbers = kAttendOutRows + kNumRowNumbers
};

inline Attend attend_of(Addresses t, Numbers n) {
  Attend p{};
  p.frames = static_cast<const Frame*>(t[kAttendFrames]);
  p.count = static_cast<int>(n[kAttendCount]);
  p.heads = static_cast<int>(n[kAttendHeads]);
  p.head = static_cast<int>(n[kAttendHead]);
  p.queries = static_cast<const float*>(t[kAttendQueries]);
  p.memory = static_cast<const float*>(t[kAttendMemory]);
  p.memory_stride = n[kAttendMemoryStride];
  p.ring = static_cast<int>(n[kAttendRing]);
  p.out = rows(t[kAttendOut], nullptr, n + kAttendOutRows);
  return p;
}

enum DepthwiseTensors {
  kDepthwiseFrames,
  kDepthwiseIn,
  kDepthwisePast,
  kDepthwiseWeights,
  kDepthwiseBias,
  kDepthwiseNorm,
  kDepthwiseOut,
  kNumDepthwiseTensors
};
enum DepthwiseNumbers {
  kDepthwiseRows,
  kDepthwiseInRows,
  kDepthwiseOutRows = kDepthwiseInRows + kNumRowNumbers,
  kNumDepthwiseNumbers = kDepthwiseOutRows + kNumRowNumbers
};

inline Depthwise depthwise_of(Addresses t, Numbers n, double eps) {
  Depthwise p{};
  p.frames = static_cast<const Frame*>(t[kDepthwiseFrames]);
  p.rows = static_cast<int>(n[kDepthwiseRows]);
  p.in = rows(t[kDepthwiseIn], t[kDepthwisePast], n + kDepthwiseInRows);
  p.out = rows(t[kDepthwiseOut], nullptr, n + kDepthwiseOutRows);
  p.weights = static_cast<const float*>(t[kDepthwiseWeights]);
  p.bias = static_cast<const float*>(t[kDepthwiseBias]);
  p.norm = static_cast<const float*>(t[kDepthwiseNorm]);
  p.eps = static_cast<float>(eps);
  return p;
}

enum RememberTensors { kRememberFrames, kRememberKept, kRememberLayers };

// Then, for every layer, its rows and its history. Numbers: the frames, then for every layer those
// of its rows.
inline Remember remember_of(Addresses t, Numbers n, int layers) {
  Remember p{};
  p.frames = static_cast<const Frame*>(t[kRememberFrames]);
  p.kept = static_cast<const int*>(t[kRememberKept]);
  p.count = static_cast<int>(n[0]);
  p.layers = layers;
  for (int i = 0; i < layers; ++i) {
    const Addresses layer = t + kRememberLayers + 2 * i;
    p.rows[i] = rows(layer[0], layer[1], n + 1 + i * kNumRowNumbers);
  }
  return p;
}

}  // namespace megakernel::codec
