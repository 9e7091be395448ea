// Matrix times activations: the one operation that the weights stream through.
//
// A matrix [rows, K] lies in fragment order: tile after tile of 16 x 16, row of tiles after row of
// tiles; of each tile, the sixteen bytes that a lane needs stand together. Activations [K, columns]
// lie in shared memory in the order of the other operand. Eight columns cost what one costs.
//
// A unit of work is sixteen rows and one split of K. The block's warps share its tiles of K in
// turn; their sums are added in the order of the warps: the same bits for any number of columns
// and blocks.
#pragma once

#include "../memory.cuh"
#include "../params.cuh"

namespace megakernel {

constexpr int kTile = 16;
constexpr int kAhead = 8;  // tiles that a warp has under way

// Activations as the matrix instruction takes them: for each tile of K two registers a lane.
template <int K>
struct Activations {
  uint32_t registers[K / kTile * 64];

  // Activation k and k + 1 (k even) of a column.
  DEVICE void put(int column, int k, float first, float second) {
    const int within = k % kTile;
    const int lane = 4 * column + within % 8 / 2;
    registers[(k / kTile * 32 + lane) * 2 + within / 8] = pack(first, second);
  }

  DEVICE uint2 tile(int k) const {
    const uint32_t* at = registers + (k * 32 + thread() % 32) * 2;
    return {at[0], at[1]};
  }
};

// The sums of a unit, a warp's beside the others'.
struct Sums {
  float of[2][kWarps][kTile][kColumns];
};

template <int Rows, int K>
class Product {
 public:
  // Asks for the first tiles at once: they depend on nothing that a barrier waits for.
  DEVICE Product(const uint4* weights, int splits)
      : weights_(weights), splits_(splits), unit_(block()) {
    const Stretch first = stretch(unit_, 0);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) fetch(first, i);
  }

  // For each unit of this block: `fill(begin, end)` puts the activations of K's stretch into
  // place, from 0 on; `take(tile, split, sum)` gets what `sum(row, column)` adds up.
  template <int Capacity, class Fill, class Take>
  DEVICE void run(const Activations<Capacity>& activations, Sums& sums, Fill fill, Take take) {
    int filled = -1;
#pragma unroll 1
    for (int turn = 0; unit_ < units(); ++turn) {
      const int split = unit_ / kTiles, tile = unit_ % kTiles;
      if (split != filled) {
        block_sync();
        fill(begin(split) * kTile, end(split) * kTile);
        block_sync();
        filled = split;
      }
      float acc[4] = {};
      const int next_unit = unit_ + blocks();
      const int count = end(split) - begin(split);
#pragma unroll 1
      for (int first = 0; first < count; first += kAhead * kWarps) {
        const bool last = first + kAhead * kWarps >= count;
        const Stretch next = last ? stretch(next_unit, 0) : stretch(unit_, first + kAhead * kWarps);
        const int left = count - first - thread() / 32;
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          const int k = first + i * kWarps + thread() / 32;
          if (i * kWarps < left) multiply(acc, ahead_[i], activations.tile(k));
          fetch(next, i);
        }
      }
      auto& mine = sums.of[turn % 2][thread() / 32];
      const int row = thread() % 32 / 4, column = thread() % 4 * 2;
      mine[row][column] = acc[0];
      mine[row][column + 1] = acc[1];
      mine[row + 8][column] = acc[2];
      mine[row + 8][column + 1] = acc[3];
      block_sync();
      take(tile, split, [&](int r, int c) {
        float total = 0;
        for (int w = 0; w < kWarps; ++w) total += sums.of[turn % 2][w][r][c];
        return total;
      });
      unit_ = next_unit;
    }
    block_sync();
  }

 private:
  static constexpr int kTiles = Rows / kTile;
  static constexpr int kLength = K / kTile;

  DEVICE int units() const { return kTiles * splits_; }
  DEVICE int begin(int split) const { return kLength * split / splits_; }
  DEVICE int end(int split) const { return kLength * (split + 1) / splits_; }

  // What a warp reads next: tiles a warp's turn apart, and how many tiles are left to all warps.
  struct Stretch {
    const uint4* at;
    int left;
  };

  DEVICE Stretch stretch(int unit, int first) const {
    if (unit >= units()) return {weights_, 0};
    const int split = unit / kTiles, tile = unit % kTiles, warp = thread() / 32;
    const int k = begin(split) + first + warp;
    return {weights_ + (static_cast<size_t>(tile) * kLength + k) * 32 + thread() % 32,
            end(split) - k};
  }

  DEVICE void fetch(const Stretch& s, int i) {
    if (i * kWarps < s.left) ahead_[i] = load_weights(s.at + i * kWarps * 32);
  }

  const uint4* weights_;
  int splits_, unit_;
  uint4 ahead_[kAhead];
};

}  // namespace megakernel
