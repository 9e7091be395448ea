// The generation kernel: frame > network > phase.
//
//   talker:     x = sum of the last frame's 16 code embeddings + a text vector;  h = layers(x)
//   head:       code 0 ~ sample(W_head norm(h))
//   predictor:  pass 0 with input norm(h), pass i with the embedding of code i - 1;
//               code i ~ sample(W_head_i norm(layers(.))), i = 1 to 15
//   publish:    the 16 codes go to the memory that the host reads.
// With one stream the predictor's passes 0 and 1 are one pass of two positions. If the talker is
// wider than the predictor, the phase `input_projection` precedes the predictor's layers.
#pragma once

#include "stream_context.cuh"

namespace megakernel {

// --- static asserts ---

static_assert(kIsWide || kMaxStreams <= 32, "a lane updates a stream");

// --- shared memory ---

// `SharedMemory` of shared_memory.cuh, from the first frame of a launch to the last.

// --- warp roles ---

// Compute warps: all phases. Every warp has its own copy of the streams' states.
// Copy warp: all weights of a frame in the order of use, frame after frame (`frame_weights`).

// The compute warps' work, for at most `MaxColumns` streams. Stream c has column c of every pass.
// Functions that run phases return false after a timeout.
template <class M, int MaxColumns>
class FrameGenerator : StreamContext<M, MaxColumns> {
  using Base = StreamContext<M, MaxColumns>;
  using typename Base::Predictor;
  using typename Base::Talker;

 public:
  // Called by all compute threads.
  DEVICE FrameGenerator(const Params& p, SharedMemory<M, MaxColumns>& shared) : Base(p, shared) {}

  // Generates frames until no stream is active or the launch has its maximum.
  DEVICE void run() {
    begin_streams();
    load_next_norm(kNumCodeGroups - 1);
#pragma unroll 1
    for (int frame = 0; frame < p_.max_frames && any_active(); ++frame) {
      if (!generate_frame(frame)) break;
    }
    finish();
  }

 private:
  static constexpr int kTalkerPass = -1;

  // Generates a frame: the talker's pass, then the predictor's passes 0 to 15.
  DEVICE bool generate_frame(int frame) {
    begin_pass(num_streams());
#pragma unroll 1
    for (int pass = kTalkerPass; pass < kNumCodeGroups;
         pass += pass == kTalkerPass ? kFirstPassPositions<MaxColumns> : 1) {
      context_.row_groups = pass == kTalkerPass ? s_.talker_row_groups : s_.predictor_row_groups;
      if (pass == kNumCodeGroups - 1) poll_stop_flags();
      if (!(pass == kTalkerPass ? run_talker(frame) : run_predictor(pass)) || !run_head(pass)) {
        return false;
      }
      load_next_norm(pass);
      if (pass != 0) sample_code(pass == kTalkerPass ? 0 : pass);
    }
    return true;
  }

  // Computes the logits of a pass, [streams, rows of the head]; pass 0 of the predictor has none.
  DEVICE bool run_head(int pass) {
    if (pass == kTalkerPass) return run_talker_head();
    // A thread block without rows of the head waits for the end of the layers here. The wait orders
    // the keys and values of this pass before the reads of the next pass.
    if (pass == 0 || warp_uniform(context_.row_groups[kHead].count) == 0) {
      wait_for_residual<Predictor::hidden_size, MaxColumns, MaxColumns>(
          p_, s_.predictor.exchange.mlp_residual, num_streams(), predictor_tags_, kDown,
          context_.timed_out(), [](int, int, int, float4) {}, [](int) {});
    }
    return pass == 0 || run_predictor_head(pass);
  }

  // Starts to load the weight of the first norm of the pass after `pass`.
  DEVICE void load_next_norm(int pass) {
    if (pass == kNumCodeGroups - 1) {
      Base::template load_norm<Talker::hidden_size>(s_.talker.layer_norms);
    } else {
      Base::template load_norm<Predictor::hidden_size>(s_.predictor.layer_norms);
    }
  }

  // Whether a pass consists of the positions 0 and 1 of one stream.
  DEVICE static bool has_two_positions(int pass) {
    return kFirstPassPositions<MaxColumns> == 2 && pass == 1;
  }

  // Runs the layers of a network. The tags are copied, because a reference into this object would
  // force all of it into local memory.
  template <class S, int NumColumns, class Source>
  DEVICE bool run_network(const Network& n, EpochTags& epoch_tags, int num_columns, Source source) {
    context_.epoch_tags = epoch_tags;
    const bool ok = run_layers<S, NumColumns>(context_, s_.residual, s_.norm, n, pass_columns(),
                                              num_columns, source);
    epoch_tags = context_.epoch_tags;
    return ok;
  }

  // --- the talker ---

  // The talker's pass, unless all streams start from their prompt. Reads talker_input [streams,
  // hidden], writes the talker's mlp_residual [streams, hidden].
  DEVICE bool run_talker(int frame) {
    set_talker_columns(frame);
    if (!any_talker_active()) {
      Base::template load_norm<Talker::hidden_size>(s_.talker.final_norm);
      return true;
    }
    const auto input = [&](int c, int k) { return talker_input(c, k); };
    begin_layers<Talker, MaxColumns, 1>(context_, s_.residual, s_.norm, num_streams(), input);
    return run_network<Talker, MaxColumns>(s_.talker, talker_tags_, num_streams(), InputInPlace());
  }

  // Elements k to k + 3 of column c of the talker's final residual [streams, hidden]. A stream that
  // starts from its prompt has the residual of the prefill.
  DEVICE float4 talker_hidden(int c, int k) {
    const size_t slot = s_.streams[c].slot;
    const void* at = s_.talker.exchange.mlp_residual +
                     FloatExchangeLayout<Talker::hidden_size, MaxColumns>::index(c, k);
    if (stream_states()[c].starts_from_prompt)
      at = p_.prompt_hidden + slot * Talker::hidden_size + k;
    return untag(load_relaxed(static_cast<const uint4*>(at)));
  }

  // Reads talker_hidden [streams, hidden], writes the talker's logits [streams, vocab].
  DEVICE bool run_talker_head() {
    const bool any = any_talker_active();
    auto load = [&](int, auto& sums) {
      if (any) {
        load_normed_residual<Talker::hidden_size, MaxColumns>(p_, s_.talker.exchange.mlp_residual,
                                                              s_.norm, num_streams(), talker_tags_,
                                                              kDown, s_.fragments, sums);
      }
      for (int c = 0; c < num_streams(); ++c) {
        if (!warp_uniform(stream_states()[c].starts_from_prompt)) continue;
        load_normed_input<Talker::hidden_size, 1>(
            context_, sums, s_.norm, c, c + 1, [&](int c, int k) { return talker_hidden(c, k); });
      }
    };
    return project_head<typename M::TalkerHead>(s_.talker, talker_head_tags_, load);
  }

  // logits = W norm(x): reads x [columns, Shape::k], writes exchange.logits [columns, Shape::rows].
  template <class Shape, class Load>
  DEVICE bool project_head(const Network& n, EpochTags& epoch_tags, Load load) {
    epoch_tags.advance(num_streams());
    auto store = [&](const ProjectionResult& r, float sum, const auto& sums, bool valid) {
      const float value = sum * rms_norm_scale<Shape::k>(sums, r.column, n.eps);
      const int at = r.column * Shape::rows + r.row_group * kRowGroupSize + r.row;
      store_relaxed_if(valid, n.exchange.logits + at, tag_value(value, epoch_tags.of(r.column)));
    };
    return project<Shape, MaxColumns>(context_, kHead, load, store);
  }

  // --- the code predictor ---

  // The predictor's pass `pass`.
  DEVICE bool run_predictor(int pass) {
    return has_two_positions(pass) ? run_predictor<kColumnCapacity<MaxColumns>>(pass, 2)
                                   : run_predictor<MaxColumns>(pass, num_streams());
  }

  // Reads the norm of talker_hidden, or the last code's embedding, [columns, talker hidden]. Writes
  // the predictor's mlp_residual [columns, predictor hidden].
  template <int NumColumns>
  DEVICE bool run_predictor(int pass, int num_columns) {
    const bool two_positions = has_two_positions(pass);
    set_columns(num_columns, [&](int c) {
      return two_positions ? Column{0, c, 0, -1, true} : Column{c, pass, c, -1, true};
    });
    const auto& head_sums = context_.sums[context_.sums_idx ^ 1];  // squares of the talker's head
    const auto input = [&](int c, int k) {
      if (pass == 0 || (two_positions && c == 0)) {
        const float scale = rms_norm_scale<Talker::hidden_size>(head_sums, c, p_.talker.eps);
        return multiply(multiply(talker_hidden(c, k), scale),
                        load_bf16x4(p_.talker.final_norm + k));
      }
      const int group = pass - 1;
      return load_bf16x4(embedding(group, stream_states()[two_positions ? 0 : c].codes[group]) + k);
    };
    if constexpr (M::has_input_projection) {
      return project_input<NumColumns>(num_columns, input) &&
             run_network<Predictor, NumColumns>(
                 s_.predictor, predictor_tags_, num_columns,
                 InputFromExchange{p_.predictor_input, input_projection_tags_});
    } else {
      constexpr int kBatch = kInputBatch<NumColumns>;
      begin_layers<Predictor, NumColumns, kBatch>(context_, s_.residual, s_.norm, num_columns,
                                                  input);
      return run_network<Predictor, NumColumns>(s_.predictor, predictor_tags_, num_columns,
                                                InputInPlace());
    }
  }

  // The phase `input_projection`: x = W input + bias, from input [columns, talker hidden] to
  // predictor_input, float layout [columns, predictor hidden].
  template <int NumColumns, class Input>
  DEVICE bool project_input(int num_columns, Input input) {
    constexpr int kInputSize = Talker::hidden_size, kOutputSize = Predictor::hidden_size;
    constexpr int kBatch = kInputBatch<(NumColumns < 2 ? NumColumns : 2)>;
    input_projection_tags_.advance(num_columns);
    auto load = [&](int, auto&) {
      const ActivationWriter<MaxColumns> activations(s_.fragments);
      for_each_input<kInputSize, kBatch>(
          0, num_columns, input,
          [&](int c, int i, int vector, float4 v) { activations.store(c + i, vector, v); },
          [](int) {});
    };
    auto store = [&](const ProjectionResult& r, float sum, const auto&, bool valid) {
      const int k = r.row_group * kRowGroupSize + r.row;
      const float value = sum + to_float(p_.input_projection_bias[k]);
      const uint32_t tagged = tag_value(value, input_projection_tags_.of(r.column));
      const int at = FloatExchangeLayout<kOutputSize, MaxColumns>::index(r.column, k);
      store_relaxed_if(valid, p_.predictor_input + at, tagged);
      if (valid) {
        s_.residual.at(context_.row_groups[kInputProjection], r.row_group, r.row, r.column) = value;
      }
    };
    return project<typename M::InputProjection, NumColumns>(context_, kInputProjection, load,
                                                            store);
  }

  // Reads the predictor's mlp_residual [columns, hidden], writes its logits [streams, codes].
  DEVICE bool run_predictor_head(int pass) {
    const int column = has_two_positions(pass);  // of two positions, the second has logits
    const uint32_t* residual =
        s_.predictor.exchange.mlp_residual +
        FloatExchangeLayout<Predictor::hidden_size, MaxColumns>::distance(column, 0);
    auto load = [&](int, auto& sums) {
      load_normed_residual<Predictor::hidden_size, MaxColumns>(p_, residual, s_.norm, num_streams(),
                                                               predictor_tags_.from(column), kDown,
                                                               s_.fragments, sums);
    };
    return project_head<typename M::PredictorHead>(s_.predictor, predictor_head_tags_, load);
  }

  using Base::any_active, Base::any_talker_active, Base::begin_pass, Base::begin_streams,
      Base::embedding, Base::finish, Base::num_streams, Base::pass_columns, Base::poll_stop_flags,
      Base::sample_code, Base::set_columns, Base::set_talker_columns, Base::stream_states,
      Base::talker_input;
  using Base::context_, Base::p_, Base::predictor_head_tags_, Base::s_, Base::talker_head_tags_;

  EpochTags talker_tags_, predictor_tags_, input_projection_tags_;
};

// --- body ---

// The kernel: compute warps, and one copy warp.
template <class M, int MaxColumns>
DEVICE void generate_frames(const Params& p, SharedMemory<M, MaxColumns>& shared) {
  run_generation<FrameGenerator<M, MaxColumns>, M, MaxColumns>(p, shared);
}

}  // namespace megakernel
