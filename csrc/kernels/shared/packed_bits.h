// Reading single quants of packed weights: column 0 .. 31 of a (sub-)block of 8 rows. For readers that go one by one.
#pragma once
#include "../packed.h"

namespace kvarn::shared {
namespace {

constexpr int8_t kIQ4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

inline int nibble(const packed::Nibbles& nibbles, int row, int column) {
    const uint8_t pair = nibbles[column % 16 / 4][row][column % 4];
    return column < 16 ? pair & 15 : pair >> 4;
}

inline int one_bit(const packed::OneBit& bits, int row, int column) { return bits[row][column % 4] >> column / 4 & 1; }

inline int two_bits(const packed::TwoBits& bits, int row, int column) {
    return bits[column / 16][row][column % 4] >> 2 * (column % 16 / 4) & 3;
}

}  // namespace
}  // namespace kvarn::shared
