// A residual unit of the decoder's blocks on sm_90a: a convolution of several taps, the snake, the
// convolution of one tap, and the residual, in one kernel.
//
// The rows between the convolutions stay in registers. After the first product a lane has eight
// adjacent channels of every 32 of its rows, which are its operands of the second product. The
// order of the sums and the roundings are those of two launches, so a row has the same bits. All
// rows of a consumer are of one frame.
#pragma once

#include "warpgroup_rows.cuh"

namespace megakernel::codec {

// --- static asserts ---

// The sizes of a block: those of the first convolution. The weights of the second one are one more
// stage. The second product is computed kPartColumns columns at a time, which registers limit.
template <int Columns, int Warpgroups, int StageSteps, int Stages, int WindowRows, int WeightSteps,
          bool IsResident>
struct ResidualUnitTile : WarpgroupTile<Columns, Warpgroups, 1, StageSteps, Stages, WindowRows,
                                        BlockRows::kSeparate, false, WeightSteps, IsResident> {
  static constexpr bool kMayBeTiled = true;  // the input
  static constexpr int kPartColumns = 96;    // of the weights' packing, see weight_packing.py
  static constexpr int kParts = Columns / kPartColumns;
  static constexpr int kPartSteps = Columns / kStepChannels;
  static constexpr int kFirstSplitSteps = kPartSteps / 2;                 // K has two splits
  static constexpr int kPartStepSize = kPartColumns * kStepChannels / 8;  // in 16 bytes
  static_assert(Columns % kPartColumns == 0, "the parts are equal");
  static_assert(kPartSteps <= StageSteps, "the second convolution has one stage");
  static_assert(WindowRows <= 2 * kTileRows, "the rows before a tile are of one tile");
};

// --- shared memory ---

// Also the parameters of the columns of both convolutions, permuted as their weights are.
template <class T>
struct ResidualUnitSharedMemory : WarpgroupSharedMemory<T> {
  ColumnParams column_params[2][T::kColumns];
};

#ifdef MEGAKERNEL_HAS_WARPGROUP_INSTRUCTIONS

// --- warp roles ---

// Those of warpgroup_tile.cuh.

// A copy warp of `consumer` copies windows. The first one fetches the residual [rows, columns] of
// the tile into L2, because the consumer reads it late, with few loads in flight.
template <class T>
DEVICE void copy_unit_windows(const ResidualUnitParams& p, WarpgroupSharedMemory<T>& shared,
                              const WarpgroupSchedule<T>& schedule, int consumer, int warp) {
  RingPosition<T::kStages> at;
#pragma unroll 1
  for (int round = 0; round <= schedule.num_full_rounds; ++round) {
    const Items items = schedule.items(round);
    if (consumer >= items.count) break;
    const int window_idx = schedule.window_idx(items.first + consumer);
    if (warp == 0 && lane_idx() == 0) {
      const long long first_row = static_cast<long long>(window_idx) * kWarpgroupRows;
      prefetch_l2_bulk(p.pointwise.residual + first_row * T::kColumns,
                       kWarpgroupRows * T::kColumns * static_cast<int>(sizeof(float)));
    }
    copy_window_by_rows<T>(p.convolution, shared, window_idx, consumer, warp, at);
  }
}

// A warp copies the weights of both convolutions: [steps, 4, kColumns, 8], then [parts, steps, 4,
// kPartColumns, 8].
template <class T>
DEVICE void copy_unit_weights(const ResidualUnitParams& p, WarpgroupSharedMemory<T>& shared,
                              const WarpgroupSchedule<T>& schedule) {
  const uint64_t policy = l2_evict_last_policy();
  RingPosition<T::kWeightStages> at;
#pragma unroll 1
  for (int round = 0; round <= schedule.num_full_rounds; ++round) {
    if (schedule.items(round).count == 0) break;
    copy_tile_weights<T>(shared, p.convolution.warpgroup_weights, schedule.num_steps, 1, 0, policy,
                         at);
    copy_stage<T>(shared, p.pointwise_weights, T::kPartSteps * T::kStepSize, 1, 0, policy, at);
    if (T::kIsResident) break;
  }
}

// A consumer's rows: the base class computes the first product.
template <class T>
class ResidualUnitConsumer : public WarpgroupConsumer<T> {
  using Base = WarpgroupConsumer<T>;

 public:
  // Consumer `consumer` of the block, before its first item.
  DEVICE ResidualUnitConsumer(const ResidualUnitParams& p, ResidualUnitSharedMemory<T>& shared,
                              const WarpgroupSchedule<T>& schedule, int consumer)
      : Base(p.convolution, shared, schedule, consumer), p_(p.pointwise), unit_shared_(shared) {}

  // Computes the next item, whose rows begin at `first_row`.
  DEVICE void compute_item(int first_row) {
    Base::multiply_item();
    activate();
    this->wait_for_weights();
#pragma unroll 1
    for (int part = 0; part < T::kParts; ++part) compute_part(first_row, T::kPartColumns * part);
    this->stage_.advance();
  }

  // Releases the stages of a round in which the consumer has no item.
  DEVICE void skip_round() {
    Base::skip_round();
    this->wait_for_weights();
    this->release_weights(this->stage_.entry);
    this->stage_.advance();
  }

 private:
  using Residual = float4[2][2];  // of rows g and g + 8: the lane's eight channels of 32
  // The operands of a step: channels 8 t to 8 t + 7 of rows g and g + 8.
  struct Rows {
    uint4 low, high;
  };

  // The operands of the second product: the activated totals of the first one.
  DEVICE void activate() {
#pragma unroll
    for (int step = 0; step < T::kPartSteps; ++step) {
      float low[8], high[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const ColumnParams& column = column_params(0, 32 * step, i);
        const float* totals = &this->totals[(4 * step + i / 2) * 4 + i % 2];
        low[i] = snake(fmaf(totals[0], column.scale, column.bias), column);
        high[i] = snake(fmaf(totals[2], column.scale, column.bias), column);
      }
      middle_[step] = {round_eight_activations(low), round_eight_activations(high)};
    }
  }

  // Columns `first_column` to `first_column` + kPartColumns - 1 of the second convolution. Reads
  // residual and writes residual_out [rows, columns]; writes output [rows, planes, channels].
  DEVICE void compute_part(int first_row, int first_column) {
    const int row = first_row + thread_idx() % kWarpgroupThreads / 32 * 16 + lane_idx() / 4;
    const int n = first_column + 8 * (lane_idx() % 4);  // the first of the lane's channels
    const long long at = static_cast<long long>(row) * T::kColumns + n;
    float sums[2][T::kPartColumns / 2];  // of the splits of K
#pragma unroll
    for (int split = 0; split < 2; ++split) clear_sums(sums[split]);
    begin_products(sums, first_column);
    Residual residual[T::kPartColumns / 32];
    load_residual(residual[0], at);
    warpgroup_wait<0>();
    if (first_column + T::kPartColumns == T::kColumns) this->release_weights(this->stage_.entry);
#pragma unroll
    for (int split = 0; split < 2; ++split) pin_sums(sums[split]);
    float totals[T::kPartColumns / 2];
#pragma unroll
    for (int i = 0; i < T::kPartColumns / 2; ++i) {
      totals[i] = 0;
#pragma unroll
      for (int split = 0; split < 2; ++split) totals[i] += sums[split][i];
    }
    pin_sums(totals);  // before the epilogue, for which both sums leave too few registers
    load_residual(residual[1], at + 32);
#pragma unroll
    for (int i = 0; i < T::kPartColumns / 32; ++i) {
      float v[2][8];  // of rows g and g + 8
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        v[j / 8][j % 8] = totals[(4 * i + j % 8 / 2) * 4 + j / 8 * 2 + j % 2];
      }
      add_residual(v, residual[i], first_column + 32 * i);
      if (i + 2 < T::kPartColumns / 32) load_residual(residual[i + 2], at + 32 * (i + 2));
      store_residual(v, at + 32 * i);
      store_activated(v, row, at + 32 * i, first_column + 32 * i);
    }
  }

  // Begins the products of a part.
  DEVICE void begin_products(float (&sums)[2][T::kPartColumns / 2], int first_column) {
    constexpr int kCoreBytes = 8 * 16;                            // of a core matrix
    constexpr int kInstructionBytes = T::kPartStepSize * 16 / 2;  // of weights
    const int part = first_column / T::kPartColumns;
    const uint4* first = this->shared_.weights[0][this->stage_.entry * T::kStageSteps] +
                         part * T::kPartSteps * T::kPartStepSize;
    const MatrixDescriptor weights(first, kInstructionBytes / 2, kCoreBytes);
    warpgroup_fence();
#pragma unroll
    for (int step = 0; step < T::kPartSteps; ++step) {
      const MatrixDescriptor of_step = weights + 2 * step * kInstructionBytes;
      const int split = step >= T::kFirstSplitSteps;
      const bool adds = step > split * T::kFirstSplitSteps;
      const uint4 low = middle_[step].low, high = middle_[step].high;
      warpgroup_mma_f16(sums[split], {low.x, high.x, low.y, high.y}, of_step, adds);
      warpgroup_mma_f16(sums[split], {low.z, high.z, low.w, high.w}, of_step + kInstructionBytes,
                        true);
    }
    warpgroup_commit();
  }

  // Loads from residual [rows, columns], element `at` for row g.
  DEVICE void load_residual(Residual& residual, long long at) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float* from = p_.residual + at + 8 * r * T::kColumns;
      residual[r][0] = load_in_order(from), residual[r][1] = load_in_order(from + 4);
    }
  }

  // The parameters of the lane's channel `i` of 32 columns of convolution `convolution`.
  DEVICE const ColumnParams& column_params(int convolution, int first_column, int i) const {
    return unit_shared_.column_params[convolution][first_column + 4 * i + lane_idx() % 4];
  }

  // Replaces totals of eight channels of rows g and g + 8 by the sums before the epilogue.
  DEVICE void add_residual(float (&v)[2][8], const Residual& residual, int first_column) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const ColumnParams& column = column_params(1, first_column, i);
      const float scale = column.scale, bias = column.bias;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float4 four = residual[r][i / 4];
        const float operands[4] = {four.x, four.y, four.z, four.w};
        v[r][i] = fmaf(v[r][i], scale, bias) + operands[i % 4];
      }
    }
  }

  // Writes residual_out [rows, columns].
  DEVICE void store_residual(const float (&v)[2][8], long long at) const {
    if (p_.residual_out == nullptr) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float4* to = reinterpret_cast<float4*>(p_.residual_out + at + 8 * r * T::kColumns);
      to[0] = {v[r][0], v[r][1], v[r][2], v[r][3]};
      to[1] = {v[r][4], v[r][5], v[r][6], v[r][7]};
    }
  }

  // Applies the snake and writes output [rows, planes, channels], or tiled.
  DEVICE void store_activated(const float (&v)[2][8], int row, long long at,
                              int first_column) const {
    float activated[2][8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const ColumnParams& column = column_params(1, first_column, i);
      const ColumnParams snake_params = {0, 0, column.alpha, column.beta};
#pragma unroll
      for (int r = 0; r < 2; ++r) activated[r][i] = snake(v[r][i], snake_params);
    }
    const int plane_size = (p_.output.num_planes - 1) * T::kColumns;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (p_.output.is_tiled) {  // rows of one frame are not interleaved
        const int channel = first_column + 8 * (lane_idx() % 4);
        store_eight_tiled_activations(p_.output, row + 8 * r, channel, activated[r]);
        continue;
      }
      f16* to = p_.output.data + at + 8 * r * T::kColumns +
                static_cast<long long>(row + 8 * r) * plane_size;
      store_eight_activations(to, plane_size, activated[r]);
    }
  }

  const ProjectionParams& p_;  // of the second convolution
  ResidualUnitSharedMemory<T>& unit_shared_;
  Rows middle_[T::kPartSteps];
};

// --- body ---

// The kernel of a residual unit. Reads input [rows, 1, channels], or tiled, and its history,
// residual [rows, columns], and the weights of both convolutions for tiles. Writes residual_out
// [rows, columns] and output [rows, planes, channels], or tiled, of the second convolution.
template <class T>
DEVICE void compute_residual_unit(const ResidualUnitParams& p,
                                  ResidualUnitSharedMemory<T>& shared) {
  static_assert(sizeof(shared) <= kSharedMemoryBytes, "the tile exceeds the shared memory");
  trigger_dependent_grids();
  if (thread_idx() == 0) init_mbarriers<T>(shared);
  for (int n = thread_idx(); n < T::kColumns; n += T::kThreads) {
    shared.column_params[0][n] = p.convolution.warpgroup_column_params[n];
    shared.column_params[1][n] = p.pointwise.warpgroup_column_params[n];
  }
  sync_all_threads();
  const WarpgroupSchedule<T> schedule(p.convolution, p.is_reversed);
  const int warpgroup = uniform_warp_idx() / 4;
  if (warpgroup >= T::kWarpgroups) {
    lower_register_limit<T::kCopyRegisters>();
    const int warp = uniform_warp_idx() - 4 * T::kWarpgroups, consumer = warp / T::kCopyWarps;
    if (consumer < T::kWarpgroups) {
      wait_for_prerequisite_grids();
      copy_unit_windows<T>(p, shared, schedule, consumer, warp % T::kCopyWarps);
    } else {  // weights do not depend on the previous kernel
      if (warp == T::kWarpgroups * T::kCopyWarps) copy_unit_weights<T>(p, shared, schedule);
      wait_for_prerequisite_grids();
    }
  } else {
    raise_register_limit<T::kConsumerRegisters>();
    wait_for_prerequisite_grids();
    ResidualUnitConsumer<T> consumer(p, shared, schedule, warpgroup);
#pragma unroll 1
    for (int round = 0; round <= schedule.num_full_rounds; ++round) {
      const Items items = schedule.items(round);
      if (warpgroup >= items.count) {
        if (items.count > 0) consumer.skip_round();
        break;
      }
      consumer.compute_item(schedule.window_idx(items.first + warpgroup) * kWarpgroupRows);
    }
  }
}

#endif  // MEGAKERNEL_HAS_WARPGROUP_INSTRUCTIONS

}  // namespace megakernel::codec
