// How the host starts the alignment's kernels.
#pragma once

#include "params.cuh"

namespace megakernel::align {

enum class Type { kFloat, kBfloat16, kHalf };

// Cuts the work for the current GPU.
cudaError_t cut(Search& p, Type type);
// `aligned`: every fourth cell of a row begins where four cells can be copied at once.
cudaError_t launch(const Search& p, Type type, bool aligned, cudaStream_t stream);
cudaError_t launch(const Mask& p, cudaStream_t stream);
cudaError_t launch(const Path& p, cudaStream_t stream);

}  // namespace megakernel::align
