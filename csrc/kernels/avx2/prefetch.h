// Fetching weights that are used once: one token's product is as fast as memory, if memory is asked early enough.
#pragma once
#include <cstddef>

namespace kvarn::avx2 {
namespace {

constexpr size_t kCacheLine = 64;

// Asks for what a stream reads kBytesAhead after a step of its group of num_steps steps, kSteps of them to a block.
// `streams` neighbouring groups are read side by side: behind the end of one comes the group that many further on, not
// the next, which another stream reads already. Past the end of the weights that is harmless. Step by step: a large
// block asked for at once would fill the queue of the memory.
template <int kSteps, size_t kBytesAhead, class Packed>
[[gnu::always_inline]] inline void prefetch_ahead(const Packed* group, size_t num_steps, size_t step, size_t streams) {
    constexpr size_t kBytes = sizeof(Packed) / kSteps, kStepsAhead = (kBytesAhead + kBytes - 1) / kBytes;
    const size_t ahead = step + kStepsAhead, passed = ahead < num_steps ? 0 : (streams - 1) * num_steps;
    const char* from = reinterpret_cast<const char*>(group) + (ahead + passed) * kBytes;
    for (size_t at = 0; at < kBytes; at += kCacheLine) __builtin_prefetch(from + at);
}

}  // namespace
}  // namespace kvarn::avx2
