// What a launch is given: weights, streams, and the workspace that its phases talk through.
#pragma once

#include "shapes.cuh"
#include "types.cuh"

namespace megakernel {

// One layer; matrices lie in fragment order (see `product.cuh`), norms as they are.
struct Layer {
  const uint4* qkv;      // [qkv, hidden]
  const uint4* out;      // [hidden, queries]
  const uint4* gate_up;  // [2 intermediate, hidden], eight rows of gate, eight of up, in turn
  const uint4* down;     // [hidden, intermediate]
  const bf16* input_norm;
  const bf16* post_norm;
  const bf16* query_norm;
  const bf16* key_norm;
};

// One decoder stack and what its attention remembers.
struct Network {
  const Layer* layers;
  int num_layers;
  const bf16* norm;
  bf16* keys;  // [layers, slots, kv heads, positions, head dim]
  bf16* values;
  int slots, positions;
  const float2* turns;  // [positions, head dim / 2]: cosine and sine
  float eps;
};

// How one network's codes are drawn.
struct Rule {
  float temperature;  // 0: the likeliest
  int top_k;          // 0: all
  float top_p;
};

// One stream. The kernel moves it on; the host reads it after the launch.
struct Stream {
  int slot;
  int prompt;          // positions of its prompt
  int frames;          // drawn so far
  int max_frames;      // at which it ends
  int fed;             // text vectors that are there
  int ended;           // no more will come: padding follows
  int fresh;           // the first frame: its hidden state comes from the prompt
  int over;            // why it stopped, see Over
  int made;            // frames of this launch
  int broken;          // whether logits were not finite
  int codes[kGroups];  // of the last frame
  unsigned first_frame;
  unsigned seed[2];
  float penalty;
  Rule talker, predictor;
};

enum Over : int { kRunning = 0, kEos = 1, kLength = 2, kStopped = 3, kBroken = 4 };

// What a frame looks like to the host.
struct Published {
  int over;
  int codes[kGroups];
};

struct Params {
  Network talker, predictor;
  const uint4* talker_head;      // [vocab, hidden]
  const uint4* predictor_heads;  // [groups - 1][codes, hidden]
  const uint4* project;          // [predictor hidden, talker hidden]; null if the same
  const bf16* project_bias;
  const bf16* code_embedding;           // [vocab, talker hidden]
  const bf16* const* group_embeddings;  // [groups - 1] of [codes, talker hidden]
  const bf16* pad;                      // [talker hidden]
  const bf16* text;                     // [slots, positions, talker hidden]
  const bf16* prompt;                   // [prompt length, talker hidden]; prefill alone
  int prompt_length;
  float* hidden;  // [slots, talker hidden], of the prompts' ends
  uint8_t* seen;  // [slots, vocab]: ids of code 0 that were drawn
  int eos;

  Stream* streams;  // [columns]
  int columns;
  int out_splits, down_splits;  // how often the long sums are cut, for this many blocks
  int max_frames;               // of this launch
  Published* frames;            // pinned [columns, max_frames]
  unsigned* published;          // pinned [columns]: how many there are
  const unsigned* stop;         // pinned [columns]

  // The workspace: [columns, ...], written by some blocks, read by all after a barrier.
  float* qkv;       // [columns, qkv]
  float* attended;  // [columns, spans, heads, head dim]
  float* weight;    // [columns, spans, heads, 2]: maximum and sum
  float* partial;   // [splits, columns, hidden]
  float* middle;    // [columns, intermediate]
  float* logits;    // [columns, vocab]
  int* drawn;       // [columns]

  unsigned* barrier;   // a counter that is never reset
  unsigned* epoch;     // what it stood at when the last launch ended
  unsigned* given_up;  // how many blocks no longer wait
  uint64_t patience;   // nanoseconds that a barrier waits
  unsigned* failure;   // pinned [3]: 1 once a wait ran out, block, phase
};

}  // namespace megakernel
