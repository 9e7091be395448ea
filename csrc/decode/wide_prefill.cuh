// The wide prefill kernel: one batch of up to 64 prompt positions through the talker, with the
// layers of wide_layers.cuh. A column has the bits that it has in prefill.cuh.
//
//   h = layers(prompt vectors)      [columns, hidden]
//   prompt_hidden[slot] = h[c]      for each column c that ends a prompt
#pragma once

#include "block_context.cuh"

namespace megakernel {

// --- static asserts ---

static_assert(kPromptTileSize <= kWideBatchColumns, "a batch holds every prompt tile");

// --- shared memory ---

// `SharedMemory` of shared_memory.cuh.

// --- warp roles ---

// Compute warps: all layers. Copy warp: the talker's weights.

// The compute warps' work. The thread blocks that have the fewest row groups store the hidden
// states, one column each.
template <class M, int MaxColumns>
class WidePromptPrefill : BlockContext<M, MaxColumns> {
  using Base = BlockContext<M, MaxColumns>;
  using typename Base::Talker;

 public:
  // Called by all compute threads.
  DEVICE WidePromptPrefill(const Params& p, SharedMemory<M, MaxColumns>& shared)
      : Base(p, shared), batch_(*p.wide_prefill_batch), num_columns_(batch_.num_columns) {}

  // Runs the batch, unless a thread block times out. Reads prompt_vectors [rows, hidden].
  DEVICE void run() {
    reset_prompts();
    begin_pass(num_columns_);
    set_columns(num_columns_, [&](int c) {
      const auto& [slot, position, first_column, precedes_tile, ends_prompt] = batch_.columns[c];
      return Column{slot, position, first_column, -1, true, precedes_tile != 0};
    });
    const bf16* rows =
        p_.prompt_vectors + static_cast<size_t>(batch_.first_row) * Talker::hidden_size;
    WideTags tags;
    begin_wide_layers<Talker>(
        context_, p_.wide_talker, s_.talker.layer_norms, s_.talker.eps, tags,
        [&](int c, int k) { return load_bf16x4(rows + c * Talker::hidden_size + k); });
    const auto keep = [](int, int, float x, bool) { return x; };
    const bool ok = run_wide_layers<Talker, false, true>(context_, s_.talker, p_.wide_talker, tags,
                                                         pass_columns(), keep);
    if (ok) store_hidden_states(tags.residual.of(0));
    finish();
  }

 private:
  static constexpr int kNumVectors = LaneVectors<Talker::hidden_size>::count;

  // Calls act(column) for the columns that end a prompt and that this thread block stores.
  template <class Act>
  DEVICE void for_each_prompt_end(Act act) {
#pragma unroll 1
    for (int c = num_blocks() - 1 - block_idx(); c < num_columns_; c += num_blocks()) {
      if (batch_.columns[c].ends_prompt) act(c);
    }
  }

  // Clears seen_codes [slots, vocab] and invalidates prompt_hidden [slots, hidden] of all prompts
  // that end in this launch.
  DEVICE void reset_prompts() {
    for_each_prompt_end([&](int c) {
      uint8_t* seen = p_.seen_codes + static_cast<size_t>(batch_.columns[c].slot) * M::vocab_size;
      for (int id = thread_idx(); id < M::vocab_size; id += kNumThreads) seen[id] = 0;
#pragma unroll
      for (int i = 0; i < kNumVectors; ++i) store_vector(c, i, {NAN, NAN, NAN, NAN});
    });
  }

  // Writes prompt_hidden [slots, hidden] from the final residual [columns, hidden], unless this
  // thread block has timed out, or an earlier launch failed and the host has not noticed it. A
  // prompt that continues that launch's keys and values must not start a stream.
  DEVICE void store_hidden_states(uint32_t tag) {
    for_each_prompt_end([&](int c) {
      if (thread_idx() == 0) s_.num_published[0] = load_host_flag(p_.failure) != 0;
      float4 x[kNumVectors];
      load_residual_vectors<Talker::hidden_size, MaxColumns>(
          context_, s_.talker.exchange.mlp_residual, tag, kDown, c, x);
      sync_compute_threads();
      const bool failed = s_.num_published[0] != 0 || context_.timed_out() != 0;
#pragma unroll
      for (int i = 0; i < kNumVectors; ++i) {
        if (!failed) store_vector(c, i, x[i]);
      }
      sync_compute_threads();  // the next column overwrites the flag
    });
  }

  // Writes the lane's vector i of prompt_hidden [slots, hidden] of column c.
  DEVICE void store_vector(int c, int i, float4 state) {
    if (!LaneVectors<Talker::hidden_size>::valid(i)) return;
    float* out =
        p_.prompt_hidden + static_cast<size_t>(batch_.columns[c].slot) * Talker::hidden_size;
    *reinterpret_cast<float4*>(out + LaneVectors<Talker::hidden_size>::k(i)) = state;
  }

  using Base::begin_pass, Base::finish, Base::pass_columns, Base::set_columns;
  using Base::context_, Base::p_, Base::s_;

  const WidePrefillBatch& batch_;
  const int num_columns_;
};

// --- body ---

// The kernel: compute warps, and one copy warp.
template <class M, int MaxColumns>
DEVICE void prefill_wide_prompts(const Params& p, SharedMemory<M, MaxColumns>& shared) {
  shared.ring.init();
  sync_all_threads();
  if (uniform_warp_idx() < kNumWarps) {
    raise_register_limit();
    WidePromptPrefill<M, MaxColumns>(p, shared).run();
  } else if (is_copy_warp()) {
    copy_weights<false>(shared.ring, 0, 1,
                        [&](int) { return stack_weights<typename M::Talker>(p.talker); });
  }
}

}  // namespace megakernel
