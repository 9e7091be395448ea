// A decoder stack, phase by phase:
//   qkv = W norm(x) | attention | x += W a | gate and up of norm(x), SiLU | x += W m
// Who makes a row of what is added to the residual x keeps that row of x, and hands all others the
// sum. A norm is a vector before the product and a number after it, so that nobody waits for the
// number.
#pragma once

#include "short_attention.cuh"

namespace megakernel {

// The residual's rows that a block adds to, [rows, columns].
template <int Most>
struct OwnRows {
  float of[kMostOwn * kUnit][kRoom<Most>];

  DEVICE float& at(const Share& share, int unit, int row, int column) {
    return of[(unit - share.first) * kUnit + row][column];
  }
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

// Fours that a lane brings in at a time where nobody waits for them to come: more would spill.
#if __CUDA_ARCH__ == 900
constexpr int kSeveral = 4;
#elif __CUDA_ARCH__ >= 1000
constexpr int kSeveral = 1;
#else
constexpr int kSeveral = 2;
#endif

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
      const int step = half * kMostSteps<Most> + 4 * four;  // from the lane's first one
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

// Awaits words, a board, of at most N columns: use(first column, i, four, x) for column first + i
// of a few that are brought in together, then after(first column) for these. Among them may be some
// that are not of the pass.
template <int Width, int N, int Most, class Use, class After>
DEVICE void take_words(const Params& p, const uint32_t* words, int columns, const Tags& tags,
                       Phase phase, int& gave_up, Use use, After after) {
  if (Most == 1) columns = N;
  constexpr int kFours = Fours<Width>::count, kAtOnce = kAtOnceOf<N, kFours>;
  constexpr int kMany = kAtOnce * kFours;
  constexpr int kFew = 4;  // columns are left out by so many: one by one would take longer
  static_assert(N % kAtOnce == 0);
  using Words = FloatBoard<Width, Most>;
#pragma unroll 1
  for (int c = 0; c < columns; c += kAtOnce) {
    uint4 v[kMany] = {};
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
#pragma unroll
    for (int i = 0; i < kMany; ++i) {
      if (i % (kFew * kFours) == 0 && c + i / kFours >= columns) break;
      const int four = i % kFours;
      if (Fours<Width>::there(four)) use(c, i / kFours, four, untagged(v[i]));
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
template <int Mask = 16, int N>
DEVICE float warp_sums_apart(const float (&values)[N]) {
  static_assert(32 % N == 0);
  if constexpr (Mask == 0) {
    return values[0];
  } else if constexpr (N == 1) {
    const float sum[] = {values[0] + shuffle_xor(values[0], Mask)};
    return warp_sums_apart<Mask / 2>(sum);
  } else {
    const bool upper = lane() & Mask;
    float kept[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const float given = upper ? values[i] : values[i + N / 2];
      kept[i] = (upper ? values[i + N / 2] : values[i]) + shuffle_xor(given, Mask);
    }
    return warp_sums_apart<Mask / 2>(kept);
  }
}

// A norm's vector, as a lane has it.
template <int Width>
struct OwnVector {
  uint2 of[Fours<Width>::count];

  template <int Hidden>
  DEVICE explicit OwnVector(const NormVector<Hidden>& vector) {
    wait_for_own();
#pragma unroll
    for (int four = 0; four < Fours<Width>::count; ++four) of[four] = vector.of[four][thread()];
  }
};

// Puts down sums of squares of so many columns, of which those of the pass have a place.
template <int AtOnce, int Most>
DEVICE void put_squares(Sums<Most>& sums, const float (&squares)[AtOnce], int first, int columns) {
  const float total = warp_sums_apart(squares);
  constexpr int kLanes = 32 / AtOnce;
  const int column = first + lane() / kLanes;
  if (lane() % kLanes == 0 && column < columns) sums.squares[column][warp()] = total;
}

// x, which words bring, by a norm's vector, into place; the norm's number is `norm_scale`.
template <int Width, int N, int Hidden, int Most>
SHARED_CODE void fetch_residual(const Params& p, const uint32_t* words,
                                const NormVector<Hidden>& vector, int columns, Tags tags,
                                Phase phase, Fragments<Most> (&fragments)[kHalves],
                                Sums<Most>& sums) {
  if (Most == 1) columns = N;
  constexpr int kAtOnce = kAtOnceOf<N, Fours<Width>::count>;
  const OwnVector<Width> norm(vector);
  float squares[kAtOnce] = {};
  const Activations<Most> activations(fragments);
  take_words<Width, N, Most>(
      p, words, columns, tags, phase, sums.gave_up,
      [&](int first, int i, int four, float4 v) {
        squares[i] += square(v);
        activations.put(first + i, four, times(v, opened(norm.of[four])));
      },
      [&](int first) {
        put_squares(sums, squares, first, columns);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) squares[i] = 0;
      });
}

// use(column, i, four, x) of columns first to last - 1, `AtOnce` at a time, where start(column, k)
// gives four elements; then after(column) for these.
template <int Width, int AtOnce, class Start, class Use, class After>
DEVICE void each_start(int first, int last, Start start, Use use, After after) {
#pragma unroll 1
  for (int c = first; c < last; c += AtOnce) {
#pragma unroll
    for (int four = 0; four < Fours<Width>::count; ++four) {
      if (!Fours<Width>::there(four)) continue;
      float4 v[AtOnce];
#pragma unroll
      for (int i = 0; i < AtOnce; ++i) v[i] = start(min(c + i, last - 1), Fours<Width>::k(four));
#pragma unroll
      for (int i = 0; i < AtOnce; ++i) {
        if (c + i < last) use(c, i, four, v[i]);
      }
    }
    after(c);
  }
  warp_sync();
}

// What a pass starts with, by the first norm's vector, to where its first product takes it.
template <int Width, int AtOnce, class F, int Hidden, class Start>
DEVICE void put_start(F& flow, Sums<F::most>& sums, const NormVector<Hidden>& vector, int first,
                      int last, Start start) {
  const OwnVector<Width> norm(vector);
  float squares[AtOnce] = {};
  const Activations<F::most> activations(flow.fragments);
  each_start<Width, AtOnce>(
      first, last, start,
      [&](int c, int i, int four, float4 v) {
        squares[i] += square(v);
        activations.put(c + i, four, times(v, opened(norm.of[four])));
      },
      [&](int c) {
        put_squares(sums, squares, c, last);
#pragma unroll
        for (int i = 0; i < AtOnce; ++i) squares[i] = 0;
      });
}

// The rows of it that this block will add to.
template <class S, int N, class F, class Start>
DEVICE void keep_start(F& flow, OwnRows<F::most>& own, int columns, Start start) {
  const Share share = flow.shares[kOut];
  each_result<N>(flow, uniform(share.count), [&](int unit, int column, int row) {
    if (column >= columns) return;
    const int k = (share.first + unit) * kUnit + row;
    const float4 four = start(column, k - k % 4);
    own.at(share, share.first + unit, row, column) = k % 4 == 0   ? four.x
                                                     : k % 4 == 1 ? four.y
                                                     : k % 4 == 2 ? four.z
                                                                  : four.w;
  });
}

// What the layers start with is there.
template <class S, int N, int AtOnce, class F, int Hidden, class Start>
DEVICE void start_with(F& flow, OwnRows<F::most>& own, const NormVector<Hidden>& vector,
                       int columns, Start start) {
  put_start<S::hidden, AtOnce>(flow, flow.sums[flow.turn], vector, 0, columns, start);
  keep_start<S, N>(flow, own, columns, start);
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

// x += W a, of the rows that this block keeps, and the sums to everybody.
template <class Matrix, int N, class F, class Fetch>
DEVICE bool add(F& flow, Phase phase, OwnRows<F::most>& own, Fetch fetch, uint32_t* words) {
  auto look = [&](const Share& share, const Result& r) {
    return own.at(share, r.unit, r.row, r.column);
  };
  auto take = [&](const Result& r, float sum, const auto&, bool there) {
    const float x = r.before + sum * kGrow;
    const int at = FloatBoard<Matrix::rows, F::most>::at(r.column, r.unit * kUnit + r.row);
    store_word_if(there, words + at, tagged(x, flow.tags.of(r.column)));
    if (there) own.at(flow.shares[phase], r.unit, r.row, r.column) = x;
  };
  return product<Matrix, N>(flow, phase, fetch, take, look);
}

// What the layers start with: words, or nothing, after `start_with`.
struct FromWords {
  const uint32_t* words;
  Tags tags;
};
struct IsThere {};

// The layers, of at most N columns; false once anybody has given up. They end with the words of
// `down`. The first norm's vector has been asked for, and the last one is in the end.
template <class S, int N, class F, int Hidden, class From>
DEVICE bool run_layers(F& flow, OwnRows<F::most>& own, NormVector<Hidden>& vector, const Network& n,
                       const Column* columns, int count, From from) {
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

    if constexpr (!S::near && F::most == 1) fetch_remembered<S>(p, n, l, columns, count);
    auto normed = [&](int, auto& sums) {
      const uint32_t* x = words.down;
      Tags its = before;
      if (l == 0) {
        if constexpr (std::is_same_v<From, IsThere>)
          return;
        else
          x = from.words, its = from.tags;
      }
      fetch_residual<S::hidden, N>(p, x, vector, count, its, kDown, flow.fragments, sums);
    };
    uint32_t* const qkv_words = words.qkv;
    const float eps = n.eps;
    auto qkv = [&](const Result& r, float sum, const auto& sums, bool there) {
      const float value = sum * norm_scale<S::hidden>(sums, r.column, eps);
      const int at = r.column * S::Qkv::rows + qkv_word<S>(r.unit * kUnit + r.row);
      store_word_if(there, qkv_words + at, tagged(value, tags.of(r.column)));
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
          fetch_pairs<S::queries, S::Out::template chunk<F::most>, N>(
              p, words.attended, half, first, count, tags, kAttention, sums.gave_up,
              flow.fragments[half]);
        });
    };
    if (!add<typename S::Out, N>(flow, kOut, own, attended, words.out)) return false;

    auto normed_again = [&](int, auto& sums) {
      fetch_residual<S::hidden, N>(p, words.out, vector, count, tags, kOut, flow.fragments, sums);
    };
    // A unit is four rows of gate, then the same four of up. Neighbouring lanes have its rows.
    auto gated = [&](const Result& r, float sum, const auto& sums, bool there) {
      const float own = sum * norm_scale<S::hidden>(sums, r.column, eps);
      const float up = shuffle_xor(own, kUnit / 2);
      const float value = own * inverse(1 + expf(-own)) * up;
      const float next = shuffle_xor(value, 1);
      const bool made = there && r.row < kUnit / 2;
      store_word_if(made && !fits_pair(value), p.broken + (F::most > 1 ? r.column : 0), 1);
      const int word = (r.unit * (kUnit / 2) + r.row) / 2;
      each_half([&](int half) {
        using Words = PairBoard<S::intermediate, F::most>;
        const int at = Words::at(r.column, half * (S::intermediate / 2) + word);
        store_word_if(made && r.row % 2 == 0, words.middle + at,
                      tagged_pair(rest(value, half), rest(next, half), tags.of(r.column)));
      });
    };
    if (!product<typename S::GateUp, N>(flow, kGateUp, normed_again, gated)) return false;
    vector.template ask<S::hidden>(l + 1 < layers ? norms() + kNorms : n.norm);

    auto middle = [&](int first, auto& sums) {
      each_half([&](int half) {
        fetch_pairs<S::intermediate, S::Down::template chunk<F::most>, N>(
            p, words.middle, half, first, count, tags, kGateUp, sums.gave_up, flow.fragments[half]);
      });
    };
    // Keys and values of the pass, before anything that a later one hears of.
    if (l + 1 == layers) fence();
    if (!add<typename S::Down, N>(flow, kDown, own, middle, words.down)) return false;
  }
  return true;
}

}  // namespace megakernel
