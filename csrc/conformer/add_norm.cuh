// The residual of a module and the norms that follow it. One thread block per row.
#pragma once

#include "row_norm.cuh"

namespace megakernel::conformer {

// --- static asserts ---

static_assert(kBlockThreads % 32 == 0, "a block sum adds whole warps");
static_assert(kHidden % 8 == 0, "a row has whole vectors");

// --- shared memory ---

// RowSums (row_norm.cuh), one for each norm.
struct AddNormSharedMemory {
  RowSums out, next;
};

// --- warp roles ---

// All warps do the same. A thread has every kBlockThreads-th vector of a row.

// --- body ---

// The numbers of a row that a thread holds, as vectors of sixteen bytes.
template <class Number>
class RowVectors {
 public:
  static constexpr int kSize = kVectorSize<Number>;
  static constexpr int kNumVectors = kHidden / kSize;
  static constexpr int kThreadVectors = (kNumVectors + kBlockThreads - 1) / kBlockThreads;

  // Reads a row [kHidden].
  DEVICE explicit RowVectors(const void* row) {
    for_each_vector(
        [&](int i, int vector) { unpack(static_cast<const uint4*>(row)[vector], values_[i]); });
  }
  // Adds scale * y, y [kHidden], rounded as torch rounds.
  DEVICE void add(const void* y, float scale) {
    for_each_vector([&](int i, int vector) {
      float added[kSize];
      unpack(static_cast<const uint4*>(y)[vector], added);
#pragma unroll
      for (int c = 0; c < kSize; ++c) {
        values_[i][c] = round_to<Number>(values_[i][c] + round_to<Number>(scale * added[c]));
      }
    });
  }
  // Replaces the row by its layer normalisation.
  DEVICE void normalise_row(const Norm& norm, RowSums& sums) {
    const Moments moments = row_moments(sums, [&](auto act) {
      for_each_vector([&](int i, int) {
#pragma unroll
        for (int c = 0; c < kSize; ++c) act(values_[i][c]);
      });
    });
    for_each_vector([&](int i, int vector) {
      float weight[kSize], bias[kSize];
      unpack(static_cast<const uint4*>(norm.weight)[vector], weight);
      unpack(static_cast<const uint4*>(norm.bias)[vector], bias);
#pragma unroll
      for (int c = 0; c < kSize; ++c) {
        values_[i][c] = round_to<Number>(normalise(values_[i][c], moments, weight[c], bias[c]));
      }
    });
  }
  // Writes the row [kHidden].
  DEVICE void store(void* row) {
    for_each_vector(
        [&](int i, int vector) { static_cast<uint4*>(row)[vector] = pack(values_[i]); });
  }

 private:
  // Calls act(i, vector): the thread's i-th vector is `vector` of the row.
  template <class Act>
  DEVICE void for_each_vector(Act act) {
#pragma unroll
    for (int i = 0; i < kThreadVectors; ++i) {
      const int vector = thread_idx() + i * kBlockThreads;
      if (vector < kNumVectors) act(i, vector);
    }
  }

  float values_[kThreadVectors][kSize];
};

// The kernel. Reads x, y [rows, kHidden]; writes x if it changes, and h [rows, kHidden].
template <class Number>
DEVICE void add_norm(const AddNormParams& p, AddNormSharedMemory& shared) {
  trigger_dependent_grids();
  wait_for_prerequisite_grids();
  const int64_t offset = static_cast<int64_t>(block_idx()) * kHidden * sizeof(Number);
  char* const x = static_cast<char*>(p.x) + offset;
  RowVectors<Number> row(x);
  if (p.y) row.add(static_cast<const char*>(p.y) + offset, p.scale);
  if (p.norm_out.weight) row.normalise_row(p.norm_out, shared.out);
  if (p.y || p.norm_out.weight) row.store(x);
  if (!p.norm_next.weight) return;
  row.normalise_row(p.norm_next, shared.next);
  row.store(static_cast<char*>(p.h) + offset);
}

}  // namespace megakernel::conformer
