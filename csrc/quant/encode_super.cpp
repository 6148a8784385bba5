// The K-quants: super-blocks of 256 values, whose sub-blocks have small integer scales.
#include <cstring>

#include "blocks.h"
#include "encode.h"
#include "super_plain.h"
#include "super_weighted.h"

namespace kvarn::encode {
namespace {

using super::Chosen;
using super::Parts;
using wide::Floats;
using wide::Ints;

constexpr int kSuper = super::kValues;
constexpr fit::AffineSearch kWeightedAffine4{15, -0.9f, 0.05f, 36}, kWeightedAffine5{31, -0.9f, 0.05f, 36},
    kWeightedAffine2{3, -0.9f, 0.05f, 36};

// Two bits of each value: byte 32 n + l holds column l of the four sub-blocks of half n.
void pack_two_bits(const uint8_t* q, int shift, uint8_t* out) {
    for (int n = 0; n < 2; ++n)
        for (int l = 0; l < 32; ++l) {
            int bits = 0;
            for (int j = 0; j < 4; ++j) bits |= (q[128 * n + 32 * j + l] >> shift & 3) << 2 * j;
            out[32 * n + l] = static_cast<uint8_t>(bits);
        }
}

// One bit of each value: bit s of byte l is column l of sub-block s.
void pack_bit_planes(const uint8_t* q, int shift, uint8_t* out) {
    for (int l = 0; l < 32; ++l) {
        int bits = 0;
        for (int s = 0; s < 8; ++s) bits |= (q[32 * s + l] >> shift & 1) << s;
        out[l] = static_cast<uint8_t>(bits);
    }
}

// Low nibbles: `run` bytes hold the values at i in their low bits and those `run` further in their high bits.
void pack_nibbles(const uint8_t* q, int run, uint8_t* out) {
    for (int first = 0; first < kSuper; first += 2 * run)
        for (int i = 0; i < run; ++i)
            out[first / 2 + i] = static_cast<uint8_t>((q[first + i] & 15) | (q[first + run + i] & 15) << 4);
}

// Eight scales and eight minimums of six bits.
void pack_scales_and_mins(const Chosen& chosen, uint8_t* out) {
    for (int s = 0; s < 4; ++s) {
        const int scale = chosen.scale[4 + s], minimum = chosen.minimum[4 + s];
        out[s] = static_cast<uint8_t>(chosen.scale[s] | scale >> 4 << 6);
        out[4 + s] = static_cast<uint8_t>(chosen.minimum[s] | minimum >> 4 << 6);
        out[8 + s] = static_cast<uint8_t>((scale & 15) | (minimum & 15) << 4);
    }
}

// llama.cpp's weight of an error where nothing is known: the value's size above the sub-block's mean size.
Parts<32> weighed_by_size(const float* x) {
    Parts<32> parts(x);
    Floats squares{};
    for (int i = 0; i < 32; ++i) squares += parts.x[0][i] * parts.x[0][i];
    Floats mean = squares / 32.0f;
    for (int lane = 0; lane < wide::kWide; ++lane) mean.set(lane, std::sqrt(mean[lane]));
    for (int i = 0; i < 32; ++i) parts.w[0][i] = mean + wide::magnitude(parts.x[0][i]);
    return parts;
}

Chosen choose_affine32(const float* x, const float* importance, const fit::AffineSearch& plain,
                       const fit::AffineSearch& weighted) {
    Chosen chosen;
    if (importance == nullptr) {
        super::encode_affine(weighed_by_size(x), plain, 63, chosen);
    } else {
        Parts<32> parts(x);
        parts.weigh(x, importance, 2);
        super::encode_affine_weighted(parts, weighted, 63, chosen);
    }
    return chosen;
}

void encode_block(const float* x, const float* importance, blocks::Q4_K& out) {
    const Chosen chosen = choose_affine32(x, importance, {15, -1, 0.1f, 20}, kWeightedAffine4);
    out.d = chosen.d, out.dmin = chosen.dmin;
    pack_scales_and_mins(chosen, out.scales);
    pack_nibbles(chosen.q, 32, out.qs);
}

void encode_block(const float* x, const float* importance, blocks::Q5_K& out) {
    const Chosen chosen = choose_affine32(x, importance, {31, -0.5f, 0.1f, 15}, kWeightedAffine5);
    out.d = chosen.d, out.dmin = chosen.dmin;
    pack_scales_and_mins(chosen, out.scales);
    pack_bit_planes(chosen.q, 4, out.qh);
    pack_nibbles(chosen.q, 32, out.qs);
}

void encode_block(const float* x, const float* importance, blocks::Q2_K& out) {
    Chosen chosen;
    Parts<16> parts(x);
    if (importance == nullptr) {
        for (int g = 0; g < 2; ++g)
            for (int i = 0; i < 16; ++i) parts.w[g][i] = wide::magnitude(parts.x[g][i]);
        super::encode_affine(parts, {3, -0.5f, 0.1f, 15, true}, 15, chosen);
    } else {
        parts.weigh(x, importance, 1);
        super::encode_affine_weighted(parts, kWeightedAffine2, 15, chosen);
    }
    out.d = chosen.d, out.dmin = chosen.dmin;
    for (int h = 0; h < 16; ++h) out.scales[h] = static_cast<uint8_t>(chosen.scale[h] | chosen.minimum[h] << 4);
    pack_two_bits(chosen.q, 0, out.qs);
}

template <int N>
void weigh_by_square(Parts<N>& parts) {
    for (int g = 0; g < Parts<N>::kGroups; ++g)
        for (int i = 0; i < N; ++i) parts.w[g][i] = parts.x[g][i] * parts.x[g][i];
}

void encode_block(const float* x, const float* importance, blocks::Q6_K& out) {
    Chosen chosen;
    Parts<16> parts(x);
    if (importance == nullptr) {
        weigh_by_square(parts);
        const fit::Symmetric fits[] = {fit::fit_symmetric(parts.x[0], parts.w[0], 32),
                                       fit::fit_symmetric(parts.x[1], parts.w[1], 32)};
        super::encode_symmetric(parts, fits, 32, 128, chosen);
    } else {
        parts.weigh(x, importance, 0);
        super::encode_symmetric_weighted(parts, 32, 128, chosen);
    }
    out.d = chosen.d;
    for (int h = 0; h < 16; ++h) out.scales[h] = static_cast<int8_t>(chosen.scale[h]);
    pack_nibbles(chosen.q, 64, out.ql);
    pack_two_bits(chosen.q, 4, out.qh);
}

// Q3_K's own fit without importance: rounding, then five passes that move single quants where it pays.
fit::Symmetric fit_by_single_moves(const Floats (&x)[16], const Floats (&w)[16], float middle) {
    const Floats largest = fit::peak(x);
    const Floats grid = -middle / largest;
    Floats q[16], sum_lx{}, sum_l2{};
    for (int i = 0; i < 16; ++i) {
        q[i] = wide::held(wide::nearest(grid * x[i]), -middle, middle - 1);
        sum_lx += w[i] * x[i] * q[i];
        sum_l2 += w[i] * q[i] * q[i];
    }
    for (int pass = 0; pass < 5; ++pass)
        for (int i = 0; i < 16; ++i) {
            Floats lx = sum_lx - w[i] * x[i] * q[i], l2 = sum_l2 - w[i] * q[i] * q[i];
            const Floats moved = wide::held(wide::nearest(x[i] * l2 / lx), -middle, middle - 1);
            const Ints may_move = (lx > 0.0f) & (moved != q[i]);
            lx += w[i] * x[i] * moved;
            l2 += w[i] * moved * moved;
            const Ints pays = may_move & (l2 > 0.0f) & (lx * lx * sum_l2 > sum_lx * sum_lx * l2);
            q[i] = wide::choose(pays, moved, q[i]);
            sum_lx = wide::choose(pays, lx, sum_lx);
            sum_l2 = wide::choose(pays, l2, sum_l2);
        }
    const Ints is_zero = wide::magnitude(largest) < fit::kSmallestPeak;
    return {wide::choose(is_zero, Floats{}, sum_lx / sum_l2), wide::choose(is_zero, Floats{}, grid)};
}

// Sixteen scales of six bits, counted from -32.
void pack_scales_q3(const Chosen& chosen, uint8_t* out) {
    std::memset(out, 0, 12);
    for (int h = 0; h < 16; ++h) {
        const int scale = chosen.scale[h] + 32;
        out[h % 8] |= static_cast<uint8_t>((scale & 15) << (h < 8 ? 0 : 4));
        out[8 + h % 4] |= static_cast<uint8_t>(scale >> 4 << 2 * (h / 4));
    }
}

void encode_block(const float* x, const float* importance, blocks::Q3_K& out) {
    Chosen chosen;
    Parts<16> parts(x);
    if (importance == nullptr) {
        weigh_by_square(parts);
        const fit::Symmetric fits[] = {fit_by_single_moves(parts.x[0], parts.w[0], 4),
                                       fit_by_single_moves(parts.x[1], parts.w[1], 4)};
        super::encode_symmetric(parts, fits, 4, 32, chosen);
    } else {
        parts.weigh(x, importance, 2);
        super::encode_symmetric_weighted(parts, 4, 32, chosen);
    }
    out.d = chosen.d;
    pack_scales_q3(chosen, out.scales);
    pack_two_bits(chosen.q, 0, out.qs);
    pack_bit_planes(chosen.q, 2, out.hmask);
}

template <class Block>
void encode_blocks(const float* x, int columns, const float* importance, uint8_t* out) {
    for (int at = 0; at < columns; at += kSuper, out += sizeof(Block)) {
        Block block;
        encode_block(x + at, importance == nullptr ? nullptr : importance + at, block);
        std::memcpy(out, &block, sizeof block);
    }
}

}  // namespace

void super_row(Type type, const float* x, int columns, const float* importance, uint8_t* out) noexcept {
    switch (type) {
        case Type::Q2_K: return encode_blocks<blocks::Q2_K>(x, columns, importance, out);
        case Type::Q3_K: return encode_blocks<blocks::Q3_K>(x, columns, importance, out);
        case Type::Q4_K: return encode_blocks<blocks::Q4_K>(x, columns, importance, out);
        case Type::Q5_K: return encode_blocks<blocks::Q5_K>(x, columns, importance, out);
        default: return encode_blocks<blocks::Q6_K>(x, columns, importance, out);
    }
}

}  // namespace kvarn::encode
