// How the host starts the codec's kernels.
#pragma once

#include "params.cuh"

namespace megakernel::codec {

cudaError_t launch(const Embed& p, cudaStream_t stream);
cudaError_t launch(const Product& p, cudaStream_t stream);
cudaError_t launch(const Attend& p, cudaStream_t stream);
cudaError_t launch(const Depthwise& p, cudaStream_t stream);
cudaError_t launch(const Remember& p, cudaStream_t stream);

}  // namespace megakernel::codec
