// The extension module jax_ep._nvshmem: NVSHMEM's start and end, and what _cuda needs for groups with remote ranks.
#include <nanobind/nanobind.h>
#include <nvshmem_host.h>

#include <cstring>
#include <stdexcept>
#include <string>

#include "ffi/cuda/network.h"
#include "ffi/cuda/runtime.h"

namespace jax_ep {
namespace {

namespace nb = nanobind;

// Of the processes that start together; one of them makes it.
nb::bytes unique_id() {
  nvshmemx_uniqueid_t id = NVSHMEMX_UNIQUEID_INITIALIZER;
  if (nvshmemx_get_uniqueid(&id) != 0) throw std::runtime_error("nvshmemx_get_uniqueid has failed");
  return nb::bytes(reinterpret_cast<const char*>(&id), sizeof(id));
}

// With all `num_pes` processes at once; much of what fails inside NVSHMEM ends the process.
void start(const nb::bytes& unique_id, int32_t pe, int32_t num_pes, int32_t ordinal) {
  nvshmemx_uniqueid_t id = NVSHMEMX_UNIQUEID_INITIALIZER;
  if (unique_id.size() != sizeof(id)) throw std::runtime_error("another process has another build of jax_ep");
  std::memcpy(&id, unique_id.data(), sizeof(id));
  const nb::gil_scoped_release no_gil;
  const OnDevice device(ordinal);
  nvshmemx_init_attr_t attributes = NVSHMEMX_INIT_ATTR_INITIALIZER;
  nvshmemx_set_attr_uniqueid_args(pe, num_pes, &id, &attributes);
  const int status = nvshmemx_init_attr(NVSHMEMX_INIT_WITH_UNIQUEID, &attributes);
  if (status != 0 || nvshmemx_init_status() < NVSHMEM_STATUS_IS_INITIALIZED) {
    throw std::runtime_error("NVSHMEM has not started (nvshmemx_init_attr: " + std::to_string(status) +
                             "); NVSHMEM_DEBUG=WARN shows why");
  }
}

void finish(int32_t ordinal) {
  const OnDevice device(ordinal);
  nvshmem_finalize();
}

NB_MODULE(_nvshmem, m) {
  m.def("unique_id", unique_id);
  m.def("start", start, nb::arg("unique_id"), nb::arg("pe"), nb::arg("num_pes"), nb::arg("ordinal"));
  m.def("finish", finish, nb::arg("ordinal"), nb::call_guard<nb::gil_scoped_release>());
  m.def("network", [] { return nb::capsule(jax_ep_network_table()); });
}

}  // namespace
}  // namespace jax_ep
