// Blocks of 32 values by plain rounding: the largest magnitude, or smallest and largest value, set the scale.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "blocks.h"
#include "encode.h"
#include "half.h"
#include "wide.h"

namespace kvarn::encode {
namespace {

using wide::Floats;
using wide::Ints;
using wide::kWide;

constexpr int kBlock = 32, kQuarters = kBlock / kWide;

struct Values {
    Floats part[kQuarters];
    float low, high;
};

Values load(const float* x) {
    Values values;
    std::memcpy(values.part, x, sizeof values.part);
    Floats low = values.part[0], high = values.part[0];
    for (int j = 1; j < kQuarters; ++j) {
        low = wide::least(low, values.part[j]);
        high = wide::most(high, values.part[j]);
    }
    values.low = low[0], values.high = high[0];
    for (int i = 1; i < kWide; ++i) {
        values.low = std::min(values.low, low[i]);
        values.high = std::max(values.high, high[i]);
    }
    if (values.low == 0) values.low = *std::find(x, x + kBlock, 0.0f);  // of zeros of either sign the first
    return values;
}

// The value of largest magnitude with its sign; of equal ones the first.
float peak(const float* x, const Values& values) {
    if (values.high != -values.low) return values.high > -values.low ? values.high : values.low;
    if (values.high == 0) return 0;  // whatever the signs of the zeros
    return *std::find_if(x, x + kBlock, [&](float value) { return std::fabs(value) == values.high; });
}

float inverse(float scale) { return scale != 0 ? 1.0f / scale : 0.0f; }

void store_bytes(Ints quants, uint8_t* out) {
    for (int i = 0; i < kWide; ++i) out[i] = static_cast<uint8_t>(quants[i]);
}

// Whole numbers 0 .. max_quant: (x - low) * inverse + half, cut off.
void round_up(const Values& values, float low, float inverse, float half, float max_quant, uint8_t* quants) {
    for (int j = 0; j < kQuarters; ++j) {
        const Floats scaled = (values.part[j] - low) * inverse + half;
        store_bytes(wide::cut(wide::least(scaled, wide::all(max_quant))), quants + kWide * j);
    }
}

void pack_nibbles(const uint8_t* quants, uint8_t* out) {
    for (int i = 0; i < kBlock / 2; ++i)
        out[i] = static_cast<uint8_t>((quants[i] & 15) | (quants[i + kBlock / 2] & 15) << 4);
}

void pack_fifth_bits(const uint8_t* quants, uint8_t* out) {
    for (int byte = 0; byte < 4; ++byte) {
        int bits = 0;
        for (int i = 0; i < 8; ++i) bits |= (quants[8 * byte + i] >> 4 & 1) << i;
        out[byte] = static_cast<uint8_t>(bits);
    }
}

void encode_block(const float* x, blocks::Q4_0& out) {
    const Values values = load(x);
    const float d = peak(x, values) / -8;
    uint8_t quants[kBlock];
    round_up(values, 0, inverse(d), 8.5f, 15, quants);
    out.d = float_to_half(d);
    pack_nibbles(quants, out.qs);
}

void encode_block(const float* x, blocks::Q5_0& out) {
    const Values values = load(x);
    const float d = peak(x, values) / -16;
    uint8_t quants[kBlock];
    round_up(values, 0, inverse(d), 16.5f, 31, quants);
    out.d = float_to_half(d);
    pack_fifth_bits(quants, out.qh);
    pack_nibbles(quants, out.qs);
}

void encode_block(const float* x, blocks::Q4_1& out) {
    const Values values = load(x);
    const float d = (values.high - values.low) / 15;
    uint8_t quants[kBlock];
    round_up(values, values.low, inverse(d), 0.5f, 15, quants);
    out.d = float_to_half(d);
    out.m = float_to_half(values.low);
    pack_nibbles(quants, out.qs);
}

void encode_block(const float* x, blocks::Q5_1& out) {
    const Values values = load(x);
    const float d = (values.high - values.low) / 31;
    uint8_t quants[kBlock];
    round_up(values, values.low, inverse(d), 0.5f, 31, quants);
    out.d = float_to_half(d);
    out.m = float_to_half(values.low);
    pack_fifth_bits(quants, out.qh);
    pack_nibbles(quants, out.qs);
}

void encode_block(const float* x, blocks::Q8_0& out) {
    const Values values = load(x);
    const float d = std::fabs(std::max(values.high, -values.low)) / 127;
    const float scale = inverse(d);
    out.d = float_to_half(d);
    for (int j = 0; j < kQuarters; ++j) {
        const Floats scaled = values.part[j] * scale;
        const Floats whole = wide::floats(wide::cut(scaled)), rest = scaled - whole;
        const Floats one = wide::all(1), none = Floats{};  // ties go away from zero
        const Floats up = wide::choose(rest >= 0.5f, one, none), down = wide::choose(rest <= -0.5f, one, none);
        store_bytes(wide::cut(whole + up - down), reinterpret_cast<uint8_t*>(out.qs) + kWide * j);
    }
}

template <class Block>
void encode_blocks(const float* x, int columns, uint8_t* out) {
    for (int at = 0; at < columns; at += kBlock, out += sizeof(Block)) {
        Block block;
        encode_block(x + at, block);
        std::memcpy(out, &block, sizeof block);
    }
}

}  // namespace

void blocks_row(Type type, const float* x, int columns, uint8_t* out) noexcept {
    switch (type) {
        case Type::Q4_0: return encode_blocks<blocks::Q4_0>(x, columns, out);
        case Type::Q4_1: return encode_blocks<blocks::Q4_1>(x, columns, out);
        case Type::Q5_0: return encode_blocks<blocks::Q5_0>(x, columns, out);
        case Type::Q5_1: return encode_blocks<blocks::Q5_1>(x, columns, out);
        default: return encode_blocks<blocks::Q8_0>(x, columns, out);
    }
}

}  // namespace kvarn::encode
