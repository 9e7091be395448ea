// A decoder stack of a wide kernel: the phases of layers.cuh, with other exchanges.
//
// The thread block that owns rows of the residual x multiplies them by the weight of the next norm
// and exchanges the products as bf16 pairs, which all thread blocks read. It exchanges x itself in
// float32 for one thread block per column, which computes and exchanges 1 / rms(x). The factor is
// applied to a projection's results.
#pragma once

#include "layers.cuh"
#include "wide_attention.cuh"
#include "wide_projection.cuh"

namespace megakernel {

// --- static asserts ---

static_assert(kRowGroupSize == 8, "a row group of gate_up has four rows of gate and four of up");

// --- shared memory ---

// `WideSums` of wide_projection.cuh; `ResidualRows` of layers.cuh.

// --- warp roles ---

// All compute warps run every phase of a layer. The copy warp copies the weights in the same order.

// The uses of a network's exchange buffers that are not counted by layers.
struct WideTags {
  EpochTags residual;  // of mlp_residual
  EpochTags input;     // of mlp_normed and mlp_scales
};

// --- body: scales ---

// The scale 1 / rms of a column is exchanged in four values, with 16 bits of it in each.
DEVICE uint32_t tag_scale(float scale, int value, uint32_t tag) {
  const uint32_t bits = as_bits(scale);
  return (value % 2 == 0 ? bits & 0xFFFF0000u : bits << 16) | tag;
}
DEVICE float untag_scale(uint4 v) { return as_float((v.x & 0xFFFF0000u) | v.y >> 16); }

// Computes and exchanges 1 / rms(x) of the columns that this thread block serves: one of the last,
// with the fewest row groups. load(c, x) loads the lane's vectors of column c; all lanes call it.
// The order of additions is that of `rms_norm_scale`.
template <int Width, class Context, class Load>
DEVICE void exchange_scales(Context& context, uint32_t* scales, uint32_t tag, float eps,
                            Load load) {
  constexpr int kNumVectors = LaneVectors<Width>::count;
#pragma unroll 1
  for (int c = num_blocks() - 1 - block_idx(); c < context.num_pass_columns; c += num_blocks()) {
    float4 x[kNumVectors];
    load(c, x);
    float squares = 0;
#pragma unroll
    for (int i = 0; i < kNumVectors; ++i) {
      if (LaneVectors<Width>::valid(i)) squares += square(x[i]);
    }
    squares = warp_sum(squares);
    if (lane_idx() == 0) context.sums.squares[warp_idx()] = squares;
    sync_compute_threads();
    float total = 0;
#pragma unroll
    for (int w = 0; w < kNumWarps; ++w) total += context.sums.squares[w];
    const float scale = rsqrtf(total / Width + eps);
    store_relaxed_if(thread_idx() < 4, scales + 4 * c + thread_idx() % 4,
                     tag_scale(scale, thread_idx() % 4, tag));
    sync_compute_threads();  // the next column overwrites the sums
  }
}

// Waits for the lane's vectors of column c of an exchanged x, float layout [columns, Width].
template <int Width, int MaxColumns, class Context>
DEVICE void load_residual_vectors(Context& context, const uint32_t* values, uint32_t tag,
                                  Phase source, int c, float4 (&x)[LaneVectors<Width>::count]) {
  constexpr int kNumVectors = LaneVectors<Width>::count;
  uint4 v[kNumVectors] = {};
  uint32_t missing = 0;
#pragma unroll
  for (int i = 0; i < kNumVectors; ++i) {
    missing |= static_cast<uint32_t>(LaneVectors<Width>::valid(i)) << i;
  }
  const uint32_t* from =
      values + FloatExchangeLayout<Width, MaxColumns>::index(c, LaneVectors<Width>::k(0));
  wait_for_vectors<FloatValues>(
      v, missing, [&](int i) { return from + i * 4 * kStepK; }, [&](int) { return tag; },
      SpinTimeout(context.p, source, context.timed_out()));
#pragma unroll
  for (int i = 0; i < kNumVectors; ++i) x[i] = untag(v[i]);
}

// `exchange_scales` for an exchanged x, float layout [columns, Width].
template <int Width, int MaxColumns, class Context>
DEVICE void exchange_residual_scales(Context& context, const uint32_t* values, uint32_t values_tag,
                                     Phase source, uint32_t* scales, uint32_t tag, float eps) {
  constexpr int kNumVectors = LaneVectors<Width>::count;
  exchange_scales<Width>(context, scales, tag, eps, [&](int c, float4(&x)[kNumVectors]) {
    load_residual_vectors<Width, MaxColumns>(context, values, values_tag, source, c, x);
  });
}

// Waits for the scales of all columns and keeps them in shared memory, for use after a barrier.
template <class Context>
DEVICE void wait_for_scales(Context& context, const uint32_t* scales, uint32_t tag, Phase source) {
  const int column = thread_idx();
  if (warp_uniform(column / 32 * 32 >= Context::max_columns)) return;
  const uint4 v = wait_for_values(scales + 4 * min(column, context.num_pass_columns - 1), tag,
                                  SpinTimeout(context.p, source, context.timed_out()));
  if (column < Context::max_columns) context.sums.scales[column] = untag_scale(v);
}

// --- body: the input of a stack ---

// Stores a normed element of a column in operand layout. Neighbouring lanes have neighbouring rows.
template <int MaxColumns>
DEVICE void store_normed(const Params& p, uint32_t* normed, int column, int k, float value,
                         uint32_t tag, bool valid) {
  const float next = shuffle_xor(value, 1);
  store_relaxed_if(valid && !fits_in_pair(value), p.non_finite + column, 1);
  store_relaxed_if(valid && k % 2 == 0, normed + OperandLayout<MaxColumns>::index(column, k / 2),
                   tag_pair(value, next, tag));
}

// Calls act(result, x, valid) for the elements of row groups of an input [columns, rows], where
// input(column, k) are its elements k to k + 3. All lanes call both.
template <class Context, class Input, class Act>
DEVICE void for_each_input_row(Context& context, RowGroupRange row_groups, Input input, Act act) {
  const auto columns = context.rounded_columns();
  const int num_results = warp_uniform(row_groups.count) * kRowGroupSize * columns.count();
#pragma unroll 1
  for (int whole = 32 * uniform_warp_idx(); whole < num_results; whole += kNumThreads) {
    const int i = whole + lane_idx();
    const WideResult r = wide_result_of(i, row_groups.first, row_groups.count, columns);
    const bool valid = i < num_results && r.column < context.num_pass_columns;
    const float4 v = input(min(r.column, context.num_pass_columns - 1), r.k - r.k % 4);
    act(r, r.k % 4 == 0 ? v.x : r.k % 4 == 1 ? v.y : r.k % 4 == 2 ? v.z : v.w, valid);
  }
}

// Begins a pass with the input x [columns, hidden], input(column, k): exchanges the products with
// the weight of a norm and the scales. Sets this thread block's rows of the residual.
template <class S, class Context, class Input>
DEVICE void begin_wide_layers(Context& context, const WideBuffers& buffers, const bf16* norm,
                              float eps, WideTags& tags, Input input) {
  tags.input.advance(context.num_pass_columns);
  const uint32_t tag = tags.input.of(0);
  const RowGroupRange row_groups = context.row_groups[kOut];
  for_each_input_row(context, row_groups, input, [&](const WideResult& r, float x, bool valid) {
    store_normed<Context::max_columns>(context.p, buffers.mlp_normed, r.column, r.k,
                                       x * to_float(norm[r.k]), tag, valid);
    if (valid) context.residual.at(row_groups, r.row_group, r.row, r.column) = x;
  });
  constexpr int kNumVectors = LaneVectors<S::hidden_size>::count;
  exchange_scales<S::hidden_size>(
      context, buffers.mlp_scales, tag, eps, [&](int c, float4(&x)[kNumVectors]) {
#pragma unroll
        for (int i = 0; i < kNumVectors; ++i) {
          x[i] = input(c, min(LaneVectors<S::hidden_size>::k(i), S::hidden_size - 4));
        }
      });
}

// --- body: the layers ---

// What a result of `out` or `down` is added to, and the weight of the next norm.
struct ResidualOperand {
  float x, norm;
};

// x += W a, for the rows that this thread block owns. Reads a in operand layout [columns,
// Shape::k]. If the result `has_reader`, writes finish(column, k, x) to `residual`, float layout
// [columns, Shape::rows], and its product with `norm` to `normed`, in operand layout.
template <class Shape, class Context, class Finish>
DEVICE bool project_wide_and_add(Context& context, Phase phase, WideInput input, const bf16* norm,
                                 uint32_t* residual, uint32_t residual_tag, uint32_t* normed,
                                 uint32_t normed_tag, bool has_reader, Finish finish) {
  constexpr int kMaxColumns = Context::max_columns;
  const RowGroupRange row_groups = context.row_groups[phase];
  auto preload = [&](const WideResult& r) {
    return ResidualOperand{context.residual.at(row_groups, r.row_group, r.row, r.column),
                           to_float(norm[r.k])};
  };
  auto store = [&](const WideResult& r, float sum, ResidualOperand operand, bool valid) {
    valid = valid && has_reader;
    float x = operand.x + sum * kPairUnscale;
    if (valid) context.residual.at(row_groups, r.row_group, r.row, r.column) = x;
    const uint32_t tagged = tag_value(finish(r.column, r.k, x, valid), residual_tag);
    const int at = FloatExchangeLayout<Shape::rows, kMaxColumns>::index(r.column, r.k);
    store_relaxed_if(valid, residual + at, tagged);
    store_normed<kMaxColumns>(context.p, normed, r.column, r.k, untag(tagged) * operand.norm,
                              normed_tag, valid);
  };
  return project_wide<Shape, 1>(context, phase, input, [] {}, preload, store);
}

// Runs all layers for a pass; returns false after a timeout. Reads mlp_normed and mlp_scales; if
// `InputIsExchanged`, the scales are still to be computed from mlp_residual. With `HasPrompts`,
// several columns may have one slot. Writes mlp_residual and mlp_normed, with the weight of the
// final norm, but not at the predictor's position 0, which has no head. finish(column, k, x, valid)
// returns the last layer's residual.
template <class S, bool InputIsExchanged, bool HasPrompts = false, class Context, class Finish>
DEVICE bool run_wide_layers(Context& context, const Network& n, const WideBuffers& buffers,
                            WideTags& tags, const Column* columns, Finish finish) {
  constexpr int kMaxColumns = Context::max_columns;
  constexpr int kNormSize = 2 * S::hidden_size + 2 * kHeadDim;  // norm weights of a layer
  const Params& p = context.p;
  const ExchangeBuffers& exchange = n.exchange;
  const int num_layers = warp_uniform(n.num_layers), num_columns = context.num_pass_columns;
  const float eps = n.eps;
  auto no_preload = [](const WideResult&) { return 0; };
  if constexpr (InputIsExchanged) {
    exchange_residual_scales<S::hidden_size, kMaxColumns>(
        context, exchange.mlp_residual, tags.residual.of(0), kInputProjection, buffers.mlp_scales,
        tags.input.of(0), eps);
  }
#pragma unroll 1
  for (int layer = 0; layer < num_layers; ++layer) {
    const bf16* norms = n.layer_norms + layer * kNormSize;
    context.epoch_tags.advance(num_columns);
    const uint32_t tag = context.epoch_tags.of(0), input_tag = tags.input.of(0);

    // qkv: q, k, v = W_qkv norm(x), to exchange.qkv.
    if (layer > 0) {
      exchange_residual_scales<S::hidden_size, kMaxColumns>(context, exchange.mlp_residual,
                                                            tags.residual.of(0), kDown,
                                                            buffers.mlp_scales, input_tag, eps);
    }
    auto store_qkv = [&](const WideResult& r, float sum, int, bool valid) {
      const float value = sum * kPairUnscale * context.sums.scales[r.column];
      const int at = r.column * S::Qkv::rows + qkv_index<S>(r.k);
      store_relaxed_if(valid, exchange.qkv + at, tag_value(value, tag));
    };
    if (!project_wide<typename S::Qkv, 4>(
            context, kQkv, WideInput{buffers.mlp_normed, input_tag, kDown},
            [&] { wait_for_scales(context, buffers.mlp_scales, input_tag, kDown); }, no_preload,
            store_qkv)) {
      return false;
    }

    // attention: a = attention(q, k, v), to exchange.attention_output.
    const bf16* head_norms = norms + 2 * S::hidden_size;
    if constexpr (S::short_context) {
      attend_short_distributed<S>(context, n, layer, head_norms, columns, num_columns);
    } else if constexpr (HasPrompts) {
      attend_prompts<S>(context, n, buffers, layer, head_norms, columns, num_columns);
    } else {
      attend_wide<S>(context, n, layer, head_norms, columns, num_columns);
    }

    // out: x += W_out a, to exchange.attention_residual and attention_normed.
    auto keep = [](int, int, float x, bool) { return x; };
    if (!project_wide_and_add<typename S::Out>(
            context, kOut, WideInput{exchange.attention_output, tag, kAttention},
            norms + S::hidden_size, exchange.attention_residual, tag, buffers.attention_normed, tag,
            true, keep)) {
      return false;
    }

    // gate_up: m = silu(W_gate norm(x)) (W_up norm(x)), to exchange.mlp_hidden. A row group has
    // four rows of gate, then the same four of up, in neighbouring lanes.
    exchange_residual_scales<S::hidden_size, kMaxColumns>(context, exchange.attention_residual, tag,
                                                          kOut, buffers.attention_scales, tag, eps);
    auto store_hidden = [&](const WideResult& r, float sum, int, bool valid) {
      const float gate = sum * kPairUnscale * context.sums.scales[r.column];
      const float up = shuffle_xor(gate, kRowGroupSize / 2);
      const float value = gate * approx_reciprocal(1 + expf(-gate)) * up;
      store_normed<kMaxColumns>(p, exchange.mlp_hidden, r.column,
                                r.row_group * (kRowGroupSize / 2) + r.row, value, tag,
                                valid && r.row < kRowGroupSize / 2);
    };
    if (!project_wide<typename S::GateUp, 4>(
            context, kGateUp, WideInput{buffers.attention_normed, tag, kOut},
            [&] { wait_for_scales(context, buffers.attention_scales, tag, kOut); }, no_preload,
            store_hidden)) {
      return false;
    }

    // down: x += W_down m, to exchange.mlp_residual and mlp_normed.
    const bool is_last = layer + 1 == num_layers;
    // Orders the pass's keys and values before the results that later passes depend on.
    if (is_last) thread_fence();
    // Not a parameter: a register that lives through all layers is spilled.
    const bool has_reader = !S::short_context || !is_last || columns[0].position > 0;
    if (has_reader) tags.residual.advance(num_columns), tags.input.advance(num_columns);
    auto finish_last = [&](int column, int k, float x, bool valid) {
      return is_last ? finish(column, k, x, valid) : x;
    };
    if (!project_wide_and_add<typename S::Down>(
            context, kDown, WideInput{exchange.mlp_hidden, tag, kGateUp},
            is_last ? n.final_norm : norms + kNormSize, exchange.mlp_residual, tags.residual.of(0),
            buffers.mlp_normed, tags.input.of(0), has_reader, finish_last)) {
      return false;
    }
  }
  return true;
}

}  // namespace megakernel
