// The prefill kernel: prompt positions through the talker, batch by batch.
//
//   h = layers(prompt vectors)      for each batch, [columns, hidden]
//   prompt_hidden[slot] = h[c]      for each column c that ends a prompt
#pragma once

#include "block_context.cuh"

namespace megakernel {

// --- static asserts ---

static_assert(kBatchColumns <= 32, "a lane prepares a column, and a mask has one bit per column");

// --- shared memory ---

// `SharedMemory` of shared_memory.cuh, from the first batch of a launch to the last.

// --- warp roles ---

// Compute warps: all layers of each batch. Block 0 stores the hidden states.
// Copy warp: the talker's weights, once per batch.

// The compute warps' work. A kernel for `MaxColumns` streams takes batches of at most
// kColumnCapacity<MaxColumns> columns.
template <class M, int MaxColumns>
class PromptPrefill : BlockContext<M, MaxColumns> {
  using Base = BlockContext<M, MaxColumns>;
  using typename Base::Talker;
  static constexpr int kCapacity = kColumnCapacity<MaxColumns>;

 public:
  // Called by all compute threads.
  DEVICE PromptPrefill(const Params& p, SharedMemory<M, MaxColumns>& shared) : Base(p, shared) {}

  // Runs all batches, unless a thread block times out. Reads prompt_vectors [rows, hidden].
  DEVICE void run() {
    reset_prompts();
    const bool failed_before = previous_launch_failed();
    bool ok = true;
#pragma unroll 1
    for (const PrefillBatch* next = p_.prefill_batches;
         ok && next < p_.prefill_batches + p_.num_prefill_batches; ++next) {
      const PrefillBatch& batch = *next;
      const int last = batch.num_columns - 1, num_columns = MaxColumns == 1 ? kCapacity : last + 1;
      begin_pass(num_columns);
      Base::template load_norm<Talker::hidden_size>(s_.talker.layer_norms);
      set_columns(num_columns, [&](int c) {
        const PrefillColumn& column = batch.columns[min(c, last)];
        return Column{column.slot, column.position, c > last ? c : column.first_column, -1,
                      c <= last};
      });
      const auto input = [&](int c, int k) {
        const size_t row = batch.first_row + min(c, last);
        return load_bf16x4(p_.prompt_vectors + row * Talker::hidden_size + k);
      };
      begin_layers<Talker, kCapacity, kInputVectorsAtOnce>(context_, s_.residual, s_.norm,
                                                           num_columns, input);
      ok = run_layers<Talker, kCapacity>(context_, s_.residual, s_.norm, s_.talker, pass_columns(),
                                         num_columns, InputInPlace()) &&
           finish_batch(batch, num_columns, failed_before);
    }
    finish();
  }

 private:
  // Clears seen_codes [slots, vocab] and invalidates prompt_hidden [slots, hidden] of all prompts
  // that end in this launch.
  DEVICE void reset_prompts() {
#pragma unroll 1
    for (int i = 0; i < p_.num_prefill_batches; ++i) {
      const PrefillBatch& batch = p_.prefill_batches[i];
      invalidate_prompt_hidden(batch);
      for (int c = block_idx(); c < batch.num_columns; c += num_blocks()) {
        if (!(batch.prompt_end_mask >> c & 1)) continue;
        uint8_t* seen = p_.seen_codes + static_cast<size_t>(batch.columns[c].slot) * M::vocab_size;
        for (int id = thread_idx(); id < M::vocab_size; id += kNumThreads) seen[id] = 0;
      }
    }
  }

  // Whether an earlier launch failed and the host has not noticed it. A prompt that continues its
  // keys and values must not start a stream. Only block 0 stores hidden states, so only block 0
  // reads the flag: reads over PCIe are serialised, and those of all blocks would take 0.13 ms.
  DEVICE bool previous_launch_failed() {
    if (block_idx() == 0 && thread_idx() == 0) {
      s_.num_published[0] = load_host_flag(p_.failure) != 0;
    }
    sync_compute_threads();
    return s_.num_published[0] != 0;
  }

  // Waits for the final residual [columns, hidden], which orders the batch's keys and values before
  // the next batch. Block 0 stores the rows of columns that end a prompt. Returns false after a
  // timeout.
  DEVICE bool finish_batch(const PrefillBatch& batch, int num_columns, bool failed_before) {
    wait_for_residual<Talker::hidden_size, kCapacity, MaxColumns>(
        p_, s_.talker.exchange.mlp_residual, num_columns, context_.epoch_tags, kDown,
        context_.timed_out(),
        [&](int c, int i, int vector, float4 x) {
          if (!failed_before) store_prompt_hidden(batch, c + i, vector, x);
        },
        [](int) {});
    sync_compute_threads();  // with other columns, other threads write a row of the residual
    if (batch.prompt_end_mask == 0) return true;
    const bool ok = context_.timed_out() == 0;
    if (!ok) invalidate_prompt_hidden(batch);
    return ok;
  }

  // Block 0: writes four elements of prompt_hidden [slots, hidden] if column c ends a prompt. A
  // thread has the same elements in every call.
  DEVICE void store_prompt_hidden(const PrefillBatch& batch, int c, int vector, float4 state) {
    if (block_idx() != 0 || !(batch.prompt_end_mask >> c & 1)) return;
    float* out =
        p_.prompt_hidden + static_cast<size_t>(batch.columns[c].slot) * Talker::hidden_size;
    *reinterpret_cast<float4*>(out + LaneVectors<Talker::hidden_size>::k(vector)) = state;
  }

  // Writes NaN to prompt_hidden [slots, hidden] for columns that end a prompt.
  DEVICE void invalidate_prompt_hidden(const PrefillBatch& batch) {
    for (int c = 0; c < batch.num_columns; ++c) {
      for (int vector = 0; vector < LaneVectors<Talker::hidden_size>::count; ++vector) {
        if (LaneVectors<Talker::hidden_size>::valid(vector)) {
          store_prompt_hidden(batch, c, vector, {NAN, NAN, NAN, NAN});
        }
      }
    }
  }

  using Base::begin_pass, Base::finish, Base::pass_columns, Base::set_columns;
  using Base::context_, Base::p_, Base::s_;
};

// --- body ---

// The kernel: compute warps, and one copy warp.
template <class M, int MaxColumns>
DEVICE void prefill_prompts(const Params& p, SharedMemory<M, MaxColumns>& shared) {
  shared.ring.init();
  sync_all_threads();
  if (uniform_warp_idx() < kNumWarps) {
    raise_register_limit();
    PromptPrefill<M, MaxColumns>(p, shared).run();
  } else if (is_copy_warp()) {
    copy_weights<MaxColumns == 1>(shared.ring, 0, p.num_prefill_batches,
                                  [&](int) { return stack_weights<typename M::Talker>(p.talker); });
  }
}

}  // namespace megakernel
