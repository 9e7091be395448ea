// Launches of the codec's kernels.
#pragma once

#include "params.cuh"

namespace megakernel::codec {

cudaError_t launch(const EmbedParams& p, cudaStream_t stream);
cudaError_t launch(const ProjectionParams& p, cudaStream_t stream);
cudaError_t launch(const AttentionParams& p, cudaStream_t stream);
cudaError_t launch(const DepthwiseParams& p, cudaStream_t stream);
cudaError_t launch(const StateUpdateParams& p, cudaStream_t stream);

}  // namespace megakernel::codec
