// Prompts: positions through the talker, pass by pass.
#pragma once

#include "block_context.cuh"

namespace megakernel {

// Of one prompt, or parts of several; a pass has as many columns as there is room for with so many
// streams.
template <class M, int MaxColumns>
class PromptPrefill : BlockContext<M, MaxColumns> {
  using Base = BlockContext<M, MaxColumns>;
  using typename Base::Talker;

 public:
  DEVICE PromptPrefill(const Params& p, SharedMemory<M, MaxColumns>& s) : Base(p, s) {}

  // All passes, unless a block gives up.
  DEVICE void run() {
    reset_prompts();
    const bool lost = previous_launch_failed();
    bool fine = true;
#pragma unroll 1
    for (const PrefillBatch* next = p_.prefill_batches;
         fine && next < p_.prefill_batches + p_.num_prefill_batches; ++next) {
      const PrefillBatch& pass = *next;
      const int last = pass.num_columns - 1,
                columns = MaxColumns == 1 ? kColumnCapacity<MaxColumns> : last + 1;
      begin_pass(columns);
      Base::template load_norm<Talker::hidden_size>(s_.talker.layer_norms);
      set_columns(columns, [&](int c) {
        const PrefillColumn& at = pass.columns[min(c, last)];
        return Column{at.slot, at.position, c > last ? c : at.first_column, c <= last, -1};
      });
      const auto input = [&](int c, int k) {
        const size_t row = pass.first_row + min(c, last);
        return load_bf16x4(p_.prompt_vectors + row * Talker::hidden_size + k);
      };
      begin_layers<Talker, kColumnCapacity<MaxColumns>, kInputVectorsAtOnce>(
          context_, s_.residual_rows, s_.norm, columns, input);
      fine = run_layers<Talker, kColumnCapacity<MaxColumns>>(context_, s_.residual_rows, s_.norm,
                                                             s_.talker, pass_columns(), columns,
                                                             InputInPlace()) &&
             finish_batch(pass, columns, lost);
    }
    finish();
  }

 private:
  // Streams that begin have drawn nothing, and have no hidden state until their prompt's end.
  DEVICE void reset_prompts() {
#pragma unroll 1
    for (int i = 0; i < p_.num_prefill_batches; ++i) {
      const PrefillBatch& pass = p_.prefill_batches[i];
      invalidate_prompt_hidden(pass);
      for (int c = block_idx(); c < pass.num_columns; c += num_blocks()) {
        if (!(pass.prompt_end_mask >> c & 1)) continue;
        uint8_t* seen = p_.seen_codes + static_cast<size_t>(pass.columns[c].slot) * M::vocab_size;
        for (int id = thread_idx(); id < M::vocab_size; id += kNumThreads) seen[id] = 0;
      }
    }
  }

  // Whether a launch was lost of which the host has not heard yet: nobody is to speak who builds
  // upon what it left of a prompt. The block that keeps ends asks: the bus answers one after
  // another, and all blocks would wait 0.13 ms.
  DEVICE bool previous_launch_failed() {
    if (block_idx() == 0 && thread_idx() == 0) s_.num_made[0] = load_host_flag(p_.failure) != 0;
    sync_compute_threads();
    return s_.num_made[0] != 0;
  }

  // All hear what a pass ends with, and so that its keys and values are settled; one block keeps
  // the hidden states of prompts that end. False if it was awaited in vain.
  DEVICE bool finish_batch(const PrefillBatch& pass, int columns, bool lost) {
    wait_for_residual<Talker::hidden_size, kColumnCapacity<MaxColumns>, MaxColumns>(
        p_, s_.talker.exchange.mlp_residual, columns, context_.tags, kDown, context_.timed_out(),
        [&](int c, int i, int four, float4 x) {
          if (!lost) store_prompt_hidden(pass, c + i, four, x);
        },
        [](int) {});
    if (pass.prompt_end_mask == 0) return true;
    sync_compute_threads();
    const bool fine = context_.timed_out() == 0;
    if (!fine) invalidate_prompt_hidden(pass);
    return fine;
  }

  // Each thread has the same elements every time.
  DEVICE void store_prompt_hidden(const PrefillBatch& pass, int c, int four, float4 state) {
    if (block_idx() != 0 || !(pass.prompt_end_mask >> c & 1)) return;
    float* out = p_.prompt_hidden + static_cast<size_t>(pass.columns[c].slot) * Talker::hidden_size;
    *reinterpret_cast<float4*>(out + LaneVectors<Talker::hidden_size>::k(four)) = state;
  }

  DEVICE void invalidate_prompt_hidden(const PrefillBatch& pass) {
    for (int c = 0; c < pass.num_columns; ++c) {
      for (int four = 0; four < LaneVectors<Talker::hidden_size>::count; ++four) {
        if (LaneVectors<Talker::hidden_size>::there(four))
          store_prompt_hidden(pass, c, four, {NAN, NAN, NAN, NAN});
      }
    }
  }

  using Base::begin_pass, Base::finish, Base::pass_columns, Base::set_columns;
  using Base::context_, Base::p_, Base::s_;
};

template <class M, int MaxColumns>
DEVICE void prefill_prompts(const Params& p, SharedMemory<M, MaxColumns>& s) {
  s.ring.init();
  sync_all_threads();
  if (uniform_warp_idx() < kNumWarps) {
    raise_register_limit();
    PromptPrefill<M, MaxColumns>(p, s).run();
  } else if (is_copy_warp()) {
    copy_weights<MaxColumns == 1>(s.ring, 0, p.num_prefill_batches,
                                  [&](int) { return stack_segment<typename M::Talker>(p.talker); });
  }
}

}  // namespace megakernel
