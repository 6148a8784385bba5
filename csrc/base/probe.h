// The limits of this machine, one thread at a time, for benchmarks to be measured against.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace kvarn {

// Operations a second (two for each product) of 8-bit dot products from the first-level cache, or of tiles of bf16,
// with the instructions of the named kernel table, which this CPU must be able to run.
double probe_dot(const std::string& table, double seconds);

constexpr size_t kProbeChunk = size_t{1} << 20;

// Bytes a second while reading the whole chunks of the data over and over; there must be one.
double probe_read(const uint8_t* data, size_t bytes, double seconds);

}  // namespace kvarn
