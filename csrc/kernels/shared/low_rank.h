// The two products of a low-rank pair for one row. A column of eight rows fills a vector.
#pragma once
#include "lanes.h"

namespace kvarn::shared {
namespace {

// Pairs of many adapters come from memory, in pieces too short for the processor to see what comes next.
constexpr int kPairAhead = 4096;  // bytes: what comes in the time of one access, and the next piece of a row

inline void prefetch_pair(const void* at) { __builtin_prefetch(static_cast<const char*>(at) + kPairAhead); }

// Two groups of the rank at a time share what is read of x.
template <class L, class Value, int kGroups>
void low_rank_in_groups(const Value* values, const float* x, int columns, float scale, float* low) {
    using Floats = typename L::Floats;
    const size_t group = static_cast<size_t>(columns) * kLanes;
    Floats sums[kGroups][4];
    for (int g = 0; g < kGroups; ++g)
        for (int i = 0; i < 4; ++i) sums[g][i] = L::set(0);
    int c = 0;
    for (; c + 4 <= columns; c += 4) {
        for (int g = 0; g < kGroups; ++g) prefetch_pair(values + g * group + static_cast<size_t>(c) * kLanes);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            const Floats value = L::set(x[c + i]);
            const Value* at = values + static_cast<size_t>(c + i) * kLanes;
            for (int g = 0; g < kGroups; ++g) sums[g][i] = L::fma(L::load(at + g * group), value, sums[g][i]);
        }
    }
    for (int i = 0; c < columns; ++c, ++i)
        for (int g = 0; g < kGroups; ++g)
            sums[g][i] =
                L::fma(L::load(values + g * group + static_cast<size_t>(c) * kLanes), L::set(x[c]), sums[g][i]);
    for (int g = 0; g < kGroups; ++g) {
        const Floats total = L::add(L::add(sums[g][0], sums[g][1]), L::add(sums[g][2], sums[g][3]));
        L::store(low + g * kLanes, L::mul(L::set(scale), total));
    }
}

template <class L, class Value>
void low_rank_in(const uint8_t* packed, const float* x, int columns, int rank, float scale, float* low) noexcept {
    static_assert(L::kWidth == kLanes);
    const auto* values = reinterpret_cast<const Value*>(packed);
    const size_t group = static_cast<size_t>(columns) * kLanes;
    int g = 0, groups = (rank + kLanes - 1) / kLanes;
    for (; g + 2 <= groups; g += 2)
        low_rank_in_groups<L, Value, 2>(values + g * group, x, columns, scale, low + g * kLanes);
    if (g < groups) low_rank_in_groups<L, Value, 1>(values + g * group, x, columns, scale, low + g * kLanes);
}

template <class L, class Value>
typename L::Floats low_rank_sum(const Value* b, const float* low, int rank) {
    typename L::Floats sum = L::set(0);
    for (int j = 0; j < rank; ++j) sum = L::fma(L::load(b + static_cast<size_t>(j) * kLanes), L::set(low[j]), sum);
    return sum;
}

template <class L, class Value>
void low_rank_add(const uint8_t* packed, const float* low, int rank, int rows, float* out) noexcept {
    const auto* values = reinterpret_cast<const Value*>(packed);
    const size_t group = static_cast<size_t>(rank) * kLanes;
    int g = 0;
    for (; (g + 4) * kLanes <= rows; g += 4) {
        const Value* b = values + g * group;
        typename L::Floats sums[4] = {L::set(0), L::set(0), L::set(0), L::set(0)};
        for (size_t i = 0; i < 4 * group; i += 64 / sizeof(Value)) prefetch_pair(b + i);
        for (int j = 0; j < rank; ++j) {
            const typename L::Floats value = L::set(low[j]);
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i)
                sums[i] = L::fma(L::load(b + i * group + static_cast<size_t>(j) * kLanes), value, sums[i]);
        }
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            float* to = out + (g + i) * kLanes;
            L::store(to, L::add(L::load(to), sums[i]));
        }
    }
    for (; g * kLanes < rows; ++g) {
        float sums[kLanes];
        L::store(sums, low_rank_sum<L>(values + g * group, low, rank));
        for (int lane = 0; lane < kLanes && g * kLanes + lane < rows; ++lane) out[g * kLanes + lane] += sums[lane];
    }
}

}  // namespace
}  // namespace kvarn::shared
