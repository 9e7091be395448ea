// A linear layer for few rows, with what precedes and follows it.
//
//   h = input, or norm(input) or norm(norm_out(input));  y = W h + bias
//   output = y, or silu(y), or residual + scale * y
//
// The weights are the time of such a layer. A warp prefetches its weights into L2 before it waits
// for the kernel before, then all of them are loaded together. cuBLAS multiplies more rows.
#pragma once

#include "row_norm.cuh"

namespace megakernel::conformer {

// What a layer does besides the product: its input, then its output.
enum class Layer {
  kUp,        // norms, SiLU
  kProject,   // norms
  kResidual,  // adds to the residual
};

// --- static asserts ---

static_assert(kMaxFewRows <= kBlockThreads / 32, "a warp normalises a row");

// --- shared memory ---

// The normalised rows, [kMaxFewRows, kHidden] of the kernel's numbers.

// --- warp roles ---

// A warp has kWarpColumns outputs of all rows; a lane has every 32nd vector of K. Before that, warp
// r normalises row r. After it, a lane has an output of a row.

// --- body ---

// A linear layer with kInputs inputs and kOutputs outputs, for up to kRows rows.
template <class Number, Layer kLayer, int kInputs, int kOutputs, int kRows>
class Projection {
 public:
  static constexpr int kSize = kVectorSize<Number>;
  static constexpr int kNumVectors = kInputs / kSize;
  static constexpr int kLaneVectors = (kNumVectors + 31) / 32;
  static constexpr int kWarpColumns = (kOutputs + kFewRowWarps - 1) / kFewRowWarps;
  static_assert(kInputs % kSize == 0, "a row has whole vectors");
  static_assert(kWarpColumns * kRows <= 32, "a lane has an output of a row");

  // The layer, for the outputs of this warp.
  DEVICE explicit Projection(const ProjectParams& p)
      : p_(p), first_column_((block_idx() * (kBlockThreads / 32) + warp_idx()) * kWarpColumns) {}

  // Called by all threads; `normed` is [kRows, kHidden] in shared memory.
  DEVICE void run(Number* normed) {
    trigger_dependent_grids();
    prefetch_weights();
    wait_for_prerequisite_grids();
    load_weights();
    const Number* rows = static_cast<const Number*>(p_.input);
    if constexpr (kLayer != Layer::kResidual) {
      normalise_rows(normed);
      sync_all_threads();
      rows = normed;
    }
    multiply(rows);
  }

 private:
  // The compiler would move loads behind the wait.
  DEVICE void prefetch_weights() const {
    constexpr int kLineBytes = 128, kColumnBytes = kInputs * sizeof(Number);
    const int num_bytes = min(kWarpColumns, kOutputs - first_column_) * kColumnBytes;
    const char* const first =
        static_cast<const char*>(p_.weights) + static_cast<int64_t>(first_column_) * kColumnBytes;
    for (int i = lane_idx() * kLineBytes; i < num_bytes; i += 32 * kLineBytes) {
      prefetch_l2(first + i);
    }
  }

  // The warp's weights; the columns behind the last one repeat it.
  DEVICE void load_weights() {
#pragma unroll
    for (int column = 0; column < kWarpColumns; ++column) {
      const uint4* const row =
          static_cast<const uint4*>(p_.weights) +
          static_cast<int64_t>(min(first_column_ + column, kOutputs - 1)) * kNumVectors;
#pragma unroll
      for (int i = 0; i < kLaneVectors; ++i) {
        weights_[column][i] = load_read_only(row + min(lane_idx() + 32 * i, kNumVectors - 1));
      }
    }
  }

  // The rows of the input after one or two norms; thread block 0 stores what the first one returns.
  DEVICE void normalise_rows(Number* normed) {
    if (warp_idx() >= p_.num_rows) return;
    RowPart<Number, 32> row(static_cast<const Number*>(p_.input) + warp_idx() * kHidden,
                            lane_idx());
    if (p_.norm_out.weight) {
      row.normalise_row(p_.norm_out, WarpSum());
      if (block_idx() == 0) row.store(static_cast<Number*>(p_.normed_out) + warp_idx() * kHidden);
    }
    row.normalise_row(p_.norm, WarpSum());
    row.store(normed + warp_idx() * kHidden);
  }

  // Multiplies rows [num_rows, kInputs], and writes the output.
  DEVICE void multiply(const Number* rows) {
    float sums[kWarpColumns][kRows] = {};
#pragma unroll
    for (int i = 0; i < kLaneVectors; ++i) {
      const int vector = lane_idx() + 32 * i;
      if (vector >= kNumVectors) break;
      float weights[kWarpColumns][kSize];
#pragma unroll
      for (int column = 0; column < kWarpColumns; ++column) {
        unpack(weights_[column][i], weights[column]);
      }
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        if (row >= p_.num_rows) break;
        float values[kSize];
        unpack(reinterpret_cast<const uint4*>(rows + row * kInputs)[vector], values);
#pragma unroll
        for (int column = 0; column < kWarpColumns; ++column) {
#pragma unroll
          for (int c = 0; c < kSize; ++c) sums[column][row] += weights[column][c] * values[c];
        }
      }
    }
    float sum = 0;
#pragma unroll
    for (int column = 0; column < kWarpColumns; ++column) {
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        const float total = warp_sum(sums[column][row]);
        if (lane_idx() == column * kRows + row) sum = total;
      }
    }
    const int column = first_column_ + lane_idx() / kRows, row = lane_idx() % kRows;
    if (lane_idx() < kWarpColumns * kRows && column < kOutputs && row < p_.num_rows) {
      store(row, column, sum);
    }
  }

  // Writes an output: `sum` with bias, activation or residual.
  DEVICE void store(int row, int column, float sum) {
    const int at = row * kOutputs + column;
    float y = round_to<Number>(sum);
    if (p_.bias) y = round_to<Number>(y + read_number<Number>(p_.bias, column));
    if constexpr (kLayer == Layer::kUp) y = silu(y);
    if constexpr (kLayer == Layer::kResidual) {
      y = read_number<Number>(p_.residual, at) + round_to<Number>(p_.scale * y);
    }
    static_cast<Number*>(p_.output)[at] = to_number<Number>(y);
  }

  const ProjectParams& p_;
  const int first_column_;
  uint4 weights_[kWarpColumns][kLaneVectors];
};

// The kernel. Reads input [num_rows, kInputs] and weights [kOutputs, kInputs]; writes output
// [num_rows, kOutputs].
template <class Number, Layer kLayer, int kInputs, int kOutputs, int kRows>
DEVICE void project(const ProjectParams& p, Number* normed) {
  Projection<Number, kLayer, kInputs, kOutputs, kRows>(p).run(normed);
}

}  // namespace megakernel::conformer
