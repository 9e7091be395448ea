// The thread blocks of warpgroup_rows.cuh: sizes, shared memory, warp roles, and their tiles.
#pragma once

#include "../warpgroup.cuh"
#include "epilogue.cuh"
#include "row_window.cuh"

namespace megakernel::codec {

constexpr int kWarpgroupThreads = 128;
constexpr int kWarpgroupRows = 64;  // of an instruction
static_assert(kWarpgroupRows == kTileRows, "tiled rows are operands");

// The rows of the consumers of a block.
enum class BlockRows {
  kSeparate,  // other rows and the same columns for each
  kShared     // the same rows and other columns
};

// The sizes of a block. Each of the `Warpgroups` consumers computes kWarpgroupRows rows and
// `Columns` columns. K is copied in stages of `StageSteps` steps: all taps of a step of channels,
// or for one tap as many steps of channels. A tile of rows has `Stages` windows of at most
// `WindowRows` rows, of all steps of a stage. If the input `IsTiled`, windows of a layer of one tap
// have kTileRows rows of each step; those of more rows are of convolutions of two taps.
// `WeightSteps` steps of weights fit into shared memory, with `IsResident` all of a layer.
template <int Columns, int Warpgroups, int Planes, int StageSteps, int Stages, int WindowRows,
          BlockRows Rows, bool IsTiled = false, int WeightSteps = Stages * StageSteps,
          bool IsResident = false>
struct WarpgroupTile {
  static_assert(Columns % 32 == 0, "a lane stores eight channels of every 32");
  static_assert(Warpgroups >= 1 && Warpgroups <= 3, "registers suffice for three");
  static_assert(Planes == 1 || Planes == 2, "activations have one or two planes");
  static_assert(Warpgroups < 3 || Rows == BlockRows::kSeparate, "see WarpgroupSchedule::items");
  static constexpr bool kIsTiled = IsTiled, kMayBeTiled = false;
  static constexpr int kHaloRows = IsTiled ? WindowRows - kTileRows : 0;  // of tiled rows, at most
  static constexpr bool kCopiesStages = IsTiled && kHaloRows == 0;        // at once
  static_assert(kCopiesStages || WindowRows % 8 == 2,
                "four rows are copied without bank conflicts");
  static constexpr int kColumns = Columns, kWarpgroups = Warpgroups, kPlanes = Planes;
  static constexpr bool kSharesRows = Rows != BlockRows::kSeparate;
  static constexpr int kRowTiles = kSharesRows ? 1 : Warpgroups;  // of a block
  static constexpr int kColumnTiles = kSharesRows ? Warpgroups : 1;
  static constexpr int kStageSteps = StageSteps, kStages = Stages, kWindowRows = WindowRows;
  static constexpr int kWeightSteps = WeightSteps;
  static constexpr int kWeightStages = (WeightSteps + StageSteps - 1) / StageSteps;
  static constexpr bool kIsResident = IsResident;
  // Registers do not suffice for a residual beside the sums of more columns or planes. No
  // convolution of two taps that reads tiled rows has one.
  static constexpr bool kReadsResidual = Columns * (1 + Planes) <= 192 && kHaloRows == 0;
  static constexpr bool kIsSnake = !kCopiesStages;  // else also kLinear or kGelu
  static constexpr int kCopyWarps =                 // of a tile of rows
      Warpgroups == 3 || kCopiesStages ? 1 : (IsTiled ? 3 : 7) / kRowTiles;
  static constexpr int kCopyWarpgroups = (kRowTiles * kCopyWarps + 1 + 3) / 4;
  static constexpr int kThreads = kWarpgroupThreads * (Warpgroups + kCopyWarpgroups);
  static constexpr int kStepSize = Columns * kStepChannels / 8;  // weights, in 16 bytes
  static constexpr int kPlaneSize = 4 * WindowRows;              // of a window, in 16 bytes
  static constexpr int kWindowSize = Planes * kPlaneSize * (kCopiesStages ? StageSteps : 1);
  // Of a thread.
  static constexpr int kConsumerRegisters = Warpgroups == 1 ? 240 : Warpgroups == 2 ? 216 : 152;
  static constexpr int kCopyRegisters = Warpgroups < 3 ? 40 : 56;
  static_assert(kWarpgroupThreads *
                        (Warpgroups * kConsumerRegisters + kCopyWarpgroups * kCopyRegisters) <=
                    65536,
                "a multiprocessor has 65,536 registers");
};

// For each tile of columns a ring of stages of weights, [steps, instructions of a step, halves of
// K, columns, 8 channels]; for each tile of rows a ring of windows (InterleavedWindow), [stages,
// planes, instructions, halves of K, rows, 8 channels], and the address of each row of a window. A
// window of tiled rows of one tap is [steps, planes, instructions, halves of K, rows, 8 channels].
// A mbarrier `full` completes when a stage has been copied, `empty` when it has been released,
// `turns[c]` when the consumer before c has multiplied an item.
template <class T>
struct alignas(16) WarpgroupSharedMemory {
  uint4 weights[T::kColumnTiles][T::kWeightSteps][T::kStepSize];
  uint4 windows[T::kRowTiles][T::kStages][T::kWindowSize];
  const f16* sources[T::kRowTiles][T::kWindowRows];
  Mbarrier full_weights[T::kWeightStages], empty_weights[T::kWeightStages];
  Mbarrier full_windows[T::kRowTiles][T::kStages], empty_windows[T::kRowTiles][T::kStages];
  Mbarrier turns[T::kWarpgroups];
};

#ifdef MEGAKERNEL_HAS_WARPGROUP_INSTRUCTIONS

// The first warpgroups are consumers: each has a tile of rows, or a tile of columns of the same
// rows. Of the other warps, the first kCopyWarps copy the windows of the first tile of rows, the
// next ones those of the second one, and so on; the one behind them copies weights.

// Adjacent items of a launch. An item is kWarpgroupRows rows and kColumns columns, for one
// consumer.
struct Items {
  int first, count;
};

// The items of a launch. In a round, a block has one for each consumer, with the same rows or
// columns. In the last round it has fewer if the rest suffices for fewer. Blocks with resident
// weights keep their tile of columns, and share its items with the blocks that have the same one;
// their number is a multiple of the tiles of columns.
template <class T>
struct WarpgroupSchedule {
  using Window = InterleavedWindow<T::kPlanes>;

  int num_steps, first_column_tile;
  int column_tiles, num_sharing_blocks, idx_of_block;  // of the items that blocks share
  int num_items, num_full_rounds;
  bool is_reversed;

  // Of the launch. If `is_reversed`, the last rows come first; there is one tile of columns then.
  DEVICE explicit WarpgroupSchedule(const ProjectionParams& p, bool is_reversed = false)
      : num_steps(p.num_taps * p.input.num_channels / kStepChannels), is_reversed(is_reversed) {
    const int tiles = p.num_columns / (T::kColumns * T::kColumnTiles);
    column_tiles = T::kIsResident ? 1 : tiles;
    first_column_tile = T::kIsResident ? block_idx() % tiles : 0;
    num_sharing_blocks = T::kIsResident ? num_blocks() / tiles : num_blocks();
    idx_of_block = T::kIsResident ? block_idx() / tiles : block_idx();
    num_items = num_windows(p, column_tiles) * column_tiles * T::kColumnTiles;
    num_full_rounds = num_items / (num_sharing_blocks * T::kWarpgroups);
  }

  // The windows of a launch. With several tiles of columns they are filled up to whole tiles.
  DEVICE static int num_windows(const ProjectionParams& p, int column_tiles) {
    const int count = Window::num_windows(p);
    if (column_tiles == 1) return count;
    return (count + T::kRowTiles - 1) / T::kRowTiles * T::kRowTiles;
  }
  // The items of the block in round `round`, up to num_full_rounds. Two items of three consumers
  // would have different columns if there were several tiles of columns.
  DEVICE Items items(int round) const {
    const int begin = round * num_sharing_blocks * T::kWarpgroups;
    int count = T::kWarpgroups;
    if (round == num_full_rounds) {
      count = 0;
#pragma unroll
      for (int i = 0; i < T::kWarpgroups; ++i) count += num_items - begin > i * num_sharing_blocks;
    }
    const int first = begin + idx_of_block * count;
    return {first, max(min(num_items - first, count), 0)};
  }
  // The first column of an item, and the window of its rows.
  DEVICE int first_column(int item) const {
    const int column_tile = first_column_tile + item / T::kWarpgroups % column_tiles;
    return (column_tile * T::kColumnTiles + item % T::kColumnTiles) * T::kColumns;
  }
  DEVICE int window_idx(int item) const {
    if (is_reversed) item = num_items - 1 - item;
    return item / (T::kWarpgroups * column_tiles) * T::kRowTiles + item % T::kRowTiles;
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
};

// Called by one thread, before a block barrier.
template <class T>
DEVICE void init_mbarriers(WarpgroupSharedMemory<T>& shared) {
  for (int i = 0; i < T::kWeightStages; ++i) {
    mbarrier_init(shared.full_weights[i], 1 + 31 * T::kColumnTiles);  // see mbarrier_expect_copy
    mbarrier_init(shared.empty_weights[i], 4 * T::kWarpgroups);
  }
  for (int row_tile = 0; row_tile < T::kRowTiles; ++row_tile) {
    for (int i = 0; i < T::kStages; ++i) {
      constexpr bool kCopiesInBulk = T::kHaloRows > 0 || T::kMayBeTiled;  // beside other copies
      mbarrier_init(shared.full_windows[row_tile][i], 32 * T::kCopyWarps + kCopiesInBulk);
      mbarrier_init(shared.empty_windows[row_tile][i], 4 * T::kColumnTiles);
    }
  }
  for (int i = 0; i < T::kWarpgroups; ++i) mbarrier_init(shared.turns[i], 4);
  mbarrier_fence_init();
}

// Waits until the completion of this parity. All lanes of a warp call it.
DEVICE void wait_for_completion(const Mbarrier& barrier, uint32_t parity) {
  while (!mbarrier_try_wait(barrier, parity)) spin_pause();
  sync_warp();
}

#endif  // MEGAKERNEL_HAS_WARPGROUP_INSTRUCTIONS

}  // namespace megakernel::codec
