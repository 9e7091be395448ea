// The shapes that the kernel is compiled for. Python reads them back and refuses a checkpoint that
// fits none.
#pragma once

namespace megakernel {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kColumns = 8;             // streams, or positions of one prompt, in one launch
constexpr int kHeadDim = 128;           // of every network of the family
constexpr int kGroups = 16;             // codes a frame
constexpr int kControl = 1024;          // ids of code 0 beyond the codes
constexpr int kSpan = 128;              // positions that one attention item looks at
constexpr int kMostActivations = 2048;  // of one stretch of K, a column
constexpr int kMostSplits = 4;          // stretches that a sum is cut into
constexpr int kMaxSpans = 16;           // so that a slot has at most 2,048 positions

// One decoder stack.
template <int Hidden, int Heads, int KvHeads, int Intermediate>
struct Stack {
  static constexpr int hidden = Hidden;
  static constexpr int heads = Heads;
  static constexpr int kv_heads = KvHeads;
  static constexpr int group = Heads / KvHeads;  // query heads that share keys and values
  static constexpr int queries = Heads * kHeadDim;
  static constexpr int keys = KvHeads * kHeadDim;
  static constexpr int qkv = queries + 2 * keys;
  static constexpr int intermediate = Intermediate;
  static_assert(group == 2, "an attention item serves a pair of query heads");
  static_assert(Hidden % 16 == 0 && Intermediate % 16 == 0, "tiles are 16 x 16");
};

// A talker, its code predictor, and how many codes a codebook has.
template <class TalkerStack, class PredictorStack, int Codes>
struct Model {
  using Talker = TalkerStack;
  using Predictor = PredictorStack;
  static constexpr int codes = Codes;
  static constexpr int vocab = Codes + kControl;
  static constexpr bool projected = Talker::hidden != Predictor::hidden;
};

using ReleasedPredictor = Stack<1024, 16, 8, 3072>;
using Model06B = Model<Stack<1024, 16, 8, 3072>, ReleasedPredictor, 2048>;
using Model17B = Model<Stack<2048, 16, 8, 6144>, ReleasedPredictor, 2048>;
using ModelDemo = Model<Stack<256, 4, 2, 576>, Stack<256, 2, 1, 512>, 256>;
using ModelTiny = Model<Stack<128, 4, 2, 384>, Stack<128, 4, 2, 384>, 256>;
using ModelTinyWide = Model<Stack<192, 4, 2, 576>, Stack<128, 4, 2, 384>, 256>;

#define MEGAKERNEL_MODELS(_) _(Model06B), _(Model17B), _(ModelDemo), _(ModelTiny), _(ModelTinyWide)

constexpr int kModels = 5;

// What Python compares with a checkpoint's config.
struct Shape {
  int talker[4], predictor[4], codes;  // hidden, heads, kv heads, intermediate
};

template <class M>
constexpr Shape shape_of() {
  using T = typename M::Talker;
  using P = typename M::Predictor;
  return {{T::hidden, T::heads, T::kv_heads, T::intermediate},
          {P::hidden, P::heads, P::kv_heads, P::intermediate},
          M::codes};
}

// What the host launches.
struct Entry {
  void* generate;
  void* prefill;
  unsigned long shared_bytes;
  Shape shape;
};

Entry entry(int model);

}  // namespace megakernel
