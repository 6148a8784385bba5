// The quantised blocks of one row, byte for byte as GGUF files hold them. d and m are f16 bit patterns.
#pragma once
#include <cstdint>

namespace kvarn::blocks {

struct Q4_0 {  // also IQ4_NL
    uint16_t d;
    uint8_t qs[16];  // low nibbles: columns 0..15, high nibbles: columns 16..31
};

struct Q4_1 {
    uint16_t d, m;
    uint8_t qs[16];
};

struct Q5_0 {
    uint16_t d;
    uint8_t qh[4];  // bit i: fifth bit of column i
    uint8_t qs[16];
};

struct Q5_1 {
    uint16_t d, m;
    uint8_t qh[4];
    uint8_t qs[16];
};

struct Q8_0 {
    uint16_t d;
    int8_t qs[32];
};

// Super-blocks of 256 columns. s = sub-block of 32, l = column within it, n = half of 128.
struct Q2_K {
    uint8_t scales[16];  // per 16 columns: low nibble scale, high nibble min
    uint8_t qs[64];      // qs[32 n + l] bits 2j..2j+1: sub-block 4n + j
    uint16_t d, dmin;
};

struct Q3_K {
    uint8_t hmask[32];   // hmask[l] bit s: third bit of column l of sub-block s
    uint8_t qs[64];      // as Q2_K
    uint8_t scales[12];  // 16 scales of 6 bits
    uint16_t d;
};

struct Q4_K {
    uint16_t d, dmin;
    uint8_t scales[12];  // 8 scales and 8 mins of 6 bits
    uint8_t qs[128];     // qs[32 i + l]: low nibble sub-block 2i, high nibble sub-block 2i + 1
};

struct Q5_K {
    uint16_t d, dmin;
    uint8_t scales[12];
    uint8_t qh[32];  // qh[l] bit s: fifth bit of column l of sub-block s
    uint8_t qs[128];
};

struct Q6_K {
    uint8_t ql[128];    // ql[64 n + 32 i + l]: low nibble sub-block 4n + i, high nibble sub-block 4n + 2 + i
    uint8_t qh[64];     // qh[32 n + l] bits 2j..2j+1: upper bits of sub-block 4n + j
    int8_t scales[16];  // per 16 columns
    uint16_t d;
};

static_assert(sizeof(Q4_0) == 18 && sizeof(Q4_1) == 20 && sizeof(Q5_0) == 22 && sizeof(Q5_1) == 24);
static_assert(sizeof(Q8_0) == 34 && sizeof(Q2_K) == 84 && sizeof(Q3_K) == 110);
static_assert(sizeof(Q4_K) == 144 && sizeof(Q5_K) == 176 && sizeof(Q6_K) == 210);

}  // namespace kvarn::blocks
