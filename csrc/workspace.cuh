// The workspace that blocks talk through, as the host lays it out: one piece of memory, all of it
// ones before a launch.
#pragma once

#include "params.cuh"

namespace megakernel {

// Takes the workspace apart: each buffer begins on a line of its own, and has so many words for
// each of some columns, or places of a board.
struct Cutter {
  uint32_t* next;
  int places;

  uint32_t* take(int64_t count) {
    uint32_t* at = next;
    next += (places * count + 31) / 32 * 32;
    return at;
  }
};

// `s` is hidden, heads, kv heads and intermediate.
inline Words words(const int (&s)[4], int64_t vocab, Cutter& cut) {
  Words w;
  w.qkv = cut.take(static_cast<int64_t>(s[1] + 2 * s[2]) * kHeadDim);
  w.partial = cut.take(static_cast<int64_t>(s[1]) * kMaxSpans * kHeadDim);
  w.statistic = cut.take(s[1] * kMaxSpans * 2);
  w.attended = cut.take(kHalves * s[1] * kHeadDim / 2);
  w.out = cut.take(s[0]);
  w.middle = cut.take(kHalves * s[3] / 2);
  w.down = cut.take(s[0]);
  w.logits = cut.take(vocab);
  return w;
}

// Fills in the buffers from `begin` on; returns how many words they take.
inline int64_t lay_out(Params& p, const Shape& s, uint32_t* begin) {
  Cutter cut{begin, kWide > kPlaces ? kWide : kPlaces};  // the talker's are prompts', too
  p.talker.words = words(s.talker, s.codes + kControl, cut);
  p.broken = cut.take(1);
  cut.places = kPlaces;
  p.predictor.words = words(s.predictor, s.codes, cut);
  p.projected = cut.take(s.predictor[0]);
  p.drawn = cut.take(1);
  p.given_up = cut.take(1);
  return cut.next - begin;
}

inline int64_t workspace_words(const Shape& s) {
  Params p;
  return lay_out(p, s, nullptr);
}

// Where in the workspace a launch leaves the logits.
struct LogitsAt {
  int64_t talker, predictor;  // [columns, vocab], and the last ones [columns, codes]
};

inline LogitsAt logits_at(const Shape& s) {
  Params p;
  lay_out(p, s, nullptr);
  uint32_t* const begin = nullptr;
  return {p.talker.words.logits - begin, p.predictor.words.logits - begin};
}

}  // namespace megakernel
