// The functions of NVSHMEM that the host calls for a group, as the table `Network`.
#include "ffi/cuda/network.h"

#include <nvshmem_host.h>

namespace jax_ep {
namespace {

const Network kNetwork = {
    kernels_of_this_module(),
    [](int64_t bytes) { return static_cast<uint8_t*>(nvshmem_calloc(bytes, 1)); },
    [](uint8_t* memory) { nvshmem_free(memory); },
    [](uint8_t* memory, int32_t pe) { return static_cast<uint8_t*>(nvshmem_ptr(memory, pe)); },
};

}  // namespace
}  // namespace jax_ep

const void* jax_ep_network_table() { return &jax_ep::kNetwork; }
