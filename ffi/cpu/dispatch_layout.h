#pragma once

#include "ffi/dispatch_layout.h"

namespace jax_ep {

void dispatch_layout_on_host(const DispatchLayoutArgs& args);

}  // namespace jax_ep
