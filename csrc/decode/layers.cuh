// A decoder stack. For each layer, with the residual x [columns, hidden]:
//   qkv        q, k, v = W_qkv norm(x)
//   attention  a = attention(q, k, v)              (attention.cuh, short_attention.cuh)
//   out        x += W_out a
//   gate_up    g, u = W_gate_up norm(x),  m = silu(g) u
//   down       x += W_down m
//
// A thread block owns rows of x. It adds its rows of `out` and `down` to them in float32, and
// exchanges the sums.
#pragma once

#include "activations.cuh"
#include "short_attention.cuh"

namespace megakernel {

// --- static asserts ---

static_assert(kRowGroupSize == 8, "a row group of gate_up has four rows of gate and four of up");

// --- shared memory ---

// The rows of the residual that a thread block owns, [rows, columns].
template <int MaxColumns>
struct ResidualRows {
  float values[kMaxResidualRowGroups * kRowGroupSize][kColumnCapacity<MaxColumns>];

  // Row `row` of a row group, of the row groups that the thread block owns.
  DEVICE float& at(const RowGroupRange& row_groups, int row_group, int row, int column) {
    return values[(row_group - row_groups.first) * kRowGroupSize + row][column];
  }
};

// --- warp roles ---

// All compute warps run every phase of a layer. The copy warp copies the weights in the same order.

// --- body: the input of a stack ---

// The first layer's input was written by `begin_layers`.
struct InputInPlace {};

// The first layer's input is an exchanged residual.
struct InputFromExchange {
  const uint32_t* values;
  EpochTags epoch_tags;
};

// Stores this thread block's rows of the input [columns, hidden], input(column, k), in `residual`.
template <class S, int NumColumns, class Context, class Input>
DEVICE void store_residual_rows(Context& context, ResidualRows<Context::max_columns>& residual,
                                int num_columns, Input input) {
  const RowGroupRange row_groups = context.row_groups[kOut];
  for_each_result<NumColumns>(
      context, warp_uniform(row_groups.count), [&](int row_group, int column, int row) {
        if (column >= num_columns) return;
        const int k = (row_groups.first + row_group) * kRowGroupSize + row;
        const float4 v = input(column, k - k % 4);
        residual.at(row_groups, row_groups.first + row_group, row, column) = k % 4 == 0   ? v.x
                                                                             : k % 4 == 1 ? v.y
                                                                             : k % 4 == 2 ? v.z
                                                                                          : v.w;
      });
}

// Loads the input of the first layer [columns, hidden], input(column, k), in every thread block:
// its products with the first norm's weight into the fragments, this block's rows into `residual`.
template <class S, int NumColumns, int Batch, class Context, int Hidden, class Input>
DEVICE void begin_layers(Context& context, ResidualRows<Context::max_columns>& residual,
                         const NormWeight<Hidden>& weight, int num_columns, Input input) {
  load_normed_input<S::hidden_size, Batch>(context, context.sums[context.sums_idx], weight, 0,
                                           num_columns, input);
  store_residual_rows<S, NumColumns>(context, residual, num_columns, input);
}

// --- body: the layers ---

// x += W a, for the rows that this thread block owns. `load` loads a [columns, Shape::k], which has
// the scale of exchanged pairs. Writes x to `output`, float layout [columns, Shape::rows].
template <class Shape, int NumColumns, class Context, class Load>
DEVICE bool project_and_add(Context& context, Phase phase,
                            ResidualRows<Context::max_columns>& residual, Load load,
                            uint32_t* output) {
  auto preload = [&](const RowGroupRange& row_groups, const ProjectionResult& r) {
    return residual.at(row_groups, r.row_group, r.row, r.column);
  };
  auto store = [&](const ProjectionResult& r, float sum, const auto&, bool valid) {
    const float x = r.preloaded + sum * kPairUnscale;
    const int at = FloatExchangeLayout<Shape::rows, Context::max_columns>::index(
        r.column, r.row_group * kRowGroupSize + r.row);
    store_relaxed_if(valid, output + at, tag_value(x, context.epoch_tags.of(r.column)));
    if (valid) residual.at(context.row_groups[phase], r.row_group, r.row, r.column) = x;
  };
  return project<Shape, NumColumns>(context, phase, load, store, preload);
}

// Runs all layers for a pass of at most `NumColumns` columns; returns false after a timeout. Writes
// exchange.mlp_residual, float layout [columns, hidden]. `weight` [hidden] is the first norm's
// weight at the beginning, which is still loading, and the final norm's at the end.
template <class S, int NumColumns, class Context, int Hidden, class Source>
DEVICE bool run_layers(Context& context, ResidualRows<Context::max_columns>& residual,
                       NormWeight<Hidden>& weight, const Network& n, const Column* columns,
                       int num_columns, Source source) {
  constexpr int kMaxColumns = Context::max_columns;
  constexpr int kNormSize = 2 * S::hidden_size + 2 * kHeadDim;            // norm weights of a layer
  constexpr bool kLocalAttention = S::short_context && kMaxColumns == 1;  // computed within `out`
  const Params& p = context.p;
  const ExchangeBuffers& exchange = n.exchange;
  const int num_layers = warp_uniform(n.num_layers);
#pragma unroll 1
  for (int layer = 0; layer < num_layers; ++layer) {
    const auto norms = [&] { return n.layer_norms + layer * kNormSize; };
    const EpochTags previous_tags = context.epoch_tags;
    context.epoch_tags.advance(num_columns);
    const EpochTags& epoch_tags = context.epoch_tags;

    // qkv: q, k, v = W_qkv norm(x), to exchange.qkv.
    if constexpr (!S::short_context && kMaxColumns == 1) {
      prefetch_keys_values<S>(p, n, layer, columns, num_columns);
    }
    auto load_input = [&](int, auto& sums) {
      const uint32_t* x = exchange.mlp_residual;
      EpochTags x_tags = previous_tags;
      Phase x_phase = kDown;
      if (layer == 0) {
        if constexpr (std::is_same_v<Source, InputInPlace>)
          return;
        else
          x = source.values, x_tags = source.epoch_tags, x_phase = kInputProjection;
      }
      load_normed_residual<S::hidden_size, NumColumns>(p, x, weight, num_columns, x_tags, x_phase,
                                                       context.fragments, sums);
    };
    uint32_t* const qkv = exchange.qkv;
    const float eps = n.eps;
    auto store_qkv = [&](const ProjectionResult& r, float sum, const auto& sums, bool valid) {
      const float value = sum * rms_norm_scale<S::hidden_size>(sums, r.column, eps);
      const int at = r.column * S::Qkv::rows + qkv_index<S>(r.row_group * kRowGroupSize + r.row);
      store_relaxed_if(valid, qkv + at, tag_value(value, epoch_tags.of(r.column)));
    };
    if (!project<typename S::Qkv, NumColumns>(context, kQkv, load_input, store_qkv)) return false;
    weight.template load_async<S::hidden_size>(norms() + S::hidden_size);

    // attention: a = attention(q, k, v), to exchange.attention_output or within `out`.
    const bf16* head_norms = norms() + 2 * S::hidden_size;
    if constexpr (!S::short_context) {
      attend<S>(context, n, layer, head_norms, columns, num_columns);
    } else if constexpr (!kLocalAttention) {
      attend_short_distributed<S>(context, n, layer, head_norms, columns, num_columns);
    }

    // out: x += W_out a, to exchange.attention_residual.
    auto load_attention = [&](int first_step, auto& sums) {
      if constexpr (kLocalAttention) {
        attend_short_local<S, NumColumns>(context, n, layer, head_norms, columns, sums.timed_out);
      } else {
        for_each_split([&](int split) {
          load_pairs<S::query_size, S::Out::template chunk_steps<kMaxColumns>, NumColumns>(
              p, exchange.attention_output, split, first_step, num_columns, epoch_tags, kAttention,
              sums.timed_out, context.fragments[split]);
        });
      }
    };
    if (!project_and_add<typename S::Out, NumColumns>(context, kOut, residual, load_attention,
                                                      exchange.attention_residual)) {
      return false;
    }

    // gate_up: m = silu(W_gate norm(x)) (W_up norm(x)), to exchange.mlp_hidden. A row group has
    // four rows of gate, then the same four of up, in neighbouring lanes.
    auto load_residual = [&](int, auto& sums) {
      load_normed_residual<S::hidden_size, NumColumns>(p, exchange.attention_residual, weight,
                                                       num_columns, epoch_tags, kOut,
                                                       context.fragments, sums);
    };
    auto store_hidden = [&](const ProjectionResult& r, float sum, const auto& sums, bool valid) {
      const float gate = sum * rms_norm_scale<S::hidden_size>(sums, r.column, eps);
      const float up = shuffle_xor(gate, kRowGroupSize / 2);
      const float value = gate * approx_reciprocal(1 + expf(-gate)) * up;
      const float next = shuffle_xor(value, 1);
      const bool is_gate = valid && r.row < kRowGroupSize / 2;
      store_relaxed_if(is_gate && !fits_in_pair(value),
                       p.non_finite + (kMaxColumns > 1 ? r.column : 0), 1);
      const int pair = (r.row_group * (kRowGroupSize / 2) + r.row) / 2;
      for_each_split([&](int split) {
        using Layout = PairExchangeLayout<S::intermediate_size, kMaxColumns>;
        const int at = Layout::index(r.column, split * (S::intermediate_size / 2) + pair);
        store_relaxed_if(is_gate && r.row % 2 == 0, exchange.mlp_hidden + at,
                         tag_pair(split_remainder(value, split), split_remainder(next, split),
                                  epoch_tags.of(r.column)));
      });
    };
    if (!project<typename S::GateUp, NumColumns>(context, kGateUp, load_residual, store_hidden)) {
      return false;
    }
    weight.template load_async<S::hidden_size>(layer + 1 < num_layers ? norms() + kNormSize
                                                                      : n.final_norm);

    // down: x += W_down m, to exchange.mlp_residual.
    auto load_hidden = [&](int first_step, auto& sums) {
      for_each_split([&](int split) {
        load_pairs<S::intermediate_size, S::Down::template chunk_steps<kMaxColumns>, NumColumns>(
            p, exchange.mlp_hidden, split, first_step, num_columns, epoch_tags, kGateUp,
            sums.timed_out, context.fragments[split]);
      });
    };
    // Orders the pass's keys and values before the results that later passes depend on.
    if (layer + 1 == num_layers) thread_fence();
    if (!project_and_add<typename S::Down, NumColumns>(context, kDown, residual, load_hidden,
                                                       exchange.mlp_residual)) {
      return false;
    }
  }
  return true;
}

}  // namespace megakernel
