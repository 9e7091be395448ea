// Launches of the alignment kernels.
#pragma once

#include "params.cuh"

namespace megakernel::align {

enum class Type { kFloat, kBfloat16, kHalf };

// Partitions the work for the current GPU.
cudaError_t partition(SearchParams& p, Type type);
// `aligned`: four cells can be copied at once from every fourth cell of a row.
cudaError_t launch(const SearchParams& p, Type type, bool aligned, cudaStream_t stream);
cudaError_t launch(const MaskParams& p, cudaStream_t stream);
cudaError_t launch(const PathParams& p, cudaStream_t stream);

}  // namespace megakernel::align
