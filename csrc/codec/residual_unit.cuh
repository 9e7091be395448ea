// A residual unit of the decoder's blocks on sm_90a: a convolution of several taps, the snake, the
// convolution of one tap, and the residual, in one kernel.
//
// The rows between the convolutions stay in registers. After the first product a lane has eight
// adjacent channels of every 32 of its rows, which are its operands of the second product. The
// order of the sums and the roundings are those of the two launches of warpgroup_rows.cuh, so a
// row has the same bits.
#pragma once

#include "warpgroup_rows.cuh"

namespace megakernel::codec {

// --- static asserts ---

// The sizes of a block: those of the first convolution, whose ring also has the weights of the
// second one. The second product is computed kPartColumns columns at a time, which registers limit.
template <int Columns, int Warpgroups, int Stages, int Windows, int WindowRows, bool IsResident>
struct ResidualUnitTile
    : WarpgroupTile<Columns, Warpgroups, 1, Stages, Windows, WindowRows, IsResident> {
  static constexpr int kPartColumns = 96;  // of the weights' packing, see weight_packing.py
  static constexpr int kParts = Columns / kPartColumns;
  static constexpr int kPartSteps = Columns / kStepChannels;
  static constexpr int kFirstSplitSteps = kPartSteps / 2;                 // K has two splits
  static constexpr int kPartStepSize = kPartColumns * kStepChannels / 8;  // in 16 bytes
  static constexpr int kStepsPerStage = Columns / kPartColumns;
  static constexpr int kPartStages = kPartSteps / kStepsPerStage;
  static_assert(Columns % kPartColumns == 0, "the parts are equal");
  static_assert(Stages >= kPartStages, "a part's weights are released together");
};

// --- shared memory ---

// Also the parameters of the columns of both convolutions, permuted as their weights are.
template <class T>
struct ResidualUnitSharedMemory : WarpgroupSharedMemory<T> {
  ColumnParams column_params[2][T::kColumns];
};

#ifdef MEGAKERNEL_HAS_WARPGROUP_INSTRUCTIONS

// --- warp roles ---

// Those of warpgroup_rows.cuh.

// A warp copies the windows of `consumer`. It fetches the residual [rows, columns] of the tile into
// L2, because the consumer reads it late, with few loads in flight.
template <class T>
DEVICE void copy_unit_windows(const ResidualUnitParams& p, WarpgroupSharedMemory<T>& shared,
                              const WarpgroupSchedule<T>& schedule, int consumer) {
  RingPosition<T::kWindows> at;
#pragma unroll 1
  for (int tile = block_idx(); tile < schedule.num_tiles; tile += num_blocks()) {
    const int first_row = schedule.first_row(tile, consumer);
    const int num_rows = min(kWarpgroupRows, p.pointwise.num_rows - first_row);
    if (num_rows > 0 && lane_idx() == 0) {
      prefetch_l2_bulk(p.pointwise.residual + static_cast<long long>(first_row) * T::kColumns,
                       num_rows * T::kColumns * static_cast<int>(sizeof(float)));
    }
    copy_tile_windows<T>(p.convolution, shared, first_row, consumer, at);
  }
}

// A warp copies the weights of both convolutions: [steps, 4, kColumns, 8], then [parts, steps, 4,
// kPartColumns, 8].
template <class T>
DEVICE void copy_unit_weights(const ResidualUnitParams& p, WarpgroupSharedMemory<T>& shared,
                              const WarpgroupSchedule<T>& schedule) {
  const uint64_t policy = l2_evict_last_policy();
  RingPosition<T::kStages> at;
#pragma unroll 1
  for (int tile = block_idx(); tile < schedule.num_tiles; tile += num_blocks()) {
    copy_stages<T>(shared, p.convolution.warpgroup_weights, schedule.num_steps, policy, at);
    copy_stages<T>(shared, p.pointwise.warpgroup_weights, T::kParts * T::kPartStages, policy, at);
    if (T::kIsResident) break;
  }
}

// An instruction that does not add reads its sums for the compiler. If they were not cleared, they
// would occupy registers since the last instruction that wrote them.
template <int kSize>
DEVICE void clear_sums(float (&sums)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) sums[i] = 0;
}

// A consumer's rows: the base class computes the first product.
template <class T>
class ResidualUnitConsumer : public WarpgroupConsumer<T> {
  using Base = WarpgroupConsumer<T>;

 public:
  // Consumer `consumer` of the block, before its first tile.
  DEVICE ResidualUnitConsumer(const ResidualUnitParams& p, ResidualUnitSharedMemory<T>& shared,
                              const WarpgroupSchedule<T>& schedule, int consumer)
      : Base(p.convolution, shared, schedule, consumer),
        p_(p.pointwise),
        column_params_(shared.column_params) {}

  // Computes the rows from `first_row` on.
  DEVICE void compute_tile(int first_row) {
    clear_sums(this->sums[0]);
    Base::multiply_tile(first_row);
    activate();
#pragma unroll 1
    for (int part = 0; part < T::kParts; ++part) compute_part(first_row, T::kPartColumns * part);
  }

 private:
  using Residual = float4[2][2];  // of rows g and g + 8: the lane's eight channels of 32

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
      middle_[step] = {{round_eight_activations(low)}, {round_eight_activations(high)}};
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
    begin_products(sums);
    Residual residual = {};  // that it occupies no registers before
    load_residual(residual, row, at);
    warpgroup_wait<0>();
#pragma unroll
    for (int stage = 0; stage < T::kPartStages; ++stage) this->release_weights(stage);
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
#pragma unroll
    for (int i = 0; i < T::kPartColumns / 32; ++i) {
      float v[2][8];  // of rows g and g + 8
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        v[j / 8][j % 8] = totals[(4 * i + j % 8 / 2) * 4 + j / 8 * 2 + j % 2];
      }
      add_residual(v, residual, first_column + 32 * i);
      store_residual(v, row, at + 32 * i);
      if (i + 1 < T::kPartColumns / 32) load_residual(residual, row, at + 32 * (i + 1));
      store_activated(v, row, at + 32 * i, first_column + 32 * i);
    }
  }

  // Begins the products of a part.
  DEVICE void begin_products(float (&sums)[2][T::kPartColumns / 2]) {
    auto stage = this->stage_;
#pragma unroll
    for (int i = 0; i < T::kPartStages; ++i, stage.advance()) {
      wait_for_completion(this->shared_.full_weights[stage.entry],
                          T::kIsResident ? 0 : stage.parity);
    }
    constexpr int kCoreColumn = 8 * 16;                    // bytes of a core matrix
    constexpr int kHalfBytes = T::kPartStepSize * 16 / 2;  // of the weights of an instruction
    warpgroup_fence();
#pragma unroll
    for (int step = 0; step < T::kPartSteps; ++step) {
      const uint4* weights =
          this->shared_.weights[this->stage_.entry] + step % T::kStepsPerStage * T::kPartStepSize;
      const MatrixDescriptor first(weights, kHalfBytes / 2, kCoreColumn);
      const int split = step >= T::kFirstSplitSteps;
      const bool adds = step > split * T::kFirstSplitSteps;
      const uint4 low = middle_[step].low[0], high = middle_[step].high[0];
      warpgroup_mma_f16(sums[split], {low.x, high.x, low.y, high.y}, first, adds);
      warpgroup_mma_f16(sums[split], {low.z, high.z, low.w, high.w}, first + kHalfBytes, true);
      if (step % T::kStepsPerStage == T::kStepsPerStage - 1) this->stage_.advance();
    }
    warpgroup_commit();
  }

  // Loads from residual [rows, columns], element `at` for row g, which is row `row`.
  DEVICE void load_residual(Residual& residual, int row, long long at) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (row + 8 * r >= p_.num_rows) continue;
      const float* from = p_.residual + at + 8 * r * T::kColumns;
      residual[r][0] = load_in_order(from), residual[r][1] = load_in_order(from + 4);
    }
  }

  // The parameters of the lane's channel `i` of 32 columns of convolution `convolution`.
  DEVICE const ColumnParams& column_params(int convolution, int first_column, int i) const {
    return column_params_[convolution][first_column + 4 * i + lane_idx() % 4];
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
  DEVICE void store_residual(const float (&v)[2][8], int row, long long at) const {
    if (p_.residual_out == nullptr) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (row + 8 * r >= p_.num_rows) continue;
      float4* to = reinterpret_cast<float4*>(p_.residual_out + at + 8 * r * T::kColumns);
      to[0] = {v[r][0], v[r][1], v[r][2], v[r][3]};
      to[1] = {v[r][4], v[r][5], v[r][6], v[r][7]};
    }
  }

  // Applies the snake and writes output [rows, planes, channels].
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
      if (row + 8 * r >= p_.num_rows) continue;
      f16* to = p_.output.data + at + 8 * r * T::kColumns +
                static_cast<long long>(row + 8 * r) * plane_size;
      store_eight_activations(to, plane_size, activated[r]);
    }
  }

  const ProjectionParams& p_;  // of the second convolution
  const ColumnParams (&column_params_)[2][T::kColumns];
  typename Base::Rows middle_[T::kPartSteps];
};

// --- body ---

// The kernel of a residual unit. Reads input [rows, 1, channels] and its history, residual [rows,
// columns], and the warpgroup_weights of both convolutions. Writes residual_out [rows, columns] and
// output [rows, planes, channels] of the second convolution.
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
  const int warpgroup = uniform_warp_idx() / 4, warp = uniform_warp_idx() % 4;
  if (warpgroup == T::kWarpgroups) {
    lower_register_limit<T::kCopyRegisters>();
    if (warp == 3) {  // weights do not depend on the previous kernel
      copy_unit_weights<T>(p, shared, schedule);
      wait_for_prerequisite_grids();
    } else {
      wait_for_prerequisite_grids();
      if (warp < T::kWarpgroups) copy_unit_windows<T>(p, shared, schedule, warp);
    }
  } else {
    raise_register_limit<T::kConsumerRegisters>();
    wait_for_prerequisite_grids();
    ResidualUnitConsumer<T> consumer(p, shared, schedule, warpgroup);
#pragma unroll 1
    for (int tile = block_idx(); tile < schedule.num_tiles; tile += num_blocks()) {
      consumer.compute_tile(schedule.first_row(tile, warpgroup));
    }
  }
}

#endif  // MEGAKERNEL_HAS_WARPGROUP_INSTRUCTIONS

}  // namespace megakernel::codec
