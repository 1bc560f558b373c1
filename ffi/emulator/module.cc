#include "ffi/emulator/module.h"

#include <nanobind/stl/string.h>

#include "ffi/cuda/network.h"
#include "ffi/emulator/runtime.h"

namespace emulator {

void bind(nanobind::module_& module) {
  namespace nb = nanobind;
  module.def("set_adversary", set_adversary, nb::arg("seed"), nb::arg("settings") = "",
             nb::call_guard<nb::gil_scoped_release>());
  module.def("set_patience", set_patience, nb::arg("seconds"), nb::call_guard<nb::gil_scoped_release>());
  module.def("set_num_sms", set_num_sms, nb::arg("num_sms"), nb::call_guard<nb::gil_scoped_release>());
  module.def(
      "set_device_report",
      [](int major, size_t shared_bytes, bool can_access_peer, bool has_native_atomics) {
        set_device_report({major, shared_bytes, can_access_peer, has_native_atomics});
      },
      nb::kw_only(), nb::arg("major") = DeviceReport().major, nb::arg("shared_bytes") = DeviceReport().shared_bytes,
      nb::arg("can_access_peer") = true, nb::arg("has_native_atomics") = true,
      nb::call_guard<nb::gil_scoped_release>());
  module.def("network", [] { return nb::capsule(jax_ep_network_table()); });
  run_in_background();
}

}  // namespace emulator
