// Matrix times activations, one loop for every quantised type: a packed block of 8 rows x 32 columns is unpacked
// into small integers, dotted in int32 with the int8 activations, and scaled once.
//
//   W[row][column] = d[row] * scale[half][row] * w[row][column] + dmin[row] * min[half][row]
//
// with half = column / 16. Integer parts are exact: at most 128 * 32 * 127 * 32 < 2^24.
#include "../shared/packed_bits.h"
#include "../table.h"
#include "math.h"

namespace kvarn::scalar {
namespace {

using shared::kIQ4Values;
using shared::nibble;
using shared::one_bit;
using shared::two_bits;

struct Block {
    int8_t w[kLanes][kQuantBlock];
    int scale[2][kLanes];
    int min[2][kLanes];
    float d[kLanes];
    float dmin[kLanes];
};

// Fill block.w with value(row, column).
template <class Value>
void set_weights(Block& block, Value value) {
    for (int row = 0; row < kLanes; ++row)
        for (int i = 0; i < kQuantBlock; ++i) block.w[row][i] = static_cast<int8_t>(value(row, i));
}

void set_scales(Block& block, const uint16_t* d, const uint16_t* dmin = nullptr) {
    for (int row = 0; row < kLanes; ++row) {
        block.d[row] = half_to_float(d[row]);
        block.dmin[row] = dmin ? half_to_float(dmin[row]) : 0.0f;
        for (int half = 0; half < 2; ++half) {
            block.scale[half][row] = 1;
            block.min[half][row] = dmin ? 1 : 0;
        }
    }
}

// Each unpack function reads sub-block s (0 for blocks of 32) of a packed block.
void unpack(const packed::Q4_0& in, int, Block& out) {
    set_scales(out, in.d);
    set_weights(out, [&](int row, int i) { return nibble(in.nibbles, row, i) - 8; });
}

struct IQ4_NL : packed::Q4_0 {};
void unpack(const IQ4_NL& in, int, Block& out) {
    set_scales(out, in.d);
    set_weights(out, [&](int row, int i) { return kIQ4Values[nibble(in.nibbles, row, i)]; });
}

void unpack(const packed::Q4_1& in, int, Block& out) {
    set_scales(out, in.d, in.m);
    set_weights(out, [&](int row, int i) { return nibble(in.nibbles, row, i); });
}

void unpack(const packed::Q5_0& in, int, Block& out) {
    set_scales(out, in.d);
    set_weights(out, [&](int row, int i) { return (nibble(in.nibbles, row, i) | one_bit(in.high, row, i) << 4) - 16; });
}

void unpack(const packed::Q5_1& in, int, Block& out) {
    set_scales(out, in.d, in.m);
    set_weights(out, [&](int row, int i) { return nibble(in.nibbles, row, i) | one_bit(in.high, row, i) << 4; });
}

void unpack(const packed::Q8_0& in, int, Block& out) {
    set_scales(out, in.d);
    set_weights(out, [&](int row, int i) { return in.q[i / 4][row][i % 4]; });
}

template <class Packed>
void set_k_scales(const Packed& in, int s, Block& out) {
    set_scales(out, in.d, in.dmin);
    for (int half = 0; half < 2; ++half)
        for (int row = 0; row < kLanes; ++row) {
            out.scale[half][row] = in.scale[s][row];
            out.min[half][row] = -in.min[s][row];
        }
}

void unpack(const packed::Q4_K& in, int s, Block& out) {
    set_k_scales(in, s, out);
    set_weights(out, [&](int row, int i) { return nibble(in.nibbles[s], row, i); });
}

void unpack(const packed::Q5_K& in, int s, Block& out) {
    set_k_scales(in, s, out);
    set_weights(out, [&](int row, int i) { return nibble(in.nibbles[s], row, i) | one_bit(in.high[s], row, i) << 4; });
}

void unpack(const packed::Q6_K& in, int s, Block& out) {
    set_scales(out, in.d);
    for (int half = 0; half < 2; ++half)
        for (int row = 0; row < kLanes; ++row) out.scale[half][row] = in.scale[2 * s + half][row];
    set_weights(
        out, [&](int row, int i) { return (nibble(in.nibbles[s], row, i) | two_bits(in.high[s], row, i) << 4) - 32; });
}

void unpack(const packed::Q3_K& in, int s, Block& out) {
    set_scales(out, in.d);
    for (int half = 0; half < 2; ++half)
        for (int row = 0; row < kLanes; ++row) out.scale[half][row] = in.scale[2 * s + half][row];
    set_weights(out,
                [&](int row, int i) { return (two_bits(in.low[s], row, i) | one_bit(in.high[s], row, i) << 2) - 4; });
}

void unpack(const packed::Q2_K& in, int s, Block& out) {
    set_scales(out, in.d, in.dmin);
    for (int half = 0; half < 2; ++half)
        for (int row = 0; row < kLanes; ++row) {
            out.scale[half][row] = in.scale_min[2 * s + half][row] & 15;
            out.min[half][row] = -(in.scale_min[2 * s + half][row] >> 4);
        }
    set_weights(out, [&](int row, int i) { return two_bits(in.low[s], row, i); });
}

int dot16(const int8_t* w, const int8_t* q) {
    int sum = 0;
    for (int i = 0; i < 16; ++i) sum += w[i] * q[i];
    return sum;
}

int sum16(const int8_t* q) {
    int sum = 0;
    for (int i = 0; i < 16; ++i) sum += q[i];
    return sum;
}

// Add one block of one token to the sums of its 8 rows.
void add_block(const Block& block, const int8_t* q, float xd, float acc[kLanes]) {
    const int sum0 = sum16(q), sum1 = sum16(q + 16);
    for (int row = 0; row < kLanes; ++row) {
        const int dot =
            block.scale[0][row] * dot16(block.w[row], q) + block.scale[1][row] * dot16(block.w[row] + 16, q + 16);
        const int min = block.min[0][row] * sum0 + block.min[1][row] * sum1;
        acc[row] += static_cast<float>(dot) * (block.d[row] * xd);
        acc[row] += static_cast<float>(min) * (block.dmin[row] * xd);
    }
}

void write_group(const float acc[][kLanes], int num_tokens, int group, int rows, float* out, size_t out_stride) {
    const int row_begin = group * kLanes;
    const int num_rows = rows - row_begin < kLanes ? rows - row_begin : kLanes;
    for (int t = 0; t < num_tokens; ++t)
        for (int lane = 0; lane < num_rows; ++lane) out[t * out_stride + row_begin + lane] = acc[t][lane];
}

template <class Packed, int kSubBlocks>
void matmul(const uint8_t* packed, const ActTile& tile, float* out, size_t out_stride, int rows, int group_begin,
            int group_end) noexcept {
    const int num_steps = tile.k / kQuantBlock;
    const Packed* weights = reinterpret_cast<const Packed*>(packed);
    for (int group = group_begin; group < group_end; ++group) {
        const Packed* row_blocks = weights + static_cast<size_t>(num_steps / kSubBlocks) * group;
        float acc[kTileTokens][kLanes] = {};
        for (int step = 0; step < num_steps; ++step) {
            Block block;
            unpack(row_blocks[step / kSubBlocks], step % kSubBlocks, block);
            for (int t = 0; t < tile.n; ++t) {
                const size_t at = static_cast<size_t>(step) * tile.n + t;
                add_block(block, tile.q + at * kQuantBlock, tile.scale[at], acc[t]);
            }
        }
        write_group(acc, tile.n, group, rows, out, out_stride);
    }
}

template <class Value, class ToFloat>
void matmul_floats(const uint8_t* packed, const ActTile& tile, float* out, size_t out_stride, int rows, int group_begin,
                   int group_end, ToFloat to_float) {
    const Value* weights = reinterpret_cast<const Value*>(packed);
    for (int group = group_begin; group < group_end; ++group) {
        const Value* columns = weights + static_cast<size_t>(tile.k) * kLanes * group;
        float acc[kTileTokens][kLanes] = {};
        for (int i = 0; i < tile.k; ++i) {
            float w[kLanes];
            for (int lane = 0; lane < kLanes; ++lane)
                w[lane] = to_float(columns[static_cast<size_t>(i) * kLanes + lane]);
            for (int t = 0; t < tile.n; ++t)
                for (int lane = 0; lane < kLanes; ++lane)
                    acc[t][lane] += w[lane] * tile.f[static_cast<size_t>(t) * tile.k + i];
        }
        write_group(acc, tile.n, group, rows, out, out_stride);
    }
}

void matmul_f32(const uint8_t* packed, const ActTile& tile, float* out, size_t out_stride, int rows, int group_begin,
                int group_end) noexcept {
    matmul_floats<float>(packed, tile, out, out_stride, rows, group_begin, group_end, [](float w) { return w; });
}

// kToFloat: of f16 or bf16.
template <float (*kToFloat)(uint16_t)>
void matmul_16_bits(const uint8_t* packed, const ActTile& tile, float* out, size_t out_stride, int rows,
                    int group_begin, int group_end) noexcept {
    matmul_floats<uint16_t>(packed, tile, out, out_stride, rows, group_begin, group_end, kToFloat);
}

template <class Value, class ToFloat>
void low_rank_in(const uint8_t* packed, const float* x, int columns, int rank, float scale, float* low,
                 ToFloat to_float) {
    const auto* values = reinterpret_cast<const Value*>(packed);
    for (int j = 0; j < (rank + kLanes - 1) / kLanes * kLanes; ++j) {
        const Value* row = values + static_cast<size_t>(j / kLanes) * columns * kLanes + j % kLanes;
        float sums[4] = {};
        for (int c = 0; c < columns; ++c) sums[c % 4] += to_float(row[static_cast<size_t>(c) * kLanes]) * x[c];
        low[j] = scale * ((sums[0] + sums[1]) + (sums[2] + sums[3]));
    }
}

template <class Value, class ToFloat>
void low_rank_add(const uint8_t* packed, const float* low, int rank, int rows, float* out, ToFloat to_float) {
    const auto* values = reinterpret_cast<const Value*>(packed);
    for (int row = 0; row < rows; ++row) {
        const Value* b = values + static_cast<size_t>(row / kLanes) * rank * kLanes + row % kLanes;
        float sum = 0;
        for (int j = 0; j < rank; ++j) sum += to_float(b[static_cast<size_t>(j) * kLanes]) * low[j];
        out[row] += sum;
    }
}

void low_rank_in_f16(const uint8_t* packed, const float* x, int columns, int rank, float scale, float* low) noexcept {
    low_rank_in<uint16_t>(packed, x, columns, rank, scale, low, half_to_float);
}

void low_rank_in_f32(const uint8_t* packed, const float* x, int columns, int rank, float scale, float* low) noexcept {
    low_rank_in<float>(packed, x, columns, rank, scale, low, [](float w) { return w; });
}

void low_rank_add_f16(const uint8_t* packed, const float* low, int rank, int rows, float* out) noexcept {
    low_rank_add<uint16_t>(packed, low, rank, rows, out, half_to_float);
}

void low_rank_add_f32(const uint8_t* packed, const float* low, int rank, int rows, float* out) noexcept {
    low_rank_add<float>(packed, low, rank, rows, out, [](float w) { return w; });
}

constexpr KernelTable make_matmul_kernels() {
    KernelTable t{};
    t.low_rank_in_f16 = low_rank_in_f16;
    t.low_rank_in_f32 = low_rank_in_f32;
    t.low_rank_add_f16 = low_rank_add_f16;
    t.low_rank_add_f32 = low_rank_add_f32;
    t.matmul[static_cast<int>(Type::F32)] = matmul_f32;
    t.matmul[static_cast<int>(Type::F16)] = matmul_16_bits<half_to_float>;
    t.matmul[static_cast<int>(Type::BF16)] = matmul_16_bits<bfloat_to_float>;
    t.matmul[static_cast<int>(Type::Q4_0)] = matmul<packed::Q4_0, 1>;
    t.matmul[static_cast<int>(Type::Q4_1)] = matmul<packed::Q4_1, 1>;
    t.matmul[static_cast<int>(Type::Q5_0)] = matmul<packed::Q5_0, 1>;
    t.matmul[static_cast<int>(Type::Q5_1)] = matmul<packed::Q5_1, 1>;
    t.matmul[static_cast<int>(Type::Q8_0)] = matmul<packed::Q8_0, 1>;
    t.matmul[static_cast<int>(Type::IQ4_NL)] = matmul<IQ4_NL, 1>;
    t.matmul[static_cast<int>(Type::Q2_K)] = matmul<packed::Q2_K, 8>;
    t.matmul[static_cast<int>(Type::Q3_K)] = matmul<packed::Q3_K, 8>;
    t.matmul[static_cast<int>(Type::Q4_K)] = matmul<packed::Q4_K, 8>;
    t.matmul[static_cast<int>(Type::Q5_K)] = matmul<packed::Q5_K, 8>;
    t.matmul[static_cast<int>(Type::Q6_K)] = matmul<packed::Q6_K, 8>;
    return t;
}

}  // namespace

constinit const KernelTable matmul_kernels = make_matmul_kernels();

}  // namespace kvarn::scalar
