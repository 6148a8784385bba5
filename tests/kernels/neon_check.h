// What the parts of neon_check share: the promises broken so far, random numbers, comparison bit for bit.
#pragma once
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "kernels/table.h"

namespace kvarn::check {

using Floats = std::vector<float>;
using Bytes = std::vector<uint8_t>;

// Parent: a table whose products have the same bits, or null.
void check_products(const KernelTable& table, const KernelTable* parent);
void check_rows(const KernelTable& table);
void check_low_rank(const KernelTable& table);
void check_attention(const KernelTable& table);

constexpr double kF32 = 2e-6;  // tolerance family f32 of table.h
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN(), kInf = std::numeric_limits<float>::infinity();
inline const std::vector<int> kLengths = {1, 2, 3, 4, 5, 7, 8, 9, 31, 33, 64, 576, 1537};

extern int failures;
void expect(bool holds, const std::string& promise);

inline bool same_bits(const Floats& a, const Floats& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

struct Random {
    uint64_t state;
    uint32_t bits() {
        state = state * 6364136223846793005u + 1442695040888963407u;
        return static_cast<uint32_t>(state >> 32);
    }
    float uniform() { return static_cast<float>(bits() >> 8) * 0x1p-24f; }
    float normal() {  // nearly
        float sum = -6;
        for (int i = 0; i < 12; ++i) sum += uniform();
        return sum;
    }
    Floats normals(int n, float scale = 1) {
        Floats x(static_cast<size_t>(n));
        for (float& value : x) value = normal() * scale;
        return x;
    }
};

}  // namespace kvarn::check
