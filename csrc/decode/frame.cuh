// The one generation kernel: frame > layer > phase. A frame is: the last frame's codes through the
// talker, code 0, fifteen codes of the predictor, and the word to the host.
#pragma once

#include "block_context.cuh"

namespace megakernel {

// Of at most so many streams.
template <class M, int Most>
class Generation : Crew<M, Most> {
  using Base = Crew<M, Most>;
  using typename Base::Predictor;
  using typename Base::Talker;

 public:
  DEVICE Generation(const Params& p, Shared<M, Most>& s) : Base(p, s), meeting_(s.fixed.draw) {}

  // Frames until nobody goes on, or the launch has made its share.
  DEVICE void run() {
    each_stream([&](int c, Standing& mine) {
      const Stream& s = s_.streams[c];
      mine.goes = s.frames < s.max_frames && (s.frames <= s.fed || s.ended);
      mine.fresh = s.fresh;
      mine.frames = s.frames;
      for (int g = 0; g < kGroups; ++g) mine.codes[g] = static_cast<uint16_t>(s.codes[g]);
    });
    ask_ahead(kGroups - 1);
#pragma unroll 1
    for (int frame = 0; frame < p_.max_frames && anyone_goes_on(); ++frame) {
      if (!make_frame(frame)) break;
    }
    close();
  }

 private:
  // The talker's pass, then the predictor's, a position each: position 0, the talker's hidden
  // state, makes no logits, position i those of codebook i. With one stream, 0 and 1 go together.
  DEVICE bool make_frame(int frame) {
    begin_pass(columns());
#pragma unroll 1
    for (int pass = kTalk; pass < kGroups; pass += pass == kTalk ? kFirstPass<Most> : 1) {
      flow_.shares = pass == kTalk ? s_.talker_shares : s_.predictor_shares;
      if (pass == kGroups - 1) look_for_stop();
      if (!(pass == kTalk ? talk(frame) : predict(pass)) || !make_logits(pass)) return false;
      ask_ahead(pass);
      if (pass != 0) draw_code(pass == kTalk ? 0 : pass);
    }
    return true;
  }

  static constexpr int kTalk = -1;

  DEVICE bool make_logits(int pass) {
    if (pass == kTalk) return talker_head();
    // Keys and values of the pass are settled for who hears what it ends with: position 0 alone has
    // no logits, and some blocks may have no part of them.
    if (pass == 0 || uniform(flow_.shares[kHead].count) == 0) {
      take_words<Predictor::hidden, Most, Most>(
          p_, s_.predictor.words.down, columns(), predictor_tags_, kDown, flow_.gave_up(),
          [](int, int, int, float4) {}, [](int) {});
    }
    return pass == 0 || predictor_head(pass);
  }

  // The vector of the norm that the next pass begins with.
  DEVICE void ask_ahead(int pass) {
    if (pass == kGroups - 1)
      Base::template ask<Talker::hidden>(s_.talker.norms);
    else
      Base::template ask<Predictor::hidden>(s_.predictor.norms);
  }

  // Whether a pass is of two positions of one stream.
  DEVICE static bool of_two(int pass) { return kFirstPass<Most> == 2 && pass == 1; }

  // The layers of a network, whose tags are kept in a place of their own: a reference to it would
  // keep all of this in memory.
  template <class S, int N, class From>
  DEVICE bool run(const Network& n, Tags& tags, int columns, From from) {
    flow_.tags = tags;
    const bool fine = run_layers<S, N>(flow_, s_.own, s_.norm, n, columns_(), columns, from);
    tags = flow_.tags;
    return fine;
  }

  // --- what a warp knows ---

  DEVICE Standing* standings_() { return s_.standings[thread() / 32]; }
  template <class Act>
  DEVICE void each_stream(Act act) {
    if (thread() % 32 < columns()) act(thread() % 32, standings_()[thread() % 32]);
    warp_sync();
  }

  DEVICE bool anyone_goes_on() {
    bool anyone = false;
    for (int c = 0; c < columns(); ++c) anyone |= standings_()[c].goes;
    return uniform(anyone);
  }

  DEVICE bool anyone_talks() {
    bool anyone = false;
    for (int c = 0; c < columns(); ++c) anyone |= standings_()[c].goes && !standings_()[c].fresh;
    return uniform(anyone);
  }

  // --- inputs ---

  DEVICE const bf16* embedding(int group, int code) const {
    const bf16* table = group == 0 ? p_.code_embedding : p_.group_embeddings[group - 1];
    return table + static_cast<size_t>(code) * Talker::hidden;
  }

  // The last frame's embeddings and its text vector; a first frame has none.
  DEVICE float4 next_input(int c, int k) {
    const Standing& mine = standings_()[c];
    const Stream& stream = s_.streams[c];
    const int text = mine.frames - 1;
    const size_t at = (static_cast<size_t>(stream.slot) * p_.talker.positions + max(text, 0));
    float4 rows[kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) rows[g] = load_halves(embedding(g, mine.codes[g]) + k);
    float4 x = rows[0];
#pragma unroll
    for (int g = 1; g < kGroups; ++g) x = plus(x, rows[g]);
    x = plus(x, load_halves((text < stream.fed ? p_.text + at * Talker::hidden : p_.pad) + k));
    return text < 0 ? float4{0, 0, 0, 0} : x;
  }

  // --- the talker ---

  DEVICE bool talk(int frame) {
    each_column(columns(), [&](int c) {
      const Standing& mine = standings_()[c];
      const bool moves = mine.goes && !mine.fresh;
      const Stream& s = s_.streams[c];
      return Column{s.slot, moves ? s.prompt + mine.frames - 1 : 0, c, moves,
                    moves && p_.watch.count > 0 ? frame : -1};
    });
    if (!anyone_talks()) {
      Base::template ask<Talker::hidden>(s_.talker.norm);
      return true;
    }
    const auto input = [&](int c, int k) { return next_input(c, k); };
    start_with<Talker, Most, 1>(flow_, s_.own, s_.norm, columns(), input);
    return run<Talker, Most>(s_.talker, talker_tags_, columns(), IsThere());
  }

  // What the talker ends with; of streams that begin, what their prompts did, which came as words,
  // too.
  DEVICE float4 talked(int c, int k) {
    const size_t slot = s_.streams[c].slot;
    const void* at = s_.talker.words.down + FloatBoard<Talker::hidden, Most>::at(c, k);
    if (standings_()[c].fresh) at = p_.hidden + slot * Talker::hidden + k;
    return untagged(load_words(static_cast<const uint4*>(at)));
  }

  DEVICE bool talker_head() {
    const bool any = anyone_talks();
    auto normed = [&](int, auto& sums) {
      if (any) {
        fetch_residual<Talker::hidden, Most>(p_, s_.talker.words.down, s_.norm, columns(),
                                             talker_tags_, kDown, s_.fragments, sums);
      }
      for (int c = 0; c < columns(); ++c) {
        if (!uniform(standings_()[c].fresh)) continue;
        put_start<Talker::hidden, 1>(flow_, sums, s_.norm, c, c + 1,
                                     [&](int c, int k) { return talked(c, k); });
      }
    };
    return head<typename M::TalkerHead>(s_.talker, talker_head_tags_, normed);
  }

  DEVICE bool predictor_head(int pass) {
    // Of two positions, the second has logits.
    const int last = of_two(pass);
    const uint32_t* words =
        s_.predictor.words.down + FloatBoard<Predictor::hidden, Most>::further(last, 0);
    auto normed = [&](int, auto& sums) {
      fetch_residual<Predictor::hidden, Most>(
          p_, words, s_.norm, columns(), predictor_tags_.from(last), kDown, s_.fragments, sums);
    };
    return head<typename M::PredictorHead>(s_.predictor, predictor_head_tags_, normed);
  }

  template <class Matrix, class Normed>
  DEVICE bool head(const Network& n, Tags& tags, Normed normed) {
    tags.advance(columns());
    auto logits = [&](const Result& r, float sum, const auto& sums, bool there) {
      const float value = sum * norm_scale<Matrix::k>(sums, r.column, n.eps);
      const int at = r.column * Matrix::rows + r.unit * kUnit + r.row;
      store_word_if(there, n.words.logits + at, tagged(value, tags.of(r.column)));
    };
    return product<Matrix, Most>(flow_, kHead, normed, logits);
  }

  // --- the code predictor ---

  DEVICE bool predict(int pass) {
    return of_two(pass) ? predict<kRoom<Most>>(pass, 2) : predict<Most>(pass, columns());
  }

  // Position 0 starts with the norm of what the talker ended with, position i with the embedding of
  // code i - 1.
  template <int N>
  DEVICE bool predict(int pass, int count) {
    const bool two = of_two(pass);
    each_column(count, [&](int c) {
      return two ? Column{0, c, 0, true, -1} : Column{c, pass, c, true, -1};
    });
    const auto& talked_sums = flow_.sums[flow_.turn ^ 1];  // of the talker's head
    const auto input = [&](int c, int k) {
      if (pass == 0 || (two && c == 0)) {
        const float scale = norm_scale<Talker::hidden>(talked_sums, c, p_.talker.eps);
        return times(times(talked(c, k), scale), load_halves(p_.talker.norm + k));
      }
      const int group = pass - 1;
      return load_halves(embedding(group, standings_()[two ? 0 : c].codes[group]) + k);
    };
    if constexpr (M::projected) {
      return project<N>(count, input) && run<Predictor, N>(s_.predictor, predictor_tags_, count,
                                                           FromWords{p_.projected, project_tags_});
    } else {
      constexpr int kAtOnce = kSeveral < N ? kSeveral : N;
      start_with<Predictor, N, kAtOnce>(flow_, s_.own, s_.norm, count, input);
      return run<Predictor, N>(s_.predictor, predictor_tags_, count, IsThere());
    }
  }

  // The talker's width to the predictor's.
  template <int N, class Input>
  DEVICE bool project(int count, Input input) {
    constexpr int kWide = Talker::hidden, kNarrow = Predictor::hidden;
    constexpr int kMany = N < 2 ? N : 2, kAtOnce = kSeveral < kMany ? kSeveral : kMany;
    project_tags_.advance(count);
    auto plain = [&](int, auto&) {
      const Activations<Most> activations(s_.fragments);
      each_start<kWide, kAtOnce>(
          0, count, input,
          [&](int c, int i, int four, float4 v) { activations.put(c + i, four, v); }, [](int) {});
    };
    auto projected = [&](const Result& r, float sum, const auto&, bool there) {
      const int k = r.unit * kUnit + r.row;
      const float value = sum + to_float(p_.project_bias[k]);
      const uint32_t word = tagged(value, project_tags_.of(r.column));
      store_word_if(there, p_.projected + FloatBoard<kNarrow, Most>::at(r.column, k), word);
      if (there) s_.own.at(flow_.shares[kInputProjection], r.unit, r.row, r.column) = value;
    };
    return product<typename M::Project, N>(flow_, kInputProjection, plain, projected);
  }

  // --- codes ---

  // The last blocks draw: they have the least to multiply.
  DEVICE bool draws_for(int c) const { return blocks() - 1 - c % blocks() == block(); }

  // Somebody draws for each stream, everybody hears it.
  DEVICE void draw_code(int codebook) {
    draw_tags_.advance(kColumns);
    const uint32_t tag = draw_tags_.of(0);
#pragma unroll 1
    for (int c = 0; c < columns(); ++c) {
      if (!draws_for(c)) continue;
      const bool goes = uniform(standings_()[c].goes);
      const int code = goes ? draw_for(c, codebook) : 0;
      // Everybody asks for its embedding next.
      if (thread() * 64 < Talker::hidden) fetch_line(embedding(codebook, code) + thread() * 64);
      flow_.watch.lap(kSample, kSum);
      if (thread() == 0) {
        const int over = goes && codebook == kGroups - 1 ? why_over(c) : kRunning;
        const bool on = goes && over == kRunning && has_text(s_.streams[c]);
        const uint32_t word = static_cast<uint32_t>(code) | static_cast<uint32_t>(on) << 12;
        store_word(p_.drawn + c, word | tag << 30);
        if (goes && codebook == kGroups - 1) send(c, over, code);
      }
    }
    const int column = min(thread() % 32, columns() - 1);  // each lane's
    const Patience patience(p_, kSample, flow_.gave_up());
    const uint32_t word = await_word(p_.drawn + column, tag, 30, patience);
    each_stream([&](int, Standing& mine) {
      mine.codes[codebook] = word >> 30 == tag ? word & 0xFFF : 0;
      if (codebook == kGroups - 1) {
        mine.frames += mine.goes;
        mine.fresh = mine.fresh && !mine.goes;
        mine.goes = mine.goes && (word >> 12 & 1);
      }
    });
    flow_.watch.lap(kSample, kWait);
  }

  // All threads of the block; a stream whose logits are not finite is told so at the frame's end.
  DEVICE int draw_for(int c, int codebook) {
    const Stream& stream = s_.streams[c];
    const uint32_t* logits = codebook == 0 ? p_.talker.words.logits + c * M::TalkerHead::rows
                                           : p_.predictor.words.logits + c * M::PredictorHead::rows;
    const uint32_t tag = (codebook == 0 ? talker_head_tags_ : predictor_head_tags_).of(c);
    int& gave_up = flow_.gave_up();
    const int code = codebook == 0
                         ? draw_first<M>(p_, stream, logits, tag, gave_up, meeting_)
                         : draw_other<M>(p_, stream, codebook, logits, tag, gave_up, meeting_);
    const int ids = codebook == 0 ? M::vocab : M::codes;
    if (code == ids && thread() == 0) store_word(p_.broken + c, 1);
    return code == ids ? 0 : code;
  }

  // One thread reads the host's flags well before they are needed.
  DEVICE void look_for_stop() {
    stop_ = 0;
    for (int c = 0; c < columns(); ++c) {
      if (thread() == 0 && draws_for(c)) stop_ |= (observe_host(p_.stop + c) != 0) << c;
    }
  }

  DEVICE bool has_text(const Stream& s) const { return s.frames + 1 <= s.fed || s.ended; }

  DEVICE Over why_over(int c) {
    const Stream& s = s_.streams[c];
    if (load_word(p_.broken + c) == 1) return kBroken;
    if (standings_()[c].codes[0] == p_.eos) return kEos;
    if (stop_ >> c & 1) return kStopped;
    return s.frames + 1 >= s.max_frames ? kLength : kRunning;
  }

  DEVICE void send(int c, int over, int last) {
    Published& frame = p_.frames[c * p_.max_frames + s_.made[c]];
    frame.over = over;
    for (int g = 0; g < kGroups; ++g) frame.codes[g] = standings_()[c].codes[g];
    frame.codes[kGroups - 1] = last;
    publish(p_.published + c, ++s_.made[c]);
    ++s_.streams[c].frames;
  }

  using Base::begin_pass, Base::close, Base::columns, Base::columns_, Base::each_column;
  using Base::flow_, Base::p_, Base::s_;

  Meeting meeting_;
  Tags talker_tags_, predictor_tags_;  // of what their layers make
  Tags talker_head_tags_, predictor_head_tags_, project_tags_, draw_tags_;
  uint32_t stop_ = 0;
};

// The first warps multiply, attend and draw, one copies weights.
template <class M, int Most>
DEVICE void generate_frames(const Params& p, Shared<M, Most>& s) {
  s.ring.init();
  all_sync();
  if (warp_number() < kWarps) {
    take_registers();
    Generation<M, Most>(p, s).run();
  } else if (copies()) {
    bool talks = false;
    for (int c = 0; c < p.columns; ++c) {
      const Stream& stream = p.streams[c];
      talks |= !stream.fresh && stream.frames < stream.max_frames &&
               (stream.frames <= stream.fed || stream.ended);
    }
    constexpr int kParts = kFrameParts<Most>;
    fetch_weights<Most == 1>(s.ring, !talks, kParts * p.max_frames,
                             [&](int i) { return frame_segment<M, Most>(p, i % kParts); });
  }
}

}  // namespace megakernel
