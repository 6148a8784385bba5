// What the templates of this folder need of an instruction set: a struct Lanes, written in the folder of the set.
//
//   Floats, kWidth                       a vector of floats and how many there are
//   set, load, store, load_first         load and store take Whole or First; values may be float, f16 (uint16_t) or
//   int8 add, sub, mul, div, min, max         min and max pass a NaN of their second operand on fma(a, b, c), fnma(a,
//   b, c)          a * b + c, c - a * b, rounded once negate, absolute, copy_sign          by bits choose_greater(a, b,
//   yes, no)        a > b ? yes : no Whole numbers, nearest_whole,        round to nearest even; times_power_of_two
//   multiplies by 2 to that power, right times_power_of_two                   down to subnormals sum_lanes, max_lanes
//   in the order of the set, the same for every call
//
// Everything in these headers has internal linkage: each folder compiles them anew with its own flags, and no symbol
// of them meets the linker. They include nothing but ../table.h and each other.
#pragma once
#include "../table.h"

namespace kvarn::shared {
namespace {

// How much of a vector is meant: all of it, or the first lanes at the end of a row. Lanes beyond are loaded as zeros
// and not stored.
struct Whole {};
struct First {
    int count;
};

// Register tiles of attention for sets that have room for 16 vectors of 8 floats: few blocks and vectors when there are
// many heads. Quantised keys also keep their scales in registers.
struct SmallRegisterTiles {
    static constexpr int kMaxHeads = 4;
    static constexpr bool kLoadsWholeTile = false;
    static constexpr int key_blocks(int heads, bool is_quantized) {
        return heads > 2 ? 1 : heads == 2 || is_quantized ? 2 : 4;
    }
    static constexpr int value_vectors(int heads) { return heads > 2 ? 2 : heads == 2 ? 4 : 8; }
};

// Call body(i, Whole) for each kWidth elements, body(i, First) for what is left.
template <int kWidth, class Body>
inline void for_vectors(int n, Body body) {
    int i = 0;
    for (; i + kWidth <= n; i += kWidth) body(i, Whole{});
    if (i < n) body(i, First{n - i});
}

}  // namespace
}  // namespace kvarn::shared
