// The shapes that the kernel is compiled for. Python reads them back and refuses a checkpoint that
// fits none.
#pragma once

namespace megakernel {

#ifndef MEGAKERNEL_SHARED_KB
#define MEGAKERNEL_SHARED_KB 227  // what a block may have on the architecture; see build_ext.py
#endif

constexpr bool kSmall = MEGAKERNEL_SHARED_KB < 200;  // then half the columns

constexpr int kWarps = 8;  // that multiply; one more fetches the weights
constexpr int kThreads = 32 * kWarps;
#ifdef MEGAKERNEL_MOVES_REGISTERS  // warps do that by fours; see build_ext.py
constexpr int kLaunched = kThreads + 128;
constexpr bool kRoomy = true;  // those who multiply have 232 registers
#else
constexpr int kLaunched = kThreads + 32;
constexpr bool kRoomy = false;  // 168
#endif
constexpr int kLoads = 16;  // of words that a lane has under way
#ifdef MEGAKERNEL_PRECISE
constexpr int kHalves = 2;  // whose sum, nearly float32, is an activation; see build_ext.py
#else
constexpr int kHalves = 1;
#endif
// Streams, or positions of one prompt, in one launch; each takes a column of the matrix instruction
// for every half.
constexpr int kColumns = (kSmall ? 4 : 8) / kHalves;
constexpr int kWide = kSmall ? kColumns : 2 * kColumns;  // columns of a pass of prompts, at most
constexpr int kPlaces = 8;  // for columns of streams, or between words: see Board
static_assert(kColumns <= kPlaces);
constexpr int kHeadDim = 128;               // of every network of the family
constexpr int kGroups = 16;                 // codes a frame
constexpr int kControl = 1024;              // ids of code 0 beyond the codes
constexpr int kUnit = 8;                    // rows of a matrix that a warp multiplies at a time
constexpr int kTile = 32;                   // K of a warp's step
constexpr int kStep = kTile * kWarps;       // K of the block's step
constexpr int kMostUnits = kSmall ? 3 : 6;  // whose sums have
constexpr int kMostOwn = 32;                // units of the residual that a block may have to keep
constexpr int kBlock = 16;                  // positions that a warp attends to at a time
constexpr int kSpan = kBlock * kWarps;      // positions that an attention item looks at
constexpr int kMaxSpans = 16;               // so that a slot has at most 2,048 positions
constexpr int kMostWatched = 8;             // heads whose scores may be asked for
constexpr int kKept = kHalves * kHeadDim;   // numbers of a key or a value in a slot
constexpr int kSharedBytes = MEGAKERNEL_SHARED_KB * 1024;

// Steps whose activations have room at a time, of so many columns.
template <int Most>
constexpr int kMostSteps = Most > kColumns ? 8 : 12;

// The most of so many steps that are a whole part of them, by fours, or all.
constexpr int part_of(int steps, int most) {
  if (steps <= most) return steps;
  int part = most - most % 4;
  while (steps % part != 0) part -= 4;
  return part;
}

// A matrix as the kernel walks through it: units of rows, steps of K.
template <int Rows, int K>
struct Matrix {
  static constexpr int rows = Rows;
  static constexpr int k = K;
  static constexpr int units = Rows / kUnit;
  static constexpr int steps = (K + kStep - 1) / kStep;
  // Steps whose activations are fetched together, and how often that is.
  template <int Most>
  static constexpr int chunk = part_of(steps, kMostSteps<Most>);
  template <int Most>
  static constexpr int chunks = steps / chunk<Most>;
  static_assert(Rows % kUnit == 0 && K % kTile == 0);
};

// Columns that a kernel of so many streams has room for: the predictor of one stream begins with
// two positions in one pass, and prompts have passes of two, too.
template <int Most>
constexpr int kRoom = Most == 1 ? 2 : Most;

constexpr int least(int a, int b) { return a < b ? a : b; }
constexpr int least(int a, int b, int c) { return least(least(a, b), c); }

// Columns of a pass of at most `Most` that a lane brings in together, by so many loads each.
template <int Most, int Loads>
constexpr int kAtOnceOf = least(Most, kLoads / Loads);

// One decoder stack; a near one attends to no more than kBlock positions.
template <int Hidden, int Heads, int KvHeads, int Intermediate, bool Near = false>
struct Stack {
  static constexpr bool near = Near;
  static constexpr int hidden = Hidden;
  static constexpr int heads = Heads;
  static constexpr int kv_heads = KvHeads;
  static constexpr int intermediate = Intermediate;
  static constexpr int queries = Heads * kHeadDim;
  static constexpr int keys = KvHeads * kHeadDim;
  using Qkv = Matrix<queries + 2 * keys, Hidden>;
  using Out = Matrix<Hidden, queries>;
  using GateUp = Matrix<2 * Intermediate, Hidden>;
  using Down = Matrix<Hidden, Intermediate>;
  // Every block must have a part of these two: see exchange.cuh.
  static constexpr int most_blocks = least(Qkv::units, GateUp::units);
  static_assert(Heads == 2 * KvHeads, "an attention item serves a pair of query heads");
};

// A talker, its code predictor, and how many codes a codebook has.
template <class TalkerStack, class PredictorStack, int Codes>
struct Model {
  using Talker = TalkerStack;
  using Predictor = PredictorStack;
  static constexpr int codes = Codes;
  static constexpr int vocab = Codes + kControl;
  static constexpr bool projected = Talker::hidden != Predictor::hidden;
  using TalkerHead = Matrix<vocab, Talker::hidden>;
  using PredictorHead = Matrix<Codes, Predictor::hidden>;
  using Project = Matrix<Predictor::hidden, Talker::hidden>;
  static constexpr int most_blocks =
      least(TalkerHead::units, Talker::most_blocks, Predictor::most_blocks);
  // Steps whose weights are fetched together.
  static constexpr int slot = Codes < 2048 ? 1 : MEGAKERNEL_SHARED_KB < 128 ? 2 : 4;
};

constexpr bool kNear = true;
using ReleasedPredictor = Stack<1024, 16, 8, 3072, kNear>;
using Model06B = Model<Stack<1024, 16, 8, 3072>, ReleasedPredictor, 2048>;
using Model17B = Model<Stack<2048, 16, 8, 6144>, ReleasedPredictor, 2048>;
using ModelDemo = Model<Stack<256, 4, 2, 576>, Stack<256, 2, 1, 512, kNear>, 256>;
using ModelTiny = Model<Stack<128, 4, 2, 384>, Stack<128, 4, 2, 384, kNear>, 256>;
using ModelTinyWide = Model<Stack<192, 4, 2, 576>, Stack<128, 4, 2, 384, kNear>, 256>;

#define MEGAKERNEL_MODELS(_) _(Model06B), _(Model17B), _(ModelDemo), _(ModelTiny), _(ModelTinyWide)

constexpr int kModels = 5;

// What Python compares with a checkpoint's config.
struct Shape {
  int talker[4], predictor[4], codes;  // hidden, heads, kv heads, intermediate
  int slot, most_blocks;
};

template <class M>
constexpr Shape shape_of() {
  using T = typename M::Talker;
  using P = typename M::Predictor;
  return {{T::hidden, T::heads, T::kv_heads, T::intermediate},
          {P::hidden, P::heads, P::kv_heads, P::intermediate},
          M::codes,
          M::slot,
          M::most_blocks};
}

// What the host launches.
struct Kernel {
  void* function;
  unsigned long shared_bytes;
};
struct Entry {
  Kernel generate_one, generate;  // of one stream, of several
  Kernel prefill[3];              // of passes of a `Size`, see passes.cuh
  Shape shape;
};

Entry entry(int model);

}  // namespace megakernel
