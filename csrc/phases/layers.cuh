// A decoder stack, phase by phase:
//   qkv = W norm(x) | attention | x += W a | gate and up of norm(x), SiLU | x += W m
// Every block has the residual x of every column, each warp the elements that it multiplies. A norm
// is a vector before the product and a number after it, so that nobody waits for the number.
#pragma once

#include "near.cuh"

namespace megakernel {

// The residual, [columns, width].
template <int Hidden, int Most>
struct alignas(16) Residual {
  float of[kRoom<Most>][Hidden];
};

// A lane brings in elements by fours, lane l those of step l / 8 of every four; how many fours
// of a column there are, and where one begins. A four beyond the width is not `there`.
template <int Width>
struct Fours {
  static constexpr int count = (Matrix<kUnit, Width>::steps + 3) / 4;
  static constexpr bool whole = Width % (4 * kStep) == 0;

  DEVICE static int step(int four) { return 4 * four + lane() / 8; }
  DEVICE static int k(int four) { return step(four) * kStep + warp() * kTile + lane() % 8 * 4; }
  DEVICE static bool there(int four) { return whole || k(four) < Width; }
};

template <int Hidden, int Most>
DEVICE float4& four_at(Residual<Hidden, Most>& x, int column, int k) {
  return *reinterpret_cast<float4*>(&x.of[column][k]);
}

// Fours of x that a lane makes at a time: more would spill.
#if __CUDA_ARCH__ == 900
constexpr int kSeveral = 4;
#elif __CUDA_ARCH__ >= 1000
constexpr int kSeveral = 1;
#else
constexpr int kSeveral = 2;
#endif

// x of every column, where change(column, k, x) gives four elements; `AtOnce` times four are made
// before any is put down.
template <int Width, int AtOnce, int Hidden, int Most, class Change>
DEVICE void change_x(Residual<Hidden, Most>& x, int columns, Change change) {
  constexpr int kFours = Fours<Width>::count;
  const int count = columns * kFours;
#pragma unroll 1
  for (int first = 0; first < count; first += AtOnce) {
    float4 v[AtOnce];
#pragma unroll
    for (int i = 0; i < AtOnce; ++i) {
      const int column = (first + i) / kFours, four = (first + i) % kFours;
      if (first + i >= count) break;
      const int k = Fours<Width>::k(four);
      if (Fours<Width>::there(four)) v[i] = change(column, k, four_at(x, column, k));
    }
#pragma unroll
    for (int i = 0; i < AtOnce; ++i) {
      const int column = (first + i) / kFours, four = (first + i) % kFours;
      if (first + i >= count) break;
      if (Fours<Width>::there(four)) four_at(x, column, Fours<Width>::k(four)) = v[i];
    }
  }
  warp_sync();
}

// What a lane's fours become, where the product takes them.
template <int Most>
class Activations {
 public:
  DEVICE explicit Activations(Fragments<Most> (&fragments)[kHalves])
      : first_(reinterpret_cast<uint2*>(
            &fragments[0].of[lane() / 8][warp()][lane() % 8 / 2])[lane() % 2]) {}

  DEVICE void put(int column, int four, float4 v) const {
    constexpr int kColumn = 4 * sizeof(uint4) / sizeof(uint2),
                  kOfStep = kWarps * kRoom<Most> * kColumn;
    const Halves halves = closed(v);
    each_half([&](int half) {
      const int step = half * kMostSteps + 4 * four;  // from the lane's first one
      *(first_ + (step * kOfStep + column * kColumn)) = halves.of[half];
    });
  }

 private:
  Held<uint2> first_;
};

template <int Width, int Most>
DEVICE float norm_scale(const Sums<Most>& sums, int column, float eps) {
  float squares = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) squares += sums.squares[column][w];
  return rsqrtf(squares / Width + eps);
}

// Brings x in, of at most N columns, after x += words, a board, where there are any: use(first
// column, i, four, x) for column first + i of a few that are brought in together, then after(first
// column) for these. Among them may be some that are not of the pass.
template <int Width, int N, int Hidden, int Most, class Use, class After>
DEVICE void add_words(const Params& p, Residual<Hidden, Most>& x, const uint32_t* words,
                      int columns, const Tags& tags, Phase phase, int& gave_up, Use use,
                      After after) {
  if (Most == 1) columns = N;
  constexpr int kFours = Fours<Width>::count, kAtOnce = kAtOnceOf<N, kFours>;
  constexpr int kMany = kAtOnce * kFours;
  constexpr int kFew = 4;  // columns are left out by so many: one by one would take longer
  static_assert(N % kAtOnce == 0);
  using Words = FloatBoard<Width, Most>;
  const Held<float4> first(four_at(x, 0, Fours<Width>::k(0)));
#pragma unroll 1
  for (int c = 0; c < columns; c += kAtOnce) {
    uint4 v[kMany] = {};
    auto place = [&](int i) -> float4& {
      return *(first + ((c + i / kFours) * Hidden + i % kFours * 4 * kStep) / 4);
    };
    // Where there are registers for it meanwhile, x is there when the words come.
    constexpr bool kEarly = kRoomy && kMany <= 4 && Fours<Width>::whole;
    float4 before[kMany];
#pragma unroll
    for (int i = 0; i < kMany; ++i) {
      if (kEarly && Fours<Width>::there(i % kFours)) before[i] = place(i);
    }
    if (words) {
      const uint32_t* from = words + Words::at(c, Fours<Width>::k(0));
      uint32_t missing = 0;
#pragma unroll
      for (int i = 0; i < kMany; ++i) {
        const bool wanted = c + i / kFours < columns && Fours<Width>::there(i % kFours);
        missing |= static_cast<uint32_t>(wanted) << i;
      }
      await(
          v, missing,
          [&](int i) { return from + Words::further(i / kFours, i % kFours * 4 * kStep); },
          [&](int i, uint4 word) { return carries(word, tags.of(c + i / kFours)); },
          Patience(p, phase, gave_up));
    }
#pragma unroll
    for (int i = 0; i < kMany; ++i) {
      if (i % (kFew * kFours) == 0 && c + i / kFours >= columns) break;
      const int four = i % kFours;
      if (!Fours<Width>::there(four)) continue;
      if (!kEarly) before[i] = place(i);
      const float4 sum = plus(before[i], untagged(v[i]));
      place(i) = sum;
      use(c, i / kFours, four, sum);
    }
    after(c);
  }
  warp_sync();
}

// The vector of the next norm, each lane its own elements, asked for well before it is wanted, once
// the last one was taken: a register that waits for memory would be waited for at the next branch.
template <int Hidden>
struct NormVector {
  static constexpr int kFours = Fours<Hidden>::count;
  uint2 of[kFours][kThreads];

  template <int Width>
  DEVICE void ask(const bf16* norm) {
#pragma unroll
    for (int four = 0; four < Fours<Width>::count; ++four) {
      if (!Fours<Width>::there(four)) continue;
      copy_own(&of[four][thread()], norm + Fours<Width>::k(four));
    }
  }
};

// Sums over all lanes, of which lane l gets that of values[l / (32 / N)]: added in the order of
// `warp_sum`, but for less exchange.
template <int N>
DEVICE float warp_sums_apart(const float (&values)[N]) {
  static_assert(32 % N == 0);
  float kept[N];
#pragma unroll
  for (int i = 0; i < N; ++i) kept[i] = values[i];
#pragma unroll
  for (int mask = 16, left = N / 2; mask > 0; mask /= 2, left /= 2) {
    const bool upper = lane() & mask;
#pragma unroll
    for (int i = 0; i < left; ++i) {
      const float given = upper ? kept[i] : kept[i + left];
      kept[i] = (upper ? kept[i + left] : kept[i]) + shuffle_xor(given, mask);
    }
    if (left == 0) kept[0] += shuffle_xor(kept[0], mask);
  }
  return kept[0];
}

// x, after x += words where there are any, by a norm's vector, into place; the norm's number is
// `norm_scale`.
template <int Width, int N, int Hidden, int Most>
SHARED_CODE void fetch_residual(const Params& p, Residual<Hidden, Most>& x, const uint32_t* words,
                                const NormVector<Hidden>& vector, int columns, Tags tags,
                                Phase phase, Fragments<Most> (&fragments)[kHalves],
                                Sums<Most>& sums) {
  if (Most == 1) columns = N;
  constexpr int kFours = Fours<Width>::count, kAtOnce = kAtOnceOf<N, kFours>;
  wait_for_own();
  uint2 norm[kFours];
#pragma unroll
  for (int four = 0; four < kFours; ++four) norm[four] = vector.of[four][thread()];
  float squares[kAtOnce] = {};
  const Activations<Most> activations(fragments);
  add_words<Width, N>(
      p, x, words, columns, tags, phase, sums.gave_up,
      [&](int first, int i, int four, float4 v) {
        squares[i] += square(v);
        activations.put(first + i, four, times(v, opened(norm[four])));
      },
      [&](int first) {
        const float total = warp_sums_apart(squares);
        constexpr int kLanes = 32 / kAtOnce;
        const int column = first + lane() / kLanes;
        if (lane() % kLanes == 0 && column < columns) sums.squares[column][warp()] = total;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) squares[i] = 0;
      });
}

// How the lanes of a warp share pairs of halves that other blocks made, of so many steps and at
// most N columns: eight elements each, of eight steps of a column, or of four of two columns. A
// lane's first eight are at `column` and `step`, the others so many columns and steps further.
template <int Steps, int N>
struct Eights {
  static constexpr int beside = N > 1 && Steps % 8 == 4 ? 2 : 1;  // columns
  static constexpr int rows = 8 / beside;                         // steps
  static constexpr int each = (Steps + rows - 1) / rows;          // of a column
  static constexpr int count = kAtOnceOf<N / beside, each> * each;
  static constexpr int columns = count / each * beside;

  DEVICE static int column() { return lane() / 16 % beside; }
  DEVICE static int step() { return lane() / 4 % rows; }
  DEVICE static constexpr int columns_further(int i) { return i / each * beside; }
  DEVICE static constexpr int steps_further(int i) { return i % each * rows; }
};

// The steps from `first` on to where the product takes them.
template <int Width, int Steps, int N, int Most>
SHARED_CODE void fetch_pairs(const Params& p, const uint32_t* words, int half, int first,
                             int columns, Tags tags, Phase phase, int& gave_up,
                             Fragments<Most>& fragments) {
  using E = Eights<Steps, N>;
  using Words = PairBoard<Width, Most>;
  if (Most == 1) columns = N;
  constexpr bool kWhole = Steps % E::rows == 0 && Width % kStep == 0;
  const int step = E::step(), k = (first + step) * kStep + warp() * kTile + lane() % 4 * 8;
  const Held<uint4> to(fragments.of[step][warp()][4 * E::column() + lane() % 4]);
#pragma unroll 1
  for (int c = 0; c < columns; c += E::columns) {
    const int column = c + E::column();
    uint4 v[E::count] = {};
    uint32_t wanted = 0;
#pragma unroll
    for (int i = 0; i < E::count; ++i) {
      const int further = E::steps_further(i);
      const bool there = kWhole || (step + further < Steps && k + further * kStep < Width);
      const bool mine = there && column + E::columns_further(i) < columns;
      wanted |= static_cast<uint32_t>(mine) << i;
    }
    const uint32_t* from = words + Words::at(column, (half * Width + k) / 2);
    await(
        v, wanted,
        [&](int i) {
          return from + Words::further(E::columns_further(i), E::steps_further(i) * (kStep / 2));
        },
        [&](int i, uint4 pairs) {
          return carries_pairs(pairs, tags.of(column + E::columns_further(i)));
        },
        Patience(p, phase, gave_up));
#pragma unroll
    for (int i = 0; i < E::count; ++i) {
      const int further =
          E::steps_further(i) * kWarps * 4 * kRoom<Most> + 4 * (c + E::columns_further(i));
      put_if(wanted >> i & 1, *(to + further), untagged_pairs(v[i]));
    }
  }
}

// The layers on x, of at most N columns; false once anybody has given up. The first norm's vector
// was asked for, and the last one is in the end.
template <class S, int N, class F, int Hidden>
DEVICE bool run_layers(F& flow, Residual<Hidden, F::most>& x, NormVector<Hidden>& vector,
                       const Network& n, const Column* columns, int count) {
  const Params& p = flow.p;
  const Words& words = n.words;
  const int layers = uniform(n.num_layers);
#pragma unroll 1
  for (int l = 0; l < layers; ++l) {
    constexpr int kNorms = 2 * S::hidden + 2 * kHeadDim;  // of a layer
    const auto norms = [&] { return n.norms + l * kNorms; };
    const Tags before = flow.tags;
    flow.tags.advance(count);
    const Tags& tags = flow.tags;

    if constexpr (!S::near && F::most == 1) fetch_remembered<S>(n, l, columns, count);
    auto normed = [&](int, auto& sums) {
      fetch_residual<S::hidden, N>(p, x, l > 0 ? words.down : nullptr, vector, count, before, kDown,
                                   flow.fragments, sums);
    };
    uint32_t* const qkv_words = words.qkv;
    const float eps = n.eps;
    auto qkv = [&](int unit, int column, int row, float sum, const auto& sums, bool there) {
      const float value = sum * norm_scale<S::hidden>(sums, column, eps);
      const int at = column * S::Qkv::rows + qkv_word<S>(unit * kUnit + row);
      store_word_if(there, qkv_words + at, tagged(value, tags.of(column)));
    };
    if (!product<typename S::Qkv, N>(flow, kQkv, normed, qkv)) return false;

    vector.template ask<S::hidden>(norms() + S::hidden);
    const bf16* head_norms = norms() + 2 * S::hidden;
    constexpr bool kHere = S::near && F::most == 1;  // attention is part of the product
    if constexpr (!S::near) attend<S>(flow, n, l, head_norms, columns, count);
    if constexpr (S::near && !kHere) attend_apart<S>(flow, n, l, head_norms, columns, count);

    auto attended = [&](int first, auto& sums) {
      if constexpr (kHere)
        attend_here<S, N>(flow, n, l, head_norms, columns, sums.gave_up);
      else
        each_half([&](int half) {
          fetch_pairs<S::queries, S::Out::chunk, N>(p, words.attended, half, first, count, tags,
                                                    kAttend, sums.gave_up, flow.fragments[half]);
        });
    };
    uint32_t* const out_words = words.out;
    auto out = [&](int unit, int column, int row, float sum, const auto&, bool there) {
      const int at = FloatBoard<S::hidden, F::most>::at(column, unit * kUnit + row);
      store_word_if(there, out_words + at, tagged(sum * kGrow, tags.of(column)));
    };
    if (!product<typename S::Out, N>(flow, kOut, attended, out)) return false;

    auto normed_again = [&](int, auto& sums) {
      fetch_residual<S::hidden, N>(p, x, words.out, vector, count, tags, kOut, flow.fragments,
                                   sums);
    };
    // A unit is four rows of gate, then the same four of up. Neighbouring lanes have its rows.
    auto gated = [&](int unit, int column, int row, float sum, const auto& sums, bool there) {
      const float own = sum * norm_scale<S::hidden>(sums, column, eps);
      const float up = shuffle_xor(own, kUnit / 2);
      const float value = own * inverse(1 + expf(-own)) * up;
      const float next = shuffle_xor(value, 1);
      const bool made = there && row < kUnit / 2;
      store_word_if(made && !fits_pair(value), p.broken + (F::most > 1 ? column : 0), 1);
      const int word = (unit * (kUnit / 2) + row) / 2;
      each_half([&](int half) {
        using Words = PairBoard<S::intermediate, F::most>;
        const int at = Words::at(column, half * (S::intermediate / 2) + word);
        store_word_if(made && row % 2 == 0, words.middle + at,
                      tagged_pair(rest(value, half), rest(next, half), tags.of(column)));
      });
    };
    if (!product<typename S::GateUp, N>(flow, kGateUp, normed_again, gated)) return false;
    vector.template ask<S::hidden>(l + 1 < layers ? norms() + kNorms : n.norm);

    auto middle = [&](int first, auto& sums) {
      each_half([&](int half) {
        fetch_pairs<S::intermediate, S::Down::chunk, N>(
            p, words.middle, half, first, count, tags, kGateUp, sums.gave_up, flow.fragments[half]);
      });
    };
    uint32_t* const down_words = words.down;
    auto down = [&](int unit, int column, int row, float sum, const auto&, bool there) {
      const int at = FloatBoard<S::hidden, F::most>::at(column, unit * kUnit + row);
      store_word_if(there, down_words + at, tagged(sum * kGrow, tags.of(column)));
    };
    // Keys and values of the pass, before anything that a later one hears of.
    if (l + 1 == layers) fence();
    if (!product<typename S::Down, N>(flow, kDown, middle, down)) return false;
  }
  add_words<S::hidden, N>(
      p, x, words.down, count, flow.tags, kDown, flow.gave_up(), [](int, int, int, float4) {},
      [](int) {});
  return true;
}

}  // namespace megakernel
