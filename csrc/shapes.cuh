// The compile-time shapes: those of the thread block, of the matrix instruction, and of the model.
#pragma once

namespace megakernel {

#ifndef MEGAKERNEL_SHARED_KB
#define MEGAKERNEL_SHARED_KB 227  // shared memory of a thread block on the architecture, in KiB
#endif

constexpr int kSharedMemoryBytes = MEGAKERNEL_SHARED_KB * 1024;
constexpr bool kSmallSharedMemory = MEGAKERNEL_SHARED_KB < 200;  // halves the number of columns

// --- the thread block ---

constexpr int kNumWarps = 8;  // compute warps; one more warp copies weights
constexpr int kNumThreads = 32 * kNumWarps;
#ifdef MEGAKERNEL_MOVES_REGISTERS  // setmaxnreg applies to groups of four warps
constexpr int kNumLaunchedThreads = kNumThreads + 128;
constexpr bool kManyRegisters = true;  // 232 for each compute thread
#else
constexpr int kNumLaunchedThreads = kNumThreads + 32;
constexpr bool kManyRegisters = false;  // 168 for each thread
#endif
constexpr int kMaxLoadsInFlight = 16;  // 16-byte loads of exchanged values per lane

// --- columns ---

#ifdef MEGAKERNEL_PRECISE
constexpr int kNumSplits = 2;  // an activation is the sum of two bf16 values (hi and lo)
#else
constexpr int kNumSplits = 1;
#endif
// Streams of the wide kernel, if the program has one; it has no other kernel then.
#ifdef MEGAKERNEL_WIDE_STREAMS
constexpr int kWideStreams = MEGAKERNEL_WIDE_STREAMS;
#else
constexpr int kWideStreams = 0;
#endif
constexpr bool kIsWide = kWideStreams > 0;
static_assert(!kIsWide || kNumSplits == 1, "the precise build has no wide kernel");
// Streams of one launch. Each occupies one column of the matrix instruction per split.
constexpr int kMaxStreams = kIsWide ? kWideStreams : (kSmallSharedMemory ? 4 : 8) / kNumSplits;
constexpr int kMaxPrefillColumns = kIsWide ? 0 : kSmallSharedMemory ? kMaxStreams : 2 * kMaxStreams;
// Positions of a prompt tile at most, which are columns of one batch: `kMaxPrefillColumns` of
// the program of the kernels for few streams.
constexpr int kPromptTileSize = (kSmallSharedMemory ? 4 : 16) / kNumSplits;
static_assert(kIsWide || kMaxPrefillColumns == kPromptTileSize, "a prompt tile fills a batch");
// Columns of the wide prefill kernel; the partial sums of 8 and 16 columns have no room for
// its attention.
constexpr int kWidePrefillColumns = kWideStreams >= 32 ? kWideStreams : 0;
constexpr int kWideBatchColumns = 64;  // columns of a WidePrefillBatch, used or not
static_assert(kWidePrefillColumns <= kWideBatchColumns, "a WidePrefillBatch holds every column");
constexpr int kBatchColumns = 16;    // columns of a PrefillBatch, used or not
constexpr int kArgumentStreams = 8;  // streams that the arguments of a launch hold
// Columns for which an exchange buffer of streams has room.
constexpr int kBufferColumns = kIsWide ? kWideStreams : kArgumentStreams;
static_assert(kMaxStreams <= kBufferColumns, "exchange buffers hold one column per stream");
static_assert(kMaxPrefillColumns <= kBatchColumns, "a PrefillBatch holds every column");

// Columns that a kernel compiled for `MaxColumns` streams processes at once. With one stream the
// predictor's first pass has two positions; prefill batches of the same kernel have two as well.
template <int MaxColumns>
constexpr int kColumnCapacity = MaxColumns == 1 ? 2 : MaxColumns;

// Positions of a slot in a pass: a generation kernel's columns have a slot each.
template <int MaxColumns>
constexpr int kNewPositions = kIsWide ? 1 : kColumnCapacity<MaxColumns>;

constexpr int min_of(int a, int b) { return a < b ? a : b; }
constexpr int max_of(int a, int b) { return a > b ? a : b; }
constexpr int min_of(int a, int b, int c) { return min_of(min_of(a, b), c); }

// Columns that a lane loads together, with `Loads` 16-byte loads each.
template <int MaxColumns, int Loads>
constexpr int kColumnsPerLoad = min_of(MaxColumns, kMaxLoadsInFlight / Loads);

// --- matrices ---

constexpr int kRowGroupSize = 8;            // rows of a row group: the matrix instruction's unit
constexpr int kTileK = 32;                  // K elements of a K tile: of a warp, per step
constexpr int kStepK = kTileK * kNumWarps;  // K elements that the thread block multiplies per step
constexpr int kMaxRowGroups = kSmallSharedMemory ? 3 : 6;  // row groups with partial sums at a time
// Row groups of the residual that a thread block owns.
constexpr int kMaxResidualRowGroups = kIsWide ? 4 : 32;

// Steps whose activations fit into shared memory at a time.
template <int MaxColumns>
constexpr int kMaxChunkSteps = MaxColumns > kMaxStreams ? 8 : 12;

// The steps of a chunk: `num_steps` if they fit into `max_steps`, otherwise the largest divisor of
// `num_steps` that is a multiple of four and fits.
constexpr int largest_chunk(int num_steps, int max_steps) {
  if (num_steps <= max_steps) return num_steps;
  int chunk = max_steps - max_steps % 4;
  while (num_steps % chunk != 0) chunk -= 4;
  return chunk;
}

// A matrix [Rows, K], divided into row groups and into steps of K.
template <int Rows, int K>
struct Matrix {
  static constexpr int rows = Rows;
  static constexpr int k = K;
  static constexpr int num_row_groups = Rows / kRowGroupSize;
  static constexpr int num_steps = (K + kStepK - 1) / kStepK;
  // Activations are loaded in chunks of steps.
  template <int MaxColumns>
  static constexpr int chunk_steps = largest_chunk(num_steps, kMaxChunkSteps<MaxColumns>);
  template <int MaxColumns>
  static constexpr int num_chunks = num_steps / chunk_steps<MaxColumns>;
  static_assert(Rows % kRowGroupSize == 0, "the rows must be a multiple of a row group's 8");
  static_assert(K % kTileK == 0, "the width must be a multiple of a K tile of 32");
};

// --- attention ---

constexpr int kHeadDim = 128;                       // in every network of the family
constexpr int kKvTileSize = 16;                     // positions of a KV tile
constexpr int kSpanSize = kKvTileSize * kNumWarps;  // positions of an attention item, a tile a warp
constexpr int kMaxSpans = 16;                       // a slot has at most 2048 positions
constexpr int kPageSize = 128;                      // positions of a page of the talker's KV cache
constexpr int kMaxPages = kMaxSpans * kSpanSize / kPageSize;  // of a slot
constexpr int kMaxCapturedHeads = 8;                          // heads whose scores can be captured
constexpr int kKvWidth = kNumSplits * kHeadDim;               // bf16 values of a key or a value
static_assert(kPageSize == kSpanSize, "an attention item reads one page");

// --- models ---

constexpr int kNumCodeGroups = 16;    // codes of a frame
constexpr int kNumControlIds = 1024;  // ids of code 0 beyond the codes

// One decoder stack. With `ShortContext` it attends to at most kKvTileSize positions.
template <int Hidden, int Heads, int KvHeads, int Intermediate, bool ShortContext = false>
struct Stack {
  static constexpr bool short_context = ShortContext;
  static constexpr int hidden_size = Hidden;
  static constexpr int num_heads = Heads;
  static constexpr int num_kv_heads = KvHeads;
  static constexpr int intermediate_size = Intermediate;
  static constexpr int query_size = Heads * kHeadDim;
  static constexpr int kv_size = KvHeads * kHeadDim;
  using Qkv = Matrix<query_size + 2 * kv_size, Hidden>;
  using Out = Matrix<Hidden, query_size>;
  using GateUp = Matrix<2 * Intermediate, Hidden>;
  using Down = Matrix<Hidden, Intermediate>;
  // Every thread block must have row groups of these two: see exchange.cuh.
  static constexpr int max_blocks = min_of(Qkv::num_row_groups, GateUp::num_row_groups);
  static_assert(Heads == 2 * KvHeads, "an attention item serves two query heads of one KV head");
};

// A talker and its code predictor, with `NumCodes` codes in every codebook.
template <class TalkerStack, class PredictorStack, int NumCodes>
struct Model {
  using Talker = TalkerStack;
  using Predictor = PredictorStack;
  static constexpr int num_codes = NumCodes;
  static constexpr int vocab_size = NumCodes + kNumControlIds;
  static constexpr bool has_input_projection = Talker::hidden_size != Predictor::hidden_size;
  using TalkerHead = Matrix<vocab_size, Talker::hidden_size>;
  using PredictorHead = Matrix<NumCodes, Predictor::hidden_size>;
  using InputProjection = Matrix<Predictor::hidden_size, Talker::hidden_size>;
  static constexpr int max_blocks =
      min_of(TalkerHead::num_row_groups, Talker::max_blocks, Predictor::max_blocks);
  // Steps of weights in a stage of the ring.
  static constexpr int stage_steps = NumCodes < 2048 ? 1 : MEGAKERNEL_SHARED_KB < 128 ? 2 : 4;
};

constexpr bool kShortContext = true;
using ReleasedPredictor = Stack<1024, 16, 8, 3072, kShortContext>;
using Model06B = Model<Stack<1024, 16, 8, 3072>, ReleasedPredictor, 2048>;
using Model17B = Model<Stack<2048, 16, 8, 6144>, ReleasedPredictor, 2048>;
using ModelDemo = Model<Stack<256, 4, 2, 512>, Stack<256, 2, 1, 512, kShortContext>, 256>;
using ModelTiny = Model<Stack<128, 4, 2, 384>, Stack<128, 4, 2, 384, kShortContext>, 256>;
using ModelTinyWide = Model<Stack<192, 4, 2, 576>, Stack<128, 4, 2, 384, kShortContext>, 256>;

}  // namespace megakernel
