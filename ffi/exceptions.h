// Catches the exceptions of handlers: an exception must not cross XLA's C interface. This file does not depend on XLA.
// ffi/handler_error.h makes XLA's errors of them.
#pragma once

#include <exception>
#include <optional>
#include <stdexcept>
#include <string>

namespace jax_ep {

// The state of a group or of a device does not allow the call.
struct PreconditionError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Caught {
  enum class Kind { kPrecondition, kInvalidArgument, kInternal } kind;
  std::string message;
};

// Runs `body`. Returns the exception that it throws, whatever its type is.
template <typename Body>
std::optional<Caught> catch_all(Body body) noexcept {
  try {
    try {
      body();
      return std::nullopt;
    } catch (const PreconditionError& error) {
      return Caught{Caught::Kind::kPrecondition, error.what()};
    } catch (const std::invalid_argument& error) {
      return Caught{Caught::Kind::kInvalidArgument, error.what()};
    } catch (const std::exception& error) {
      return Caught{Caught::Kind::kInternal, error.what()};
    } catch (...) {
      return Caught{Caught::Kind::kInternal, "an exception of an unknown type"};
    }
  } catch (...) {  // there is no memory for the message; a text as short as this needs none
    return Caught{Caught::Kind::kInternal, "no memory"};
  }
}

}  // namespace jax_ep
