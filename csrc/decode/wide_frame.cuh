// The wide generation kernel, for up to 64 streams: the frame of frame.cuh, with the layers of
// wide_layers.cuh. The predictor's positions 0 and 1 are passes of their own.
#pragma once

#include "stream_context.cuh"

namespace megakernel {

// --- static asserts ---

static_assert(kWideStreams <= 64, "a mask has one bit per stream");

// --- shared memory ---

// `SharedMemory` of shared_memory.cuh, from the first frame of a launch to the last.

// --- warp roles ---

// Compute warps: all phases. Copy warp: all weights of a frame in the order of use, as in
// frame.cuh.

// The compute warps' work. Stream c has column c of every pass. Functions that run phases return
// false after a timeout.
template <class M, int MaxColumns>
class WideFrameGenerator : StreamContext<M, MaxColumns> {
  using Base = StreamContext<M, MaxColumns>;
  using typename Base::Predictor;
  using typename Base::Talker;

 public:
  // Called by all compute threads.
  DEVICE WideFrameGenerator(const Params& p, SharedMemory<M, MaxColumns>& shared)
      : Base(p, shared) {}

  // Generates frames until no stream is active or the launch has its maximum.
  DEVICE void run() {
    begin_streams();
#pragma unroll 1
    for (int frame = 0; frame < p_.max_frames && any_active(); ++frame) {
      if (!generate_frame(frame)) break;
    }
    finish();
  }

 private:
  // Generates a frame: the talker's pass, then the predictor's passes 0 to 15.
  DEVICE bool generate_frame(int frame) {
    begin_pass(num_streams());
    context_.row_groups = s_.talker_row_groups;
    if (!run_talker(frame)) return false;
    sample_code(0);
    context_.row_groups = s_.predictor_row_groups;
#pragma unroll 1
    for (int pass = 0; pass < kNumCodeGroups; ++pass) {
      if (pass == kNumCodeGroups - 1) poll_stop_flags();
      if (!run_predictor(pass)) return false;
      if (pass > 0) sample_code(pass);
    }
    return true;
  }

  // Runs the layers of a network. The tags are copied, because a reference into this object would
  // force all of it into local memory.
  template <class S, bool InputIsExchanged, class Finish>
  DEVICE bool run_network(const Network& n, const WideBuffers& buffers, EpochTags& layer_tags,
                          WideTags& tags, Finish finish) {
    WideTags copied = tags;
    context_.epoch_tags = layer_tags;
    const bool ok =
        run_wide_layers<S, InputIsExchanged>(context_, n, buffers, copied, pass_columns(), finish);
    layer_tags = context_.epoch_tags, tags = copied;
    return ok;
  }

  // --- the talker ---

  // Whether the hidden state of column c comes from the prefill. A column without a stream that
  // runs reads it as well if the talker does not run.
  DEVICE bool starts_from_prompt(int c) {
    return stream_states()[c].starts_from_prompt || !talker_runs_;
  }

  // The prefill's hidden state of column c, [talker hidden].
  DEVICE const float* prompt_hidden(int c) const {
    return p_.prompt_hidden + static_cast<size_t>(s_.streams[c].slot) * Talker::hidden_size;
  }

  // The talker's pass and its logits [streams, vocab]. If all streams start from their prompts, the
  // hidden states of the prompts take the place of the layers.
  DEVICE bool run_talker(int frame) {
    set_talker_columns(frame);
    talker_runs_ = any_talker_active();
    const float eps = s_.talker.eps;
    if (talker_runs_) {
      begin_wide_layers<Talker>(context_, p_.wide_talker, s_.talker.layer_norms, eps, talker_tags_,
                                [&](int c, int k) { return talker_input(c, k); });
      const auto finish = [&](int c, int k, float x, bool valid) {
        return valid && stream_states()[c].starts_from_prompt ? prompt_hidden(c)[k] : x;
      };
      if (!run_network<Talker, false>(s_.talker, p_.wide_talker, talker_layer_tags_, talker_tags_,
                                      finish)) {
        return false;
      }
      exchange_final_scales<Talker>(s_.talker, p_.wide_talker, talker_tags_);
    } else {
      begin_wide_layers<Talker>(context_, p_.wide_talker, s_.talker.final_norm, eps, talker_tags_,
                                [&](int c, int k) { return talker_hidden(c, k); });
    }
    return project_head<typename M::TalkerHead>(s_.talker, p_.wide_talker, talker_tags_,
                                                talker_head_tags_);
  }

  // Elements k to k + 3 of column c of the talker's final residual [streams, hidden], as
  // exchanged. All lanes of a warp call it.
  DEVICE float4 talker_hidden(int c, int k) {
    const bool from_prompt = starts_from_prompt(c);
    const uint32_t tag = talker_tags_.residual.of(0);
    const void* at = s_.talker.exchange.mlp_residual +
                     FloatExchangeLayout<Talker::hidden_size, MaxColumns>::index(c, k);
    if (from_prompt) at = prompt_hidden(c) + k;
    uint4 v = load_relaxed(static_cast<const uint4*>(at));
    SpinTimeout timeout(p_, kDown, context_.timed_out());
    while (!warp_all(from_prompt || has_tag(v, tag)) && warp_all(timeout.keep_waiting())) {
      if (!from_prompt) observe_epoch<FloatValues>(v, tag);
      v = load_relaxed(static_cast<const uint4*>(at));
    }
    return untag(v);
  }

  // --- heads ---

  // Exchanges the scales of the final norm.
  template <class S>
  DEVICE void exchange_final_scales(const Network& n, const WideBuffers& buffers,
                                    const WideTags& tags) {
    exchange_residual_scales<S::hidden_size, MaxColumns>(
        context_, n.exchange.mlp_residual, tags.residual.of(0), kDown, buffers.mlp_scales,
        tags.input.of(0), n.eps);
  }

  // logits = W norm(x): reads mlp_normed [columns, Shape::k], writes exchange.logits [columns,
  // Shape::rows]. The codes that all thread blocks wait for next depend on all logits. So they
  // order the keys and values of the pass before the reads of the next pass.
  template <class Shape>
  DEVICE bool project_head(const Network& n, const WideBuffers& buffers, const WideTags& tags,
                           EpochTags& head_tags) {
    head_tags.advance(num_streams());
    const uint32_t tag = head_tags.of(0);
    auto store = [&](const WideResult& r, float sum, int, bool valid) {
      const float value = sum * kPairUnscale * s_.sums.scales[r.column];
      store_relaxed_if(valid, n.exchange.logits + r.column * Shape::rows + r.k,
                       tag_value(value, tag));
    };
    return project_wide<Shape, 1>(
        context_, kHead, WideInput{buffers.mlp_normed, tags.input.of(0), kDown},
        [&] { wait_for_scales(context_, buffers.mlp_scales, tags.input.of(0), kDown); },
        [](const WideResult&) { return 0; }, store);
  }

  // --- the code predictor ---

  // The predictor's pass `pass`, and but for pass 0 its logits [streams, codes]. Pass 0 exchanges
  // no result: the next pass needs its keys and values only, and a warp reads those that it has
  // written.
  DEVICE bool run_predictor(int pass) {
    set_columns(num_streams(), [&](int c) { return Column{c, pass, c, -1, true}; });
    // Elements k to k + 3 of the input [columns, talker hidden]: the norm of talker_hidden, or the
    // last code's embedding.
    const auto input = [&](int c, int k) {
      if (pass == 0) {
        return multiply(multiply(talker_hidden(c, k), s_.sums.scales[c]),
                        load_bf16x4(p_.talker.final_norm + k));
      }
      return load_bf16x4(embedding(pass - 1, stream_states()[c].codes[pass - 1]) + k);
    };
    const auto keep = [](int, int, float x, bool) { return x; };
    const WideBuffers& buffers = p_.wide_predictor;
    if constexpr (M::has_input_projection) {
      if (!project_input(input)) return false;
    } else {
      begin_wide_layers<Predictor>(context_, buffers, s_.predictor.layer_norms, s_.predictor.eps,
                                   predictor_tags_, input);
    }
    if (!run_network<Predictor, M::has_input_projection>(
            s_.predictor, buffers, predictor_layer_tags_, predictor_tags_, keep)) {
      return false;
    }
    if (pass == 0) return true;
    exchange_final_scales<Predictor>(s_.predictor, buffers, predictor_tags_);
    return project_head<typename M::PredictorHead>(s_.predictor, buffers, predictor_tags_,
                                                   predictor_head_tags_);
  }

  // The phase `input_projection`: x = W input + bias, from input [columns, talker hidden] to the
  // predictor's mlp_residual and mlp_normed.
  template <class Input>
  DEVICE bool project_input(Input input) {
    constexpr int kOutputSize = Predictor::hidden_size;
    input_projection_tags_.advance(num_streams());
    const uint32_t input_tag = input_projection_tags_.of(0);
    for_each_input_row(context_, RowGroupRange::of_block(Talker::hidden_size / kRowGroupSize),
                       input, [&](const WideResult& r, float x, bool valid) {
                         store_normed<MaxColumns>(p_, p_.predictor_input, r.column, r.k, x,
                                                  input_tag, valid);
                       });
    predictor_tags_.residual.advance(num_streams()), predictor_tags_.input.advance(num_streams());
    const uint32_t residual_tag = predictor_tags_.residual.of(0),
                   normed_tag = predictor_tags_.input.of(0);
    const bf16* norm = s_.predictor.layer_norms;
    const RowGroupRange row_groups = context_.row_groups[kInputProjection];
    auto store = [&](const WideResult& r, float sum, int, bool valid) {
      const float value = sum * kPairUnscale + to_float(p_.input_projection_bias[r.k]);
      if (valid) s_.residual.at(row_groups, r.row_group, r.row, r.column) = value;
      const uint32_t tagged = tag_value(value, residual_tag);
      const int at = FloatExchangeLayout<kOutputSize, MaxColumns>::index(r.column, r.k);
      store_relaxed_if(valid, s_.predictor.exchange.mlp_residual + at, tagged);
      store_normed<MaxColumns>(p_, p_.wide_predictor.mlp_normed, r.column, r.k,
                               untag(tagged) * to_float(norm[r.k]), normed_tag, valid);
    };
    return project_wide<typename M::InputProjection, 1>(
        context_, kInputProjection, WideInput{p_.predictor_input, input_tag, kInputProjection},
        [] {}, [](const WideResult&) { return 0; }, store);
  }

  using Base::any_active, Base::any_talker_active, Base::begin_pass, Base::begin_streams,
      Base::embedding, Base::finish, Base::num_streams, Base::pass_columns, Base::poll_stop_flags,
      Base::sample_code, Base::set_columns, Base::set_talker_columns, Base::stream_states,
      Base::talker_input;
  using Base::context_, Base::p_, Base::predictor_head_tags_, Base::s_, Base::talker_head_tags_;

  EpochTags talker_layer_tags_, predictor_layer_tags_, input_projection_tags_;
  WideTags talker_tags_, predictor_tags_;
  bool talker_runs_ = false;  // in the current frame
};

// --- body ---

// The kernel: compute warps, and one copy warp.
template <class M, int MaxColumns>
DEVICE void generate_wide_frames(const Params& p, SharedMemory<M, MaxColumns>& shared) {
  run_generation<WideFrameGenerator<M, MaxColumns>, M, MaxColumns>(p, shared);
}

}  // namespace megakernel
