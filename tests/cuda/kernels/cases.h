// A program of cases: `program case seed...` prints a line for each seed: "ok", what was wrong, or
// the emulator's error.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "device.h"

struct Case {
  const char* name;
  void (*run)();
};

inline void expect(bool right, const std::string& what) {
  if (!right) throw std::runtime_error("wrong: " + what);
}

inline void expect_equal(double value, double expected, const std::string& what) {
  expect(value == expected,
         what + " is " + std::to_string(value) + ", not " + std::to_string(expected));
}

inline void expect_near(double value, double expected, double tolerance, const std::string& what) {
  expect(std::fabs(value - expected) <= tolerance,
         what + " is " + std::to_string(value) + ", not " + std::to_string(expected));
}

// The same numbers everywhere, in [-1, 1).
class Numbers {
 public:
  float next() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<float>(static_cast<int32_t>(state_ >> 32)) * 0x1p-31f;
  }

 private:
  uint64_t state_ = 1;
};

inline int run_cases(int count, char** arguments, const std::vector<Case>& cases) {
  bool races = false;
  for (int n = 2; n < count; ++n) races |= !strcmp(arguments[n], "races");
  for (const Case& one : cases) {
    if (count < 2 || strcmp(one.name, arguments[1]) != 0) continue;
    for (int n = 2; n < count; ++n) {
      if (!strcmp(arguments[n], "races")) continue;
      tk::emulator::options().seed = strtoull(arguments[n], nullptr, 10);
      tk::emulator::options().races = races;
      std::string result = "ok";
      try {
        one.run();
      } catch (const std::runtime_error& error) {
        result = error.what();
      }
      for (char& c : result) {
        if (c == '\n') c = '|';
      }
      printf("%s\n", result.c_str());
    }
    return 0;
  }
  fprintf(stderr, "no such case\n");
  return 1;
}
