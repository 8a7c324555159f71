// Random numbers that are the same with every standard library.
#pragma once

#include <cmath>
#include <cstdint>
#include <random>

// Uniform with mean 0 and standard deviation `deviation`.
inline float random_value(std::mt19937_64& random, double deviation) {
  const double unit = static_cast<double>(random() >> 11) * 0x1p-53;
  return static_cast<float>((2 * unit - 1) * deviation * std::sqrt(3.0));
}
