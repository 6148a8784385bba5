// The packed weight blocks as structs: one block of 8 rows, described in quant/pack.h. Plain data, no functions.
#pragma once
#include <cstdint>

namespace kvarn::packed {

constexpr int kRows = 8;

// Four words of four nibble pairs a row: low bits are column 4j + c, high bits column 16 + 4j + c.
using Nibbles = uint8_t[4][kRows][4];
// Bit j of [row][c] belongs to column 4j + c.
using OneBit = uint8_t[kRows][4];
// Bits 2j..2j+1 of [i][row][c] belong to column 16i + 4j + c.
using TwoBits = uint8_t[2][kRows][4];

struct Q4_0 {  // also IQ4_NL
    uint16_t d[kRows];
    Nibbles nibbles;
};

struct Q4_1 {
    uint16_t d[kRows];
    uint16_t m[kRows];
    Nibbles nibbles;
};

struct Q5_0 {
    uint16_t d[kRows];
    Nibbles nibbles;
    OneBit high;
};

struct Q5_1 {
    uint16_t d[kRows];
    uint16_t m[kRows];
    Nibbles nibbles;
    OneBit high;
};

struct Q8_0 {
    uint16_t d[kRows];
    int8_t q[8][kRows][4];
};

struct Q4_K {
    uint16_t d[kRows];
    uint16_t dmin[kRows];
    uint8_t scale[8][kRows];
    uint8_t min[8][kRows];
    Nibbles nibbles[8];
};

struct Q5_K {
    uint16_t d[kRows];
    uint16_t dmin[kRows];
    uint8_t scale[8][kRows];
    uint8_t min[8][kRows];
    Nibbles nibbles[8];
    OneBit high[8];
};

struct Q6_K {
    uint16_t d[kRows];
    int8_t scale[16][kRows];
    Nibbles nibbles[8];
    TwoBits high[8];
};

struct Q3_K {
    uint16_t d[kRows];
    int8_t scale[16][kRows];
    TwoBits low[8];
    OneBit high[8];
};

struct Q2_K {
    uint16_t d[kRows];
    uint16_t dmin[kRows];
    uint8_t scale_min[16][kRows];
    TwoBits low[8];
};

static_assert(sizeof(Q4_0) == 144 && sizeof(Q4_1) == 160 && sizeof(Q5_0) == 176 && sizeof(Q5_1) == 192);
static_assert(sizeof(Q8_0) == 272 && sizeof(Q4_K) == 1184 && sizeof(Q5_K) == 1440);
static_assert(sizeof(Q6_K) == 1680 && sizeof(Q3_K) == 912 && sizeof(Q2_K) == 672);

}  // namespace kvarn::packed
