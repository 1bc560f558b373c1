#include "ffi/exceptions.h"

#include <new>

#include "check.h"

using namespace jax_ep;

template <typename Exception>
void expect_caught(const Exception& exception, Caught::Kind kind, const std::string& message) {
  const std::optional<Caught> caught = catch_all([&] { throw exception; });
  EXPECT_EQ(caught.has_value(), true);
  if (!caught) return;
  EXPECT_EQ(static_cast<int>(caught->kind), static_cast<int>(kind));
  EXPECT_EQ(caught->message, message);
}

int main() {
  EXPECT_EQ(catch_all([] {}).has_value(), false);
  expect_caught(PreconditionError("closed"), Caught::Kind::kPrecondition, "closed");
  expect_caught(std::invalid_argument("top_k"), Caught::Kind::kInvalidArgument, "top_k");
  expect_caught(std::runtime_error("CUDA"), Caught::Kind::kInternal, "CUDA");
  expect_caught(std::out_of_range("map::at"), Caught::Kind::kInternal, "map::at");
  expect_caught(std::bad_alloc(), Caught::Kind::kInternal, std::bad_alloc().what());
  expect_caught(7, Caught::Kind::kInternal, "an exception of an unknown type");
  return check::exit_status();
}
