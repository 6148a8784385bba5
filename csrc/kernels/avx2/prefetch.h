// Fetching weights that are used once: one token's product is as fast as memory, if memory is asked early enough.
#pragma once
#include <cstddef>

namespace kvarn::avx2 {
namespace {

constexpr size_t kCacheLine = 64;

// Asks for what lies ahead of one of the kSteps parts of a block in its stream; past the end of the weights that is
// harmless. Part by part: a large block asked for at once would fill the queue of the memory.
template <int kSteps, size_t kBytesAhead = 512, class Packed>
inline void prefetch_ahead(const Packed& block, int step) {
    constexpr size_t kBytes = sizeof(Packed) / kSteps;
    const auto* ahead = reinterpret_cast<const char*>(&block) + kBytesAhead + kBytes * step;
    for (size_t at = 0; at < kBytes; at += kCacheLine) __builtin_prefetch(ahead + at);
}

}  // namespace
}  // namespace kvarn::avx2
