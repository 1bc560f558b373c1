// Exceptions of handlers, as XLA's errors.
#pragma once

#include <optional>
#include <string>
#include <utility>

#include "ffi/exceptions.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep {

// Runs a handler's body, and returns its error. Turns every exception into an error.
template <typename Body>
xla::ffi::Error without_exceptions(const char* op, Body body) {
  xla::ffi::Error error;
  const std::optional<Caught> caught = catch_all([&] { error = body(); });
  if (!caught) return error;
  std::string what = std::string(op) + ": " + caught->message;
  switch (caught->kind) {
    case Caught::Kind::kPrecondition:
      return xla::ffi::Error(xla::ffi::ErrorCode::kFailedPrecondition, std::move(what));
    case Caught::Kind::kInvalidArgument:
      return xla::ffi::Error::InvalidArgument(std::move(what));
    default:
      return xla::ffi::Error::Internal(std::move(what));
  }
}

}  // namespace jax_ep
