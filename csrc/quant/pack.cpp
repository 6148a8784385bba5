// Packing at load: moves bits between the file's blocks and the packed ones of pack.h, never touches a value.
//
// Columns travel four at a time, as the bytes of a 32-bit word, so each step below is a few word operations.
#include "pack.h"

#include <array>
#include <cstring>
#include <stdexcept>
#include <string>

#include "blocks.h"

namespace kvarn {
namespace {

using Word = uint32_t;  // four neighbouring columns of one row, a byte each

Word load(const void* from) {
    Word word;
    std::memcpy(&word, from, sizeof word);
    return word;
}

void store(Word word, void* to) { std::memcpy(to, &word, sizeof word); }

constexpr std::array<Word, 256> make_spread() {
    std::array<Word, 256> table{};
    for (Word bits = 0; bits < 256; ++bits)
        for (Word i = 0; i < 8; ++i) table[bits] |= (bits >> i & 1u) << (8 * (i % 4) + i / 4);
    return table;
}
constexpr std::array<Word, 256> kSpread = make_spread();  // bit 4j + c -> byte c, bit j

// Nibbles whose low half is columns 0..15 already, high half columns 16..31.
void pack_nibbles(const uint8_t qs[16], int row, packed::Nibbles& out) {
    for (int j = 0; j < 4; ++j) store(load(qs + 4 * j), out[j][row]);
}

// 32 bytes that hold sub-block `a` in their low nibbles and sub-block `b` in their high ones.
void pack_nibble_pair(const uint8_t qs[32], int row, packed::Nibbles& a, packed::Nibbles& b) {
    for (int j = 0; j < 4; ++j) {
        const Word first = load(qs + 4 * j);
        const Word second = load(qs + 16 + 4 * j);
        store((first & 0x0f0f0f0fu) | (second & 0x0f0f0f0fu) << 4, a[j][row]);
        store((first >> 4 & 0x0f0f0f0fu) | (second & 0xf0f0f0f0u), b[j][row]);
    }
}

// Fifth bits of one block of 32: bit i of the word is column i.
void pack_fifth_bits(const uint8_t qh[4], int row, packed::OneBit& out) {
    const Word bits = kSpread[qh[0]] | kSpread[qh[1]] << 2 | kSpread[qh[2]] << 4 | kSpread[qh[3]] << 6;
    store(bits, out[row]);
}

// Single bits of a super-block: bit s of byte l is column l of sub-block s.
void pack_bit_planes(const uint8_t bits[32], int row, packed::OneBit* out) {
    Word words[8];
    for (int j = 0; j < 8; ++j) words[j] = load(bits + 4 * j);
    for (int s = 0; s < 8; ++s) {
        Word plane = 0;
        for (int j = 0; j < 8; ++j) plane |= (words[j] >> s & 0x01010101u) << j;
        store(plane, out[s][row]);
    }
}

// Two-bit fields of a super-block: bits 2q..2q+1 of byte 32 n + l are column l of sub-block 4n + q.
void pack_two_bits(const uint8_t bits[64], int row, packed::TwoBits* out) {
    for (int quarter = 0; quarter < 4; ++quarter) {  // 16 bytes: half n = quarter / 2, columns 16 (quarter % 2) ..
        Word words[4];
        for (int j = 0; j < 4; ++j) words[j] = load(bits + 16 * quarter + 4 * j);
        for (int q = 0; q < 4; ++q) {
            Word fields = 0;
            for (int j = 0; j < 4; ++j) fields |= (words[j] >> 2 * q & 0x03030303u) << 2 * j;
            store(fields, out[4 * (quarter / 2) + q][quarter % 2][row]);
        }
    }
}

// The 6-bit scales and mins of Q4_K and Q5_K: 0..3 in the low bits of bytes 0..3 and 4..7, 4..7 in bytes 8..11
// (scale low nibble, min high nibble) with their top two bits in the top bits of bytes 0..7.
template <class Packed>
void pack_scales_and_mins(const uint8_t scales[12], int row, Packed& out) {
    for (int s = 0; s < 4; ++s) {
        out.scale[s][row] = scales[s] & 63;
        out.min[s][row] = scales[4 + s] & 63;
        out.scale[4 + s][row] = static_cast<uint8_t>((scales[8 + s] & 15) | (scales[s] >> 6) << 4);
        out.min[4 + s][row] = static_cast<uint8_t>(scales[8 + s] >> 4 | (scales[4 + s] >> 6) << 4);
    }
}

void pack_block(const blocks::Q4_0& in, int row, packed::Q4_0& out) {
    out.d[row] = in.d;
    pack_nibbles(in.qs, row, out.nibbles);
}

void pack_block(const blocks::Q4_1& in, int row, packed::Q4_1& out) {
    out.d[row] = in.d;
    out.m[row] = in.m;
    pack_nibbles(in.qs, row, out.nibbles);
}

void pack_block(const blocks::Q5_0& in, int row, packed::Q5_0& out) {
    out.d[row] = in.d;
    pack_nibbles(in.qs, row, out.nibbles);
    pack_fifth_bits(in.qh, row, out.high);
}

void pack_block(const blocks::Q5_1& in, int row, packed::Q5_1& out) {
    out.d[row] = in.d;
    out.m[row] = in.m;
    pack_nibbles(in.qs, row, out.nibbles);
    pack_fifth_bits(in.qh, row, out.high);
}

void pack_block(const blocks::Q8_0& in, int row, packed::Q8_0& out) {
    out.d[row] = in.d;
    for (int j = 0; j < 8; ++j) store(load(in.qs + 4 * j), out.q[j][row]);
}

void pack_block(const blocks::Q4_K& in, int row, packed::Q4_K& out) {
    out.d[row] = in.d;
    out.dmin[row] = in.dmin;
    pack_scales_and_mins(in.scales, row, out);
    for (int i = 0; i < 4; ++i) pack_nibble_pair(in.qs + 32 * i, row, out.nibbles[2 * i], out.nibbles[2 * i + 1]);
}

void pack_block(const blocks::Q5_K& in, int row, packed::Q5_K& out) {
    out.d[row] = in.d;
    out.dmin[row] = in.dmin;
    pack_scales_and_mins(in.scales, row, out);
    for (int i = 0; i < 4; ++i) pack_nibble_pair(in.qs + 32 * i, row, out.nibbles[2 * i], out.nibbles[2 * i + 1]);
    pack_bit_planes(in.qh, row, out.high);
}

void pack_block(const blocks::Q6_K& in, int row, packed::Q6_K& out) {
    out.d[row] = in.d;
    for (int h = 0; h < 16; ++h) out.scale[h][row] = in.scales[h];
    for (int i = 0; i < 4; ++i) {  // 4n + i % 2 and two further
        const int s = 4 * (i / 2) + i % 2;
        pack_nibble_pair(in.ql + 32 * i, row, out.nibbles[s], out.nibbles[s + 2]);
    }
    pack_two_bits(in.qh, row, out.high);
}

// Scale h: low nibble in byte h % 8 (low half for h < 8), upper two bits in byte 8 + h % 4, biased by 32.
int8_t q3_scale(const uint8_t scales[12], int h) {
    const int low = h < 8 ? scales[h] & 15 : scales[h - 8] >> 4;
    const int high = scales[8 + h % 4] >> 2 * (h / 4) & 3;
    return static_cast<int8_t>((low | high << 4) - 32);
}

void pack_block(const blocks::Q3_K& in, int row, packed::Q3_K& out) {
    out.d[row] = in.d;
    for (int h = 0; h < 16; ++h) out.scale[h][row] = q3_scale(in.scales, h);
    pack_two_bits(in.qs, row, out.low);
    pack_bit_planes(in.hmask, row, out.high);
}

void pack_block(const blocks::Q2_K& in, int row, packed::Q2_K& out) {
    out.d[row] = in.d;
    out.dmin[row] = in.dmin;
    for (int h = 0; h < 16; ++h) out.scale_min[h][row] = in.scales[h];
    pack_two_bits(in.qs, row, out.low);
}

// One group: rows [row_begin, row_end) of the source become rows 0.. of the group.
template <class Block, class Packed>
void pack_group(const uint8_t* source, int num_blocks, int row_begin, int row_end, uint8_t* out) {
    const size_t row_bytes = sizeof(Block) * num_blocks;
    for (int b = 0; b < num_blocks; ++b) {
        Packed& packed = reinterpret_cast<Packed*>(out)[b];
        for (int row = row_begin; row < row_end; ++row) {
            Block block;  // a copy, since blocks of a file need not be aligned
            std::memcpy(&block, source + row_bytes * row + sizeof(Block) * b, sizeof block);
            pack_block(block, row - row_begin, packed);
        }
    }
}

template <class Value>
void pack_float_group(const uint8_t* source, int columns, int row_begin, int row_end, uint8_t* out) {
    for (int row = row_begin; row < row_end; ++row) {
        const uint8_t* from = source + sizeof(Value) * columns * row;
        uint8_t* to = out + sizeof(Value) * (row - row_begin);
        for (int column = 0; column < columns; ++column)
            std::memcpy(to + sizeof(Value) * kLanes * column, from + sizeof(Value) * column, sizeof(Value));
    }
}

// `count` blocks or, for the float types, columns.
void pack_one_group(Type type, const uint8_t* source, int count, int row_begin, int row_end, uint8_t* out) {
    switch (type) {
        case Type::F32: return pack_float_group<uint32_t>(source, count, row_begin, row_end, out);
        case Type::F16:
        case Type::BF16: return pack_float_group<uint16_t>(source, count, row_begin, row_end, out);
        case Type::Q4_0:
        case Type::IQ4_NL: return pack_group<blocks::Q4_0, packed::Q4_0>(source, count, row_begin, row_end, out);
        case Type::Q4_1: return pack_group<blocks::Q4_1, packed::Q4_1>(source, count, row_begin, row_end, out);
        case Type::Q5_0: return pack_group<blocks::Q5_0, packed::Q5_0>(source, count, row_begin, row_end, out);
        case Type::Q5_1: return pack_group<blocks::Q5_1, packed::Q5_1>(source, count, row_begin, row_end, out);
        case Type::Q8_0: return pack_group<blocks::Q8_0, packed::Q8_0>(source, count, row_begin, row_end, out);
        case Type::Q2_K: return pack_group<blocks::Q2_K, packed::Q2_K>(source, count, row_begin, row_end, out);
        case Type::Q3_K: return pack_group<blocks::Q3_K, packed::Q3_K>(source, count, row_begin, row_end, out);
        case Type::Q4_K: return pack_group<blocks::Q4_K, packed::Q4_K>(source, count, row_begin, row_end, out);
        case Type::Q5_K: return pack_group<blocks::Q5_K, packed::Q5_K>(source, count, row_begin, row_end, out);
        case Type::Q6_K: return pack_group<blocks::Q6_K, packed::Q6_K>(source, count, row_begin, row_end, out);
    }
}

template <class Block, class Packed>
constexpr BlockShape shape_of(int values) {
    return {values, static_cast<int>(sizeof(Block)), static_cast<int>(sizeof(Packed))};
}

}  // namespace

bool is_quantized(Type type) { return type != Type::F32 && type != Type::F16 && type != Type::BF16; }

BlockShape block_shape(Type type) {
    switch (type) {
        case Type::F32: return {1, 4, 4 * kLanes};
        case Type::F16:
        case Type::BF16: return {1, 2, 2 * kLanes};
        case Type::Q4_0:
        case Type::IQ4_NL: return shape_of<blocks::Q4_0, packed::Q4_0>(32);
        case Type::Q4_1: return shape_of<blocks::Q4_1, packed::Q4_1>(32);
        case Type::Q5_0: return shape_of<blocks::Q5_0, packed::Q5_0>(32);
        case Type::Q5_1: return shape_of<blocks::Q5_1, packed::Q5_1>(32);
        case Type::Q8_0: return shape_of<blocks::Q8_0, packed::Q8_0>(32);
        case Type::Q2_K: return shape_of<blocks::Q2_K, packed::Q2_K>(256);
        case Type::Q3_K: return shape_of<blocks::Q3_K, packed::Q3_K>(256);
        case Type::Q4_K: return shape_of<blocks::Q4_K, packed::Q4_K>(256);
        case Type::Q5_K: return shape_of<blocks::Q5_K, packed::Q5_K>(256);
        case Type::Q6_K: return shape_of<blocks::Q6_K, packed::Q6_K>(256);
    }
    throw std::invalid_argument("tensor type " + std::to_string(static_cast<int>(type)) +
                                " is unknown; known are F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, "
                                "Q4_K, Q5_K, Q6_K and IQ4_NL");
}

size_t packed_group_bytes(Type type, int columns) {
    const BlockShape shape = block_shape(type);
    return static_cast<size_t>(columns / shape.values) * shape.packed_bytes;
}

void pack_groups(Type type, const uint8_t* source, int rows, int columns, int group_begin, int group_end,
                 uint8_t* packed) noexcept {
    const int num_blocks = columns / block_shape(type).values;
    const size_t group_bytes = packed_group_bytes(type, columns);
    for (int group = group_begin; group < group_end; ++group) {
        const int row_begin = group * kLanes;
        const int row_end = row_begin + kLanes < rows ? row_begin + kLanes : rows;
        uint8_t* out = packed + group_bytes * group;
        if (row_end - row_begin < kLanes) std::memset(out, 0, group_bytes);
        pack_one_group(type, source, num_blocks, row_begin, row_end, out);
    }
}

}  // namespace kvarn
