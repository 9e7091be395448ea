// The layout of the workspace, the memory through which thread blocks exchange values. The host
// sets all its bits before a launch.
#pragma once

#include "params.cuh"

namespace megakernel {

// Where the buffers of ExchangeBuffers begin, in values of 32 bits.
struct ExchangeOffsets {
  int64_t qkv, attention_partials, softmax_stats, attention_output, attention_residual;
  int64_t mlp_hidden, mlp_residual, logits;
};

// Where the buffers of WideBuffers begin, in values of 32 bits.
struct WideOffsets {
  int64_t attention_normed, mlp_normed, attention_scales, mlp_scales, cache_tags;
};

// Where every buffer of Params begins, in values of 32 bits.
struct WorkspaceOffsets {
  ExchangeOffsets talker, predictor;
  WideOffsets wide_talker, wide_predictor;  // empty unless the kernel is wide
  int64_t predictor_input, sampled_codes, non_finite, abort_flag;
  int64_t num_values;  // of the workspace
};

// Reserves buffers one after the other, each on a cache line of its own, with `num_columns`
// columns.
struct BufferAllocator {
  int64_t next;
  int num_columns;

  constexpr int64_t reserve(int64_t num_values) {
    const int64_t offset = next;
    next += (num_columns * num_values + 31) / 32 * 32;
    return offset;
  }
};

// A bf16 column of `width` values in pairs, with whole steps in a wide kernel.
constexpr int64_t num_pairs(int width) {
  return kIsWide ? (width + kStepK - 1) / kStepK * (kStepK / 2) : kNumSplits * width / 2;
}

template <class S>
constexpr ExchangeOffsets exchange_offsets(int64_t num_logits, BufferAllocator& allocator) {
  ExchangeOffsets offsets{};
  offsets.qkv = allocator.reserve(S::query_size + 2 * S::kv_size);
  constexpr int kNumSpans = kIsWide && S::short_context ? 0 : kMaxSpans;
  offsets.attention_partials = allocator.reserve(int64_t{S::query_size} * kNumSpans);
  offsets.softmax_stats = allocator.reserve(int64_t{S::num_heads} * kNumSpans * 2);
  offsets.attention_output = allocator.reserve(num_pairs(S::query_size));
  offsets.attention_residual = allocator.reserve(S::hidden_size);
  offsets.mlp_hidden = allocator.reserve(num_pairs(S::intermediate_size));
  offsets.mlp_residual = allocator.reserve(S::hidden_size);
  offsets.logits = allocator.reserve(num_logits);
  return offsets;
}

template <class S>
constexpr WideOffsets wide_offsets(BufferAllocator& allocator) {
  WideOffsets offsets{};
  if (!kIsWide) return offsets;
  offsets.attention_normed = allocator.reserve(num_pairs(S::hidden_size));
  offsets.mlp_normed = allocator.reserve(num_pairs(S::hidden_size));
  offsets.attention_scales = allocator.reserve(4);
  offsets.mlp_scales = allocator.reserve(4);
  offsets.cache_tags = allocator.reserve(S::short_context ? 0 : 2 * S::num_kv_heads);
  return offsets;
}

// The layout of a model's workspace. Streams and prefill batches use the same talker buffers.
template <class M>
constexpr WorkspaceOffsets workspace_offsets() {
  BufferAllocator allocator{0, max_of(kMaxPrefillColumns, kBufferColumns)};
  WorkspaceOffsets offsets{};
  offsets.talker = exchange_offsets<typename M::Talker>(M::vocab_size, allocator);
  offsets.non_finite = allocator.reserve(1);
  allocator.num_columns = kBufferColumns;
  offsets.predictor = exchange_offsets<typename M::Predictor>(M::num_codes, allocator);
  offsets.wide_talker = wide_offsets<typename M::Talker>(allocator);
  offsets.wide_predictor = wide_offsets<typename M::Predictor>(allocator);
  offsets.predictor_input =
      allocator.reserve(kIsWide ? num_pairs(M::Talker::hidden_size) : M::Predictor::hidden_size);
  offsets.sampled_codes = allocator.reserve(1);
  offsets.abort_flag = allocator.reserve(1);
  offsets.num_values = allocator.next;
  return offsets;
}

}  // namespace megakernel
