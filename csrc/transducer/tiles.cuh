// Products of tiles of weights [16, K] with columns of activations, and their sums over the warps.
//
// Warp w multiplies the steps w, w + 8, ... of K (16 elements each). The order in which a sum is
// added up depends neither on the other columns nor on the number of thread blocks.
#pragma once

#include "../numbers.cuh"
#include "params.cuh"

namespace megakernel::transducer {

// --- sizes ---

constexpr int kNumSteps = kHidden / kStepK;
constexpr int kWarpSteps = (kNumSteps + kNumWarps - 1) / kNumWarps;
constexpr bool kAllWarpsHaveSteps = kNumSteps % kNumWarps == 0;
constexpr int kMaxPlanes = 8;  // products of a tile of weights with eight columns at a time
constexpr int kPlaneVectors = 32;
static_assert(kHidden % kStepK == 0, "the width must be a multiple of a step of K");

// A column of activations in shared memory, in words of 32 bits. The padding spreads the columns
// over the banks.
template <class Number>
constexpr int kColumnWords = kHidden * sizeof(Number) / 4 + 4;

// Columns of activations that shared memory has room for; a multiple of 16.
constexpr int kActivationBytes = kSmallSharedMemory ? 48 * 1024 : 168 * 1024;
template <class Number>
constexpr int kColumnCapacity =
    min_of(kActivationBytes / (4 * kColumnWords<Number>) / 16 * 16, kMaxColumns);

// --- products of a warp ---

// A lane's weights of a step, and its sums for eight columns. Lane 4 g + t ends with the rows g and
// g + 8 of the columns 2 t and 2 t + 1.
template <class Number>
struct Product;

// The matrix instruction.
template <>
struct Product<bf16> {
  using StepWeights = uint4;

  float sums[4] = {};

  // The lane's weights of a step, counted from the first tile on.
  DEVICE static StepWeights load(const void* weights, int64_t step) {
    return load_read_only(static_cast<const uint4*>(weights) + step * 32 + lane_idx());
  }
  // Adds the products with activations [8, kColumnWords] from element k on.
  DEVICE void multiply(const StepWeights& weights, const uint32_t* activations, int k) {
    const uint32_t* at = activations + lane_idx() / 4 * kColumnWords<bf16> + k / 2 + lane_idx() % 4;
    mma_m16n8k16(sums, weights, {at[0], at[4]});
  }
  // Rows g and g + 8 of the lane's two columns.
  DEVICE float4 total() const { return {sums[0], sums[1], sums[2], sums[3]}; }
};

// Lane 4 g + t multiplies the elements 4 t to 4 t + 3 of a step.
template <>
struct Product<float> {
  struct StepWeights {
    uint4 rows[2];  // g and g + 8
  };

  float sums[2][8] = {};

  // The lane's weights of a step, counted from the first tile on.
  DEVICE static StepWeights load(const void* weights, int64_t step) {
    const uint4* at = static_cast<const uint4*>(weights) + (step * 32 + lane_idx()) * 2;
    return {{load_read_only(at), load_read_only(at + 1)}};
  }
  // Adds the products with activations [8, kColumnWords] from element k on.
  DEVICE void multiply(const StepWeights& weights, const uint32_t* activations, int k) {
    float w[2][4];
    unpack(weights.rows[0], w[0]);
    unpack(weights.rows[1], w[1]);
#pragma unroll
    for (int column = 0; column < 8; ++column) {
      float x[4];
      unpack(*reinterpret_cast<const uint4*>(activations + column * kColumnWords<float> + k +
                                             lane_idx() % 4 * 4),
             x);
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        float& sum = sums[row][column];
#pragma unroll
        for (int i = 0; i < 4; ++i) sum = fmaf(w[row][i], x[i], sum);
      }
    }
  }
  // Rows g and g + 8 of the lane's two columns.
  DEVICE float4 total() const {
    float own[2][2] = {};
#pragma unroll
    for (int row = 0; row < 2; ++row) {
#pragma unroll
      for (int column = 0; column < 8; ++column) {
        float sum = sums[row][column];
        sum += shuffle_xor(sum, 1);
        sum += shuffle_xor(sum, 2);
        if (column / 2 == lane_idx() % 4) own[row][column % 2] = sum;
      }
    }
    return {own[0][0], own[0][1], own[1][0], own[1][1]};
  }
};

// --- planes ---

// Whether a step exists; no comparison where every warp has as many.
DEVICE bool is_step(int step) { return kAllWarpsHaveSteps || step < kNumSteps; }

// A plane is the product of a tile of weights with eight columns: a vector per lane.
using Plane = float4[kPlaneVectors];

// A warp's part of up to `NumTiles` tiles of weights, in registers. They are loaded before the
// activations are there, so that the two delays overlap.
template <class Number, int NumTiles>
class TileWeights {
 public:
  // Loads `num_tiles` tiles, `stride` tiles apart.
  DEVICE void load(const void* weights, int first_tile, int stride = 0, int num_tiles = 1) {
    num_tiles_ = num_tiles;
#pragma unroll
    for (int i = 0; i < NumTiles; ++i) {
      const int64_t tile = first_tile + (i < num_tiles ? i * stride : 0);
#pragma unroll
      for (int s = 0; s < kWarpSteps; ++s) {
        const int step = warp_idx() + s * kNumWarps;
        if (!is_step(step)) break;
        steps_[i][s] = Product<Number>::load(weights, tile * kNumSteps + step);
      }
    }
  }

  // Multiplies with tiles of eight columns of activations. Writes the warp's sums of tile i and
  // column tile j to planes[warp, first_plane + i num_column_tiles + j].
  DEVICE void multiply(const uint32_t* activations, int num_column_tiles,
                       Plane (*planes)[kMaxPlanes], int first_plane) const {
    const int warp = uniform_warp_idx();
    for (int j = 0; j < num_column_tiles; ++j) {
      const uint32_t* columns = activations + 8 * j * kColumnWords<Number>;
#pragma unroll
      for (int i = 0; i < NumTiles; ++i) {
        if (i >= num_tiles_) break;
        Product<Number> product;
#pragma unroll
        for (int s = 0; s < kWarpSteps; ++s) {
          const int step = warp + s * kNumWarps;
          if (is_step(step)) product.multiply(steps_[i][s], columns, step * kStepK);
        }
        planes[warp][first_plane + i * num_column_tiles + j][lane_idx()] = product.total();
      }
    }
  }

 private:
  typename Product<Number>::StepWeights steps_[NumTiles][kWarpSteps];
  int num_tiles_;
};

// Adds up the planes of all warps into those of warp 0.
DEVICE void add_up_planes(Plane (*planes)[kMaxPlanes], int num_planes) {
  for (int i = thread_idx(); i < num_planes * kPlaneVectors; i += kNumThreads) {
    const int plane = i / kPlaneVectors, lane = i % kPlaneVectors;
    float4 sum = planes[0][plane][lane];
#pragma unroll
    for (int w = 1; w < kNumWarps; ++w) {
      const float4 v = planes[w][plane][lane];
      sum = {sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w};
    }
    planes[0][plane][lane] = sum;
  }
}

// The element of a row and a column of a plane.
DEVICE float plane_element(const Plane& plane, int row, int column) {
  const float4& v = plane[row % 8 * 4 + column / 2];
  return reinterpret_cast<const float*>(&v)[row / 8 * 2 + column % 2];
}

}  // namespace megakernel::transducer
