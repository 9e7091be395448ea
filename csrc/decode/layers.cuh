// A decoder stack, phase by phase:
//   qkv = W norm(x) | attention | x += W a | gate and up of norm(x), SiLU | x += W m
// Who makes a row of what is added to the residual x keeps that row of x, and hands all others the
// sum. A norm is a vector before the product and a number after it, so that nobody waits for the
// number.
#pragma once

#include "short_attention.cuh"

namespace megakernel {

// The residual's rows that a block adds to, [rows, columns].
template <int MaxColumns>
struct ResidualRows {
  float rows[kMaxResidualRowGroups * kRowGroupSize][kColumnCapacity<MaxColumns>];

  DEVICE float& at(const RowGroupRange& share, int row_group, int row, int column) {
    return rows[(row_group - share.first) * kRowGroupSize + row][column];
  }
};

// A lane brings in elements by fours, lane l those of step l / 8 of every four; how many fours
// of a column there are, and where one begins. A four beyond the width is not `there`.
template <int Width>
struct LaneVectors {
  static constexpr int count = (Matrix<kRowGroupSize, Width>::num_steps + 3) / 4;
  static constexpr bool whole = Width % (4 * kStepK) == 0;

  DEVICE static int step(int four) { return 4 * four + lane_idx() / 8; }
  DEVICE static int k(int four) {
    return step(four) * kStepK + warp_idx() * kTileK + lane_idx() % 8 * 4;
  }
  DEVICE static bool there(int four) { return whole || k(four) < Width; }
};

// Fours that a lane brings in at a time where nobody waits for them to come: more would spill.
#if __CUDA_ARCH__ == 900
constexpr int kInputVectorsAtOnce = 4;
#elif __CUDA_ARCH__ >= 1000
constexpr int kInputVectorsAtOnce = 1;
#else
constexpr int kInputVectorsAtOnce = 2;
#endif

// What a lane's fours become, where the product takes them.
template <int MaxColumns>
class ActivationWriter {
 public:
  DEVICE explicit ActivationWriter(ActivationFragments<MaxColumns> (&fragments)[kNumSplits])
      : first_(reinterpret_cast<uint2*>(
            &fragments[0]
                 .num_steps[lane_idx() / 8][warp_idx()][lane_idx() % 8 / 2])[lane_idx() % 2]) {}

  DEVICE void store(int column, int four, float4 v) const {
    constexpr int kColumn = 4 * sizeof(uint4) / sizeof(uint2),
                  kOfStep = kNumWarps * kColumnCapacity<MaxColumns> * kColumn;
    const SplitBf16x4 halves = split_bf16x4(v);
    for_each_split([&](int split) {
      const int step = split * kMaxChunkSteps<MaxColumns> + 4 * four;  // from the lane's first one
      *(first_ + (step * kOfStep + column * kColumn)) = halves.of[split];
    });
  }

 private:
  PinnedAddress<uint2> first_;
};

template <int Width, int MaxColumns>
DEVICE float rms_norm_scale(const PartialSums<MaxColumns>& sums, int column, float eps) {
  float squares = 0;
#pragma unroll
  for (int w = 0; w < kNumWarps; ++w) squares += sums.squares[column][w];
  return rsqrtf(squares / Width + eps);
}

// Awaits words, a board, of at most N columns: use(first column, i, four, x) for column first + i
// of a few that are brought in together, then after(first column) for these. Among them may be some
// that are not of the pass.
template <int Width, int N, int MaxColumns, class Use, class After>
DEVICE void wait_for_residual(const Params& p, const uint32_t* words, int columns,
                              const EpochTags& tags, Phase phase, int& timed_out, Use use,
                              After after) {
  if (MaxColumns == 1) columns = N;
  constexpr int kFours = LaneVectors<Width>::count, kAtOnce = kColumnsPerLoad<N, kFours>;
  constexpr int kNumVectors = kAtOnce * kFours;
  constexpr int kFew = 4;  // columns are left out by so many: one by one would take longer
  static_assert(N % kAtOnce == 0);
  using Layout = FloatExchangeLayout<Width, MaxColumns>;
#pragma unroll 1
  for (int c = 0; c < columns; c += kAtOnce) {
    uint4 v[kNumVectors] = {};
    const uint32_t* from = words + Layout::index(c, LaneVectors<Width>::k(0));
    uint32_t missing = 0;
#pragma unroll
    for (int i = 0; i < kNumVectors; ++i) {
      const bool wanted = c + i / kFours < columns && LaneVectors<Width>::there(i % kFours);
      missing |= static_cast<uint32_t>(wanted) << i;
    }
    wait_for_vectors(
        v, missing,
        [&](int i) { return from + Layout::distance(i / kFours, i % kFours * 4 * kStepK); },
        [&](int i, uint4 word) { return has_tag(word, tags.of(c + i / kFours)); },
        SpinTimeout(p, phase, timed_out));
#pragma unroll
    for (int i = 0; i < kNumVectors; ++i) {
      if (i % (kFew * kFours) == 0 && c + i / kFours >= columns) break;
      const int four = i % kFours;
      if (LaneVectors<Width>::there(four)) use(c, i / kFours, four, untag(v[i]));
    }
    after(c);
  }
  sync_warp();
}

// The vector of the next norm, each lane its own elements, asked for well before it is wanted, once
// the last one was taken: a register that waits for memory would be waited for at the next branch.
template <int Hidden>
struct NormWeight {
  static constexpr int kFours = LaneVectors<Hidden>::count;
  uint2 of[kFours][kNumThreads];

  template <int Width>
  DEVICE void load_async(const bf16* norm) {
#pragma unroll
    for (int four = 0; four < LaneVectors<Width>::count; ++four) {
      if (!LaneVectors<Width>::there(four)) continue;
      copy_async_8_bytes(&of[four][thread_idx()], norm + LaneVectors<Width>::k(four));
    }
  }
};

// Sums over all lanes, of which lane l gets that of values[l / (32 / N)]: added in the order of
// `warp_sum`, but for less exchange.
template <int Mask = 16, int N>
DEVICE float warp_reduce_scatter(const float (&values)[N]) {
  static_assert(32 % N == 0);
  if constexpr (Mask == 0) {
    return values[0];
  } else if constexpr (N == 1) {
    const float sum[] = {values[0] + shuffle_xor(values[0], Mask)};
    return warp_reduce_scatter<Mask / 2>(sum);
  } else {
    const bool upper = lane_idx() & Mask;
    float sums[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const float given = upper ? values[i] : values[i + N / 2];
      sums[i] = (upper ? values[i + N / 2] : values[i]) + shuffle_xor(given, Mask);
    }
    return warp_reduce_scatter<Mask / 2>(sums);
  }
}

// A norm's vector, as a lane has it.
template <int Width>
struct LaneNormWeight {
  uint2 of[LaneVectors<Width>::count];

  template <int Hidden>
  DEVICE explicit LaneNormWeight(const NormWeight<Hidden>& vector) {
    copy_async_wait_all();
#pragma unroll
    for (int four = 0; four < LaneVectors<Width>::count; ++four)
      of[four] = vector.of[four][thread_idx()];
  }
};

// Puts down sums of squares of so many columns, of which those of the pass have a place.
template <int AtOnce, int MaxColumns>
DEVICE void store_squares(PartialSums<MaxColumns>& sums, const float (&squares)[AtOnce], int first,
                          int columns) {
  const float total = warp_reduce_scatter(squares);
  constexpr int kLanes = 32 / AtOnce;
  const int column = first + lane_idx() / kLanes;
  if (lane_idx() % kLanes == 0 && column < columns) sums.squares[column][warp_idx()] = total;
}

// x, which words bring, by a norm's vector, into place; the norm's number is `norm_scale`.
template <int Width, int N, int Hidden, int MaxColumns>
DEVICE_NOINLINE void load_normed_residual(const Params& p, const uint32_t* words,
                                          const NormWeight<Hidden>& vector, int columns,
                                          EpochTags tags, Phase phase,
                                          ActivationFragments<MaxColumns> (&fragments)[kNumSplits],
                                          PartialSums<MaxColumns>& sums) {
  if (MaxColumns == 1) columns = N;
  constexpr int kAtOnce = kColumnsPerLoad<N, LaneVectors<Width>::count>;
  const LaneNormWeight<Width> norm(vector);
  float squares[kAtOnce] = {};
  const ActivationWriter<MaxColumns> activations(fragments);
  wait_for_residual<Width, N, MaxColumns>(
      p, words, columns, tags, phase, sums.timed_out,
      [&](int first, int i, int four, float4 v) {
        squares[i] += square(v);
        activations.store(first + i, four, multiply(v, unpack_bf16x4(norm.of[four])));
      },
      [&](int first) {
        store_squares(sums, squares, first, columns);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) squares[i] = 0;
      });
}

// use(column, i, four, x) of columns first to last - 1, `AtOnce` at a time, where start(column, k)
// gives four elements; then after(column) for these.
template <int Width, int AtOnce, class Start, class Use, class After>
DEVICE void for_each_input(int first, int last, Start start, Use use, After after) {
#pragma unroll 1
  for (int c = first; c < last; c += AtOnce) {
#pragma unroll
    for (int four = 0; four < LaneVectors<Width>::count; ++four) {
      if (!LaneVectors<Width>::there(four)) continue;
      float4 v[AtOnce];
#pragma unroll
      for (int i = 0; i < AtOnce; ++i)
        v[i] = start(min(c + i, last - 1), LaneVectors<Width>::k(four));
#pragma unroll
      for (int i = 0; i < AtOnce; ++i) {
        if (c + i < last) use(c, i, four, v[i]);
      }
    }
    after(c);
  }
  sync_warp();
}

// What a pass starts with, by the first norm's vector, to where its first product takes it.
template <int Width, int AtOnce, class F, int Hidden, class Start>
DEVICE void load_normed_input(F& context, PartialSums<F::max_columns>& sums,
                              const NormWeight<Hidden>& vector, int first, int last, Start start) {
  const LaneNormWeight<Width> norm(vector);
  float squares[AtOnce] = {};
  const ActivationWriter<F::max_columns> activations(context.fragments);
  for_each_input<Width, AtOnce>(
      first, last, start,
      [&](int c, int i, int four, float4 v) {
        squares[i] += square(v);
        activations.store(c + i, four, multiply(v, unpack_bf16x4(norm.of[four])));
      },
      [&](int c) {
        store_squares(sums, squares, c, last);
#pragma unroll
        for (int i = 0; i < AtOnce; ++i) squares[i] = 0;
      });
}

// The rows of it that this block will add to.
template <class S, int N, class F, class Start>
DEVICE void store_residual_rows(F& context, ResidualRows<F::max_columns>& own, int columns,
                                Start start) {
  const RowGroupRange share = context.row_groups[kOut];
  for_each_result<N>(context, warp_uniform(share.count), [&](int row_group, int column, int row) {
    if (column >= columns) return;
    const int k = (share.first + row_group) * kRowGroupSize + row;
    const float4 four = start(column, k - k % 4);
    own.at(share, share.first + row_group, row, column) = k % 4 == 0   ? four.x
                                                          : k % 4 == 1 ? four.y
                                                          : k % 4 == 2 ? four.z
                                                                       : four.w;
  });
}

// What the layers start with is there.
template <class S, int N, int AtOnce, class F, int Hidden, class Start>
DEVICE void begin_layers(F& context, ResidualRows<F::max_columns>& own,
                         const NormWeight<Hidden>& vector, int columns, Start start) {
  load_normed_input<S::hidden_size, AtOnce>(context, context.sums[context.sums_idx], vector, 0,
                                            columns, start);
  store_residual_rows<S, N>(context, own, columns, start);
}

// How the lanes of a warp share pairs of halves that other blocks made, of so many steps and at
// most N columns: eight elements each, of eight steps of a column, or of four of two columns. A
// lane's first eight are at `column` and `step`, the others so many columns and steps further.
template <int Steps, int N>
struct PairVectors {
  static constexpr int beside = N > 1 && Steps % 8 == 4 ? 2 : 1;  // columns
  static constexpr int rows = 8 / beside;                         // steps
  static constexpr int each = (Steps + rows - 1) / rows;          // of a column
  static constexpr int count = kColumnsPerLoad<N / beside, each> * each;
  static constexpr int columns = count / each * beside;

  DEVICE static int column() { return lane_idx() / 16 % beside; }
  DEVICE static int step() { return lane_idx() / 4 % rows; }
  DEVICE static constexpr int columns_further(int i) { return i / each * beside; }
  DEVICE static constexpr int steps_further(int i) { return i % each * rows; }
};

// The steps from `first` on to where the product takes them.
template <int Width, int Steps, int N, int MaxColumns>
DEVICE_NOINLINE void load_pairs(const Params& p, const uint32_t* words, int split, int first,
                                int columns, EpochTags tags, Phase phase, int& timed_out,
                                ActivationFragments<MaxColumns>& fragments) {
  using E = PairVectors<Steps, N>;
  using Layout = PairExchangeLayout<Width, MaxColumns>;
  if (MaxColumns == 1) columns = N;
  constexpr bool kWhole = Steps % E::rows == 0 && Width % kStepK == 0;
  const int step = E::step(),
            k = (first + step) * kStepK + warp_idx() * kTileK + lane_idx() % 4 * 8;
  const PinnedAddress<uint4> to(
      fragments.num_steps[step][warp_idx()][4 * E::column() + lane_idx() % 4]);
#pragma unroll 1
  for (int c = 0; c < columns; c += E::columns) {
    const int column = c + E::column();
    uint4 v[E::count] = {};
    uint32_t wanted = 0;
#pragma unroll
    for (int i = 0; i < E::count; ++i) {
      const int further = E::steps_further(i);
      const bool there = kWhole || (step + further < Steps && k + further * kStepK < Width);
      const bool mine = there && column + E::columns_further(i) < columns;
      wanted |= static_cast<uint32_t>(mine) << i;
    }
    const uint32_t* from = words + Layout::index(column, (split * Width + k) / 2);
    wait_for_vectors(
        v, wanted,
        [&](int i) {
          return from + Layout::distance(E::columns_further(i), E::steps_further(i) * (kStepK / 2));
        },
        [&](int i, uint4 pairs) {
          return pairs_have_tag(pairs, tags.of(column + E::columns_further(i)));
        },
        SpinTimeout(p, phase, timed_out));
#pragma unroll
    for (int i = 0; i < E::count; ++i) {
      const int further = E::steps_further(i) * kNumWarps * 4 * kColumnCapacity<MaxColumns> +
                          4 * (c + E::columns_further(i));
      store_shared_if(wanted >> i & 1, *(to + further), untag_pairs(v[i]));
    }
  }
}

// x += W a, of the rows that this block keeps, and the sums to everybody.
template <class Matrix, int N, class F, class Fetch>
DEVICE bool project_and_add(F& context, Phase phase, ResidualRows<F::max_columns>& own, Fetch fetch,
                            uint32_t* words) {
  auto preload = [&](const RowGroupRange& share, const ProjectionResult& r) {
    return own.at(share, r.row_group, r.row, r.column);
  };
  auto store = [&](const ProjectionResult& r, float sum, const auto&, bool there) {
    const float x = r.preloaded + sum * kPairUnscale;
    const int at = FloatExchangeLayout<Matrix::rows, F::max_columns>::index(
        r.column, r.row_group * kRowGroupSize + r.row);
    store_relaxed_if(there, words + at, tag_value(x, context.tags.of(r.column)));
    if (there) own.at(context.row_groups[phase], r.row_group, r.row, r.column) = x;
  };
  return project<Matrix, N>(context, phase, fetch, store, preload);
}

// What the layers start with: words, or nothing, after `start_with`.
struct InputFromExchange {
  const uint32_t* values;
  EpochTags tags;
};
struct InputInPlace {};

// The layers, of at most N columns; false once anybody has given up. They end with the words of
// `down`. The first norm's vector has been asked for, and the last one is in the end.
template <class S, int N, class F, int Hidden, class From>
DEVICE bool run_layers(F& context, ResidualRows<F::max_columns>& own, NormWeight<Hidden>& vector,
                       const Network& n, const Column* columns, int count, From from) {
  const Params& p = context.p;
  const ExchangeBuffers& words = n.exchange;
  const int layers = warp_uniform(n.num_layers);
#pragma unroll 1
  for (int l = 0; l < layers; ++l) {
    constexpr int kNorms = 2 * S::hidden_size + 2 * kHeadDim;  // of a layer
    const auto norms = [&] { return n.layer_norms + l * kNorms; };
    const EpochTags before = context.tags;
    context.tags.advance(count);
    const EpochTags& tags = context.tags;

    if constexpr (!S::short_context && F::max_columns == 1)
      prefetch_keys_values<S>(p, n, l, columns, count);
    auto normed = [&](int, auto& sums) {
      const uint32_t* x = words.mlp_residual;
      EpochTags its = before;
      if (l == 0) {
        if constexpr (std::is_same_v<From, InputInPlace>)
          return;
        else
          x = from.values, its = from.tags;
      }
      load_normed_residual<S::hidden_size, N>(p, x, vector, count, its, kDown, context.fragments,
                                              sums);
    };
    uint32_t* const qkv_words = words.qkv;
    const float eps = n.eps;
    auto qkv = [&](const ProjectionResult& r, float sum, const auto& sums, bool there) {
      const float value = sum * rms_norm_scale<S::hidden_size>(sums, r.column, eps);
      const int at = r.column * S::Qkv::rows + qkv_index<S>(r.row_group * kRowGroupSize + r.row);
      store_relaxed_if(there, qkv_words + at, tag_value(value, tags.of(r.column)));
    };
    if (!project<typename S::Qkv, N>(context, kQkv, normed, qkv)) return false;

    vector.template load_async<S::hidden_size>(norms() + S::hidden_size);
    const bf16* head_norms = norms() + 2 * S::hidden_size;
    constexpr bool kLocalAttention =
        S::short_context && F::max_columns == 1;  // attention is part of the product
    if constexpr (!S::short_context) attend<S>(context, n, l, head_norms, columns, count);
    if constexpr (S::short_context && !kLocalAttention)
      attend_short_distributed<S>(context, n, l, head_norms, columns, count);

    auto attended = [&](int first, auto& sums) {
      if constexpr (kLocalAttention)
        attend_short_local<S, N>(context, n, l, head_norms, columns, sums.timed_out);
      else
        for_each_split([&](int split) {
          load_pairs<S::query_size, S::Out::template chunk_steps<F::max_columns>, N>(
              p, words.attention_output, split, first, count, tags, kAttention, sums.timed_out,
              context.fragments[split]);
        });
    };
    if (!project_and_add<typename S::Out, N>(context, kOut, own, attended,
                                             words.attention_residual))
      return false;

    auto normed_again = [&](int, auto& sums) {
      load_normed_residual<S::hidden_size, N>(p, words.attention_residual, vector, count, tags,
                                              kOut, context.fragments, sums);
    };
    // A unit is four rows of gate, then the same four of up. Neighbouring lanes have its rows.
    auto gated = [&](const ProjectionResult& r, float sum, const auto& sums, bool there) {
      const float own = sum * rms_norm_scale<S::hidden_size>(sums, r.column, eps);
      const float up = shuffle_xor(own, kRowGroupSize / 2);
      const float value = own * approx_reciprocal(1 + expf(-own)) * up;
      const float next = shuffle_xor(value, 1);
      const bool made = there && r.row < kRowGroupSize / 2;
      store_relaxed_if(made && !fits_in_pair(value),
                       p.non_finite + (F::max_columns > 1 ? r.column : 0), 1);
      const int word = (r.row_group * (kRowGroupSize / 2) + r.row) / 2;
      for_each_split([&](int split) {
        using Layout = PairExchangeLayout<S::intermediate_size, F::max_columns>;
        const int at = Layout::index(r.column, split * (S::intermediate_size / 2) + word);
        store_relaxed_if(made && r.row % 2 == 0, words.mlp_hidden + at,
                         tag_pair(split_remainder(value, split), split_remainder(next, split),
                                  tags.of(r.column)));
      });
    };
    if (!project<typename S::GateUp, N>(context, kGateUp, normed_again, gated)) return false;
    vector.template load_async<S::hidden_size>(l + 1 < layers ? norms() + kNorms : n.final_norm);

    auto middle = [&](int first, auto& sums) {
      for_each_split([&](int split) {
        load_pairs<S::intermediate_size, S::Down::template chunk_steps<F::max_columns>, N>(
            p, words.mlp_hidden, split, first, count, tags, kGateUp, sums.timed_out,
            context.fragments[split]);
      });
    };
    // Keys and values of the pass, before anything that a later one hears of.
    if (l + 1 == layers) thread_fence();
    if (!project_and_add<typename S::Down, N>(context, kDown, own, middle, words.mlp_residual))
      return false;
  }
  return true;
}

}  // namespace megakernel
