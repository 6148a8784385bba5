// Philox 4x32-10 (Salmon et al., SC 2011): random numbers that depend on a key and a counter, and on nothing else.
#pragma once
#include <array>
#include <cstdint>

namespace kvarn {

inline std::array<uint32_t, 4> philox(uint64_t key, std::array<uint32_t, 4> counter) {
    constexpr uint64_t kMultiply0 = 0xD2511F53, kMultiply1 = 0xCD9E8D57;
    uint32_t key0 = static_cast<uint32_t>(key), key1 = static_cast<uint32_t>(key >> 32);
    for (int round = 0; round < 10; ++round) {
        uint64_t product0 = kMultiply0 * counter[0], product1 = kMultiply1 * counter[2];
        counter = {static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key0, static_cast<uint32_t>(product1),
                   static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key1, static_cast<uint32_t>(product0)};
        key0 += 0x9E3779B9;
        key1 += 0xBB67AE85;
    }
    return counter;
}

// Uniform in [0, 1) with 53 random bits.
inline double uniform(uint64_t seed, uint32_t position, uint32_t choice, uint32_t purpose, uint32_t draw = 0) {
    auto words = philox(seed, {position, choice, purpose, draw});
    return (static_cast<double>(words[0] >> 5) * 67108864.0 + static_cast<double>(words[1] >> 6)) / 9007199254740992.0;
}

}  // namespace kvarn
