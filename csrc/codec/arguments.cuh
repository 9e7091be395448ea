// Converts the operators' arguments to kernel parameters: lists of addresses and of numbers in the
// order of the enums below. The address of an absent tensor is null.
#pragma once

#include "params.cuh"

namespace megakernel::codec {

using Addresses = void* const*;
using Numbers = const int64_t*;

// The numbers of one `Activations`.
enum ActivationNumbers {
  kPlanes,
  kChannels,
  kHistoryRows,
  kRowsPerFrame,
  kHistoryStride,
  kNumActivationNumbers
};

inline Activations activations(void* data, void* history, Numbers n) {
  return {static_cast<f16*>(data),
          static_cast<f16*>(history),
          n[kHistoryStride],
          static_cast<int>(n[kPlanes]),
          static_cast<int>(n[kChannels]),
          static_cast<int>(n[kHistoryRows]),
          static_cast<int>(n[kRowsPerFrame])};
}

enum ProjectionTensors {
  kProjectionFrames,
  kProjectionIn,
  kProjectionHistory,
  kProjectionWeights,
  kProjectionColumn,
  kProjectionResidual,
  kProjectionSum,
  kProjectionOut,
  kProjectionRope,
  kProjectionQueries,
  kProjectionKvCache,
  kProjectionPcm,
  kProjectionNonFinite,
  kNumProjectionTensors
};
enum ProjectionNumbers {
  kProjectionRows,
  kProjectionTaps,
  kProjectionDilation,
  kProjectionColumns,
  kProjectionNorm,
  kProjectionEpilogue,
  kProjectionKvCacheStride,
  kProjectionRing,
  kProjectionHead,
  kProjectionOverlapsPrevious,
  kProjectionInRows,
  kProjectionOutRows = kProjectionInRows + kNumActivationNumbers,
  kNumProjectionNumbers = kProjectionOutRows + kNumActivationNumbers
};

inline ProjectionParams projection_params(Addresses t, Numbers n, double eps) {
  ProjectionParams p{};
  p.frames = static_cast<const Frame*>(t[kProjectionFrames]);
  p.num_rows = static_cast<int>(n[kProjectionRows]);
  p.input = activations(t[kProjectionIn], t[kProjectionHistory], n + kProjectionInRows);
  p.num_taps = static_cast<int>(n[kProjectionTaps]);
  p.dilation = static_cast<int>(n[kProjectionDilation]);
  p.weights = static_cast<const uint4*>(t[kProjectionWeights]);
  p.overlaps_previous = n[kProjectionOverlapsPrevious] != 0;
  p.column_params = static_cast<const ColumnParams*>(t[kProjectionColumn]);
  p.num_columns = static_cast<int>(n[kProjectionColumns]);
  p.norm_channels = static_cast<int>(n[kProjectionNorm]);
  p.eps = static_cast<float>(eps);
  p.residual = static_cast<const float*>(t[kProjectionResidual]);
  p.residual_out = static_cast<float*>(t[kProjectionSum]);
  p.epilogue = static_cast<Epilogue>(n[kProjectionEpilogue]);
  p.output = activations(t[kProjectionOut], nullptr, n + kProjectionOutRows);
  p.rope = static_cast<const float2*>(t[kProjectionRope]);
  p.queries = static_cast<float*>(t[kProjectionQueries]);
  p.kv_cache = static_cast<float*>(t[kProjectionKvCache]);
  p.kv_slot_stride = n[kProjectionKvCacheStride];
  p.kv_ring_size = static_cast<int>(n[kProjectionRing]);
  p.head_dim = static_cast<int>(n[kProjectionHead]);
  p.pcm = static_cast<short*>(t[kProjectionPcm]);
  p.non_finite = static_cast<int*>(t[kProjectionNonFinite]);
  return p;
}

enum EmbedTensors {
  kEmbedFrames,
  kEmbedRequests,
  kEmbedTables,
  kEmbedInverse,
  kEmbedRope,
  kEmbedOut,
  kNumEmbedTensors
};
enum EmbedNumbers {
  kEmbedCount,
  kEmbedCodes,
  kEmbedHalf,
  kEmbedOutRows,
  kNumEmbedNumbers = kEmbedOutRows + kNumActivationNumbers
};

inline EmbedParams embed_params(Addresses t, Numbers n) {
  EmbedParams p{};
  p.frames = static_cast<Frame*>(t[kEmbedFrames]);
  p.requests = static_cast<const Frame*>(t[kEmbedRequests]);
  p.num_frames = static_cast<int>(n[kEmbedCount]);
  p.codebook_size = static_cast<int>(n[kEmbedCodes]);
  p.codebooks = static_cast<const float*>(t[kEmbedTables]);
  p.inverse_frequencies = static_cast<const float*>(t[kEmbedInverse]);
  p.rope = static_cast<float2*>(t[kEmbedRope]);
  p.half_head_dim = static_cast<int>(n[kEmbedHalf]);
  p.output = activations(t[kEmbedOut], nullptr, n + kEmbedOutRows);
  return p;
}

enum AttentionTensors {
  kAttentionFrames,
  kAttentionQueries,
  kAttentionKvCache,
  kAttentionOut,
  kNumAttentionTensors
};
enum AttentionNumbers {
  kAttentionCount,
  kAttentionHeads,
  kAttentionHead,
  kAttentionKvCacheStride,
  kAttentionRing,
  kAttentionOutRows,
  kNumAttentionNumbers = kAttentionOutRows + kNumActivationNumbers
};

inline AttentionParams attention_params(Addresses t, Numbers n) {
  AttentionParams p{};
  p.frames = static_cast<const Frame*>(t[kAttentionFrames]);
  p.num_frames = static_cast<int>(n[kAttentionCount]);
  p.num_heads = static_cast<int>(n[kAttentionHeads]);
  p.head_dim = static_cast<int>(n[kAttentionHead]);
  p.queries = static_cast<const float*>(t[kAttentionQueries]);
  p.kv_cache = static_cast<const float*>(t[kAttentionKvCache]);
  p.kv_slot_stride = n[kAttentionKvCacheStride];
  p.kv_ring_size = static_cast<int>(n[kAttentionRing]);
  p.output = activations(t[kAttentionOut], nullptr, n + kAttentionOutRows);
  return p;
}

enum DepthwiseTensors {
  kDepthwiseFrames,
  kDepthwiseIn,
  kDepthwiseHistory,
  kDepthwiseWeights,
  kDepthwiseBias,
  kDepthwiseNorm,
  kDepthwiseOut,
  kNumDepthwiseTensors
};
enum DepthwiseNumbers {
  kDepthwiseRows,
  kDepthwiseInRows,
  kDepthwiseOutRows = kDepthwiseInRows + kNumActivationNumbers,
  kNumDepthwiseNumbers = kDepthwiseOutRows + kNumActivationNumbers
};

inline DepthwiseParams depthwise_params(Addresses t, Numbers n, double eps) {
  DepthwiseParams p{};
  p.frames = static_cast<const Frame*>(t[kDepthwiseFrames]);
  p.num_rows = static_cast<int>(n[kDepthwiseRows]);
  p.input = activations(t[kDepthwiseIn], t[kDepthwiseHistory], n + kDepthwiseInRows);
  p.output = activations(t[kDepthwiseOut], nullptr, n + kDepthwiseOutRows);
  p.weights = static_cast<const float*>(t[kDepthwiseWeights]);
  p.bias = static_cast<const float*>(t[kDepthwiseBias]);
  p.norm = static_cast<const float*>(t[kDepthwiseNorm]);
  p.eps = static_cast<float>(eps);
  return p;
}

enum StateUpdateTensors { kStateUpdateFrames, kStateUpdateNumKeptFrames, kStateUpdateLayers };

// Two tensors per layer follow: its activations and its history. Numbers: the number of frames,
// then the numbers of the activations of every layer.
inline StateUpdateParams state_update_params(Addresses t, Numbers n, int layers) {
  StateUpdateParams p{};
  p.frames = static_cast<const Frame*>(t[kStateUpdateFrames]);
  p.num_kept_frames = static_cast<const int*>(t[kStateUpdateNumKeptFrames]);
  p.num_frames = static_cast<int>(n[0]);
  p.num_layers = layers;
  for (int i = 0; i < layers; ++i) {
    const Addresses layer = t + kStateUpdateLayers + 2 * i;
    p.activations[i] = activations(layer[0], layer[1], n + 1 + i * kNumActivationNumbers);
  }
  return p;
}

}  // namespace megakernel::codec
