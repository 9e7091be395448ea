// The workspace that blocks talk through, as the host lays it out: one piece of memory, all of it
// ones before a launch.
#pragma once

#include "params.cuh"

namespace megakernel {

// Takes the workspace apart: each buffer begins on a line of its own, and has so many words for
// each of some columns, or places of a board.
struct BufferAllocator {
  uint32_t* next;
  int num_columns;

  uint32_t* allocate(int64_t count) {
    uint32_t* at = next;
    next += (num_columns * count + 31) / 32 * 32;
    return at;
  }
};

// `s` is hidden, heads, kv heads and intermediate.
inline ExchangeBuffers exchange_buffers(const int (&s)[4], int64_t vocab,
                                        BufferAllocator& allocator) {
  ExchangeBuffers w;
  w.qkv = allocator.allocate(static_cast<int64_t>(s[1] + 2 * s[2]) * kHeadDim);
  w.attention_partials = allocator.allocate(static_cast<int64_t>(s[1]) * kMaxSpans * kHeadDim);
  w.softmax_stats = allocator.allocate(s[1] * kMaxSpans * 2);
  w.attention_output = allocator.allocate(kNumSplits * s[1] * kHeadDim / 2);
  w.attention_residual = allocator.allocate(s[0]);
  w.mlp_hidden = allocator.allocate(kNumSplits * s[3] / 2);
  w.mlp_residual = allocator.allocate(s[0]);
  w.logits = allocator.allocate(vocab);
  return w;
}

// Fills in the buffers from `begin` on; returns how many words they take.
inline int64_t lay_out(Params& p, const Shape& s, uint32_t* begin) {
  BufferAllocator allocator{begin, kMaxPrefillColumns > kBufferColumns
                                       ? kMaxPrefillColumns
                                       : kBufferColumns};  // the talker's are prompts', too
  p.talker.exchange = exchange_buffers(s.talker, s.num_codes + kNumControlIds, allocator);
  p.non_finite = allocator.allocate(1);
  allocator.num_columns = kBufferColumns;
  p.predictor.exchange = exchange_buffers(s.predictor, s.num_codes, allocator);
  p.predictor_input = allocator.allocate(s.predictor[0]);
  p.sampled_codes = allocator.allocate(1);
  p.abort_flag = allocator.allocate(1);
  return allocator.next - begin;
}

inline int64_t workspace_words(const Shape& s) {
  Params p;
  return lay_out(p, s, nullptr);
}

// Where in the workspace a launch leaves the logits.
struct LogitsOffsets {
  int64_t talker, predictor;  // [columns, vocab], and the last ones [columns, codes]
};

inline LogitsOffsets logits_at(const Shape& s) {
  Params p;
  lay_out(p, s, nullptr);
  uint32_t* const begin = nullptr;
  return {p.talker.exchange.logits - begin, p.predictor.exchange.logits - begin};
}

}  // namespace megakernel
