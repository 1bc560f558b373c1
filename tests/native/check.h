// A minimal test framework: EXPECT_EQ reports where two values differ, and main() returns exit_status().
#pragma once

#include <iostream>
#include <vector>

namespace check {

inline int failures = 0;

inline int exit_status() { return failures == 0 ? 0 : 1; }

template <typename T>
void print(const T& value) {
  std::cerr << value;
}

template <typename T>
void print(const std::vector<T>& values) {
  for (const T& value : values) std::cerr << value << " ";
}

template <typename Got, typename Expected>
void expect_eq(const Got& got, const Expected& expected, const char* expression, const char* file, int line) {
  if (got == expected) return;
  ++failures;
  std::cerr << file << ":" << line << ": " << expression << " is ";
  print(got);
  std::cerr << ", expected ";
  print(expected);
  std::cerr << "\n";
}

}  // namespace check

#define EXPECT_EQ(expression, expected) check::expect_eq(expression, expected, #expression, __FILE__, __LINE__)
