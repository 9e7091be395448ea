// The projection of many rows with warpgroup instructions, on sm_90a: the equation of
// projection.cuh with epilogues that store one channel for each column.
//
// A block is persistent. Each of its consumers takes one item of rows and columns after the other,
// and the copy warps are ahead of the consumers, also across items. Rows and weights are operands
// in shared memory. The order of the sums is that of projection.cuh, and wgmma rounds as mma.sync
// does. So a row has the same bits from all kernels.
#pragma once

#include "warpgroup_copies.cuh"

namespace megakernel::codec {

// --- static asserts ---

static_assert(kWarpgroupRows == kWarpgroupThreads / 2, "a lane has two rows");

// --- shared memory ---

// Also the parameters of the columns of a tile, for each warp of the consumers.
template <class T>
struct WarpgroupProjectionSharedMemory : WarpgroupSharedMemory<T> {
  ColumnParams column_params[4 * T::kWarpgroups][T::kColumns];
};

#ifdef MEGAKERNEL_HAS_WARPGROUP_INSTRUCTIONS

// --- warp roles ---

// Those of warpgroup_tile.cuh.

// An instruction that does not add reads its sums for the compiler. If they were not cleared, they
// would occupy registers since the last instruction that wrote them.
template <int kSize>
DEVICE void clear_sums(float (&sums)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) sums[i] = 0;
}

// A consumer's sums of an item. Lane 4 g + t has rows g and g + 8 of its warp's 16, and eight
// adjacent channels of every 32: the columns of the weights are permuted (weight_packing.py).
template <class T>
class WarpgroupConsumer {
 public:
  float totals[T::kColumns / 2];            // of the splits before
  float sums[T::kPlanes][T::kColumns / 2];  // of the split

  // Consumer `consumer` of the block, before its first item.
  DEVICE WarpgroupConsumer(const ProjectionParams& p, WarpgroupSharedMemory<T>& shared,
                           const WarpgroupSchedule<T>& schedule, int consumer)
      : shared_(shared),
        p_(p),
        schedule_(schedule),
        consumer_(consumer),
        column_tile_(consumer % T::kColumnTiles),
        row_tile_(consumer % T::kRowTiles),
        row_step_bytes_(16 * row_step(p)) {}

  // Computes the totals of the next item.
  DEVICE void multiply_item() {
    begin_turn();
    clear_sums(totals);
#pragma unroll
    for (int plane = 0; plane < T::kPlanes; ++plane) clear_sums(sums[plane]);
    int begin = 0;
#pragma unroll 1
    for (int split = 1; split <= p_.num_k_splits; ++split) {
      const int end = schedule_.num_steps * split / p_.num_k_splits;
      multiply_split(end - begin);
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
    end_turn();
  }

  // Releases the stages of a round in which the consumer has no item.
  DEVICE void skip_round() {
#pragma unroll 1
    for (int step = 0; step < schedule_.num_steps; step += T::kStageSteps) {
      wait_for_weights();
      release_weights(stage_.entry);
      stage_.advance();
      if constexpr (T::kColumnTiles > 1) {
        wait_for_window();
        release_window(window_.entry);
        window_.advance();
      }
    }
  }

 protected:
  // Waits for the next stage of weights. Resident ones are copied once.
  DEVICE void wait_for_weights() const {
    wait_for_completion(shared_.full_weights[stage_.entry], T::kIsResident ? 0 : stage_.parity);
  }
  // Releases a stage of weights.
  DEVICE void release_weights(int entry) const {
    if (!T::kIsResident && lane_idx() == 0) mbarrier_arrive(shared_.empty_weights[entry]);
  }

  WarpgroupSharedMemory<T>& shared_;
  RingPosition<T::kWeightStages> stage_;

 private:
  using Schedule = WarpgroupSchedule<T>;

  // From the rows of a step to those of the next one, in units of 16 bytes.
  DEVICE static int row_step(const ProjectionParams& p) {
    if (p.num_taps > 1) return p.dilation * interleaved_frames(p.input.rows_per_frame);
    return T::kIsTiled ? T::kPlanes * T::kPlaneSize : kWarpgroupRows;
  }

  // Consumers with resident weights multiply in turns, so that one multiplies while others apply
  // their epilogues. The first turn is that of consumer 0.
  DEVICE void begin_turn() {
    if constexpr (!T::kIsResident) return;
    wait_for_completion(shared_.turns[consumer_], turn_parity_ ^ (consumer_ == 0));
    turn_parity_ ^= 1;
  }
  DEVICE void end_turn() const {
    if constexpr (!T::kIsResident) return;
    const int next = consumer_ + 1 == T::kWarpgroups ? 0 : consumer_ + 1;
    if (lane_idx() == 0) mbarrier_arrive(shared_.turns[next]);
  }

  // The sums of the next `num_steps` steps of K. The products of a stage begin while those of the
  // stage before run.
  DEVICE void multiply_split(int num_steps) {
    bool adds = false;
    int stage = -1, window = 0;  // of the stage that was read to its end, but not released
#pragma unroll 1
    while (num_steps > 0) {
      if (step_ == 0) begin_stage();
      const int count = min(num_steps, T::kStageSteps - step_);
      multiply_steps(count, adds);
      if (count == T::kStageSteps && stage >= 0) {
        warpgroup_wait<T::kStageSteps>();  // for the products before
        release(stage, window);
      }
      num_steps -= count, step_ += count, adds = true;
      if (step_ < T::kStageSteps) break;
      step_ = 0, stage = stage_.entry, window = window_.entry;
      stage_.advance(), window_.advance();
    }
    warpgroup_wait<0>();
    if (stage >= 0) release(stage, window);
  }

  // Waits for the next window.
  DEVICE void wait_for_window() const {
    wait_for_completion(shared_.full_windows[row_tile_][window_.entry], window_.parity);
  }
  // Releases a window.
  DEVICE void release_window(int entry) const {
    if (lane_idx() == 0) mbarrier_arrive(shared_.empty_windows[row_tile_][entry]);
  }

  // Waits for the next stage.
  DEVICE void begin_stage() {
    wait_for_weights();
    wait_for_window();
    fence_async_proxy();  // wgmma reads what cp.async has written
    weights_ = MatrixDescriptor(shared_.weights[column_tile_][stage_.entry * T::kStageSteps],
                                kWeightBytes / 2, kCoreBytes);
    rows_ = MatrixDescriptor(shared_.windows[row_tile_][window_.entry], kRowBytes / 2, kCoreBytes);
  }

  // Begins the products of the next `count` steps of the stage, a group for each step.
  DEVICE void multiply_steps(int count, bool adds) {
#pragma unroll 1
    for (int step = 0; step < count; ++step) {
      warpgroup_fence();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int plane = 0; plane < T::kPlanes; ++plane) {
          warpgroup_mma_f16(sums[plane], rows_ + (2 * plane + i) * kRowBytes,
                            weights_ + i * kWeightBytes, adds || i > 0);
        }
      }
      warpgroup_commit();
      adds = true;
      weights_ = weights_ + 2 * kWeightBytes, rows_ = rows_ + row_step_bytes_;
    }
  }

  // Releases what was read of a stage.
  DEVICE void release(int stage, int window) const {
    release_weights(stage);
    release_window(window);
  }

  static constexpr int kCoreBytes = 8 * 16;                   // of a core matrix
  static constexpr int kWeightBytes = T::kStepSize * 16 / 2;  // of an instruction
  static constexpr int kRowBytes = T::kPlaneSize * 16 / 2;

  const ProjectionParams& p_;
  const Schedule& schedule_;
  const int consumer_, column_tile_, row_tile_;
  const int row_step_bytes_;  // from the rows of a step to those of the next one
  RingPosition<T::kStages> window_;
  MatrixDescriptor weights_, rows_;  // of the next step
  int step_ = 0;                     // of the stage, the next one
  uint32_t turn_parity_ = 0;
};

// --- body ---

// The rows and columns of a lane in a tile: rows g and g + 8 of its warp's 16, and eight adjacent
// channels of every 32 columns.
template <class T>
struct LaneTile {
  int rows[2];    // of the call; those behind the last one are not stored
  int tiled_row;  // the place of the first one among tiled rows; the other is eight further on
  int column;     // the first one

  // Of window `window_idx` and columns from `first_column` on.
  DEVICE LaneTile(const ProjectionParams& p, int window_idx, int first_column)
      : column(first_column + 8 * (lane_idx() % 4)) {
    const typename WarpgroupSchedule<T>::Window window(p, window_idx);
    const int row = thread_idx() % kWarpgroupThreads / 32 * 16 + lane_idx() / 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) rows[r] = window.row(row + 8 * r);
    tiled_row = window_idx * kTileRows + row;
  }
};

// A lane's values of residual [rows, columns]: [rows, 32 columns, 2 times 4 channels]. They are
// loaded before the products, which hide the latency.
template <class T>
struct LaneResidual {
  float4 values[2][T::kColumns / 32][2];

  // Those of `lane`, if the layer has a residual.
  DEVICE void load(const ProjectionParams& p, const LaneTile<T>& lane) {
    if (p.residual == nullptr) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (lane.rows[r] >= p.num_rows) continue;
      const float* from =
          p.residual + static_cast<long long>(lane.rows[r]) * p.num_columns + lane.column;
#pragma unroll
      for (int i = 0; i < T::kColumns / 32; ++i) {
        values[r][i][0] = load_in_order(from + 32 * i);
        values[r][i][1] = load_in_order(from + 32 * i + 4);
      }
    }
  }
};

// A warp copies the parameters of its tile's columns.
template <class T>
DEVICE void begin_copy_of_params(const ProjectionParams& p,
                                 ColumnParams (&column_params)[T::kColumns], int first_column) {
  sync_warp();  // the lanes have read those of the previous tile
  for (int i = lane_idx(); i < T::kColumns; i += 32) {
    copy_async_16_bytes(reinterpret_cast<uint4*>(&column_params[i]),
                        &p.warpgroup_column_params[first_column + i]);
  }
}

// The activation function of a layer.
template <class T>
DEVICE float activate(const ProjectionParams& p, float v, const ColumnParams& column) {
  if (T::kIsSnake || p.epilogue == kSnake) return snake(v, column);
  return p.epilogue == kGelu ? gelu(v) : v;
}

// Applies the epilogue to the totals of a consumer. Adds the residual and writes residual_out
// [rows, columns]; writes output [rows * columns / channels, planes, channels], or tiled if it has
// as many rows. The columns of a tile belong to one output row.
template <class T>
DEVICE void finish_warpgroup_rows(const ProjectionParams& p, const float (&totals)[T::kColumns / 2],
                                  const LaneTile<T>& lane, const LaneResidual<T>& residual,
                                  const ColumnParams (&column_params)[T::kColumns],
                                  int first_column) {
  copy_async_wait_all();
  sync_warp();
  const int output_row = first_column / p.output.num_channels;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (lane.rows[r] >= p.num_rows) continue;
    const long long at = static_cast<long long>(lane.rows[r]) * p.num_columns;
    const int n = lane.column;
    const int plane_size = (p.output.num_planes - 1) * p.output.num_channels;
    f16* to = p.output.data + at * p.output.num_planes + output_row * plane_size + n;
#pragma unroll
    for (int column = 0; column < T::kColumns; column += 32) {
      float v[8], activated[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const ColumnParams& of_channel = column_params[column + 4 * i + lane_idx() % 4];
        const float total = totals[(column / 8 + i / 2) * 4 + 2 * r + i % 2];
        v[i] = fmaf(total, of_channel.scale, of_channel.bias);
        if (T::kReadsResidual && p.residual != nullptr) {
          const float4 four = residual.values[r][column / 32][i / 4];
          const float operands[4] = {four.x, four.y, four.z, four.w};
          v[i] += operands[i % 4];
        }
        activated[i] = activate<T>(p, v[i], of_channel);
      }
      if (p.residual_out != nullptr) {
        float4* sums = reinterpret_cast<float4*>(p.residual_out + at + n + column);
        sums[0] = {v[0], v[1], v[2], v[3]};
        sums[1] = {v[4], v[5], v[6], v[7]};
      }
      if (p.output.is_tiled) {
        store_eight_tiled_activations(p.output, lane.tiled_row + 8 * r, n + column, activated);
      } else {
        store_eight_activations(to + column, plane_size, activated);
      }
    }
  }
}

// The projection kernel of many rows on sm_90a. Reads input [rows, planes, channels], or tiled, and
// its history, residual [rows, columns], and warpgroup_weights [columns / kColumns, steps, 4,
// kColumns, 8]. Writes what `finish_warpgroup_rows` names.
template <class T>
DEVICE void project_with_warpgroups(const ProjectionParams& p,
                                    WarpgroupProjectionSharedMemory<T>& shared) {
  static_assert(sizeof(shared) <= kSharedMemoryBytes, "the tile exceeds the shared memory");
  trigger_dependent_grids();
  if (thread_idx() == 0) init_mbarriers<T>(shared);
  sync_all_threads();
  const WarpgroupSchedule<T> schedule(p);
  const int warpgroup = uniform_warp_idx() / 4;
  if (warpgroup >= T::kWarpgroups) {
    lower_register_limit<T::kCopyRegisters>();
    const int warp = uniform_warp_idx() - 4 * T::kWarpgroups, row_tile = warp / T::kCopyWarps;
    if (row_tile < T::kRowTiles) {
      wait_for_prerequisite_grids();
      copy_windows<T>(p, shared, schedule, row_tile, warp % T::kCopyWarps);
    } else {  // weights do not depend on the previous kernel
      if (warp == T::kRowTiles * T::kCopyWarps) copy_weights<T>(p, shared, schedule);
      wait_for_prerequisite_grids();
    }
  } else {
    raise_register_limit<T::kConsumerRegisters>();
    wait_for_prerequisite_grids();
    WarpgroupConsumer<T> consumer(p, shared, schedule, warpgroup);
#pragma unroll 1
    for (int round = 0; round <= schedule.num_full_rounds; ++round) {
      const Items items = schedule.items(round);
      if (warpgroup >= items.count) {
        if (items.count > 0) consumer.skip_round();
        break;
      }
      const int item = items.first + warpgroup, first_column = schedule.first_column(item);
      ColumnParams(&column_params)[T::kColumns] = shared.column_params[uniform_warp_idx()];
      begin_copy_of_params<T>(p, column_params, first_column);
      const LaneTile<T> lane(p, schedule.window_idx(item), first_column);
      LaneResidual<T> residual = {};
      if constexpr (T::kReadsResidual) residual.load(p, lane);
      consumer.multiply_item();
      finish_warpgroup_rows<T>(p, consumer.totals, lane, residual, column_params, first_column);
    }
  }
}

#endif  // MEGAKERNEL_HAS_WARPGROUP_INSTRUCTIONS

}  // namespace megakernel::codec
