// The base of all kernels' classes: the state of the compute warps of a thread block.
#pragma once

#include "shared_memory.cuh"

namespace megakernel {

// For at most `MaxColumns` streams. With one, the number of columns is a compile-time constant.
template <class M, int MaxColumns>
class BlockContext {
 protected:
  using Talker = typename M::Talker;
  using Predictor = typename M::Predictor;
  using R = typename SharedMemory<M, MaxColumns>::R;

  // Initialises the shared memory of the compute warps. Called by all of them.
  DEVICE BlockContext(const Params& p, SharedMemory<M, MaxColumns>& shared)
      : p_(p), s_(shared.fixed), context_(shared.make_context(p)), ring_(shared.ring) {
    if (thread_idx() < MaxColumns) s_.num_published[thread_idx()] = 0;
    context_.reset_timeouts();
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

  // Sets the number of columns of the next pass.
  DEVICE void begin_pass(int num_columns) {
    context_.num_pass_columns = num_columns;
    context_.log2_pass_columns = 0;
    while (1 << context_.log2_pass_columns < num_columns) ++context_.log2_pass_columns;
  }

  // Starts to load the weight of the next norm, [Width].
  template <int Width>
  DEVICE void load_norm(const bf16* norm) {
    copy_async_wait_all();  // of the last weight, for threads without row groups of its projection
    s_.norm.template load_async<Width>(norm);
  }

  // The columns of the current pass, in the warp's own copy; a wide kernel has a single copy.
  DEVICE Column* pass_columns() { return s_.columns[kIsWide ? 0 : thread_idx() / 32]; }

  // Sets the columns of a pass to make(column).
  template <class Make>
  DEVICE void set_columns(int num_columns, Make make) {
    if constexpr (kIsWide) {
      sync_compute_threads();
      if (thread_idx() < num_columns) pass_columns()[thread_idx()] = make(thread_idx());
      sync_compute_threads();
    } else {
      sync_warp();
      if (thread_idx() % 32 < num_columns) {
        pass_columns()[thread_idx() % 32] = make(thread_idx() % 32);
      }
      sync_warp();
    }
  }

  // Stops the copy warp after all compute warps have read their last stage.
  DEVICE void finish() {
    copy_async_wait_all();
    sync_compute_threads();
    if (thread_idx() == 0) *static_cast<volatile int*>(&ring_.stop) = 1;
    context_.timer.write(p_.phase_times);
  }

  const Params& p_;
  typename SharedMemory<M, MaxColumns>::Fixed& s_;
  typename SharedMemory<M, MaxColumns>::Context context_;

 private:
  // Sets this thread block's row groups of every projection, [phases].
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

// Lowers the register limit of a warp that does not compute. Returns whether it is the copy warp.
// The three warps behind it exist because setmaxnreg applies to groups of four warps.
DEVICE bool is_copy_warp() {
  lower_register_limit();
  return thread_idx() < kNumThreads + 32;
}

}  // namespace megakernel
