// Greedy search: the position of every stream, of which each thread block has an equal copy.
//
//   blank:  the next frame, or with a TDT the one after the predicted duration (1 at least)
//   token:  with a TDT the frame after the predicted duration, which may be 0;
//           the next frame if `max_symbols` tokens of one frame had duration 0
//
// A round looks at a window of frames of every stream that has frames left, and finds its next
// token, if the window has one.
#pragma once

#include "../memory.cuh"
#include "params.cuh"

namespace megakernel::transducer {

// --- static asserts ---

static_assert(kMaxBatch == 64, "a lane counts two streams");
static_assert(kMaxBatch <= kNumThreads && kMaxColumns <= kNumThreads, "a thread has one of them");

// --- shared memory ---

struct SearchState {
  // By stream.
  int position[kMaxBatch];     // of the next frame, from the first of the launch
  int length[kMaxBatch];       // frames of the launch
  int num_symbols[kMaxBatch];  // tokens of the frame at the position
  int num_results[kMaxBatch];  // tokens of the launch
  int buffer[kMaxBatch];       // the one of the two buffers that has the current hidden state
  int token[kMaxBatch];        // of the round; -1: none
  int column[kMaxBatch];       // at which the round found it
  // By column, as the joint network chose them.
  int ids[kMaxColumns];
  int durations[kMaxColumns];
  // Streams of the round: those with frames left, and those of them with a token.
  int running[kMaxBatch];
  int labelled[kMaxBatch];
  int num_running;
  int num_labelled;
  int log2_window;  // of the frames of a stream

  // The stream and the frame of a column. The last frame is repeated where there are no more.
  DEVICE int stream_of(int column) const { return running[column >> log2_window]; }
  DEVICE int frame_of(int column) const {
    const int stream = stream_of(column);
    const int offset = column & ((1 << log2_window) - 1);
    return min(position[stream] + offset, length[stream] - 1);
  }
};

// --- warp roles ---

// A thread has a stream, or a column. Warp 0 makes lists, a lane for two streams.

// --- body ---

// Lists the streams that satisfy a condition, in order. Called by one warp; returns their number.
template <class Condition>
DEVICE int list_streams(int (&list)[kMaxBatch], Condition condition) {
  const bool low = condition(lane_idx()), high = condition(lane_idx() + 32);
  const uint32_t low_mask = warp_ballot(low), high_mask = warp_ballot(high);
  const uint32_t before = (1u << lane_idx()) - 1;
  const int num_low = count_set_bits(low_mask);
  if (low) list[count_set_bits(low_mask & before)] = lane_idx();
  if (high) list[num_low + count_set_bits(high_mask & before)] = lane_idx() + 32;
  return num_low + count_set_bits(high_mask);
}

// Begins at the streams' next frames. Reads lengths [batch] and frame, num_frames [slots].
DEVICE void begin_search(const TransducerParams& p, SearchState& search) {
  const int stream = thread_idx();
  if (stream < kMaxBatch) {
    const bool used = stream < p.batch;
    const int source = used ? p.sources[stream] : 0;
    const States& states = p.states;
    search.position[stream] =
        used ? static_cast<int>(states.frame[source] - states.num_frames[source]) : 0;
    search.length[stream] = used ? p.lengths[stream] : 0;
    search.num_symbols[stream] = search.num_results[stream] = search.buffer[stream] = 0;
  }
  sync_all_threads();
}

// Lists the streams with frames left, and chooses their window: as many frames as there are columns
// for, but no more than a stream has left.
DEVICE void list_running(SearchState& search) {
  if (uniform_warp_idx() == 0) {
    const int num_running =
        list_streams(search.running, [&](int s) { return search.position[s] < search.length[s]; });
    int num_left = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int s = lane_idx() + 32 * i;
      num_left = max(num_left, search.length[s] - search.position[s]);
    }
    num_left = static_cast<int>(warp_max(static_cast<unsigned>(num_left)));
    int log2_window = kMaxLog2Window;
    while (log2_window > 0 &&
           (num_running << log2_window > kMaxColumns || 1 << log2_window >= 2 * num_left)) {
      --log2_window;
    }
    if (lane_idx() == 0) search.num_running = num_running, search.log2_window = log2_window;
  }
  sync_all_threads();
}

// The index in a key of joint.cuh.
DEVICE int key_index(uint2 key) { return static_cast<int>(~key.x); }

// Moves every stream behind its next token within the window, or to the window's end, and lists the
// streams with a token. Reads keys [2, columns]; block 0 writes tokens to results [batch].
DEVICE void find_tokens(const TransducerParams& p, const uint64_t* keys, SearchState& search) {
  const int thread = thread_idx(), num_running = search.num_running;
  const int window = 1 << search.log2_window;
  if (thread < num_running * window) {
    const uint2* own = reinterpret_cast<const uint2*>(keys) + thread;
    search.ids[thread] = key_index(load_l2(own));
    search.durations[thread] =
        p.num_durations > 0 ? p.durations[key_index(load_l2(own + kMaxColumns))] : 0;
  }
  if (thread < kMaxBatch) search.token[thread] = -1;
  sync_all_threads();
  if (thread < num_running) {
    const int s = search.running[thread], start = search.position[s], length = search.length[s];
    int position = start, num_symbols = search.num_symbols[s];
    while (position < length && position - start < window) {
      const int column = thread * window + position - start;
      const int id = search.ids[column];
      int duration = search.durations[column];
      if (id == p.blank_id) {
        position += max(duration, 1), num_symbols = 0;
        continue;
      }
      const int result = ++search.num_results[s];
      if (block_idx() == 0) {
        Result& to = p.results[s * static_cast<int64_t>(1 + p.max_results) + result];
        to.token = id, to.frame = position, to.duration = p.num_durations > 0 ? duration : 1;
      }
      search.token[s] = id, search.column[s] = column;
      if (duration == 0 && num_symbols + 1 >= p.max_symbols) duration = 1;
      position += duration, num_symbols = duration > 0 ? 0 : num_symbols + 1;
      break;
    }
    search.position[s] = position, search.num_symbols[s] = num_symbols;
  }
  sync_all_threads();
  if (uniform_warp_idx() == 0) {
    const int num_labelled =
        list_streams(search.labelled, [&](int s) { return search.token[s] >= 0; });
    if (lane_idx() == 0) search.num_labelled = num_labelled;
  }
  sync_all_threads();
}

}  // namespace megakernel::transducer
