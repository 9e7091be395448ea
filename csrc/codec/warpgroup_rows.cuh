// The projection of many rows with warpgroup instructions, on sm_90a: the equation of
// projection.cuh with the snake as epilogue.
//
// A block is persistent. It takes one tile of rows and columns after the other, and its copy warps
// are ahead of its consumers, also across tiles. Rows go from shared memory to registers, weights
// are multiplied where they are in shared memory. The order of the sums is that of projection.cuh,
// and wgmma rounds as mma.sync does. So a row has the same bits from all kernels.
#pragma once

#include "../warpgroup.cuh"
#include "epilogue.cuh"
#include "row_window.cuh"

namespace megakernel::codec {

// --- static asserts ---

constexpr int kWarpgroupThreads = 128;
constexpr int kWarpgroupRows = 64;  // of an instruction
// The sizes of a block. Each of the `Warpgroups` consumers computes kWarpgroupRows rows of all
// columns. `Stages` steps of weights fit into shared memory, with `IsResident` all of a layer. Each
// consumer has `Windows` windows of at most `WindowRows` rows.
template <int Columns, int Warpgroups, int Planes, int Stages, int Windows, int WindowRows,
          bool IsResident>
struct WarpgroupTile {
  static_assert(Columns % 32 == 0, "a lane stores eight adjacent channels of every 32");
  static_assert(Warpgroups == 2 || Warpgroups == 3,
                "each has a copy warp, weights have the fourth");
  static_assert(Planes == 1 || Planes == 2, "activations have one or two planes");
  static constexpr int kColumns = Columns, kWarpgroups = Warpgroups, kPlanes = Planes;
  static constexpr int kStages = Stages, kWindows = Windows, kWindowRows = WindowRows;
  static constexpr bool kIsResident = IsResident;
  static constexpr bool kHasResidual = Columns < 192;        // wider tiles have no registers left
  static constexpr int kRows = kWarpgroupRows * Warpgroups;  // of a block
  static constexpr int kThreads = kWarpgroupThreads * (Warpgroups + 1);   // with the copy warps
  static constexpr int kStepSize = Columns * kStepChannels / 8;           // weights, in 16 bytes
  static constexpr int kWindowSize = Planes * WindowRows * 4;             // in 16 bytes
  static constexpr int kConsumerRegisters = Warpgroups == 2 ? 232 : 160;  // of a thread
  static constexpr int kCopyRegisters = Warpgroups == 2 ? 40 : 32;
  static_assert(kWarpgroupThreads * (Warpgroups * kConsumerRegisters + kCopyRegisters) <= 65536,
                "a multiprocessor has 65,536 registers");
};

// --- shared memory ---

// A ring of weights, [stages, halves of a step, halves of K, columns, 8 channels]; for each
// consumer a ring of windows (RowWindow) of a step of channels, [windows, planes, rows, 4], and the
// address of each row of a window. A mbarrier `full` completes when a stage or window has been
// copied, `empty` when it has been released.
template <class T>
struct alignas(16) WarpgroupSharedMemory {
  uint4 weights[T::kStages][T::kStepSize];
  uint4 windows[T::kWarpgroups][T::kWindows][T::kWindowSize];
  const f16* sources[T::kWarpgroups][T::kWindowRows];
  Mbarrier full_weights[T::kStages], empty_weights[T::kStages];
  Mbarrier full_windows[T::kWarpgroups][T::kWindows], empty_windows[T::kWarpgroups][T::kWindows];
};

#ifdef MEGAKERNEL_HAS_WARPGROUP_INSTRUCTIONS

// --- warp roles ---

// The first warpgroups are consumers. Of the last one, warp w < kWarpgroups copies the windows of
// consumer w, and warp 3 copies weights.

// The tiles of a launch.
template <class T>
struct WarpgroupSchedule {
  using Window = RowWindow<kWarpgroupRows, T::kPlanes>;

  int num_steps, column_tiles, num_tiles;
  bool is_reversed;

  // Of the launch. If `is_reversed`, the last rows come first; there is one tile of columns then.
  DEVICE explicit WarpgroupSchedule(const ProjectionParams& p, bool is_reversed = false)
      : num_steps(p.num_taps * p.input.num_channels / kStepChannels),
        column_tiles(p.num_columns / T::kColumns),
        num_tiles((p.num_rows + T::kRows - 1) / T::kRows * column_tiles),
        is_reversed(is_reversed) {}

  // The first column of a tile, and the first row of a consumer in it.
  DEVICE int first_column(int tile) const { return tile % column_tiles * T::kColumns; }
  DEVICE int first_row(int tile, int consumer) const {
    if (is_reversed) tile = num_tiles - 1 - tile;
    return tile / column_tiles * T::kRows + consumer * kWarpgroupRows;
  }
};

// A position in a ring of kSize entries, and the parity of their use.
template <int kSize>
struct RingPosition {
  int entry = 0;
  uint32_t parity = 0;

  // Moves to the next entry.
  DEVICE void advance() {
    if (++entry == kSize) entry = 0, parity ^= 1;
  }
  // The entry `steps` before.
  DEVICE int entry_before(int steps) const {
    return entry < steps ? entry - steps + kSize : entry - steps;
  }
};

// Called by one thread, before a block barrier.
template <class T>
DEVICE void init_mbarriers(WarpgroupSharedMemory<T>& shared) {
  for (int i = 0; i < T::kStages; ++i) {
    mbarrier_init(shared.full_weights[i], 32);
    mbarrier_init(shared.empty_weights[i], 4 * T::kWarpgroups);
  }
  for (int consumer = 0; consumer < T::kWarpgroups; ++consumer) {
    for (int i = 0; i < T::kWindows; ++i) {
      mbarrier_init(shared.full_windows[consumer][i], 32);
      mbarrier_init(shared.empty_windows[consumer][i], 4);
    }
  }
  mbarrier_fence_init();
}

// Waits until the completion of this parity. All lanes of a warp call it.
DEVICE void wait_for_completion(const Mbarrier& barrier, uint32_t parity) {
  while (!mbarrier_try_wait(barrier, parity)) spin_pause();
  sync_warp();
}

// A warp copies the windows of `consumer` for a tile from input [rows, planes, channels] and its
// history: of each step of channels [planes, window rows, kStepChannels].
template <class T>
DEVICE void copy_tile_windows(const ProjectionParams& p, WarpgroupSharedMemory<T>& shared,
                              int first_row, int consumer, RingPosition<T::kWindows>& at) {
  const f16** sources = shared.sources[consumer];
  const int num_channel_steps = p.input.num_channels / kStepChannels, piece = lane_idx() % 4;
  const typename WarpgroupSchedule<T>::Window window(p, first_row);
  sync_warp();  // the last copies of the previous tile have read their addresses
  for (int i = lane_idx(); i < window.num_rows; i += 32) sources[i] = window.source(i);
  sync_warp();
#pragma unroll 1
  for (int channel_step = 0; channel_step < num_channel_steps; ++channel_step) {
    wait_for_completion(shared.empty_windows[consumer][at.entry], at.parity ^ 1);
    uint4* to = shared.windows[consumer][at.entry] + piece;
#pragma unroll 4
    for (int row = lane_idx() / 4; row < window.num_rows; row += 8) {
      const f16* from = sources[row] + channel_step * kStepChannels + 8 * piece;
#pragma unroll
      for (int plane = 0; plane < T::kPlanes; ++plane) {
        copy_async_16_bytes(to + (plane * T::kWindowRows + row) * 4,
                            from + plane * p.input.num_channels);
      }
    }
    mbarrier_arrive_on_copies(shared.full_windows[consumer][at.entry]);
    at.advance();
  }
}

// The same for all tiles.
template <class T>
DEVICE void copy_windows(const ProjectionParams& p, WarpgroupSharedMemory<T>& shared,
                         const WarpgroupSchedule<T>& schedule, int consumer) {
  RingPosition<T::kWindows> at;
#pragma unroll 1
  for (int tile = block_idx(); tile < schedule.num_tiles; tile += num_blocks()) {
    copy_tile_windows<T>(p, shared, schedule.first_row(tile, consumer), consumer, at);
  }
}

// A warp copies `num_stages` stages of weights, which are contiguous.
template <class T>
DEVICE void copy_stages(WarpgroupSharedMemory<T>& shared, const uint4* from, int num_stages,
                        uint64_t policy, RingPosition<T::kStages>& at) {
  constexpr int kBytes = T::kStepSize * sizeof(uint4);
#pragma unroll 1
  for (int i = 0; i < num_stages; ++i, from += T::kStepSize) {
    wait_for_completion(shared.empty_weights[at.entry], at.parity ^ 1);
    mbarrier_expect_copy(shared.full_weights[at.entry], kBytes);
    copy_async(shared.weights[at.entry], from, kBytes, shared.full_weights[at.entry], policy);
    at.advance();
  }
}

// A warp copies warpgroup_weights [column tiles, steps, 4, kColumns, 8], step by step for every
// tile, or once if they are resident.
template <class T>
DEVICE void copy_step_weights(const ProjectionParams& p, WarpgroupSharedMemory<T>& shared,
                              const WarpgroupSchedule<T>& schedule) {
  const uint64_t policy = l2_evict_last_policy();
  RingPosition<T::kStages> at;
#pragma unroll 1
  for (int tile = block_idx(); tile < schedule.num_tiles; tile += num_blocks()) {
    const uint4* from = p.warpgroup_weights + static_cast<long long>(tile % schedule.column_tiles) *
                                                  schedule.num_steps * T::kStepSize;
    copy_stages<T>(shared, from, schedule.num_steps, policy, at);
    if (T::kIsResident) break;
  }
}

// A consumer's sums of a tile. Lane 4 g + t has rows g and g + 8 of its warp's 16, and eight
// adjacent channels of every 32: the columns of the weights are permuted (weight_packing.py).
template <class T>
class WarpgroupConsumer {
 public:
  // The operands of a step: channels 8 t to 8 t + 7 of rows g and g + 8.
  struct Rows {
    uint4 low[T::kPlanes], high[T::kPlanes];
  };

  float totals[T::kColumns / 2];            // of the splits before
  float sums[T::kPlanes][T::kColumns / 2];  // of the split

  // Consumer `consumer` of the block, before its first tile.
  DEVICE WarpgroupConsumer(const ProjectionParams& p, WarpgroupSharedMemory<T>& shared,
                           const WarpgroupSchedule<T>& schedule, int consumer)
      : shared_(shared), p_(p), schedule_(schedule), consumer_(consumer) {}

  // Computes the totals of the rows from `first_row` on.
  DEVICE void multiply_tile(int first_row) {
    const typename WarpgroupSchedule<T>::Window window(p_, first_row);
    const int row = thread_idx() % kWarpgroupThreads / 32 * 16 + lane_idx() / 4;
    low_ = 4 * window.position(row) + lane_idx() % 4;
    high_ = 4 * window.position(row + 8) + lane_idx() % 4;
#pragma unroll
    for (int i = 0; i < T::kColumns / 2; ++i) totals[i] = 0;
    if constexpr (T::kIsResident) stage_.entry = 0;
    int begin = 0;
#pragma unroll 1
    for (int split = 1; split <= p_.num_k_splits; ++split) {
      const int end = schedule_.num_steps * split / p_.num_k_splits;
      multiply_split(begin, end);
      begin = end;
#pragma unroll
      for (int plane = 0; plane < T::kPlanes; ++plane) pin_sums(sums[plane]);
#pragma unroll
      for (int i = 0; i < T::kColumns / 2; ++i) {
        float sum = sums[0][i];
        if constexpr (T::kPlanes == 2) sum += sums[1][i];
        totals[i] += sum;
      }
    }
    is_first_tile_ = false;
  }

 protected:
  // Releases the stage before the last `pending` ones.
  DEVICE void release_weights(int pending) {
    if (T::kIsResident || lane_idx() > 0) return;
    mbarrier_arrive(shared_.empty_weights[stage_.entry_before(pending + 1)]);
  }

  WarpgroupSharedMemory<T>& shared_;
  RingPosition<T::kStages> stage_;

 private:
  // The sums of steps `begin` to `end` of K. The rows of a step are loaded while the instructions
  // of the step before run.
  DEVICE void multiply_split(int begin, int end) {
    Rows even, odd;
    load_rows(even);
#pragma unroll 1
    for (int step = begin; step < end; step += 2) {
      multiply_step(even, step > begin);
      if (step > begin) {
        warpgroup_wait<1>();
        release_weights(1);
      }
      if (step + 1 < end) {
        load_rows(odd);
        multiply_step(odd, true);
        warpgroup_wait<1>();
        release_weights(1);
        if (step + 2 < end) load_rows(even);
      }
    }
    warpgroup_wait<0>();
    release_weights(0);
  }

  // Loads the rows of the next step. Releases the window after the last tap.
  DEVICE void load_rows(Rows& rows) {
    if (tap_ == 0) {
      wait_for_completion(shared_.full_windows[consumer_][window_.entry], window_.parity);
    }
    const uint4* at = shared_.windows[consumer_][window_.entry] + tap_ * p_.dilation * 4;
#pragma unroll
    for (int plane = 0; plane < T::kPlanes; ++plane) {
      rows.low[plane] = load_shared_volatile(at + plane * T::kWindowRows * 4 + low_);
      rows.high[plane] = load_shared_volatile(at + plane * T::kWindowRows * 4 + high_);
    }
    if (++tap_ < p_.num_taps) return;
    tap_ = 0;
    sync_warp();
    if (lane_idx() == 0) mbarrier_arrive(shared_.empty_windows[consumer_][window_.entry]);
    window_.advance();
  }

  // Begins the products of a step with the next stage of weights.
  DEVICE void multiply_step(const Rows& rows, bool adds) {
    if (!T::kIsResident || is_first_tile_) {
      wait_for_completion(shared_.full_weights[stage_.entry], stage_.parity);
    }
    constexpr int kCoreColumn = 8 * 16;                // bytes of a core matrix
    constexpr int kHalfBytes = T::kStepSize * 16 / 2;  // of the weights of an instruction
    const MatrixDescriptor first(shared_.weights[stage_.entry], kHalfBytes / 2, kCoreColumn);
    const MatrixDescriptor second = first + kHalfBytes;
    warpgroup_fence();
#pragma unroll
    for (int plane = 0; plane < T::kPlanes; ++plane) {
      const uint4 low = rows.low[plane], high = rows.high[plane];
      warpgroup_mma_f16(sums[plane], {low.x, high.x, low.y, high.y}, first, adds);
    }
#pragma unroll
    for (int plane = 0; plane < T::kPlanes; ++plane) {
      const uint4 low = rows.low[plane], high = rows.high[plane];
      warpgroup_mma_f16(sums[plane], {low.z, high.z, low.w, high.w}, second, true);
    }
    warpgroup_commit();
    stage_.advance();
  }

  const ProjectionParams& p_;
  const WarpgroupSchedule<T>& schedule_;
  const int consumer_;
  RingPosition<T::kWindows> window_;
  int tap_ = 0;
  int low_, high_;  // of the lane's rows in a window at the oldest tap, in 16 bytes
  bool is_first_tile_ = true;
};

// --- body ---

// Applies the epilogue to the totals of a consumer whose tile begins at `first_row` and
// `first_column`. Reads residual and writes residual_out [rows, columns]; writes output [rows *
// columns / channels, planes, channels]. The columns of a tile belong to one output row.
template <class T>
DEVICE void finish_warpgroup_rows(const ProjectionParams& p, const float (&totals)[T::kColumns / 2],
                                  int first_row, int first_column) {
  const float* params =
      &p.warpgroup_column_params[first_column + lane_idx() % 4].scale;  // of the lane's channels
  const int first = first_row + thread_idx() % kWarpgroupThreads / 32 * 16 + lane_idx() / 4;
  const int output_row = first_column / p.output.num_channels;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first + 8 * r;
    if (row >= p.num_rows) continue;
    const long long at = static_cast<long long>(row) * p.num_columns;
    const int n = first_column + 8 * (lane_idx() % 4);  // the first of the lane's channels
    const int plane_size = (p.output.num_planes - 1) * p.output.num_channels;
    f16* to = p.output.data + at * p.output.num_planes + output_row * plane_size + n;
#pragma unroll
    for (int column = 0; column < T::kColumns; column += 32) {
      float4 operand[2] = {};
      if (T::kHasResidual && p.residual != nullptr) {
        operand[0] = load_in_order(p.residual + at + n + column);
        operand[1] = load_in_order(p.residual + at + n + column + 4);
      }
      const float operands[8] = {operand[0].x, operand[0].y, operand[0].z, operand[0].w,
                                 operand[1].x, operand[1].y, operand[1].z, operand[1].w};
      float v[8], activated[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float4 channel = load_in_order(params + 4 * (column + 4 * i));
        const float total = totals[(column / 8 + i / 2) * 4 + 2 * r + i % 2];
        v[i] = fmaf(total, channel.x, channel.y);
        if (T::kHasResidual && p.residual != nullptr) v[i] += operands[i];
        activated[i] = snake(v[i], {channel.x, channel.y, channel.z, channel.w});
      }
      if (T::kHasResidual && p.residual_out != nullptr) {
        float4* sums = reinterpret_cast<float4*>(p.residual_out + at + n + column);
        sums[0] = {v[0], v[1], v[2], v[3]};
        sums[1] = {v[4], v[5], v[6], v[7]};
      }
      store_eight_activations(to + column, plane_size, activated);
    }
  }
}

// The projection kernel of many rows on sm_90a. Reads input [rows, planes, channels] and its
// history, residual [rows, columns], and warpgroup_weights [columns / kColumns, steps, 4, kColumns,
// 8]. Writes what `finish_warpgroup_rows` names.
template <class T>
DEVICE void project_with_warpgroups(const ProjectionParams& p, WarpgroupSharedMemory<T>& shared) {
  static_assert(sizeof(shared) <= kSharedMemoryBytes, "the tile exceeds the shared memory");
  trigger_dependent_grids();
  if (thread_idx() == 0) init_mbarriers<T>(shared);
  sync_all_threads();
  const WarpgroupSchedule<T> schedule(p);
  const int warpgroup = uniform_warp_idx() / 4, warp = uniform_warp_idx() % 4;
  if (warpgroup == T::kWarpgroups) {
    lower_register_limit<T::kCopyRegisters>();
    if (warp == 3) {  // weights do not depend on the previous kernel
      copy_step_weights<T>(p, shared, schedule);
      wait_for_prerequisite_grids();
    } else {
      wait_for_prerequisite_grids();
      if (warp < T::kWarpgroups) copy_windows<T>(p, shared, schedule, warp);
    }
  } else {
    raise_register_limit<T::kConsumerRegisters>();
    wait_for_prerequisite_grids();
    WarpgroupConsumer<T> consumer(p, shared, schedule, warpgroup);
#pragma unroll 1
    for (int tile = block_idx(); tile < schedule.num_tiles; tile += num_blocks()) {
      const int first_row = schedule.first_row(tile, warpgroup);
      consumer.multiply_tile(first_row);
      finish_warpgroup_rows<T>(p, consumer.totals, first_row, schedule.first_column(tile));
    }
  }
}

#endif  // MEGAKERNEL_HAS_WARPGROUP_INSTRUCTIONS

}  // namespace megakernel::codec
