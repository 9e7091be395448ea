// What a launch is given: weights, streams, and the workspace that its phases talk through.
#pragma once

#include "shapes.cuh"
#include "types.cuh"

namespace megakernel {

// Words through which blocks talk about a network: see exchange.cuh. All of them begin as ones.
struct Words {
  uint32_t* qkv;        // [columns, rows of qkv]; of a near stack see near.cuh
  uint32_t* partial;    // [columns, heads, spans, head dim]: sums of values by their weights
  uint32_t* statistic;  // [columns, heads, spans, 2]: the highest score, the sum of weights
  uint32_t* attended;   // board, [columns, halves, queries / 2], pairs of halves
  uint32_t* out;        // board, [columns, hidden]: what attention adds to the residual
  uint32_t* middle;     // board, [columns, halves, intermediate / 2], pairs of halves
  uint32_t* down;       // board, [columns, hidden]: what the feed-forward network adds
  uint32_t* logits;     // [columns, rows of the head]
};

// One decoder stack and what its attention remembers.
struct Network {
  const uint4* weights;  // of all layers, in the order in which blocks read them: see weights.cuh
  const bf16* norms;     // of each layer: input, post attention, query, key
  int num_layers;
  const bf16* norm;  // the last
  bf16* keys;        // [layers, slots, kv heads, positions, kKept]
  bf16* values;      // as many; of the talker by sixteen positions, see attend.cuh; else as keys
  int slots, positions;
  const float2* turns;  // [positions, head dim / 2]: cosine and sine
  float eps;
  Words words;
};

// How one network's codes are drawn.
struct Rule {
  float temperature;  // 0: the likeliest
  int top_k;          // 0: all
  float top_p;
};

// One stream, as the launch finds it.
struct Stream {
  int slot;
  int prompt;          // positions of its prompt
  int frames;          // drawn so far
  int max_frames;      // at which it ends
  int fed;             // text vectors that are there
  int ended;           // no more will come: padding follows
  int fresh;           // the first frame: its hidden state comes from the prompt
  int codes[kGroups];  // of the last frame
  unsigned first_frame;
  unsigned seed[2];
  float penalty;
  Rule talker, predictor;
};

// A position of a prompt, as a column of a pass.
struct Place {
  int slot;
  int position;
  int first;  // the first column of the same slot
};

// Columns that go through the talker together, of one prompt or of several. A prompt's positions
// come in whole blocks, the first of kColumns, the others of kWide: where a pass begins, sums round
// otherwise.
struct Pass {
  int columns;
  int row;   // of `prompt`: the first column's
  int ends;  // bit c: column c is its prompt's last, whose hidden state starts the speech
  Place places[kWide];
};

// Heads of the talker whose scores are told, frame by frame.
struct Watch {
  int count;
  int heads[kMostWatched];  // layer * heads + head
  float* scores;            // [columns, frames of the launch, count, positions]
};

enum Over : int { kRunning = 0, kEos = 1, kLength = 2, kStopped = 3, kBroken = 4 };

// What a frame looks like to the host.
struct Published {
  int over;
  int codes[kGroups];
};

struct Params {
  Network talker, predictor;     // the projection, if any, comes first in the predictor's weights
  const uint4* talker_head;      // [vocab, hidden]
  const uint4* predictor_heads;  // [groups - 1][codes, hidden]
  const bf16* project_bias;
  const bf16* code_embedding;                 // [vocab, talker hidden]
  const bf16* group_embeddings[kGroups - 1];  // [codes, talker hidden] each
  const bf16* pad;                            // [talker hidden]
  const bf16* text;                           // [slots, positions, talker hidden]
  const bf16* prompt;  // [columns of all passes, talker hidden]; prefill alone
  const Pass* passes;  // [num_passes]; prefill alone
  int num_passes;
  float* hidden;  // [slots, talker hidden], of the prompts' ends
  uint8_t* seen;  // [slots, vocab]: ids of code 0 that were drawn
  int eos;
  int remembered;  // positions of a layer that stay in the second-level cache: see `stays`
  Watch watch;

  Stream streams[kPlaces];
  int columns;           // of these, which there are
  int max_frames;        // of this launch
  Published* frames;     // pinned [columns, max_frames]
  unsigned* published;   // pinned [columns]: how many there are
  const unsigned* stop;  // pinned [columns]
  unsigned* failure;     // pinned [3]: 1 once a wait ran out, block, phase
  uint64_t patience;     // nanoseconds that a wait may last; 0: hardly a look

  uint32_t* projected;  // board, [columns, predictor hidden]
  uint32_t* drawn;      // [columns]: a code, and whether its stream goes on
  uint32_t* broken;     // [columns]: 1 once an activation was not finite
  uint32_t* given_up;   // 1 once a block has waited too long
  uint64_t* times;      // [blocks, phases, 3], the profiling build's alone: see stopwatch.cuh
};
static_assert(sizeof(Params) <= 4096, "which is what the arguments of any launch may take");

}  // namespace megakernel
