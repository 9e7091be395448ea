// Those who multiply, attend and draw: what frames and prompts have in common.
#pragma once

#include "shared_memory.cuh"

namespace megakernel {

// `Most` streams are compiled for: where it is one, the number of columns is a constant.
template <class M, int MaxColumns>
class BlockContext {
 protected:
  using Talker = typename M::Talker;
  using Predictor = typename M::Predictor;
  using R = Ring<M::stage_steps, SharedMemory<M, MaxColumns>::kNumStages>;

  DEVICE BlockContext(const Params& p, SharedMemory<M, MaxColumns>& s)
      : p_(p),
        s_(s.fixed),
        context_{p,
                 ProjectionAddresses<R, MaxColumns>(s.ring, s.fixed.fragments, s.fixed.sums),
                 s.fixed.sums,
                 s.fixed.fragments,
                 s.fixed.attention,
                 s.fixed.short_attention,
                 PinnedAddress<R>(s.ring),
                 PhaseTimer(s.fixed.phase_times)},
        ring_(s.ring) {
    if (thread_idx() < columns()) s_.streams[thread_idx()] = p.streams[thread_idx()];
    if (thread_idx() < MaxColumns) s_.num_made[thread_idx()] = 0;
    if (thread_idx() < 2) s_.sums[thread_idx()].timed_out = 0;
    if (thread_idx() == 0) {
      s_.talker = p.talker, s_.predictor = p.predictor;
      assign_row_groups<Talker, typename M::TalkerHead>(s_.talker_row_groups);
      assign_row_groups<Predictor, typename M::PredictorHead>(s_.predictor_row_groups);
      s_.predictor_row_groups[kInputProjection] =
          RowGroupRange::of_block(M::InputProjection::num_row_groups);
    }
    context_.row_groups = s_.talker_row_groups;
    sync_compute_threads();
  }

  DEVICE int columns() const { return MaxColumns == 1 ? 1 : p_.num_streams; }

  DEVICE void begin_pass(int columns) {
    context_.num_pass_columns = columns;
    context_.log2_pass_columns = 0;
    while (1 << context_.log2_pass_columns < columns) ++context_.log2_pass_columns;
  }

  // The next norm's vector, well before it is wanted.
  template <int Width>
  DEVICE void load_norm(const bf16* norm) {
    copy_async_wait_all();  // who had no units of the last product has not waited for its vector
    s_.norm.template load_async<Width>(norm);
  }

  // What each warp knows of a pass.
  DEVICE Column* pass_columns() { return s_.columns[thread_idx() / 32]; }

  template <class Make>
  DEVICE void set_columns(int count, Make make) {
    sync_warp();
    if (thread_idx() % 32 < count) pass_columns()[thread_idx() % 32] = make(thread_idx() % 32);
    sync_warp();
  }

  // The copying warp learns that nobody reads its ring any more.
  DEVICE void finish() {
    copy_async_wait_all();
    sync_compute_threads();
    if (thread_idx() == 0) *static_cast<volatile int*>(&ring_.stop) = 1;
    context_.timer.write(p_.phase_times);
  }

  const Params& p_;
  typename SharedMemory<M, MaxColumns>::Fixed& s_;
  PhaseContext<R, MaxColumns> context_;

 private:
  template <class S, class Head>
  DEVICE static void assign_row_groups(RowGroupRange* row_groups) {
    row_groups[kQkv] = RowGroupRange::of_block(S::Qkv::num_row_groups);
    row_groups[kOut] = RowGroupRange::of_block(S::Out::num_row_groups);
    row_groups[kGateUp] = RowGroupRange::of_block(S::GateUp::num_row_groups);
    row_groups[kDown] = RowGroupRange::of_block(S::Down::num_row_groups);
    row_groups[kHead] = RowGroupRange::of_block(Head::num_row_groups);
  }

  R& ring_;
};

// Whether this is the warp that copies weights; those beyond it were needed for their registers.
DEVICE bool is_copy_warp() {
  lower_register_limit();
  return thread_idx() < kNumThreads + 32;
}

}  // namespace megakernel
