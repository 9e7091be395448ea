// The kernels of every model.
#include "kernels.cuh"

namespace megakernel {

// In the order of `MEGAKERNEL_MODELS`.
Entry entry(int model) {
#define MEGAKERNEL_ENTRY(name) entry_of<name>()
  static const Entry entries[] = {MEGAKERNEL_MODELS(MEGAKERNEL_ENTRY)};
  return entries[model];
}

}  // namespace megakernel
